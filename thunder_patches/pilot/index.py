"""A bounded memory of recent prompts: what they looked like, where their messages ended.

Looking up costs one dictionary access for each message of the request, however many prompts are
remembered. Each salt has its own part; nothing is ever compared across salts.

On disk it is one file of JSON lines, replaced as a whole, mode 0600. It holds hashes, lengths and
tool names, and message text only with ``keep_text``. Text and tokens of recent prompts stay in
memory, within a budget, so that a difference can be shown to the character and the token.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thunder_patches.pilot.fingerprints import (
    SYSTEM_ROLES,
    MessagePrint,
    RequestPrint,
    ToolPrint,
    describe,
    digest,
    message_text,
)

FORMAT = 1
ALMOST = 0.5  # share of a first message's lines that makes two prompts worth comparing
LOOKED_AT = 64  # pieces of a first message compared to find a prompt that is almost the same


@dataclass(slots=True)
class Entry:
    """One remembered prompt."""

    number: int
    request: RequestPrint
    messages: tuple[MessagePrint, ...]
    ends: tuple[int | None, ...]  # token position by which messages 0..i are complete
    total: int  # tokens of the prompt
    kept: int  # tokens from the start for which state was kept
    time: float  # seconds since 1970
    answer: MessagePrint | None = None
    answer_tokens: int = 0
    miss: dict[str, Any] | None = None  # why it was not reused further, from ``Miss.to_json``
    # Memory only: prompt and answer, int64; dropped when the budget is spent.
    tokens: np.ndarray | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self.request)
        data["tools"] = [asdict(tool) for tool in self.request.tools]
        return {
            "request": data,
            "messages": [message.hash for message in self.messages],
            "ends": self.ends,
            "total": self.total,
            "kept": self.kept,
            "time": self.time,
            "answer": self.answer.to_json() if self.answer else None,
            "answer_tokens": self.answer_tokens,
            "miss": self.miss,
        }


@dataclass(frozen=True, slots=True)
class Nearest:
    """The remembered prompt that a request resembles most.

    ``shared``: leading messages that are the same. ``similarity``: share of the first message's
    pieces found there, 1.0 where messages are shared; used for explaining only. ``opening``: only the
    user's first message is the same.
    """

    entry: Entry
    shared: int
    similarity: float
    same_model: bool
    opening: bool = False


class Index:
    """Recent prompts of all salts. Safe to use from several threads.

    Args:
        path: the file, or None to keep nothing on disk. Its folder must exist.
        entries: prompts remembered for each salt.
        file_bytes: most bytes that the file may have; the oldest prompts are left out.
        memory_bytes: most bytes of text and tokens held in memory.
        keep_text: write message text to the file too. Private: off unless the user asks.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        entries: int = 256,
        salts: int = 64,
        file_bytes: int = 4 << 20,
        memory_bytes: int = 48 << 20,
        keep_text: bool = False,
    ) -> None:
        self._path = path
        self._limit = entries
        self._salts = salts
        self._file_bytes = file_bytes
        self._memory_bytes = memory_bytes
        self._keep_text = keep_text
        self._lock = threading.RLock()
        self._parts: OrderedDict[str, _Part] = OrderedDict()
        self._memory = 0
        self._with_tokens: deque[Entry] = deque()
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._next = 0
        self.problem = ""
        if path is not None:
            self._load(path)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(part.entries) for part in self._parts.values())

    def find(self, request: RequestPrint, first: MessagePrint | None = None) -> Nearest | None:
        """The prompt of the same salt that shares most with this request, or None.

        The same model comes before any other. ``first`` is the print of the request's first
        message; with it, a prompt that shares nothing but resembles it is found too.
        """
        with self._lock:
            part = self._parts.get(request.salt)
            return part.find(request, first) if part else None

    def record(
        self,
        request: RequestPrint,
        messages: Sequence[Mapping[str, Any]],
        tokens: Sequence[int] | np.ndarray,
        ends: Sequence[int | None],
        *,
        kept: int | None = None,
        miss: dict[str, Any] | None = None,
        now: float | None = None,
    ) -> int:
        """Remember a prompt; returns its number, for ``answered``.

        Args:
            tokens: the prompt, [N] ids; kept in memory only.
            ends: one position a message, as in ``Boundaries.ends``.
            kept: leading tokens whose state the cache holds; N when left out.
            miss: ``Miss.to_json(text=True)``, for showing it later; its texts reach the file only
                with ``keep_text``.
        """
        with self._lock:
            part = self._parts.get(request.salt)
            if part is None:
                part = self._parts[request.salt] = _Part()
                while len(self._parts) > self._salts:
                    self._parts.popitem(last=False)
            self._parts.move_to_end(request.salt)
            prints = tuple(
                part.known.get(hash) or describe(message)
                for hash, message in zip(request.hashes, messages, strict=True)
            )
            entry = Entry(
                self._next,
                request,
                prints,
                tuple(ends),
                len(tokens),
                len(tokens) if kept is None else kept,
                time.time() if now is None else now,
                miss=miss,
                tokens=np.array(tokens, dtype=np.int64),
            )
            self._next += 1
            part.add(entry)
            while len(part.entries) > self._limit:
                part.drop(next(iter(part.entries)))
            for hash, message in zip(request.hashes, messages, strict=True):
                self._remember_text(request.salt, hash, message_text(message))
            assert entry.tokens is not None
            self._memory += entry.tokens.nbytes
            self._with_tokens.append(entry)
            self._shrink()
            return entry.number

    def answered(
        self,
        salt: str,
        number: int,
        answer: Mapping[str, Any],
        tokens: Sequence[int] | np.ndarray,
        kept: int | None = None,
    ) -> None:
        """Add what the model answered: ``tokens`` are its [A] ids, ``salt`` as in the request print."""
        with self._lock:
            part = self._parts.get(salt)
            entry = part.entries.get(number) if part else None
            if entry is None:
                return
            entry.answer = describe(answer)
            entry.answer_tokens = len(tokens)
            entry.kept = entry.total + len(tokens) if kept is None else kept
            self._remember_text(salt, entry.answer.hash, message_text(answer))
            if entry.tokens is not None:
                more = np.asarray(tokens, dtype=np.int64)
                entry.tokens = np.concatenate([entry.tokens[: entry.total], more])
                self._memory += more.nbytes
            self._shrink()

    def text(self, salt: str, hash: str) -> str | None:
        """Text of a remembered message, if it is still in memory."""
        with self._lock:
            return self._texts.get((salt, hash))

    def recent(self, salt: str, count: int = 20) -> list[Entry]:
        """The last prompts of one salt, newest first."""
        with self._lock:
            part = self._parts.get(salt)
            return list(reversed(part.entries.values()))[:count] if part else []

    def latest(self, count: int = 20) -> list[Entry]:
        """The last prompts of all salts, newest first: for the owner of the machine alone."""
        with self._lock:
            found = [entry for part in self._parts.values() for entry in part.entries.values()]
        return sorted(found, key=lambda entry: (entry.time, entry.number), reverse=True)[:count]

    def clear(self) -> None:
        with self._lock:
            self._parts.clear()
            self._texts.clear()
            self._with_tokens.clear()
            self._memory = 0

    # --- file

    def save(self) -> bool:
        """Write the file; False, with ``problem`` set, where that failed. Never raises OSError."""
        if self._path is None:
            return False
        lines = self._lines()
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".pilot-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:  # mkstemp: mode 0600
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            self.problem = f"could not write the prompt index: {error}"
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            return False
        return True

    def _lines(self) -> list[str]:
        """Newest prompts first, each message once, until the file is full; oldest are left out."""
        with self._lock:
            lines = [_line({"format": FORMAT})]
            room = self._file_bytes - len(lines[0])
            written: set[tuple[str, str]] = set()
            newest = sorted(
                (
                    (e.time, e.number, salt, e)
                    for salt, p in self._parts.items()
                    for e in p.entries.values()
                ),
                key=lambda item: item[:2],
                reverse=True,
            )
            for _, _, salt, entry in newest:
                added = []
                for message in entry.messages:
                    if (salt, message.hash) in written:
                        continue
                    written.add((salt, message.hash))
                    data = {"salt": salt, "message": message.to_json()}
                    text = self._texts.get((salt, message.hash)) if self._keep_text else None
                    if text is not None:
                        data["text"] = text
                    added.append(_line(data))
                known = entry.to_json()
                if known["miss"] and not self._keep_text:
                    private = ("before", "now")
                    known["miss"] = {k: v for k, v in known["miss"].items() if k not in private}
                added.append(_line({"salt": salt, "entry": known}))
                size = sum(len(line.encode()) for line in added)
                if size > room:
                    break
                room -= size
                lines += added
            return lines

    def _load(self, path: Path) -> None:
        """Read the file. Anything unexpected in it costs what is remembered, nothing else."""
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:
            return
        except OSError as error:
            self.problem = f"could not read the prompt index: {error}"
            return
        entries: list[tuple[str, Entry]] = []
        prints: dict[tuple[str, str], MessagePrint] = {}
        try:
            with os.fdopen(handle, encoding="utf-8") as file:
                if json.loads(file.readline(1000)).get("format") != FORMAT:
                    raise ValueError("another format")
                for line in file.read(self._file_bytes + 1).splitlines():
                    data = json.loads(line)
                    if "message" in data:
                        message = MessagePrint.from_json(data["message"])
                        prints[data["salt"], message.hash] = message
                        if isinstance(data.get("text"), str):
                            self._remember_text(data["salt"], message.hash, data["text"])
                    else:
                        entries.append((data["salt"], _entry(data["entry"], data["salt"], prints)))
        except Exception as error:  # a torn or foreign file: keep what was read before it
            self.problem = f"the prompt index is not readable from some point on: {error!r}"[:300]
        for salt, entry in sorted(entries, key=lambda item: item[1].time):
            entry.number = self._next
            self._next += 1
            self._parts.setdefault(salt, _Part()).add(entry)
        for part in self._parts.values():
            while len(part.entries) > self._limit:
                part.drop(next(iter(part.entries)))

    # --- memory

    def _remember_text(self, salt: str, hash: str, text: str) -> None:
        key = (salt, hash)
        if key not in self._texts:
            self._texts[key] = text
            self._memory += len(text)
        self._texts.move_to_end(key)

    def _shrink(self) -> None:
        while self._memory > self._memory_bytes and (self._with_tokens or self._texts):
            if self._with_tokens:
                entry = self._with_tokens.popleft()
                self._memory -= entry.tokens.nbytes if entry.tokens is not None else 0
                entry.tokens = None
            if self._memory > self._memory_bytes and self._texts:
                _, text = self._texts.popitem(last=False)
                self._memory -= len(text)


