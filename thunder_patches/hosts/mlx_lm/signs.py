"""Signs of life to a streaming client while its prompt is prefilled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...prefill.progress import Progress, Ticker, chunk, comment


class Signs:
    """The progress of one streamed answer, written from a timer until its first token.

    Args:
        handler: the host's ``APIHandler``; report: its own ``progress_callback(processed, total)``.
        options: the request's ``thunder`` object; with ``progress`` true there are typed events.
    """

    def __init__(
        self, handler: Any, report: Callable[[int, int], None] | None, options: dict[str, Any]
    ) -> None:
        self._handler = handler
        self._report = report
        self._typed = bool(options.get("progress"))
        self._progress = Progress(0)
        self._prompt: Any = None
        handler.wfile = _Locked(handler.wfile)

    def saw(self, processed: int, total: int) -> None:
        """In the place of the host's ``progress_callback``, on the handler's thread."""
        self._progress.saw(processed)
        if self._report is not None:
            self._report(processed, total)

    def around(self, response: Iterator[Any], context: Any) -> Iterator[Any]:
        """The host's answer, with signs of life before its first token."""
        self._prompt = context.prompt
        self._progress.total = len(context.prompt)
        ticker = Ticker(self._sign, context.stop)
        ticker.start()
        try:
            first = next(response, None)
        finally:
            ticker.stop()
        if first is not None:
            yield first
            yield from response

    def _sign(self) -> None:
        outcome = self._prompt.outcome
        if outcome is not None and not self._progress.skipped:
            self._progress.skipped = self._progress.done = outcome.cached_tokens
        handler = self._handler
        sign = comment(self._progress)
        if self._typed:
            sign += chunk(
                self._progress,
                {
                    "id": handler.request_id,
                    "object": handler.object_type,
                    "created": handler.created,
                    "model": handler.requested_model,
                },
            )
        handler.wfile.write(sign)
        handler.wfile.flush()


class _Locked:
    """A handler's output, whole writes at a time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()

    def write(self, data: bytes) -> Any:
        with self._lock:
            return self._inner.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
