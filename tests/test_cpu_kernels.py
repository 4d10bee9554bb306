"""The compiled operators of few rows, how they are built and kept, and who uses them."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from computing import run_experts
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import randn
from torch import Tensor
from whole import wait_until

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.running.wiring import load
from lowtide.errors import StorageError, UnsupportedError
from lowtide.experts.rows import Routing
from lowtide.kernels import choice
from lowtide.kernels.choice import choose_kernels, possible_names
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu import building, library
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.library import load_kernels, load_library
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.cpu.sources import CORE, PACKING, Part
from lowtide.kernels.cpu.variants import VARIANTS, num_variants
from lowtide.kernels.operands import ClampedWeights, ExpertWeights, Rotation, SlotPlaces
from lowtide.kernels.reference import REFERENCE, clamped_swiglu
from lowtide.memory.workspace import Workspace

STEP = 2.0**-8
"""A number is rounded by at most this share of it."""

MOST_ROWS, MOST_ROWS_OF_DOTS = 8, 32
NUM_IN_FLOAT32 = 3  # variants that have the same bits


@pytest.fixture(scope="module")
def variants() -> list[FewRows]:
    """All that this CPU can run, from the portable to the best."""
    built = load_kernels()
    return [FewRows(built, number) for number in range(num_variants(built))]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled kernels go: an empty cache, and nothing loaded in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "why_not", {})
    monkeypatch.setattr(library, "loaded", {})
    return tmp_path / "lowtide" / "kernels"


def compiled(kernel: FewRows) -> CompiledKernels:
    return CompiledKernels(kernel, PackedOperators(kernel.library))


def product(kernel: FewRows, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=torch.bfloat16)
    kernel.multiply(x, weight.t(), bias, out)
    return out


def are_alike(answers: list[Tensor]) -> bool:
    """Return True if the variants that compute in float32 have the same bits."""
    return all(torch.equal(answer, answers[0]) for answer in answers[:NUM_IN_FLOAT32])


def is_rounded(out: Tensor, exact: Tensor, terms: Tensor) -> bool:
    """Return True if `out` is `exact` but for its rounding and float32's.

    float32's goes with the terms.
    """
    error = (out.double() - exact).abs()
    return bool((error <= STEP * exact.abs() + 1e-5 * terms).all())


few_rows = st.integers(1, MOST_ROWS_OF_DOTS)
sizes = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 257, 512]))


def test_the_variants_of_this_processor(variants: list[FewRows]) -> None:
    """Each named, the best by default, and those with dot products take more rows."""
    assert [kernel.variant for kernel in variants] == list(VARIANTS[: len(variants)])
    assert FewRows(load_kernels()).variant == variants[-1].variant
    rows = [kernel.max_rows for kernel in variants]
    assert rows == [MOST_ROWS, MOST_ROWS, MOST_ROWS, *2 * [MOST_ROWS_OF_DOTS]][: len(variants)]


@examples(60)
@given(num_rows=st.one_of(st.just(0), few_rows), num_k=sizes, num_outs=sizes, biased=st.booleans())
def test_products_are_exact_but_for_rounding(
    variants: list[FewRows], num_rows: int, num_k: int, num_outs: int, biased: bool
) -> None:
    x, weight = randn(num_rows, num_k), randn(num_outs, num_k, seed=1)
    bias = randn(num_outs, seed=2) if biased else None
    exact = x.double() @ weight.double().t()
    terms = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, terms = exact + bias, terms + bias.abs()
    answers = [product(kernel, x, weight, bias) for kernel in variants]
    assert all(is_rounded(answer, exact, terms) for answer in answers)
    assert are_alike(answers), "variants differ"


@examples(40)
@given(num_rows=few_rows, num_k=sizes, num_outs=sizes, cut=st.integers(0, 600))
def test_a_rows_bits_depend_on_nothing_else(
    variants: list[FewRows], num_rows: int, num_k: int, num_outs: int, cut: int
) -> None:
    """Alone or with others, features in one piece or two, rows at any stride and alignment."""
    cut = cut % num_outs
    x, weight = randn(num_rows, num_k), randn(num_outs, num_k, seed=1)
    wide = torch.full((num_rows, num_k + 3), torch.nan, dtype=torch.bfloat16)
    wide[:, 1 : num_k + 1] = x
    for kernel in variants:
        together = product(kernel, x, weight)
        alone = [product(kernel, x[r : r + 1], weight) for r in range(num_rows)]
        assert torch.equal(torch.cat(alone), together)
        out = torch.empty(num_rows, num_outs + 5, dtype=torch.bfloat16)
        for features in (slice(0, cut), slice(cut, num_outs)):
            columns = out[:, 3 : num_outs + 3][:, features]
            kernel.multiply(wide[:, 1 : num_k + 1], weight[features].t(), None, columns)
        assert torch.equal(out[:, 3 : num_outs + 3], together)


def test_nothing_is_written_beside_the_columns(variants: list[FewRows]) -> None:
    for kernel in variants:
        out = torch.full((3, 21), 7.0, dtype=torch.bfloat16)
        kernel.multiply(randn(3, 33), randn(17, 33, seed=1).t(), None, out[:, 2:19])
        assert (out[:, :2] == 7).all() and (out[:, 19:] == 7).all()


def test_infinities_and_nan_come_through(variants: list[FewRows]) -> None:
    x, weight = randn(1, 40), randn(3, 40, seed=1)
    x[0, 39], weight[:, 39] = torch.inf, torch.tensor([1.0, -1.0, torch.nan])
    for kernel in variants:
        out = product(kernel, x, weight)[0]
        assert out[:2].tolist() == [torch.inf, -torch.inf] and out[2].isnan()


def test_ties_round_to_even(variants: list[FewRows]) -> None:
    """1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and 1 + 2^-6."""
    weight = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8]]).bfloat16()
    for kernel in variants:
        out = product(kernel, torch.ones(1, 2).bfloat16(), weight)
        assert out.tolist() == [[1.0, 1.0 + 2.0**-6]]


def make_expert(hidden: int, width: int) -> ExpertWeights:
    gate, up, down = (randn(width * hidden, seed=seed) * 0.2 for seed in range(3))
    return ExpertWeights(gate.view(width, -1), up.view(width, -1), down.view(hidden, -1))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17, 32])
@pytest.mark.parametrize(("hidden", "width"), [(32, 48), (33, 7), (64, 129)])
def test_an_expert_rounds_where_the_reference_does(
    variants: list[FewRows], num_rows: int, hidden: int, width: int
) -> None:
    """Step by step: products by the kernel, the rest by the reference; and in place of its x."""
    x, weights = randn(num_rows, hidden, seed=3), make_expert(hidden, width)
    for kernel in variants:
        gate, up = product(kernel, x, weights.gate), product(kernel, x, weights.up)
        REFERENCE.silu_times(gate, up)
        expected = product(kernel, gate, weights.down)
        parts = x.clone()
        compiled(kernel).gated_mlp(
            parts, weights, torch.empty_like(gate), torch.empty_like(up), parts
        )
        # An exponential's last bit may make a SiLU round the other way.
        torch.testing.assert_close(parts.float(), expected.float(), rtol=2 * STEP, atol=2 * STEP)
        assert (parts == expected).float().mean() > 0.9


def test_a_clamped_expert(variants: list[FewRows]) -> None:
    hidden, width = 32, 24
    biases = [randn(size, seed=size) for size in (width, width, hidden)]
    weights = ClampedWeights(*make_expert(hidden, width), *biases)
    x = randn(2, hidden, seed=3)
    answers = []
    for run in (compiled(variants[-1]).gated_mlp, REFERENCE.gated_mlp):
        gate, up, out = (torch.empty(2, n, dtype=torch.bfloat16) for n in (width, width, hidden))
        run(x, weights, gate, up, out)
        answers.append(out.float())
    torch.testing.assert_close(*answers, rtol=4 * STEP, atol=16 * STEP)


def test_clamped_experts_at_once_have_the_bits_of_one_by_one(variants: list[FewRows]) -> None:
    """Whose products are compiled and whose gates and biases are torch's."""
    hidden, width, num_slots = 40, 531, 3
    sizes = [width * hidden, width * hidden, hidden * width, width, width, hidden]
    arena = randn(num_slots, sum(sizes), seed=1)
    *places_at, end = itertools.accumulate(sizes, initial=0)
    starts = [arena.data_ptr() + 2 * at for at in places_at]
    places = SlotPlaces(*starts[:3], 2 * end, *starts[3:])
    groups = np.array([(2, 0, 3), (0, 4, 1), (1, 5, 8)])
    x = randn(13, hidden, seed=2)
    gate, up = (torch.empty(13, width, dtype=torch.bfloat16) for _ in range(2))
    for kernel in variants:
        expected = x.clone()
        for slot, first, count in groups.tolist():
            gate_w, up_w, down_w, *biases = arena[slot].split(sizes)
            matrices = (gate_w.view(width, -1), up_w.view(width, -1), down_w.view(hidden, -1))
            rows = slice(first, first + count)
            own, scratch = expected[rows], (gate[rows], up[rows])
            compiled(kernel).gated_mlp(own, ClampedWeights(*matrices, *biases), *scratch, own)
        for num_threads in (1, 3):
            out = x.clone()
            kernel.experts.gated_mlps(groups, places, out, gate, up, num_threads)
            assert torch.equal(out, expected)


