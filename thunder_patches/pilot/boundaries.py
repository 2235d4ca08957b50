"""Where each message of a chat ends in the prompt's tokens, for any chat template.

The template is a black box: a function from messages to text. Rendering it once for each
message would be quadratic, and searching the text for a message's words would be a guess. Instead:

1. **Skeleton.** Each long string of the request is shortened to its first and last characters with
   a mark between them, and the template is rendered once with that. The text between two marks is
   what the template itself writes between two messages: the *glue*. Its cost depends on the number
   of messages, not on their length.
2. **Split.** A glue holds the end of one message and the opening of the next. It is split where the
   generation prompt's opening token stands, else where the conversation cut short after that
   message would go on differently. Each distinct glue is looked at once.
3. **Anchor.** A special token in the glue is found in the prompt by counting: the k-th occurrence in
   the text is the k-th in the tokens, provided that both hold the same number in all. Without
   a special token a short window of text around the split is tokenised and must occur exactly once.
4. **Check.** The prompt's own tokens at that place must be the glue's tokens, or the boundary is
   reported as unknown.

A boundary that is reported was found in the prompt's tokens; one that was not is ``None``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from thunder_patches.pilot.shapes import Anchor, Learned, occurrences

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool, Any], str]
Encode = Callable[[str], Sequence[int]]
Tokens = Sequence[int] | np.ndarray

KEPT = 24  # characters of a string left on each side of its mark
TAG_REACH = 48  # a cut inside <...> moves to the tag's end if that is no farther
WINDOW = 72  # characters tokenised on each side where no special token helps
CHECKED = 12  # of the template's tokens compared at each end
RECENT = 8  # conversations whose ends are remembered
MAX_WINDOWS = 24  # such places looked at in one request: keeps the cost bounded
# Templates look for these inside a message and split it there, so each side gets its own mark.
STRUCTURE = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<tool_call>")
STRUCTURE_SPLIT = re.compile("(" + "|".join(map(re.escape, STRUCTURE)) + ")")
THINKING = re.compile(
    r"<think>|\[THINK\]|<\|channel\|>|<thinking>|<seed:think>|<\|START_THINKING\|>"
)
SPECIAL = re.compile(r"<[^<>\s]{1,48}>|\[[^\[\]\s]{1,32}\]")
LITERAL_FIELDS = frozenset({"role", "type", "id", "tool_call_id", "name", "index"})


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Token positions of one request's messages.

    ``ends[i]`` is the position by which messages 0 to i are complete (the index of the first token
    after them), or None where the template could not be followed. ``generation`` is where the
    generation prompt begins and ``thinking`` where a thinking marker inside it begins. ``aligned``
    says that every end is known; ``reason`` says why not.
    """

    aligned: bool
    reason: str
    ends: tuple[int | None, ...]
    generation: int | None
    thinking: int | None
    total: int

    def cuts(self) -> tuple[int, ...]:
        """Known positions in ascending order: where a snapshot is worth taking."""
        found = {end for end in self.ends if end} | {self.generation or 0, self.thinking or 0}
        return tuple(sorted(found - {0}))

    def whole_messages(self, position: int) -> int:
        """Number of leading messages that lie wholly in the first ``position`` tokens."""
        known = (i + 1 for i, end in enumerate(self.ends) if end is not None and end <= position)
        return max(known, default=0)

    def message_at(self, token: int) -> int | None:
        """Index of the message that holds a token; None inside the generation prompt or unknown."""
        for i, end in enumerate(self.ends):
            if end is None:
                return None
            if token < end:
                return i
        return None

    def is_boundary(self, position: int) -> bool:
        """Does a message, or the generation prompt, begin exactly here? Position 0 does not count."""
        return position > 0 and (position in self.ends or position == self.generation)


def unknown(reason: str, messages: int, total: int) -> Boundaries:
    """The answer where nothing could be found out."""
    return Boundaries(False, reason, (None,) * messages, None, None, total)


