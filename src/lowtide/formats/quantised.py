"""q8 and q4: groups of 64 adjacent inputs, each with a scale and a zero.

  weight = scale * code + zero            code: 0 .. 2^bits - 1; scale, zero: float16

Computed in float32, where the product is exact, so fusing it with the sum makes no difference. A
row is its codes, then its groups' scales, then their zeros. In 4 bits a byte holds elements k (low
nibble) and k + 32 of its group, so that adjacent elements need no shuffling; in 8 bits codes are in
order. Codes are unsigned: in a product with x the zeros contribute `zero * sum(x)`. A row's last
group may be shorter; its other codes are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes, MatrixFormat, StoredMatrix
from lowtide.formats.quantised_matrix import GROUP, QuantisedMatrix

if TYPE_CHECKING:
    from torch import Tensor

SHRINKS = (1.0, 0.92, 0.84, 0.76)
"""Shares of a group's range at which the search for its scale starts; 8 bits use the first."""

NUM_FITS = 3
"""Rounds of refitting scale and zero to the codes, starting from the best."""

_LARGEST = np.float32(65504)  # of float16

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class Quantised(MatrixFormat):
    """Format of any matrix; a row is one block once its length is known (`for_rows`)."""

    unpacked = "F32"
    is_kept = True
    in_safetensors = False

    def __init__(self, num_bits: int) -> None:
        """num_bits: 8 or 4."""
        self.num_bits = num_bits
        self.name = f"q{num_bits}"
        self.dtypes = (self.name,)
        self.block_size, self.block_bytes = GROUP, (row_bytes(GROUP, num_bits),)

    def for_rows(self, num_columns: int) -> QuantisedRows:
        return _rows_of(self.num_bits, num_columns)

    def unpack(self, *stored: Bytes) -> Bytes:
        return self.for_rows(GROUP).unpack(*stored)

    def has_tensor(self, name: str, dtype: str) -> bool:
        return dtype == self.name