def test_clamped_gates_have_torchs_bits(variants: list[FewRows]) -> None:
    """Of all numbers but those below the normal ones, which some products have no room for."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    gates = every[every.isfinite() & ((every == 0) | (every.abs() >= 2.0**-126))]
    ups, nothing = 4 * randn(len(gates), seed=1), torch.zeros_like(gates)
    slot = torch.stack([gates, ups, nothing, nothing, nothing, nothing])
    starts = [each.data_ptr() for each in slot]
    places = SlotPlaces(*starts[:3], slot.nbytes, *starts[3:])
    expected = gates.clone()
    clamped_swiglu(expected, ups.clone())
    x, gate, up = torch.ones(1, 1).bfloat16(), *torch.empty(2, 1, len(gates)).bfloat16()
    for kernel in variants:
        kernel.experts.gated_mlps(np.array([(0, 0, 1)]), places, x.clone(), gate, up, 1)
        assert torch.equal(gate[0].nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_other_products_are_the_references(variants: list[FewRows], dtype: torch.dtype) -> None:
    for kernel in variants:
        num_rows = kernel.max_rows + 1
        x, weight = randn(num_rows, 64).to(dtype), randn(48, 64, seed=1).to(dtype)
        expected, out = (torch.empty(num_rows, 48, dtype=dtype) for _ in range(2))
        torch.mm(x, weight.t(), out=expected)
        compiled(kernel).multiply(x, weight.t(), None, out)
        assert torch.equal(out, expected)


@examples(30)
@given(
    num_rows=few_rows,
    num_outs=st.integers(1, 900),
    num_k=st.sampled_from([33, 256, 1000]),
    num_threads=st.integers(2, 5),
)
def test_a_teams_products_are_one_threads(
    variants: list[FewRows], num_rows: int, num_outs: int, num_k: int, num_threads: int
) -> None:
    x, weight, bias = randn(num_rows, num_k), randn(num_outs, num_k, seed=1), randn(num_outs)
    for kernel in variants:
        alone, shared = (torch.full((num_rows, num_outs), torch.nan).bfloat16() for _ in range(2))
        kernel.multiply(x, weight.t(), bias, alone)
        kernel.multiply(x, weight.t(), bias, shared, num_threads)
        assert torch.equal(alone, shared)


def test_several_threads_may_want_the_team_at_once(variants: list[FewRows]) -> None:
    x, weight = randn(1, 512), randn(1024, 512, seed=1)
    expected = product(variants[-1], x, weight)

    def multiply(_: int) -> Tensor:
        out = torch.empty_like(expected)
        variants[-1].multiply(x, weight.t(), None, out, num_threads=3)
        return out

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(out, expected) for out in pool.map(multiply, range(100)))


@examples(40)
@given(
    num_tokens=few_rows,
    k=st.integers(1, 6),
    sizes=st.sampled_from([(16, 24), (40, 17), (256, 320)]),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_experts_at_once_have_the_bits_of_one_by_one(
    variants: list[FewRows],
    num_tokens: int,
    k: int,
    sizes: tuple[int, int],
    num_threads: int,
    seed: int,
) -> None:
    """Wherever they lie, and with every variant."""
    num_experts, (hidden, width) = 7, sizes
    generator = torch.Generator().manual_seed(seed)
    slots = randn(num_experts, 3, hidden * width, seed=seed) * 0.2
    slot_of = torch.randperm(num_experts, generator=generator)
    x, weights = randn(num_tokens, hidden, seed=1), torch.rand(num_tokens, k, generator=generator)
    chosen = [torch.randperm(num_experts, generator=generator)[:k] for _ in range(num_tokens)]
    experts = torch.stack(chosen).sort().values
    parts = randn(num_tokens * k, hidden)
    part_of = torch.arange(num_tokens * k).view(num_tokens, k)
    gate, up = (torch.empty(num_tokens * k, width).bfloat16() for _ in range(2))
    term, term_fp32 = torch.empty_like(x), torch.empty(x.shape)

    def one_by_one(kernel: FewRows) -> Tensor:
        for token, j in itertools.product(range(num_tokens), range(k)):
            gate_w, up_w, down_w = slots[slot_of[experts[token, j]]]
            stored = ExpertWeights(
                gate_w.view(width, hidden), up_w.view(width, hidden), down_w.view(hidden, width)
            )
            row = slice(token * k + j, token * k + j + 1)
            compiled(kernel).gated_mlp(x[token : token + 1], stored, gate[row], up[row], parts[row])
        expected = torch.empty(x.shape)
        REFERENCE.combine(parts, part_of, weights, term, term_fp32, expected)
        return expected

    start, part_bytes = slots.data_ptr(), 2 * hidden * width
    places = SlotPlaces(start, start + part_bytes, start + 2 * part_bytes, 3 * part_bytes)
    named = slot_of[experts.unique()].numpy()
    for kernel in variants:
        expected = one_by_one(kernel)
        out = torch.full_like(expected, torch.nan)
        buffers, routing = (parts, gate, up, out), Routing(experts, weights)
        run_experts(kernel.experts, x, routing, named, places, buffers, num_threads)
        assert torch.equal(out, expected)


@examples(40)
@given(
    num_rows=st.lists(few_rows, max_size=9),
    sizes=st.sampled_from([(16, 24), (40, 17), (256, 320)]),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_groups_at_once_have_the_bits_of_one_by_one(
    variants: list[FewRows],
    num_rows: list[int],
    sizes: tuple[int, int],
    num_threads: int,
    seed: int,
) -> None:
    """Wherever experts lie and their rows are; rows between the groups are left alone."""
    num_slots, (hidden, width) = 11, sizes
    draw = np.random.default_rng(seed)
    arena = randn(num_slots, 3, hidden * width, seed=seed) * 0.2
    firsts, end = [], 0
    for count in num_rows:
        firsts.append(end + int(draw.integers(3)))
        end = firsts[-1] + count
    order = draw.permutation(len(num_rows))
    slots = draw.permutation(num_slots)[: len(num_rows)]
    groups = np.stack([slots, firsts, num_rows], 1).astype(np.int64)[order].copy()
    parts = randn(end + 2, hidden, seed=1)
    gate, up = (torch.empty(end + 2, width).bfloat16() for _ in range(2))

    def one_by_one(kernel: FewRows) -> Tensor:
        expected = parts.clone()
        for slot, first, count in groups.tolist():
            gate_w, up_w, down_w = arena[slot]
            stored = ExpertWeights(
                gate_w.view(width, hidden), up_w.view(width, hidden), down_w.view(hidden, width)
            )
            rows = slice(first, first + count)
            own = expected[rows]
            compiled(kernel).gated_mlp(own, stored, gate[rows], up[rows], own)
        return expected

    start, part_bytes = arena.data_ptr(), 2 * hidden * width
    places = SlotPlaces(start, start + part_bytes, start + 2 * part_bytes, 3 * part_bytes)
    for kernel in variants:
        if max(num_rows, default=0) > kernel.experts.max_rows:
            continue  # an expert of more rows is torch's
        out = parts.clone()
        kernel.experts.gated_mlps(groups, places, out, gate, up, num_threads)
        assert torch.equal(out, one_by_one(kernel))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads go where they like")
def test_a_team_is_not_kept_to_the_cores_of_who_calls_it(variants: list[FewRows]) -> None:
    """As a compute thread, which keeps to its share."""
    x, weight = randn(1, 1024), randn(8192, 1024, seed=1)
    everywhere, before = os.sched_getaffinity(os.getpid()), threads_of_the_system()

    def multiply() -> set[int]:
        os.sched_setaffinity(0, {min(everywhere)})
        out = torch.empty(1, 8192, dtype=torch.bfloat16)
        variants[-1].multiply(x, weight.t(), None, out, num_threads=32)
        return threads_of_the_system() - before - {threading.get_native_id()}

    with ThreadPoolExecutor(1) as pool:
        helpers = pool.submit(multiply).result()
    assert helpers
    for _ in range(1000):  # some may only be about to begin
        bound = [helper for helper in helpers if os.sched_getaffinity(helper) != everywhere]
        if not bound:
            break
        time.sleep(0.01)
    assert not bound


def threads_of_the_system() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


@examples(40)
@given(
    num_tokens=st.integers(1, 700),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 11),
    head_dim=st.sampled_from([8, 33, 64, 576]),
    num_threads=st.integers(1, 3),
)
def test_attention_of_one_row(
    variants: list[FewRows],
    num_tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    num_threads: int,
) -> None:
    query = randn(kv_heads * group, head_dim) * 3
    cache = randn(2, kv_heads, num_tokens + 5, head_dim, seed=1)
    keys, values = cache[:, :, 3 : 3 + num_tokens]
    grouped = query.view(kv_heads, group, head_dim).double()
    scores = grouped @ keys.double().transpose(1, 2) * 0.2
    expected = (scores.softmax(-1) @ values.double()).view(query.shape)
    answers = []
    for kernel in variants:
        answers.append(torch.full_like(query, torch.nan))
        kernel.attend(query, keys, values, 0.2, answers[-1], num_threads)
    assert are_alike(answers), "variants differ"
    torch.testing.assert_close(answers[0].double(), expected, rtol=STEP, atol=1e-4)
    sinks = 3 * torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(2))
    share = (scores.logsumexp(-1).view(-1) - sinks).sigmoid()[:, None]
    for kernel in variants:
        out = torch.full_like(query, torch.nan)
        kernel.attend(query, keys, values, 0.2, out, num_threads, sinks)
        torch.testing.assert_close(out.double(), expected * share, rtol=STEP, atol=1e-4)
    REFERENCE.attend_row(query, keys, values, 0.2, out, num_threads, sinks)
    torch.testing.assert_close(out.double(), expected * share, rtol=STEP, atol=1e-4)


def test_attention_to_extreme_scores(variants: list[FewRows]) -> None:
    """One key takes all, wherever it is; nan stays nan."""
    keys = torch.zeros(1, 300, 8).bfloat16()
    values = randn(1, 300, 8)
    for at in (0, 150, 299):
        keys.zero_()[0, at] = 1e4
        out = torch.empty(1, 8).bfloat16()
        variants[-1].attend(torch.ones(1, 8).bfloat16(), keys, values, None, out, 1)
        assert torch.equal(out[0], values[0, at])
    keys[0, 7] = torch.nan
    variants[-1].attend(torch.ones(1, 8).bfloat16(), keys, values, None, out, 1)
    assert out.isnan().all()


@pytest.mark.parametrize("shape", [(1, 1000), (8, 64), (3, 5, 24), (700, 512)])
def test_a_norm_is_the_references_but_for_rounding(
    variants: list[FewRows], shape: tuple[int, ...]
) -> None:
    """Rows with others' columns between them, in place."""
    wide = randn(shape[0], *shape[1:-1], shape[-1] + 8) if len(shape) == 2 else randn(*shape)
    x, weight = wide[..., : shape[-1]], randn(shape[-1], seed=1)
    expected = torch.empty_like(x)
    buffers = Workspace(torch.empty(1 << 22, dtype=torch.uint8))
    REFERENCE.rms_norm(x, weight, 1e-6, buffers, expected)
    beside = wide[..., shape[-1] :].clone()
    answers = []
    for kernel in variants:
        out = wide.clone()
        own = out[..., : shape[-1]]
        kernel.rms_norm(own, weight, 1e-6, own, num_threads=3)
        assert torch.equal(out[..., shape[-1] :], beside)
        answers.append(own)
    assert are_alike(answers), "variants differ"
    torch.testing.assert_close(answers[0], expected, rtol=2 * STEP, atol=0)
    assert (answers[0] == expected).float().mean() > 0.99


