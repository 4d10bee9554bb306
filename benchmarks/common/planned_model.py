"""lowtide's own step: a loaded model whose workspace follows a plan that can be chosen.

A pass of more than 512 rows; the step is a forward pass and the statistics of the rows that may
change. Other forms of the step, for an ablation, are planned and run in the same way.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.masked_sides import canvas, layers_only
from lowtide.compute import Compute
from lowtide.core import Step, StepKind, align_up
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.facts import MemoryFacts
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.planning.planner import Planner
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.wiring import load
from lowtide.kernels.row_statistics import Form, Wanted
from lowtide.layers.batch import Batch, Segment
from lowtide.memory.arena import Arena
from lowtide.memory.chunking import OPERATOR_TILES, Counts, LogitNeeds
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVRange
from lowtide.memory.pass_planner import PassPlan
from lowtide.memory.template import bounds
from lowtide.memory.transient_kv import TransientKV
from lowtide.memory.workspace import Workspace

LEAST_TOKENS = 640
"""A pass of so many rows is divided into tiles."""

UNDIVIDED = dict.fromkeys(OPERATOR_TILES, 1)
"""Chunk counts where every operator takes all of its rows together."""

_ASKED = LogitNeeds()
"""The arg-max and its probability alone."""

_OPENED_TOKENS = 64
"""Context that the engine itself is opened for: its own workspace is never used."""


class HeadForm(enum.Enum):
    """Whose logits exist together, at temperature 0. What is read of them is the same."""

    FUSED = "fused"  # of no rows: tiles only
    MASKED = "masked"  # those of the rows that are read, as in Mosaic
    ALL = "all"  # those of every row of a pass, as published decoders have it

    @property
    def of_rows(self) -> Form:
        """Form in which the logits of given rows are computed."""
        return Form.FUSED if self is HeadForm.FUSED else Form.MATERIALISED


class StepModel:
    """Model and planner of steps of any length."""

    def __init__(
        self, folder: Path, num_layers: int | None = None, form: HeadForm = HeadForm.FUSED
    ) -> None:
        """num_layers: fewer than the checkpoint has. form: which logits exist in a step."""
        overrides = {} if num_layers is None else layers_only(folder, num_layers)
        options = EngineConfig(
            context=_OPENED_TOKENS,
            device="cpu",
            config_overrides=overrides,
        )
        self.opened = open_model(folder, options)
        self.form = form
        opened = self.opened
        planner = Planner.of(opened.facts.config, opened.memory, opened.options.asked)
        self.planner = planner.plan_long_passes(form.of_rows)
        self.template = self.planner.forward.joined(self.planner.head_of(_ASKED))

    def counts(self, num_tokens: int, num_masked: int) -> Counts:
        return Counts(num_tokens, num_tokens, num_tokens, num_masked, (_ASKED,))

    def least_plan(self, num_tokens: int, num_masked: int) -> PassPlan:
        """Plan a step with every operator divided as far as possible."""
        counts = self.counts(num_tokens, num_masked)
        return self.planner.plan(counts, self.planner.least_bytes(counts))

    def plan(self, num_tokens: int, num_masked: int, free_bytes: int) -> PassPlan:
        """Plan a step with as few chunks as fit."""
        return self.planner.plan(self.counts(num_tokens, num_masked), free_bytes)

    def plan_of(self, num_tokens: int, num_masked: int, chunks: Mapping[str, int]) -> PassPlan:
        """Plan a step with these chunk counts, whatever memory it takes."""
        counts = self.counts(num_tokens, num_masked)
        graph = self.template.at(bounds(counts, chunks))
        return PassPlan(counts, chunks, graph.placement, graph.library_bytes, "")

    def longest(self, free_bytes: int, num_masked_of: Callable[[int], int], limit: int) -> int:
        """The longest sequence whose step fits, however its operators are divided."""

        def least_bytes(num_tokens: int) -> int:
            return self.planner.least_bytes(self.counts(num_tokens, num_masked_of(num_tokens)))

        return bisect_right(range(1, limit + 1), free_bytes, key=least_bytes)

    def longest_whole(
        self, free_bytes: int, num_masked_of: Callable[[int], int], limit: int
    ) -> int:
        """The longest sequence whose step fits with every operator undivided; 0 without one."""
        lengths = range(LEAST_TOKENS, limit)

        def needed_bytes(num_tokens: int) -> int:
            return self.plan_of(num_tokens, num_masked_of(num_tokens), UNDIVIDED).needed_bytes

        place = bisect_right(lengths, free_bytes, key=needed_bytes)
        return lengths[place - 1] if place else 0

    @contextmanager
    def loaded(self) -> Iterator[Engine]:
        """Yield the engine with its weights in memory."""
        with closing(load(self.opened, make_plan(self.opened))) as engine:
            yield engine


@dataclass
class PlannedStep:
    """Steps of one length by one plan, over a loaded engine's weights."""

    engine: Engine
    plan: PassPlan
    form: HeadForm
    make_workspace: Callable[[Tensor], Workspace] = Workspace
    num_layers: int | None = None  # fewer than the engine has
    arena: Arena | None = None  # by default one of its own

    def __post_init__(self) -> None:
        config = self.engine.model.config
        if self.num_layers is not None:
            config = config.first_layers(self.num_layers)
        num_tokens = self.plan.counts.tokens
        self.memory = self.arena or Arena(self.plan.placement.arena_bytes)
        self.workspace = self.make_workspace(self.memory.bytes)
        self.workspace.adopt(self.plan.placement, self.plan.chunks)
        kv_cache = _kv_cache(self.engine.planner.memory, num_tokens)
        compute = Compute(self.engine.executor, self.engine.kernels, self.workspace)
        self.model = type(self.engine.model)(
            config, self.engine.model.weights, self.engine.experts, kv_cache, compute
        )
        self.token_ids = canvas(config, num_tokens, self.plan.counts.logit_rows)
        self._batch = _batch(self.token_ids, kv_cache.allocate(num_tokens))
        first = num_tokens - self.plan.counts.logit_rows
        self._rows = (torch.arange(first, num_tokens) - config.decoding.logits_shift).clamp_(min=0)

    def run(self) -> tuple[Tensor, Tensor]:
        """Tokens [masked] and their probabilities [masked]."""
        with self.engine.executor.in_charge():
            return self._choose(self.model.forward(self._batch))

    def head_alone(self) -> Callable[[], object]:
        """Return a call that reads the logits once more, after a step."""
        with self.engine.executor.in_charge():
            hidden = self.model.forward(self._batch)

        def run() -> None:
            with self.engine.executor.in_charge():
                self._choose(hidden)

        return run

    def seconds(self) -> float:
        start_s = time.perf_counter()
        self.run()
        return time.perf_counter() - start_s

    def _choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model.row_statistics(hidden, self._rows, Wanted(), None, self.form.of_rows)
        return found.best.clone(), found.probability.clone()


def _batch(token_ids: Tensor, kv: KVRange) -> Batch:
    num_rows = token_ids.shape[0]
    segment = Segment(0, num_rows, 0, num_rows, kv)
    step = Step(StepKind.DENOISE, 0)
    return Batch(token_ids, torch.arange(num_rows), (segment,), step)


def _kv_cache(memory: MemoryFacts, num_tokens: int) -> TransientKV:
    rounded = align_up(num_tokens, GRANULE_TOKENS)
    return TransientKV(memory.context.kv_shape.at(rounded), memory.dtype)
