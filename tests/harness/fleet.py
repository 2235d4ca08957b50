"""The servers of a test session: shared ones that tests reuse, own ones, and stock references."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .compare import Answer, assert_telling
from .hosts import Host
from .models import Model
from .server import Server

BLOCK = 32
"""Tokens in a block of most test servers: small, so that short prompts have several."""

IDLE_SERVERS = 4
ERROR_SIGNS = ("Traceback", "There is no Stream", "the request goes on without it")
NO_HOST_CACHE = ("--prompt-cache-size", "0")


class Fleet:
    """Starts servers of one host, all on free ports, each with folders of its own.

    Args:
        host: the environment that is tested.
        python: its interpreter, with the plugin installed.
        folder: where every server gets a folder.
    """

    def __init__(self, host: Host, python: Path, folder: Path) -> None:
        self.host = host
        self.python = python
        self.folder = folder
        self._started = 0
        self._own: list[Server] = []
        self._idle: OrderedDict[str, Server] = OrderedDict()
        self._answers: dict[str, Answer] = {}
        self._read: dict[Server, int] = {}

    def server(
        self,
        model: Model | None,
        *,
        cache_dir: Path | None = None,
        args: Sequence[str] = (),
        host_cache: bool = False,
        env: Mapping[str, str | None] | None = None,
        **options: Any,
    ) -> Server:
        """A server of the test's own with the plugin on; it ends with the test.

        Its host's prompt cache is off unless `host_cache`: what hits then comes from the plugin.
        """
        env = {"THUNDER_BLOCK_TOKENS": str(BLOCK), **(env or {})}
        args = (*(() if host_cache else NO_HOST_CACHE), *args)
        server = self._make(model, cache_dir=cache_dir, args=args, env=env, **options)
        self._own.append(server)
        return server.start()

    def shared(self, model: Model, **options: Any) -> Server:
        """A server like that of `server`, reused by all tests that ask for the same one.

        Tests must bring prompts of their own (fixture `seed`) and leave the server healthy.
        """
        key = json.dumps(["shared", str(model.path), options], sort_keys=True, default=str)
        found = self._idle.get(key)
        if found is None or not found.running or not found.healthy():
            found = self.server(model, **options)
            self._own.remove(found)
        return self._keep(key, found)

    def stock(self, model: Model, *, args: Sequence[str] = (), **options: Any) -> Server:
        """A server of the test's own with THUNDER=0."""
        server = self._make(model, args=args, env={"THUNDER": "0"}, **options)
        self._own.append(server)
        return server.start()

    def expected(
        self, model: Model, /, *, args: Sequence[str] = (), telling: bool = True, **request: Any
    ) -> Answer:
        """The stock server's answer to a request, computed without any cache.

        `request` is either prompt=... or messages=..., and further fields of the body. The server
        has THUNDER=0 and its own prompt cache off, so that it answers like a freshly started one
        (test_controls.py checks that); it is kept for the next question.
        """
        where = [str(model.path), model.digest(), *args]
        key = json.dumps([where, request], sort_keys=True)
        if key not in self._answers:
            name = json.dumps(["reference", where])
            server = self._idle.get(name)
            if server is None or not server.healthy():
                env = {"THUNDER": "0"}
                server = self._make(model, args=(*NO_HOST_CACHE, *args), env=env).start()
            answer = ask(self._keep(name, server), request)
            if answer.cached_tokens:
                raise AssertionError(f"the reference used a cache: {answer.usage}")
            if telling:
                assert_telling(answer)
            self._answers[key] = answer
        return self._answers[key]

    def end_test(self) -> None:
        """Ends the servers that the last test started for itself."""
        for server in self._own:
            server.kill()
        self._own.clear()

    def close(self) -> None:
        """Ends every server."""
        self.end_test()
        for server in self._idle.values():
            server.kill()
        self._idle.clear()

    def logs(self, characters: int = 3000) -> list[tuple[str, str]]:
        """The end of the log of each server of the running test, and of the last shared one."""
        shared = list(self._idle.values())[-2:]
        return [(f"log of {s.folder.name}", s.log()[-characters:]) for s in [*self._own, *shared]]

    def new_logs(self) -> list[tuple[str, str]]:
        """What the servers with the plugin logged since the last call, but for `may_fail` ones."""
        found = []
        for server in [*self._own, *self._idle.values()]:
            text = server.log()
            start, self._read[server] = self._read.get(server, 0), len(text)
            if server.env.get("THUNDER") != "0" and not server.may_fail:
                found.append((f"log of {server.folder.name}", text[start:]))
        return found

    def assert_quiet(self) -> None:
        """Fails where a log tells of an error since the last call."""
        for name, text in self.new_logs():
            found = [sign for sign in ERROR_SIGNS if sign in text]
            assert not found, f"{name}: {found}\n{text[-3000:]}"

    def _make(self, model: Model | None, **options: Any) -> Server:
        self._started += 1
        path = None if model is None else model.path
        return Server(self.python, path, self.folder / f"server-{self._started}", **options)

    def _keep(self, key: str, server: Server) -> Server:
        self._idle[key] = server
        self._idle.move_to_end(key)
        while len(self._idle) > IDLE_SERVERS:
            self._idle.popitem(last=False)[1].kill()
        return server


def ask(server: Server, request: Mapping[str, Any]) -> Answer:
    """Sends a request given as data: a chat where it has messages, else a completion."""
    body = dict(request)
    if "messages" in body:
        return server.chat(body.pop("messages"), **body)
    return server.complete(body.pop("prompt"), **body)
