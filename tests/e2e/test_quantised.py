"""C18: quantised KV, on layers that can have it and beside layers that can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.steps import MISS, served
from tests.harness.compare import assert_same
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of


def arguments(bits: int) -> tuple[str, ...]:
    return ("--kv-bits", str(bits), "--kv-group-size", "32", "--quantized-kv-start", "0")


@pytest.mark.one_hybrid
def test_c18_quantised_kv(fleet: Fleet, model: Model, kind: str, seed: int, tmp_path: Path) -> None:
    """8 bits: store, restart, restore; then 4 bits on the same folder, then 8 again."""
    if not fleet.host.at_least("0.32.0"):
        pytest.skip("this host has no --kv-bits")
    prompt = text_of(200, seed)
    answers = {
        fleet.expected(model, args=args, prompt=prompt).logprobs
        for args in ([], arguments(4), arguments(8))
        if kind != "sliding"
    }
    assert len(answers) == (0 if kind == "sliding" else 3), "two precisions, one answer"
    longer = prompt + text_of(40, seed + 1)
    if kind == "sliding":
        # The stock server drops every such request, so there is no stock answer to compare with.
        server = fleet.server(model, cache_dir=tmp_path / "cache", args=arguments(8))
        first = server.complete(prompt)
        server.restart()
        assert_same(first, server.complete(prompt))
        return
    eight = fleet.server(model, cache_dir=tmp_path / "cache", args=arguments(8))
    served(fleet, eight, model, args=arguments(8), prompt=prompt, cached=MISS)
    eight.restart()
    served(fleet, eight, model, args=arguments(8), prompt=prompt, cached=range(1, 201))
    # A cold run quantises after its first chunk, so only rows that it would have quantised by then
    # may be reused for a longer prompt.
    served(fleet, eight, model, args=arguments(8), prompt=longer, cached=range(0, 201))
    eight.stop()
    four = fleet.server(model, cache_dir=tmp_path / "cache", args=arguments(4))
    # Rows stored before their quantisation may be reused; 8-bit rows would give another answer.
    served(fleet, four, model, args=arguments(4), prompt=prompt)
    four.stop()
    plain = fleet.server(model, cache_dir=tmp_path / "cache")
    served(fleet, plain, model, prompt=prompt)
    plain.stop()
    eight.start()
    served(fleet, eight, model, args=arguments(8), prompt=longer, cached=range(1, 241))
