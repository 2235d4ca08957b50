"""Stand-ins for the model: where a prompt is prefilled, and where its first token is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx

from ..patching.guard import shield
from .prefill import Prefill
from .quantised import AnySequence
from .runtime import runtime


class FirstStep:
    """Stands in for the model during the first step of a batch.

    With ``stored`` (one ``[vocabulary]`` per row) no model is called; otherwise the model's logits are kept
    in ``logits`` ``[rows, vocabulary]``.
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


class Prefilling:
    """Stands in for the model while one prompt is prefilled: a chunk in pieces, each stored after it.

    ``input_embeddings`` ``[1, tokens, width]`` are cut as the tokens are. They are named because the
    host looks for that name.

    Args:
        held: tokens in the caches before the first call.
    """

    def __init__(
        self, model: Any, sequence: AnySequence, held: int, prefill: Prefill | None
    ) -> None:
        self.model = model
        self.sequence = sequence
        self.position = held
        self._prefill = prefill

    def __call__(
        self,
        inputs: mx.array,
        cache: Any = None,
        input_embeddings: mx.array | None = None,
        **kwargs: Any,
    ) -> mx.array:
        embedded = {} if input_embeddings is None else {"input_embeddings": input_embeddings}
        while (left := inputs.shape[1]) > 1:
            size, snapshot = left, False
            with shield("ssd_cache", "plan"):
                size, snapshot = next_piece(self.sequence, self._prefill, self.position, left)
            part = {name: value[:, :size] for name, value in embedded.items()}
            with measured(self._prefill, self.position, size):
                result = self.model(inputs[:, :size], cache=cache, **kwargs, **part)
                mx.eval([c.state for c in cache])
            self.position += size
            with shield("ssd_cache", "prefill"):
                self.sequence.store(cache, self.position, snapshot=snapshot)
            if size == left:
                return result
            mx.clear_cache()
            inputs = inputs[:, size:]
            embedded = {name: value[:, size:] for name, value in embedded.items()}
        self.position += 1
        return self.model(inputs, cache=cache, **kwargs, **embedded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class SerialSteps(Prefilling):
    """Stands in for the model during one serial generation, from prefill to the last token.

    Args:
        stored: ``[vocabulary]``, logits of the last prompt token: it is then not computed.
    """

    def __init__(
        self,
        model: Any,
        sequence: AnySequence,
        held: int,
        prefill: Prefill | None,
        stored: mx.array | None,
    ) -> None:
        super().__init__(model, sequence, held, prefill)
        self._stored = stored
        self._end = len(sequence)
        self._logits: mx.array | None = None

    def __call__(
        self,
        inputs: mx.array,
        cache: Any = None,
        input_embeddings: mx.array | None = None,
        **kwargs: Any,
    ) -> mx.array:
        if self._stored is not None:
            logits, self._stored = self._stored, None
            self.position += inputs.shape[1]
            return logits[None, None, :]
        if self._logits is not None:
            # The caches hold exactly the prompt now; the next step has not begun.
            with shield("ssd_cache", "first token"):
                self.sequence.store(cache, self._end, snapshot=True, logits=self._logits)
            self._logits = None
        result = super().__call__(inputs, cache, input_embeddings, **kwargs)
        if self.position == self._end:
            self._logits = result[0, -1]
        return result


def next_piece(
    sequence: AnySequence, prefill: Prefill | None, start: int, left: int
) -> tuple[int, bool]:
    """Tokens to prefill at once from ``start``, and whether a snapshot is due after them."""
    size = prefill.size(start, left) if prefill is not None else left
    due = sequence.due(start, start + left)
    if due and due[0] - start <= size:
        return due[0] - start, True
    return size, False


@contextmanager
def measured(prefill: Prefill | None, context: int, tokens: int) -> Iterator[None]:
    """Let the chunk plan learn from what the computation inside takes."""
    learning = prefill.measured(context, tokens) if prefill is not None else nullcontext()
    with runtime().activity.running(), learning:
        yield
