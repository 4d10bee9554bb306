"""Routing of one MoE layer in one step, sorted by expert, and its scratch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray, MoEShape, Step
from lowtide.kernels.operands import SortedPairs
from lowtide.memory.workspace import TILE_ROWS, Buffers

_LEAST_ROWS = 16
"""Fewest rows of a piece of several; fewer rows would go to other kernels."""


class Routing(NamedTuple):
    """Choice of the router for each token, experts by ascending id."""

    experts: Tensor  # [tokens, k] int64
    weights: Tensor  # [tokens, k] float32


class LayerCall(NamedTuple):
    """Call of one layer's experts in one step."""

    layer: int  # among MoE layers
    x: Tensor  # [tokens, hidden] compute dtype
    routing: Routing
    step: Step
    workspace: Buffers
    out: Tensor  # [tokens, hidden] float32: the sum of each token's experts goes there
    scores: Tensor | None = None  # [tokens, num_experts] float32: the router's, if asked for
    chunk_ends: tuple[int, ...] = ()  # one past the last row of each chunk; (): all are one


def is_long(num_tokens: int) -> bool:
    """Return True if a pass of `num_tokens` rows is computed in tiles; see `work.py`."""
    return num_tokens > TILE_ROWS


def row_pieces(num_rows: int) -> Iterator[slice]:
    """Divide an expert's rows into products: one, or several if there are more than `TILE_ROWS`.

    The division depends only on the number of rows, never on the budget, since it affects bits. No
    piece has fewer than 16 rows; all but the last have a multiple of 16. The rows left after a
    piece are divided as that number of rows alone would be.
    """
    start = 0
    while start < num_rows:
        stop = min(start + TILE_ROWS, num_rows)
        if 0 < num_rows - stop < _LEAST_ROWS:
            stop -= _LEAST_ROWS
        yield slice(start, stop)
        start = stop