def test_a_norm_by_a_float32_weight_is_rounded_once(variants: list[FewRows]) -> None:
    x, weight = randn(7, 3, 40), randn(40, seed=1).float() * 1.01
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight
    for kernel in variants:
        out = torch.empty_like(x)
        kernel.rms_norm(x, weight, 1e-6, out, num_threads=3)
        torch.testing.assert_close(out.double(), exact, rtol=STEP + 1e-5, atol=0)


@pytest.mark.parametrize(("num_rows", "half"), [(1, 16), (5, 7), (700, 16)])
def test_a_rotation_of_pairs_has_the_references_bits(
    variants: list[FewRows], num_rows: int, half: int
) -> None:
    """In place, with columns before it that stay as they are."""
    x = randn(num_rows, 6, 8 + 2 * half)
    angles = torch.rand(num_rows, 1, half) * 6
    rotation, expected = Rotation(angles.cos(), angles.sin()), x.clone()
    buffers = Workspace(torch.empty(1 << 22, dtype=torch.uint8))
    REFERENCE.rotate_pairs(expected[..., 8:], rotation, buffers)
    for kernel in variants:
        out = x.clone()
        kernel.rotate_pairs(out[..., 8:], *rotation, num_threads=3)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("by_outs", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3, 128, 64), (5, 2, 33, 70), (32, 4, 16, 512)])
