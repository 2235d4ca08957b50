"""A process with a store, told what to do by lines of JSON: `python -m tests.core.cache_child`.

    {"do": "open", "folder": ..., ...}   {"do": "put", "prompt": [...], "stamp": 1}
    {"do": "read", "prompt": [...]}      {"do": "stats"}      {"do": "age"}      {"do": "close"}

Each is answered by one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.core.cache_support import ROOT, Shortens, age_all, blocks, counts, open_store, read
from thunder_patches.cache.store import CacheStore

PROJECT = Path(__file__).parents[2]


class Child:
    """The other end of it. `user`: the numeric user to run as (needs root)."""

    def __init__(self, folder: Path, user: int | None = None, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.core.cache_child", *([str(user)] if user else [])],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        self.opened = self.ask("open", folder=str(folder), **settings)

    def ask(self, what: str, **details: Any) -> Any:
        self.tell(what, **details)
        return self.answer()

    def tell(self, what: str, **details: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **details}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def perform(store: CacheStore | None, command: dict[str, Any]) -> Any:
    assert store is not None
    match command["do"]:
        case "put":
            for record in blocks(ROOT, command["prompt"]):
                store.put(record, command.get("stamp", 1))
            return store.flush(60)
        case "read":
            return [read(store, record.header) for record in blocks(ROOT, command["prompt"])]
        case "stats":
            return {**store.stats(), "counts": counts(store)}
        case "age":
            return age_all(store)
        case "close":
            store.close()
            return True
    raise ValueError(command)


def main() -> None:
    if len(sys.argv) > 1:
        os.setuid(int(sys.argv[1]))
    store = None
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("do") == "open":
            store = open_store(Path(command.pop("folder")), codec=Shortens(), **command)
            answer: Any = store.ready(60)
        else:
            answer = perform(store, json.loads(line))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
