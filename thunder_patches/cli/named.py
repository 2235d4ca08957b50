"""``thunder cache pin|names|describe|export|import|drop``: prefixes that are kept by name.

All but ``pin`` work on the cache folder, whether or not a server uses it; to pin, a server must run.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table

from thunder_patches.cache.budget import disk_budget
from thunder_patches.cache.store import CacheStore
from thunder_patches.config import settings
from thunder_patches.handoff.context import Context
from thunder_patches.handoff.names import checked_name, owner_of
from thunder_patches.handoff.refusal import Refused
from thunder_patches.handoff.shelf import Shelf
from thunder_patches.handoff.transfer import export, take_in

from ._output import ago, console, tell
from ._play.figures import size

Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Name = Annotated[str, typer.Argument(help="The cache's name.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key-env", help="With THUNDER_SALT=api-key: the variable that holds the owner's API key."
    ),
]
Ttl = Annotated[float | None, typer.Option(help="Seconds until it goes; default: never.")]
_TIMEOUT = 3600.0


def register(group: typer.Typer) -> None:
    """Add the commands to ``thunder cache``."""
    for command in (pin, names, describe, drop):
        group.command()(command)
    group.command("export")(export_file)
    group.command("import")(import_file)


def pin(
    name: Name,
    file: Annotated[Path, typer.Argument(help="A chat request as JSON, or a text.", exists=True)],
    server: Annotated[str, typer.Option(help="The server that is to read it.")],
    ttl: Ttl = None,
    key_env: Key = None,
    as_json: Json = False,
) -> None:
    """Have a server read a prefix once, and keep it by name."""
    text = file.read_text(encoding="utf-8")
    try:
        body = json.loads(text)
    except ValueError:
        body = {"prompt": text}
    if isinstance(body, list):
        body = {"messages": body}
    told = _post(server, f"/thunder/caches/{checked_name(name)}", body | {"ttl": ttl}, key_env)
    if as_json:
        tell(told)
    else:
        print(f"{name}: {told['tokens']:,} tokens, {size(told['size'])}")


def names(as_json: Json = False) -> None:
    """List the named caches."""
    found = _shelf().names()
    if as_json:
        tell([context.described() for context in found])
        return
    if not found:
        print(f"nothing is kept by name in {settings().cache_dir}")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "tokens", "size", "made", "ends", "model"):
        table.add_column(column, justify="left" if column in ("name", "model") else "right")
    now = time.time()
    for context in found:
        table.add_row(
            context.id,
            f"{len(context.tokens):,}",
            size(context.size),
            ago(now - context.created),
            _ends(context, now),
            context.model_name,
        )
    console().print(table)


def describe(name: Name, key_env: Key = None, as_json: Json = False) -> None:
    """Show what one named cache is. Never its text."""
    told = _shelf().named(name, owner_of(_salt(key_env))).described()
    if as_json:
        tell(told)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for field, value in told.items():
        table.add_row(field.replace("_", " "), str(value))
    console().print(table)


def drop(name: Name, key_env: Key = None) -> None:
    """No longer keep a named cache; its blocks then go when room is needed."""
    shelf = _shelf()
    shelf.release(shelf.named(name, owner_of(_salt(key_env))))
    print(f"{name} is dropped")


def export_file(
    name: Name,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    key_env: Key = None,
) -> None:
    """Write a named cache to one file, to be imported elsewhere."""
    context = _shelf().named(name, owner_of(_salt(key_env)))
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    with _store() as store:
        try:
            written = export(store, context, temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    print(f"{file}: {len(context.tokens):,} tokens, {size(written)}")


def import_file(
    file: Annotated[Path, typer.Argument(help="An exported file.", exists=True)],
    name: Annotated[str | None, typer.Option(help="Another name than the one it had.")] = None,
    ttl: Ttl = None,
    key_env: Key = None,
) -> None:
    """Check an exported file and keep what it holds by name. It must come from someone you trust."""
    expires = None if ttl is None else time.time() + ttl
    with _store() as store:
        taken = take_in(store, _shelf(), file, salt=_salt(key_env), name=name, expires=expires)
    print(f"{taken.id}: {len(taken.tokens):,} tokens, {size(taken.size)}")


def _shelf() -> Shelf:
    return Shelf(settings().cache_dir / "v1" / "contexts")


@contextmanager
def _store() -> Iterator[CacheStore]:
    """The cache folder, to read records from and to put some in within its budget."""
    from thunder_patches.codec.policy import Policy

    folder = settings().cache_dir / "v1"
    store = CacheStore(
        folder,
        disk_budget=disk_budget(settings().cache_max_gb, folder),
        ram_budget=0,
        prefetch=False,
        codec=Policy("auto"),
        kept=_shelf().kept,
    )
    try:
        store.ready()
        yield store
    finally:
        store.close()


def _salt(key_env: str | None) -> str:
    """The salt that a server gives to the requests of this owner."""
    if settings().salt != "api-key":
        return settings().salt
    key = os.environ.get(key_env or "", "")
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


def _post(server: str, path: str, body: dict[str, Any], key_env: str | None) -> dict[str, Any]:
    where = urlsplit(server if "://" in server else f"http://{server}")
    make = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = make(where.netloc, timeout=_TIMEOUT)
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(key_env or ""):
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        told = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise Refused(response.status, "server", str(told.get("error", told)))
    return dict(told)


def _ends(context: Context, now: float) -> str:
    if context.expires is None:
        return "never"
    return "expired" if context.expired(now) else f"in {context.expires - now:.0f} s"
