"""Where a long text may be cut: dialogue turn, paragraph, code fence, sentence, in that order.

``cuts`` lists every place where a cut does no harm, each with its level. ``chunk`` packs greedily:
each chunk ends at the last cut of the highest level that the limit allows. Five content modes
(dialogue, document, code, mixed, generic) decide what counts as a turn, a paragraph or a sentence;
English and Chinese. Offsets are characters, chunks cover the text without gap or overlap.

The order of levels is that of the ThunderOMLX paper; the rules are this module's own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Mode(StrEnum):
    DIALOGUE = "dialogue"
    DOCUMENT = "document"
    CODE = "code"
    MIXED = "mixed"
    GENERIC = "generic"


class Level(IntEnum):
    """How good a cut is; higher is better. HARD: only because nothing else fits."""

    HARD = 0
    SENTENCE = 1
    FENCE = 2
    PARAGRAPH = 3
    TURN = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """A place between two characters: a new part begins at offset ``at``."""

    at: int
    level: Level


@dataclass(frozen=True, slots=True)
class Chunk:
    """``text[start:end]``; ``level`` is that of the cut at its end (TURN at the end of the text)."""

    start: int
    end: int
    level: Level


@dataclass(frozen=True, slots=True)
class _Line:
    start: int
    end: int  # without the line feed
    text: str
    indent: int
    fence: int  # 0 prose, 1 opens a fence, 2 inside, 3 closes
    alone: bool  # no text in the lines above and below

    @property
    def blank(self) -> bool:
        return not self.text


ROLES = (
    "user|human|assistant|ai|bot|system|developer|tool|model|q|a|question|answer"
    "|用户|助手|系统|工具|问|答|人类|客服|记者"
)
STAMP = r"(?:[\[【(]\d{1,2}:\d\d(?::\d\d)?[\]】)]\s*)?"
ROLE = re.compile(rf"^{STAMP}(?:\#+\s*|\*\*)?({ROLES})(?:\*\*)?\s?[:：]", re.IGNORECASE)
SPEAKER = re.compile(
    rf"^({STAMP})(?:\*\*)?([A-Z][\w.'\u2019-]*(?: [A-Z][\w.'\u2019-]*){{0,3}}|[\w一-鿿]{{1,12}})(?:\*\*)?[:：]"
)
MARKUP = re.compile(
    r"^(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|start\|>|\[INST\])"
)
FENCE = re.compile(r"^\s{0,3}(```+|~~~+)")
HEADING = re.compile(
    r"^(?:#{1,6}\s|(?:Section|Chapter|Part|Article)\s+[\dIVX]+|第[一二三四五六七八九十百\d]+[章节条部]"
    r"|[一二三四五六七八九十]+、)"
)
ITEM = re.compile(
    r"^\s*(?:[-*+•]\s+|\d{1,3}[.)]\s+|\d{1,3}\.(?=[^\d\s])|[（(][一二三四五六七八九十\d]{1,3}[)）]|[a-z]\)\s+)"
)
TABLE = re.compile(r"^\s*\|.*\|\s*$")
STAMPED = re.compile(r"^\s*(?:\[?\d{4}[-/]\d\d?[-/]\d\d?|\d\d:\d\d|\d{1,2}月\d{1,2}日)")
COMMENT = re.compile(r"^\s*(?:#(?!include|define|if|end|!)|//|/\*|\*|--\s|@\w|\"\"\")")
CODE_LINE = re.compile(
    r"^\s*(?:def |class |import |from \w+ import|return\b|if .*:$|for .*:$|while .*:$|else:|try:|except\b"
    r"|function\b|const |let |var |public |private |static |func |package |type \w+ |struct |#include|#!"
    r"|CREATE |SELECT |INSERT |DELETE |FROM |WHERE |UPDATE |set -|mkdir |export )"
    r"|[;{}]\s*$|^\s*[\w.一-鿿]+(?:\[.*\])?\s*(?:=|\+=|:=)\s*\S|^\s*(?://|/\*|--\s)|^\s*[\w.]+\(.*\)[;:]?\s*$"
    r"|^\s+\.\w+\("
)
LEAD_IN = re.compile(r"[:：]\s*$")
# A full stop ends no sentence after these.
ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|Mrs?|MRS?|Ms|D[rR]|Prof|St|Sr|Jr|Fig|Eq|al|[ap]\.m|U\.S|approx|ca)"
    r"|\b[A-Z])\.$"
)
SENTENCE_END = re.compile(
    r"[.!?]+[\"'”\u2019)\]]*(?=\s)"  # English: white space must follow
    r"|[。！？!?…]+[”\u2019」』）)\"']*(?=[^\s。！？!?…”\u2019」』）)]|\s*$)"  # Chinese: anything may follow
    r"|；(?=\S)|;(?=\s+[a-zA-Z])"
)
# "Come!" said she: a spoken sentence goes on behind its quotation mark.
SAID = re.compile(r"[^\s\uff0c\u3002\uff01\uff1f\uff1a:]{1,8}[说问道喊想答][\u3002\uff0c]")
FILL = 0.1  # a cut that would leave a chunk emptier than this is taken only if there is no other


def detect(text: str) -> Mode:
    """The content mode of a text, from its lines."""
    lines = _lines(text)
    filled = [line for line in lines if not line.blank]
    if not filled:
        return Mode.GENERIC
    turns = _turn_lines(lines)
    blocks = sum(
        1 for i, line in enumerate(lines) if not line.blank and (not i or lines[i - 1].blank)
    )
    if len(turns) >= 2 and (2 * len(turns) >= blocks or 4 * len(turns) >= len(filled)):
        return Mode.DIALOGUE
    fenced = sum(1 for line in lines if line.fence)
    code = sum(1 for line in filled if not line.fence and CODE_LINE.search(line.text))
    prose = sum(1 for line in filled if not line.fence) - code
    if fenced:
        return Mode.MIXED
    if code * 2 >= len(filled) and code >= 3:
        return Mode.CODE
    if code >= 3 and prose >= 2 and _has_blank(lines):
        return Mode.MIXED if code * 5 >= len(filled) else Mode.DOCUMENT
    return Mode.DOCUMENT if _has_blank(lines) else Mode.GENERIC


def cuts(text: str, mode: Mode | None = None) -> list[Cut]:
    """All places where a cut does no harm, ascending; neither 0 nor the end of the text."""
    mode = mode or detect(text)
    lines = _lines(text)
    levels: dict[int, Level] = {}

    def add(at: int, level: Level) -> None:
        if 0 < at < len(text) and level > levels.get(at, Level.HARD):
            levels[at] = level

    turns = _turn_lines(lines) if mode in (Mode.DIALOGUE, Mode.MIXED) else set()
    if mode is Mode.MIXED and len(turns) < 3:
        turns = set()
    for i in turns:
        add(lines[i].start, Level.TURN)
    if mode is Mode.CODE:
        _code_cuts(lines, 0, len(lines), add)
    else:
        _prose_cuts(text, lines, mode, turns, add)
    return [Cut(at, levels[at]) for at in sorted(levels)]


def chunk(
    text: str,
    limit: int,
    mode: Mode | None = None,
    measure: Callable[[str], int] = len,
) -> list[Chunk]:
    """Cut a text into chunks of at most ``limit``, as ``measure`` counts (characters by default).

    Only a text that offers no cut within the limit is cut elsewhere (level HARD), and then
    between characters, after white space where there is some.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, found {limit}")
    if not text:
        return []
    places = cuts(text, mode)
    ats = [cut.at for cut in places]
    chunks: list[Chunk] = []
    start = 0
    while start < len(text):
        farthest = _reach(text, start, limit, measure)
        if farthest >= len(text):
            chunks.append(Chunk(start, len(text), Level.TURN))
            break
        # All cuts within reach; the best level, then the farthest, but not a chunk nearly empty.
        low = start + max(1, int((farthest - start) * FILL))
        inside = places[bisect_right(ats, start) : bisect_right(ats, farthest)]
        full = [cut for cut in inside if cut.at >= low]
        best = max(full or inside, key=lambda cut: (cut.level, cut.at), default=None)
        if best is None:
            best = Cut(_hard(text, start, farthest), Level.HARD)
        chunks.append(Chunk(start, best.at, best.level))
        start = best.at
    return chunks


