"""DALI by its text: Equations 3 to 11, Algorithms 1 and 2, in random cases.

The oracles are written from the paper, with sets and loops, and share nothing with the policies.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from examples import scaled
from policy_facts import make_facts

from lowtide.core import Costs, Curve, Demand, Facts, FloatArray, IntArray, Step, StepKind
from lowtide.experts.rows import Routing
from lowtide.lab.gate_inputs import ResidualMean
from lowtide.policies.catalogue import dali_sizes
from lowtide.policies.placement import DaliWindow
from lowtide.policies.prefetch import Ahead, Residual
from lowtide.policies.presets import parse_options, recipe, sizes_of
from lowtide.policies.recipe import PolicyInputs

NUM_CASES = 200


def draws() -> Iterator[np.random.Generator]:
    for seed in range(scaled(NUM_CASES)):
        yield np.random.default_rng(seed)


def times(draw: np.random.Generator, most_experts: int) -> tuple[Facts, FloatArray, FloatArray]:
    """Draw a layer's demand; return it with Eqs. 3 to 6's t_gpu and t_cpu of each expert.

    Whole seconds, so that many are alike.
    """
    trans_s, gpu_s, cpu_s = draw.integers(1, 9), draw.integers(1, 4), draw.integers(1, 6)
    hits = draw.integers(0, 6, most_experts)
    experts = hits.nonzero()[0]
    is_resident = draw.random(len(experts)) < 0.4
    curve = [Curve([(1, float(s)), (2, 2.0 * s)]) for s in (cpu_s, gpu_s)]
    costs = Costs(8, float(trans_s), *curve, Curve([(1, 0.0)]), 0.0)
    facts = make_facts(Demand(experts, hits[experts], is_resident), costs)
    t_gpu = [
        max(0 if here else trans_s, gpu_s * w)
        for w, here in zip(hits[experts], is_resident, strict=True)
    ]
    return facts, np.array(t_gpu, float), cpu_s * hits[experts].astype(float)


def algorithm_1(t_gpu: FloatArray, t_cpu: FloatArray) -> list[bool]:
    """Return for each expert whether the GPU gets it."""
    order = sorted(range(len(t_gpu)), key=lambda i: (-abs(t_gpu[i] - t_cpu[i]), i))
    is_gpu, total_gpu, total_cpu = [False] * len(t_gpu), 0.0, 0.0
    for i in order:
        if total_gpu + t_gpu[i] <= total_cpu + t_cpu[i]:
            is_gpu[i], total_gpu = True, total_gpu + t_gpu[i]
        else:
            total_cpu += t_cpu[i]
    return is_gpu


def chosen(facts: Facts, preset: str) -> list[bool]:
    """Return for each activated expert whether a preset runs it on the device."""
    inputs = PolicyInputs([len(facts.is_kept)], len(facts.is_kept), facts.costs)
    decided = recipe(preset).assignment(inputs)(facts)
    on_device = {*decided.resident.tolist(), *decided.fetch.tolist()}
    return [expert in on_device for expert in facts.demand.experts.tolist()]


def makespan(is_gpu: list[bool] | tuple[bool, ...], t_gpu: FloatArray, t_cpu: FloatArray) -> float:
    mask = np.array(is_gpu, bool)
    return max(float(t_gpu[mask].sum()), float(t_cpu[~mask].sum()))


def test_algorithm_1_and_what_it_is_compared_with() -> None:
    """The greedy as printed; the exact plan by trying all; a beam of two lies between them."""
    num_better = 0
    for draw in draws():
        facts, t_gpu, t_cpu = times(draw, int(draw.integers(1, 10)))
        if not len(t_gpu):
            continue
        greedy = algorithm_1(t_gpu, t_cpu)
        assert chosen(facts, "dali") == greedy
        every = product([False, True], repeat=len(t_gpu))
        optimum = min(makespan(one, t_gpu, t_cpu) for one in every)
        assert makespan(chosen(facts, "dali-exact"), t_gpu, t_cpu) == pytest.approx(optimum)
        beam_s, greedy_s = (
            makespan(one, t_gpu, t_cpu) for one in (chosen(facts, "dali-beam"), greedy)
        )
        assert optimum <= beam_s <= greedy_s <= 2 * optimum
        num_better += beam_s < greedy_s
    assert num_better


def algorithm_2(
    hits: IntArray, residents: set[int], w_size: int, u_size: int, always: bool
) -> list[set[int]]:
    """Return the residents after each step [steps, experts].

    The swap comes after a full window, and the lowest residents leave, as the text says.
    """
    scores, after = np.zeros(hits.shape[1], np.int64), []
    for i, workload in enumerate(hits):
        scores += workload
        if (i + 1) % w_size == 0:
            absent = sorted(set(range(len(scores))) - residents, key=lambda e: (-int(scores[e]), e))
            coming = absent[:u_size]
            going = sorted(residents, key=lambda e: (int(scores[e]), e))[:u_size]
            for one, other in zip(coming, going, strict=False):
                if always or scores[one] > scores[other]:
                    residents = residents - {other} | {one}
            scores[:] = 0
        after.append(residents)
    return after


@pytest.mark.parametrize("swap", ["always", "better"])
def test_algorithm_2(swap: str) -> None:
    for draw in draws():
        num_experts, w_size = int(draw.integers(2, 14)), int(draw.integers(1, 6))
        budget, u_size = int(draw.integers(1, num_experts)), int(draw.integers(0, num_experts))
        hits = draw.integers(0, 4, (20, num_experts)) * draw.integers(0, 2, num_experts)
        options = parse_options(
            "dali", {"swap": swap, "w_size": str(w_size), "u_size": str(u_size)}
        )
        inputs = PolicyInputs(
            [budget], num_experts, Costs.unknown(1), options=options, seed=int(draw.integers(99))
        )
        window = recipe("dali").policies(inputs).placement
        assert isinstance(window, DaliWindow)
        here, found = np.zeros(num_experts, np.bool_), []
        here[window.initial(0)] = True
        first = set(here.nonzero()[0].tolist())
        assert len(first) == budget
        for index, now in enumerate(hits):
            experts = now.nonzero()[0]
            demand = Demand(experts, now[experts], here[experts])
            step = Step(StepKind.DECODE, index)
            facts = make_facts(demand, step=step, is_kept=here.copy(), capacity=[budget])
            moves = window.update(facts)
            here[moves.evict], here[moves.admit] = False, True
            found.append(set(here.nonzero()[0].tolist()))
        assert found == algorithm_2(hits, first, w_size, u_size, swap == "always")


def test_residuals_and_what_they_prefetch() -> None:
    """Eq. 11: the mean over rows of the next gate's input less this one's. Then the top n."""
    for draw in draws():
        num_layers, num_rows = int(draw.integers(2, 5)), draw.integers(1, 6, 3).tolist()
        inputs = [torch.tensor(draw.normal(size=(num_layers, n, 4))) for n in num_rows]
        mean, routing = ResidualMean(num_layers, 4), Routing(torch.empty(0), torch.empty(0))
        for one in inputs:
            for layer, x in enumerate(one.float()):
                mean.saw_layer(layer, Step(StepKind.DECODE, 0), x, routing, x)
        rows = np.concatenate([one.float().numpy().transpose(1, 0, 2) for one in inputs])
        wanted = (rows[:, 1:] - rows[:, :-1]).mean(axis=0)
        np.testing.assert_allclose(mean.vectors(), wanted, atol=1e-5)

        num_experts, num_ahead = int(draw.integers(1, 12)), int(draw.integers(0, 5))
        predicted, is_kept = draw.integers(0, 4, num_experts), draw.random(num_experts) < 0.4
        ranked = sorted(range(num_experts), key=lambda e: (-int(predicted[e]), e))
        wanted_ids = [e for e in ranked if predicted[e] and not is_kept[e]][:num_ahead]
        assert Residual(num_ahead).choose(Ahead(1, is_kept, predicted)).tolist() == wanted_ids


def test_sizes_are_those_that_the_paper_uses() -> None:
    """(4, 1) and 1 of Mixtral, whose layers have 8 experts; (4, 8) and 4 of the others."""
    for num_experts, sizes in ((4, (4, 1, 1)), (8, (4, 1, 1)), (9, (4, 8, 4)), (64, (4, 8, 4))):
        assert dali_sizes({}, num_experts) == sizes
        policies = recipe("dali").policies(PolicyInputs([4], num_experts, Costs.unknown(1)))
        assert policies.prefetch.num_experts_ahead == sizes[2]
    assert dali_sizes({"u_size": 3, "num_prefetch": 0}, 8) == (4, 3, 0)

    def told(options: dict[str, str], num_experts: int, has_device: bool = True) -> str:
        return sizes_of("dali", "dali", options, num_experts, has_device=has_device)

    assert told({}, 8) == "1 swapped every 4 passes, 1 prefetched"
    assert told({"w_size": "2"}, 64) == "8 swapped every 2 passes, 4 prefetched"
    assert told({}, 64, has_device=False) == "8 swapped every 4 passes"
    assert sizes_of("tide", "tide", {}, 64, has_device=True) == ""
