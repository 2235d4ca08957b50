"""``thunder status``: what the running servers report, read from their status files."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thunder_patches import __version__
from thunder_patches.config import settings
from thunder_patches.patching import report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)


def status(
    as_json: Annotated[bool, typer.Option("--json", help="As GET /thunder/status has it.")] = False,
    pid: Annotated[int | None, typer.Option(help="The server's process; default: newest.")] = None,
) -> None:
    """Show what runs in the server: features, cache, model."""
    processes = report.live_processes(settings())
    chosen = [one for one in processes if pid in (None, one["process"]["pid"])]
    if not chosen:
        if as_json:
            nothing = report.status() | {"problems": list(settings().problems), "processes": []}
            print(json.dumps(nothing, indent=2))
        else:
            which = f"process {pid}" if pid else "server"
            typer.echo(
                f"thunder: no {which} runs with thunder {__version__} on {settings().cache_dir}; "
                "start one, or run: thunder doctor",
                err=True,
            )
        raise typer.Exit(1)
    if as_json:
        pids = [one["process"]["pid"] for one in processes]
        print(json.dumps(chosen[0] | {"processes": pids}, indent=2))
        return
    console = Console(highlight=False)
    for one in chosen:
        _show(console, one)


def _show(console: Console, status: dict[str, Any]) -> None:
    host = status["host"] or {"distribution": "no host", "version": ""}
    console.print(
        f"thunder {status['version']} in {host['distribution']} {host['version']}, "
        f"process {status['process']['pid']}"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, feature in status["features"].items():
        table.add_row(name, feature["state"].replace("_", " "), feature["reason"])
    console.print(table)
    model = status.get("model", {})
    if model.get("identity"):
        eligible = "" if model.get("eligible") else f", not cached: {model.get('reason')}"
        console.print(f"model: {model.get('family')} {str(model['identity'])[:16]}{eligible}")
    else:
        console.print(f"model: {model.get('reason') or model.get('error')}")
    cache = status.get("cache", {})
    for tier in ("ram", "ssd"):
        held = cache.get(tier)
        if held:
            console.print(
                f"{tier}: {_size(held['bytes'])} of {_size(held['budget_bytes'])}, "
                f"{held['blocks']} blocks"
            )
    counts = cache.get("counts", {})
    console.print(", ".join(f"{name} {n}" for name, n in counts.items() if n) or "no requests yet")
    for problem in status.get("problems", ()):
        console.print(f"problem: {problem}")


def _size(n: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
