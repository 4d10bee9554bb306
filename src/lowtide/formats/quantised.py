"""Weights in 8 or 4 bits: groups of 64 along the input, each with a scale and a zero of its own.

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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes, MatrixFormat, StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 64
"""Weights that share a scale and a zero."""

SHRINKS = (1.0, 0.92, 0.84, 0.76)
"""Of a group's range: where the search for its scale begins. Of 8 bits only the first."""

NUM_FITS = 2
"""Times that scale and zero are fitted to the codes, and the codes chosen anew, from each."""

_LARGEST = np.float32(65504)  # of float16

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class Quantised(MatrixFormat):
    """Of any matrix; a row is a block of it once its length is known (`for_rows`)."""

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
        return _of_rows(self, num_columns)

    def unpack(self, *stored: Bytes) -> Bytes:
        return self.for_rows(GROUP).unpack(*stored)

    def has_tensor(self, name: str, dtype: str) -> bool:
        return dtype == self.name

    def is_finite(self, stored: Bytes) -> bool:
        return True  # of groups in no known rows nothing can be told


class QuantisedRows(Quantised):
    """Of matrices with rows of one length."""

    def __init__(self, num_bits: int, num_columns: int) -> None:
        super().__init__(num_bits)
        self.num_columns = num_columns
        self.num_groups = -(-num_columns // GROUP)
        self.block_size, self.block_bytes = num_columns, (row_bytes(num_columns, num_bits),)

    def for_rows(self, num_columns: int) -> QuantisedRows:
        return self if num_columns == self.num_columns else _of_rows(self, num_columns)

    def unpack(self, *stored: Bytes) -> Bytes:
        """Float32 weights of whole rows."""
        rows = stored[0].reshape(-1, self.block_bytes[0])
        codes, scales, zeros = self._parts(rows)
        weights = codes.astype(np.float32) * scales[:, :, None] + zeros[:, :, None]
        weights = weights.reshape(len(rows), -1)[:, : self.num_columns]
        return np.ascontiguousarray(weights).reshape(-1).view(np.uint8)

    def pack(self, weights: Floats, target: Bytes) -> None:
        """Rounds to the nearest codes under the scales and zeros of least squared error found.

        weights: of whole rows, 1-D. Compiled twin: `kernels/cpu/quantised.py`, the same bytes.
        """
        rows = weights.reshape(-1, self.num_columns)
        missing = self.num_groups * GROUP - self.num_columns
        if missing:  # the last weight again, which takes no code of its own
            rows = np.pad(rows, ((0, 0), (0, missing)), mode="edge")
        codes, scale, zero = fitted(rows.reshape(-1, GROUP), self.num_bits)
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
        from lowtide.formats.quantised_matrix import QuantisedMatrix

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
    """Of a row: codes of whole groups, and four bytes for each."""
    return -(-num_columns // GROUP) * (GROUP * num_bits // 8 + 4)


def fitted(groups: Floats, num_bits: int) -> tuple[NDArray[np.uint8], Halves, Halves]:
    """Codes [n, 64] and the float16 scale and zero [n] of each of groups [n, 64].

    From shrunken ranges on, codes are the nearest to the weights and then scale and zero those of
    least squares to the codes; the best that was met is kept, the earliest of equals. Sums add
    halves to each other, so every implementation has the same bits.
    """
    low, high = groups.min(1), groups.max(1)
    low[~(np.isfinite(low) & np.isfinite(high))] = np.nan  # and so is all that follows from it
    levels = np.float32(2**num_bits - 1)
    middle, span = (low + high) * np.float32(0.5), high - low
    found = _Best(groups, levels)
    for shrink in SHRINKS if num_bits == 4 else SHRINKS[:1]:
        width = span * np.float32(shrink)
        scale, zero = width / levels, middle - width * np.float32(0.5)
        codes = found.offer(scale, zero)
        for _ in range(NUM_FITS):
            codes = found.offer(*_least_squares(groups, codes))
    return found.codes.astype(np.uint8), found.scale, found.zero


class _Best:
    """What rounds each group with the least squared error so far."""

    def __init__(self, groups: Floats, levels: np.float32) -> None:
        self._groups, self._levels = groups, levels
        self._error = np.full(len(groups), np.inf, np.float32)
        self.codes: Floats = np.zeros(groups.shape, np.float32)
        self.scale = np.zeros(len(groups), np.float16)
        self.zero = np.zeros(len(groups), np.float16)

    def offer(self, scale: Floats, zero: Floats) -> Floats:
        """The codes [n, 64] nearest to the weights with these, rounded to float16."""
        scale16, zero16 = _half(scale), _half(zero)
        step, base = scale16.astype(np.float32)[:, None], zero16.astype(np.float32)[:, None]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
            nearest = np.rint((self._groups - base) * inverse)
            codes: Floats = np.minimum(np.maximum(nearest, 0), self._levels)
            residual = self._groups - (codes * step + base)
            error = _sum(residual * residual)
        # A group that is not finite keeps the first offer, whose scale or zero is not either.
        is_better = (error < self._error) | (np.isnan(error) & np.isinf(self._error))
        self._error = np.where(is_better, error, self._error)
        self.codes[is_better] = np.nan_to_num(codes[is_better], nan=0.0)
        self.scale[is_better], self.zero[is_better] = scale16[is_better], zero16[is_better]
        return codes


def _half(values: Floats) -> Halves:
    return np.clip(values, -_LARGEST, _LARGEST).astype(np.float16)


def _least_squares(groups: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """Scale and zero [n] for which `scale * codes + zero` is nearest to the weights."""
    count = np.float32(GROUP)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        sum_c, sum_w = _sum(codes), _sum(groups)
        sum_cc, sum_cw = _sum(codes * codes), _sum(codes * groups)
        spread = count * sum_cc - sum_c * sum_c
        scale = (count * sum_cw - sum_c * sum_w) / spread
        scale[~(spread > 0)] = 0
        zero = (sum_w - scale * sum_c) / count
        return scale.astype(np.float32), zero.astype(np.float32)


def _sum(groups: Floats) -> Floats:
    """Of each row of [n, 64]."""
    while groups.shape[1] > 1:
        half = groups.shape[1] // 2
        groups = groups[:, :half] + groups[:, half:]
    return groups[:, 0]


@functools.cache
def _of_bits(num_bits: int, num_columns: int) -> QuantisedRows:
    return QuantisedRows(num_bits, num_columns)


def _of_rows(of: Quantised, num_columns: int) -> QuantisedRows:
    """One for each length, so that formats may be compared by identity."""
    return _of_bits(of.num_bits, num_columns)