class QuantisedRows(Quantised):
    """Format of matrices with rows of one length."""

    def __init__(self, num_bits: int, num_columns: int) -> None:
        super().__init__(num_bits)
        self.num_columns = num_columns
        self.num_groups = -(-num_columns // GROUP)
        self.block_size, self.block_bytes = num_columns, (row_bytes(num_columns, num_bits),)

    def unpack(self, *stored: Bytes) -> Bytes:
        """Unpack whole rows to float32 weights."""
        rows = stored[0].reshape(-1, self.block_bytes[0])
        codes, scales, zeros = self._parts(rows)
        weights = codes.astype(np.float32) * scales[:, :, None] + zeros[:, :, None]
        weights = weights.reshape(len(rows), -1)[:, : self.num_columns]
        return np.ascontiguousarray(weights).reshape(-1).view(np.uint8)

    def pack(self, weights: Floats, target: Bytes, importance: Floats | None = None) -> None:
        """Round to the nearest codes under the scales and zeros with the least squared error found.

        weights: whole rows, 1-D.
        importance: [num_columns] weight of each input's squared error; by default all are equal.

        Compiled twin, with the same bytes: `kernels/cpu/packing.py`.
        """
        rows = weights.reshape(-1, self.num_columns)
        missing = self.num_groups * GROUP - self.num_columns
        if missing:  # repeat the last weight, which extends no range
            rows = np.pad(rows, ((0, 0), (0, missing)), mode="edge")
        worth = None
        if importance is not None:
            worth = np.tile(np.pad(importance, (0, missing)).reshape(-1, GROUP), (len(rows), 1))
        codes, scale, zero = fitted(rows.reshape(-1, GROUP), self.num_bits, worth)
        out = target.reshape(-1, self.block_bytes[0])
        num_groups, code_bytes = self.num_groups, self._code_bytes
        if self.num_bits == 4:
            codes = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << np.uint8(4)
        out[:, :code_bytes] = codes.reshape(len(out), -1)
        ends = out[:, code_bytes:].reshape(len(out), 2, 2 * num_groups)
        for number, each in enumerate((scale, zero)):
            ends[:, number] = each.reshape(len(out), num_groups).view(np.uint8)
        out[:, code_bytes:] = ends.reshape(len(out), -1)

    def matrix(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> StoredMatrix:
        return QuantisedMatrix(tensors[0].view(shape[0], -1), self.num_bits, shape[1])

    def is_finite(self, stored: Bytes) -> bool:
        _, scales, zeros = self._parts(stored.reshape(-1, self.block_bytes[0]))
        return bool(np.isfinite(scales).all() and np.isfinite(zeros).all())

    @property
    def _code_bytes(self) -> int:
        return self.num_groups * GROUP * self.num_bits // 8

    def _parts(self, rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Floats, Floats]:
        """Split rows into codes [rows, groups, 64] and float32 scales and zeros [rows, groups]."""
        codes = rows[:, : self._code_bytes].reshape(len(rows), self.num_groups, -1)
        if self.num_bits == 4:
            codes = np.concatenate((codes & np.uint8(15), codes >> np.uint8(4)), axis=2)
        ends = np.ascontiguousarray(rows[:, self._code_bytes :]).view(np.float16)
        scales, zeros = (part.astype(np.float32) for part in np.split(ends, 2, axis=1))
        return codes, scales, zeros


def row_bytes(num_columns: int, num_bits: int) -> int:
    """Return the number of bytes of a row: codes of whole groups, and four bytes per group."""
    return -(-num_columns // GROUP) * (GROUP * num_bits // 8 + 4)


def fitted(
    groups: Floats, num_bits: int, importance: Floats | None = None
) -> tuple[NDArray[np.uint8], Halves, Halves]:
    """Choose codes [n, 64] and float16 scale and zero [n] for groups [n, 64].

    Starts from the best of several shrunken ranges, then alternates: scale and zero by least
    squares, codes nearest to the weights. Keeps the best result, the earliest of equals. importance
    [n, 64]: weight of each squared error, 1 by default. Sums run from the first weight to the last,
    so that every implementation has the same bits. A group that is not finite gets scale and zero
    NaN and codes 0.
    """
    w = np.ascontiguousarray(groups.T)  # [64, n]: each row of the array spans all groups
    worth = np.ones_like(w) if importance is None else np.ascontiguousarray(importance.T)
    with np.errstate(all="ignore"):
        is_finite = _sum(w - w) == 0
        w = np.where(is_finite, w, np.float32(0))
        best = _search(w, worth, num_bits)
        codes = _codes(w, best.scale, best.zero, num_bits)
    scale, zero = (
        np.where(is_finite, each, np.nan).astype(np.float16) for each in (best.scale, best.zero)
    )
    return np.ascontiguousarray(codes.astype(np.uint8).T), scale, zero


class _Candidate(NamedTuple):
    """Candidate scales and zeros with their error, all [n] float32.

    sum_c, sum_cc, sum_cw: sums of the codes, their squares and their products with the weights,
    each weighted by importance.
    """

    error: Floats
    scale: Floats  # numbers of float16
    zero: Floats
    sum_c: Floats
    sum_cc: Floats
    sum_cw: Floats

    def or_better(self, other: _Candidate) -> _Candidate:
        is_better = other.error < self.error
        return _Candidate(*(np.where(is_better, *pair) for pair in zip(other, self, strict=True)))


def _search(w: Floats, worth: Floats, num_bits: int) -> _Candidate:
    low, high = w.min(0), w.max(0)
    middle = (low + high) * np.float32(0.5) + np.float32(0)  # never -0
    span, levels = high - low, np.float32(2**num_bits - 1)
    nothing = np.zeros_like(span)
    best = _Candidate(np.full_like(span, np.inf), *5 * (nothing,))
    for shrink in SHRINKS if num_bits == 4 else SHRINKS[:1]:
        width = span * np.float32(shrink)
        start = _evaluate(w, worth, width / levels, middle - width * np.float32(0.5), num_bits)
        best = best.or_better(start)
    last, sum_w, sum_one = best, _sum(worth * w), _sum(worth)
    for _ in range(NUM_FITS):
        spread = sum_one * last.sum_cc - last.sum_c * last.sum_c
        quotient = (sum_one * last.sum_cw - last.sum_c * sum_w) / spread
        scale: Floats = np.where(spread > 0, quotient, np.float32(0))
        zero = ((sum_w - scale * last.sum_c) / sum_one).astype(np.float32)
        last = _evaluate(w, worth, scale, zero, num_bits)
        best = best.or_better(last)
    return best


def _evaluate(w: Floats, worth: Floats, scale: Floats, zero: Floats, num_bits: int) -> _Candidate:
    step, base = (
        np.clip(each, -_LARGEST, _LARGEST).astype(np.float16).astype(np.float32)
        for each in (scale, zero)
    )
    codes = _codes(w, step, base, num_bits)
    residual, times = w - (codes * step + base), worth * codes
    error = _sum(worth * (residual * residual))
    return _Candidate(error, step, base, _sum(times), _sum(times * codes), _sum(times * w))


def _codes(w: Floats, step: Floats, base: Floats, num_bits: int) -> Floats:
    """Return the nearest codes of weights [64, n], as floats."""
    inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
    nearest = np.rint((w - base) * inverse)
    codes: Floats = np.minimum(np.maximum(nearest, 0), np.float32(2**num_bits - 1))
    return codes


def _sum(terms: Floats) -> Floats:
    """Sum terms [64, n] over the first axis, one after the other."""
    total = np.zeros(terms.shape[1], np.float32)
    for each in terms:
        total += each
    return total


@functools.cache
def _rows_of(num_bits: int, num_columns: int) -> QuantisedRows:
    """Return the only instance for a length, so that formats can be compared by identity."""
    return QuantisedRows(num_bits, num_columns)


FORMATS = (Quantised(4), Quantised(8))
