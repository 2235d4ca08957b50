"""Stand-ins for the model where the first token is sampled: they give, or take, its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..prefill import Prefill


class FirstStep:
    """Stands in for the model during the first step of a batch.

    With ``stored`` (one ``[vocabulary]`` per row) no model is called; otherwise the model's logits are
    kept in ``logits`` ``[rows, vocabulary]``.
    """

    def __init__(self, model: Any, stored: list[mx.array] | None = None) -> None:
        self.model = model
        self.stored = stored
        self.logits: mx.array | None = None

    def __call__(self, inputs: mx.array, cache: Any = None, **kwargs: Any) -> mx.array:
        if self.stored is not None:
            return mx.stack(self.stored)[:, None, :]
        result = self.model(inputs, cache=cache, **kwargs)
        self.logits = result[:, -1, :]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class SerialSteps:
    """Stands in for the model during one serial generation (``generate_step``).

    Args:
        total: tokens that the host will prefill, the last prompt token included.
        stored: ``[vocabulary]``, logits of the last prompt token: it is then not computed.
        stops: tokens after which to call ``at_stop(tokens so far)``, in order; a call that spans one is split.
        at_end: called with the logits ``[vocabulary]`` once the caches hold exactly the prompt.
        prefill: sizes the pieces of a chunk; held: tokens in the caches before the first call.
    """

    def __init__(
        self,
        model: Any,
        total: int,
        stored: mx.array | None,
        stops: list[int],
        at_stop: Callable[[int], None],
        at_end: Callable[[mx.array], None],
        prefill: Prefill | None = None,
        held: int = 0,
    ) -> None:
        self.model = model
        self.seen = 0
        self._total = total
        self._stored = stored
        self._stops = stops
        self._at_stop = at_stop
        self._prefill = prefill
        self._held = held
        self._at_end: Callable[[mx.array], None] | None = at_end
        self._logits: mx.array | None = None

    def __call__(self, inputs: mx.array, cache: Any = None, **kwargs: Any) -> mx.array:
        if self._stored is not None:
            logits, self._stored, self._at_end = self._stored, None, None
            self.seen += inputs.shape[1]
            return logits[None, None, :]
        if self.seen >= self._total and self._at_end is not None and self._logits is not None:
            self._at_end(self._logits)
            self._at_end = None
            self._logits = None
        while self._stops and self._stops[0] <= self.seen:
            self._stops.pop(0)
        while True:
            left = inputs.shape[1]
            size = min(left, self._stops[0] - self.seen) if self._stops else left
            if self._prefill is not None and left > 1:
                size = min(size, self._prefill.size(self._held + self.seen, left))
            result = self._piece(inputs[:, :size], cache, last=size == left, **kwargs)
            self.seen += size
            if self._stops and self.seen == self._stops[0]:
                self._stops.pop(0)
                self._at_stop(self.seen)
            if size == left:
                break
            inputs = inputs[:, size:]
        if self.seen == self._total:
            self._logits = result[0, -1]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _piece(self, inputs: mx.array, cache: Any, *, last: bool, **kwargs: Any) -> mx.array:
        size = inputs.shape[1]
        if self._prefill is None or size == 1:
            return self.model(inputs, cache=cache, **kwargs)
        with self._prefill.measured(self._held + self.seen, size):
            result = self.model(inputs, cache=cache, **kwargs)
            mx.eval([c.state for c in cache])
        if not last:
            mx.clear_cache()
        return result
