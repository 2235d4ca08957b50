"""ContextPilot for a host: what each response says of reuse, and the opt-in forms of a request."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..config import default_config_file
from ..patching.guard import is_on, shield
from ..pilot.boundaries import Boundaries, unknown
from ..pilot.explain import Match, Miss, explain
from ..pilot.fingerprints import RequestPrint, digest, request_print
from ..pilot.index import Index
from ..pilot.report import report
from ..pilot.stabilize import Rules, load_rules, stabilize
from ..pilot.ushape import Reinforcer
from .counting import Outcome
from .quantised import AnySequence
from .runtime import runtime

_SAVE_AFTER = 5.0
"""Seconds after which a change of the index reaches its file."""

Parts = Iterable[Mapping[str, Any]]
"""An answer in pieces: one whole ``message`` of a chat, or the ``delta``s of a stream."""


@dataclass
class Chat:
    """One request's messages as the client sent them, and what was changed of them on request."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Any = None
    stabilized: tuple[str, ...] = ()
    ushape: str = ""
    seen: RequestPrint = field(default_factory=lambda: request_print([], model=""))
    """What it looks like, but for the model and the salt."""
    boundaries: Boundaries | None = None
    miss: Miss | None = None
    sequence: AnySequence | None = None
    """The prompt's, once it was looked up; the answer's tokens come after it."""
    prompt: int = 0
    """Tokens of the prompt."""
    place: tuple[str, int] | None = None
    """Salt and number of its entry in the index, once that is made."""

    def answered(self, read: Callable[[], Parts]) -> None:
        """The client has all of the answer: remember it, so that a later turn can be compared with it.

        Args:
            read: gives the answer, on a thread of ours; nothing where it is not whole.
        """
        if self.sequence is not None and self.messages:
            tokens = [int(token) for token in self.sequence.tokens[self.prompt :]]
            kept = None if self.sequence.session.exact_decode else self.prompt
            _recorder().submit(_record_answer, self, read, tokens, kept)

    def told(self, outcome: Outcome, total: int) -> dict[str, Any]:
        """``usage.context_pilot`` for a prompt of ``total`` tokens."""
        found = self.boundaries or unknown("no chat", len(self.messages), total)
        told = report(
            self.messages,
            found,
            skip=outcome.skip,  # type: ignore[arg-type]
            cached_tokens=outcome.cached_tokens,
            source=outcome.source,  # type: ignore[arg-type]
            miss=self.miss,
            stabilized=self.stabilized,
            ushape=self.ushape,
        )
        return told | ({"lossy": outcome.lossy} if outcome.lossy else {})


def prepare(
    messages: Any,
    tools: Any,
    options: Mapping[str, Any],
    variables: Mapping[str, Any] | None = None,
) -> tuple[Chat, Any, Any]:
    """Note a request's messages, and bring them into the forms that were asked for.

    Args:
        messages, tools: of the request; not changed. options: its own ``thunder`` object.
        variables: further ones that its template gets.

    Returns:
        the notes, and the messages and tools to go on with (the same objects where nothing was asked for).
    """
    chat = Chat(copy.deepcopy(messages), tools)
    with shield("context_pilot", "describe"):
        if is_on("context_pilot"):
            chat.seen = request_print(chat.messages, model="", tools=tools, variables=variables)
    with shield("stabilize"):
        if is_on("stabilize") or options.get("stabilize"):
            stable = stabilize(messages, tools, _rules())
            if stable.did:
                messages, tools, chat.stabilized = stable.messages, stable.tools, stable.did
    with shield("ushape"):
        if is_on("ushape") or options.get("ushape"):
            reinforced = _reinforcer().reinforce(messages)
            if reinforced.did:
                messages, chat.ushape = reinforced.messages, reinforced.did
    return chat, messages, tools


def looked_up(
    chat: Chat,
    tokens: Sequence[int],
    outcome: Outcome,
    *,
    model: str,
    salt: str,
    grain: int,
    sequence: AnySequence | None = None,
) -> None:
    """Explain a look-up's result, then remember the prompt for later ones.

    Args:
        grain: tokens between two places where this model's state can be resumed.
        sequence: the prompt's, which knows what the store has lost of it.
    """
    chat.sequence, chat.prompt = sequence, len(tokens)
    seen = replace(chat.seen, model=model, salt=digest("salt", salt))
    found = chat.boundaries or unknown("no chat", len(chat.messages), len(tokens))
    lost = sequence.lost_at(outcome.cached_tokens) if sequence is not None else None
    match = Match(
        outcome.cached_tokens,
        grain,
        evicted_seconds=time.time() - lost.at if lost and lost.how == "evicted" else None,
        damaged=lost is not None and lost.how == "damaged",
        dropped=lost is not None and lost.how == "dropped",
    )
    chat.miss = explain(chat.messages, tokens, seen, index(), match, found)
    miss = chat.miss.to_json(text=True) if chat.miss is not None else None
    # Describing new messages takes time, and the generation thread has none.
    _recorder().submit(_record, chat, seen, list(tokens), found.ends, miss)


def _record(
    chat: Chat, seen: RequestPrint, tokens: list[int], ends: Sequence[int | None], miss: Any
) -> None:
    with shield("context_pilot", "record"):
        number = index().record(seen, chat.messages, tokens, ends, miss=miss)
        chat.place = (seen.salt, number)
        _save_soon()


def _record_answer(
    chat: Chat, read: Callable[[], Parts], tokens: list[int], kept: int | None
) -> None:
    with shield("context_pilot", "record"):
        parts = list(read())
        if chat.place is not None and parts:
            salt, number = chat.place
            index().answered(salt, number, joined(parts), tokens, kept)
            _save_soon()


def joined(parts: Parts) -> dict[str, Any]:
    """The answer's pieces as the message that a client sends back."""
    answer: dict[str, Any] = {"role": "assistant"}
    for part in parts:
        for name in ("content", "reasoning", "reasoning_content"):
            if part.get(name):
                answer[name] = answer.get(name, "") + part[name]
        if part.get("tool_calls"):
            answer["tool_calls"] = [*answer.get("tool_calls", ()), *part["tool_calls"]]
    return answer


@cache
def _recorder() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "thunder-pilot")


@cache
def index() -> Index:
    """The process's memory of recent prompts, kept beside the cache."""
    folder = Path(runtime().settings.cache_dir)
    with contextlib.suppress(OSError):  # the store tells of it; this index then lives in memory
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "prompts.jsonl" if folder.is_dir() else None
    return Index(file, keep_text=runtime().settings.show_text)


@cache
def _rules() -> Rules:
    return load_rules(default_config_file().with_name("rules.toml"))


@cache
def _reinforcer() -> Reinforcer:
    return Reinforcer()


_saving: list[threading.Timer] = []


def _save_soon() -> None:
    if _saving and _saving[0].is_alive():
        return
    timer = threading.Timer(_SAVE_AFTER, _save)
    timer.daemon = True
    timer.start()
    _saving[:] = [timer]


def _save() -> None:
    with shield("context_pilot", "save"):
        index().save()


def save_now() -> None:
    """Write the index, at shutdown."""
    if _saving:
        _saving[0].cancel()
        _save()
