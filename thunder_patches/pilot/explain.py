"""Why a prompt could not be reused further: where it left the nearest earlier one, in words.

Similar prompts are only compared to explain; no state is ever reused across texts that differ.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thunder_patches.pilot.boundaries import Boundaries
from thunder_patches.pilot.fingerprints import (
    SYSTEM_ROLES,
    MessagePrint,
    RequestPrint,
    describe,
    message_text,
    pieces,
)
from thunder_patches.pilot.index import ALMOST, Entry, Index, Nearest
from thunder_patches.pilot.volatile import Span, span_at, spans

CLEARED = 400  # characters: a tool result that shrank below this was cleared by the client
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Match:
    """What the look-up in the cache gave.

    ``position``: leading tokens reused. ``grain``: tokens between two places where this model's
    state can be resumed (a block; more for models that need snapshots). ``evicted_seconds``: how
    long ago the state behind ``position`` was evicted, where the store knows. ``damaged``: a block
    there was bad and set aside. ``dropped``: its write was dropped.
    """

    position: int
    grain: int = 256
    evicted_seconds: float | None = None
    damaged: bool = False
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Miss:
    """Where and why. ``token`` is the first token not reused, or the first that differs from the
    earlier prompt when that is farther on; ``message`` and ``role`` say whose it is (None in the
    generation prompt or where boundaries are unknown). ``code`` is for programs, ``reason`` for people.
    """

    token: int
    message: int | None
    role: str | None
    code: str
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)

    def to_json(self, text: bool = False) -> dict[str, Any]:
        """The ``miss`` of ``usage.context_pilot``. With ``text`` also what stood there before and
        what stands there now, where that is known: private, so not for logs."""
        data: dict[str, Any] = {
            "token": self.token,
            "message": self.message,
            "role": self.role,
            "reason": self.reason,
            "code": self.code,
        }
        if text:
            data |= {k: self.detail[k] for k in ("before", "now") if k in self.detail}
        return data


# Reasons, each with what it means. The sentence that a user reads is made where it is found.
CODES = {
    "never_seen": "nothing like this prompt was seen before",
    "model_changed": "the same prompt was seen with another model",
    "adapter_changed": "the same prompt was seen with another adapter",
    "evicted": "the state was kept and then evicted",
    "damaged": "the stored state was damaged",
    "not_kept": "the state was not kept up to here",
    "short": "the shared part is too short to be kept",
    "template_variables": "other template variables",
    "template_text": "the same messages, written differently by the template",
    "tools_reordered": "the same tools in another order",
    "tools_added": "tools were added",
    "tools_removed": "tools were removed",
    "tools_replaced": "other tools",
    "tool_key_order": "a tool's keys in another order",
    "tool_changed": "a tool's definition differs",
    "billing": "a client's billing header",
    "uuid": "a UUID",
    "timestamp": "a date and time",
    "date": "a date",
    "time": "a time of day",
    "epoch": "a Unix time",
    "nonce": "a random id",
    "path": "a temporary path",
    "counter": "a number",
    "line_endings": "other line endings",
    "whitespace": "only white space differs",
    "unicode": "the same characters in another Unicode form",
    "content_form": "the same content in another form",
    "arguments_order": "tool arguments in another key order",
    "arguments_changed": "other tool arguments",
    "call_ids": "other tool call ids",
    "thinking_dropped": "thinking was dropped",
    "thinking_added": "thinking was added",
    "thinking_changed": "thinking differs",
    "retokenised": "the same answer as other tokens",
    "answer_edited": "the client sent another answer than the model gave",
    "image_changed": "another image",
    "role_changed": "another role",
    "history_truncated": "older messages were left out",
    "message_inserted": "messages were put in between",
    "messages_reordered": "messages in another order",
    "system_added": "a system prompt was added",
    "system_removed": "the system prompt was left out",
    "system_replaced": "another system prompt before the same first message",
    "tool_result_cleared": "an old tool result was cleared",
    "text_cut": "the text was cut",
    "text_extended": "the text goes on where it ended before",
    "text_edited": "the text was edited",
    "history_replaced": "the history was replaced",
}


def explain(
    messages: Sequence[Message],
    tokens: Sequence[int] | np.ndarray,
    request: RequestPrint,
    index: Index,
    match: Match,
    boundaries: Boundaries,
    nearest: Nearest | None = None,
) -> Miss | None:
    """Why no more was reused; None where nothing earlier could have given more.

    Call it before the request itself is recorded. ``nearest`` saves a second look-up.
    """
    total = len(tokens)
    if match.position >= total - 1:
        return None
    first = describe(messages[0]) if messages else None
    nearest = nearest or index.find(request, first)
    make = _Maker(messages, boundaries)
    if nearest is None or (nearest.shared == 0 and nearest.similarity < ALMOST):
        if match.position > 0:
            return None  # something was reused that the index no longer knows
        if match.damaged or match.evicted_seconds is not None or match.dropped:
            # A plain prompt has no messages to find it by.
            return _state_missing(make, match, 0)
        return make(0, "never_seen", "never seen: nothing like this prompt is remembered")
    entry = nearest.entry
    if not nearest.same_model and nearest.shared:
        return _other_model(make, request, nearest, match)
    differs, exact = _first_difference(tokens, entry, boundaries, nearest.shared)
    known = entry.total + entry.answer_tokens
    if match.position < min(differs, entry.kept, total - 1) - match.grain + 1:
        return _state_missing(make, match, min(differs, entry.kept))
    if differs >= total or (exact and differs >= known):
        return None  # this prompt is the earlier one, or goes on where it ended
    place = max(differs, match.position)
    where = _Comparison(messages, request, nearest, index, boundaries, differs)
    found = where.reason()
    if found is None:
        return None
    code, reason, message, detail = found
    almost = "" if nearest.shared or nearest.opening else "almost the same prompt: "
    detail = {**detail, "token_exact": exact, "shared_messages": nearest.shared}
    if differs < match.grain and match.position == 0 and exact:
        detail["note"] = "the shared part is shorter than a block"
    return make(place, code, almost + reason, message, detail)


class _Maker:
    def __init__(self, messages: Sequence[Message], boundaries: Boundaries) -> None:
        self._messages = messages
        self._boundaries = boundaries

    def __call__(
        self,
        token: int,
        code: str,
        reason: str,
        message: int | None = None,
        detail: dict[str, Any] | None = None,
    ) -> Miss:
        if message is None:
            message = self._boundaries.message_at(token)
        role = str(self._messages[message].get("role")) if message is not None else None
        return Miss(token, message, role, code, reason, detail or {})


def _other_model(make: _Maker, request: RequestPrint, nearest: Nearest, match: Match) -> Miss:
    old = nearest.entry.request
    if old.model == request.model:
        before = "an adapter" if old.adapter else "no adapter"
        reason = f"adapter changed: this prompt was last seen with {before}"
        if old.adapter and request.adapter:
            reason = "adapter changed: this prompt was last seen with another adapter"
        return make(match.position, "adapter_changed", reason)
    reason = "model changed: this prompt was last seen with another model or other weights"
    return make(match.position, "model_changed", reason)


def _state_missing(make: _Maker, match: Match, shared: int) -> Miss:
    token, detail = match.position, {"shared_tokens": shared}
    if match.damaged:
        reason = "the stored state was damaged and has been set aside"
        return make(token, "damaged", reason, detail=detail)
    if match.evicted_seconds is not None:
        reason = f"evicted {duration(match.evicted_seconds)} ago"
        return make(token, "evicted", reason, detail=detail)
    if match.dropped:
        reason = "not kept: the disk was slower than the requests, so its write was dropped"
        return make(token, "not_kept", reason, detail=detail)
    if shared < match.grain:
        reason = f"the shared part, {shared:,} tokens, is shorter than what is kept as one piece"
        return make(token, "short", reason, detail=detail)
    reason = "known, but its state is not in the cache: evicted, or never finished"
    return make(token, "not_kept", reason, detail=detail)


def _first_difference(
    tokens: Sequence[int] | np.ndarray, entry: Entry, boundaries: Boundaries, shared: int
) -> tuple[int, bool]:
    """First token that differs from the earlier prompt and answer, and whether that is exact.

    Without the earlier tokens: where the first message that differs begins.
    """
    if entry.tokens is not None:
        ours = np.asarray(tokens, dtype=np.int64)
        count = min(len(ours), len(entry.tokens))
        unequal = np.flatnonzero(ours[:count] != entry.tokens[:count])
        return (int(unequal[0]) if len(unequal) else count), True
    place = 0
    for i in range(min(shared, len(boundaries.ends), len(entry.ends))):
        end = boundaries.ends[i]
        if end is None or end != entry.ends[i]:
            break
        place = end
    if shared == len(entry.messages) and place:
        place = max(place, min(entry.total, len(tokens)))
    return place, False


Found = tuple[str, str, int | None, dict[str, Any]]


class _Comparison:
    """Two prompts of one salt, message by message."""

    def __init__(
        self,
        messages: Sequence[Message],
        request: RequestPrint,
        nearest: Nearest,
        index: Index,
        boundaries: Boundaries,
        differs: int,
    ) -> None:
        self.messages = messages
        self.request = request
        self.entry = nearest.entry
        self.shared = nearest.shared
        self.opening = nearest.opening
        self.index = index
        self.boundaries = boundaries
        self.differs = differs

    def reason(self) -> Found | None:
        at = self.boundaries.message_at(self.differs)
        old, new = self.entry.messages, self.request.hashes
        # Templates write tools near the start, beside messages that are the same.
        if self.shared and (at is None or at < self.shared):
            found = self._tools()
            if found:
                return (*found, at, {})
        if at is not None and at < self.shared:
            return self._rendered_differently(at)
        if self.shared == len(old):
            return self._after_the_prompt()
        if self.shared >= len(new):
            return None  # the new prompt is the beginning of the earlier one
        return self._message(self.shared)

    def _tools(self) -> tuple[str, str] | None:
        old, new = self.entry.request.tools, self.request.tools
        if old == new:
            return None
        names, before = [t.name for t in new], [t.name for t in old]
        added = [n for n in names if n not in before]
        removed = [n for n in before if n not in names]
        if added and removed:
            return "tools_replaced", f"tool list: {_list(added)} in place of {_list(removed)}"
        if added:
            return "tools_added", f"tool list: {_list(added)} added"
        if removed:
            return "tools_removed", f"tool list: {_list(removed)} removed"
        if sorted(t.hash for t in old) == sorted(t.hash for t in new):
            return "tools_reordered", "tool list: same tools in another order"
        if sorted(t.sorted for t in old) == sorted(t.sorted for t in new):
            changed = [n.name for n in new if n.hash not in {o.hash for o in old}]
            return "tool_key_order", f"tool list: keys of {_list(changed)} in another order"
        changed = [n.name for n in new if n.sorted not in {o.sorted for o in old}]
        return "tool_changed", f"tool list: the definition of {_list(changed)} differs"

    def _rendered_differently(self, at: int) -> Found:
        """The messages agree, the tokens do not: template variables, or the template's own doing."""
        old, new = self.entry.request.variables, self.request.variables
        names = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
        if names:
            reason = f"other template variables: {_list(names)}"
            return "template_variables", reason, at, {"variables": names}
        before, now = self.entry.messages[at].form, describe(self.messages[at]).form
        name = self._name(at)
        if before != now:
            reason = f"{name}: {now} instead of {before}, which this template writes differently"
            return "content_form", reason, at, {}
        if self.entry.messages[at].thinking:
            reason = f"assistant message {at}: thinking was dropped by the template"
            return "thinking_dropped", reason, at, {}
        reason = f"{name} is the same, but the template wrote it differently"
        if at == 0:
            reason += " (a date in the template?)"
        return "template_text", reason, at, {}

    def _after_the_prompt(self) -> Found | None:
        """The earlier prompt is a beginning of this one: what differs is the model's own answer."""
        answer, at = self.entry.answer, self.shared
        if answer is None or at >= len(self.messages):
            return None
        new = describe(self.messages[at])
        if new.role != "assistant":
            return None
        name = self._name(at)
        if answer.squeezed == new.squeezed:
            return (*self._same_answer(answer, new, at, name), at, {})
        reason = f"{name} is not what the model answered: the client changed it"
        return "answer_edited", reason, at, {}

    def _same_answer(
        self, answer: MessagePrint, new: MessagePrint, at: int, name: str
    ) -> tuple[str, str]:
        """The text came back as the model wrote it; what stands around it did not, or in other tokens."""
        if answer.thinking == new.thinking:
            # An answer starts after what the prompt opened, and templates leave older thinking out.
            opened = self.differs < self.entry.total
            if new.thinking and (opened or self._left_out(at) > 2):
                return "thinking_dropped", f"{name}: thinking was dropped by the template"
            if opened and self.boundaries.thinking is not None:
                reason = f"{name}: the thinking that its prompt opened was dropped by the template"
                return "thinking_dropped", reason
            if opened:
                return "template_text", f"{name}: the template begins it otherwise in the history"
        found = self._same_text(answer, new, name) if answer.hash != new.hash else None
        same = f"{name}: the same text as other tokens than the model wrote"
        return found or ("retokenised", same)

    def _left_out(self, at: int) -> int:
        """How many tokens fewer message ``at`` takes in the history than the model wrote for it."""
        end = self.boundaries.ends[at] if at < len(self.boundaries.ends) else None
        return 0 if end is None else self.entry.answer_tokens - (end - self.entry.total)

    def _message(self, at: int) -> Found:
        """Message ``at`` is the first that differs."""
        old, new = self.entry.messages[at], describe(self.messages[at])
        name = self._name(at)
        moved = self._moved(at, old, new)
        if moved:
            return moved
        if old.role != new.role and old.text == new.text:
            return "role_changed", f"{name}: the role was {old.role} before", at, {}
        found = self._same_text(old, new, name)
        if found:
            return (*found, at, {})
        return self._other_text(at, old, new, name)

    def _moved(self, at: int, old: MessagePrint, new: MessagePrint) -> Found | None:
        before = [m.hash for m in self.entry.messages]
        after = list(self.request.hashes)
        if at == 0 and (old.role in SYSTEM_ROLES) != (new.role in SYSTEM_ROLES):
            if old.role in SYSTEM_ROLES and old.text != new.text:
                return "system_removed", "the system prompt of before was left out", at, {}
            if new.role in SYSTEM_ROLES and old.text != new.text:
                return "system_added", "a system prompt was added", at, {}
        if at == 0 and self.opening and old.role == new.role and new.role in SYSTEM_ROLES:
            reason = "another system prompt before the same first message"
            return "system_replaced", reason, at, {}
        if new.hash in before[at + 1 :]:
            kept = before[before.index(new.hash, at + 1) :]
            if after[at : at + len(kept)] == kept:
                gone = len(before) - len(kept) - at
                which = f"message {at} was"
                if gone > 1:
                    which = f"messages {at} to {at + gone - 1} were"
                reason = f"history was shortened at the front: {which} left out"
                return "history_truncated", reason, at, {"messages": gone}
        if new.hash in before[at + 1 :] and old.hash in after[at + 1 :]:
            return "messages_reordered", f"messages from {at} on are in another order", at, {}
        if old.hash in after[at + 1 :]:
            more = after.index(old.hash, at + 1) - at
            reason = f"{more} message{'s' * (more > 1)} put in before message {at + more}"
            return "message_inserted", reason, at, {"messages": more}
        if at > 0 and len(after) + 3 <= len(before) and old.role == new.role == "user":
            reason = f"the history behind message {at - 1} was replaced by a shorter one"
            return "history_replaced", reason, at, {}
        return None

    def _same_text(self, old: MessagePrint, new: MessagePrint, name: str) -> tuple[str, str] | None:
        """Differences beside the text, when the text itself agrees."""
        if old.images != new.images:
            return "image_changed", f"{name}: another image"
        if old.squeezed == new.squeezed and old.thinking != new.thinking:
            if not new.thinking:
                return "thinking_dropped", f"{name}: thinking was dropped"
            if not old.thinking:
                return "thinking_added", f"{name}: thinking was added"
            return "thinking_changed", f"{name}: thinking differs"
        if old.text == new.text:
            if old.calls_ordered != new.calls_ordered:
                if old.calls == new.calls:
                    return "arguments_order", f"{name}: tool arguments in another key order"
                return "arguments_changed", f"{name}: tool calls differ"
            if old.ids != new.ids:
                return "call_ids", f"{name}: other tool call ids"
            if old.form != new.form:
                return "content_form", f"{name}: {new.form} instead of {old.form}"
            return None
        if old.squeezed == new.squeezed:
            return self._only_form(old, new, name)
        return None

    def _only_form(self, old: MessagePrint, new: MessagePrint, name: str) -> tuple[str, str]:
        ours, theirs = self._texts(old, new)
        if theirs is not None:
            if ours.replace("\r\n", "\n") == theirs.replace("\r\n", "\n"):
                return "line_endings", f"{name}: other line endings"
            if unicodedata.normalize("NFC", ours) == unicodedata.normalize("NFC", theirs):
                return "unicode", f"{name}: the same characters in another Unicode form"
            at = _common(ours, theirs)
            return "whitespace", f"{name}: only white space differs, at character {at:,}"
        return "whitespace", f"{name}: only white space or the Unicode form differs"

    def _other_text(self, at: int, old: MessagePrint, new: MessagePrint, name: str) -> Found:
        ours, theirs = self._texts(old, new)
        place, end = self._place(ours, theirs, old)
        detail: dict[str, Any] = {"character": place, "character_exact": theirs is not None}
        span = span_at(ours, place) if end is None else _first_span(ours, place, end)
        only = old.masked == new.masked and bool(new.masked)
        words = f"at character {place:,}" if end is None else f"near character {place:,}"
        if theirs is not None:
            detail["before"] = theirs[max(0, place - 40) : place + 80]
            detail["now"] = ours[max(0, place - 40) : place + 80]
            other = span_at(theirs, place)
            if other is not None and (span is None or other.kind == "billing"):
                span = other
        if span is not None:
            start = span.start if span.end > place else place
            if end is not None:
                detail["character"] = start
                words = f"near character {start:,}"
            if only or span.kind != "counter":
                reason = f"{name} differs {words}: looks like {span.words}"
                return span.kind, reason, at, detail
        if theirs is not None and place == len(ours):
            if new.role == "tool":
                return "text_cut", f"{name}: the tool result was cut after {place:,}", at, detail
            return "text_cut", f"{name} was cut after character {place:,}", at, detail
        if theirs is not None and place == len(theirs):
            reason = f"{name} goes on after character {place:,}, where it ended before"
            return "text_extended", reason, at, detail
        if new.role == "tool" and new.chars < CLEARED and new.chars * 4 < old.chars:
            reason = f"{name}: an old tool result was cleared by the client"
            return "tool_result_cleared", reason, at, detail
        return "text_edited", f"{name} differs {words}", at, detail

    def _texts(self, old: MessagePrint, new: MessagePrint) -> tuple[str, str | None]:
        ours = next(
            message_text(m)
            for m, hash in zip(self.messages, self.request.hashes, strict=True)
            if hash == new.hash
        )
        return ours, self.index.text(self.request.salt, old.hash)

    def _place(self, ours: str, theirs: str | None, old: MessagePrint) -> tuple[int, int | None]:
        """First character that differs; without the earlier text (start, end) of the piece it is in."""
        if theirs is not None:
            return _common(ours, theirs), None
        mine = pieces(ours)
        for i, (offset, hash) in enumerate(mine):
            if i >= len(old.pieces) or old.pieces[i] != hash:
                return offset, mine[i + 1][0] if i + 1 < len(mine) else len(ours)
        return (mine[-1][0], len(ours)) if mine else (0, len(ours))

    def _name(self, at: int) -> str:
        role = str(self.messages[at].get("role"))
        if role in SYSTEM_ROLES and at == 0:
            return "system prompt"
        return f"{role} message {at}"


def duration(seconds: float) -> str:
    """A time span as a person says it."""
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' * (count > 1)}"
    return "moments" if seconds < 1 else f"{int(seconds)} second{'s' * (int(seconds) > 1)}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _common(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _first_span(text: str, start: int, end: int) -> Span | None:
    found = spans(text, start, end)
    telling = [span for span in found if span.kind != "counter"]
    return next(iter(telling or found), None)
