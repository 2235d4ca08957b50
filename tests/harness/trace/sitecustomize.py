"""Loaded by test servers only (first on their PYTHONPATH): watches the host, injects faults.

Does nothing unless HARNESS_TRACE names a file. Then it

- appends one JSON line for each call of a loaded model: {"batch": rows, "width": tokens a row};
- before a call, obeys a fault file (the same name with ".fault"): {"skip": n, "error": text} raises
  RuntimeError(text) at the n-th further call, {"skip": n, "sleep": seconds} waits there;
- with HARNESS_SLOW_WRITES=seconds waits that long before each rename of a file to a name
  under THUNDER_CACHE_DIR, on the thread that renames.

It knows one host function, mlx_lm.utils.load_model, and nothing of thunder_patches.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time


class _Watch:
    """Counts the calls of every model class that load_model returns."""

    def __init__(self, path):
        self.log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.fault = path + ".fault"
        self.seen = set()

    def instrument(self, cls):
        if cls in self.seen:
            return
        self.seen.add(cls)
        original = cls.__call__

        @functools.wraps(original)
        def call(model, inputs, *args, **kwargs):
            self.before(inputs.shape)
            return original(model, inputs, *args, **kwargs)

        cls.__call__ = call

    def before(self, shape):
        line = json.dumps({"batch": shape[0], "width": shape[1]}) + "\n"
        os.write(self.log, line.encode())
        try:
            with open(self.fault) as file:
                fault = json.load(file)
        except FileNotFoundError:
            return
        if fault["skip"] > 0:
            fault["skip"] -= 1
            with open(self.fault + ".new", "w") as file:
                json.dump(fault, file)
            os.replace(self.fault + ".new", self.fault)
            return
        os.unlink(self.fault)
        if "sleep" in fault:
            time.sleep(fault["sleep"])
        else:
            raise RuntimeError(fault["error"])


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, watch):
        self.inner = inner
        self.watch = watch

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        load_model = module.load_model

        @functools.wraps(load_model)
        def watched(*args, **kwargs):
            result = load_model(*args, **kwargs)
            self.watch.instrument(type(result[0]))
            return result

        module.load_model = watched

    def __getattr__(self, name):  # what the inner loader also offers, such as get_source
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader that the other finders give for mlx_lm.utils."""

    def __init__(self, watch):
        self.watch = watch

    def find_spec(self, name, path=None, target=None):
        if name != "mlx_lm.utils":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.watch)
                return spec
        return None


def _slow_writes(folder, seconds):
    prefix = os.path.realpath(folder) + os.sep

    def hook(event, args):
        if event == "os.rename" and os.path.abspath(os.fsdecode(args[1])).startswith(prefix):
            time.sleep(seconds)

    sys.addaudithook(hook)


def _main():
    path = os.environ.get("HARNESS_TRACE")
    if path:
        sys.meta_path.insert(0, _Finder(_Watch(path)))
    seconds = os.environ.get("HARNESS_SLOW_WRITES")
    if seconds:
        _slow_writes(os.environ["THUNDER_CACHE_DIR"], float(seconds))


_main()
