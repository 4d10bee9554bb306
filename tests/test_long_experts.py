"""Experts of passes longer than a tile: the bits of one long buffer, whatever is where."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from device_faults import failing_copies, failing_reads
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from inside import engine_of
from test_hybrid import FAST, Case, check_idle, presets, shares
from test_link import Machine
from test_product_threads import EXPERT, WORKER, Told
from test_runtime import (
    EXECUTORS,
    POLICIES,
    POOL,
    SHAPE,
    SMALL_TILE,
    WEIGHTS,
    Experts,
    Rig,
    StepInput,
    fill,
    in_one_buffer,
    make_step,
    tile_of,
)
from torch import Tensor

from lowtide.core import Moves, Step, StepKind
from lowtide.errors import DeviceError, PlanError, StorageError
from lowtide.experts.link import Arrival, Link
from lowtide.experts.registrar import ExpertRegistrar
from lowtide.experts.rows import ExpertRows, LayerCall, Routing, row_pieces
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import REFERENCE
from lowtide.llm import LLM
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Registrar, Workspace
from lowtide.policies.decision import Policies
from lowtide.policies.presets import fetches_all
from lowtide.threads.executor import Executor, HostExecutor

DTYPES = [torch.float32, torch.bfloat16]


def long_steps(
    numbers: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32
) -> list[StepInput]:
    return [make_step(*number[:2], i, number[2], dtype) for i, number in enumerate(numbers)]


def numbers(least: int, most: int, max_size: int = 4) -> st.SearchStrategy:
    each = st.tuples(
        st.integers(0, 10**6), st.integers(0, SHAPE.num_layers - 1), st.integers(least, most)
    )
    return st.lists(each, min_size=1, max_size=max_size)


capacities = st.lists(
    st.integers(0, SHAPE.num_experts), min_size=SHAPE.num_layers, max_size=SHAPE.num_layers
)


@pytest.mark.invariant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["auto", "reference"])
@examples(5)
@given(
    calls=numbers(513, 1400, 2),
    capacity=capacities,
    num_staging=st.integers(1, 7),
    policy=st.sampled_from(POLICIES),
    executor=st.sampled_from(EXECUTORS),
)
def test_long_passes_have_the_bits_of_one_long_buffer(
    dtype: torch.dtype,
    kind: str,
    calls: list[tuple[int, int, int]],
    capacity: list[int],
    num_staging: int,
    policy: str,
    executor: Executor,
) -> None:
    kernels = choose_kernels(kind, dtype)
    rig = Rig(policy, capacity, dtype, num_staging, executor=executor, kernels=kernels)
    for call in long_steps(calls, dtype):
        assert torch.equal(rig.run(call), in_one_buffer(call, kernels, 512))
        rig.check()


@pytest.mark.invariant
@pytest.mark.parametrize("dtype", DTYPES)
@examples(40)
@given(
    calls=numbers(1, 200, 6),
    capacity=capacities,
    num_staging=st.integers(1, 7),
    policy=st.sampled_from(POLICIES),
    executor=st.sampled_from(EXECUTORS),
    seed=st.integers(0, 10**6),
)
def test_short_and_long_passes_in_turn(
    dtype: torch.dtype,
    calls: list[tuple[int, int, int]],
    capacity: list[int],
    num_staging: int,
    policy: str,
    executor: Executor,
    seed: int,
) -> None:
    kernels = choose_kernels("auto", dtype)
    with tile_of(SMALL_TILE):
        rig = Rig(
            policy, capacity, dtype, num_staging, executor=executor, kernels=kernels, seed=seed
        )
        for call in long_steps(calls, dtype):
            assert torch.equal(rig.run(call), in_one_buffer(call, kernels, SMALL_TILE))
            rig.check()


def test_residents_of_a_tile_are_computed_while_others_are_read() -> None:
    """Expert 0 has been read once expert 1, which is resident, is computed."""
    rig = Rig("static", [1, 6], executor=POOL)
    rig.host.keep(0, np.empty(0, np.int64))
    rig.host.load([np.array([1]), np.arange(6)], lambda *_: None)
    is_computed, weights = threading.Event(), WEIGHTS[torch.float32]
    resident = rig.slots.weights(0, rig.host.ledger.slot_of(0, 1))

    def read(expert: int, slot: int) -> int:
        if expert == 0:
            assert is_computed.wait(60)
        return fill(rig.slots, slot, weights[0, expert])

    def product(x: Tensor, own: ExpertWeights, gate: Tensor, up: Tensor, out: Tensor) -> None:
        REFERENCE.gated_mlp(x, own, gate, up, out)
        if own is resident:
            is_computed.set()

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.transfer, "start", lambda _, *read_of: pool.submit(read, *read_of))
        patch.setattr(Experts, "product", product)
        call = make_step(1, 0, 0, 33, torch.float32)
        with tile_of(SMALL_TILE):
            assert torch.equal(rig.run(call), in_one_buffer(call, REFERENCE, SMALL_TILE))
    rig.check()


def test_admitted_experts_make_room_where_those_they_replace_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts 0 and 1 replace 4 and 5, whose rows are in the last of several tiles.

    One slot is left for all others.
    """
    rig = Rig("static", [2, 0], num_staging=1)
    rig.host.keep(0, np.empty(0, np.int64))
    rig.host.load([np.array([4, 5]), np.empty(0, np.int64)], lambda *_: None)
    moves = Moves(np.array([0, 1]), np.array([4, 5]))
    monkeypatch.setattr(Policies, "moves", lambda *_: moves)
    for buffers in (Registrar, Workspace):
        monkeypatch.setattr(buffers, "together", lambda *_: SMALL_TILE)
    call = make_step(2, 0, 1, 100, torch.float32)
    with tile_of(SMALL_TILE):
        assert torch.equal(rig.run(call), in_one_buffer(call, REFERENCE, SMALL_TILE))
    rig.check()
    stats = rig.host.stats
    assert rig.host.ledger.num_resident == 0 and stats.num_evicted == 2 + 2 + 2


