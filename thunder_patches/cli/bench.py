"""``thunder bench``: the user's own model, with the package and without, side by side."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thunder_patches import __version__
from thunder_patches.patching.host import find

from ._output import console, tell
from ._play.bars import Bar, svg
from ._play.compare import Comparison, Reply, TextComparison
from ._play.duel import WORKLOADS, Duel, Plan, Side
from ._play.figures import Spread, folder_size, ratios, seconds, size, times
from ._play.progress import say
from ._play.server import HOSTS, installed_host, terminable

LEAST_TOLERANCE = 1e-4
SLACK = 4.0  # times what the stock server differs from itself


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


def bench(
    model: Annotated[str, typer.Argument(help="Model folder, or a repository the server knows.")],
    host: Annotated[
        str | None,
        typer.Option(help="mlx_lm or omlx; default: omlx, where it is installed."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Length of the system prompt; default: what this machine bears.", min=64),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Repetitions.", min=1)] = 3,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 16,
    seed: Annotated[int, typer.Option(help="Of texts and arrival times.")] = 0,
    server_arg: Annotated[
        list[str] | None,
        typer.Option(help="A further argument of both servers; can be given several times."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--svg", help="Write a picture to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Time your model in the stock server, with the package and without, and compare the answers.

    Settings of the package in the environment hold, but for the cache folder: it is a fresh one.
    Those of oMLX are its defaults and what --server-arg says; it gives no logprobs, so there the
    answers are compared by their texts. Exit status 1: an answer differs, or the package was not
    at work.
    """
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise typer.BadParameter(f"there is no model folder {model}")
    if picture is not None and not picture.absolute().parent.is_dir():
        raise typer.BadParameter(f"--svg: there is no folder {picture.absolute().parent}")
    try:
        host = installed_host(host)
    except ValueError as error:
        raise typer.BadParameter(f"--host: {error}") from None
    plan = Plan(model, answer, seed, repeat, tuple(server_arg or ()), host)
    with terminable(), tempfile.TemporaryDirectory(prefix="thunder-bench-") as scratch:
        duel = Duel(plan, Path(scratch))
        duel.run(tokens)
        result = outcome(duel)
    if picture is not None:
        picture.write_text(_picture(result), encoding="utf-8")
        say(f"picture: {picture}")
    if as_json:
        tell(result)
    else:
        _show(result)
    if not result["answers"]["same"]:
        raise typer.Exit(1)


def outcome(duel: Duel) -> dict[str, Any]:
    """What came of a duel that was run, as ``--json`` has it."""
    comparison: Comparison | TextComparison
    own: Any
    if duel.stock.server.compared == "text":
        comparison = TextComparison()
        comparison.add_all(duel.stock.all(), duel.patched.all())
        own = {"answers": comparison.unsettled, "of": comparison.requests}
    else:
        own = duel.stock_against_itself.worst
        comparison = Comparison(max(LEAST_TOLERANCE, SLACK * own))
        comparison.add_all(duel.stock.all(), duel.patched.all())
    if not comparison.tokens and not comparison.problems:
        comparison.problems.append("no answer could be compared")
    if not duel.at_work:
        comparison.problems.append("the package was not at work in the server: run thunder doctor")
    return {
        "version": __version__,
        "conditions": _conditions(duel),
        "workloads": {name: _figures(name, duel.stock, duel.patched) for name in WORKLOADS},
        "bytes_on_disk": folder_size(duel.cache),
        "answers": {"compared": duel.stock.server.compared}
        | asdict(comparison)
        | {"same": comparison.same, "stock_differs_from_itself": own},
    }


def _figures(workload: str, stock: Side, patched: Side) -> dict[str, Any]:
    """First tokens in seconds, the ratio stock to patched, tokens of prompts and skipped."""
    firsts = [
        [_mean_wait(replies) for replies in side.replies[workload]] for side in (stock, patched)
    ]

    def tokens(side: Side, name: str) -> float:
        return statistics.median(_total(replies, name) for replies in side.replies[workload])

    return {
        "what": WORKLOADS[workload],
        "requests": len(stock.replies[workload][0]),
        "prompt_tokens": tokens(stock, "prompt_tokens"),
        "stock": {
            "first_token_s": asdict(Spread.of(firsts[0])),
            "skipped": tokens(stock, "cached_tokens"),
        },
        "patched": {
            "first_token_s": asdict(Spread.of(firsts[1])),
            "skipped": tokens(patched, "cached_tokens"),
        },
        "ratio": asdict(ratios(*firsts)),
    }


