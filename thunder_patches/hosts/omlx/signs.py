"""Signs of life to a streaming client while its prompt is prefilled.

The host keeps its streams alive by itself, in a form of its user's choice, but for ``/v1/responses``.
Progress goes to those that asked: in chunks without choices, and to Anthropic clients in pings.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ...patching.guard import is_on, shield
from ...prefill.progress import INTERVAL, chunk, comment

if TYPE_CHECKING:
    from .requests import Http

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Signs:
    """The progress of one streamed answer, sent from a timer until its prompt is prefilled."""

    def __init__(self, http: Http, send: Send) -> None:
        self._http = http
        self._send = send
        self._lock = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None

    async def send(self, message: dict[str, Any]) -> None:
        """In the place of ASGI's ``send``: whole messages, with signs in between."""
        async with self._lock:
            await self._send(message)
        with shield("progress", "stream"):
            if message["type"] == "http.response.start" and self._wanted(message):
                self._ticking = asyncio.create_task(self._tick())
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                self.stop()

    def stop(self) -> None:
        """No sign is sent any more."""
        if self._ticking is not None:
            self._ticking.cancel()

    def _wanted(self, start: dict[str, Any]) -> bool:
        headers = dict(start.get("headers", ()))
        if not is_on("progress") or b"event-stream" not in headers.get(b"content-type", b""):
            return False
        return bool(self._http.options.get("progress")) or self._http.path == "/v1/responses"

    async def _tick(self) -> None:
        with shield("progress", "sign"):
            while True:
                await asyncio.sleep(INTERVAL)
                sign = self._sign()
                if sign is not None:
                    async with self._lock:
                        await self._send(
                            {"type": "http.response.body", "body": sign, "more_body": True}
                        )

    def _sign(self) -> bytes | None:
        progress, prefilling = self._http.progress, self._http.prefilling
        if progress is None or prefilling is None or progress.done >= progress.total - 1:
            return None
        progress.saw(prefilling.position - progress.skipped)
        if self._http.path == "/v1/messages":
            told = {"type": "ping", "thunder": {"progress": progress.as_dict()}}
            return f"event: ping\ndata: {json.dumps(told)}\n\n".encode()
        if self._http.path == "/v1/responses":
            return comment(progress)
        chat = self._http.path == "/v1/chat/completions"
        envelope = {
            "id": "chatcmpl-progress" if chat else "cmpl-progress",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": "",
        }
        return chunk(progress, envelope)
