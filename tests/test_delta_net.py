"""The gated delta rule beside its plain definition, and how rows are divided."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from computing import Threads, Watched, on_this_thread, randn
from torch import Tensor

from lowtide.config import DeltaNetSpec
from lowtide.errors import UnsupportedError
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.cpu.variants import num_variants
from lowtide.kernels.operands import DeltaRows, DeltaState, DeltaWeights
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.layers.batch import KVRange, Segment
from lowtide.layers.delta_net import CHUNK, parts_of
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Registrar
from lowtide.threads.executor import InlineExecutor

SPECS = [
    DeltaNetSpec(2, 4, 16, 16, 4),
    DeltaNetSpec(3, 9, 8, 12, 2, is_tiled=True),
    DeltaNetSpec(10, 10, 8, 4, 3),
    DeltaNetSpec(1, 20, 4, 8, 4),
]


class Case(NamedTuple):
    rows: DeltaRows
    weights: DeltaWeights
    state: DeltaState

    @classmethod
    def of(cls, spec: DeltaNetSpec, num_rows: int, dtype: torch.dtype = torch.float32) -> Case:
        matrices = randn(spec.value_heads, spec.key_width, spec.value_width, seed=1)
        weights = DeltaWeights(
            spec,
            randn(spec.channels, 1, spec.kernel, seed=2),
            -randn(spec.value_heads, seed=3).exp(),
            randn(spec.value_heads, seed=4),
        )
        rows = DeltaRows(
            randn(num_rows, spec.channels, seed=5, dtype=dtype),
            randn(num_rows, spec.value_heads, seed=6, dtype=dtype),
            randn(num_rows, spec.value_heads, seed=7, dtype=dtype),
        )
        tail = randn(spec.kernel - 1, spec.channels, seed=8, dtype=dtype)
        return cls(rows, weights, DeltaState(tail, matrices))

    def after(self) -> DeltaState:
        return DeltaState(*(torch.full_like(tensor, torch.nan) for tensor in self.state))

    def out(self) -> Tensor:
        spec = self.weights.spec
        shape = (len(self.rows.mixed), spec.value_heads, spec.value_width)
        return torch.full(shape, torch.nan, dtype=self.rows.mixed.dtype)


def part(rows: DeltaRows, chosen: slice) -> DeltaRows:
    return DeltaRows(*(tensor[chosen] for tensor in rows))


def plain(case: Case) -> tuple[Tensor, Tensor]:
    """Row by row in float64: what each reads, and the matrices after the last."""
    spec = case.weights.spec
    window = torch.cat([case.state.tail, case.rows.mixed]).double()
    conv, state = case.weights.conv[:, 0].double(), case.state.matrices.double()
    outs = []
    for row in range(len(case.rows.mixed)):
        mixed = F.silu((window[row : row + spec.kernel] * conv.T).sum(0))
        query, key, value = mixed.split([spec.key_size, spec.key_size, spec.value_size])
        query, key = (x.view(spec.key_heads, -1) for x in (query, key))
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
        each = spec.value_heads // spec.key_heads
        heads = torch.arange(spec.value_heads)
        key_of = heads % spec.key_heads if spec.is_tiled else heads // each
        query, key = query[key_of] * spec.key_width**-0.5, key[key_of]
        value = value.view(spec.value_heads, -1)
        beta = case.rows.beta[row].double().sigmoid()
        times = F.softplus(case.rows.time[row].double() + case.weights.time_bias.double())
        state = state * (case.weights.decay.double() * times).exp()[:, None, None]
        change = beta[:, None] * (value - torch.einsum("hkv,hk->hv", state, key))
        state = state + key[:, :, None] * change[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, query))
    return torch.stack(outs), state


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 37, CHUNK])
def test_a_chunk_is_its_rows_one_by_one(spec: DeltaNetSpec, num_rows: int) -> None:
    case = Case.of(spec, num_rows)
    expected, matrices = plain(case)
    workspace, after, out = Watched(Arena(16 << 20).bytes), case.after(), case.out()
    REFERENCE.delta_chunk(
        case.rows, case.weights, case.state, after, out, workspace, InlineExecutor().run
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(after.matrices.double(), matrices, atol=2e-5, rtol=1e-5)
    tail = torch.cat([case.state.tail, case.rows.mixed])[num_rows:]
    assert torch.equal(after.tail, tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_follow_each_other_in_place(dtype: torch.dtype) -> None:
    case = Case.of(SPECS[0], 8, dtype)
    expected, matrices = plain(case)
    workspace, after, out = Watched(Arena(16 << 20).bytes), case.after(), case.out()
    before = case.state
    for row in range(8):
        one = slice(row, row + 1)
        REFERENCE.delta_steps(
            part(case.rows, one), case.weights, before, after, out[one], workspace
        )
        before = after
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(after.matrices.double(), matrices, atol=1e-5, rtol=1e-5)


def test_tiled_heads_are_grouped_ones_in_another_order() -> None:
    grouped, tiled = DeltaNetSpec(3, 9, 8, 12, 4), DeltaNetSpec(3, 9, 8, 12, 4, is_tiled=True)
    case = Case.of(grouped, 40)
    order = torch.arange(9).view(3, 3).T.flatten()  # of value heads in the file
    channels = 12 * order[:, None] + torch.arange(12)
    mixed = torch.cat([torch.arange(48), 48 + channels.flatten()])
    turned = Case(
        DeltaRows(case.rows.mixed[:, mixed], case.rows.beta[:, order], case.rows.time[:, order]),
        DeltaWeights(
            tiled,
            case.weights.conv[mixed],
            case.weights.decay[order],
            case.weights.time_bias[order],
        ),
        DeltaState(case.state.tail[:, mixed], case.state.matrices[order]),
    )
    results = []
    for each in (case, turned):
        workspace, after, out = Watched(Arena(16 << 20).bytes), each.after(), each.out()
        REFERENCE.delta_chunk(
            each.rows, each.weights, each.state, after, out, workspace, InlineExecutor().run
        )
        results.append((out, after.matrices))
    torch.testing.assert_close(results[1][0], results[0][0][:, order])
    torch.testing.assert_close(results[1][1], results[0][1][order])


@pytest.mark.invariant
@pytest.mark.parametrize("num_rows", [5, CHUNK])
def test_heads_on_threads_give_the_same_bits(num_rows: int) -> None:
    spec = DeltaNetSpec(8, 32, 32, 16, 4)
    case, found = Case.of(spec, num_rows), []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(3, "", torch.set_num_threads, (1,)) as pool:
            threads = Threads(3, pool)
            for executor in (InlineExecutor(), threads):
                workspace = on_this_thread().workspace
                after, out = case.after(), case.out()
                REFERENCE.delta_chunk(
                    case.rows, case.weights, case.state, after, out, workspace, executor.run
                )
                found.append((out, after.matrices))
            assert threads.num_works == 4
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_chunk_takes_what_was_registered() -> None:
    spec = SPECS[0]
    sizes = []
    for device in ("meta", "cpu"):
        case = Case.of(spec, 30)
        tensors = [
            type(each)(*(x.to(device) if isinstance(x, Tensor) else x for x in each))
            for each in (case.rows, case.weights, case.state, case.after())
        ]
        registrar = Registrar() if device == "meta" else Watched(Arena(16 << 20).bytes)
        rows, weights, state, after = tensors
        out = case.out().to(device)
        run = InlineExecutor().run
        REFERENCE.delta_chunk(rows, weights, state, after, out, registrar, run)
        sizes.append(
            registrar.arena_bytes if isinstance(registrar, Registrar) else registrar.highest
        )
    assert sizes[0] == sizes[1]


def lengths(segment: Segment) -> list[int]:
    return [rows.stop - rows.start for rows in parts_of(segment)]


def test_prompts_are_divided_at_multiples_of_their_positions() -> None:
    kv = KVRange(0, 1024)
    assert lengths(Segment(0, 200, 0, 1, kv)) == [64, 64, 64, 8]
    assert lengths(Segment(3, 103, 50, 1, kv)) == [14, 64, 22]
    assert lengths(Segment(0, 64, 128, 1, kv)) == [64]
    assert lengths(Segment(7, 8, 64, 1, kv)) == [1]
    assert lengths(Segment(0, 5, 62, 1, kv, is_answer=True)) == [5]
    assert lengths(Segment(0, 5, 62, 1, kv)) == [2, 3]
    assert [*parts_of(Segment(3, 20, 60, 1, kv))] == [slice(3, 7), slice(7, 20)]


# Compiled


@pytest.fixture(scope="module")
def variants() -> list[CompiledKernels]:
    """All that this processor can run, from the portable to the best."""
    try:
        library = load_kernels()
    except UnsupportedError as error:
        pytest.skip(f"nothing can be compiled here: {error}")
    numbers = range(num_variants(library))
    return [CompiledKernels(FewRows(library, n), PackedOperators(library)) for n in numbers]


COMPILED = [*SPECS, DeltaNetSpec(1, 1, 1, 1, 1), DeltaNetSpec(4, 8, 128, 128, 4, is_tiled=True)]
"""The last is worth several threads."""


def stepped(
    kernels: Kernels, case: Case, num_threads: int, in_place: bool = False
) -> tuple[Tensor, DeltaState]:
    workspace, out = Watched(Arena(16 << 20).bytes), case.out()
    before = DeltaState(*(tensor.clone() for tensor in case.state))
    after = before if in_place else case.after()
    for row in range(len(out)):
        one = slice(row, row + 1)
        operands = part(case.rows, one), case.weights, before, after, out[one]
        kernels.delta_steps(*operands, workspace, num_threads)
        before = after
    return out, after


@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_compiled_steps_are_the_twins(variants: list[CompiledKernels], spec: DeltaNetSpec) -> None:
    """Within float32's rounding; their own bits are the same in every variant, by any threads."""
    case = Case.of(spec, 5, torch.bfloat16)
    wanted, wanted_state = stepped(REFERENCE, case, 1)
    first, state = stepped(variants[0], case, 1)
    torch.testing.assert_close(first.float(), wanted.float(), atol=1e-4, rtol=2**-7)
    torch.testing.assert_close(state.matrices, wanted_state.matrices, atol=1e-5, rtol=1e-5)
    assert torch.equal(state.tail, wanted_state.tail)
    for kernels in variants:
        for num_threads, in_place in ((1, True), (2, False), (5, True)):
            again, state_again = stepped(kernels, case, num_threads, in_place)
            assert torch.equal(again, first)
            assert all(map(torch.equal, state_again, state))


