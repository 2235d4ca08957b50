"""Full hits, branches, restarts and bad files on a real `omlx serve`, for each model kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.models import Model, ModelFactory, text_of
from tests.hosts.omlx.serving import omlx

pytest.importorskip("omlx")

FIRST = text_of(600, 1)
LONGER = FIRST + " " + text_of(50, 9)
OTHER = text_of(400, 1) + " " + text_of(200, 7)
PROMPTS = {"first": FIRST, "longer": LONGER, "other": OTHER}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_next", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return ModelFactory(tmp_path_factory.mktemp("models")).get(request.param)


@pytest.fixture(scope="module")
def expected(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Answers of the host alone, each prompt asked of it once, so that it reuses nothing."""
    answers = {}
    for name, prompt in PROMPTS.items():
        with omlx(model, tmp_path_factory.mktemp("stock"), thunder=False) as server:
            answers[name], usage = server.complete(prompt)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(set(answers.values())) == len(PROMPTS), "the prompts must have different answers"
    return answers


def test_repeat_branch_and_restart(model: Model, expected: dict[str, str], tmp_path: Path) -> None:
    with omlx(model, tmp_path) as server:
        answer, usage = server.complete(FIRST)
        assert (answer, usage["prompt_tokens_details"]["cached_tokens"]) == (expected["first"], 0)
        total = usage["prompt_tokens"]
        # At once: nothing has to be on the disk yet.
        answer, usage = server.complete(FIRST)
        assert answer == expected["first"]
        assert usage["context_pilot"]["skip"] == "full"
        assert usage["prompt_tokens_details"]["cached_tokens"] == total
        answer, usage = server.complete(LONGER)
        assert answer == expected["longer"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= total - 1
        answer, usage = server.complete(OTHER)
        assert answer == expected["other"]
    with omlx(model, tmp_path) as server:
        for name, prompt in PROMPTS.items():
            answer, usage = server.complete(prompt)
            assert answer == expected[name]
            assert usage["context_pilot"]["skip"] == "full", usage
            assert usage["context_pilot"]["source"] == "ssd"


def test_a_flipped_bit_is_never_served(
    model: Model, expected: dict[str, str], tmp_path: Path
) -> None:
    with omlx(model, tmp_path) as server:
        server.complete(FIRST)
    files = sorted((tmp_path / "cache" / "v1").rglob("*.safetensors"))
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
    with omlx(model, tmp_path) as server:
        answer, usage = server.complete(FIRST)
        assert answer == expected["first"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_full_and_not_in_one_batch(model: Model, expected: dict[str, str], tmp_path: Path) -> None:
    with omlx(model, tmp_path) as server:
        server.complete(FIRST)
        with ThreadPoolExecutor(3) as pool:
            answers = dict(
                zip(
                    PROMPTS,
                    pool.map(lambda p: server.complete(p)[0], PROMPTS.values()),
                    strict=True,
                )
            )
    assert answers == expected


def test_off_gives_the_host_back(model: Model, expected: dict[str, str], tmp_path: Path) -> None:
    with omlx(model, tmp_path, THUNDER_SSD_CACHE="0") as server:
        answer, usage = server.complete(FIRST)
    assert answer == expected["first"]
    assert "context_pilot" not in usage
