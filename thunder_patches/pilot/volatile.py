"""Parts of a text that change from request to request: dates, times, ids, nonces, counters.

Used to explain a difference ("looks like a date"); the stabiliser has rules of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MONTH = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    "|Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
# The first kind that matches at a place wins, so the more telling ones come first.
KINDS: tuple[tuple[str, str, str], ...] = (
    ("billing", "a billing header", r"(?im:^[ \t]*x-[a-z-]*billing[a-z-]*:.*$)"),
    ("uuid", "a UUID", r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"),
    (
        "timestamp",
        "a date and time",
        r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?",
    ),
    (
        "date",
        "a date",
        r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}\b|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
        r"|\d{4}\s?年\s?\d{1,2}\s?月(?:\s?\d{1,2}\s?[日号])?"
        rf"|\b{MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}\b|\b\d{{1,2}}\.? {MONTH}\.?,? \d{{4}}\b"
        r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b|(?:星期|周)[一二三四五六日天]",
    ),
    (
        "time",
        "a time of day",
        r"\b\d{1,2}:\d\d(?::\d\d)?(?: ?[AaPp][Mm])?\b|\d{1,2}\s?点\s?\d{1,2}\s?分",
    ),
    ("epoch", "a Unix time", r"\b1[5-9]\d{8}(?:\d{3}|\d{6})?\b"),
    (
        "nonce",
        "a random id",
        r"\b(?=[0-9a-zA-Z_-]*\d)(?=[0-9a-zA-Z_-]*[a-zA-Z])[0-9a-zA-Z]+(?:[_-][0-9a-zA-Z]+)*\b",
    ),
    ("path", "a temporary path", r"(?:/tmp|/var/folders|/private/var)/[^\s\"'<>)]+"),
    ("counter", "a number that counts", r"(?<![\w.])\d+(?:[.,]\d+)*(?![\w])"),
)
WORDS = {kind: words for kind, words, _ in KINDS}
PATTERN = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, _, pattern in KINDS))
HINT = re.compile(
    r"\d|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)|星期|周[一二三四五六日天]|/tmp/|/var/|/private/|-billing"
)
LONG_LINE, AROUND = 400, 48  # characters
SHORTEST_NONCE = 8  # "h264" and "utf8" are words


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int
    kind: str

    @property
    def words(self) -> str:
        """The kind, as a person would say it."""
        return WORDS[self.kind]


def spans(text: str, start: int = 0, end: int | None = None) -> list[Span]:
    """Volatile parts of ``text[start:end]`` in order."""
    found = []
    for low, high in _worth_looking_at(text, start, len(text) if end is None else end):
        for match in PATTERN.finditer(text, low, high):
            kind = match.lastgroup or ""
            if kind == "nonce" and not _looks_random(match.group()):
                continue
            found.append(Span(match.start(), match.end(), kind))
    return found


def _worth_looking_at(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Ranges that hold a digit or another sign of something volatile: most of a text does not."""
    ranges: list[tuple[int, int]] = []
    for hint in HINT.finditer(text, start, end):
        at = hint.start()
        if ranges and at < ranges[-1][1] - AROUND:
            continue
        low = max(start, text.rfind("\n", start, at) + 1)
        high = text.find("\n", at, end)
        high = end if high < 0 else high
        if high - low > LONG_LINE:  # keep to the words around it
            low = max(low, text.rfind(" ", low, max(low, at - AROUND)) + 1)
            space = text.find(" ", min(high, at + 2 * AROUND), high)
            high = high if space < 0 else space
        if ranges and low < ranges[-1][1]:
            low = ranges.pop()[0]
        ranges.append((low, high))
    return ranges


def span_at(text: str, at: int) -> Span | None:
    """The volatile part that holds or touches character ``at``; None if there is none."""
    line_start = text.rfind("\n", 0, at) + 1
    line_end = text.find("\n", at)
    line_end = len(text) if line_end < 0 else line_end
    # Long lines: a few hundred characters around the place are enough.
    near = spans(text, max(line_start, at - 200), min(line_end, at + 200))
    holding = [s for s in near if s.start <= at <= s.end]
    return min(holding, key=lambda s: (at == s.end, s.start), default=None)


def mask(text: str) -> str:
    """``text`` with each volatile part replaced by its kind: equal for texts that differ in nothing else."""
    parts, cursor = [], 0
    for span in spans(text):
        # Dates and times stand in many forms beside each other: one mask for all of them.
        kind = "when" if span.kind in ("timestamp", "date", "time", "epoch") else span.kind
        kind = "id" if kind in ("uuid", "nonce", "counter") else kind
        parts += [text[cursor : span.start], "\x01", kind, "\x01"]
        cursor = span.end
    parts.append(text[cursor:])
    return "".join(parts)


def _looks_random(word: str) -> bool:
    if len(word) < SHORTEST_NONCE:
        return False
    digits = sum(c.isdigit() for c in word)
    # "gpt-oss-120b" or "test_file_2" have a digit or three, a nonce of that length has more.
    return digits >= max(3, len(word) // 6) or bool(re.fullmatch(r"[0-9a-fA-F]{8,}", word))