def test_compiled_rows_at_once_are_single_steps(variants: list[CompiledKernels]) -> None:
    case = Case.of(COMPILED[-1], 8, torch.bfloat16)
    wanted, wanted_state = stepped(variants[-1], case, 1)
    few_rows, out, after = FewRows(load_kernels()), case.out(), case.after()
    few_rows.delta_steps(case.rows, case.weights, case.state, after, out, 2)
    assert torch.equal(out, wanted) and all(map(torch.equal, after, wanted_state))


@pytest.mark.parametrize("spec", COMPILED, ids=str)
@pytest.mark.parametrize("num_rows", [2, CHUNK])
def test_a_compiled_chunk_is_the_twins(
    variants: list[CompiledKernels], spec: DeltaNetSpec, num_rows: int
) -> None:
    """Within float32's rounding; what compiled kernels make of it is the same in every variant."""
    case, found = Case.of(spec, num_rows, torch.bfloat16), []
    for kernels, num_threads in ((REFERENCE, 1), *((each, n) for each in variants for n in (1, 3))):
        workspace, after, out = Watched(Arena(16 << 20).bytes), case.after(), case.out()
        operands = case.rows, case.weights, case.state, after, out, workspace
        kernels.delta_chunk(*operands, InlineExecutor().run, num_threads)
        found.append((out, *after))
    (out, tail, matrices), first, *others = found
    torch.testing.assert_close(first[0].float(), out.float(), atol=1e-4, rtol=2**-7)
    torch.testing.assert_close(first[2], matrices, atol=2e-5, rtol=1e-5)
    assert torch.equal(first[1], tail)
    assert all(torch.equal(*pair) for each in others for pair in zip(each, first, strict=True))


def test_a_compiled_gate_is_the_twins(variants: list[CompiledKernels]) -> None:
    workspace = Watched(Arena(16 << 20).bytes)
    weight = randn(24, seed=1)
    for num_rows in (1, 3, 700):
        x, gates = (randn(num_rows, 4, 24, seed=seed, dtype=torch.bfloat16) for seed in (2, 3))
        gates[0, 0, :2] = torch.tensor([-90.0, 90.0])
        wanted = x.clone()
        REFERENCE.gated_norm(wanted, gates, weight, 1e-6, workspace)
        found = [x.clone() for _ in variants]
        for kernels, out in zip(variants, found, strict=True):
            kernels.gated_norm(out, gates, weight, 1e-6, workspace, 2)
            assert torch.equal(out, found[0])
        torch.testing.assert_close(found[0].float(), wanted.float(), atol=1e-6, rtol=2**-7)