def test_products_of_a_long_pass_have_an_experts_threads() -> None:
    told, executor = Told(), HostExecutor(2, num_cores=4)
    try:
        with executor.in_charge():
            rig = Rig("lru", [2, 3], executor=executor, kernels=told.kernels())
            rig.run(make_step(1, 0, 0, 700, torch.float32))
    finally:
        executor.close()
    assert told.of(EXPERT) == {WORKER: {2}}


@given(st.integers(0, 5000))
def test_pieces_of_an_experts_rows(num_rows: int) -> None:
    pieces = list(row_pieces(num_rows))
    assert list(itertools.chain(*(range(p.start, p.stop) for p in pieces))) == list(range(num_rows))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert all(size <= 512 for size in sizes) and all(size % 16 == 0 for size in sizes[:-1])
    assert len(sizes) <= 1 or min(sizes) >= 16
    for i in range(len(sizes)):
        later = [p.stop - p.start for p in row_pieces(sum(sizes[i:]))]
        sooner = [p.stop - p.start for p in row_pieces(sum(sizes[: i + 1]))]
        assert later == sizes[i:] and sooner == sizes[: i + 1], "a tile's rows are divided alike"


@examples(50)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.integers(32, 200))
def test_tiles_hold_whole_pieces(counts: list[int], max_pairs: int) -> None:
    experts = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)]).long()
    rows = ExpertRows(REFERENCE.sort_pairs(experts[:, None], len(counts)))
    with tile_of(SMALL_TILE):
        found: list[tuple[int, int, int]] = []
        stop = 0
        for pairs in rows.tiles(max_pairs):
            assert pairs.start == stop and 0 < pairs.stop - stop <= max_pairs
            stop, tile = pairs.stop, rows.tile(pairs)
            assert tile.counts.sum() == len(tile.token_of) == pairs.stop - pairs.start
            for expert in tile.demanded:
                pieces = [
                    (p.start + pairs.start, p.stop + pairs.start) for p in tile.pieces(expert)
                ]
                found += [(expert, *piece) for piece in pieces]
        assert stop == sum(counts)
        expected = [(e, p.start, p.stop) for e in rows.demanded for p in rows.pieces(e)]
        assert found == expected


