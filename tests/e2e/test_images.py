"""Prompts with images: the host knows an image's tokens by one negative id, made from its content."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.harness.compare import assert_same
from tests.harness.fleet import BLOCK, Fleet
from tests.harness.hosts import Host
from tests.harness.models import Model, ModelFactory, text_of
from tests.harness.server import Server
from thunder_patches.cache import audit
from thunder_patches.cache.folder import Folder

SEES = {"HARNESS_SEES": "1"}
PATCHES = 10 * 12
MARKERS = 16
"""At most so many tokens of the template come before the text."""


@pytest.fixture(params=["qwen3", "gemma3"])
def seeing(request: pytest.FixtureRequest, host: Host, models: ModelFactory) -> Model:
    """A model with a configuration for images; gemma3's sliding layers resume from snapshots only."""
    if not host.at_least("0.32.2"):
        pytest.skip("images came with mlx-lm 0.32.2")
    return _seeing(models, request.param)


def _seeing(models: ModelFactory, arch: str) -> Model:
    config = {
        "vision_config": {"patch_size": 2, "merge_size": 1},
        "processor_type": "muse_spark",
    }
    return models.get(arch, template="images", config=config)


def picture(seed: int) -> dict[str, Any]:
    """An image of PATCHES patches, as a part of a message."""
    pixels = np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def asking(about: dict[str, Any], before: int, after: int, seed: int) -> list[dict[str, Any]]:
    parts = [
        {"type": "text", "text": text_of(before, seed)},
        about,
        {"type": "text", "text": text_of(after, seed + 1 + after)},
    ]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("seeing", "before"),
    [("qwen3", 20), ("qwen3", 45), ("qwen3", 70), ("gemma3", 45)],
    indirect=["seeing"],
)
def test_answers_about_images(fleet: Fleet, seeing: Model, seed: int, before: int) -> None:
    """Cold, repeated, another question about the same image, another image, after a restart."""
    stock = fleet.shared(seeing, env={**SEES, "THUNDER": "0"})
    server = fleet.server(seeing, env={**SEES, "THUNDER_SNAPSHOT_STRIDE": "1"})
    one, other = picture(seed), picture(seed + 1)
    first = asking(one, before, 9, seed)

    assert _same(stock, server, first) == 0
    assert _same(stock, server, first) >= before + PATCHES
    # The whole image is known, or nothing of it: the host counts an image as seen by its first token.
    known = _same(stock, server, asking(one, before, 14, seed))
    assert known <= before + MARKERS or known >= before + PATCHES
    if seeing.spec.arch == "qwen3":
        assert known >= before + PATCHES
    assert _same(stock, server, asking(other, before, 9, seed)) <= before + MARKERS
    server.restart()
    assert _same(stock, server, asking(one, before, 21, seed)) >= before // BLOCK * BLOCK
    assert _same(stock, server, asking(other, before, 9, seed)) >= before + PATCHES


def test_answers_under_quantised_kv(
    fleet: Fleet, host: Host, models: ModelFactory, seed: int
) -> None:
    """What quantised KV allows and what images allow have to hold at once."""
    if not host.at_least("0.32.2"):
        pytest.skip("images came with mlx-lm 0.32.2")
    model = _seeing(models, "qwen3")
    args = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "64")
    args += ("--prefill-step-size", "48")
    stock = fleet.shared(model, args=args, env={**SEES, "THUNDER": "0"})
    server = fleet.server(model, args=args, env=SEES, host_cache=True)
    one = picture(seed)
    for after in (9, 14, 9):
        _same(stock, server, asking(one, 45, after, seed))
    server.restart()
    assert _same(stock, server, asking(one, 45, 9, seed)) > 0


def test_an_image_is_never_begun_in_its_middle(fleet: Fleet, seeing: Model, seed: int) -> None:
    """Only the blocks up to the image's middle are left."""
    stock = fleet.shared(seeing, env={**SEES, "THUNDER": "0"})
    env = {**SEES, "THUNDER_SNAPSHOT_STRIDE": "1", "THUNDER_RAM_CACHE_MB": "0"}
    server = fleet.server(seeing, env=env)
    asked = asking(picture(seed), 45, 9, seed)
    length = _length(stock, server, asked)
    server.stop()
    root, left = server.cache_dir / "v1", 0
    for found in audit.records(root):
        header = audit.head(root, found).header
        if header.start + len(header.tokens) // 8 > 3 * BLOCK:
            Folder(root).remove(found.ref)
        else:
            left += 1
    assert left >= 3
    server.start()
    known = _same(stock, server, asked)
    assert 0 < known <= 45 + MARKERS < 3 * BLOCK < 45 + PATCHES < length


def _same(stock: Server, server: Server, messages: list[dict[str, Any]]) -> int:
    """Asserts the stock answer; the tokens that were had."""
    expected = stock.chat(messages, max_tokens=6)
    answer = server.chat(messages, max_tokens=6)
    assert_same(expected, answer)
    return answer.cached_tokens or 0


def _length(stock: Server, server: Server, messages: list[dict[str, Any]]) -> int:
    assert _same(stock, server, messages) == 0
    return server.chat(messages, max_tokens=6).prompt_tokens or 0
