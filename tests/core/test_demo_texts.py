"""The agents' texts, conversations, figures and the picture: what demo and bench are made of."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from thunder_patches.cli import demo
from thunder_patches.cli._play import figures
from thunder_patches.cli._play.bars import Bar, svg
from thunder_patches.cli._play.blas import preload
from thunder_patches.cli._play.client import ServerError
from thunder_patches.cli._play.figures import Spread
from thunder_patches.cli._play.server import OmlxServer, patched_environment, stock_environment
from thunder_patches.cli._play.talk import Talk
from thunder_patches.cli._play.texts import Agent, agents


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("agent", agents(), ids=lambda agent: agent.name)
def test_every_agent_has_what_a_morning_needs(agent: Agent) -> None:
    assert len(set(agent.questions)) >= demo.TURNS
    assert agent.role.strip() and agent.handbook.strip()


@pytest.mark.parametrize("agent", agents(), ids=lambda agent: agent.name)
@pytest.mark.parametrize("size", [10, 300, 3000])
def test_prompts_have_the_length_asked_for(agent: Agent, size: int) -> None:
    text = agent.system_prompt(size, len, seed=1)
    assert len(text) == size
    assert text == agent.system_prompt(size, len, seed=1)


def test_seeds_change_the_records_and_tags_the_start() -> None:
    ada = agents(1)[0]
    one, other = (ada.system_prompt(5000, len, seed=seed) for seed in (1, 2))
    assert one != other and one[:2000] == other[:2000]
    assert ada.system_prompt(5000, len, seed=1, tag="Run 7.").startswith("Run 7.\n")


def test_agents_share_no_start() -> None:
    assert len({agent.system_prompt(20, len, seed=0) for agent in agents()}) == 5


def test_a_turn_carries_all_that_was_said() -> None:
    talk = Talk(agents(1)[0], "You are Ada.", heard=["first answer", "second answer"])
    messages = talk.messages(2)
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert messages[4]["content"] == "second answer"
    assert messages[5]["content"] == talk.agent.questions[2]
    assert talk.messages(1) == messages[:4]


def test_a_server_of_omlx_is_the_benchmarks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's key or cache folder in the environment would lock us out, or join the two servers."""
    model = tmp_path / "snapshots" / "some-model"
    model.mkdir(parents=True)
    with pytest.raises(ServerError, match=r"snapshots/some-model, found no \*.safetensors"):
        OmlxServer(str(model), tmp_path / "empty.log", env={})
    (model / "model.safetensors").touch()
    monkeypatch.chdir(model)
    environ = {"PATH": "/bin", "OMLX_API_KEY": "secret", "OMLX_SSD_CACHE_DIR": "/shared"}
    server = OmlxServer(".", tmp_path / "stock.log", env=environ)
    assert server.env == {"PATH": "/bin"}
    assert server.fields == {"model": "some-model"}
    link = tmp_path / "stock" / "models" / "some-model"
    assert link.readlink() == model.resolve()


def test_environments_differ_in_the_package_alone() -> None:
    environ = {"PATH": "/bin", "THUNDER": "1", "THUNDER_CODEC": "raw", "THUNDERBIRD": "x"}
    kept = {"PATH": "/bin", "THUNDERBIRD": "x"}
    assert stock_environment(environ) == {**kept, "THUNDER": "0"}
    on = {"THUNDER": "1", "THUNDER_CACHE_DIR": "here", "THUNDER_BLOCK_TOKENS": "32"}
    ours = patched_environment(environ, Path("here"), keep_settings=False, block_tokens="32")
    assert ours == {**kept, **on}
    ours = patched_environment(environ, Path("here"), keep_settings=True)
    assert ours["THUNDER_CODEC"] == "raw"


def test_preload_keeps_what_was_preloaded() -> None:
    assert preload({"LD_PRELOAD": "a.so b.so"}, Path("blas.so"))["LD_PRELOAD"] == (
        "blas.so:a.so:b.so"
    )
    assert preload({"A": "1"}, None) == {"A": "1"}


@pytest.mark.parametrize("prefill", [3, 10, 40, 112, 5000])
@pytest.mark.parametrize("decode", [2, 15, 200])
def test_sizes_fit_the_time(prefill: float, decode: float) -> None:
    budget = 270.0
    sizes = demo._sizes(demo.Pace(prefill, decode), budget)
    tokens = demo.AGENTS * (3 * sizes.system + 12 * 40)
    needed = 30 + tokens / prefill + 60 * sizes.answer / decode
    assert needed <= budget + 1 or sizes.system == 96
    assert 96 <= sizes.system <= 2048 and 3 * sizes.block <= sizes.system


def test_numbers_read_well() -> None:
    assert [figures.seconds(s) for s in (0.0043, 0.21, 1.52, 38.2)] == [
        "4.3 ms",
        "210 ms",
        "1.52 s",
        "38 s",
    ]
    assert [figures.times(t) for t in (0.98, 12.4, 3100)] == ["0.98 x", "12.4 x", "3,100 x"]
    assert [figures.size(n) for n in (12, 2048, 5 << 20, 3 << 30)] == [
        "12 B",
        "2.0 KiB",
        "5.0 MiB",
        "3.00 GiB",
    ]


def test_ratios_are_taken_pair_by_pair() -> None:
    # Both sides slow down threefold: the ratio does not move.
    assert figures.ratios([2.0, 6.0, 4.0], [1.0, 3.0, 2.0]) == Spread(2.0, 2.0, 2.0)


def test_the_picture_is_well_formed_and_to_scale() -> None:
    slow, fast = Spread(10.0, 9.0, 12.0), Spread(0.1, 0.09, 0.12)
    bars = [Bar("cold & <new>", slow, slow, Spread(1, 1, 1)), Bar("repeat", slow, fast, fast)]
    root = xml.fromstring(svg("A title", "a note", bars))
    space = {"svg": "http://www.w3.org/2000/svg"}
    texts = [element.text for element in root.findall(".//svg:text", space)]
    assert "cold & <new>" in texts and "a note" in texts
    wide = {
        kind: [float(r.get("width", 0)) for r in root.findall(f"svg:rect[@class='{kind}']", space)]
        for kind in ("stock", "patched")
    }
    assert wide["stock"][0] == wide["patched"][0] == wide["stock"][1] > 2 * wide["patched"][1]
