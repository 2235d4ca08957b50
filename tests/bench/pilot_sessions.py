"""Reuse in three agent sessions, with and without the stabiliser, and what was explained.

Token level: a prompt reuses the longest beginning that it shares with any earlier prompt, in whole
blocks of 256 tokens, as a full-attention model would. No model runs.

Run: python -m tests.bench.pilot_sessions
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.core.pilot_support import TEMPLATES, Chat
from thunder_patches.pilot.boundaries import Follower
from thunder_patches.pilot.explain import Match, explain
from thunder_patches.pilot.fingerprints import request_print
from thunder_patches.pilot.index import Index
from thunder_patches.pilot.report import report
from thunder_patches.pilot.stabilize import load_rules, stabilize

DATA = Path(__file__).parent.parent / "data" / "sessions"
BLOCK = 256


@dataclass(frozen=True)
class Request:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    total: int
    reused: int
    usage: dict[str, Any]
    did: tuple[str, ...]


def requests(path: Path) -> Iterator[Request]:
    """The requests of one session, as the client sends them."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    for sent in data["requests"]:
        system: Any = data["system"]
        for name, value in sent["values"].items():
            system = system.replace("{" + name + "}", value)
        if data.get("parts"):
            head, _, rest = system.partition("\n")
            system = [{"type": "text", "text": head + "\n"}, {"type": "text", "text": rest}]
        chat = copy.deepcopy(data["chats"][sent["chat"]][: sent["upto"]])
        if sent.get("arguments") == "reversed":
            for message in chat:
                for call in message.get("tool_calls", ()):
                    arguments = call["function"]["arguments"]
                    call["function"]["arguments"] = dict(reversed(arguments.items()))
        tools = list(data["tools"])
        if sent.get("tools") == "reversed":
            tools = [dict(reversed(tool.items())) for tool in reversed(tools)]
        elif sent.get("tools") == "rotated":
            tools = tools[2:] + tools[:2]
        yield Request([{"role": "system", "content": system}, *chat], tools)


def as_the_host_does(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """mlx-lm joins text parts to one string before it applies the template."""
    joined = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        joined.append({**message, "content": content})
    return joined


def play(path: Path, stable: bool, *user_rules: Path) -> list[Outcome]:
    chat = Chat(TEMPLATES["qwen3"])
    follower, index, rules = Follower(chat.encode), Index(), load_rules(*user_rules)
    earlier: list[np.ndarray] = []
    outcomes: list[Outcome] = []
    for request in requests(path):
        messages, tools = request.messages, request.tools
        did: tuple[str, ...] = ()
        if stable:
            done = stabilize(messages, tools, rules)
            messages, tools, did = list(done.messages), done.tools, done.did
        messages = as_the_host_does(messages)
        tokens = np.asarray(chat.tokens(messages, tools), dtype=np.int64)
        shared = max((shared_tokens(tokens, old) for old in earlier), default=0)
        reused = min(shared, len(tokens) - 1) // BLOCK * BLOCK
        found = follower.boundaries(chat.render, messages, tools, tokens)
        print_ = request_print(messages, model="m", tools=tools)
        miss = explain(messages, tokens, print_, index, Match(reused, BLOCK), found)
        source = "ram" if reused else None
        usage = report(
            messages,
            found,
            skip="none",
            cached_tokens=reused,
            source=source,
            miss=miss,
            stabilized=did,
        )
        index.record(print_, messages, tokens, found.ends)
        earlier.append(tokens)
        outcomes.append(Outcome(len(tokens), reused, usage, did))
    return outcomes


def shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    count = min(len(a), len(b))
    unequal = np.flatnonzero(a[:count] != b[:count])
    return int(unequal[0]) if len(unequal) else count


def sessions() -> list[Path]:
    return sorted(DATA.glob("*.toml"))


def main() -> None:
    for path in sessions():
        print(f"\n{path.stem}: {tomllib.loads(path.read_text(encoding='utf-8'))['about']}")
        for stable in (False, True):
            outcomes = play(path, stable)
            total = sum(o.total for o in outcomes[1:])
            reused = sum(o.reused for o in outcomes[1:])
            name = "with the stabiliser" if stable else "as sent"
            print(
                f"  {name}: {reused:,} of {total:,} tokens reused after the first ({reused / total:.0%})"
            )
            for number, outcome in enumerate(outcomes, 1):
                miss = outcome.usage.get("miss", {}).get("reason", "")
                print(f"    {number}: {outcome.reused:>5} of {outcome.total:>5}  {miss}")
            for did in dict.fromkeys(d for o in outcomes for d in o.did):
                print(f"    did: {did}")
    print("\n" + json.dumps(play(sessions()[0], False)[1].usage, indent=2))


if __name__ == "__main__":
    main()