def boundaries(
    render: Render, encode: Encode, messages: Sequence[Message], tools: Any, prompt_tokens: Tokens
) -> Boundaries:
    """Boundaries of one request; see ``Follower``, which remembers what it learned of a template."""
    return Follower(encode).boundaries(render, messages, tools, prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Mark:
    message: int
    head: str  # the string's text before the mark, as kept in the skeleton
    tail: str  # and after it
    rest: str  # what the mark stands for

    def count(self, what: str) -> int:
        return self.head.count(what) + self.rest.count(what) + self.tail.count(what)


@dataclass(frozen=True, slots=True)
class _Split:
    """A place in the skeleton: offset ``at``, inside the glue that begins at ``start``."""

    message: int  # messages 0..message are complete here
    at: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Anchor:
    """How a split of one glue is found: a special token, and how far behind it the split lies."""

    text: str
    token: int
    offset: int  # of the special token, in the glue
    distance: int  # tokens from the special token to the split
    expect: tuple[int, ...]  # the prompt's tokens from the special token on


class Follower:
    """Follows one tokenizer's chat template. Keep one for each loaded tokenizer.

    ``encode`` turns text into token ids without adding special tokens, and reads special tokens
    in the text as such, as ``tokenizer.encode(text, add_special_tokens=False)`` does.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._mark = re.compile(f"Qz{secrets.token_hex(4)}x([0-9]+)xzQ")
        self._mark_format = self._mark.pattern.replace("([0-9]+)", "{}")
        self._special_ids: dict[str, int | None] = {}
        self._anchors: dict[tuple[str, int], _Anchor | None] = {}
        self._splits: dict[tuple[str, str, str], int | None] = {}
        self._prompts: dict[tuple[str, str], int] = {}
        self._learned = Learned()
        self._recent: list[tuple[list[int], tuple[int | None, ...], np.ndarray]] = []

    def boundaries(
        self, render: Render, messages: Sequence[Message], tools: Any, prompt_tokens: Tokens
    ) -> Boundaries:
        """Find where each message ends.

        Args:
            render: ``render(messages, add_generation_prompt, tools) -> str``, the template as the
                host applies it (same template variables).
            messages: the messages as the host hands them to its template; not changed.
            tools: the tools as the host hands them to its template.
            prompt_tokens: the host's prompt, [N] token ids. An int64 array is quickest.
        """
        total = len(prompt_tokens)
        if not messages:
            return unknown("no messages", 0, total)
        for cache in (self._special_ids, self._anchors, self._splits, self._prompts):
            if len(cache) > 4096:  # a client that never repeats itself must not grow this
                cache.clear()
        keys = [_key(message) for message in messages]
        recalled = self._learned.recall(
            messages,
            tools,
            prompt_tokens,
            lambda: (self._earlier(keys, prompt_tokens) or [None])[0],
        )
        if recalled is not None:
            ends, thinking = recalled
            return Boundaries(True, "", tuple(ends), ends[-1], thinking, total)
        tokens = np.asarray(prompt_tokens, dtype=np.int64)
        earlier = self._earlier(keys, tokens)
        try:
            found = self._follow(render, messages, tools, tokens, earlier, mark_empty=True)
            if None in found.ends and any(not _has_text(message) for message in messages):
                second = self._follow(render, messages, tools, tokens, earlier, mark_empty=False)
                if second.ends.count(None) < found.ends.count(None):
                    found = second
        except Exception as error:  # a template may raise anything; the request goes on without us
            return unknown(f"the template failed: {error}"[:300], len(messages), total)
        self._recent = [(keys, found.ends, tokens), *self._recent[: RECENT - 1]]
        return found

    def _earlier(self, keys: list[int], tokens: Tokens) -> list[int | None]:
        """Ends that an earlier prompt with the same leading messages and tokens had."""
        best: list[int | None] = []
        for old_keys, ends, old in self._recent:
            count = len(_same_start(keys, old_keys))
            last = next((end for end in reversed(ends[:count]) if end is not None), None)
            if count <= len(best) or last is None or len(tokens) < last:
                continue
            if np.array_equal(old[:last], np.asarray(tokens[:last])):
                best = list(ends[:count])
        return best

    def _follow(
        self,
        render: Render,
        messages: Sequence[Message],
        tools: Any,
        tokens: np.ndarray,
        earlier: list[int | None],
        mark_empty: bool,
    ) -> Boundaries:
        marks: list[_Mark] = []
        skeleton = [self._shorten(m, i, marks, mark_empty) for i, m in enumerate(messages)]
        text = render(skeleton, True, tools)
        seen = [(m.start(), m.end(), int(m.group(1))) for m in self._mark.finditer(text)]
        seen = [s for s in seen if s[2] < len(marks)]
        if not seen:
            return unknown("the template shows no message text", len(messages), len(tokens))
        splits, gaps = self._find_splits(render, skeleton, tools, text, marks, seen)
        ends, anchors, problem = self._locate(text, marks, seen, splits, tokens, earlier)
        known = dict(zip((s.message for s in splits), ends, strict=True))
        result = tuple(known.get(i) for i in range(len(messages)))
        ascending = [end for end in result if end is not None]
        if ascending != sorted(ascending):
            return unknown("boundaries out of order", len(messages), len(tokens))
        generation = result[-1]
        missing = [i for i, end in enumerate(result) if end is None]
        reason = ""
        if missing:
            detail = gaps.get(missing[0]) or problem or "the template shows no text of it"
            reason = f"the end of message {missing[0]} was not found: {detail}"
        thinking = None
        if generation is not None:
            thinking = self._thinking(text[splits[-1].at :], generation, tokens)
        if not missing and len(splits) == len(messages):
            self._learned.learn(messages, tools, tokens, ascending, anchors, thinking)
        return Boundaries(not missing, reason, result, generation, thinking, len(tokens))

    # --- 1. skeleton

    def _shorten(
        self, message: Message, index: int, marks: list[_Mark], mark_empty: bool
    ) -> dict[str, Any]:
        before = len(marks)
        short: dict[str, Any] = {}
        for field, value in message.items():
            if field in LITERAL_FIELDS:
                short[field] = value
            elif field == "content" and isinstance(value, list):
                short[field] = [self._shorten_part(part, index, marks) for part in value]
            elif field == "tool_calls" and isinstance(value, list):
                short[field] = [self._shorten_call(call, index, marks) for call in value]
            elif isinstance(value, str):
                short[field] = self._shorten_text(value, index, marks)
            else:
                short[field] = value
        if len(marks) == before and mark_empty:
            calls = message.get("tool_calls")
            if isinstance(calls, list) and calls and isinstance(calls[-1], dict):
                function = calls[-1].get("function") or {}
                name = str(function.get("name", "")) + self._new_mark(index, marks)
                short["tool_calls"] = [
                    *calls[:-1],
                    {**calls[-1], "function": {**function, "name": name}},
                ]
            elif not str(message.get("content") or "").strip():
                rest = str(message.get("content") or "")
                short["content"] = self._new_mark(index, marks, rest=rest)
        return short

    def _shorten_part(self, part: Any, index: int, marks: list[_Mark]) -> Any:
        if isinstance(part, str):
            return self._shorten_text(part, index, marks)
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self._shorten_text(part["text"], index, marks)}
        return part

    def _shorten_call(self, call: Any, index: int, marks: list[_Mark]) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._shorten_call(call["function"], index, marks)}
        if "arguments" not in call:
            return call
        return {**call, "arguments": self._shorten_value(call["arguments"], index, marks)}

    def _shorten_value(self, value: Any, index: int, marks: list[_Mark]) -> Any:
        if isinstance(value, str):
            return self._shorten_text(value, index, marks)
        if isinstance(value, dict):
            return {k: self._shorten_value(v, index, marks) for k, v in value.items()}
        if isinstance(value, list):
            return [self._shorten_value(v, index, marks) for v in value]
        return value

    def _shorten_text(self, text: str, index: int, marks: list[_Mark]) -> str:
        if not text.strip():
            return text
        if not any(tag in text for tag in STRUCTURE):
            return self._shorten_run(text, index, marks)
        runs = STRUCTURE_SPLIT.split(text)  # run, tag, run, tag, ..., run
        filled = [i for i in range(0, len(runs), 2) if runs[i].strip()]
        if not filled:
            return text
        first = len(marks)
        for i in filled:
            runs[i] = self._shorten_run(runs[i], index, marks)
        # Tags at the string's ends belong to what surrounds its first and its last mark.
        begin, end = "".join(runs[: filled[0]]), "".join(runs[filled[-1] + 1 :])
        marks[first] = replace(marks[first], head=begin + marks[first].head)
        marks[-1] = replace(marks[-1], tail=marks[-1].tail + end)
        return "".join(runs)

    def _shorten_run(self, text: str, index: int, marks: list[_Mark]) -> str:
        if len(text) <= 2 * KEPT:
            middle = _outside_tag(text, len(text) // 2)
            head, tail, rest = text[:middle], text[middle:], ""
        else:
            cut = _outside_tag(text, KEPT)
            keep = _outside_tag(text, len(text) - KEPT)
            head, rest, tail = text[:cut], text[cut:keep], text[keep:]
        return head + self._new_mark(index, marks, head, tail, rest) + tail

    def _new_mark(
        self, index: int, marks: list[_Mark], head: str = "", tail: str = "", rest: str = ""
    ) -> str:
        marks.append(_Mark(index, head, tail, rest))
        return self._mark_format.format(len(marks) - 1)

    # --- 2. splits

    def _find_splits(
        self,
        render: Render,
        skeleton: list[dict[str, Any]],
        tools: Any,
        text: str,
        marks: list[_Mark],
        seen: list[tuple[int, int, int]],
    ) -> tuple[list[_Split], dict[int, str]]:
        """All splits in the order of the text, and for messages without one the reason."""
        order = [marks[number].message for _, _, number in seen]
        later = order[:]  # smallest message index from here on
        for k in range(len(order) - 2, -1, -1):
            later[k] = min(later[k], later[k + 1])
        prompt = self._generation_prompt(render, skeleton, tools, text, marks, seen)
        opener = self._opener(text[len(text) - prompt :])
        splits: list[_Split] = []
        gaps: dict[int, str] = {}

        # Messages before the first mark: the template may write text of its own for them.
        if later[0] > 0:
            start, end = 0, seen[0][0]
            at = _all_at(text, opener, start, end)
            if len(at) == later[0] + 1:
                splits += [_Split(i, at[i + 1], start, end) for i in range(later[0])]
            else:
                gaps.update(dict.fromkeys(range(later[0]), "it has no text to follow"))

        highest = -1
        for k in range(len(seen) - 1):
            highest = max(highest, order[k])
            if later[k + 1] <= highest:
                if order[k + 1] != order[k]:
                    moved = f"the template moves message {later[k + 1]} behind message {highest}"
                    gaps.setdefault(later[k + 1], moved)
                continue
            before, after = marks[seen[k][2]], marks[seen[k + 1][2]]
            start, end = seen[k][1], seen[k + 1][0]
            start += _kept_length(text, start, end, before.tail)
            end -= _kept_length(text, start, end, after.head, at_end=True)
            gap = later[k + 1] - highest
            at = _all_at(text, opener, start, end)
            if len(at) == gap:
                splits += [_Split(highest + n, at[n], start, end) for n in range(gap)]
                continue
            where = self._compare(
                render, skeleton, tools, text, marks, seen, k, highest, start, end
            )
            if where is None:
                where = start
            splits.append(_Split(highest, where, start, end))
            empty = "it has no text to follow"
            gaps.update(dict.fromkeys(range(highest + 1, later[k + 1]), empty))

        # The last message, and messages behind the last mark.
        highest = max(highest, order[-1])
        start, end = seen[-1][1], len(text)
        start += _kept_length(text, start, end, marks[seen[-1][2]].tail)
        missing = len(skeleton) - 1 - highest
        if missing:
            at = _all_at(text, opener, start, end - prompt)
            if len(at) == missing:
                splits += [_Split(highest + n, at[n], start, end) for n in range(missing)]
            else:
                empty = "it has no text to follow"
                gaps.update(dict.fromkeys(range(highest, len(skeleton) - 1), empty))
        splits.append(_Split(len(skeleton) - 1, end - prompt, start, end))
        return splits, gaps

    def _generation_prompt(
        self,
        render: Render,
        skeleton: list[dict[str, Any]],
        tools: Any,
        text: str,
        marks: list[_Mark],
        seen: list[tuple[int, int, int]],
    ) -> int:
        """Length in characters of what the template adds for the answer to begin."""
        role = str(skeleton[-1].get("role"))
        key = (role, text[seen[-1][1] :])
        found = self._prompts.get(key)
        if found is None:
            without = render(skeleton, False, tools)
            if text.startswith(without):
                found = len(text) - len(without)
            else:  # the template closes the last message differently when nothing follows
                usual = self._usual_prompt(render, tools)
                if usual is not None and text.endswith(usual):
                    found = len(usual)
                else:
                    shared = _common_prefix(text, without)
                    found = len(text) - _outside_tag_before(text, shared)
            self._prompts[key] = found
        return found

    def _usual_prompt(self, render: Render, tools: Any) -> str | None:
        """The generation prompt after a plain user message; None if that can't be told."""
        probe = [{"role": "user", "content": "?"}]
        try:
            long, short = render(probe, True, tools), render(probe, False, tools)
        except Exception:  # the template wants more than that
            return None
        return long[len(short) :] if long.startswith(short) else None

    def _opener(self, generation_prompt: str) -> str:
        """The special token that opens a message, learned from the generation prompt."""
        first = SPECIAL.match(generation_prompt)
        if first and self._special(first.group()) is not None:
            return first.group()
        return ""

    def _compare(
        self,
        render: Render,
        skeleton: list[dict[str, Any]],
        tools: Any,
        text: str,
        marks: list[_Mark],
        seen: list[tuple[int, int, int]],
        k: int,
        message: int,
        start: int,
        end: int,
    ) -> int | None:
        """Where the conversation cut short after ``message`` leaves this one; None if unknown."""
        roles = [str(m.get("role")) for m in skeleton[message : message + 2]]
        key = (text[start:end], roles[0], roles[-1])
        if key in self._splits:
            length = self._splits[key]
        else:
            length = None
            number = seen[k][2]
            try:
                short = render(skeleton[: message + 1], False, tools)
            except Exception:  # the template refuses this conversation: nothing learned
                short = ""
            at = short.rfind(self._mark_format.format(number))
            if at >= 0:
                at += len(self._mark_format.format(number))
                at += _kept_length(short, at, len(short), marks[number].tail)
                shared = _common_prefix(text[start:end], short[at:])
                length = _outside_tag_before(text[start:end], shared)
            self._splits[key] = length
        return None if length is None else start + length

    # --- 3. anchors, 4. check

    def _locate(
        self,
        text: str,
        marks: list[_Mark],
        seen: list[tuple[int, int, int]],
        splits: list[_Split],
        tokens: np.ndarray,
        earlier: list[int | None],
    ) -> tuple[list[int | None], list[Anchor | None], str]:
        """Token position of each split, the special tokens they were found by, and what was
        wrong with the first that was not found."""
        found: list[int | None] = [None] * len(splits)
        problem = ""
        chosen = [self._anchor(text[s.start : s.end], s.at - s.start) for s in splits]
        for name in dict.fromkeys(a.text for a in chosen if a):
            token = self._special_ids[name]
            assert token is not None
            places = occurrences(tokens, token)
            written = [marks[number].count(name) for _, _, number in seen]  # by people
            hidden = [marks[number].rest.count(name) for _, _, number in seen]
            whole = text.count(name)
            if whole + sum(hidden) == len(places):
                extra = hidden
            elif whole + sum(hidden) - sum(written) == len(places):
                # The host reads special tokens in what people wrote as plain text.
                extra = [h - w for h, w in zip(hidden, written, strict=True)]
            else:
                problem = problem or (
                    f"{name} occurs {whole + sum(hidden)} times in the rendered text "
                    f"and {len(places)} times in the prompt"
                )
                continue
            before, cursor, passed = 0, 0, 0
            for n, (split, anchor) in enumerate(zip(splits, chosen, strict=True)):
                if anchor is None or anchor.text != name:
                    continue
                offset = split.start + anchor.offset
                before += text.count(name, cursor, offset)
                cursor = offset
                while passed < len(seen) and seen[passed][1] <= split.start:
                    before += extra[passed]
                    passed += 1
                place = int(places[before]) if before < len(places) else len(tokens)
                if _same(tokens, place, anchor.expect):
                    found[n] = place + anchor.distance
                else:
                    problem = problem or f"the prompt's tokens at {place} are not the template's"
        used: list[Anchor | None] = [
            (a.text, a.token, a.distance, a.expect) if a and found[n] is not None else None
            for n, a in enumerate(chosen)
        ]
        for n, split in enumerate(splits):
            if found[n] is None and split.message < len(earlier):
                found[n] = earlier[split.message]
        windows = 0
        for n, split in enumerate(splits):
            if found[n] is None and windows < MAX_WINDOWS:
                windows += 1
                before = next((p for p in reversed(found[:n]) if p is not None), 0)
                after = next((p for p in found[n + 1 :] if p is not None), len(tokens))
                found[n] = self._window(text, marks, seen, split.at, tokens, before, after)
        return (
            found,
            used,
            problem or "no special token there, and the text around it is not unique",
        )

    def _special(self, name: str) -> int | None:
        """The id of a text that the tokenizer reads as one token wherever it stands, else None."""
        if name not in self._special_ids:
            alone = list(self._encode(name))
            token = None
            if len(alone) == 1:
                amid = list(self._encode(f"a{name}a{name}{name}"))
                if amid.count(alone[0]) == 3 and amid[-2:] == alone * 2:
                    token = int(alone[0])
            self._special_ids[name] = token
        return self._special_ids[name]

    def _anchor(self, glue: str, at: int) -> _Anchor | None:
        key = (glue, at)
        if key not in self._anchors:
            self._anchors[key] = self._choose_anchor(glue, at)
        return self._anchors[key]

    def _choose_anchor(self, glue: str, at: int) -> _Anchor | None:
        specials = [m for m in SPECIAL.finditer(glue) if self._special(m.group()) is not None]
        here = [m for m in specials if m.start() == at]
        before = [m for m in specials if m.end() <= at]
        if not here and not before:
            return None
        special = (here or before[-1:])[0]
        token = self._special_ids[special.group()]
        assert token is not None
        text, at = glue[special.start() :], at - special.start()
        ids = self._ids(text)
        distance = self._token_offset(text, at, ids)
        # The glue's last token may have grown together with the text that follows it.
        closed = bool(specials) and specials[-1].end() == len(glue)
        expect = ids if closed else ids[:-1]
        if distance is None or distance > len(expect):
            return None
        expect = expect[: max(CHECKED, distance)]
        return _Anchor(special.group(), token, special.start(), distance, tuple(expect))

    def _ids(self, text: str) -> list[int]:
        return [int(i) for i in self._encode(text)]

    def _token_offset(self, text: str, at: int, ids: list[int]) -> int | None:
        """Number of tokens of ``text`` (``ids``) that lie before character ``at``; None if unsure.

        Either side tokenised alone must give the same tokens as it does within the whole. A token
        that reaches across ``at`` does not count as before it.
        """
        whole = self._exact_offset(text, at, ids)
        if whole is not None:
            return whole
        for reach in range(1, 9):
            for left in range(1, reach + 1):
                right = reach - left + 1
                if at - left < 0 or at + right > len(text):
                    continue
                before = self._exact_offset(text, at - left, ids)
                after = self._exact_offset(text, at + right, ids)
                if before is not None and after == before + 1:
                    return before
        return None

    def _exact_offset(self, text: str, at: int, ids: list[int]) -> int | None:
        left = self._ids(text[:at])
        if ids[: len(left)] == left:
            return len(left)
        right = self._ids(text[at:])
        if ids[len(ids) - len(right) :] == right:
            return len(ids) - len(right)
        return None

    def _window(
        self,
        text: str,
        marks: list[_Mark],
        seen: list[tuple[int, int, int]],
        at: int,
        tokens: np.ndarray,
        low: int,
        high: int,
    ) -> int | None:
        """Token position of a text offset, by the text around it; None unless found exactly once."""
        left, right = _expand(text, marks, seen, at)
        both = self._ids(left + right)
        split = self._token_offset(left + right, len(left), both)
        if split is None:
            return None
        # Tokens at the window's edges may differ from those in the prompt.
        first = max(min(2, split), split - 12)
        last = min(max(len(both) - 2, split), split + 12)
        pattern = both[first:last]
        core = left[-WINDOW // 3 :] + right[: WINDOW // 3]
        if len(pattern) < 4 or any(core in mark.rest for mark in marks):
            return None
        ahead = split - first
        start = max(0, low - ahead)
        places = _find(tokens[start : max(start, high + len(pattern))], pattern) + start
        places = places[(places + ahead >= low) & (places + ahead <= high)]
        return int(places[0]) + ahead if len(places) == 1 else None

    def _thinking(self, prompt: str, generation: int, tokens: np.ndarray) -> int | None:
        """Position of a thinking marker in the generation prompt ``prompt``."""
        marker = THINKING.search(prompt)
        if not marker:
            return None
        ids = self._ids(prompt[marker.start() :])[:1]
        place = generation + len(self._encode(prompt[: marker.start()]))
        return place if ids and _same(tokens, place, ids) else None


def _all_at(text: str, what: str, start: int, end: int) -> list[int]:
    places: list[int] = []
    if what:
        at = text.find(what, start, end)
        while at >= 0:
            places.append(at)
            at = text.find(what, at + len(what), end)
    return places


def _outside_tag(text: str, at: int) -> int:
    """``at``, moved behind a <tag> that it would cut."""
    opened = text.rfind("<", max(0, at - TAG_REACH), at)
    if opened < 0 or text.find(">", opened, at) >= 0:
        return at
    closed = text.find(">", at, at + TAG_REACH)
    return closed + 1 if closed >= 0 else at


def _outside_tag_before(text: str, at: int) -> int:
    """``at``, moved before a special token that it would cut."""
    for mark in SPECIAL.finditer(text, max(0, at - TAG_REACH), min(len(text), at + TAG_REACH)):
        if mark.start() < at < mark.end():
            return mark.start()
    return at


def _kept_length(text: str, start: int, end: int, kept: str, at_end: bool = False) -> int:
    """How much of ``text[start:end]``, at its start or end, is a message's own text ``kept``."""
    bare = kept.lstrip() if at_end else kept.rstrip()  # many templates strip what people wrote
    forms = (kept, bare, json.dumps(kept, ensure_ascii=False)[1:-1], json.dumps(kept)[1:-1])
    for form in forms:
        found = text.endswith(form, start, end) if at_end else text.startswith(form, start, end)
        if found:
            return len(form)
    return 0


def _common_prefix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # bisect: slices compare in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _same(tokens: np.ndarray, place: int, expect: Sequence[int]) -> bool:
    return tokens[place : place + len(expect)].tolist() == list(expect)


def _find(tokens: np.ndarray, pattern: list[int]) -> np.ndarray:
    """All places where the pattern begins."""
    places = np.flatnonzero(tokens[: max(0, len(tokens) - len(pattern) + 1)] == pattern[0])
    for ahead, token in enumerate(pattern[1:], 1):
        if not len(places):
            break
        places = places[tokens[places + ahead] == token]
    return places


def _key(message: Message) -> int:
    content = message.get("content")
    return hash((message.get("role"), content if isinstance(content, str) else repr(message)))


def _has_text(message: Message) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def _same_start(a: list[int], b: list[int]) -> list[int]:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return a[:count]


def _expand(
    text: str, marks: list[_Mark], seen: list[tuple[int, int, int]], at: int
) -> tuple[str, str]:
    """The prompt's text on both sides of a skeleton offset, up to WINDOW characters each."""
    left, cursor = "", at
    for begin, end, number in reversed(seen):
        if end <= cursor:
            left = marks[number].rest[-WINDOW:] + text[end:cursor] + left
            cursor = begin
            if len(left) >= WINDOW:
                break
    else:
        left = text[:cursor] + left
    right, cursor = "", at
    for begin, end, number in seen:
        if begin >= cursor:
            right += text[cursor:begin] + marks[number].rest[:WINDOW]
            cursor = end
            if len(right) >= WINDOW:
                break
    else:
        right += text[cursor:]
    left, right = left[-WINDOW:], right[:WINDOW]
    # Half a special token at an edge would be read as other tokens: leave it out.
    opened, closed = max(right.rfind("<"), right.rfind("[")), left.find(">")
    if len(right) == WINDOW and opened > max(right.rfind(">"), right.rfind("]"), WINDOW // 2):
        right = right[:opened]
    if 0 <= closed < WINDOW // 2 and "<" not in left[:closed]:
        left = left[closed + 1 :]
    return left, right
