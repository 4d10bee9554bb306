"""Products of rows that are rounded to int8, with weights of few bits: see `activations`.

A row is rounded group by group, 64 numbers to a group for q8 and q4, 32 for GGUF's packed types:

    step = largest / 127        code = x * (127 / largest), to the nearest, ties to even

largest: of the group's absolute values; where 127 / largest is too large for float32 the group is
nothing, and where it is not finite neither is the answer. With weight = scale * code + zero then

    out[row, o] = sum over groups of step * (scale * dot + zero * sum) + bias[o]

dot: of the codes of row and weights; sum: of the row's codes. Both are integers that float32 holds,
so they are exact however they are found. Groups are the weights' own, of which two may have a
group of the row between them; zero is minus the offset of a packed type, or nothing. All else is
float32, rounded after every operation; group g goes to partial sum g % 16, ascending, and halves
of the 16 are added to each other. So a row's bits depend on the row and the matrix alone, and
every implementation has the same; it is done for any number of rows, be they few or a prompt's.
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
"""Partial sums of an output. Compiled twins of all this: `kernels/cpu/rounded/`."""

GroupedMatrix = QuantisedMatrix | PackedMatrix
"""The matrices that int8 rows are multiplied with."""

_MOST_CHUNK_ROWS = GROUP


class RoundedRows(NamedTuple):
    """Rows in codes of groups."""

    codes: Tensor  # [rows, groups, numbers of a group] float32, integers
    steps: Tensor  # [rows, groups] float32
    sums: Tensor  # [rows, groups] float32, integers

    def divided(self, group_size: int) -> RoundedRows:
        """In groups of so many numbers, a divisor."""
        codes = self.codes.view(len(self.codes), -1, group_size)
        steps = self.steps.repeat_interleave(codes.shape[1] // self.steps.shape[1], 1)
        return RoundedRows(codes, steps, codes.sum(2))


def format_name(matrix: GroupedMatrix) -> str:
    """The name of the format that a matrix is in."""
    return f"q{matrix.num_bits}" if isinstance(matrix, QuantisedMatrix) else matrix.format.name


def multiply(x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor) -> None:
    """`out = x @ matrix.t() + bias` for x [n, in] and out [n, out] of any floating type."""
    of_row = GROUP if isinstance(matrix, QuantisedMatrix) else ROW_GROUP
    for features in tiles(matrix.shape[0], tile_rows(matrix.shape[1])):
        groups = matrix.rows(features).groups()
        size = groups.codes.shape[2]  # of as many rows groups have as many numbers as the tile
        for first in range(0, len(x), size):
            some = slice(first, first + size)
            rows = round_rows(x[some], of_row)
            found = _product(rows if size == of_row else rows.divided(size), groups)
            if bias is not None:
                found += bias[features]
            out[some, features] = found.to(out.dtype)


def round_rows(x: Tensor, group_size: int) -> RoundedRows:
    """X [n, in] in groups of so many numbers; a last one that is shorter ends in zeros."""
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
    """What a thread takes at most to multiply with a matrix of this shape: a tile's codes, in bytes
    and in float32, and of a chunk of rows as many numbers six times.

    Compiled products take less: 256 rows in codes, two bytes for each of their numbers, for two
    types, once more side by side, and sixteen rows of weights.
    """
    num_rows = min(shape[0], tile_rows(shape[1]) + MAX_REMAINDER)
    return max(num_rows, _MOST_CHUNK_ROWS) * shape[1] * 29


def _product(rows: RoundedRows, weights: Groups) -> Tensor:
    """[n, out] float32."""
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