def test_products_with_a_matrix_of_each_heads_own(
    variants: list[FewRows], sizes: tuple[int, int, int, int], by_outs: bool
) -> None:
    """Exact but for rounding, a row alone as beside others, out at any stride."""
    num_rows, num_heads, num_k, num_outs = sizes
    stored = (num_outs, num_k) if by_outs else (num_k, num_outs)
    weight = randn(num_heads, *stored, seed=1)
    weight = weight.transpose(1, 2) if by_outs else weight
    x = randn(num_rows, num_heads, num_k + 8)[..., 8:]
    exact = torch.einsum("rhk,hko->rho", x.double(), weight.double())
    terms = torch.einsum("rhk,hko->rho", x.double().abs(), weight.double().abs())
    answers = []
    for kernel in variants:
        if num_rows > kernel.max_rows:
            continue
        wide = torch.full((num_rows, num_heads, num_outs + 3), torch.nan, dtype=torch.bfloat16)
        out, alone = wide[..., :num_outs], torch.empty(1, num_heads, num_outs).bfloat16()
        assert kernel.takes_heads(x, weight)
        kernel.multiply_heads(x, weight, out, num_threads=3)
        assert is_rounded(out, exact, terms) and wide[..., num_outs:].isnan().all()
        kernel.multiply_heads(x[-1:], weight, alone)
        assert torch.equal(alone, out[-1:])
        answers.append(out)
    if num_rows <= MOST_ROWS:
        assert are_alike(answers), "variants differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "half"), [(1, 16), (5, 8), (32, 3), (2100, 16)])