class _Part:
    """The prompts of one salt."""

    def __init__(self) -> None:
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.known: dict[str, MessagePrint] = {}  # message hash -> its print
        self._uses: dict[str, int] = {}
        self._chains: dict[tuple[str, str], list[int]] = {}  # (model, chain) -> numbers
        self._traits: dict[int | str, list[int]] = {}  # what makes prompts alike -> numbers

    def add(self, entry: Entry) -> None:
        self.entries[entry.number] = entry
        for message in entry.messages:
            self.known[message.hash] = message
            self._uses[message.hash] = self._uses.get(message.hash, 0) + 1
        for key in self._keys(entry):
            self._chains.setdefault(key, []).append(entry.number)
        for trait in self._traits_of(entry):
            self._traits.setdefault(trait, []).append(entry.number)

    def drop(self, number: int) -> None:
        entry = self.entries.pop(number)
        for message in entry.messages:
            self._uses[message.hash] -= 1
            if not self._uses[message.hash]:
                del self._uses[message.hash], self.known[message.hash]
        for key in self._keys(entry):
            _forget(self._chains, key, number)
        for trait in self._traits_of(entry):
            _forget(self._traits, trait, number)

    def find(self, request: RequestPrint, first: MessagePrint | None) -> Nearest | None:
        chain = list(_chain(request.hashes))
        best: Nearest | None = None
        for model in (_model(request), ""):
            for shared in range(len(chain), 0, -1):
                numbers = self._chains.get((model, chain[shared - 1]))
                if numbers:
                    entry = self._pick(numbers, request)
                    same = _model(entry.request) == _model(request)
                    # Another model's prompt only explains when it shares more than our own does.
                    if best is None or shared > best.shared:
                        best = Nearest(entry, shared, 1.0, same)
                    break
            if best is not None and best.same_model:
                return best
        if best is not None or first is None:
            return best
        return self._similar(request, first)

    def _pick(self, numbers: list[int], request: RequestPrint) -> Entry:
        """The newest, with a preference for the same tools and template variables."""
        newest = [self.entries[n] for n in reversed(numbers[-8:])]
        for entry in newest:
            if (
                entry.request.tools == request.tools
                and entry.request.variables == request.variables
            ):
                return entry
        return newest[0]

    def _similar(self, request: RequestPrint, first: MessagePrint) -> Nearest | None:
        pieces = set(first.pieces[:LOOKED_AT])
        votes: dict[int, int] = {}
        for piece in pieces:
            for number in self._traits.get(piece, ())[-8:]:
                votes[number] = votes.get(number, 0) + 1
        number, share, opening = -1, 0.0, False
        if votes:
            number = max(votes, key=lambda n: (votes[n], n))
            share = votes[number] / len(pieces)
        if share < ALMOST:
            # The same but for white space or ids; another system prompt before the same question.
            for trait in _looks(first, request.hashes[1:2]):
                if self._traits.get(trait):
                    number, share = self._traits[trait][-1], 1.0
                    opening = trait.startswith("opening ")
                    break
        if number < 0:
            return None
        entry = self.entries[number]
        return Nearest(entry, 0, share, _model(entry.request) == _model(request), opening)

    @staticmethod
    def _traits_of(entry: Entry) -> set[int | str]:
        if not entry.messages:
            return set()
        first = entry.messages[0]
        return {*first.pieces[:LOOKED_AT], *_looks(first, entry.request.hashes[1:2])}

    @staticmethod
    def _keys(entry: Entry) -> list[tuple[str, str]]:
        chain = list(_chain(entry.request.hashes))
        return [(model, link) for model in (_model(entry.request), "") for link in chain]


