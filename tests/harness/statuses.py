"""Statuses as a server tells them, of sizes and in states that no test server would reach."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

from thunder_patches.observe.counters import Counters
from thunder_patches.observe.history import SHOWN, History, Place
from thunder_patches.observe.prefixes import Node, prefix_map


def empty_status() -> dict[str, Any]:
    tier = {"bytes": 0, "budget_bytes": 1 << 30, "blocks": 0, "scanned": True}
    history = History()
    return {
        "version": "0",
        "host": {"name": "mlx_lm", "distribution": "mlx-lm", "version": "0", "fingerprint": ""},
        "features": {"ssd_cache": {"state": "applied", "reason": ""}},
        "cache": {
            "ram": tier,
            "ssd": tier,
            "queue": {"bytes": 0, "blocks": 0},
            "problem": None,
            "last_fault": None,
            "counts": Counters().snapshot(),
        },
        "model": {"identity": "1", "family": "qwen3", "eligible": True, "reason": None},
        "problems": [],
        "process": {"pid": 1, "started": time.time() - 60, "text_shown": False},
        "requests": [],
        "over_time": history.over_time(),
        "first_tokens": history.first_tokens(),
        "prefixes": prefix_map([]),
    }


def key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


def big_status(blocks: int = 10_000) -> dict[str, Any]:
    """A folder of `blocks` blocks below 8 system prompts, and 300 requests in the last half hour."""
    chance, now = random.Random(1), time.time()
    root, nodes, ends = key("root"), [], []
    for system in range(8):
        parent, depth = root, 6 + 2 * system
        for i in range(depth):
            nodes.append(_node(key(system, i), parent, now - 3600 * system, system == 1))
            parent = key(system, i)
        ends.append((parent, parent, system))
    while len(nodes) < blocks:
        start, top, system = chance.choice(ends)
        parent, age = start, chance.expovariate(1 / 20_000)
        for _ in range(chance.randint(3, 14)):
            child = key(len(nodes), "child")
            nodes.append(_node(child, parent, now - age, False))
            parent = child
        if chance.random() < 0.4:
            ends.append((parent, top, system))
    history = History()
    for i in range(300):
        end, top, system = chance.choice(ends[-40:])
        tokens = chance.randint(2000, 40_000)
        cached = chance.choice((0, tokens, tokens - 300, tokens // 2))
        seen = history.add(tokens, cached, "full" if cached == tokens else "none", "ram")
        seen.at = now - 1800 + 6 * i
        seen.place = Place(root, end, top, f"{system:016x}", chance.randint(2, 40))
        if not cached:
            seen.miss = {"token": 12, "reason": "user message 3 differs at character 0"}
        history.first_token(seen, (tokens - cached) / 4000 + chance.uniform(0.03, 0.06))
    status = empty_status()
    status["cache"]["ram"] = {"bytes": 3 << 30, "budget_bytes": 4 << 30, "blocks": 900}
    status["cache"]["ssd"] = {"bytes": 31 << 30, "budget_bytes": 50 << 30, "blocks": len(nodes)}
    counts = {"full": 80, "partial": 145, "miss": 75, "blocks_written": len(nodes)}
    counts |= {"tokens_skipped": 3_913_000, "tokens_computed": 1_870_500, "blocks_evicted": 31}
    status["cache"]["counts"] |= counts
    status["requests"] = [seen.to_json() for seen in history.recent(SHOWN)]
    status["over_time"] = history.over_time()
    status["first_tokens"] = history.first_tokens()
    status["prefixes"] = prefix_map(nodes, history.recent())
    status["features"] |= {
        "approx_skip": {"state": "off", "reason": "off by default (THUNDER_APPROX_SKIP=1)"},
        "moe_fusion": {"state": "not_eligible", "reason": "the model has no experts"},
        "engine_thread": {"state": "host_has_it", "reason": "the host has one thread"},
    }
    return status


def _node(name: bytes, parent: bytes, used: float, pinned: bool) -> Node:
    return Node(name, parent, True, 3 << 20, int(used * 1e9), ("agents",) if pinned else ())