class ExpertRows:
    """(token, expert) pairs of a step, sorted by expert, then by token.

    token_of [tokens * k]: each sorted pair's token. part_of [tokens, k]: the sorted position of a
    token's j-th pair. counts [num_experts]: each expert's pairs. All int64, on the routing's
    device. If a pass has several chunks of a prompt, an expert's pairs of each chunk are products
    of their own, with the bits of a pass over that chunk alone.
    """

    def __init__(self, pairs: SortedPairs, bounds: IntArray | None = None) -> None:
        """bounds: if they are known, without a synchronisation."""
        self.token_of, self.part_of, self.counts = pairs
        self._num_chunks = 1
        self.is_known = bounds is not None
        if bounds is not None:
            self.bounds = self._chunk_bounds = bounds

    @classmethod
    def at_host(cls, experts: Tensor, num_experts: int) -> ExpertRows:
        """Sort experts [tokens, k] in host memory, by numpy, which has the least overhead per call.

        `part_of` is then undefined.
        """
        chosen = experts.numpy().ravel()
        counts = np.bincount(chosen, minlength=num_experts)
        order = chosen.astype(np.int16).argsort(kind="stable")  # by radix, as of 16 bits
        token_of = torch.from_numpy(order // experts.shape[1])
        bounds = np.zeros(num_experts + 1, np.int64)
        counts.cumsum(out=bounds[1:])
        return cls(SortedPairs(token_of, experts[:0], torch.from_numpy(counts)), bounds)

    @classmethod
    def of_chunks(
        cls, pairs: SortedPairs, experts: Tensor, chunk_ends: Sequence[int]
    ) -> ExpertRows:
        """Divide the pairs of experts [tokens, k] in host memory by chunks of the tokens."""
        rows, chosen, num_experts = cls(pairs), experts.numpy(), len(pairs.counts)
        starts = [0, *chunk_ends[:-1]]
        counts = [
            np.bincount(chosen[start:stop].ravel(), minlength=num_experts)
            for start, stop in zip(starts, chunk_ends, strict=True)
        ]
        rows._num_chunks = len(counts)
        rows.learn(np.stack(counts, axis=1).ravel())
        return rows

    @cached_property
    def bounds(self) -> IntArray:
        """Bounds: expert e has sorted pairs bounds[e] to bounds[e + 1]. [num_experts + 1].

        The first use is the layer's one device-to-host synchronisation.
        """
        self.learn(self.counts.cpu().numpy())
        return self.bounds

    @cached_property
    def _chunk_bounds(self) -> IntArray:
        # [num_experts * chunks + 1]: the sorted pairs of each expert's chunks follow each other.
        self.learn(self.counts.cpu().numpy())
        return self._chunk_bounds

    def learn(self, host_counts: IntArray) -> None:
        """Compute `bounds` from a copy of `counts` in host memory."""
        bounds = np.zeros(len(host_counts) + 1, np.int64)
        host_counts.cumsum(out=bounds[1:])
        self._chunk_bounds, self.bounds = bounds, bounds[:: self._num_chunks]
        self.is_known = True

    def pairs(self, expert: int) -> slice:
        """Return the sorted pairs of one expert."""
        bounds = self.bounds
        return slice(int(bounds[expert]), int(bounds[expert + 1]))

    @property
    def demanded(self) -> list[int]:
        """List the experts with pairs, ascending."""
        experts: list[int] = np.flatnonzero(np.diff(self.bounds)).tolist()
        return experts

    def pieces(self, expert: int) -> list[slice]:
        """Divide an expert's pairs into its products."""
        first = expert * self._num_chunks
        bounds = self._chunk_bounds[first : first + self._num_chunks + 1].tolist()
        if len(bounds) == 2 and bounds[1] - bounds[0] <= TILE_ROWS:
            return [slice(*bounds)] if bounds[0] < bounds[1] else []
        return [
            slice(start + piece.start, start + piece.stop)
            for start, stop in pairwise(bounds)
            for piece in row_pieces(stop - start)
        ]

    def tiles(self, max_pairs: int) -> Iterator[slice]:
        """Divide all sorted pairs into parts of at most `max_pairs`, without splitting a piece.

        `max_pairs` is at least `TILE_ROWS`. Only a tile's last expert may have more pairs in the
        next.
        """
        start = stop = 0
        for num_pairs in np.diff(self._chunk_bounds).tolist():
            for piece in row_pieces(num_pairs):
                size = piece.stop - piece.start
                if stop + size - start > max_pairs:
                    yield slice(start, stop)
                    start = stop
                stop += size
        if start < stop:
            yield slice(start, stop)

    def tile(self, pairs: slice) -> ExpertRows:
        """Return some of the sorted pairs, as if there were no others; `part_of` is then undefined.

        The tile of all pairs needs no synchronisation.
        """
        if pairs.stop - pairs.start == len(self.token_of):
            return self
        bounds = self._chunk_bounds.clip(pairs.start, pairs.stop)
        counts = torch.from_numpy(np.diff(bounds[:: self._num_chunks])).to(self.token_of.device)
        rows = ExpertRows(SortedPairs(self.token_of[pairs], self.part_of[:0], counts))
        rows._num_chunks = self._num_chunks
        rows.learn(np.diff(bounds))
        return rows

    def num_tokens(self, experts: IntArray | list[int]) -> IntArray:
        """Return the number of pairs of some experts."""
        experts = np.asarray(experts, np.int64)
        bounds = self.bounds
        num_tokens: IntArray = bounds[experts + 1] - bounds[experts]
        return num_tokens

    def most_tokens(self, experts: IntArray | list[int]) -> IntArray:
        """Return the most pairs that some experts have of one chunk."""
        counts = np.diff(self._chunk_bounds).reshape(-1, self._num_chunks)
        most: IntArray = counts[np.asarray(experts, np.int64)].max(axis=1)
        return most

    def groups(self, experts: IntArray | list[int], slots: IntArray | list[int]) -> IntArray:
        """Return the slot, first sorted pair and number of pairs of each product: [products, 3].

        They are one for each expert, or for each of its chunks that have any.
        """
        chunks = np.asarray(experts, np.int64)[:, None] * self._num_chunks
        chunks = (chunks + np.arange(self._num_chunks)).ravel()
        groups = np.empty((len(chunks), 3), np.int64)
        groups[:, 0] = np.repeat(np.asarray(slots, np.int64), self._num_chunks)
        groups[:, 1] = self._chunk_bounds[chunks]
        groups[:, 2] = self._chunk_bounds[chunks + 1] - groups[:, 1]
        return groups if self._num_chunks == 1 else groups[groups[:, 2] > 0]


class ExpertBuffers(NamedTuple):
    """Buffers in which the experts of a tile's pairs are computed."""

    parts: Tensor  # [pairs, hidden]: inputs of each pair, then its expert's output
    gate: Tensor  # [pairs, expert_size]: each expert its own rows, threads share nothing
    up: Tensor  # [pairs, expert_size]

    @classmethod
    def of_pairs(
        cls, workspace: Buffers, num_pairs: int, expert_size: int, x: Tensor
    ) -> ExpertBuffers:
        """Take buffers for `num_pairs` pairs at a time, of rows x [rows, hidden]."""
        hidden, width = (num_pairs, x.shape[1]), (num_pairs, expert_size)
        return cls(
            *workspace.take_all(
                ("expert parts", hidden, x.dtype),
                ("expert gate", width, x.dtype),
                ("expert up", width, x.dtype),
            )
        )


class Terms(NamedTuple):
    """Buffers through which outputs are summed."""

    term: Tensor  # [tokens, hidden]
    fp32: Tensor  # [tokens, hidden] float32

    @classmethod
    def take(cls, workspace: Buffers, num_tokens: int, x: Tensor) -> Terms:
        """Take buffers for `num_tokens` tokens at a time, of rows x [rows, hidden]."""
        shape = (num_tokens, x.shape[1])
        return cls(
            *workspace.take_all(
                ("combine term", shape, x.dtype), ("combine term fp32", shape, torch.float32)
            )
        )


def take_buffers(
    workspace: Buffers, shape: MoEShape, x: Tensor
) -> tuple[ExpertBuffers, Terms | None]:
    """Take the buffers of one layer's experts for rows x [rows, hidden].

    A long pass gets those of as many tiles as the plan allows, and buffers for the sum between
    them.
    """
    num_rows, k = x.shape[0], shape.num_experts_per_token
    workspace.library("expert rows", 6 * 8 * k * num_rows)
    if not is_long(num_rows):
        return ExpertBuffers.of_pairs(workspace, num_rows * k, shape.expert_size, x), None
    workspace.library("pairs' weights", 2 * 8 * k * num_rows)
    num_pairs = min(num_rows, workspace.together("experts", num_rows)) * k
    pairs = ExpertBuffers.of_pairs(workspace, num_pairs, shape.expert_size, x)
    return pairs, Terms.take(workspace, TILE_ROWS, x)


def take_terms(workspace: Buffers, buffers: ExpertBuffers, x: Tensor) -> Terms:
    """Take a short pass' sum buffers in place of gate and up, which are freed."""
    workspace.give_back(buffers.gate, buffers.up)
    return Terms.take(workspace, x.shape[0], x)