def test_a_rotation_has_the_references_bits(
    variants: list[FewRows], num_rows: int, half: int, dtype: torch.dtype
) -> None:
    x = randn(num_rows, 6, 32)
    angles = torch.rand(num_rows, 1, half) * 6
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    expected = x.clone()
    REFERENCE.rotate(expected[:, :4], rotation, Workspace(torch.empty(1 << 22, dtype=torch.uint8)))
    for kernel in variants:
        out = x.clone()
        kernel.rotate(out[:, :4], rotation.cos, rotation.sin, num_threads=3)
        assert torch.equal(out, expected)


def kept(cache: Path, pattern: str = "*.so") -> list[Path]:
    return list(cache.glob(pattern))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Compiles faster than products do."""
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }')
    return path


def check_loads(source: Path, cache: Path) -> None:
    """The library works, and is all that is in the cache beside its object."""
    assert load_library(source).answer() == 42
    assert sorted(path.suffix for path in kept(cache, "*")) == [".o", ".so"]


def test_a_library_is_compiled_once(source: Path, cache: Path) -> None:
    check_loads(source, cache)
    [first] = kept(cache)
    written = first.stat().st_ino
    assert cache.stat().st_mode & 0o777 == 0o700
    check_loads(source, cache)
    assert first.stat().st_ino == written


def test_what_is_old_goes_as_a_library_is_compiled(
    source: Path, cache: Path, tmp_path: Path
) -> None:
    check_loads(source, cache)
    [used] = kept(cache)
    now_s, day_s = time.time(), 86400
    for name, days in (
        *(("build-0", 2), ("build-1", 0), ("a-0.lock", 2), ("a-1.lock", 0)),
        *(("cpu-0.so", 31), ("cpu-1.so", 29), ("a-0.o", 31), ("a-1.o", 29)),
    ):
        path = cache / name
        if name.startswith("build"):
            path.mkdir()
            (path / "a.o").touch()
        else:
            path.touch()
        os.utime(path, (now_s, now_s - days * day_s))
    os.utime(used, (now_s, now_s - 31 * day_s))
    load_library(source)  # nothing is compiled, and this is used
    assert len(kept(cache, "*")) == 10 and used.stat().st_mtime > now_s - day_s
    other = tmp_path / "other.cpp"
    other.write_text(source.read_text())
    load_library(other)
    left = {path.name for path in kept(cache, "*") if not path.name.startswith("other-")}
    own = {path.name for path in kept(cache, "answer-*")}
    assert left - own == {"build-1", "a-1.lock", "cpu-1.so", "a-1.o"} and used.exists()


def test_what_rounds_weights_is_built_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So there is one compilation, and one notice of it."""
    load_parts, asked = choice.load_parts, []

    def noted(names: Sequence[str], *report: Any) -> None:
        asked.append(names)
        load_parts(names, *report)

    monkeypatch.setattr(choice, "load_parts", noted)
    monkeypatch.setattr(choice, "load_part", lambda name: asked.append([name]))
    choice.choose_pack.cache_clear()
    opened = open_model("demo:autoregressive", EngineConfig(context=64, format="q8"))
    load(opened, make_plan(opened)).close()
    assert CORE in asked[0] and PACKING in asked[0]


