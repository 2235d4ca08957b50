"""Small whole numbers to few bytes: rows of like statistics together, several numbers a byte, zstd.

A Huffman code spends at least one bit a symbol, and most rows here need far less. So numbers of a
small alphabet are packed first, four of {-1, 0, 1} or two of up to {-7 ... 7} in a byte, and where
nearly all are zero only the gaps between the others are kept. What zstd codes are those bytes, with
a table of its own for each class of rows. The few numbers that are too large for their row's
alphabet are in a list of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import CodecError, Coded
from .planes import join_parts, split_parts


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Numbers -reach ... reach, `each` of them in a byte; `each` is 0 for gaps between +-1."""

    reach: int
    each: int

    @property
    def base(self) -> int:
        return 2 * self.reach + 1


ALPHABETS = (Alphabet(1, 0), Alphabet(1, 4), Alphabet(2, 2), Alphabet(7, 2), Alphabet(127, 1))
MEANS = (0.01, 0.03, 0.07, 0.14, 0.23, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 9.0)
"""Mean absolute values that part the classes of rows."""
WIDEST = max(a.each for a in ALPHABETS)
SPARSE = 3  # rows of the first so many means are kept as gaps
SPARE = 128  # a row may have one number too large for its alphabet among so many
CLASSES = len(ALPHABETS) * (len(MEANS) + 1)  # class 0 is the all-zero row
LARGEST = (1 << 15) - 1
SKIP = 127  # the longest gap a byte can hold; byte 254 skips so many zeros


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A matrix of small whole numbers, still several to a byte: a GPU may take them apart.

    Args:
        length: of the rows.
        classes: of each row; 0 for those of zeros.
        order: the other rows, in the order of `packed`.
        packed: for each alphabet from the second the bytes of its rows, each
            ``[rows, ceil(length / each)]``; what was kept as gaps is in the second here.
        large: rows, columns and values of the numbers that don't fit their row's alphabet.
    """

    length: int
    classes: np.ndarray
    order: np.ndarray
    packed: tuple[np.ndarray, ...]
    large: tuple[np.ndarray, np.ndarray, np.ndarray]

    def put(self, out: np.ndarray) -> None:
        """Write all numbers to ``[rows, length]`` of zeros."""
        small = np.empty((len(self.order), -(-self.length // WIDEST) * WIDEST), np.int8)
        end = 0
        for alphabet, data in zip(ALPHABETS[1:], self.packed, strict=True):
            start, end = end, end + len(data)
            if alphabet.each == 1:
                small[start:end, : self.length] = data.view(np.int8)
            else:  # a mode other than "raise" writes to `out` without a copy in between
                items = small[start:end].view(f"<u{alphabet.each}")[:, : data.shape[1]]
                np.take(TABLES[alphabet], data, out=items, mode="clip")
        out[self.order] = small[:, : self.length]
        row, column, value = self.large
        out[row, column] = value

    def whole(self) -> np.ndarray:
        """All numbers, int16."""
        out = np.zeros((len(self.classes), self.length), np.int16)
        self.put(out)
        return out


def pack(numbers: np.ndarray) -> tuple[list[list[Any]], bytes]:
    """Pack int16 ``[rows, length]``, at most 65,535 either way.

    Returns:
        [bytes before zstd for each part that varies], then as `planes.join_parts`: the rows'
        classes; row, column and value of the large numbers; one part for each class with rows.
    """
    size = np.abs(numbers)
    classes = _classify(size)
    reach = np.array([0, *(a.reach for a in ALPHABETS for _ in range(len(MEANS) + 1))])
    at_row, at_column = np.nonzero(size > reach[classes][:, None])
    large = numbers[at_row, at_column]
    if len(large):
        numbers = numbers.copy()
        numbers[at_row, at_column] = 0
    parts = [classes, at_row.astype("<u2"), at_column.astype("<u2"), large.astype("<i2")]
    lengths = [len(large)]
    for i in np.unique(classes[classes > 0]):
        alphabet, rows = ALPHABETS[_alphabet(int(i))], numbers[classes == i]
        if alphabet.each:
            parts.append(_squeeze(rows, alphabet))
        else:
            parts.append(_gaps(rows))
            lengths.append(len(parts[-1]))
    entries, payload = join_parts(parts)
    return [lengths, *entries], payload


def unpack(parts: Any, payload: bytes | memoryview, rows: int, length: int) -> Unpacked:
    """The numbers ``[rows, length]`` that `pack` was given.

    Raises:
        CodecError: when this isn't what `pack` made of such a matrix.
    """
    if not (isinstance(parts, list) and len(parts) >= 5 and _sizes(parts[0], rows * length)):
        raise CodecError(f"expected the parts of packed numbers, found {str(parts)[:80]}")
    (count, *gaps), entries = parts[0], parts[1:]
    classes, stored = _classes(entries[0], payload, rows)
    members = np.bincount(classes, minlength=CLASSES + 1).tolist()
    used = [i for i in range(1, CLASSES + 1) if members[i]]
    left, sizes = iter(gaps), []
    for i in used:
        each = ALPHABETS[_alphabet(i)].each
        sizes.append(members[i] * -(-length // each) if each else next(left, 0))
    at_row, at_column, large, *packed = split_parts(
        Coded("", memoryview(payload)[stored:], {"parts": entries[1:]}), [*[2 * count] * 3, *sizes]
    )
    pieces = [[np.empty(0, np.uint8)] for _ in ALPHABETS]
    heights = [0] * len(ALPHABETS)
    for i, data in zip(used, packed, strict=True):
        alphabet = _alphabet(i)
        if not alphabet:
            alphabet, data = 1, _fill(data, members[i], length)
        pieces[alphabet].append(data)
        heights[alphabet] += members[i]
    row, column, value = at_row.view("<u2"), at_column.view("<u2"), large.view("<i2")
    if count and (row.max() >= rows or column.max() >= length):
        raise CodecError("a large number lies outside the matrix")
    together = tuple(
        np.concatenate(pieces[i]).reshape(heights[i], -(-length // a.each))
        for i, a in enumerate(ALPHABETS[1:], 1)
    )
    order = np.argsort(classes, kind="stable")[members[0] :]
    return Unpacked(length, classes, order, together, (row, column, value))


def _classify(size: np.ndarray) -> np.ndarray:
    """The class of each row of absolute values, uint8."""
    rows, length = size.shape
    allowed = length // SPARE
    alphabet = np.full(rows, len(ALPHABETS) - 1)
    for i in reversed(range(1, len(ALPHABETS) - 1)):
        alphabet[np.count_nonzero(size > ALPHABETS[i].reach, axis=1) <= allowed] = i
    total = size.sum(axis=1, dtype=np.int64)
    mean = np.searchsorted(MEANS, total / max(1, length), side="right")
    alphabet[(alphabet == 1) & (mean < SPARSE)] = 0
    return np.where(total == 0, 0, 1 + alphabet * (len(MEANS) + 1) + mean).astype(np.uint8)


def _classes(entry: Any, payload: bytes | memoryview, rows: int) -> tuple[np.ndarray, int]:
    """The rows' classes, and how many bytes of the payload they are."""
    match entry:
        case [str(), int(stored)] if stored >= 0:
            head = Coded("", memoryview(payload)[:stored], {"parts": [entry]})
            classes = split_parts(head, [rows])[0]
            if classes.max(initial=0) <= CLASSES:
                return classes, stored
    raise CodecError(f"expected the classes of {rows} rows, found {str(entry)[:80]}")


