"""Cuts against hand-marked texts: this package, fixed size, and two splitter libraries.

Run: python -m tests.bench.pilot_chunking [--show NAME]

Odd-numbered texts were looked at while the rules were written, even-numbered ones were held out;
both are reported. Libraries are optional (langchain-text-splitters, semantic-text-splitter).
"""

from __future__ import annotations

import argparse
import bisect
from collections.abc import Callable
from pathlib import Path

from thunder_patches.pilot.chunking import Level, chunk, cuts, detect

DATA = Path(__file__).parent.parent / "data" / "chunking"
STRONG, WEAK = "‖", "¦"
Splitter = Callable[[str, int], list[int]]


def load(path: Path) -> tuple[str, set[int], set[int]]:
    """Text without marks; offsets of strong marks and of all marks."""
    text, strong, every = "", set(), set()
    for character in path.read_text(encoding="utf-8"):
        if character in (STRONG, WEAK):
            every.add(len(text))
            if character == STRONG:
                strong.add(len(text))
        else:
            text += character
    return text, {settle(text, at) for at in strong}, {settle(text, at) for at in every}


def settle(text: str, at: int) -> int:
    """White space beside a cut does not count: the offset of what follows it."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def texts() -> list[Path]:
    return sorted(DATA.glob("*.txt"))


def held_out(path: Path) -> bool:
    return int(path.stem[-2:]) % 2 == 0


def ours(text: str, limit: int) -> list[int]:
    return [c.end for c in chunk(text, limit)][:-1]


def fixed(text: str, limit: int) -> list[int]:
    return list(range(limit, len(text), limit))


def libraries() -> dict[str, Splitter]:
    found: dict[str, Splitter] = {"this package": ours, "fixed size": fixed}
    try:
        from langchain_text_splitters import RecursiveCharacterTextSplitter

        def langchain(text: str, limit: int) -> list[int]:
            separators = ["\n\n", "\n", "。", "！", "？", ". ", "! ", "? ", " ", ""]
            splitter = RecursiveCharacterTextSplitter(
                separators=separators,
                keep_separator="end",
                chunk_size=limit,
                chunk_overlap=0,
                strip_whitespace=False,
            )
            return ends(splitter.split_text(text))

        found["langchain"] = langchain
    except ImportError:
        pass
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        def semantic(text: str, limit: int) -> list[int]:
            return ends(TextSplitter(limit, trim=False).chunks(text))

        def markdown(text: str, limit: int) -> list[int]:
            return ends(MarkdownSplitter(limit, trim=False).chunks(text))

        found["semantic (text)"] = semantic
        found["semantic (markdown)"] = markdown
    except ImportError:
        pass
    return found


def ends(parts: list[str]) -> list[int]:
    at, found = 0, []
    for part in parts[:-1]:
        at += len(part)
        found.append(at)
    return found


def limits(text: str) -> tuple[int, ...]:
    """Chunk sizes that make a handful of chunks of texts as short as these."""
    unit = 60 if any("一" <= c <= "鿿" for c in text) else 150
    return (unit, 2 * unit, 3 * unit)


def score(splitter: Splitter, paths: list[Path]) -> dict[str, float]:
    """Of the cuts made: share at a strong or any mark. Of the strong marks: share that was cut.

    The best possible recall at a limit is below 1: chunks are packed full, so not every mark is cut.
    """
    made = good = best = marks = hit = 0
    for path in paths:
        text, strong, every = load(path)
        for limit in limits(text):
            at = {settle(text, cut) for cut in splitter(text, limit)} - {len(text)}
            made += len(at)
            good += len(at & every)
            best += len(at & strong)
            marks += len(strong)
            hit += len(at & strong)
    precision, recall = best / max(1, made), hit / max(1, marks)
    return {
        "harmless": good / max(1, made),
        "precision": precision,
        "recall": recall,
        "F1": 2 * precision * recall / max(1e-9, precision + recall),
    }


def detection(paths: list[Path]) -> dict[str, float]:
    """All cuts that the rules offer, without a limit, against all marks."""
    found_all = marks_all = right_all = found_strong = marks_strong = right_strong = 0
    for path in paths:
        text, strong, every = load(path)
        offered = cuts(text)
        all_cuts = {settle(text, c.at) for c in offered}
        strong_cuts = {settle(text, c.at) for c in offered if c.level >= Level.FENCE}
        found_all += len(all_cuts)
        marks_all += len(every)
        right_all += len(all_cuts & every)
        found_strong += len(strong_cuts)
        marks_strong += len(strong)
        right_strong += len(strong_cuts & strong)
    return {
        "precision, all": right_all / found_all,
        "recall, all": right_all / marks_all,
        "precision, strong": right_strong / found_strong,
        "recall, strong": right_strong / marks_strong,
    }


def show(name: str) -> None:
    for path in texts():
        if not path.stem.startswith(name):
            continue
        text, strong, every = load(path)
        offered = {settle(text, c.at): c.level for c in cuts(text)}
        wrong = []
        for at in sorted(set(offered) | every):
            level = offered.get(at)
            kind = "strong" if at in strong else "weak" if at in every else "none"
            fine = {"strong": level in (2, 3, 4), "weak": level is not None, "none": False}[kind]
            if not fine or (kind == "weak" and level and level > 1):
                lines = [i for i, c in enumerate(text) if c == "\n"]
                row = bisect.bisect(lines, at - 1) + 1
                wrong.append(f"  line {row}: marked {kind}, level {level}: {text[at : at + 40]!r}")
        print(path.stem, detect(text).value)
        print("\n".join(wrong))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--show", help="differences for the texts whose names begin so")
    arguments = parser.parse_args()
    if arguments.show is not None:
        show(arguments.show)
        return
    paths = texts()
    for title, part in (
        ("looked at (odd)", [p for p in paths if not held_out(p)]),
        ("held out (even)", [p for p in paths if held_out(p)]),
    ):
        right = sum(detect(load(p)[0]).value == p.stem.split("-")[0] for p in part)
        print(f"\n{title}: {len(part)} texts, mode right for {right}")
        print("  rules without a limit: ", end="")
        print(", ".join(f"{k} {v:.2f}" for k, v in detection(part).items()))
        for name, splitter in libraries().items():
            row = ", ".join(f"{k} {v:.2f}" for k, v in score(splitter, part).items())
            print(f"  {name:<20} {row}")


if __name__ == "__main__":
    main()
