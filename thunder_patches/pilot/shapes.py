"""What was learned of a chat template: for messages of known shapes, how their ends are found.

A message's *shape* is what templates look at: role, form of the content, tool calls, thinking.
Once the full method of ``boundaries`` has followed a conversation, the next one with the same shapes
needs no rendering: each end is the d-th occurrence of a special token after the previous end, and
the tokens there must be the same as before. Anything unexpected, and any text that itself contains
such a special token, goes back to the full method.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Shape = tuple[Any, ...]
Tokens = Sequence[int] | np.ndarray
Anchor = tuple[str, int, int, Sequence[int]]  # name, token, distance to the end, tokens there
LIMIT = 4096  # rules kept; a client of endless variety must not grow this


@dataclass(frozen=True, slots=True)
class Rule:
    """The end of a message lies ``distance`` tokens after the special token ``token``, which is
    the one number ``skip`` (from 0) after the previous message's end; ``expect`` stands there."""

    name: str
    token: int
    skip: int
    distance: int
    expect: list[int]


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the last message: its tokens, and how many of each special token it holds."""

    tokens: list[int]
    inside: dict[int, int]  # special token -> number of them in the last message itself
    thinking: int | None  # offset of a thinking marker


class Learned:
    """Rules of one tokenizer and template."""

    def __init__(self) -> None:
        self._rules: dict[tuple[Shape | None, Shape, Shape], Rule] = {}
        self._tails: dict[tuple[Shape | None, Shape], Tail] = {}
        self._names: dict[str, int] = {}

    def recall(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        tokens: Tokens,
        first: Callable[[], int | None],
    ) -> tuple[list[int], int | None] | None:
        """Ends of all messages and the thinking marker's position, or None: use the full method.

        ``first`` tells the end of message 0 where that is known otherwise.
        """
        shapes = [shape(message) for message in messages]
        shapes[0] = (*shapes[0], bool(tools))
        tail = self._tails.get((shapes[-2] if len(shapes) > 1 else None, shapes[-1]))
        if tail is None or _slice(tokens, len(tokens) - len(tail.tokens), tail.tokens) is None:
            return None
        if any(name in text for text in texts(messages) for name in self._names):
            return None
        places: dict[int, list[int]] = {}
        ends: list[int] = []
        cursor = 0
        previous: Shape | None = None
        for this, following in pairwise(shapes):
            rule = self._rules.get((previous, this, following))
            if rule is None:
                end_of_first = first() if previous is None else None
                if end_of_first is None:
                    return None
                cursor, previous = end_of_first, this
                ends.append(cursor)
                continue
            at = places.get(rule.token)
            if at is None:
                at = places[rule.token] = occurrences(tokens, rule.token)
            index = bisect_left(at, cursor) + rule.skip
            if index >= len(at) or _slice(tokens, at[index], rule.expect) is None:
                return None
            cursor = at[index] + rule.distance
            ends.append(cursor)
            previous = this
        end = len(tokens) - len(tail.tokens)
        if end < cursor:
            return None
        for token, count in tail.inside.items():
            at = places.get(token)
            if at is None:
                at = places[token] = occurrences(tokens, token)
            if bisect_left(at, end) - bisect_left(at, cursor) != count:
                return None
        ends.append(end)
        return ends, None if tail.thinking is None else end + tail.thinking

    def learn(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        tokens: Tokens,
        ends: Sequence[int],
        anchors: Sequence[Anchor | None],
        thinking: int | None,
    ) -> None:
        """Keep how these ends were found; ``anchors[i]`` is None for one found otherwise."""
        names = {a[0]: a[1] for a in anchors if a}
        if None in anchors[1:-1] or any(name in text for text in texts(messages) for name in names):
            return  # an end was found by the text around it, or counts mean nothing: don't learn
        if len(self._rules) + len(self._tails) > LIMIT:
            self.__init__()  # type: ignore[misc]
        shapes = [shape(message) for message in messages]
        shapes[0] = (*shapes[0], bool(tools))
        self._names.update(names)
        places = {token: occurrences(tokens, token) for token in names.values()}
        cursor = 0
        for i, anchor in enumerate(anchors[:-1]):
            if anchor is None:
                cursor = ends[i]
                continue
            name, token, distance, expect = anchor
            at = places[token]
            index = bisect_left(at, ends[i] - distance)
            rule = Rule(name, token, index - bisect_left(at, cursor), distance, list(expect))
            self._rules[(shapes[i - 1] if i else None, shapes[i], shapes[i + 1])] = rule
            cursor = ends[i]
        end = ends[-1]
        rest = [int(t) for t in tokens[end:]]
        inside = {t: bisect_left(at, end) - bisect_left(at, cursor) for t, at in places.items()}
        key = (shapes[-2] if len(shapes) > 1 else None, shapes[-1])
        self._tails[key] = Tail(rest, inside, None if thinking is None else thinking - end)


def shape(message: Mapping[str, Any]) -> Shape:
    """What of a message decides how a template writes its surroundings."""
    content = message.get("content")
    form: Any
    if isinstance(content, str):
        form = (bool(content), content[:1] == "<", "</think>" in content)
    elif isinstance(content, list):
        form = tuple(part.get("type") if isinstance(part, dict) else "" for part in content)
    else:
        form = None
    calls = message.get("tool_calls")
    called: tuple[str, ...] = ()
    if isinstance(calls, list) and calls:  # templates write the names next to other messages, too
        named = (c.get("function", c) if isinstance(c, dict) else {} for c in calls)
        called = tuple(str(c.get("name")) if isinstance(c, dict) else "" for c in named)
    extra: tuple[Any, ...] = ()
    if len(message) > 2:
        extra = tuple((k, bool(v)) for k, v in message.items() if k not in ("role", "content"))
    return (message.get("role"), form, called, extra)


def texts(value: Any) -> list[str]:
    """All strings inside messages, at any depth."""
    found: list[str] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found


def occurrences(tokens: Tokens, token: int) -> list[int]:
    """All positions of one token, ascending."""
    if isinstance(tokens, np.ndarray):
        return np.flatnonzero(tokens == token).tolist()
    places: list[int] = []
    at = -1
    try:
        while True:
            at = tokens.index(token, at + 1)
            places.append(at)
    except ValueError:
        return places


def _slice(tokens: Tokens, start: int, expect: list[int]) -> list[int] | None:
    """``expect`` if it stands at ``start``, else None."""
    if start < 0:
        return None
    part = tokens[start : start + len(expect)]
    found = part.tolist() if isinstance(part, np.ndarray) else list(part)
    return expect if found == expect else None
