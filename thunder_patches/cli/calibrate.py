"""``thunder calibrate``: fit the KVTC codec to a model, once, so that blocks can become smaller."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from thunder_patches.codec.calibration import Calibration, Shelf
from thunder_patches.config import settings

from ._output import progress, tell

OWN_CODE = 20_000  # bytes of this package's own source that serve as text, beside what is bundled


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(calibrate)


def calibrate(
    model: Annotated[str, typer.Argument(help="Model folder, or its name on the hub.")],
    texts: Annotated[
        list[Path] | None,
        typer.Argument(help="Text files like those that the model will read; else bundled ones."),
    ] = None,
    bundled: Annotated[
        bool, typer.Option(help="Also use the bundled texts: English, Chinese, code, chat.")
    ] = True,
    fresh: Annotated[bool, typer.Option(help="Don't go on with an interrupted run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Calibrate the kvtc codec for MODEL: minutes, once; interrupt it and it goes on later.

    The result lies beside the cache, readable by you alone, and serves `THUNDER_CODEC=kvtc`.
    """
    from thunder_patches.tensors.calibrate import CannotCalibrate
    from thunder_patches.tensors.calibrate import calibrate as run
    from thunder_patches.tensors.rope import UnknownRotary

    documents = [path.read_text(encoding="utf-8") for path in texts or ()]
    if bundled or not documents:
        documents += bundled_texts()
    loaded, make_cache, encode, identity = _load(model)
    shelf = Shelf(settings().cache_dir / "calibrations")
    shelf.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = shelf.folder / f".{identity}.partial"
    if fresh:
        state.unlink(missing_ok=True)
    with progress("loading", quiet=as_json) as tick:
        try:
            result = run(
                loaded,
                make_cache,
                identity,
                [encode(text) for text in documents],
                progress=tick,
                state=state,
            )
        except (CannotCalibrate, UnknownRotary) as reason:
            raise typer.BadParameter(f"{model} can't be calibrated: {reason}") from reason
    result = shelf.add(result)
    state.unlink(missing_ok=True)
    _show(result, shelf.folder, as_json)


def bundled_texts() -> list[str]:
    """The texts that come with the package, and some of its own source."""
    data = resources.files("thunder_patches.codec") / "data"
    texts = [
        entry.read_text(encoding="utf-8")
        for entry in sorted(data.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".txt")
    ]
    package = sorted(resources.files("thunder_patches.cache").iterdir(), key=lambda e: e.name)
    source = "\n\n".join(
        entry.read_text(encoding="utf-8") for entry in package if entry.name.endswith(".py")
    )
    return [*texts, source[:OWN_CODE]]


def _load(name: str) -> tuple[Any, Callable[[], Any], Callable[[str], list[int]], str]:
    """The model, a maker of its prompt caches, its tokeniser, and the identity in cache keys."""
    from thunder_patches.tensors.identity import code_of, identify

    utils = importlib.import_module("mlx_lm.utils")
    cache = importlib.import_module("mlx_lm.models.cache")
    folder = Path(name)
    if not folder.is_dir():
        hub = importlib.import_module("huggingface_hub")
        folder = Path(hub.snapshot_download(name))
    model, tokenizer = utils.load(str(folder))[:2]
    identity = identify(folder, None, code_of(model, "mlx_lm.models."))
    return model, lambda: cache.make_prompt_cache(model), tokenizer.encode, identity


def _show(result: Calibration, folder: Path, as_json: bool) -> None:
    path = folder / f"{result.id}.safetensors"
    found = {
        "id": result.id,
        "model": result.model,
        "file": str(path),
        "bytes": path.stat().st_size,
        **result.measured,
    }
    if as_json:
        tell(found)
        return
    print(f"calibration {result.id}, {path.stat().st_size / 1e6:.0f} MB, in {folder}")
    for quality, row in result.measured["held_out"].items():
        print(
            f"  {quality:9} {row['ratio']:5.1f} times smaller, KL {row['kl']:.4f}, "
            f"{row['top1']:.1%} of first choices the same (held-out text)"
        )
    if not result.measured["gradients"]:
        print("  without sensitivity weights: this model's kernels give no gradients")
    print("Start the server with THUNDER_CODEC=kvtc to use it.")