def _mean_wait(replies: list[Reply]) -> float:
    """Seconds to the first token. Not their median: in a burst some wait for others, by chance."""
    return statistics.fmean(reply.answer.first for reply in replies)


def _total(replies: list[Reply], name: str) -> int:
    return sum(getattr(reply.answer, name) for reply in replies)


def _conditions(duel: Duel) -> dict[str, Any]:
    import mlx.core as mx

    plan = duel.plan
    omlx = find("omlx") if plan.host == "omlx" else None
    return {
        "host": plan.host,
        "model": Path(os.path.abspath(plan.model)).name,
        "system_prompt_tokens": duel.tokens,
        "answer_tokens": plan.answer,
        "repetitions": plan.repeat,
        "seed": plan.seed,
        "server_arguments": list(plan.arguments),
        "servers": "side by side" if duel.together else "one at a time",
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("THUNDER_")},
        "device": str(mx.default_device()),
        "blas": str(duel.blas) if duel.blas else None,
        "mlx": metadata.version("mlx"),
        "mlx_lm": metadata.version("mlx-lm"),
        "omlx": f"{omlx.distribution} {omlx.version}" if omlx else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _show(result: dict[str, Any]) -> None:
    out = console(markup=True)
    conditions, answers = result["conditions"], result["answers"]
    out.print(
        f"{conditions['model']}: {conditions['repetitions']} repetitions, servers "
        f"{conditions['servers']}, {_builds(conditions)} on {conditions['system']}"
    )
    title = (
        f"Time to first token in {HOSTS[conditions['host']].title}, "
        "mean of a repetition's requests: median (least to greatest)"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload")
    for column in ("prompts", "stock", "patched", "sooner", "skipped,\nstock", "skipped,\npatched"):
        table.add_column(column, justify="right")
    for name, row in result["workloads"].items():
        stock, patched = row["stock"], row["patched"]
        table.add_row(
            name,
            f"{row['prompt_tokens']:,.0f}",
            _range(stock["first_token_s"], seconds),
            _range(patched["first_token_s"], seconds),
            _range(row["ratio"], times),
            f"{stock['skipped']:,.0f}",
            f"{patched['skipped']:,.0f}",
        )
    out.print(table)
    out.print(f"on disk: {size(result['bytes_on_disk'])}")
    if answers["compared"] == "text":
        _show_texts(out, answers)
    elif answers["same"]:
        ties = f", {answers['ties']} ties" if answers["ties"] else ""
        out.print(
            f"answers: all {answers['requests']} the same, {answers['tokens']} tokens{ties}; "
            f"largest difference of a logprob {answers['worst']:.1e}, allowed "
            f"{answers['tolerance']:.1e} (the stock server differs from itself by "
            f"{answers['stock_differs_from_itself']:.1e})"
        )
    for problem in answers["problems"]:
        out.print(f"[red]differs[/red]: {escape(problem)}", soft_wrap=True)


def _show_texts(out: Console, answers: dict[str, Any]) -> None:
    own = answers["stock_differs_from_itself"]
    if answers["same"]:
        out.print(
            f"answers: {own['of'] - own['answers']} of {own['of']} compared, all the same, "
            f"{answers['tokens']} tokens; by their texts, as this host tells no logprobs"
        )
    else:
        out.print(
            "answers are compared by their texts, as this host tells no logprobs: a difference "
            "can be a fault, or rounding where two tokens are nearly as likely"
        )
    if own["answers"]:
        out.print(
            f"{own['answers']} of {own['of']} are not compared: there the stock server's own two "
            "answers differ"
        )


def _builds(conditions: dict[str, Any]) -> str:
    mlx_lm = f"mlx-lm {conditions['mlx_lm']}"
    return f"{conditions['omlx']}, {mlx_lm}" if conditions["omlx"] else mlx_lm


def _range(spread: dict[str, float], form: Callable[[float], str]) -> str:
    return f"{form(spread['median'])}\n{form(spread['low'])} to {form(spread['high'])}"


def _picture(result: dict[str, Any]) -> str:
    conditions = result["conditions"]
    bars = [
        Bar(
            name,
            Spread(**row["stock"]["first_token_s"]),
            Spread(**row["patched"]["first_token_s"]),
            Spread(**row["ratio"]),
        )
        for name, row in result["workloads"].items()
    ]
    note = (
        f"{conditions['model']}, {conditions['system_prompt_tokens']} tokens, "
        f"{_builds(conditions)}, {conditions['system']}; medians of {conditions['repetitions']}"
    )
    title = f"Time to first token in {HOSTS[conditions['host']].title}: stock against patched"
    return svg(title, note, bars)
