"""Which thread a host runs its model on: where each step hops through a pool, and where it has its own."""

from __future__ import annotations

import ast

from ..patching.host import Host
from ..patching.patch import State, Verdict


def has_own_thread(host: Host) -> Verdict | None:
    """The verdict on a feature that gives an engine a thread of its own: hosts known here have one.

    mlx-lm generates on one thread. oMLX makes a pool of one worker for each engine, on which every step
    of it runs; older builds that share a pool between engines are not known here.
    """
    build = f"{host.distribution} {host.version}"
    if host.name == "mlx_lm":
        return Verdict(State.HOST_HAS_IT, f"{build} generates on one thread of its own")
    file = host.file("omlx.engine_core")
    core = _class(ast.parse(file.read_text("utf-8")), "EngineCore") if file is not None else None
    if core is not None and _has_pool_of_one(core):
        return Verdict(State.HOST_HAS_IT, f"{build} runs each engine on a thread of its own")
    return Verdict(State.NOT_ELIGIBLE, f"{build} shares a pool of threads, which is not known here")


def _class(module: ast.Module, name: str) -> ast.ClassDef | None:
    found = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found[-1] if found else None


def _has_pool_of_one(core: ast.ClassDef) -> bool:
    """Whether the class makes a ``ThreadPoolExecutor(max_workers=1, ...)``."""
    for node in ast.walk(core):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ThreadPoolExecutor"):
            for word in node.keywords:
                if word.arg == "max_workers" and ast.unparse(word.value) == "1":
                    return True
    return False
