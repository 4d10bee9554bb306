"""Products of rows rounded to int8 with weights of few bits: see `activations`.

A row is rounded in groups, of 64 numbers for q8 and q4, of 32 for GGUF's packed types:

    step = largest / 127        code = x * (127 / largest), to the nearest, ties to even

largest: of the group's absolute values. If 127 / largest overflows float32 the group is zero; if
largest is not finite, neither is the result. With weight = scale * code + zero then

    out[row, o] = sum over groups of step * (scale * dot + zero * sum) + bias[o]

dot: of the codes of row and weights; sum: of the row's codes. Both are integers that float32 holds
exactly, so the order of their computation does not matter. Groups are those of the weights, two of
which may share a group of the row; zero is minus the offset of a packed type, or absent. All else
is float32, rounded after every operation; group g goes to partial sum g % 16, ascending, and halves
of the 16 are added to each other. So a row's bits depend only on the row and the matrix, and all
implementations agree, for any number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.formats.ggml import ROW_GROUP, PackedMatrix
from lowtide.formats.quantised_matrix import GROUP, Groups, QuantisedMatrix
from lowtide.kernels.stored import tile_rows
from lowtide.memory.chunking import MAX_REMAINDER, tiles

LARGEST_CODE = 127
NUM_SUMS = 16
"""Partial sums of an output. The compiled twins are in `kernels/cpu/rounded/`."""

GroupedMatrix = QuantisedMatrix | PackedMatrix
"""Matrices that int8 rows are multiplied with."""

_MOST_CHUNK_ROWS = GROUP


class RoundedRows(NamedTuple):
    """Rows in codes of groups."""

    codes: Tensor  # [rows, groups, numbers of a group] float32, integers
    steps: Tensor  # [rows, groups] float32
    sums: Tensor  # [rows, groups] float32, integers

    def divided(self, group_size: int) -> RoundedRows:
        """Split the groups into groups of `group_size` numbers, which must divide theirs."""
        codes = self.codes.view(len(self.codes), -1, group_size)
        steps = self.steps.repeat_interleave(codes.shape[1] // self.steps.shape[1], 1)
        return RoundedRows(codes, steps, codes.sum(2))


def format_name(matrix: GroupedMatrix) -> str:
    """Return the name of a matrix's format."""
    return f"q{matrix.num_bits}" if isinstance(matrix, QuantisedMatrix) else matrix.format.name


def multiply(x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor) -> None:
    """Compute `out = x @ matrix.t() + bias` for x [n, in] and out [n, out] of any floating type."""
    of_row = GROUP if isinstance(matrix, QuantisedMatrix) else ROW_GROUP
    for features in tiles(matrix.shape[0], tile_rows(matrix.shape[1])):
        groups = matrix.rows(features).groups()
        size = groups.codes.shape[2]  # the rows' groups are as long as the tile's
        for first in range(0, len(x), size):
            some = slice(first, first + size)
            rows = round_rows(x[some], of_row)
            found = _product(rows if size == of_row else rows.divided(size), groups)
            if bias is not None:
                found += bias[features]
            out[some, features] = found.to(out.dtype)


def round_rows(x: Tensor, group_size: int) -> RoundedRows:
    """Round x [n, in] in groups; a shorter last group is padded with zeros."""
    missing = -x.shape[1] % group_size
    num_groups = (x.shape[1] + missing) // group_size
    wide = torch.nn.functional.pad(x.float(), (0, missing)).view(len(x), num_groups, group_size)
    largest = wide.abs().amax(2)
    inverse = torch.full_like(largest, LARGEST_CODE).div_(largest)  # not times a reciprocal
    is_rounded = inverse.isfinite() & (inverse > 0)
    steps = torch.where(is_rounded, largest / LARGEST_CODE, 0.0)
    steps[largest.isnan() | largest.isinf()] = torch.nan
    codes = (wide * inverse[:, :, None]).round_()
    codes[~is_rounded] = 0
    return RoundedRows(codes, steps, codes.sum(2))


def product_bytes(shape: tuple[int, ...]) -> int:
    """Return the most scratch bytes that a thread needs to multiply with a matrix of this shape.

    It is a tile's codes, in bytes and in float32, and six times as many numbers of a chunk of rows.
    Compiled products need less: 256 rows in codes, two bytes per number, for two types, the same
    once more side by side, and sixteen rows of weights.
    """
    num_rows = min(shape[0], tile_rows(shape[1]) + MAX_REMAINDER)
    return max(num_rows, _MOST_CHUNK_ROWS) * shape[1] * 29


def _product(rows: RoundedRows, weights: Groups) -> Tensor:
    """Multiply rows with a tile of weights; returns [n, out] float32."""
    of_weights = weights.codes.permute(1, 2, 0).float()
    terms = torch.bmm(rows.codes.transpose(0, 1), of_weights)  # [groups, n, out], integers
    terms *= weights.scales.t()[:, None]
    terms += weights.zeros.t()[:, None] * rows.sums.t()[:, :, None]
    terms *= rows.steps.t()[:, :, None]
    sums = terms.new_zeros(NUM_SUMS, *terms.shape[1:])
    for first in range(0, len(terms), NUM_SUMS):
        some = terms[first : first + NUM_SUMS]
        sums[: len(some)] += some
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]
