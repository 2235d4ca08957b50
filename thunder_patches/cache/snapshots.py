"""Where along a prompt a snapshot of the layers that can't be cut is due."""

from __future__ import annotations

from collections.abc import Iterable


def points(
    start: int, end: int, stride_blocks: int, block_tokens: int, boundaries: Iterable[int] = ()
) -> list[int]:
    """Sorted positions in (start, end] at which a snapshot is due.

    These are the multiples of `stride_blocks` blocks (none when it is 0), the message `boundaries`
    and `end`, the prompt's end. Positions are counts of tokens from the prompt's beginning.
    """
    if block_tokens < 1 or stride_blocks < 0:
        raise ValueError(
            f"expected block_tokens >= 1 and stride_blocks >= 0, found {block_tokens}, "
            f"{stride_blocks}"
        )
    if end <= start:
        return []
    due = {end, *(b for b in boundaries if start < b < end)}
    if step := stride_blocks * block_tokens:
        due.update(range(start // step * step + step, end, step))
    return sorted(due)
