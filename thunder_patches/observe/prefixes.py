"""A map of what is cached: the tree of prefixes, drawn together and bounded.

Blocks that follow one another without a branch are one stretch. Of thousands of stretches those used
last are told, with all that they hang off; of the others only how much they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .history import Seen

SHOWN = 240
SYSTEMS = 4  # system prompts named in one stretch


class Node(NamedTuple):
    """A stored record: bytes, last use in ns since 1970, who pinned it, whether it is in memory."""

    key: bytes
    parent: bytes
    is_block: bool
    size: int
    stamp: int
    owners: tuple[str, ...] = ()
    in_ram: bool = False


@dataclass(slots=True)
class _Stretch:
    parent: _Stretch | None
    root: bytes
    key: bytes  # of its last block
    start: int = 0  # blocks before it
    blocks: int = 0
    snapshots: int = 0
    size: int = 0
    in_ram: int = 0
    used: int = 0  # ns
    latest: int = 0  # ns, with all that hangs off it
    owners: set[str] = field(default_factory=set)
    number: int = -1
    about: dict[str, Any] = field(default_factory=dict)

    def take(self, node: Node) -> None:
        self.blocks += node.is_block
        self.key = node.key if node.is_block else self.key
        self.snapshots += not node.is_block
        self.size += node.size
        self.in_ram += node.in_ram
        self.used = max(self.used, node.stamp)
        self.owners.update(node.owners)

    def to_json(self) -> dict[str, Any]:
        return {
            "parent": self.parent.number if self.parent is not None else None,
            "root": self.root.hex()[:8],
            "key": self.key.hex()[:12],
            "start": self.start,
            "blocks": self.blocks,
            "snapshots": self.snapshots,
            "bytes": self.size,
            "in_ram": self.in_ram,
            "used": round(self.used / 1e9, 3),
            "pinned": sorted(self.owners),
            **self.about,
        }


def prefix_map(
    nodes: Iterable[Node], seen: Sequence[Seen] = (), *, shown: int = SHOWN
) -> dict[str, Any]:
    """The map, as JSON types.

    Args:
        nodes: all records. seen: recent requests, newest first; they name the places they ended at.
        shown: most stretches told.

    Returns:
        ``stretches``: each with the number of the one it hangs off (``parent``, None at a root), so
        that a deep tree is a flat list; ``more``: how many, and how much, are left out.
    """
    stretches, of_key = _stretches(list(nodes))
    _label(of_key, seen)
    stretches.sort(key=lambda stretch: (-stretch.latest, stretch.start))
    kept, rest = stretches[:shown], stretches[shown:]
    for number, stretch in enumerate(kept):
        stretch.number = number
    return {
        "stretches": [stretch.to_json() for stretch in kept],
        "more": {
            "stretches": len(rest),
            "blocks": sum(stretch.blocks for stretch in rest),
            "bytes": sum(stretch.size for stretch in rest),
        },
    }


def _stretches(nodes: list[Node]) -> tuple[list[_Stretch], dict[bytes, _Stretch]]:
    """All stretches, each after the one it hangs off, and the one that each key is in."""
    after: dict[bytes, list[Node]] = {}
    for node in nodes:
        after.setdefault(node.parent, []).append(node)
    known = {node.key for node in nodes}
    found: list[_Stretch] = []
    of_key: dict[bytes, _Stretch] = {}
    # Not by recursion: branches can be as deep as there are blocks.
    begun = [(_Stretch(None, root, root), root) for root in after if root not in known]
    while begun:
        stretch, key = begun.pop()
        found.append(stretch)
        for node in _grow(stretch, key, after, of_key):
            branch = _Stretch(stretch, stretch.root, node.key, stretch.start + stretch.blocks)
            branch.take(node)
            begun.append((branch, node.key))
    for stretch in reversed(found):
        stretch.latest = max(stretch.latest, stretch.used)
        if stretch.parent is not None:
            stretch.parent.latest = max(stretch.parent.latest, stretch.latest)
    return found, of_key


def _grow(
    stretch: _Stretch, key: bytes, after: dict[bytes, list[Node]], of_key: dict[bytes, _Stretch]
) -> list[Node]:
    """Take in what follows ``key`` up to the next branch; returns the blocks that branch off there.

    A root is a stretch of its own: it stands for a model or a tenant, and holds no block.
    """
    while True:
        of_key[key] = stretch
        following = after.get(key, [])
        for node in following:
            if not node.is_block:
                stretch.take(node)
        blocks = [node for node in following if node.is_block]
        if len(blocks) != 1 or stretch.parent is None:
            return blocks
        stretch.take(blocks[0])
        key = blocks[0].key


def _label(of_key: dict[bytes, _Stretch], seen: Sequence[Seen]) -> None:
    """Say which stretches recent requests ended in, and whose system prompts are in them."""
    for request in reversed(seen):
        place = request.place
        if place is None:
            continue
        if (stretch := of_key.get(place.last)) is not None:
            about = stretch.about
            about["requests"] = about.get("requests", 0) + 1
            about["messages"] = place.messages
            about["text"] = place.text
        if place.system and (stretch := of_key.get(place.system)) is not None:
            systems = stretch.about.setdefault("systems", [])
            if place.system_hash not in systems and len(systems) < SYSTEMS:
                systems.append(place.system_hash)
