"""What a target looks like: a digest of its dedented source text and its signature.

Both are read from the source file, never from the live object, so that ``thunder doctor`` can judge
a host without importing it and the Python version makes no difference. Whether the live object *is*
that source is a second question: `matches`.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A function or method as its file has it."""

    fingerprint: str
    """32 hex digits."""
    line: int
    """Of its first decorator, or its ``def``: what ``co_firstlineno`` says too."""


def read(file: Path, attributes: Iterable[str]) -> dict[str, Source]:
    """The `attributes` (``function``, ``Class.method``, or a class imported by name) that `file` has.

    Raises OSError, SyntaxError and UnicodeError for a file that can't be read as Python.
    """
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    found = {}
    for attribute in attributes:
        definition = _find(tree, attribute.split("."))
        if definition is not None:
            first = min(node.lineno for node in (definition, *definition.decorator_list))
            source = textwrap.dedent("".join(lines[first - 1 : definition.end_lineno]))
            found[attribute] = Source(_digest(source, _signature(definition.args)), first)
        elif (imported := _import_of(tree, attribute)) is not None:
            found[attribute] = Source(
                _digest(f"from {imported.module} import", attribute), imported.lineno
            )
    return found


def matches(live: Any, file: Path, source: Source) -> bool:
    """Whether `live`, the raw attribute, is the function that was read from `file`.

    A class that the file imports has no code of its own to compare.
    """
    if isinstance(live, type):
        return True
    code = _code(live)
    return (
        code is not None
        and code.co_firstlineno == source.line
        and Path(code.co_filename).resolve() == file.resolve()
    )


def origin(live: Any) -> str:
    """The module that an attribute's code comes from, for messages."""
    return getattr(live, "__module__", None) or type(live).__module__


def combined(fingerprints: Iterable[str]) -> str:
    """One digest, 16 hex digits, for a set of fingerprints."""
    return hashlib.sha256("\n".join(sorted(fingerprints)).encode()).hexdigest()[:16]


def _find(tree: ast.AST, path: list[str]) -> _Definition | None:
    """The last definition of that name: the one that is in force."""
    name, *rest = path
    for node in reversed(list(ast.iter_child_nodes(tree))):
        if rest and isinstance(node, ast.ClassDef) and node.name == name:
            return _find(node, rest)
        if not rest and isinstance(node, _Definition) and node.name == name:
            return node
    return None


def _import_of(tree: ast.Module, name: str) -> ast.ImportFrom | None:
    """The top-level ``from ... import name``: a class that the module calls by that name."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return node
    return None


def _signature(arguments: ast.arguments) -> str:
    """Names and kinds; the defaults are in the source text."""
    parts = [f"{a.arg}/" for a in arguments.posonlyargs]
    parts += [a.arg for a in arguments.args]
    parts += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    parts += [f"{a.arg}=" for a in arguments.kwonlyargs]
    parts += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(parts)


def _digest(source: str, signature: str) -> str:
    text = "\n".join(line.rstrip() for line in source.strip().splitlines())
    return hashlib.sha256(f"{text}\n--\n{signature}".encode()).hexdigest()[:32]


def _code(live: Any) -> CodeType | None:
    if isinstance(live, property):
        live = live.fget
    if isinstance(live, staticmethod | classmethod):
        live = live.__func__
    return live.__code__ if isinstance(live, FunctionType) else None