def _sizes(value: Any, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) >= 1
        and all(type(size) is int and 0 <= size <= most for size in value)
    )


def _alphabet(row_class: int) -> int:
    """Which of ALPHABETS."""
    return (row_class - 1) // (len(MEANS) + 1)


def _squeeze(numbers: np.ndarray, alphabet: Alphabet) -> np.ndarray:
    """``[rows, length]`` within the alphabet to bytes ``[rows, ceil(length / each)]``."""
    if alphabet.each == 1:
        return numbers.astype(np.int8).view(np.uint8)
    rows, length = numbers.shape
    padded = np.full((rows, -(-length // alphabet.each), alphabet.each), alphabet.reach, np.uint8)
    padded.reshape(rows, -1)[:, :length] = numbers + alphabet.reach
    out = padded[..., 0].copy()
    for i in range(1, alphabet.each):
        out *= alphabet.base
        out += padded[..., i]
    return out


def _table(alphabet: Alphabet) -> np.ndarray:
    """For each byte the numbers in it, as one item of `each` bytes."""
    digits = np.zeros((256, alphabet.each), np.int8)
    left = np.arange(256)
    for i in reversed(range(alphabet.each)):
        left, digits[:, i] = left // alphabet.base, left % alphabet.base - alphabet.reach
    return digits.view(f"<u{alphabet.each}")[:, 0]


TABLES = {a: _table(a) for a in ALPHABETS if a.each > 1}


def _gaps(numbers: np.ndarray) -> np.ndarray:
    """Numbers -1, 0, 1 as bytes: twice the zeros before a number, plus one if it is negative."""
    flat = numbers.reshape(-1)
    at = np.flatnonzero(flat)
    zeros = np.diff(at, prepend=-1) - 1
    skips, rest = np.divmod(zeros, SKIP)
    codes = (2 * rest + (flat[at] < 0)).astype(np.uint8)
    ends = np.cumsum(skips + 1) - 1
    out = np.full(len(at) + int(skips.sum()), 2 * SKIP, np.uint8)
    out[ends] = codes
    return out


def _fill(data: np.ndarray, rows: int, length: int) -> np.ndarray:
    """The bytes that `_squeeze` makes with the second alphabet of what `_gaps` was given."""
    codes, width = data.astype(np.int64), -(-length // 4)
    at = np.cumsum(np.take(_STEPS, codes)) - 1
    if len(at) and at[-1] >= rows * length:
        raise CodecError("a gap leads outside the matrix")
    if width * 4 > length:
        at += at // length * (width * 4 - length)
    out = np.full(rows * width, 27 + 9 + 3 + 1, np.uint8)  # zeros
    np.add.at(out, at >> 2, np.take(_DIGITS, 4 * codes + (at & 3)))
    return out


_CODES = np.arange(256)
_STEPS = np.where(_CODES < 2 * SKIP, _CODES // 2 + 1, SKIP)  # from one number to the next
_SIGNS = np.where(_CODES < 2 * SKIP, 1 - _CODES % 2 * 2, 0)  # a skip ends on a zero
_DIGITS = np.outer(_SIGNS, [27, 9, 3, 1]).astype(np.uint8)