def last_cut(places: list[Cut], low: int, high: int) -> Cut | None:
    """The best cut with ``low`` <= at <= ``high``: highest level, then farthest."""
    inside = [cut for cut in places if low <= cut.at <= high]
    return max(inside, key=lambda cut: (cut.level, cut.at), default=None)


def _reach(text: str, start: int, limit: int, measure: Callable[[str], int]) -> int:
    """The farthest end whose chunk still measures at most ``limit``; at least one character."""
    if measure is len:
        return start + limit
    low, high = start + 1, min(len(text), start + 16 * limit)
    while low < high:
        middle = (low + high + 1) // 2
        if measure(text[start:middle]) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _hard(text: str, start: int, end: int) -> int:
    """Where nothing offers itself: a line's end, a comma, a space, in the chunk's last half."""
    low = start + max(1, (end - start) // 2)
    for marks in ("\n", "\uff0c\u3001,;", " \t"):
        at = max(text.rfind(mark, low, end) for mark in marks)
        if at >= 0:
            return at + 1
    return end


# --- prose


def _prose_cuts(
    text: str,
    lines: list[_Line],
    mode: Mode,
    turns: set[int],
    add: Callable[[int, Level], None],
) -> None:
    fences = _fence_blocks(lines)
    inside = {i for first, last in fences for i in range(first, last + 1)}
    blanks = _has_blank(lines)
    paragraph = Level.SENTENCE if mode is Mode.DIALOGUE else Level.PARAGRAPH
    for i, line in enumerate(lines):
        if line.blank or i == 0 or i in inside or i in turns:
            continue
        above = _previous(lines, i)
        if above is None:
            continue
        before = lines[above]
        gap = above < i - 1
        if above in inside:  # what follows a fence
            add(line.start, Level.SENTENCE if mode is Mode.DIALOGUE else Level.FENCE)
            if gap:
                add(line.start, paragraph)
        elif _belongs(before, line, gap):
            continue
        elif gap or HEADING.match(line.text):
            add(line.start, paragraph)
        elif _is_entry(lines, above, i, mode, blanks):
            add(line.start, Level.SENTENCE)
    for first, last in fences:
        above = _previous(lines, first)
        if (
            above is not None
            and above not in inside
            and not _belongs(lines[above], lines[first], True)
        ):
            add(lines[first].start, Level.FENCE)
            if above < first - 1:
                add(lines[first].start, paragraph)
        # A long fence may be cut where its code may be.
        if lines[last].end - lines[first].start > 2000:
            _code_cuts(lines, first + 1, last, lambda at, _: add(at, Level.SENTENCE))
    _sentence_cuts(text, lines, inside, add)


def _belongs(before: _Line, line: _Line, gap: bool) -> bool:
    """Does ``before`` announce or head what follows, so that nothing may come between?"""
    if TABLE.match(line.text):
        return bool(TABLE.match(before.text))
    if LEAD_IN.search(before.text) and not HEADING.match(line.text):
        # A list after its lead-in may be cut between its items, not before the first if close.
        return not ITEM.match(line.text) or not gap
    return _heads(before, gap) and not _heads(line, gap)


def _heads(line: _Line, gap: bool) -> bool:
    """A heading by its mark, or a short line with no stop at its end that stands alone."""
    if HEADING.match(line.text):
        return line.text.startswith("#") or (len(line.text) < 60 and not _ends(line.text))
    return (
        gap
        and line.alone
        and len(line.text) < 40
        and not re.search(r"\W$", line.text)
        and not ITEM.match(line.text)
        and not line.indent
    )


def _ends(text: str) -> bool:
    return bool(re.search(r"[.!?。！？；;:：]\W*$", text))


def _is_entry(lines: list[_Line], above: int, i: int, mode: Mode, blanks: bool) -> bool:
    """Does a line directly under another begin something of its own: an item, a log entry?"""
    line, before = lines[i], lines[above]
    if ITEM.match(line.text) or STAMPED.match(line.text) or _answers(lines, i):
        return True
    if ITEM.match(before.text) and not line.indent:
        return True
    # One entry a line, without marks: a table of values, a shopping list.
    return mode is Mode.GENERIC and not blanks and not line.indent and len(before.text) < 200


def _sentence_cuts(
    text: str, lines: list[_Line], inside: set[int], add: Callable[[int, Level], None]
) -> None:
    for i, line in enumerate(lines):
        if line.blank or i in inside or TABLE.match(line.text) or HEADING.match(line.text):
            continue
        if line.indent >= 4 and CODE_LINE.search(line.text):
            continue
        # The line feed counts as white space behind the last sentence, which needs no cut.
        for match in SENTENCE_END.finditer(text, line.start, line.end):
            at = match.end()
            while at < line.end and text[at].isspace():
                at += 1
            if at >= line.end:
                continue
            if match.group().startswith("."):
                if ABBREVIATION.search(
                    text, max(line.start, match.start() - 12), match.start() + 1
                ):
                    continue
                if text[at].islower() and not text[line.start].islower():
                    continue
                if ITEM.match(text[line.start : at]) and match.end() - line.start < 5:
                    continue
            if match.group()[0] in "…" and text[match.end()].isalnum():
                continue
            if match.group()[-1] in "”」』" and SAID.match(text, at):
                continue
            add(at, Level.SENTENCE)


# --- code


def _code_cuts(
    lines: list[_Line], first: int, last: int, add: Callable[[int, Level], None]
) -> None:
    """Cuts before definitions: a blank line and then a line that is indented no more than the
    outermost one (paragraph), a method one level in (paragraph), other blank lines (sentence)."""
    filled = [line for line in lines[first:last] if not line.blank]
    if not filled:
        return
    outer = min(line.indent for line in filled)
    deeper = sorted({line.indent for line in filled} - {outer})
    member = deeper[0] if deeper else None
    in_class = False
    for i in range(first, last):
        line, above = lines[i], lines[max(first, i - 1)]
        if line.blank:
            continue
        if line.indent == outer and re.match(
            r"\s*(?:\w+ )*(?:class|interface|struct|impl)\b", line.text
        ):
            in_class = True
        elif line.indent == outer and re.match(
            r"\s*(?:def|function|func|static|int|void)\b", line.text
        ):
            in_class = False
        if not above.blank or i == first:
            continue
        opener = _previous(lines, i)
        if opener is None or opener < first:
            continue
        in_member = line.indent == member and in_class and _closes(lines[opener], line)
        whole = line.indent == outer or in_member
        add(line.start, Level.PARAGRAPH if whole else Level.SENTENCE)


def _closes(before: _Line, line: _Line) -> bool:
    """Is ``before`` the end of a member, rather than a docstring or a field of the class?"""
    return before.indent > line.indent or before.text.strip() in ("}", "};", "end", ")")


# --- lines


def _lines(text: str) -> list[_Line]:
    lines: list[_Line] = []
    at, mark = 0, ""
    raws = text.split("\n")
    for i, raw in enumerate(raws):
        bare = raw.strip()
        indent = len(raw) - len(raw.lstrip()) if bare else 0
        fence = 0
        opening = FENCE.match(raw)
        if mark:
            fence = (
                3
                if opening and opening.group(1).startswith(mark) and bare == opening.group(1)
                else 2
            )
        elif opening:
            fence = 1
        if fence == 1 and opening:
            mark = opening.group(1)
        elif fence == 3:
            mark = ""
        alone = not raws[max(0, i - 1) : i] or not raws[i - 1].strip()
        alone = alone and (i + 1 == len(raws) or not raws[i + 1].strip())
        lines.append(_Line(at, at + len(raw), raw.rstrip() if bare else "", indent, fence, alone))
        at += len(raw) + 1
    return lines


def _fence_blocks(lines: list[_Line]) -> list[tuple[int, int]]:
    """(first, last) line of each fenced block; one that is never closed goes to the end."""
    blocks: list[tuple[int, int]] = []
    opened: int | None = None
    for i, line in enumerate(lines):
        if line.fence == 1:
            opened = i
        elif line.fence == 3 and opened is not None:
            blocks.append((opened, i))
            opened = None
    if opened is not None:
        blocks.append((opened, len(lines) - 1))
    return blocks


def _turn_lines(lines: list[_Line]) -> set[int]:
    """Lines at which a speaker's turn begins: a known role, or a name that speaks again."""
    named: dict[int, str] = {}
    found: set[int] = set()
    for i, line in enumerate(lines):
        if line.blank or line.fence:
            continue
        if MARKUP.match(line.text) or ROLE.match(line.text):
            found.add(i)
            continue
        speaker = SPEAKER.match(line.text)
        if speaker:
            named[i] = speaker.group(2)
            if speaker.group(1):
                found.add(i)
    times = Counter(named.values())
    again = {name for name, count in times.items() if count >= 2}
    if len(again) >= 2 or (again and len(times) >= 2 and len(named) >= 4):
        # Two or more who speak in turns: then everybody with a name does.
        found |= set(named)
    # An answer directly under its question belongs to it.
    return {i for i in found if not _answers(lines, i)}


def _answers(lines: list[_Line], i: int) -> bool:
    if not i or lines[i - 1].blank:
        return False
    pair = (lines[i - 1].text[:2].lower(), lines[i].text[:2].lower())
    return pair in (("q:", "a:"), ("问：", "答："), ("问:", "答:"))


def _has_blank(lines: list[_Line]) -> bool:
    last = max((i for i, line in enumerate(lines) if not line.blank), default=0)
    return any(line.blank for line in lines[:last])


def _previous(lines: list[_Line], i: int) -> int | None:
    for j in range(i - 1, -1, -1):
        if not lines[j].blank:
            return j
    return None
