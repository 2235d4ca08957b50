"""Two ranks on one machine, started with `mlx.launch`: they go on from the same token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.folder import wait_for
from tests.harness.compare import Answer, assert_same
from tests.harness.fleet import NO_HOST_CACHE, Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server, free_port

LAUNCH = ("-c", "from mlx._distributed_utils.launch import main; main()", "-n", "2")
RANK = """\
#!/bin/sh
# A rank has its own cache folder, as on its own machine; only the first one's calls are traced.
export THUNDER_CACHE_DIR="$THUNDER_CACHE_DIR/$MLX_RANK"
[ "$MLX_RANK" = 0 ] || unset HARNESS_TRACE
mkdir -p "$THUNDER_CACHE_DIR" && echo $$ >"$THUNDER_CACHE_DIR/pid"
exec {python} -m mlx_lm server "$@"
"""


@pytest.fixture
def launch(fleet: Fleet, tmp_path: Path) -> tuple[str, ...]:
    """What starts two ranks of the server."""
    script = tmp_path / "rank"
    script.write_text(RANK.format(python=fleet.python))
    script.chmod(0o755)
    return (*LAUNCH, "--backend", "ring", "--starting-port", str(free_port()), "--", str(script))


def stop(server: Server) -> None:
    """Ends the launcher, and waits for the ranks, which it leaves to end by themselves."""
    server.stop()
    for file in server.cache_dir.glob("*/pid"):
        process = Path("/proc", file.read_text().strip())
        wait_for(lambda process=process: not process.exists(), "the ranks' end")


def ask(server: Server, prompt: str, expected: Answer, cached: range) -> None:
    """The stock ranks' answer, with the hit proven by the calls of the first rank's model."""
    with server.watch() as calls:
        answer = server.complete(prompt)
    assert_same(expected, answer)
    assert answer.cached_tokens in cached, answer.usage
    run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
    assert answer.cached_tokens is not None and answer.prompt_tokens is not None
    assert run == answer.prompt_tokens - answer.cached_tokens


def blocks(server: Server, rank: int) -> list[Path]:
    return sorted((server.cache_dir / str(rank)).glob("v1/blocks/*/*.safetensors"))


def test_ranks_agree(fleet: Fleet, full: Model, seed: int, launch: tuple[str, ...]) -> None:
    """A restart, an edited tail, and one rank that has lost some blocks of a prompt or all of them."""
    prompt, other = text_of(300, seed), text_of(280, seed + 2)
    edited = text_of(200, seed) + text_of(50, seed + 1)
    stock = fleet.stock(full, args=NO_HOST_CACHE, launch=launch)
    expected, expected_other = stock.complete(prompt), stock.complete(other)
    expected_edited = stock.complete(edited)
    stop(stock)

    server = fleet.server(full, launch=launch, env={"THUNDER_DISTRIBUTED": "1"})
    ask(server, other, expected_other, range(8))
    others = wait_for(lambda: len(found := blocks(server, 1)) >= 8 and found, "its blocks")
    ask(server, prompt, expected, range(8))
    stop(server)
    server.start()
    ask(server, prompt, expected, range(300, 301))
    ask(server, edited, expected_edited, range(192, 204))
    stop(server)

    kept = [file for file in blocks(server, 1) if file not in others]
    assert len(kept) >= 10 and len(kept) + len(others) == len(blocks(server, 0))
    for file in [*others, *kept[::2]]:
        file.unlink()
    server.start()
    ask(server, prompt, expected, range(300))
    ask(server, other, expected_other, range(8))
    ask(server, other, expected_other, range(280, 281))


def test_not_without_being_asked(
    fleet: Fleet, full: Model, seed: int, launch: tuple[str, ...]
) -> None:
    """Ranks that may not all have the plugin: nothing is cached, nothing hangs, and it is said."""
    prompt = text_of(100, seed)
    server = fleet.server(full, launch=launch)
    first, second = server.complete(prompt), server.complete(prompt)
    assert_same(first, second)
    assert not second.cached_tokens
    assert "THUNDER_DISTRIBUTED=1" in server.log()
    assert not blocks(server, 0)
