"""Work of one MoE layer in one step: its pairs sorted by expert, in tiles, and their sum.

A short pass is one tile. A long one, such as a bidirectional pass over a whole sequence or one over
several chunks of a prompt, is computed in tiles of as many pairs as the buffers hold.

Each tile's outputs are added to the layer's sum as `Kernels.combine` does: for every token in
ascending order of experts, one multiply and one add per expert. So budget, threads and tiles change
no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core import Facts, IntArray, MoEShape, Moves, align_up
from lowtide.experts.policy_facts import HostInputs
from lowtide.experts.rows import ExpertRows, LayerCall, take_buffers, take_terms
from lowtide.kernels.reference import Kernels
from lowtide.policies.decision import Decision, Policies
from lowtide.threads.executor import Executor


class Plan(NamedTuple):
    """Decision for a layer's step: where each expert runs, and the moves."""

    facts: Facts  # of what the router demanded
    decision: Decision
    at_host: HostInputs
    policies: Policies  # that decided, and prefetch
    ask_moves: Callable[[], Moves]  # once, at the latest when the work is under way


class Tile(NamedTuple):
    """Part of a layer's sorted pairs, at most as many as its buffers hold."""

    rows: ExpertRows  # as if there were no others
    pairs: slice  # of all
    is_last: bool


class Work:
    """Tokens of one layer, their experts, and the sum of the experts' outputs."""

    def __init__(
        self,
        call: LayerCall,
        shape: MoEShape,
        kernels: Kernels,
        bounds: IntArray | None = None,
    ) -> None:
        """Sort the pairs; kernels: of the device that the rows are on.

        bounds: of the sorted pairs, if they are known.
        """
        self.layer, self.x = call.layer, call.x
        self._routing, self._out, self._workspace = call.routing, call.out, call.workspace
        self._kernels = kernels
        self.buffers, self._terms = take_buffers(call.workspace, shape, call.x)
        experts, chunk_ends = call.routing.experts, call.chunk_ends
        pairs = kernels.sort_pairs(experts, shape.num_experts)
        self.rows = ExpertRows(pairs, bounds)
        if chunk_ends:
            self.rows = ExpertRows.of_chunks(pairs, experts, chunk_ends)

    def tiles(self) -> Iterable[Tile]:
        """Divide all pairs, ascending by expert; a single tile needs no synchronisation."""
        num_pairs, most = len(self.rows.token_of), len(self.buffers.parts)
        if num_pairs <= most:
            return (Tile(self.rows, slice(0, num_pairs), True),)
        return self._several_tiles(num_pairs, most)

    def is_finished(self, expert: int, tile: Tile) -> bool:
        """Return True if no later tile has rows of the expert."""
        pairs = self.rows.pairs(expert)
        return pairs.start == pairs.stop or bool(pairs.stop <= tile.pairs.stop)

    def gather(self, tile: Tile) -> None:
        """Gather the inputs of a tile's pairs into the buffer of their outputs."""
        token_of = tile.rows.token_of
        torch.index_select(self.x, 0, token_of, out=self.buffers.parts[: len(token_of)])

    def add(self, tile: Tile, threads: Executor) -> None:
        """Add a tile's outputs to the sum; the last tile completes it."""
        terms = self._terms
        if terms is None:
            terms = take_terms(self._workspace, self.buffers, self.x)
            _, weights = self._routing
            parts, part_of = self.buffers.parts, self.rows.part_of
            self._kernels.combine(parts, part_of, weights, *terms, self._out)
            return
        if tile.pairs.start == 0:
            self._out.zero_()
        hidden = self._out.shape[1]
        width = align_up(-(-hidden // threads.num_threads), 16) if self._out.is_cpu else hidden
        starts = range(0, hidden, width)
        columns = [slice(start, min(start + width, hidden)) for start in starts]
        weights = self._pair_weights[tile.pairs]
        threads.run([partial(self._add, tile.rows, weights, terms.fp32, part) for part in columns])

    def _add(self, rows: ExpertRows, weights: Tensor, term_fp32: Tensor, columns: slice) -> None:
        """Add a tile's outputs to some columns, expert by expert."""
        parts = self.buffers.parts
        for expert in rows.demanded:
            of_expert = rows.pairs(expert)
            for start in range(of_expert.start, of_expert.stop, len(term_fp32)):
                part = slice(start, min(start + len(term_fp32), of_expert.stop))
                term = term_fp32[: part.stop - start, columns]
                term.copy_(parts[part, columns])
                term.mul_(weights[part, None])
                # An expert has each token at most once, so no two rows add to the same place.
                self._out[:, columns].index_add_(0, rows.token_of[part], term)

    def _several_tiles(self, num_pairs: int, most: int) -> Iterator[Tile]:
        for pairs in self.rows.tiles(most):
            yield Tile(self.rows.tile(pairs), pairs, pairs.stop == num_pairs)

    @cached_property
    def _pair_weights(self) -> Tensor:
        """Return the router's weights in the order of the sorted pairs: [tokens * k] float32."""
        weights = torch.empty_like(self._routing.weights).flatten()
        weights[self.rows.part_of.flatten()] = self._routing.weights.flatten()
        return weights
