"""What one MoE layer works on in one step: its routing, sorted by expert, and its scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray, MoEShape
from lowtide.kernels.operands import SortedPairs
from lowtide.memory.workspace import TILE_ROWS, Buffers

_LEAST_ROWS = 16
"""Of a piece that is not a whole group: fewer rows would go to other kernels than the group."""


RunInPlace = Callable[[Tensor, Tensor], None]
"""Sums the experts [tokens, k] of a layer's tokens under their weights, all in one call, where
every one of them is in a slot of the host."""


class Routing(NamedTuple):
    """The router's choice for each token, experts in ascending id."""

    experts: Tensor  # [tokens, k] int64
    weights: Tensor  # [tokens, k] float32


def is_long(num_tokens: int) -> bool:
    """Whether a pass of so many rows is divided: see `long_pass.py`."""
    return num_tokens > TILE_ROWS


def row_pieces(num_rows: int) -> Iterator[slice]:
    """The products that an expert's rows are computed in: one, or of more than `TILE_ROWS` several.

    By the number of rows alone, whatever the budget, since it decides bits. None has fewer than 16
    rows, and all but the last have a multiple of 16; what is left after a piece is divided as
    rows of that number would be.
    """
    start = 0
    while start < num_rows:
        stop = min(start + TILE_ROWS, num_rows)
        if 0 < num_rows - stop < _LEAST_ROWS:
            stop -= _LEAST_ROWS
        yield slice(start, stop)
        start = stop


class ExpertRows:
    """The (token, expert) pairs of a step, sorted by expert, tokens ascending within one.

    token_of [tokens * k]: the token of each sorted pair. part_of [tokens, k]: where a token's
    j-th pair went. counts [num_experts]: pairs of each expert. All int64, on the device of the
    routing.
    """

    __slots__ = ("_bounds", "counts", "part_of", "token_of")

    def __init__(self, pairs: SortedPairs) -> None:
        self.token_of, self.part_of, self.counts = pairs
        self._bounds: IntArray | None = None

    @property
    def bounds(self) -> IntArray:
        """Expert e has sorted pairs bounds[e] to bounds[e + 1]. [num_experts + 1]

        The first use is the layer's one device-to-host synchronisation.
        """
        if self._bounds is None:
            return self.learn(self.counts.cpu())
        return self._bounds

    def learn(self, host_counts: Tensor) -> IntArray:
        """Makes `bounds` known from a copy of `counts` in host memory."""
        bounds = np.zeros(len(host_counts) + 1, np.int64)
        np.cumsum(host_counts.numpy(), out=bounds[1:])
        self._bounds = bounds
        return bounds

    @property
    def is_known(self) -> bool:
        """Whether `bounds` needs no synchronisation any more."""
        return self._bounds is not None

    def pairs(self, expert: int) -> slice:
        """The sorted pairs of one expert."""
        bounds = self.bounds
        return slice(int(bounds[expert]), int(bounds[expert + 1]))

    @property
    def demanded(self) -> list[int]:
        """Experts with pairs, ascending."""
        experts: list[int] = np.flatnonzero(np.diff(self.bounds)).tolist()
        return experts

    def pieces(self, expert: int) -> list[slice]:
        """`pairs`, in the products that they are computed in."""
        pairs = self.pairs(expert)
        return [
            slice(pairs.start + piece.start, pairs.start + piece.stop)
            for piece in row_pieces(pairs.stop - pairs.start)
        ]

    def tiles(self, max_pairs: int) -> Iterator[slice]:
        """All sorted pairs, at most `max_pairs` at a time, no piece in two tiles.

        `max_pairs` is at least `TILE_ROWS`. Of all experts with pairs in a tile only the last may
        have more of them, in the next one.
        """
        start = stop = 0
        for num_pairs in np.diff(self.bounds).tolist():
            for piece in row_pieces(num_pairs):
                size = piece.stop - piece.start
                if stop + size - start > max_pairs:
                    yield slice(start, stop)
                    start = stop
                stop += size
        if start < stop:
            yield slice(start, stop)

    def tile(self, pairs: slice) -> ExpertRows:
        """Some of the sorted pairs, as if there were no others; `part_of` has no meaning there."""
        bounds = self.bounds.clip(pairs.start, pairs.stop) - pairs.start
        counts = torch.from_numpy(np.diff(bounds)).to(self.token_of.device)
        rows = ExpertRows(SortedPairs(self.token_of[pairs], self.part_of[:0], counts))
        rows._bounds = bounds
        return rows

    def groups(self, experts: IntArray, slots: IntArray) -> IntArray:
        """The slot, first sorted pair and number of pairs of each expert. [experts, 3]"""
        groups = np.empty((len(experts), 3), np.int64)
        groups[:, 0] = slots
        groups[:, 1] = self.bounds[experts]
        groups[:, 2] = self.bounds[experts + 1] - groups[:, 1]
        return groups


class HostScratch(NamedTuple):
    """Where the host's experts keep gate and up beside a device: rows as in `ExpertBuffers`."""

    gate: Tensor  # [max_rows * k, expert_size]
    up: Tensor  # [max_rows * k, expert_size]


class ExpertBuffers(NamedTuple):
    """What a layer's experts compute in. Of a long pass the pairs of as many tiles as the plan
    takes together."""

    parts: Tensor  # [pairs, hidden]: inputs of each pair, then its expert's output
    gate: Tensor  # [pairs, expert_size]: each expert its own rows, threads share nothing
    up: Tensor  # [pairs, expert_size]

    @classmethod
    def take(cls, workspace: Buffers, shape: MoEShape, x: Tensor) -> ExpertBuffers:
        k = shape.num_experts_per_token
        workspace.library("expert rows", 6 * 8 * k * x.shape[0])
        if is_long(x.shape[0]):
            workspace.library("pairs' weights", 2 * 8 * k * x.shape[0])
        num_pairs = x.shape[0] * k
        if is_long(x.shape[0]):  # whole tiles, of pairs as they are sorted
            num_pairs = min(num_pairs, workspace.together("experts", x.shape[0]) * k)
        return cls.of_pairs(workspace, num_pairs, shape.expert_size, x)

    @classmethod
    def of_pairs(
        cls, workspace: Buffers, num_pairs: int, expert_size: int, x: Tensor
    ) -> ExpertBuffers:
        """For so many pairs at a time, of rows x [rows, hidden]."""
        return cls(
            parts=workspace.take("expert parts", (num_pairs, x.shape[1]), x.dtype),
            gate=workspace.take("expert gate", (num_pairs, expert_size), x.dtype),
            up=workspace.take("expert up", (num_pairs, expert_size), x.dtype),
        )


class Terms(NamedTuple):
    """What outputs are summed through: of a long pass, so many tokens' as a tile has."""

    term: Tensor  # [tokens, hidden]
    fp32: Tensor  # [tokens, hidden] float32

    @classmethod
    def take(cls, workspace: Buffers, buffers: ExpertBuffers, x: Tensor) -> Terms:
        """In the place of gate and up, which are given back; of a long pass, which sums up between
        its tiles, beside them."""
        if not is_long(x.shape[0]):
            workspace.give_back(buffers.gate, buffers.up)
        shape = (min(x.shape[0], TILE_ROWS), x.shape[1])
        return cls(
            workspace.take("combine term", shape, x.dtype),
            workspace.take("combine term fp32", shape, torch.float32),
        )
