"""The map of cached prefixes: joined where nothing branches, bounded, fast enough for a page."""

from __future__ import annotations

import itertools
import json
from typing import Any

from thunder_patches.observe.history import Place, Seen
from thunder_patches.observe.prefixes import Node, prefix_map

ROOT = b"root"


def block(key: str, parent: str, stamp: int = 1, **more: Any) -> Node:
    return Node(key.encode(), parent.encode(), True, 100, stamp * 10**9, **more)


def chain(name: str, length: int, parent: str = "root", stamp: int = 1) -> list[Node]:
    keys = [parent, *(f"{name}{i}" for i in range(length))]
    return [block(key, before, stamp) for before, key in itertools.pairwise(keys)]


def stretches(nodes: list[Node], **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = prefix_map(nodes, **more)["stretches"]
    return found


def seen(last: str, system: str | None = None) -> Seen:
    place = Place(ROOT, last.encode(), system.encode() if system else None, "abcd", 3, "<b>hi</b>")
    return Seen(1.0, 10, 0, "none", None, place=place)


def test_an_empty_cache_has_an_empty_map() -> None:
    assert prefix_map([]) == {
        "stretches": [],
        "more": {"stretches": 0, "blocks": 0, "bytes": 0},
    }


def test_blocks_without_a_branch_are_one_stretch() -> None:
    root, all_of_it = stretches(chain("a", 5))
    assert (root["parent"], root["blocks"]) == (None, 0)
    assert (all_of_it["parent"], all_of_it["blocks"], all_of_it["bytes"]) == (0, 5, 500)


def test_a_branch_ends_a_stretch_and_its_snapshots_belong_to_it() -> None:
    nodes = chain("s", 3) + chain("a", 2, "s2", 5) + chain("b", 4, "s2", 9)
    nodes.append(Node(b"end", b"b3", False, 7, 9 * 10**9))
    root, shared, b, a = stretches(nodes)
    assert [s["blocks"] for s in (root, shared, a, b)] == [0, 3, 2, 4]
    assert [s["parent"] for s in (shared, a, b)] == [0, 1, 1]
    assert [s["start"] for s in (shared, a, b)] == [0, 3, 3]
    assert (b["snapshots"], b["bytes"], b["used"]) == (1, 407, 9.0)


def test_pins_memory_and_the_time_of_use_are_told() -> None:
    nodes = [block("a", "root", 4, owners=("mine",), in_ram=True), block("b", "a", 7)]
    _, found = stretches(nodes)
    assert (found["pinned"], found["in_ram"], found["used"]) == (["mine"], 1, 7.0)


def test_the_latest_used_are_kept_with_all_that_they_hang_off() -> None:
    nodes = chain("old", 3, stamp=2) + chain("deep", 2, stamp=1)
    for i in range(50):
        nodes += chain(f"x{i}-", 1, "deep1", stamp=100 + i)
    found = prefix_map(nodes, shown=5)
    kept = found["stretches"]
    assert len(kept) == 5
    assert [s["used"] for s in kept[2:]] == [149.0, 148.0, 147.0]
    assert all(s["parent"] is None or s["parent"] < i for i, s in enumerate(kept))
    assert found["more"] == {"stretches": 48, "blocks": 50, "bytes": 5000}
    assert sum(s["blocks"] for s in kept) + found["more"]["blocks"] == len(nodes)


def test_requests_name_where_they_ended_and_their_system_prompt() -> None:
    nodes = chain("s", 2) + chain("a", 2, "s1", 5) + chain("b", 2, "s1", 4)
    places = [seen("a1", "s1"), seen("a1", "s1"), seen("gone", "gone")]
    _, shared, a, b = stretches(nodes, seen=places)
    assert shared["systems"] == ["abcd"] and "requests" not in shared
    assert (a["requests"], a["messages"], a["text"]) == (2, 3, "<b>hi</b>")
    assert "requests" not in b


def test_a_chain_as_deep_as_there_are_blocks_can_be_told() -> None:
    nodes = []
    for i in range(5000):  # each block has a sister, so that every block is a branch
        nodes += [block(f"m{i}", f"m{i - 1}" if i else "root"), block(f"w{i}", f"m{i}")]
    found = prefix_map(nodes, shown=300)
    assert len(found["stretches"]) == 300 and len(json.dumps(found)) < 100_000
