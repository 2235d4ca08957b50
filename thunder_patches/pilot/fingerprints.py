"""What is remembered of a request: hashes that can be compared, no text.

Two forms of one content, a string and a list with one text part, tool arguments as a string and as
an object, are the same content: hosts render them alike. The order of keys is kept, since templates
write it into the prompt.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from thunder_patches.pilot.volatile import mask

Message = Mapping[str, Any]
PIECE = 96  # longest piece of a text that gets a hash of its own
PIECES = 512  # pieces kept for each message: bounds the index file
MASKED = 65_536  # characters looked through for dates and ids
THINKING = re.compile(r"<think>(.*?)</think>\s*|\[THINK\](.*?)\[/THINK\]\s*", re.DOTALL)
SYSTEM_ROLES = ("system", "developer")


def digest(*parts: str | bytes) -> str:
    """16 hex digits over length-framed parts."""
    framed: list[bytes] = []
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        framed += (len(data).to_bytes(8, "little"), data)
    return blake2b(b"".join(framed), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class MessagePrint:
    """One message as hashes, each blind to something: which of them agree tells what changed."""

    role: str
    hash: str  # all of it, in canonical form
    text: str  # the text without thinking
    squeezed: str  # the text without white space, composed Unicode
    masked: str  # the text with dates, ids and numbers masked
    thinking: str  # "" where there is none
    calls: str  # tool calls, keys sorted, without ids
    calls_ordered: str  # tool calls, keys as they came
    ids: str  # tool call ids
    images: str
    form: str  # of the content, and of tool arguments: what canonical form does not tell apart
    chars: int
    pieces: tuple[int, ...]  # a 32-bit hash of each line, long lines cut: where two texts part

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MessagePrint:
        return cls(**{**data, "pieces": tuple(data["pieces"])})


@dataclass(frozen=True, slots=True)
class ToolPrint:
    name: str
    hash: str  # keys as they came
    sorted: str  # keys sorted


@dataclass(frozen=True, slots=True)
class RequestPrint:
    """What one request looked like. ``variables`` are template variables, hashed by name."""

    salt: str
    model: str
    adapter: str
    hashes: tuple[str, ...]
    tools: tuple[ToolPrint, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


def request_print(
    messages: Sequence[Message],
    *,
    model: str,
    adapter: str = "",
    salt: str = "",
    tools: Any = None,
    variables: Mapping[str, Any] | None = None,
) -> RequestPrint:
    """Hashes of a request. ``salt`` separates tenants; it is kept only as a digest."""
    return RequestPrint(
        salt=digest("salt", salt),
        model=model,
        adapter=adapter,
        hashes=tuple(message_hash(message) for message in messages),
        tools=tuple(tool_print(tool) for tool in tools or ()),
        variables={k: digest(_json(v)) for k, v in sorted((variables or {}).items())},
    )


def message_hash(message: Message) -> str:
    """Content hash of one message, 16 hex digits."""
    text, thinking, images = split_content(message)
    parts = [str(message.get("role")), text, thinking, str(len(images)), *images]
    if len(message) > 2:
        parts += [_json(tool_calls(message)), str(message.get("name") or "")]
        parts.append(_json(call_ids(message)))
    else:
        parts += ["[]", "", "[]"]
    return digest(*parts)


def system_prompt_hash(messages: Sequence[Message]) -> str | None:
    """16 hex digits over the leading system messages; None where there are none."""
    leading: list[str] = []
    for message in messages:
        if message.get("role") not in SYSTEM_ROLES:
            break
        leading.append(message_text(message))
    return digest("system", *leading) if leading else None


def describe(message: Message) -> MessagePrint:
    """All hashes of one message. Slower than ``message_hash``: done once for each new message."""
    text, thinking, images = split_content(message)
    calls = tool_calls(message)
    return MessagePrint(
        role=str(message.get("role")),
        hash=message_hash(message),
        text=digest(text),
        squeezed=digest("".join(unicodedata.normalize("NFC", text).split())),
        masked=digest(mask(text)) if len(text) <= MASKED else "",
        thinking=digest(thinking.strip()) if thinking.strip() else "",
        calls=digest(_json(calls, sort=True)) if calls else "",
        calls_ordered=digest(_json(calls)) if calls else "",
        ids=digest(_json(call_ids(message))),
        images=digest(*images) if images else "",
        form=_form(message),
        chars=len(text),
        pieces=tuple(hash for _, hash in pieces(text)),
    )


def _form(message: Message) -> str:
    content = message.get("content")
    form = "a string" if isinstance(content, str) else "nothing" if content is None else "parts"
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    if any(isinstance(f.get("arguments"), str) for f in functions if isinstance(f, Mapping)):
        form += " with arguments as text"
    elif functions:
        form += " with arguments as objects"
    return form


def tool_print(tool: Any) -> ToolPrint:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    name = str(function.get("name", "")) if isinstance(function, Mapping) else ""
    return ToolPrint(name, digest(_json(tool)), digest(_json(tool, sort=True)))


def split_content(message: Message) -> tuple[str, str, list[str]]:
    """A message's text, its thinking, and a digest of each image or other part."""
    text = message_text(message)
    images: list[str] = []
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        images = [
            digest(_json(part))
            for part in content
            if not isinstance(part, str)
            and not (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        ]
    thinking = ""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(name), str):
            thinking = message[name]
            break
    if "</think>" in text or "[/THINK]" in text:
        inside = THINKING.findall(text)
        thinking = thinking or "\n".join("".join(groups) for groups in inside)
        text = THINKING.sub("", text)
    return text, thinking, images


def message_text(message: Message) -> str:
    """A message's content as one string, parts joined as hosts join them."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    texts = [p if isinstance(p, str) else p.get("text") for p in content if p is not None]
    return "".join(t for t in texts if isinstance(t, str))


def tool_calls(message: Message) -> list[dict[str, Any]]:
    """Name and arguments of each tool call, arguments as an object where they are JSON."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # A model wrote it: where it is no JSON, the string is kept.
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        found.append({"name": function.get("name"), "arguments": arguments})
    return found


def call_ids(message: Message) -> list[str]:
    """Ids that link tool calls and their results."""
    ids = [str(call.get("id") or "") for call in message.get("tool_calls") or () if call]
    ids.append(str(message.get("tool_call_id") or ""))
    return [i for i in ids if i]


def pieces(text: str) -> list[tuple[int, int]]:
    """(offset, 32-bit hash) of each line of a text, long lines cut; at most ``PIECES`` of them."""
    found: list[tuple[int, int]] = []
    offset = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), PIECE):
            part = line[start : start + PIECE]
            data = part.encode("utf-8", "surrogatepass")
            found.append((offset, int.from_bytes(blake2b(data, digest_size=4).digest(), "little")))
            offset += len(part)
            if len(found) == PIECES:
                return found
    return found


def _json(value: Any, sort: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=sort, default=str, separators=(",", ":"))
