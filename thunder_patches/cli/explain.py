"""``thunder cache explain``: where and why the last prompts left the ones before them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from thunder_patches.config import default_config_file, settings
from thunder_patches.pilot.fingerprints import SYSTEM_ROLES
from thunder_patches.pilot.index import Entry, Index
from thunder_patches.pilot.stabilize import Rules, hint, load_rules

from ._output import ago, console, tell

LOOKED_BACK = 16
"""Earlier prompts with whose system prompt one is compared."""

SURE = {
    "tools_reordered": "tools put in one order",
    "tool_key_order": "keys of tools put in one order",
    "arguments_order": "tool arguments put in one order",
}
"""Misses that the stabiliser takes away, known from hashes alone."""

PERHAPS = ("billing", "uuid", "timestamp", "date", "time", "epoch", "nonce", "path", "counter")
"""Misses that it takes away where one of its rules fits the text."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(explain)


def explain(
    count: Annotated[int, typer.Option(help="Prompts to look at, the last ones.", min=1)] = 20,
    text: Annotated[
        bool, typer.Option("--text", help="Show what stood there before and stands there now.")
    ] = False,
    with_stabiliser: Annotated[
        bool, typer.Option("--with-stabiliser", help="Say what THUNDER_STABILIZE=1 would change.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also prompts without a miss.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show why the last prompts were not reused further, side by side.

    Texts are there only where the server ran with THUNDER_SHOW_TEXT=1.
    """
    file = settings().cache_dir / "prompts.jsonl"
    index = Index(file) if file.exists() else Index()
    if index.problem:
        typer.echo(f"thunder: {index.problem}", err=True)
    found = index.latest(count)
    rules = load_rules(default_config_file().with_name("rules.toml")) if with_stabiliser else None
    rows = [_row(entry, index, text, rules) for entry in found if everything or entry.miss]
    if as_json:
        tell({"prompts": len(found), "misses": rows})
    elif not rows:
        what = f"no miss among the last {len(found)} prompts" if found else "no prompts remembered"
        print(f"{what} in {file}")
    else:
        _show(rows, text, with_stabiliser)


def _row(entry: Entry, index: Index, text: bool, rules: Rules | None) -> dict[str, Any]:
    miss = entry.miss or {}
    row: dict[str, Any] = {
        "time": entry.time,
        "tokens": entry.total,
        "messages": len(entry.messages),
        **{name: miss.get(name) for name in ("token", "message", "role", "code", "reason")},
    }
    if text:
        row |= {name: miss.get(name) for name in ("before", "now")}
    if rules is not None:
        row["stabiliser"] = _stabilised(entry, index, rules) if miss else None
    return row


def _stabilised(entry: Entry, index: Index, rules: Rules) -> str:
    """What the stabiliser would do about a prompt's miss, in words."""
    code = (entry.miss or {}).get("code", "")
    if code in SURE:
        return f"reused further: {SURE[code]}"
    if (entry.miss or {}).get("role") not in SYSTEM_ROLES:
        return "no change"
    now = _system_prompt(entry, index)
    if now is None:
        return "perhaps; texts are not kept" if code in PERHAPS else "not known: texts are not kept"
    for before in _texts_before(entry, index):
        if names := hint(before, now, rules):
            return f"reused further: {', '.join(names)} taken out of the system prompt"
    return "no change"


def _texts_before(entry: Entry, index: Index) -> list[str]:
    """System prompts of the prompts before this one, latest first."""
    salt = entry.request.salt
    earlier = [one for one in index.recent(salt, 1 << 20) if one.number < entry.number]
    found = [_system_prompt(one, index) for one in earlier[:LOOKED_BACK]]
    return [text for text in found if text is not None]


def _system_prompt(entry: Entry, index: Index) -> str | None:
    if not entry.messages or entry.messages[0].role not in SYSTEM_ROLES:
        return None
    return index.text(entry.request.salt, entry.messages[0].hash)


def _show(rows: list[dict[str, Any]], text: bool, with_stabiliser: bool) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("when", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("left at", justify="right")
    table.add_column("why", ratio=2, overflow="fold")
    extra = [*(("before", "now") if text else ()), *(("stabiliser",) if with_stabiliser else ())]
    for name in extra:
        table.add_column(f"with the {name}" if name == "stabiliser" else name, ratio=2)
    for row in rows:
        table.add_row(
            ago(time.time() - row["time"]),
            f"{row['tokens']:,}",
            "" if row["token"] is None else f"{row['token']:,}",
            _plain(row["reason"] or "reused as far as could be"),
            *(_plain(_excerpt(row[name])) for name in extra),
        )
    console().print(table)
    if text and not any(row["before"] or row["now"] for row in rows):
        print("no texts are kept: the server needs THUNDER_SHOW_TEXT=1")


def _excerpt(text: str | None) -> str:
    return "" if text is None else text[:400]


def _plain(text: str) -> Text:
    """Text from a prompt, without what a terminal or the table would take for a command."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))
