"""KVTC calibrates itself from the user's own prompts while nothing else goes on (opt-in).

The tokens are those of stored blocks. All steps run on the generation thread, as all of MLX does, and
each is short: a request that arrives meanwhile waits for the gradient of one piece of text at most.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.aging import QUIET_SECONDS
from ..cache.store import CacheStore
from ..codec.calibration import Calibration
from ..tensors.calibrate import CannotCalibrate, calibrating
from ..tensors.rope import UnknownRotary
from .runtime import Runtime
from .session import Session

log = logging.getLogger("thunder_patches")

PIECE = 256
LEAST_TOKENS, MOST_TOKENS = 4_000, 20_000
"""Fewer tokens give poor bases, more hardly better ones."""


class Learner:
    """Calibrates one model after another, each once."""

    def __init__(self, runtime: Runtime, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._runtime = runtime
        self._quiet_seconds = quiet_seconds
        self._session: Session | None = None
        self._steps: Generator[Any, None, Calibration] | None = None
        self._due = 0
        """Requests after which to look for tokens (again)."""
        self._finished = False

    def step(self, session: Session, model: Any) -> None:
        """Do a little of what is to be done for this model, if there is time for it."""
        if session is not self._session:
            self._session, self._steps, self._finished = session, None, False
            self._due = self._runtime.settings.calibrate_after
        if self._finished or self._runtime.activity.quiet() < self._quiet_seconds:
            return
        if self._steps is None:
            self._begin(session, model)
        if self._steps is not None:
            self._go_on(session, self._steps)

    def _begin(self, session: Session, model: Any) -> None:
        runtime, codec = self._runtime, self._runtime.codec
        if codec is None or codec.mode != "kvtc" or codec.is_calibrated(session.identity):
            self._finished = True
        elif (seen := requests(runtime)) >= self._due:
            texts = own_tokens(runtime.store, session.root(runtime.settings.salt), MOST_TOKENS)
            if sum(map(len, texts)) >= LEAST_TOKENS:
                log.info("thunder: calibrating kvtc from stored prompts, in idle time")
                self._steps = calibrating(
                    model, session.make_cache, session.identity, texts, size=PIECE
                )
            else:
                self._due = seen + runtime.settings.calibrate_after

    def _go_on(self, session: Session, steps: Generator[Any, None, Calibration]) -> None:
        self._steps, self._finished = None, True
        try:
            next(steps)
        except StopIteration as end:
            assert self._runtime.codec is not None
            made = self._runtime.codec.learn(end.value)
            log.info("thunder: kvtc is calibrated (%s): %s", made.id, made.measured["held_out"])
        except (CannotCalibrate, UnknownRotary) as reason:
            log.warning("thunder: kvtc can't be calibrated for this model: %s", reason)
        else:
            self._steps, self._finished = steps, False
            mx.clear_cache()  # gradients' buffers are of no use to a prompt


def requests(runtime: Runtime) -> int:
    """Prompts looked up so far."""
    counts = runtime.counters.snapshot()
    return sum(counts[name] for name in ("full", "approximate", "partial", "miss"))


def own_tokens(store: CacheStore, root: bytes, most: int) -> list[list[int]]:
    """Tokens of the stored blocks after ``root``, about the latest used first, each block once.

    Blocks that follow each other are one text. Images, whose tokens are negative, end one.
    """
    texts: list[list[int]] = []
    found = 0
    waiting = [(key, root) for key in reversed(store.children(root))]
    while waiting and found < most:
        key, parent = waiting.pop()
        text: list[int] = []
        while found < most and (header := store.header(key, parent)) is not None:
            tokens = np.frombuffer(header.tokens, "<i8")
            if (tokens < 0).any():
                break
            text += tokens.tolist()
            found += len(tokens)
            children = store.children(key)
            waiting += [(other, key) for other in reversed(children[1:])]
            if not children:
                break
            key, parent = children[0], key
        if text:
            texts.append(text)
    return texts
