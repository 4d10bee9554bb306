"""Statistics of rows of logits in plain torch: the head's product tile by tile, discarded at once.

Rows are gathered and normalised in groups, as large as the plan allows. For each group the
vocabulary is passed once, its tiles divided among threads, and each tile of logits is reduced where
it was computed. A row's bits depend neither on the other rows nor on the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowtide.core import align_up
from lowtide.kernels import stored
from lowtide.kernels.operands import rows_of
from lowtide.kernels.row_statistics import (
    LEAST_EXPONENT,
    TILE_COLUMNS,
    Form,
    Guidance,
    Head,
    Partials,
    RowStatistics,
    Wanted,
)
from lowtide.memory.chunking import OPERATOR_TILES, pieces
from lowtide.memory.workspace import Buffers, tiles

if TYPE_CHECKING:
    from lowtide.kernels.reference import Kernels

HEAD_ROWS = 32
"""Rows of a product; the last has half as many where that suffices.

Fewer than 16 have other float32 bits, and more than 32 other bfloat16 bits where the processor has
AMX (docs/log).
"""

REDUCED_ROWS = 2 * HEAD_ROWS
"""Rows of products that are reduced together: calls of small operators are a fifth of the work."""

NORM_ROWS = OPERATOR_TILES["logits"]
"""Rows that are normalised together, and whose tiles are joined together."""

MAX_WORKS = 8
"""Works that a group is divided into, with equally many tiles each.

