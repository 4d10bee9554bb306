"""q8 and q4: groups of 64 weights along the input, each with a scale and a zero of its own.

    weight = scale * code + zero            code: 0 .. 2^bits - 1; scale, zero: float16

in float32, where the product is exact, so whether it is fused with the sum makes no difference. A
row of the matrix lies together: its codes, then its groups' scales, then their zeros. In 4 bits a
byte has elements k (low half) and k + 32 of its group, so that neighbours need no unpacking; in 8
bits codes are in order. Codes are unsigned: of a product with x the zeros take `zero * sum(x)`.
A row's last group may be shorter: its other codes mean nothing.
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
"""Shares of a group's range from which the search for its scale begins; with 8 bits the first."""

NUM_FITS = 3
"""Times that scale and zero are fitted to the codes, and the codes chosen again, from the best."""

_LARGEST = np.float32(65504)  # of float16

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class Quantised(MatrixFormat):
    """The format of any matrix; a row is one block once its length is known (`for_rows`)."""

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
    """The format of matrices with rows of one length."""

    def __init__(self, num_bits: int, num_columns: int) -> None:
        super().__init__(num_bits)
        self.num_columns = num_columns
        self.num_groups = -(-num_columns // GROUP)
        self.block_size, self.block_bytes = num_columns, (row_bytes(num_columns, num_bits),)

    def unpack(self, *stored: Bytes) -> Bytes:
        """Float32 weights of whole rows."""
        rows = stored[0].reshape(-1, self.block_bytes[0])
        codes, scales, zeros = self._parts(rows)
        weights = codes.astype(np.float32) * scales[:, :, None] + zeros[:, :, None]
        weights = weights.reshape(len(rows), -1)[:, : self.num_columns]
        return np.ascontiguousarray(weights).reshape(-1).view(np.uint8)

    def pack(self, weights: Floats, target: Bytes, importance: Floats | None = None) -> None:
        """Rounds to the nearest codes under the scales and zeros of least squared error found.

        weights: of whole rows, 1-D. importance [num_columns]: of each input's squared error; by
        default all are alike. Compiled twin: `kernels/cpu/packing.py`, the same bytes.
        """
        rows = weights.reshape(-1, self.num_columns)
        missing = self.num_groups * GROUP - self.num_columns
        if missing:  # the last weight again, which takes no code of its own
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
        """Codes [rows, groups, 64]; scales and zeros [rows, groups] float32."""
        codes = rows[:, : self._code_bytes].reshape(len(rows), self.num_groups, -1)
        if self.num_bits == 4:
            codes = np.concatenate((codes & np.uint8(15), codes >> np.uint8(4)), axis=2)
        ends = np.ascontiguousarray(rows[:, self._code_bytes :]).view(np.float16)
        scales, zeros = (part.astype(np.float32) for part in np.split(ends, 2, axis=1))
        return codes, scales, zeros


def row_bytes(num_columns: int, num_bits: int) -> int:
    """Bytes of a row: the codes of whole groups, and four bytes for each group."""
    return -(-num_columns // GROUP) * (GROUP * num_bits // 8 + 4)


def fitted(
    groups: Floats, num_bits: int, importance: Floats | None = None
) -> tuple[NDArray[np.uint8], Halves, Halves]:
    """Codes [n, 64] and the float16 scale and zero [n] of each of groups [n, 64].

    Of several shrunken ranges the best is taken, then scale and zero are, some times, those of
    least squares to the codes, and codes the nearest to the weights under them; the best that was
    met is kept, the earliest of equals. importance [n, 64]: what a squared error counts, 1 by
    default. Sums are from the first weight to the last, so every implementation has the same bits.
    A group that is not finite has scale and zero NaN and codes 0.
    """
    w = np.ascontiguousarray(groups.T)  # [64, n], so that what follows is of whole groups
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


class _Offer(NamedTuple):
    """What codes under scales and zeros are worth, and sums of the codes, of their squares and of
    their products with the weights, each by importance. All [n] float32.
    """

    error: Floats
    scale: Floats  # numbers of float16
    zero: Floats
    sum_c: Floats
    sum_cc: Floats
    sum_cw: Floats

    def or_better(self, other: _Offer) -> _Offer:
        is_better = other.error < self.error
        return _Offer(*(np.where(is_better, *pair) for pair in zip(other, self, strict=True)))


def _search(w: Floats, worth: Floats, num_bits: int) -> _Offer:
    low, high = w.min(0), w.max(0)
    middle = (low + high) * np.float32(0.5) + np.float32(0)  # never -0
    span, levels = high - low, np.float32(2**num_bits - 1)
    nothing = np.zeros_like(span)
    best = _Offer(np.full_like(span, np.inf), *5 * (nothing,))
    for shrink in SHRINKS if num_bits == 4 else SHRINKS[:1]:
        width = span * np.float32(shrink)
        start = _offer(w, worth, width / levels, middle - width * np.float32(0.5), num_bits)
        best = best.or_better(start)
    last, sum_w, sum_one = best, _sum(worth * w), _sum(worth)
    for _ in range(NUM_FITS):
        spread = sum_one * last.sum_cc - last.sum_c * last.sum_c
        quotient = (sum_one * last.sum_cw - last.sum_c * sum_w) / spread
        scale: Floats = np.where(spread > 0, quotient, np.float32(0))
        zero = ((sum_w - scale * last.sum_c) / sum_one).astype(np.float32)
        last = _offer(w, worth, scale, zero, num_bits)
        best = best.or_better(last)
    return best


def _offer(w: Floats, worth: Floats, scale: Floats, zero: Floats, num_bits: int) -> _Offer:
    step, base = (
        np.clip(each, -_LARGEST, _LARGEST).astype(np.float16).astype(np.float32)
        for each in (scale, zero)
    )
    codes = _codes(w, step, base, num_bits)
    residual, times = w - (codes * step + base), worth * codes
    error = _sum(worth * (residual * residual))
    return _Offer(error, step, base, _sum(times), _sum(times * codes), _sum(times * w))


def _codes(w: Floats, step: Floats, base: Floats, num_bits: int) -> Floats:
    """The nearest codes of weights [64, n], as floats."""
    inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
    nearest = np.rint((w - base) * inverse)
    codes: Floats = np.minimum(np.maximum(nearest, 0), np.float32(2**num_bits - 1))
    return codes


def _sum(terms: Floats) -> Floats:
    """The sum of terms [64, n] over the first axis, added one after the other."""
    total = np.zeros(terms.shape[1], np.float32)
    for each in terms:
        total += each
    return total


@functools.cache
def _rows_of(num_bits: int, num_columns: int) -> QuantisedRows:
    """One for each length, so that formats may be compared by identity."""
    return QuantisedRows(num_bits, num_columns)


FORMATS = (Quantised(4), Quantised(8))
