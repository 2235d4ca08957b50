"""``thunder status``: what the running servers report, read from their status files."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thunder_patches import __version__
from thunder_patches.config import settings
from thunder_patches.patching import report

from ._output import console, tell
from ._play.figures import size


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
            tell(nothing)
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
        tell(chosen[0] | {"processes": pids})
        return
    out = console()
    for one in chosen:
        _show(out, one)


def _show(out: Console, status: dict[str, Any]) -> None:
    host = status["host"] or {"distribution": "no host", "version": ""}
    out.print(
        f"thunder {status['version']} in {host['distribution']} {host['version']}, "
        f"process {status['process']['pid']}"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, feature in status["features"].items():
        table.add_row(name, feature["state"].replace("_", " "), feature["reason"])
    out.print(table)
    model = status.get("model", {})
    if model.get("identity"):
        eligible = "" if model.get("eligible") else f", not cached: {model.get('reason')}"
        out.print(f"model: {model.get('family')} {str(model['identity'])[:16]}{eligible}")
    else:
        out.print(f"model: {model.get('reason') or model.get('error')}")
    cache = status.get("cache", {})
    for tier in ("ram", "ssd"):
        held = cache.get(tier)
        if held:
            out.print(
                f"{tier}: {size(held['bytes'])} of {size(held['budget_bytes'])}, "
                f"{held['blocks']} blocks"
            )
    codec = cache.get("codec") or {}
    if codec.get("mode"):
        quality = f", quality {codec['quality']}" if codec["quality"] else ""
        out.print(
            f"codec: {codec['mode']}{quality}" + (f"; {codec['reason']}" * bool(codec["reason"]))
        )
    for one in codec.get("calibrations", ()):
        measured = one.get("held_out", {}).get(codec["quality"])
        if measured is None:
            continue
        out.print(
            f"  calibration {one['id']}: {measured['ratio']} times smaller at KL {measured['kl']} "
            "on text held out"
        )
    counts = cache.get("counts", {})
    out.print(", ".join(f"{name} {n}" for name, n in counts.items() if n) or "no requests yet")
    for problem in status.get("problems", ()):
        out.print(f"problem: {problem}")