Fixed, because a plan counts the scratch of all of them, on any machine.
"""

_SEARCH_COLUMNS = 32  # torch is ten times slower at finding a maximum's place than the maximum
_LEAST = torch.finfo(torch.float32).min

Run = Callable[[Sequence[Callable[[], None]]], None]
"""Function that runs independent works and waits for them: `Executor.run`."""


def row_statistics(
    kernels: Kernels,
    hidden: Tensor,
    rows: Tensor,
    head: Head,
    wanted: Wanted,
    guidance: Guidance | None,
    form: Form,
    workspace: Buffers,
    run: Run,
) -> RowStatistics:
    """Compute `Kernels.row_statistics`."""
    num_rows = rows.shape[0]
    out = RowStatistics.take(num_rows, wanted, workspace)
    groups = list(tiles(num_rows, workspace.together("logits", num_rows)))
    if hidden.is_meta:  # only memory is counted: the longest group stands for all
        groups = [max(groups, key=lambda group: group.stop - group.start)]
    for group in groups:
        with workspace.scope():
            away = None if guidance is None else guidance.part(group)
            inputs = HeadRows.gathered(kernels, hidden, rows[group], head, away, workspace)
            reduction = _Reduction(kernels, head, inputs, wanted, workspace, run)
            if form is Form.MATERIALISED:
                reduction.materialise()
            partials = reduction.run()
            if not hidden.is_meta:
                _join(partials, out.part(group))
    return out


def _join(partials: Partials, out: RowStatistics) -> None:
    num_rows = out.best.shape[0]
    for first in range(0, num_rows, NORM_ROWS):
        part = slice(first, min(first + NORM_ROWS, num_rows))
        partials.part(part).join(out.part(part))


class HeadRows(NamedTuple):
    """Rows of a group after the last norm, padded by repeating the last row."""

    x: Tensor  # [rows, hidden]
    other: Tensor | None = None  # [rows, hidden], of guidance
    factors: Tensor | None = None  # [rows, 1] float32, of guidance

    @classmethod
    def gathered(
        cls,
        kernels: Kernels,
        hidden: Tensor,
        rows: Tensor,
        head: Head,
        guidance: Guidance | None,
        workspace: Buffers,
    ) -> HeadRows:
        """Gather and normalise rows of hidden [tokens, hidden]; rows [n] int64.

        All is taken from `workspace`: these are the only copies of hidden states that a head needs.
        """

        def normalised(name: str, rows: Tensor) -> Tensor:
            padded = _padded(rows)
            x = workspace.take(name, (padded.shape[0], hidden.shape[1]), hidden.dtype)
            torch.index_select(hidden, 0, padded, out=x)
            for first in range(0, x.shape[0], NORM_ROWS):
                part = x[first : first + NORM_ROWS]
                kernels.rms_norm(part, head.norm, head.eps, workspace, part)
            return x

        x = normalised("head rows", rows)
        if guidance is None:
            return cls(x)
        other = normalised("head rows to guide away from", guidance.rows)
        return cls(x, other, _padded(guidance.factors)[:, None])


def _padded(rows: Tensor) -> Tensor:
    num_more = -rows.shape[0] % (HEAD_ROWS // 2)
    return torch.cat((rows, rows[-1:].expand(num_more))) if num_more else rows


class _Scratch(NamedTuple):
    """Scratch of one work: flat, [REDUCED_ROWS * columns of the widest tile] each."""

    logits: Tensor  # float32
    other: Tensor | None  # float32, with guidance
    terms: Tensor | None  # float32, for the entropy
    product: Tensor | None  # in the compute dtype, where that is not float32

    @classmethod
    def take(
        cls,
        num_works: int,
        size: int,
        is_guided: bool,
        has_terms: bool,
        dtype: torch.dtype,
        workspace: Buffers,
    ) -> list[_Scratch]:
        """Allocate the scratch of each work."""

        def taken(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return workspace.take(name, (num_works, size), dtype)

        of_all = cls(
            taken("logits tiles"),
            taken("logits tiles to guide away from") if is_guided else None,
            taken("entropy tiles") if has_terms else None,
            None if dtype == torch.float32 else taken("logits tiles' product", dtype),
        )
        return [
            cls._make(None if each is None else each[work] for each in of_all)
            for work in range(num_works)
        ]


class _Reduction:
    """Reduction of a group's logits to partials, tile by tile."""

    def __init__(
        self,
        kernels: Kernels,
        head: Head,
        inputs: HeadRows,
        wanted: Wanted,
        workspace: Buffers,
        run: Run,
    ) -> None:
        self._kernels, self._inputs, self._run = kernels, inputs, run
        self._weight, self._workspace = head.vocabulary, workspace
        num_rows, vocab_size = inputs.x.shape[0], head.vocabulary.shape[0]
        self._tiles = list(tiles(vocab_size, TILE_COLUMNS))
        self._row_tiles = pieces(num_rows, REDUCED_ROWS)
        widest = align_up(max(tile.stop - tile.start for tile in self._tiles), _SEARCH_COLUMNS)
        self._partials = Partials.take(num_rows, len(self._tiles), wanted, workspace)
        self._scratch = _Scratch.take(
            min(MAX_WORKS, len(self._tiles)),
            REDUCED_ROWS * widest,
            inputs.other is not None,
            wanted.entropy,
            inputs.x.dtype,
            workspace,
        )
        self._whole: Tensor | None = None
        self._whole_other: Tensor | None = None
        workspace.library("joined tiles", 6 * 8 * min(num_rows, NORM_ROWS) * len(self._tiles))

    def materialise(self) -> None:
        """Compute all logits first, in the compute dtype."""
        shape = (self._inputs.x.shape[0], self._weight.shape[0])
        self._whole = self._workspace.take("logits", shape, self._inputs.x.dtype)
        self._in_works(partial(self._fill, self._inputs.x, self._whole))
        if self._inputs.other is not None:
            self._whole_other = self._workspace.take("other logits", shape, self._inputs.x.dtype)
            self._in_works(partial(self._fill, self._inputs.other, self._whole_other))

    def run(self) -> Partials:
        self._in_works(self._reduce)
        return self._partials

    def _in_works(self, run_tile: Callable[[slice, int, _Scratch], None]) -> None:
        """Call `run_tile` for every tile; each work has consecutive tiles."""
        num_tiles, num_works = len(self._tiles), len(self._scratch)
        bounds = [work * num_tiles // num_works for work in range(num_works + 1)]

        def run_range(work: int) -> None:
            for tile in range(bounds[work], bounds[work + 1]):
                for rows in self._row_tiles:
                    run_tile(rows, tile, self._scratch[work])

        if not self._inputs.x.is_meta:  # all buffers are taken: there is nothing more to count
            self._run([partial(run_range, work) for work in range(num_works)])

    def _fill(self, x: Tensor, out: Tensor, rows: slice, tile: int, scratch: _Scratch) -> None:
        columns = self._tiles[tile]
        self._multiply(x[rows], columns, out[rows, columns])

    def _reduce(self, rows: slice, tile: int, scratch: _Scratch) -> None:
        """Compute one tile's partials of one tile of rows."""
        columns, partials = self._tiles[tile], self._partials
        logits = self._logits(rows, tile, scratch)  # [rows, columns and some of -inf]
        greatest, best = _arg_max(logits)
        partials.greatest[rows, tile] = greatest[:, 0]
        partials.best[rows, tile] = best[:, 0] + columns.start
        logits.scatter_(1, best, -torch.inf)  # the others are summed
        if partials.second is not None:
            partials.second[rows, tile] = logits.amax(1)
        logits.sub_(greatest.clamp_(min=_LEAST))
        if partials.moment is None or scratch.terms is None:
            partials.rest[rows, tile] = logits.exp_().sum(1)
        else:
            terms = scratch.terms[: logits.numel()].view_as(logits).copy_(logits)
            partials.rest[rows, tile] = logits.exp_().sum(1)
            partials.moment[rows, tile] = terms.clamp_(min=LEAST_EXPONENT).mul_(logits).sum(1)

    def _logits(self, rows: slice, tile: int, scratch: _Scratch) -> Tensor:
        columns, inputs = self._tiles[tile], self._inputs
        num_rows, width = rows.stop - rows.start, columns.stop - columns.start
        padded = align_up(width, _SEARCH_COLUMNS)
        whole = scratch.logits[: num_rows * padded].view(num_rows, padded)
        whole[:, width:] = -torch.inf
        logits = whole[:, :width]
        self._compute(inputs.x, self._whole, rows, columns, scratch, logits)
        if inputs.other is not None and inputs.factors is not None and scratch.other is not None:
            other = scratch.other[: num_rows * width].view(num_rows, width)
            self._compute(inputs.other, self._whole_other, rows, columns, scratch, other)
            logits.sub_(other).mul_(inputs.factors[rows]).add_(other)
        return whole

    def _compute(
        self,
        x: Tensor,
        computed: Tensor | None,
        rows: slice,
        columns: slice,
        scratch: _Scratch,
        out: Tensor,
    ) -> None:
        """Return float32 logits, computed now or taken from `computed`."""
        if computed is not None:
            out.copy_(computed[rows, columns])
            return
        if scratch.product is None:
            self._multiply(x[rows], columns, out)
        else:
            product = scratch.product[: out.numel()].view(out.shape)
            self._multiply(x[rows], columns, product)
            out.copy_(product)

    def _multiply(self, x: Tensor, columns: slice, out: Tensor) -> None:
        weight = rows_of(self._weight, columns)
        for rows in pieces(x.shape[0], HEAD_ROWS):
            if isinstance(weight, Tensor) or self._kernels.rounds(weight):
                self._kernels.multiply_by(x[rows], weight, out[rows])
            else:  # never by operators of few rows: 16 and 32 are rounded alike
                stored.multiply(self._kernels, x[rows], weight, None, out[rows])


def _arg_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest of each row [n, 1] and its first place [n, 1]; a NaN is the greatest."""
    num_rows = logits.shape[0]
    blocks = logits.view(num_rows, -1, _SEARCH_COLUMNS)
    greatest, block = blocks.amax(2).max(1, keepdim=True)
    own = blocks.gather(1, block[:, :, None].expand(num_rows, 1, _SEARCH_COLUMNS))
    return greatest, own.argmax(2).add_(block, alpha=_SEARCH_COLUMNS)
