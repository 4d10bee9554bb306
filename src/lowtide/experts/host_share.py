"""The host's share of one layer: experts computed on threads, in whatever order they come.

The calling thread hands experts over and goes on; threads take what is ready, those first whose
slots others wait for. An expert's outputs replace its inputs, and no two share a row.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import BoolArray
from lowtide.errors import DeviceError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.host_tier import HostTier
from lowtide.experts.rows import ExpertRows
from lowtide.kernels.reference import Kernels
from lowtide.threads.executor import Executor, Work

Leased = Sequence[tuple[int, int]]
"""Experts and the host slots that they lie in, to be given back after their use."""


class HostCompute(NamedTuple):
    """What experts are computed with on the host."""

    executor: Executor
    kernels: Kernels
    at_once: ExpertsAtOnce | None  # several experts of few tokens in one call
    paced: Callable[[Sequence[int], Work], Work]  # tokens of each expert: see `Device.host_work`


class HostBuffers(NamedTuple):
    """Where the host's experts of one layer find their inputs and leave their outputs."""

    parts: Tensor  # [pairs, hidden] in host memory
    gate: Tensor  # [pairs, expert_size] scratch, each expert its own rows
    up: Tensor  # [pairs, expert_size]
    inputs: Tensor | None  # [tokens, hidden]: what `parts` still has to be filled from


class HostShare:
    """Experts of one layer that the host computes; their slots go back to the host tier."""

    def __init__(
        self,
        tier: HostTier,
        layer: int,
        compute: HostCompute,
        rows: ExpertRows,
        buffers: HostBuffers,
    ) -> None:
        self._tier = tier
        self._layer = layer
        self._compute = compute
        self._rows = rows
        self._buffers = buffers
        # With what is to be done when it has ended: its slot is given back.
        self._ready: deque[tuple[Work, Work]] = deque()
        self._working: deque[Future[None]] = deque()
        self._seen_s = perf_counter()  # when an expert's use ended last

    @property
    def is_busy(self) -> bool:
        """Whether something handed over has not ended. Raises what it failed with."""
        while self._working and self._working[0].done():
            self._working.popleft().result()
        return bool(self._working)

    def run_few(self, experts: Leased) -> Leased:
        """Runs those of few tokens now, in one call on this thread; returns the others."""
        few, many = self._divided(experts)
        if few:
            self._run_few(few)
        return many

    def submit_all(self, experts: Leased) -> None:
        """Hands over experts; those of few tokens in one call.

        That call comes last: all cores share it, so it fills the time that the others leave.
        """
        few, many = self._divided(experts)
        self.submit(many)
        if few:
            num_tokens = [self._num_tokens(expert) for expert, _ in few]
            self._start(self._compute.paced(num_tokens, partial(self._run_few, few)))

    def submit(self, experts: Leased) -> None:
        """Hands over experts, each to be run by itself."""
        for expert, slot in experts:
            self._ready.append(self._whole(expert, slot))
        for _ in range(min(len(experts), self._compute.executor.num_threads)):
            self._start(self._run_ready)

    def submit_first(self, expert: int, slot: int) -> None:
        """Hands over one that goes before all others: its slot is wanted."""
        self._ready.appendleft(self._whole(expert, slot))
        self._start(self._run_ready)

    def submit_rows(self, expert: int, slot: int, is_last: bool, is_first: bool = False) -> None:
        """Hands over an expert whose rows threads share, if they are many; `is_last`: these rows
        are its last, and its slot can be given back after them; `is_first`: before all others,
        since its slot is wanted."""
        pieces, num_ended = self._rows.pieces(expert), itertools.count(1)

        def end() -> None:
            if next(num_ended) == len(pieces) and is_last:
                self._tier.give_back(slot)

        add = self._ready.appendleft if is_first else self._ready.append
        for piece in pieces:
            work = partial(self._run, piece, slot)
            num_tokens = piece.stop - piece.start
            add((self._compute.paced([num_tokens], work), end))
            self._start(self._run_ready)

    def wait(self, limit_s: float) -> None:
        """Waits until the oldest work has ended, for `limit_s` at most; raises what it failed
        with."""
        with suppress(TimeoutError):
            self._working[0].result(limit_s)

    def check_progress(self, limit_s: float) -> None:
        """Raises DeviceError when no expert has been finished for `limit_s`."""
        if perf_counter() - self._seen_s > limit_s:
            raise DeviceError(
                f"An expert on the host has not been computed within {limit_s:g} s: a compute "
                "thread hangs or the machine is far too busy."
            )

    def cancel(self) -> None:
        """After a failure: nothing more begins."""
        self._ready.clear()

    def _start(self, work: Work) -> None:
        self._working.append(self._compute.executor.submit(work))

    def _divided(self, experts: Leased) -> tuple[Leased, Leased]:
        """Those that one call takes, and those that it does not."""
        at_once = self._compute.at_once
        if at_once is None or not experts:
            return (), experts
        num_tokens = np.array([self._num_tokens(expert) for expert, _ in experts])
        is_few: BoolArray = at_once.takes_experts(num_tokens)
        pairs = list(zip(experts, is_few.tolist(), strict=True))
        return [e for e, few in pairs if few], [e for e, few in pairs if not few]

    def _num_tokens(self, expert: int) -> int:
        pairs = self._rows.pairs(expert)
        return int(pairs.stop - pairs.start)

    def _whole(self, expert: int, slot: int) -> tuple[Work, Work]:
        pairs = self._rows.pairs(expert)
        paced = self._compute.paced([pairs.stop - pairs.start], partial(self._run, pairs, slot))
        return paced, partial(self._tier.give_back, slot)

    def _run_ready(self) -> None:
        """On a compute thread: runs experts until none is ready."""
        while True:
            try:
                work, end = self._ready.popleft()
            except IndexError:  # another thread took the last one
                return
            work()
            end()
            self._seen_s = perf_counter()

    def _run(self, pairs: slice, slot: int) -> None:
        buffers = self._buffers
        self._gather(pairs)
        # An expert's inputs are not needed once gate and up are computed: the outputs replace them.
        parts, weights = buffers.parts[pairs], self._tier.slots.weights(self._layer, slot)
        gate, up = buffers.gate[pairs], buffers.up[pairs]
        self._compute.kernels.gated_mlp(parts, weights, gate, up, parts)

    def _run_few(self, experts: Leased) -> None:
        for expert, _ in experts:
            self._gather(self._rows.pairs(expert))
        groups = self._rows.groups(*np.array(experts, np.int64).T)
        at_once, buffers = self._compute.at_once, self._buffers
        if at_once is not None:
            at_once.run(groups, buffers.parts, buffers.gate, buffers.up, self._layer)
        for _, slot in experts:
            self._tier.give_back(slot)
        self._seen_s = perf_counter()

    def _gather(self, pairs: slice) -> None:
        """An expert's inputs, where they are not in place yet."""
        inputs = self._buffers.inputs
        if inputs is not None:
            tokens = self._rows.token_of[pairs]
            torch.index_select(inputs, 0, tokens, out=self._buffers.parts[pairs])
