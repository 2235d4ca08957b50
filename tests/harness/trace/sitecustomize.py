"""Loaded by test servers only (first on their PYTHONPATH): watches the host, injects faults.

Does nothing without the variables below. With HARNESS_TRACE=file it

- appends one JSON line for each call of a loaded model: {"batch": rows, "width": tokens a row};
- before a call, obeys a fault file (the same name with ".fault"): {"skip": n, "error": text} raises
  RuntimeError(text) at the n-th further call, {"skip": n, "sleep": seconds} waits there;
- with HARNESS_ANSWERS=file appends one JSON line for each token of an answer of the batched path:
  {"answer": uid, "token": id, "logprob": its logprob};
- with HARNESS_PREFILL_STEP=tokens makes oMLX prefill in chunks of that size, which it has no setting for;
- with HARNESS_SEES=1 gives every model class that load_model returns an `embed_inputs`, as a model
  with a vision tower has it: mlx-lm's only one needs Metal. An image's patch is a row of the embedding
  that its pixels pick;
- with HARNESS_SLOW_WRITES=seconds waits that long before each rename of a file to a name
  under THUNDER_CACHE_DIR, on the thread that renames;
- with HARNESS_INDEX=folder keeps there which names transformers has in which of its modules: every
  process that imports it reads 3,000 source files for that, half the time of a server's start.

It knows of the hosts mlx_lm.utils.load_model, mlx_lm.generate's responses and oMLX's SchedulerConfig,
of transformers define_import_structure, and nothing of thunder_patches.
"""

import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import pickle
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
        if os.environ.get("HARNESS_SEES"):
            cls.embed_inputs = _embed_inputs
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

    def watch_loading(self, module):
        load_model = module.load_model

        @functools.wraps(load_model)
        def watched(*args, **kwargs):
            result = load_model(*args, **kwargs)
            self.instrument(type(result[0]))
            return result

        module.load_model = watched


def _tell_answers(path):
    """A change of mlx_lm.generate: each response of the batched path is noted."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def change(module):
        response = module.GenerationBatch.Response
        original = response.__init__

        @functools.wraps(original)
        def noted(self, *args, **kwargs):
            original(self, *args, **kwargs)
            told = {"answer": self.uid, "token": self.token}
            told["logprob"] = self.logprobs[self.token].item()
            os.write(log, (json.dumps(told) + "\n").encode())

        response.__init__ = noted

    return change


def _set_prefill_step(tokens):
    """A change of omlx.scheduler."""

    def change(module):
        original = module.SchedulerConfig.__init__

        @functools.wraps(original)
        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.prefill_step_size = tokens

        module.SchedulerConfig.__init__ = init

    return change


def _keep_index(folder):
    """A change of transformers.utils.import_utils."""

    def change(module):
        original = module.define_import_structure

        @functools.wraps(original)
        def kept(module_path, prefix=None):
            name = hashlib.sha256(f"{module_path}\0{prefix}".encode()).hexdigest()
            file = os.path.join(folder, name)
            try:
                with open(file, "rb") as stored:
                    return pickle.load(stored)
            except FileNotFoundError:
                found = original(module_path, prefix)
            with open(f"{file}.{os.getpid()}", "wb") as new:
                pickle.dump(found, new)
            os.replace(new.name, file)
            return found

        module.define_import_structure = kept

    return change


def _embed_inputs(model, inputs, *, pixel_values):
    """Stands in for mlx_lm.models.muse_spark's: the patch tokens' rows, from the images in order."""
    import mlx.core as mx

    table = model.model.embed_tokens
    patch = table.weight.shape[0] - 2
    pixels = [p.reshape(3, p.shape[1] // 2, 2, p.shape[2] // 2, 2) for p in pixel_values]
    means = mx.concatenate([p.mean(axis=(0, 2, 4)).flatten() for p in pixels])
    found = mx.cumsum(inputs == patch) - 1
    assert found[-1].item() + 1 == len(means), (
        "patch tokens without pixels, or pixels without tokens"
    )
    picked = mx.floor((means + 1) * 150).astype(inputs.dtype)
    return table(mx.where(inputs == patch, picked[mx.maximum(found, 0)], inputs))


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, change):
        self.inner = inner
        self.change = change

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        self.change(module)

    def __getattr__(self, name):  # what the inner loader also offers, such as get_source
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader that the other finders give for some modules."""

    def __init__(self, changes):
        self.changes = changes

    def find_spec(self, name, path=None, target=None):
        if name not in self.changes:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.changes[name])
                return spec
        return None


def _slow_writes(folder, seconds):
    prefix = os.path.realpath(folder) + os.sep

    def hook(event, args):
        if event == "os.rename" and os.path.abspath(os.fsdecode(args[1])).startswith(prefix):
            time.sleep(seconds)

    sys.addaudithook(hook)


def _main():
    changes = {}
    path = os.environ.get("HARNESS_TRACE")
    if path:
        changes["mlx_lm.utils"] = _Watch(path).watch_loading
    path = os.environ.get("HARNESS_ANSWERS")
    if path:
        changes["mlx_lm.generate"] = _tell_answers(path)
    tokens = os.environ.get("HARNESS_PREFILL_STEP")
    if tokens:
        changes["omlx.scheduler"] = _set_prefill_step(int(tokens))
    folder = os.environ.get("HARNESS_INDEX")
    if folder:
        changes["transformers.utils.import_utils"] = _keep_index(folder)
    if changes:
        sys.meta_path.insert(0, _Finder(changes))
    seconds = os.environ.get("HARNESS_SLOW_WRITES")
    if seconds:
        _slow_writes(os.environ["THUNDER_CACHE_DIR"], float(seconds))


_main()