def _model(request: RequestPrint) -> str:
    return digest("model", request.model, request.adapter)


def _chain(hashes: Sequence[str]) -> list[str]:
    links, link = [], ""
    for hash in hashes:
        link = digest(link, hash)
        links.append(link)
    return links


def _looks(first: MessagePrint, second: Sequence[str]) -> list[str]:
    looks = ["squeezed " + first.squeezed]
    if first.masked:
        looks.append("masked " + first.masked)
    opening = second[0] if second and first.role in SYSTEM_ROLES else first.hash
    return [*looks, "opening " + opening]


def _forget(where: dict[Any, list[int]], key: Any, number: int) -> None:
    numbers = where.get(key)
    if numbers and number in numbers:
        numbers.remove(number)
        if not numbers:
            del where[key]


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


def _entry(data: dict[str, Any], salt: str, prints: dict[tuple[str, str], MessagePrint]) -> Entry:
    request = data["request"]
    return Entry(
        0,
        RequestPrint(
            salt=salt,
            model=request["model"],
            adapter=request["adapter"],
            hashes=tuple(request["hashes"]),
            tools=tuple(ToolPrint(**tool) for tool in request["tools"]),
            variables=dict(request["variables"]),
        ),
        tuple(prints[salt, hash] for hash in data["messages"]),
        tuple(data["ends"]),
        int(data["total"]),
        int(data["kept"]),
        float(data["time"]),
        MessagePrint.from_json(data["answer"]) if data["answer"] else None,
        int(data["answer_tokens"]),
        dict(data["miss"]) if data["miss"] else None,
    )
