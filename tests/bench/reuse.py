"""How much of a prompt is reused on each kind of model, stock and with the package.

    python -m tests.bench.reuse [--json]

Tiny models with random weights behind the real server, blocks of 32 tokens. C3: 300 shared words
that end in X, then in Y, then in X again. C4: a chat of six turns whose template drops older
thinking, and whose answers re-tokenise differently. Printed are the tokens that the server says it
had, of the prompt's tokens; the stock server has its own prompt cache, the other one both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.harness.compare import Answer
from tests.harness.models import Model, ModelFactory, text_of
from tests.harness.server import Server

KINDS = {
    "full attention": "qwen3",
    "hybrid (gated delta)": "qwen3_next",
    "hybrid MoE": "qwen3_5_moe",
    "sliding window": "gemma3",
}
BLOCK = "32"
Reuse = list[tuple[int, int]]
"""(tokens had, tokens of the prompt), request by request."""


def branch(server: Server) -> Reuse:
    """C3."""
    shared = text_of(300, 1)
    x, y = shared + text_of(25, 2), shared + text_of(25, 3)
    return [_usage(server.complete(prompt, max_tokens=4)) for prompt in (x, y, x)]


def chat(server: Server) -> Reuse:
    """C4."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": text_of(60, 4)}]
    found = []
    for turn in range(6):
        messages.append({"role": "user", "content": text_of(30 + turn, 5 + turn)})
        answer = server.chat(messages, max_tokens=16)
        found.append(_usage(answer))
        text = answer.reasoning
        messages.append({"role": "assistant", "content": f"<think>\n{text}\n</think>\n{text}"})
    return found


def _usage(answer: Answer) -> tuple[int, int]:
    return answer.cached_tokens or 0, answer.prompt_tokens or 0


def measure(model: Model, folder: Path, env: dict[str, str]) -> dict[str, Reuse]:
    python = Path(sys.executable)
    server = Server(python, model.path, folder, cache_dir=folder / "cache", env=env).start()
    try:
        return {"branch": branch(server), "chat": chat(server)}
    finally:
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    result: dict[str, dict[str, dict[str, Reuse]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        models = ModelFactory(Path(scratch) / "models")
        for kind, architecture in KINDS.items():
            model = models.get(architecture)
            result[kind] = {
                name: measure(model, Path(scratch) / f"{architecture}-{name}", env)
                for name, env in (
                    ("stock", {"THUNDER": "0"}),
                    ("patched", {"THUNDER_BLOCK_TOKENS": BLOCK}),
                )
            }
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    print(
        "| Model | Case | Prompt tokens | Had: stock | Had: with the package |\n|---|---|---|---|---|"
    )
    for kind, both in result.items():
        for case in ("branch", "chat"):
            stock, patched = both["stock"][case], both["patched"][case]
            had = [", ".join(str(hit) for hit, _ in each) for each in (stock, patched)]
            sizes = ", ".join(str(size) for _, size in patched)
            print(f"| {kind} | {case} | {sizes} | {had[0]} | {had[1]} |")


if __name__ == "__main__":
    main()
