"""A client of the OpenAI-style chat route that times what comes back. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_CHAT = "/v1/chat/completions"


class ServerError(RuntimeError):
    """The server refused a request, broke off, or could not be reached."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Seconds from sending the request: ``first`` to its first text, ``total`` in all."""

    text: str
    first: float
    total: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    skip: str | None = None
    """What the package says of it: "full", "approximate", "none"; None from a stock server."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer with what the model thought of each token; from oMLX, the text alone."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of the probability of each of ``tokens``."""
    best: tuple[dict[int, float], ...] = field(repr=False)
    """For each position the likeliest tokens and their logprobs."""
    cached_tokens: int = 0
    skip: str | None = None


class Client:
    """Requests to ``http://host:port``, greedy (temperature 0), one connection each."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = 600.0) -> None:
        self.host, self.port, self.timeout = host, port, timeout
        self.fields: dict[str, Any] = {}
        """Further fields of every request."""

    def stream(self, messages: list[Message], max_tokens: int) -> Answer:
        """Ask as a chat client does: streamed, timed to the first piece of the answer."""
        body = self._body(messages, max_tokens) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        first, text = 0.0, ""
        usage: dict[str, Any] = {}
        for chunk in self._events(body):
            if "error" in chunk:
                raise ServerError(f"stream: {chunk['error']}")
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                text += _text(choice.get("delta") or {})
            # oMLX sends chunks without text, too: the role at once, later ones to be kept alive.
            if text and not first:
                first = time.perf_counter() - start
        total = time.perf_counter() - start
        if not usage:
            raise ServerError("the stream ended without a usage chunk")
        return Answer(
            text=text,
            first=first or total,
            total=total,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=_cached(usage),
            skip=_skip(usage),
        )

    def score(self, prompt: list[Message] | str, max_tokens: int, top: int = 5) -> Scored:
        """Ask for the whole answer with the logprobs of its tokens and of the ``top`` likeliest.

        A text is continued as it is, without the chat template.
        """
        body = self._body(prompt, max_tokens) | {"logprobs": True, "top_logprobs": top}
        path = "/v1/completions" if isinstance(prompt, str) else _CHAT
        status, raw = self._exchange("POST", path, body)
        reply = _parse(status, raw)
        choice = reply["choices"][0]
        best = tuple(
            {one["id"]: one["logprob"] for one in place["top_logprobs"]}
            for place in choice["logprobs"]["content"]
        )
        # The server lists them in no order, and the first as the token: take the likeliest, which
        # is the one that a greedy answer takes.
        tokens = tuple(max(place, key=place.__getitem__) for place in best)
        return Scored(
            text=choice["text"] if isinstance(prompt, str) else _text(choice["message"]),
            tokens=tokens,
            logprobs=tuple(place[token] for place, token in zip(best, tokens, strict=True)),
            best=best,
            cached_tokens=_cached(reply["usage"]),
            skip=_skip(reply["usage"]),
        )

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        return self._exchange("GET", path)

    def healthy(self) -> bool:
        """Whether ``/health`` says yes."""
        try:
            return self.get("/health")[0] == 200
        except ServerError:
            return False

    def _body(self, prompt: list[Message] | str, max_tokens: int) -> dict[str, Any]:
        name = "prompt" if isinstance(prompt, str) else "messages"
        return {**self.fields, name: prompt, "max_tokens": max_tokens, "temperature": 0.0}

    def _exchange(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request(method, path, *_payload(body))
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request("POST", _CHAT, *_payload(body))
            reply = connection.getresponse()
            if reply.status != 200:
                _parse(reply.status, reply.read())
            for line in reply:
                # Other lines are blank or comments (": keepalive").
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)
            raise ServerError("the stream broke off")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"stream: {error!r}") from error
        finally:
            connection.close()


def _payload(body: Any) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, {}
    return json.dumps(body, ensure_ascii=False).encode(), {"Content-Type": "application/json"}


def _parse(status: int, raw: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(raw)
    except ValueError:
        reply = {"error": raw[:200].decode(errors="replace")}
    if status != 200 or "choices" not in reply:
        raise ServerError(f"status {status}: {reply.get('error', reply)}")
    return dict(reply)


def _text(message: dict[str, Any]) -> str:
    names = ("reasoning", "reasoning_content", "content")  # mlx-lm's, oMLX's, everyone's
    return "".join(message.get(name) or "" for name in names)


def _cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _skip(usage: dict[str, Any]) -> str | None:
    return (usage.get("context_pilot") or {}).get("skip")
