"""Loaded by the servers of `tests.bench.long_prompts` only: writes down what memory MLX takes.

Twenty times a second ``PEAKS_FILE`` gets {"active": bytes, "peak": bytes, "prefill": bytes, "resident":
bytes}: what MLX holds, the most that it has held, the most before the last chunk of a prompt (the package
resets MLX's own count before every chunk; 0 without it), and the most that the process has had in RAM.
A file of that name with ".reset" begins anew.
"""

import contextlib
import json
import os
import sys
import threading
import time


def _watch(path):
    while (mx := sys.modules.get("mlx.core")) is None or not hasattr(mx, "reset_peak_memory"):
        time.sleep(0.01)
    reset, before = mx.reset_peak_memory, [0]

    def noted_reset():
        before[0] = max(before[0], mx.get_peak_memory())
        reset()

    mx.reset_peak_memory = noted_reset
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".reset")
            before[0] = 0
            reset()
        peak = max(before[0], mx.get_peak_memory())
        found = {"active": mx.get_active_memory(), "peak": peak, "prefill": before[0]}
        found["resident"] = _most_resident()
        with open(path + ".new", "w") as file:
            json.dump(found, file)
        os.replace(path + ".new", path)
        time.sleep(0.05)


def _most_resident():
    """Bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/status") as file:
            lines = [line for line in file if line.startswith("VmHWM:")]
    except OSError:
        return 0
    return int(lines[0].split()[1]) * 1024 if lines else 0


if "PEAKS_FILE" in os.environ:
    threading.Thread(target=_watch, args=(os.environ["PEAKS_FILE"],), daemon=True).start()