@examples(20)
@given(st.integers(1, 600), st.integers(1, 4), st.integers(0, 99))
def test_pairs_are_sorted_at_the_host_as_by_kernels(num_tokens: int, k: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_tokens, 9, generator=draw).topk(k).indices.sort().values
    found, expected = ExpertRows.at_host(experts, 9), ExpertRows(REFERENCE.sort_pairs(experts, 9))
    assert torch.equal(found.token_of, expected.token_of)
    assert torch.equal(found.counts, expected.counts)
    assert found.bounds.tolist() == expected.bounds.tolist()


# Beside a device


@examples(20)
@given(st.integers(0, 2**32))
def test_a_device_fetches_an_expert_once_in_a_long_pass(seed: int) -> None:
    """However many tiles have its rows."""
    with tile_of(SMALL_TILE):
        machine = Machine(seed)
        machine.most_tokens = 150
        machine.preload()
        fetched: list[float] = []  # whose bytes
        fetch = Link.fetch

        def noted(link: Link, host_slots: Sequence[int]) -> list[Arrival]:
            fetched.extend(float(machine.host.slots.image(slot)) for slot in host_slots)
            return fetch(link, host_slots)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Link, "fetch", noted)
            for layer in range(machine.shape.num_layers):
                fetched.clear()
                machine.run_layer(layer)
                assert len(fetched) == len(set(fetched))


class LongCase(Case):
    """A model's experts, and what those of every layer make of long passes on the CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__("llada2", folder)
        with LLM(self.folder, device="cpu", context=256) as llm:
            self.outs = self.run(llm)

    def run(self, llm: LLM) -> list[Tensor]:
        """A long pass through all layers, a short one, and a long one again."""
        with tile_of(SMALL_TILE):
            return self._run(llm)

    def _run(self, llm: LLM) -> list[Tensor]:
        engine, outs = engine_of(llm), []
        shape, dtype = engine.model.config.moe_shape, engine.kv_cache.dtype
        for index, num_tokens in enumerate((260, 20, 90)):
            draw = torch.Generator().manual_seed(index)
            for layer in range(shape.num_layers):
                x = torch.randn(num_tokens, shape.hidden_size, generator=draw).to(dtype)
                rank = torch.rand(num_tokens, shape.num_experts, generator=draw)
                rank += 2 * torch.rand(shape.num_experts, generator=draw)
                experts = rank.topk(shape.num_experts_per_token).indices.sort().values
                routing = Routing(experts, torch.rand(experts.shape, generator=draw))
                call = (layer, x, routing, Step(StepKind.DENOISE, index))
                registrar, out = Registrar(), torch.empty(x.shape, dtype=torch.float32)
                ExpertRegistrar(shape).forward(LayerCall(*call, registrar, out))
                workspace = Workspace(Arena(registrar.arena_bytes).bytes)
                with engine.executor.in_charge(), torch.inference_mode():
                    engine.experts.begin_pass(call[3])
                    engine.experts.forward(LayerCall(*call, workspace, out))
                    engine.experts.end_pass()
                outs.append(out)
        return outs

    def check_long(self, llm: LLM) -> None:
        for out, expected in zip(self.run(llm), self.outs, strict=True):
            assert torch.equal(out, expected)
        check_idle(llm)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> LongCase:
    return LongCase(tmp_path_factory.mktemp("long") / "model")


@pytest.mark.invariant
@examples(5)
@given(policy=presets, gpu_share=shares, home_share=shares)
def test_long_passes_have_the_same_bits_on_a_device(
    case: LongCase, policy: str, gpu_share: float, home_share: float
) -> None:
    try:
        llm = case.open(policy, gpu_share, home_share, device_options=FAST)
    except PlanError as error:
        assert fetches_all(policy) and "1 expert slot" in str(error)
        return
    with llm:
        case.check_long(llm)


@pytest.mark.parametrize("policy", ["lowtide", "lru"])
def test_a_long_pass_on_a_device_fails_and_the_next_one_runs(case: LongCase, policy: str) -> None:
    with case.open(policy, 0.3, 0.2) as llm:
        with failing_reads(llm), pytest.raises(StorageError, match="no such sector"):
            case.run(llm)
        with failing_copies(llm), pytest.raises(DeviceError, match="must match the size"):
            case.run(llm)
        case.check_long(llm)