def test_who_waits_for_a_compiler_is_told_so_once(
    source: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_loads(source, cache)
    assert caplog.messages == ["Compiling kernels for this processor (once): 1 file, about 1 s."]
    check_loads(source, cache)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("damage", ["empty", "short", "changed", "writable", "link"])
def test_a_damaged_or_foreign_library_is_not_loaded(source: Path, cache: Path, damage: str) -> None:
    """One that was loaded before may be mapped: it is replaced, never changed in place."""
    check_loads(source, cache)
    [path] = kept(cache)
    content = path.read_bytes()
    path.unlink()
    if damage == "link":
        path.symlink_to("/dev/null")
    else:
        half = len(content) // 2
        path.write_bytes(
            {
                "empty": b"",
                "short": content[:half],
                "changed": content[:half] + b"?" + content[half + 1 :],
            }.get(damage, content)
        )
        path.chmod(0o722 if damage == "writable" else 0o700)
    check_loads(source, cache)
    assert path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o700


def test_several_may_compile_at_once(source: Path, cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load_library, source) for _ in range(3)]
        assert all(load.result().answer() == 42 for load in loads)
    check_loads(source, cache)


def test_a_folder_that_others_may_write_to_is_refused(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(StorageError, match="chmod 700"):
        load_library(source)


@pytest.mark.parametrize("way", ["above", "beyond a link"])
def test_a_folder_that_others_may_replace_is_refused(source: Path, cache: Path, way: str) -> None:
    above = cache.parents[1]
    if way == "beyond a link":
        above = cache.parents[1] / "elsewhere"
        (above / "lowtide").mkdir(parents=True)
        cache.parent.symlink_to(above / "lowtide")
    above.mkdir(parents=True, exist_ok=True)
    above.chmod(0o777)
    with pytest.raises(StorageError, match=f"{above} may be written by anybody.*XDG_CACHE_HOME"):
        load_library(source)
    above.chmod(0o1777)  # where only owners rename, as in /tmp
    check_loads(source, cache)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give folders away")
def test_a_folder_in_another_user_s_is_refused(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir(parents=True)
    os.chown(cache.parent, 12345, 12345)
    with pytest.raises(StorageError, match=f"{cache.parent} belongs to another user"):
        load_library(source)
    monkeypatch.setattr(building, "SYSTEM_FOLDERS", (cache.parent,))  # root's in a container
    check_loads(source, cache)


def test_a_cache_that_cannot_be_written(source: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="XDG_CACHE_HOME names another"):
        load_library(source)


FULL = b"a.cpp: note: in c\na.cpp:1: error: No space left \x1b[1m\n   1 | }\nb.cpp: error: too\n"
"""A full disk made some twenty lines of it, of which the last ones said nothing."""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (FULL + b"compilation terminated.\n" * 30, "a.cpp:1: error: No space left \\x1b[1m."),
        (b"cc: gone.\n", "cc: gone."),
        (b"", "it did not say why."),
    ],
)
def test_a_compiler_s_complaint_is_its_first_error_alone(
    said: bytes,
    told: str,
    source: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "said").write_bytes(said)
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ntest "$1" = --version && exit\ncat {tmp_path}/said >&2\nexit 1\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    with pytest.raises(UnsupportedError) as caught:
        load_library(source)
    assert str(caught.value).endswith(f" failed: {told}")


