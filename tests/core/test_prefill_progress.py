"""Signs of life: on time, from a thread, and gone when the client is."""

from __future__ import annotations

import json
import threading

from thunder_patches.prefill.progress import Progress, Ticker, chunk, comment


def test_progress_counts_what_was_restored_and_what_was_computed() -> None:
    progress = Progress(1000, skipped=400, done=400)
    assert progress.as_dict()["seconds_left"] is None
    progress.saw(300)
    told = progress.as_dict()
    assert (told["tokens_done"], told["tokens_skipped"], told["tokens_total"]) == (700, 400, 1000)
    assert told["seconds_left"] >= 0
    progress.saw(10_000)
    assert progress.as_dict()["tokens_done"] == 1000


def test_the_two_forms() -> None:
    progress = Progress(10, done=3)
    assert comment(progress) == b": keepalive 3/10\n\n"
    data = chunk(progress, {"id": "x", "object": "chat.completion.chunk"})
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    event = json.loads(data[6:])
    assert event["choices"] == [] and event["thunder"]["progress"]["tokens_done"] == 3


def test_a_ticker_signs_until_stopped() -> None:
    signs, third = [], threading.Event()

    def sign() -> None:
        signs.append(1)
        if len(signs) == 3:
            third.set()

    ticker = Ticker(sign, lambda: None, interval=0.01)
    ticker.start()
    assert third.wait(10)
    ticker.stop()
    count = len(signs)
    assert not third.wait(0) or count >= 3
    assert len(signs) == count


def test_a_client_that_has_gone_is_told_once() -> None:
    gone = threading.Event()

    def sign() -> None:
        raise BrokenPipeError

    ticker = Ticker(sign, gone.set, interval=0.01)
    ticker.start()
    assert gone.wait(10)
    ticker.stop()
