"""Cuts in long texts, against texts with hand-marked boundaries and against invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.pilot_chunking import detection, fixed, held_out, load, ours, score, texts
from thunder_patches.pilot.chunking import Chunk, Cut, Level, Mode, chunk, cuts, detect, last_cut


def test_enough_texts_of_every_kind() -> None:
    names = [path.stem for path in texts()]
    assert len(names) >= 60
    for mode in Mode:
        for language in ("en", "zh"):
            assert sum(name.startswith(f"{mode.value}-{language}") for name in names) >= 6
    for path in texts():
        text, strong, every = load(path)
        assert every, path.stem
        assert strong or path.stem.startswith("generic")
        assert "‖" not in text


def test_rules_on_held_out_texts() -> None:
    quality = detection([p for p in texts() if held_out(p)])
    assert quality["precision, all"] >= 0.95
    assert quality["recall, all"] >= 0.92
    assert quality["precision, strong"] >= 0.93
    assert quality["recall, strong"] >= 0.88


def test_packed_chunks_beat_fixed_size_and_a_control_does_not() -> None:
    paths = [p for p in texts() if held_out(p)]
    good, poor = score(ours, paths), score(fixed, paths)
    assert good["harmless"] >= 0.85
    assert poor["harmless"] < 0.2
    assert good["F1"] > poor["F1"] + 0.3


def test_modes() -> None:
    right = [p for p in texts() if detect(load(p)[0]).value == p.stem.split("-")[0]]
    assert len(right) >= 55


def parts(text: str, limit: int, **options) -> list[str]:
    return [text[c.start : c.end] for c in chunk(text, limit, **options)]


def test_order_of_levels() -> None:
    turns = "User: One. Two.\n\nThree. Four.\nAssistant: Five. Six.\nUser: Seven.\n"
    assert [c.level for c in cuts(turns)].count(Level.TURN) == 2
    # A turn wins over a sentence that would fill the chunk better.
    assert parts(turns, 48)[0] == "User: One. Two.\n\nThree. Four.\n"
    text = "First one. Second one.\n\nThird one. Fourth one. Fifth one."
    assert parts(text, 44) == ["First one. Second one.\n\n", "Third one. Fourth one. Fifth one."]
    fenced = "Some words here.\n```\na = 1\n```\nMore words. And more."
    assert parts(fenced, 42) == ["Some words here.\n```\na = 1\n```\n", "More words. And more."]


def test_nothing_comes_between_a_heading_a_lead_in_or_a_comment_and_what_it_belongs_to() -> None:
    heading = "Text before it.\n\n## Heading\n\nText below it."
    assert [c.at for c in cuts(heading)] == [heading.index("##")]
    lead_in = "Run this:\n\n```\nmake\n```\n\nThen wait."
    assert [c.at for c in cuts(lead_in)] == [lead_in.index("Then")]
    code = "import os\n\n\n# Says hello.\ndef hello():\n    print(os.name)\n\n\nhello()\n"
    assert [c.at for c in cuts(code, Mode.CODE)] == [code.index("# Says"), code.rindex("hello()")]


def test_sentences_in_both_languages() -> None:
    english = 'It costs 3.50 at Dr. Lee\'s, e.g. on Monday. "Really?" Yes. See a.b.c for more.'
    assert parts(english, 46, mode=Mode.GENERIC)[0] == english[: english.index('"Really')]
    chinese = "今天下雨了。他说：“我不去！”后来雨停了……大家都很高兴。"
    assert [chinese[c.at] for c in cuts(chinese)] == ["他", "后"]  # an ellipsis is no full stop
    quoted = "“明年再看吧！”他对树说。树没有回答。"
    assert [quoted[c.at] for c in cuts(quoted)] == ["树"]


def test_measure_by_tokens() -> None:
    text = "One two three. Four five six. Seven eight nine. Ten."
    words = parts(text, 6, measure=lambda part: len(part.split()))
    assert words == ["One two three. Four five six. ", "Seven eight nine. Ten."]


def test_last_cut_for_chunk_plans() -> None:
    places = [Cut(10, Level.PARAGRAPH), Cut(20, Level.SENTENCE), Cut(30, Level.PARAGRAPH)]
    assert last_cut(places, 5, 25) == places[0]
    assert last_cut(places, 5, 30) == places[2]
    assert last_cut(places, 11, 29) == places[1]
    assert last_cut(places, 31, 40) is None


def test_bad_limit_and_empty_text() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1, found 0"):
        chunk("text", 0)
    assert chunk("", 10) == []
    assert chunk("abc", 10) == [Chunk(0, 3, Level.TURN)]


PIECES = [
    *"aZ 。！.!?\n\n\t|:：“”é😀\r",
    "```\n",
    "User: ",
    "# ",
    "- ",
    "def f():\n    ",
    "e.g. ",
    "1. ",
    "word " * 20,
]


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=80).map("".join),
    limit=st.integers(1, 120),
    mode=st.sampled_from([None, *Mode]),
)
def test_chunks_cover_the_text_and_keep_the_limit(text: str, limit: int, mode: Mode | None) -> None:
    found = chunk(text, limit, mode)
    assert "".join(text[c.start : c.end] for c in found) == text
    assert all(0 < c.end - c.start <= limit for c in found)
    places = {c.at for c in cuts(text, mode)}
    assert all(c.end in places for c in found[:-1] if c.level is not Level.HARD)
    assert chunk(text, limit, mode) == found


def test_linear_time() -> None:
    """Doubling a large text must not quadruple the work (counted in calls, not in seconds)."""
    calls = 0

    def measure(part: str) -> int:
        nonlocal calls
        calls += 1
        return len(part)

    text = "One two three. Four five six.\n\n" * 400
    chunk(text, 300, measure=measure)
    once, calls = calls, 0
    chunk(text * 2, 300, measure=measure)
    assert calls < 2.5 * once
