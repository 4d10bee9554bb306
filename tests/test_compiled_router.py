"""The compiled router and the compiled gates, beside their plain twins."""

from __future__ import annotations

import pytest
import torch
from computing import randn
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.variants import num_variants
from lowtide.kernels.operands import ExpertChoice
from lowtide.kernels.reference import REFERENCE

STEP = 2.0**-8
"""A bfloat16 number is rounded by at most half of this share of it."""

TIE = 1e-6


@pytest.fixture(scope="module")
def variants() -> list[FewRows]:
    """All that this CPU can run, from the portable to the best."""
    built = load_kernels()
    return [FewRows(built, number) for number in range(num_variants(built))]


@st.composite
def choices(draw: st.DrawFn) -> tuple[ExpertChoice, int]:
    """Any that a family may have, and a number of experts for it."""
    num_groups = draw(st.sampled_from([1, 1, 2, 4]))
    num_kept = draw(st.integers(1, num_groups))
    per_group = draw(st.sampled_from([2, 3, 16, 33, 64]))
    choice = ExpertChoice(
        num_chosen=draw(st.integers(1, min(8, num_kept * per_group))),
        is_sigmoid=draw(st.booleans()),
        normalise=draw(st.booleans()),
        rounds_weights=draw(st.booleans()),
        num_groups=num_groups,
        num_groups_kept=num_kept,
        num_group_best=draw(st.integers(1, 2)),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        sum_epsilon=draw(st.sampled_from([0.0, 1e-20, 1e-6, 0.1])),
    )
    return choice, num_groups * per_group


