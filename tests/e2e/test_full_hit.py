"""C1 and C2: a prompt that is known to the last token, in every way to ask for it."""

from __future__ import annotations

import pytest

from tests.e2e.steps import MISS, added, counts, served
from tests.e2e.test_controls import exact_hit
from tests.harness.compare import assert_same
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, text_of


@pytest.mark.parametrize(
    ("skip_logic", "host_cache"), [("1", False), ("0", True)], ids=["skip", "no-skip"]
)
def test_c1_full_hit(
    fleet: Fleet, model: Model, seed: int, skip_logic: str, host_cache: bool
) -> None:
    """A; A minus its last token; A again; something unrelated. Stock dies on the like."""
    env = {"THUNDER_SKIP_LOGIC": skip_logic}
    server = fleet.shared(model, env=env, host_cache=host_cache)
    a = text_of(150, seed)
    shorter = a.rsplit(" ", 1)[0]
    before = counts(server)

    answers = [
        served(fleet, server, model, prompt=a, cached=MISS),
        served(fleet, server, model, prompt=shorter, cached=range(0, 149)),
        served(fleet, server, model, prompt=a, cached=150 if skip_logic == "1" else range(1, 150)),
        served(fleet, server, model, prompt=text_of(90, seed + 1), cached=MISS),
    ]

    assert answers[2].usage["context_pilot"]["skip"] == ("full" if skip_logic == "1" else "none")
    grown = added(before, counts(server))
    assert grown["miss"] == [answer.cached_tokens for answer in answers].count(0)
    assert grown.get("full", 0) == (1 if skip_logic == "1" else 0)
    assert grown["tokens_skipped"] + grown["tokens_computed"] == 150 + 149 + 150 + 90
    assert server.healthy()


@pytest.mark.parametrize("skip_logic", ["1", "0"], ids=["skip", "no-skip"])
def test_the_key_that_kills_the_stock_server(
    fleet: Fleet, models: ModelFactory, seed: int, skip_logic: str
) -> None:
    """The prompt equals what the host's own cache stored after the answer before."""
    model = models.get("qwen3")
    server = fleet.shared(model, env={"THUNDER_SKIP_LOGIC": skip_logic}, host_cache=True)
    prompt, stored = exact_hit(fleet, models, seed)
    served(fleet, server, model, prompt=prompt, telling=False)
    length = len(model.tokens(stored))
    served(fleet, server, model, prompt=stored, cached=range(length - 1, length + 1), telling=False)
    served(fleet, server, model, prompt=stored, seed=1, cached=range(1, length + 1), telling=False)
    assert server.healthy()


@pytest.mark.parametrize("extra", [{}, {"seed": 11}], ids=["batched", "serial"])
@pytest.mark.parametrize("length", [150, 160, 20], ids=["tail", "no-tail", "below-a-block"])
def test_c2_repeat(
    fleet: Fleet, model: Model, seed: int, extra: dict[str, int], length: int
) -> None:
    """Three times: the second and third hit in full, and using a snapshot leaves it unchanged."""
    server = fleet.shared(model)
    prompt = text_of(length, seed)
    first = served(fleet, server, model, prompt=prompt, cached=MISS, **extra)
    for _ in range(2):
        answer = served(fleet, server, model, prompt=prompt, cached=length, **extra)
        assert_same(first, answer)


@pytest.mark.one_hybrid
def test_a_hit_on_one_path_serves_the_other(fleet: Fleet, model: Model, seed: int) -> None:
    """Stored by a batched request, restored by a serial one, and the other way round."""
    server = fleet.shared(model)
    ways = [({}, {"seed": 5}), ({"seed": 5}, {})]
    for i, (store, restore) in enumerate(ways):
        prompt = text_of(150, seed + i)
        served(fleet, server, model, prompt=prompt, cached=MISS, **store)
        served(fleet, server, model, prompt=prompt, cached=150, **restore)


@pytest.mark.one_hybrid
def test_one_token_and_default_block_size(fleet: Fleet, model: Model, seed: int) -> None:
    """The shortest prompt, and a long one in blocks of 256."""
    server = fleet.shared(model, env={"THUNDER_BLOCK_TOKENS": None})
    one = text_of(1, seed)
    served(fleet, server, model, prompt=one, cached=MISS)
    served(fleet, server, model, prompt=one, cached=1)
    long = text_of(600, seed + 1)
    served(fleet, server, model, prompt=long, cached=MISS)
    served(fleet, server, model, prompt=long, cached=600)
    served(fleet, server, model, prompt=long + text_of(30, seed + 2), cached=range(512, 601))
