"""Statistics of rows of logits that a diffusion decoder needs, and the joining of tiles.

The head's product is computed in tiles of the vocabulary; of each tile only a few numbers per row
are kept, its partials. `tiled_head` computes them in plain torch, `triton_head` on a GPU.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.kernels.operands import Matrix
from lowtide.memory.workspace import Buffers

TILE_COLUMNS = 1024
"""Vocabulary entries of a tile.

Fixed whatever the budget or the rows, because it decides bits. float32 logits of a few rows stay in
a core's cache, and on a GPU one row has enough tiles to keep every processor busy.
"""

LEAST_EXPONENT = -1e4
"""Replacement for lower values: its exponential is 0, and unlike -inf it can be multiplied by 0."""


class Form(enum.Enum):
    """Form of the logits: whether those of all rows exist at once. The numbers are the same."""

    FUSED = "fused"
    MATERIALISED = "materialised"  # [rows, vocab] in the compute dtype, as in Mosaic


class Wanted(NamedTuple):
    """Statistics to compute besides the arg-max and its probability."""

    second: bool = False
    entropy: bool = False


class Head(NamedTuple):
    """Weights between the last hidden states and the logits."""

    norm: Tensor  # [hidden]
    eps: float
    vocabulary: Matrix  # [vocab, hidden]


class Guidance(NamedTuple):
    """Classifier-free guidance: `logits = other + factor * (logits - other)`, in float32.

    The factor is LLaDA's `cfg_scale` plus 1; the other rows are those of the masked prompt.
    """

    rows: Tensor  # [n] int64: of the same hidden states
    factors: Tensor  # [n] float32

    def part(self, rows: slice) -> Guidance:
        """Return the guidance of some of the n rows."""
        return Guidance(self.rows[rows], self.factors[rows])


class RowStatistics(NamedTuple):
    """Statistics of n rows of logits; where the greatest logit is not finite, the rest is NaN.

    Probabilities are exact near 1, too: the best entry is left out of the sum of the others.
    """

    best: Tensor  # [n] int64: the arg-max, the lowest id on ties; of NaNs the first
    greatest: Tensor  # [n] float32: its logit
    probability: Tensor  # [n] float64: its softmax probability
    second: Tensor | None = None  # [n] float64: the second best's probability, on ties the same
    entropy: Tensor | None = None  # [n] float64: -sum p log p, in nats

    @classmethod
    def take(cls, num_rows: int, wanted: Wanted, workspace: Buffers) -> RowStatistics:
        """Allocate n rows from the workspace."""

        def taken(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            return workspace.take(name, (num_rows,), dtype)

        return cls(
            taken("best tokens", torch.int64),
            taken("greatest logits", torch.float32),
            taken("probabilities"),
            taken("second probabilities") if wanted.second else None,
            taken("entropies") if wanted.entropy else None,
        )

    def part(self, rows: slice) -> RowStatistics:
        """Return a view of some of the rows."""
        return RowStatistics._make(None if each is None else each[rows] for each in self)


class Partials(NamedTuple):
    """Numbers kept for each vocabulary tile of each row: [rows, tiles]."""

    best: Tensor  # int32
    greatest: Tensor  # float32, as all that follow
    rest: Tensor  # the sum of exp(logit - greatest) of all but the best
    second: Tensor | None  # logit
    moment: Tensor | None  # the sum of exp(logit - greatest) * (logit - greatest)

    @classmethod
    def take(cls, num_rows: int, num_tiles: int, wanted: Wanted, workspace: Buffers) -> Partials:
        """Allocate partials from the workspace."""

        def taken(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return workspace.take(name, (num_rows, num_tiles), dtype)

        return cls(
            taken("tiles' best tokens", torch.int32),
            taken("tiles' greatest logits"),
            taken("tiles' rests"),
            taken("tiles' second logits") if wanted.second else None,
            taken("tiles' moments") if wanted.entropy else None,
        )

    def part(self, rows: slice) -> Partials:
        """Return a view of some of the rows."""
        return Partials._make(None if each is None else each[rows] for each in self)

    def join(self, out: RowStatistics) -> None:
        """Compute the first rows' statistics, in float64 and in the tiles' order.

        With the greatest logit of all tiles M, of each tile m, and w = exp(m - M), the sum of
        exponentials is S = sum w (1 + rest), in which the best tile's w is 1. Then p = 1 / S, and
        the entropy is log S - sum w (moment + (m - M) (1 + rest)) / S.
        """
        num_rows = out.best.shape[0]
        tile_greatest = self.greatest.double()
        greatest, place = tile_greatest.max(1, keepdim=True)  # the first of equals
        below = (tile_greatest - greatest).clamp_(min=LEAST_EXPONENT)
        weights = below.exp()
        # The best itself is 1, and added where that is not lost.
        totals = self.rest.double().add_(1).scatter_(1, place, self.rest.gather(1, place).double())
        rest = (weights * totals).sum(1, keepdim=True)
        total = 1 + rest
        out.best.copy_(self.best.gather(1, place)[:num_rows, 0])
        out.greatest.copy_(greatest[:num_rows, 0])
        out.probability.copy_(total.reciprocal()[:num_rows, 0])
        if self.second is not None and out.second is not None:
            others = tile_greatest.scatter(1, place, self.second.gather(1, place).double())
            second = (others.amax(1, keepdim=True) - greatest).exp_().div_(total)
            out.second.copy_(second[:num_rows, 0])
        if self.moment is not None and out.entropy is not None:
            moment = below.mul_(totals).add_(self.moment).mul_(weights).sum(1, keepdim=True)
            out.entropy.copy_(rest.log1p().sub_(moment.div_(total))[:num_rows, 0])