@examples(150)
@given(
    given_choice=choices(),
    num_rows=st.integers(1, 9),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_experts_and_weights_are_the_references(
    variants: list[FewRows],
    given_choice: tuple[ExpertChoice, int],
    num_rows: int,
    biased: bool,
    seed: int,
) -> None:
    """Logits far enough from each other that nothing is near a tie."""
    choice, num_experts = given_choice
    places = torch.stack([randn(num_experts, seed=seed + row).argsort() for row in range(num_rows)])
    logits = places.float() * (8 / num_experts) - 4
    bias = (
        torch.rand(num_experts, generator=torch.Generator().manual_seed(seed)) if biased else None
    )
    expected, weights = REFERENCE.choose_experts(logits.clone(), bias, choice)
    answers = [kernel.choose_experts(logits, bias, choice) for kernel in variants]
    assert all(torch.equal(experts, answers[0][0]) for experts, _ in answers)
    assert all(torch.equal(own, answers[0][1]) for _, own in answers), "variants differ"
    if _is_clear(logits, bias, choice):
        assert torch.equal(answers[0][0], expected)
        torch.testing.assert_close(answers[0][1], weights, rtol=1e-5, atol=1e-9)


def _is_clear(logits: Tensor, bias: Tensor | None, choice: ExpertChoice) -> bool:
    """Return True if all sums of ranks are so far apart that roundings decide nothing."""
    scores = logits.sigmoid() if choice.is_sigmoid else logits.softmax(-1)
    rank = scores if bias is None else scores + bias
    groups = rank.view(len(rank), choice.num_groups, -1)
    best = groups.topk(min(choice.num_group_best, groups.shape[-1])).values.sum(-1)
    gaps = [each.sort(-1).values.diff(dim=-1) for each in (rank, best)]
    return all(bool((gap > TIE).all()) for gap in gaps)


def test_bfloat16_logits_and_weights_rounded_to_them(variants: list[FewRows]) -> None:
    logits = (torch.arange(64.0).view(2, 32) / 16)[:, torch.randperm(32)].bfloat16().contiguous()
    choice = ExpertChoice(4, is_sigmoid=False, normalise=True, rounds_weights=True)
    expected, weights = REFERENCE.choose_experts(logits.clone(), None, choice)
    for kernel in variants:
        experts, own = kernel.choose_experts(logits, None, choice)
        assert torch.equal(experts, expected)
        assert torch.equal(own, own.bfloat16().float())
        torch.testing.assert_close(own, weights, rtol=STEP, atol=0)


def test_sigmoids_of_bfloat16_logits_are_rounded_before_they_rank(variants: list[FewRows]) -> None:
    """So a bias decides between logits whose scores are one number."""
    logits = torch.tensor([[7.0, 7.03125, 7.0625, -3.0]]).bfloat16()
    assert logits.unique().numel() == 4 and logits.sigmoid().unique().numel() == 2
    bias = torch.tensor([0.2, 0.1, 0.0, 0.0])
    choice = ExpertChoice(2, is_sigmoid=True, normalise=True, rounds_weights=True, sum_epsilon=1e-6)
    expected, weights = REFERENCE.choose_experts(logits.clone(), bias, choice)
    assert expected.tolist() == [[0, 1]]
    for kernel in variants:
        experts, own = kernel.choose_experts(logits, bias, choice)
        assert torch.equal(experts, expected) and torch.equal(own, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_softmax_of_the_chosen_alone(variants: list[FewRows], dtype: torch.dtype) -> None:
    logits = torch.stack([randn(32, seed=row).argsort() / 4 - 4 for row in range(3)]).to(dtype)
    choice = ExpertChoice(4, is_sigmoid=False, normalise=False, of_chosen=True)
    expected, weights = REFERENCE.choose_experts(logits.clone(), None, choice)
    for kernel in variants:
        experts, own = kernel.choose_experts(logits, None, choice)
        assert torch.equal(experts, expected)
        assert torch.equal(own, own.to(dtype).float())
        torch.testing.assert_close(
            own, weights, rtol=STEP if dtype is torch.bfloat16 else 1e-6, atol=0
        )


def test_of_equal_ranks_the_first_are_chosen(variants: list[FewRows]) -> None:
    choice = ExpertChoice(3, is_sigmoid=False, normalise=True)
    logits = torch.zeros(1, 40)
    logits[0, 30] = 1
    for kernel in variants:
        experts, _ = kernel.choose_experts(logits, None, choice)
        assert experts.tolist() == [[0, 1, 30]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_whatever_the_logits_experts_are_different_ones(
    variants: list[FewRows], bad: float, num_groups: int
) -> None:
    choice = ExpertChoice(
        4, is_sigmoid=True, normalise=True, num_groups=num_groups, num_groups_kept=1
    )
    logits = torch.full((2, 16), bad)
    logits[1, 5] = 0.5
    for kernel in variants:
        experts, _ = kernel.choose_experts(logits, None, choice)
        assert all(len(set(row)) == 4 for row in experts.tolist())
        assert 0 <= int(experts.min()) and int(experts.max()) < 16


@examples(40)
@given(num_rows=st.integers(1, 8), num_k=st.integers(1, 300), num_outs=st.integers(1, 70))
def test_products_in_float32(
    variants: list[FewRows], num_rows: int, num_k: int, num_outs: int
) -> None:
    """Exact but for rounding, the same bits in every variant, alone and on several threads."""
    x, weight = randn(num_rows, num_k), randn(num_outs, num_k, seed=1)
    exact = x.double() @ weight.double().t()
    first = torch.empty(num_rows, num_outs)
    variants[0].multiply_float32(x, weight.t(), first)
    torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-4)
    for kernel in variants:
        out = torch.full((num_rows, num_outs), torch.nan)
        kernel.multiply_float32(x, weight.t(), out, num_threads=3)
        assert torch.equal(out, first)
        alone = torch.empty(1, num_outs)
        kernel.multiply_float32(x[-1:], weight.t(), alone)
        assert torch.equal(alone[0], first[-1])


def test_a_gate_is_the_references_but_for_rounding(variants: list[FewRows]) -> None:
    gate, up = (8 * randn(3, 100_003, seed=seed).bfloat16() for seed in (0, 1))
    expected = gate.clone()
    REFERENCE.silu_times(expected, up)
    rows, shares = randn(3, 75, seed=2).bfloat16(), 4 * randn(3, 1, seed=3).bfloat16()
    weighed = rows.clone()
    REFERENCE.weigh_rows(weighed, shares.clone())
    for kernel in variants:
        out, own = gate.clone(), rows.clone()
        kernel.silu_times(out, up, num_threads=3)
        kernel.weigh_rows(own, shares)
        torch.testing.assert_close(out, expected, rtol=2 * STEP, atol=1e-30)
        torch.testing.assert_close(own, weighed, rtol=2 * STEP, atol=0)


def test_gates_of_attention_have_torchs_bits(variants: list[FewRows]) -> None:
    """For every number; a head's gate lies behind its query."""
    numbers = torch.arange(-(1 << 15), 1 << 15).short().view(torch.bfloat16)
    gates = numbers[numbers.isfinite()].view(15, 4, -1)
    x = randn(*gates.shape, seed=1).bfloat16()
    queries_gates = torch.stack([x, gates], dim=2)
    expected = x.clone()
    REFERENCE.sigmoid_weigh(expected, gates.clone())
    for kernel in variants:
        out = x.clone()
        kernel.sigmoid_weigh(out, queries_gates[:, :, 1], num_threads=3)
        assert torch.equal(out, expected)
