"""Planned, divided and without any plan: the same bits, for every family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from inside import engine_of
from poison import PoisonedWorkspace
from torch import Tensor

from lowtide.compute import Compute
from lowtide.core import Step, StepKind, align_up
from lowtide.decode.logits import LOGIT_ROWS
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.running.engine import Engine
from lowtide.families import families
from lowtide.kernels.row_statistics import Guidance, Wanted
from lowtide.layers.batch import Batch, Segment
from lowtide.llm import LLM
from lowtide.memory.arena import Arena
from lowtide.memory.chunking import OPERATOR_TILES, Counts, LogitNeeds, rows_together
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.states import StateStore
from lowtide.memory.transient_kv import TransientKV
from lowtide.memory.workspace import Buffers, Workspace
from lowtide.model_writing.synth import synth

STEP = Step(StepKind.DENOISE, 0)
ALL_WANTED = Wanted(second=True, entropy=True)
ASKED = tuple(LogitNeeds(second=True, entropy=True, is_guided=guided) for guided in (False, True))


class Eager:
    """Without a plan: every buffer has memory of its own, every operator takes all rows at once."""

    state = None

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def take_all(self, *wanted: tuple[str, tuple[int, ...], torch.dtype]) -> list[Tensor]:
        return [self.take(*each) for each in wanted]

    def give_back(self, *buffers: Tensor) -> None: ...

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, counts: Counts) -> None: ...

    def reset(self) -> None: ...

    def library(self, name: str, num_bytes: int) -> None: ...

    def together(self, operator: str, num_rows: int) -> int:
        return rows_together(num_rows, OPERATOR_TILES[operator], 1)


@pytest.fixture(scope="module", params=sorted(families()))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("bits") / request.param
    with LLM(synth(request.param, "tiny", folder, seed=3), context=64) as llm:
        yield llm


def outputs(
    engine: Engine, buffers: Buffers, lengths: Sequence[int], rows: Tensor, is_block: bool
) -> list[Tensor]:
    """Hidden states of sequences of one pass, logits and statistics of some of its rows."""
    num_tokens = sum(align_up(length, GRANULE_TOKENS) for length in lengths)
    context, dtype = engine.planner.memory.context, engine.kv_cache.dtype
    shape, layout, states = context.kv_shape.at(num_tokens), context.state_layout(dtype), None
    if layout is not None:
        states = StateStore(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    cache = TransientKV(shape, dtype)
    if context.keeps_keys:
        storage = [torch.zeros(group, dtype=dtype) for group in shape.groups]
        cache = KVCache(storage, places=shape.places, states=states)
    config, own = engine.model.config, engine.model
    compute = Compute(engine.executor, own.compute.kernels, buffers)
    model = families()[config.family].model()(config, own.weights, engine.experts, cache, compute)
    segments, positions, start = [], [], 0
    for length in lengths:
        kv = cache.allocate(length)
        block_length = length if is_block else 1
        segments.append(Segment(start, start + length, 0, block_length, kv))
        positions += range(length)
        start += length
    ids = torch.arange(start) * 7 % 50
    batch = Batch(ids, torch.tensor(positions), tuple(segments), STEP)
    with engine.executor.in_charge(), torch.inference_mode():
        found = [model.forward(batch).clone()]
        if start <= MAX_PASS_ROWS:
            found.append(model.logits(found[0][rows[:LOGIT_ROWS]]).clone())
        if not config.decoding.keeps_keys:
            guidance = Guidance(rows.flip(0), torch.full((len(rows),), 1.5))
            for each in (None, guidance):
                statistics = model.row_statistics(found[0], rows, ALL_WANTED, each)
                found += [value.clone() for value in statistics if value is not None]
    return found


def check_same(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert not other.isnan().any() and torch.equal(one, other)


@st.composite
def passes(draw: st.DrawFn, most: int) -> tuple[list[int], Tensor]:
    """Lengths of one or two sequences, and which of their rows are masked."""
    lengths = draw(st.lists(st.integers(1, most // 2), min_size=1, max_size=2))
    masks = np.random.default_rng(draw(st.integers(0, 999)))
    share = draw(st.sampled_from([0.01, 0.5, 1.0]))
    rows = np.flatnonzero(masks.random(sum(lengths)) < share)
    return lengths, torch.from_numpy(rows if len(rows) else np.arange(1))


@examples(3)
@given(
    drawn=passes(2600),
    share=st.floats(0, 1),
    chunks=st.fixed_dictionaries({name: st.integers(1, 6) for name in OPERATOR_TILES}),
)
def test_long_passes_of_any_chunks_have_the_bits_of_those_without_a_plan(
    llm: LLM, drawn: tuple[list[int], Tensor], share: float, chunks: dict[str, int]
) -> None:
    """The plan has a share of the whole pass's bytes, and each operator any number of chunks.

    Memory holds NaN wherever nothing is alive.
    """
    engine = engine_of(llm)
    if engine.model.config.family == "gpt_oss" or engine.model.config.has_states:
        return  # windows and states are of causal passes, of a tile at most
    lengths, rows = drawn
    longest = max(lengths)
    asked = () if engine.model.config.decoding.keeps_keys else ASKED
    counts = Counts(sum(lengths), longest, longest, len(rows), asked)
    planner = planner_of(engine)
    expected = outputs(engine, Eager(), lengths, rows, is_block=True)
    least, whole = planner.least_bytes(counts), planner.whole_bytes(counts)
    plan = planner.plan(counts, least + int(share * (whole - least)))
    planned = PoisonedWorkspace(Arena(plan.placement.arena_bytes).bytes)
    planned.adopt(plan.placement, plan.chunks)
    check_same(expected, outputs(engine, planned, lengths, rows, is_block=True))
    divided = Workspace(Arena(2 * whole).bytes)
    divided.adopt(divided.plan, chunks)
    check_same(expected, outputs(engine, divided, lengths, rows, is_block=True))


_planners: dict[int, PassPlanner] = {}


def planner_of(engine: Engine) -> PassPlanner:
    """Made once for each model, since it is not what is tested."""
    if id(engine) not in _planners:
        _planners[id(engine)] = engine.planner.plan_long_passes()
    return _planners[id(engine)]


@examples(4)
@given(drawn=passes(MAX_PASS_ROWS), is_block=st.booleans())
def test_short_passes_have_the_bits_of_those_without_a_plan(
    llm: LLM, drawn: tuple[list[int], Tensor], is_block: bool
) -> None:
    """Causal rows and blocks, in the workspace that the engine itself has planned."""
    engine = engine_of(llm)
    lengths, rows = drawn
    config = engine.model.config
    is_block = not config.decoding.keeps_keys or (is_block and not config.decoding.writes_in_order)
    expected = outputs(engine, Eager(), lengths, rows, is_block)
    placement = engine.planner.registrar(MAX_PASS_ROWS).graph.placement
    planned = PoisonedWorkspace(Arena(placement.arena_bytes).bytes, placement)
    check_same(expected, outputs(engine, planned, lengths, rows, is_block))
