"""C3 and C4: prompts that share a beginning, as completions and as a chat that grows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.steps import MISS, served, shared_prefix
from tests.harness.fleet import BLOCK, Fleet
from tests.harness.models import Model, text_of

STRIDE = 8 * BLOCK
"""Tokens between snapshots, by default."""


@pytest.mark.parametrize("extra", [{}, {"seed": 3}], ids=["batched", "serial"])
def test_c3_branch(fleet: Fleet, model: Model, kind: str, seed: int, extra: dict[str, int]) -> None:
    """300 shared tokens with ending X, then Y, then X."""
    server = fleet.shared(model)
    shared = text_of(300, seed)
    x, y = shared + text_of(25, seed + 1), shared + text_of(25, seed + 2)
    common = shared_prefix(model.tokens(x), model.tokens(y))
    checkpoint = 300 if kind == "full" else STRIDE

    served(fleet, server, model, prompt=x, cached=MISS, **extra)
    served(fleet, server, model, prompt=y, cached=range(checkpoint, common + 1), **extra)
    served(fleet, server, model, prompt=x, cached=325, **extra)
    served(fleet, server, model, prompt=y, cached=325, **extra)


def test_a_prompt_cut_short(fleet: Fleet, model: Model, kind: str, seed: int) -> None:
    """The known prompt without its second half, and a middle that differs."""
    server = fleet.shared(model)
    words = text_of(600, seed).split()
    whole = _join(words)
    served(fleet, server, model, prompt=whole, cached=MISS)
    checkpoint = 299 if kind == "full" else STRIDE
    served(fleet, server, model, prompt=_join(words[:300]), cached=range(checkpoint, 300))
    words[400] = "year" if words[400] != "year" else "home"
    checkpoint = 400 if kind == "full" else STRIDE
    served(fleet, server, model, prompt=_join(words), cached=range(checkpoint, 401))


@pytest.mark.one_hybrid
def test_one_token_more(fleet: Fleet, model: Model, seed: int) -> None:
    """What is known ends one token before the part that the host runs as a decode step."""
    server = fleet.shared(model)
    words = text_of(303, seed).split()
    served(fleet, server, model, prompt=_join(words[:300]), cached=MISS)
    for length in (301, 302, 303):
        answer = served(fleet, server, model, prompt=_join(words[:length]))
        assert answer.cached_tokens is not None and answer.cached_tokens >= STRIDE


def test_c4_growing_chat(fleet: Fleet, model: Model, kind: str, seed: int) -> None:
    """Six turns; older thinking is dropped by the template; answers re-tokenise differently."""
    server = fleet.shared(model)
    messages: list[dict[str, Any]] = [{"role": "system", "content": text_of(60, seed)}]
    prompts: list[list[int]] = []
    retokenised = 0
    for turn in range(6):
        messages.append({"role": "user", "content": text_of(30 + turn, seed + 1 + turn)})
        prompt = model.tokens(model.chat(messages))
        known = max((shared_prefix(prompt, earlier) for earlier in prompts), default=0)
        boundary = _last_boundary(model, prompt, known)
        # Other tests' chats begin with the same markers.
        allowed = range(boundary, max(known, MISS.stop) + 1)
        answer = served(fleet, server, model, messages=messages, cached=allowed, max_tokens=16)
        thinking = answer.reasoning
        retokenised += model.tokens(thinking) != list(answer.tokens)
        prompts.append(prompt)
        messages.append(
            {"role": "assistant", "content": f"<think>\n{thinking}\n</think>\n{thinking}"}
        )
    assert retokenised > 0
    # The same chat once more, from its third turn on: known to the last token.
    served(fleet, server, model, messages=messages[:6], max_tokens=16, cached=len(prompts[2]))


def _last_boundary(model: Model, prompt: list[int], known: int) -> int:
    """The end of the last whole message within the first `known` tokens."""
    (end,) = model.tokens("<|im_end|>")
    ends = [i + 1 for i, token in enumerate(prompt[:known]) if token == end]
    return ends[-1] if ends else 0


def _join(words: list[str]) -> str:
    return "".join(f" {word}" for word in words)
