"""Requests to a server on this machine, with the standard library and strict time limits."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .compare import Answer

T = TypeVar("T")
Json = dict[str, Any]


class HttpError(RuntimeError):
    """An HTTP status that is not 200, with the body as sent."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


class Client:
    """Speaks to one server; every call opens its own connection, so threads may share a Client."""

    def __init__(self, port: int, timeout: float = 60.0) -> None:
        self.port = port
        self.timeout = timeout
        self.headers: dict[str, str] = {}
        """Sent with every POST, such as an API key."""
        self.fields: Json = {}
        """Fields of every POST's body that doesn't have them, such as the model's name."""

    def get(self, path: str, timeout: float | None = None) -> tuple[int, str]:
        """Status and body of a GET."""
        with self._connection(timeout) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def status(self) -> Json:
        """GET /thunder/status."""
        code, body = self.get("/thunder/status")
        if code != 200:
            raise HttpError(code, body)
        return dict(json.loads(body))

    def healthy(self) -> bool:
        try:
            return self.get("/health", timeout=5)[0] == 200
        except OSError:
            return False

    def complete(self, prompt: str, *, timeout: float | None = None, **body: Any) -> Answer:
        """A text completion; see `defaults` for what is asked for."""
        return self._ask("/v1/completions", {"prompt": prompt} | body, timeout)

    def chat(
        self, messages: Sequence[Json], *, timeout: float | None = None, **body: Any
    ) -> Answer:
        """A chat completion; see `defaults` for what is asked for."""
        return self._ask("/v1/chat/completions", {"messages": list(messages)} | body, timeout)

    def stream(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Json] | None = None,
        timeout: float | None = None,
        hang_up: Callable[[int], bool] | None = None,
        **body: Any,
    ) -> Answer:
        """The same in stream form, with usage; `hang_up(keepalives so far)` leaves early."""
        path = "/v1/completions" if messages is None else "/v1/chat/completions"
        content = {"prompt": prompt} if messages is None else {"messages": list(messages)}
        body = content | {"max_tokens": 12, "temperature": 0.0} | body
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events: list[Json] = []
        keepalives: list[str] = []
        with self._connection(timeout) as connection:
            for line in self._lines(connection, path, body):
                if line.startswith(":"):
                    keepalives.append(line)
                    if hang_up is not None and hang_up(len(keepalives)):
                        break
                elif line == "data: [DONE]":
                    break
                elif line.startswith("data: "):
                    events.append(json.loads(line[6:]))
        return _from_events(events, keepalives)

    def _ask(self, path: str, body: Json, timeout: float | None) -> Answer:
        return answer_of(self.post(path, defaults() | body, timeout))

    def post(self, path: str, body: Json, timeout: float | None = None) -> Json:
        """The JSON that a POST of JSON returns; HttpError unless the status is 200."""
        with self._connection(timeout) as connection:
            headers = {"Content-Type": "application/json"} | self.headers
            connection.request("POST", path, json.dumps(self.fields | body), headers)
            response = connection.getresponse()
            text = response.read().decode()
        if response.status != 200:
            raise HttpError(response.status, text)
        return dict(json.loads(text))

    def _lines(
        self, connection: http.client.HTTPConnection, path: str, body: Json
    ) -> Iterator[str]:
        text = json.dumps(self.fields | body)
        connection.request("POST", path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise HttpError(response.status, response.read().decode())
        for raw in response:
            yield raw.decode().rstrip("\r\n")

    @contextlib.contextmanager
    def _connection(self, timeout: float | None) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=timeout or self.timeout
        )
        try:
            yield connection
        finally:
            connection.close()


def defaults() -> Json:
    """What every request asks for unless told otherwise: 12 greedy tokens with logprobs."""
    return {"max_tokens": 12, "temperature": 0.0, "logprobs": True}


def answer_of(response: Json) -> Answer:
    """A response of either endpoint as an Answer."""
    choice = response["choices"][0]
    message = choice.get("message") or {}
    content = (choice.get("logprobs") or {}).get("content") or []
    usage = response.get("usage") or {}
    asked_alternatives = any("top_logprobs" in entry for entry in content)
    return Answer(
        text=choice["text"] if "text" in choice else message.get("content") or "",
        reasoning=message.get("reasoning") or "",
        finish=choice["finish_reason"],
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        # With alternatives the host sends the first alternative in the sampled token's place.
        tokens=() if asked_alternatives else tuple(entry["id"] for entry in content),
        logprobs=() if asked_alternatives else tuple(entry["logprob"] for entry in content),
        top=tuple(
            tuple(
                sorted(
                    ((t["id"], t["logprob"]) for t in entry["top_logprobs"]),
                    key=lambda pair: (-pair[1], pair[0]),
                )
            )
            for entry in content
            if "top_logprobs" in entry
        ),
        raw=response,
    )


def parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs the calls at the same time, a thread each; their results in order."""
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def _from_events(events: list[Json], keepalives: list[str]) -> Answer:
    text, reasoning, finish = "", "", None
    usage: Json = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            finish = choice["finish_reason"] or finish
    return Answer(
        text=text,
        reasoning=reasoning,
        finish=finish,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        keepalives=tuple(keepalives),
        raw=events,
    )
