"""The graph of a pass, its places in one range, and that a pass touches nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exact_offsets import least_arena_bytes
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from inside import engine_of
from poison import PoisonedWorkspace
from torch import Tensor
from whole import planner_of

from lowtide.compute import Compute
from lowtide.core import ALIGNMENT, Step, StepKind, align_up
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import InternalError, UnsupportedError
from lowtide.families import families
from lowtide.kernels.row_statistics import Guidance, Wanted
from lowtide.layers.batch import Batch, Segment
from lowtide.llm import LLM
from lowtide.memory.arena import Arena
from lowtide.memory.kv_cache import cache_over
from lowtide.memory.planner import (
    ArenaPlaces,
    Graph,
    Moment,
    Place,
    Transient,
    first_fit,
    lowest_gap,
)
from lowtide.memory.states import StateStore
from lowtide.memory.transient_kv import TransientKV
from lowtide.memory.workspace import Buffers, Registrar, Workspace
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Decoder

takes = st.tuples(st.just("take"), st.integers(0, 700))
returns = st.tuples(st.just("give back"), st.integers(0, 5))
libraries = st.tuples(st.just("library"), st.integers(0, 900))
steps = st.one_of(takes, takes, returns, libraries)
programs = st.recursive(
    st.lists(steps, max_size=4),
    lambda inner: st.lists(st.one_of(steps, st.tuples(st.just("scope"), inner)), max_size=5),
    max_leaves=14,
)


def run(program: list[Any], buffers: Buffers, alive: list[Tensor], written: list[int]) -> None:
    """A made-up pass: what is alive keeps what was written to it."""
    for number, (kind, argument) in enumerate(program):
        if kind == "take":
            tensor = buffers.take(f"t{number}", (argument,), torch.uint8)
            tensor.fill_(len(written) % 200)
            alive.append(tensor)
            written.append(len(written) % 200)
        elif kind == "give back" and argument < len(alive):
            buffers.give_back(alive.pop(-1 - argument))
            written.pop(-1 - argument)
        elif kind == "library":
            buffers.library("l", argument)
        elif kind == "scope":
            before = len(alive)
            with buffers.scope():
                run(argument, buffers, [], [])
            assert len(alive) == before
        for tensor, value in zip(alive, written, strict=True):
            assert tensor.is_meta or bool((tensor == value).all())


def graph_of(program: list[Any]) -> Graph:
    registrar = Registrar()
    run(program, registrar, [], [])
    return registrar.graph


@given(
    st.lists(st.builds(Place, st.integers(0, 40), st.integers(1, 40)), max_size=8),
    st.integers(1, 30),
)
@example([Place(0, 20), Place(5, 3)], 4)
def test_the_lowest_gap_is_free_and_none_is_lower(taken: list[Place], num_bytes: int) -> None:
    bytes_taken = {byte for place in taken for byte in range(place.start, place.stop)}
    starts = [
        start for start in range(90) if bytes_taken.isdisjoint(range(start, start + num_bytes))
    ]
    assert lowest_gap(taken, num_bytes) == starts[0]


@given(programs)
def test_what_is_alive_together_never_overlaps(program: list[Any]) -> None:
    graph = graph_of(program)
    places = [graph.placement.places[transient.path] for transient in graph.transients]
    for transient, place in zip(graph.transients, places, strict=True):
        assert place.start % ALIGNMENT == 0
        assert place.num_bytes == align_up(transient.num_bytes)
        others = [places[i] for i in transient.beside]
        assert all(one.stop <= place.start or place.stop <= one.start for one in others)
    assert max((place.stop for place in places), default=0) == graph.placement.arena_bytes
    assert graph.least_bytes <= graph.placement.arena_bytes
    parts = sum(num_bytes for _, num_bytes in graph.needed_parts)
    assert parts == graph.least_bytes + graph.library_bytes


@given(programs)
def test_a_pass_runs_in_its_plan_alone(program: list[Any]) -> None:
    """Whatever dies is poisoned: it was not over anything that lives."""
    placement = graph_of(program).placement
    arena = Arena(placement.arena_bytes).bytes
    workspace = PoisonedWorkspace(arena, placement)
    run(program, workspace, [], [])
    workspace.reset()
    assert workspace.state.top == 0
    assert bool((arena == 0xFF).all())
    run(program, Workspace(arena, placement), [], [])


@examples(40)
@given(programs)
def test_first_fit_is_near_the_least_range(program: list[Any]) -> None:
    graph = graph_of(program)
    if len(graph.transients) <= 7:
        least = least_arena_bytes(graph)
        assert graph.least_bytes <= least <= graph.placement.arena_bytes <= 1.5 * least


def test_the_solver_finds_what_an_order_of_first_fit_misses() -> None:
    """A chain whose ends come first, and lie so that its middle needs a third place."""
    transients = tuple(
        Transient((name,), ALIGNMENT, (i - 1,) if i else ()) for i, name in enumerate("abcd")
    )
    moments = tuple(Moment((i, i + 1), ()) for i in range(3))
    graph = Graph(transients, moments)
    assert first_fit(graph, [0, 3, 1, 2]).arena_bytes == 3 * ALIGNMENT
    assert least_arena_bytes(graph) == graph.least_bytes == 2 * ALIGNMENT


def test_a_buffer_that_was_given_back_makes_room() -> None:
    workspace = Workspace(Arena(3 * ALIGNMENT).bytes)
    first = workspace.take("first", (ALIGNMENT,), torch.uint8)
    with workspace.scope():
        second = workspace.take("second", (ALIGNMENT,), torch.uint8)
        workspace.give_back(first, torch.empty(3))
        third = workspace.take("third", (ALIGNMENT,), torch.uint8)
        assert third.data_ptr() == first.data_ptr()
        assert second.data_ptr() == first.data_ptr() + ALIGNMENT
    assert workspace.take("fourth", (1,), torch.uint8).data_ptr() == second.data_ptr()


def test_what_the_plan_does_not_know_lies_beside_what_is_alive() -> None:
    places = {("a",): Place(128, 64), ("a", "b"): Place(0, 64)}
    arena = Arena(512).bytes
    workspace, start = PoisonedWorkspace(arena, ArenaPlaces(places, 192)), arena.data_ptr()
    a = workspace.take("a", (64,), torch.uint8)
    assert a.data_ptr() == start + 128
    with workspace.scope():
        assert workspace.take("b", (60,), torch.uint8).data_ptr() == start
    with workspace.scope():
        assert workspace.take("b", (65,), torch.uint8).data_ptr() == start, "larger than planned"
        assert workspace.take("c", (65,), torch.uint8).data_ptr() == start + 192
    with pytest.raises(InternalError, match=r"d \[512\] ends at 704 bytes, past the planned 512"):
        workspace.take("d", (512,), torch.uint8)


def test_poison_finds_an_overlap_and_a_late_reader() -> None:
    places = {("a",): Place(0, 64), ("a", "b"): Place(0, 64)}
    workspace = PoisonedWorkspace(Arena(512).bytes, ArenaPlaces(places, 64))
    late = workspace.take("a", (4,), torch.float32).fill_(1)
    with pytest.raises(InternalError, match="b at .* is over a at"):
        workspace.take("b", (4,), torch.float32)
    workspace.reset()
    assert bool(late.isnan().all())


# Of the models


@pytest.fixture(scope="module", params=sorted(families()))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(request.param, "tiny", tmp_path_factory.mktemp("model") / request.param, seed=1)


def test_first_fit_needs_no_more_than_is_alive_together_on_the_models(folder: Path) -> None:
    for context in (64, 4096):
        planner = planner_of(open_model(folder, EngineConfig(context=context)))
        graph = planner.registrar().graph
        assert graph.placement.arena_bytes == graph.least_bytes


def test_passes_take_no_more_of_the_workspace_in_other_formats(folder: Path) -> None:
    """So a plan by format counts them once."""
    own = planner_of(open_model(folder, EngineConfig(context=64)))
    for format in ("q8", "q4"):
        try:
            opened = open_model(folder, EngineConfig(context=64, format=format))
        except UnsupportedError:  # weights that are not made into it
            continue
        alone = planner_of(opened)
        assert alone.workspace_bytes() == own.workspace_bytes()
        assert alone.registrar().graph.least_bytes == own.registrar().graph.least_bytes


def test_the_longest_pass_is_as_well_placed(folder: Path) -> None:
    planner = planner_of(open_model(folder, EngineConfig(context=64)))
    config = planner.config  # windows and states are of causal passes alone
    if config.family != "gpt_oss" and not config.has_states:
        graph = planner.registrar(1111).graph
        assert graph.placement.arena_bytes == graph.least_bytes


def statistics(model: Decoder, hidden: Tensor) -> list[Tensor]:
    """All that can be asked of all rows."""
    rows = torch.arange(len(hidden))
    guidance = Guidance(rows.flip(0), torch.full((len(rows),), 1.5))
    found = model.row_statistics(hidden, rows, Wanted(second=True, entropy=True), guidance)
    return [value.clone() for value in found if value is not None]


KEPT = ("norm ", "rotary ")
"""Buffers of the reference kernels' norms and rotation, by the beginnings of their names."""


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_pass_touches_what_was_planned_and_has_the_same_bits(folder: Path, kernels: str) -> None:
    """As long as a pass can be; then some single tokens, or a shorter sequence.

    Planned is what the reference kernels take: what compiled ones keep in registers between two
    products is planned and may stay untouched.
    """
    with LLM(folder, context=768, kernels=kernels) as llm:
        engine = engine_of(llm)
        config, placement = engine.model.config, engine.planner.registrar().graph.placement
        poisoned = PoisonedWorkspace(Arena(placement.arena_bytes).bytes, placement)
        context, dtype = engine.planner.memory.context, engine.kv_cache.dtype
        kv_shape, layout, states = context.kv_shape, context.state_layout(dtype), None
        if layout is not None:
            states = StateStore(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
        storage = [torch.zeros(each, dtype=dtype) for each in kv_shape.storage]
        cache = cache_over(kv_shape, storage, states=states)
        if not context.keeps_keys:
            cache = TransientKV(kv_shape, dtype)
        compute = Compute(engine.executor, engine.model.compute.kernels, poisoned)
        weights = engine.model.weights
        model = families()[config.family].model()(config, weights, engine.experts, cache, compute)
        own, other = (kv_cache.allocate(768) for kv_cache in (engine.kv_cache, cache))
        passes = [(0, MAX_PASS_ROWS), (512, 655), (655, 656), (656, 657)]
        if not config.decoding.keeps_keys:
            passes = [(0, 768), (0, 527), (0, 3)]
        with engine.executor.in_charge(), torch.inference_mode():
            for start, stop in passes:
                answers = []
                for runs, kv in ((engine.model, own), (model, other)):
                    ids = torch.arange(start, stop) % 50
                    block_length = 1 if start % 2 else config.decoding.block_length
                    block_length = block_length if config.decoding.keeps_keys else stop
                    segment = Segment(0, stop - start, start, block_length, kv)
                    step = Step(StepKind.PREFILL, 0)
                    hidden = runs.forward(Batch(ids, ids, (segment,), step))
                    answers.append([hidden.clone(), runs.logits(hidden[:20]).clone()])
                    if not config.decoding.keeps_keys:
                        answers[-1] += statistics(runs, hidden)
                    runs.kv_cache.end_pass([kv])
                for expected, found in zip(*answers, strict=True):
                    assert torch.equal(expected, found) and not found.isnan().any()
        untouched_bytes = placement.arena_bytes - poisoned.touched_bytes
        of_rows = [place for name, place in placement.places.items() if name[-1].startswith(KEPT)]
        spared_bytes = sum(place.num_bytes for place in of_rows) if kernels == "auto" else 0
        assert 0 <= untouched_bytes < ALIGNMENT + spared_bytes
