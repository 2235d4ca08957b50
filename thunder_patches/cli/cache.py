"""``thunder cache``: what lies in the cache folder. Safe while servers use it."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thunder_patches.cache import audit
from thunder_patches.cache.file import BadFile
from thunder_patches.cache.folder import Found
from thunder_patches.config import settings
from thunder_patches.observe.prefixes import Node, prefix_map

from . import explain, named
from ._output import ago, console, progress, tell
from ._play.figures import folder_size, size

Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]

LISTED = 40
READERS = 4


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="Look into the cache folder, check it, clear it.", no_args_is_help=True
    )
    group.command("ls")(list_prefixes)
    for command in (stat, verify, clear):
        group.command()(command)
    explain.register(group)
    named.register(group)
    app.add_typer(group, name="cache")


def list_prefixes(
    limit: Annotated[int, typer.Option(help="Most prefixes to list.", min=1)] = LISTED,
    as_json: Json = False,
) -> None:
    """List the cached prefixes as a tree, those used last first."""
    found = prefix_map(_nodes(audit.records(_root())), shown=limit)
    if as_json:
        tell({"folder": str(_root()), **found})
        return
    stretches, more, now = found["stretches"], found["more"], time.time()
    if not stretches:
        print(f"nothing is cached in {_root()}")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("last used", "blocks", "snapshots", "size"):
        table.add_column(column, justify="right")
    table.add_column("prefix, by its last block", no_wrap=True)
    for depth, one in _in_tree_order(stretches):
        name = f"root {one['root']}" if one["parent"] is None else one["key"]
        table.add_row(
            ago(now - one["used"]) if one["used"] else "",
            f"{one['blocks']:,}",
            f"{one['snapshots']:,}",
            size(one["bytes"]),
            "  " * depth + name,
        )
    console().print(table)
    if more["stretches"]:
        print(
            f"and {more['stretches']:,} further prefixes with {more['blocks']:,} blocks, "
            f"{size(more['bytes'])}: --limit shows more"
        )


def _in_tree_order(stretches: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each with its depth, after the one that it hangs off."""
    below: dict[int | None, list[int]] = {}
    for number, one in enumerate(stretches):
        below.setdefault(one["parent"], []).append(number)
    waiting = [(0, number) for number in reversed(below.get(None, []))]
    while waiting:
        depth, number = waiting.pop()
        yield depth, stretches[number]
        waiting += [(depth + 1, child) for child in reversed(below.get(number, []))]


def stat(
    key: Annotated[
        str | None, typer.Argument(help="A record's key, or the beginning of it; else all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the folder holds in all, or what one record is. Never a prompt's text."""
    found = _one(key) if key else _all()
    if as_json:
        tell(found)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), _words(name, value))
    console().print(table)


def _all() -> dict[str, Any]:
    root = _root()
    records = audit.records(root)
    kinds = Counter(record.ref.kind for record in records)
    parents, keys = {r.ref.parent for r in records}, {r.ref.key for r in records}
    there = next(path for path in (root, *root.parents) if path.exists())
    return {
        "folder": str(root),
        "bytes": folder_size(root) if root.is_dir() else 0,
        "disk_free_bytes": shutil.disk_usage(there).free,
        "blocks": kinds["block"],
        "snapshots": kinds["snapshot"],
        "roots": len(parents - keys),
        "set_aside": len(list((root / "bad").glob("*"))),
        "last_used": records[0].stamp / 1e9 if records else None,
        "longest_unused": records[-1].stamp / 1e9 if records else None,
    }


def _one(key: str) -> dict[str, Any]:
    root = _root()
    fitting = [r for r in audit.records(root) if r.ref.key.hex().startswith(key.lower())]
    if len(fitting) != 1:
        raise typer.BadParameter(
            f"{len(fitting)} records in {root} begin with {key}; thunder cache ls shows keys"
        )
    [record] = fitting
    try:
        head = audit.head(root, record)
    except BadFile as error:
        raise typer.BadParameter(f"the record is damaged: {error}") from error
    header = head.header
    return {
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "kind": header.kind,
        "tokens": header.n_tokens,
        "first_token": header.start,
        "with_logits": header.end,
        "bytes": record.size,
        "decoded_bytes": sum(spec.nbytes for spec in header.tensors),
        "tensors": len(header.tensors),
        "codecs": dict(Counter(part.codec for part in head.parts)),
        "lossy": head.lossy or None,
        "last_used": record.stamp / 1e9,
    }


def verify(as_json: Json = False) -> None:
    """Read every record from its first byte to its last. Exit status 1 if one is bad.

    Bad records are left in place: a server sets one aside when it comes upon it.
    """
    root = _root()
    records = audit.records(root)
    bad, read = [], 0
    with progress("verifying", quiet=as_json) as tick, ThreadPoolExecutor(READERS) as pool:
        tick(0, len(records), "")
        for done, (record, problem) in enumerate(
            zip(records, pool.map(lambda r: audit.verify(root, r), records), strict=True), 1
        ):
            read += record.size
            # Gone: a server evicted it meanwhile.
            if problem is not None and _exists(root, record):
                bad.append({"key": record.ref.key.hex(), "problem": problem})
            tick(done, None, "")
    if as_json:
        tell({"folder": str(root), "records": len(records), "bytes": read, "bad": bad})
    else:
        for one in bad:
            print(f"{one['key']}: {one['problem']}")
        print(f"{len(records):,} records, {size(read)}: {len(bad) or 'none'} bad")
    raise typer.Exit(int(bool(bad)))


def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete everything cached, what named caches keep included.

    A running server goes on, and computes anew.
    """
    root = _root()
    records = audit.records(root)
    if not records and not root.is_dir():
        freed = 0
    else:
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise typer.BadParameter("nobody to ask: --yes deletes without asking")
            held = sum(record.size for record in records)
            typer.confirm(f"Delete {len(records):,} records, {size(held)}, in {root}?", abort=True)
        with progress("clearing", quiet=as_json) as tick:
            freed = audit.clear(root, lambda done, total: tick(done, total, ""))
    if as_json:
        tell({"folder": str(root), "records": len(records), "freed_bytes": freed})
    else:
        print(f"{len(records):,} records deleted, {size(freed)} freed")


def _root() -> Path:
    return settings().cache_dir / "v1"


def _nodes(records: list[Found]) -> Iterator[Node]:
    for record in records:
        ref = record.ref
        yield Node(ref.key, ref.parent, ref.kind == "block", record.size, record.stamp)


def _exists(root: Path, record: Found) -> bool:
    try:
        audit.head(root, record)
    except FileNotFoundError:
        return False
    except (OSError, BadFile):
        return True
    return True


def _words(name: str, value: Any) -> str:
    if value is None:
        return "none" if name == "lossy" else "never"
    if name.endswith("bytes"):
        return size(value)
    if name in ("last_used", "longest_unused"):
        return ago(time.time() - value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{n} {what}" for what, n in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