def test_a_compiler_complains_in_the_language_that_is_read(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ntest "$1" = --version && exit\n'
        'test "$LC_ALL" = C && word=error || word=Fehler\n'
        'echo "a.cpp:1: $word: no room" >&2\necho "compilation terminated." >&2\nexit 1\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(UnsupportedError, match="failed: a.cpp:1: error: no room"):
        load_library(source)


@pytest.mark.parametrize("step", ["--version", "-shared"])
def test_a_compiler_that_fails_at_another_step(
    step: str, source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *{step}*) echo "cc: error: no room" >&2; exit 1; esac\n'
        f'exec {find_compiler()} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    with pytest.raises(UnsupportedError, match="failed: cc: error: no room"):
        load_library(source)
    assert kept(cache) == []


def test_a_source_that_does_not_compile(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int broken( {")
    with pytest.raises(UnsupportedError, match="failed: .*broken"):
        load_library(source)
    assert kept(cache) == []


SLOW_COMPILER = """#!/bin/sh
test "$1" = --version && exit
sleep 600 &
touch "$TMPDIR/begun"
wait
"""


STOPPED_AS_IT_STARTS = """
import os, subprocess, time

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "--version" not in command:
            os.kill(os.getpid(), int(sys.argv[2]))
            time.sleep(0.1)

subprocess.Popen = Popen
"""


@pytest.mark.parametrize("before", ["", STOPPED_AS_IT_STARTS], ids=["at work", "as it starts"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_a_compiler_leaves_nothing_of_it(
    source: Path, cache: Path, tmp_path: Path, number: signal.Signals, before: str
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o700)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from lowtide.cli.interrupts import install_signal_handlers\n"
        "from lowtide.kernels.cpu.library import load_library\n"
        "install_signal_handlers()\n"
        f"{before}"
        "try: load_library(Path(sys.argv[1]))\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    with subprocess.Popen(
        [sys.executable, "-c", program, str(source), str(int(number))],
        env={**os.environ, "PATH": path},
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        if before:
            assert process.wait(60) == 128 + number, process.stderr.read()
        else:
            while process.poll() is None and not [*cache.glob("build-*/begun")]:
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(60) == 128 + number, process.stderr.read()
    assert kept(cache) == []
    wait_until(lambda: not at_work(tmp_path))


def at_work(folder: Path) -> list[str]:
    """Command lines of processes whose temporary files lie below a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in process.environ().get("TMPDIR", ""):
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.parametrize("option", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounded", [frozenset[str](), frozenset({"Q4_1"})])
def test_costs_are_looked_for_under_the_name_that_they_are_kept_under(
    option: str, dtype: torch.dtype, rounded: frozenset[str]
) -> None:
    names = possible_names(option, dtype, rounded)
    assert choose_kernels(option, dtype, rounded=rounded).name in names


def test_without_a_compiler_torch_multiplies(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("auto", torch.bfloat16) is REFERENCE
    [notice] = caplog.messages
    assert "There is no C++ compiler; install one of c++, g++" in notice


def test_the_reference_and_other_types_compile_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[list[str]] = []

    def compile_nothing(parts: Sequence[Part], _: object) -> None:
        compiled.append([each.name for each in parts])
        raise UnsupportedError("Nothing is compiled in this test.")

    monkeypatch.setattr(library, "kept_libraries", compile_nothing)
    assert choose_kernels("reference", torch.bfloat16) is REFERENCE
    assert choose_kernels("auto", torch.float32) is REFERENCE
    for kernels, asked in (("reference", []), ("auto", [["core"]])):
        options = EngineConfig(dtype="bfloat16", kernels=kernels)
        assert open_model("demo:chat", options).kernels() is REFERENCE
        assert compiled == asked
    assert not cache.exists()
