"""A process that has imported what a server spends most of its start on, and forks servers.

`python -S parent.py SOCKET PATHS MODULES`, the last two as JSON. It imports libraries only: no MLX, no
host, no start file, no plugin. A fork then does what an interpreter does: it reads its environment,
runs its `site`, with all start files, and runs its module as `__main__`. Each order comes on a
connection of its own, a line of JSON; the replies there are the fork's process id and, once it has
ended, its exit status. Ends with its standard input, and takes the forks that are left with it. See forked.py
for who orders.
"""

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import site
import socket
import sys
import types


def load(names):
    """Imports modules, or names in lazy ones; what this environment doesn't have is left out."""
    for name in names:
        with contextlib.suppress(Exception):
            module, _, attribute = name.partition(":")
            found = importlib.import_module(module)
            if attribute:
                getattr(found, attribute)


def serve(path):
    """Carries out orders; returns one in the process that has been forked for it."""
    os.close(os.pidfd_open(os.getpid()))  # without it, this fails before anybody relies on it
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    os.write(1, b"ready\n")
    running = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    for pid, _ in running.values():
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                    sys.exit()
                elif key.fileobj is listener:
                    connection = listener.accept()[0]
                    with connection.makefile() as lines:
                        order = json.loads(lines.readline())
                    pid = os.fork()
                    if pid == 0:
                        # Python must not close these numbers later, when they name other files.
                        for each in (listener, connection, *(c for _, c in running.values())):
                            each.close()
                        return order
                    running[watch := os.pidfd_open(pid)] = pid, connection
                    selector.register(watch, selectors.EVENT_READ)
                    connection.sendall(f"{pid}\n".encode())
                else:
                    pid, connection = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(f"{status}\n".encode())


def become(order, paths):
    """Makes this process what `python -m MODULE ...` would be, before its module runs."""
    os.closerange(3, 1024)
    os.setsid()
    os.chdir(order["folder"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    os.closerange(3, 1024)
    # Where CI itself runs in the background, interrupts are ignored from its start on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.orig_argv = order["command"]
    sys.argv = ["-m", *order["command"][3:]]
    extra = os.environ.get("PYTHONPATH")
    sys.path[:] = [*(extra.split(os.pathsep) if extra else ()), *paths]
    sys.modules["__main__"] = types.ModuleType("__main__")
    site.main()
    sys.path.insert(0, os.getcwd())


_own = sys.path[1:]
sys.path[:] = json.loads(sys.argv[2])
load(json.loads(sys.argv[3]))
_order = serve(sys.argv[1])
become(_order, _own)
runpy._run_module_as_main(_order["command"][2])
