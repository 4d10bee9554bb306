"""Every pass adopts a plan of its own: what it has room in, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from inside import engine_of
from poison import PoisonedWorkspace

from lowtide.engine.running import pass_room
from lowtide.engine.running.pass_room import paged_room
from lowtide.errors import PageError, PlanError
from lowtide.families import families
from lowtide.llm import LLM, plan_model
from lowtide.memory.chunking import MAX_BUCKETS, Counts
from lowtide.memory.pages import PageBudget
from lowtide.memory.pass_planner import PassPlan, PassPlanner
from lowtide.memory.pass_plans import PagedRoom, PassPlans
from lowtide.memory.planner import ArenaPlaces
from lowtide.model_writing.synth import write_checkpoint
from lowtide.params import DiffusionParams, SamplingParams

CONTEXT = 1024
PROMPT = np.random.default_rng(1).integers(0, 40, 940).tolist()


def params(max_tokens: int, steps: int, **options: float) -> SamplingParams:
    options = {"remasking": "low_confidence", **options}
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        diffusion=DiffusionParams(steps=steps, **options),
    )


@pytest.fixture(scope="module", params=["llada", "llada_moe", "dream"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, but for a dense MLP that is wide enough to be divided before anything else."""
    tiny, place = families()[request.param].sizes()["tiny"], tmp_path_factory.mktemp("made")
    wide = {"mlp_hidden_size": 2048, "intermediate_size": 2048}
    config = {**tiny.config, **{name: wide[name] for name in wide.keys() & tiny.config.keys()}}
    return write_checkpoint(replace(tiny, config=config), place / request.param, seed=2)


def answers(llm: LLM) -> tuple[list[int], torch.Tensor]:
    [plain] = llm.generate([PROMPT], params(64, 4))
    [guided] = llm.generate([PROMPT[:440]], params(64, 4, cfg_scale=0.5))
    return list(plain.token_ids + guided.token_ids), llm.logits(PROMPT)


def noted_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Counts, PassPlan]]:
    """All that passes adopt from now on."""
    adopted: list[tuple[Counts, PassPlan]] = []
    for_pass = PassPlans.for_pass

    def noted(self: PassPlans, counts: Counts) -> PassPlan:
        plan = for_pass(self, counts)
        adopted.append((counts, plan))
        return plan

    monkeypatch.setattr(PassPlans, "for_pass", noted)
    return adopted


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_every_budget_has_the_same_answers(
    folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisoned: NaN wherever nothing is alive, at the least budget, above it and with all whole.

    One plan holds for all kernels: it knows of none.
    """
    monkeypatch.setattr(pass_room, "Workspace", PoisonedWorkspace)
    adopted = noted_plans(monkeypatch)
    plan = plan_model(folder, context=CONTEXT)
    whole_bytes = plan.budget_bytes
    assert whole_bytes >= plan.full_bytes  # as it is by default, where there is memory
    found, chunks = [], []
    for budget in (plan.minimum_bytes, (plan.full_bytes + whole_bytes) // 2, whole_bytes):
        options = {"context": CONTEXT, "host_memory": budget}
        options["kernels"] = kernels
        with LLM(folder, **options) as llm:
            found.append(answers(llm))
            workspace, room_bytes = engine_of(llm).model.compute.workspace, llm.plan.host
            assert isinstance(workspace, PoisonedWorkspace)
            assert workspace.touched_bytes <= room_bytes.workspace_bytes <= budget
            chunks.append(max(sum(plan.chunks.values()) for _, plan in adopted))
            adopted.clear()
    assert chunks[0] >= chunks[1] >= chunks[2] == 4 < chunks[0]
    for ids, logits in found[1:]:
        assert ids == found[0][0] and torch.equal(logits, found[0][1])


def test_a_request_has_few_plans_and_each_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted = noted_plans(monkeypatch)
    least_bytes = plan_model(folder, context=CONTEXT).minimum_bytes
    with LLM(folder, context=CONTEXT, host_memory=least_bytes) as llm:
        llm.generate([PROMPT[:100]], params(640, 40, block_length=640))
        room_bytes = llm.plan.host.workspace_bytes
    assert len(adopted) >= 40
    assert 1 < len({id(plan) for _, plan in adopted}) <= MAX_BUCKETS
    assert all(plan.needed_bytes <= room_bytes for _, plan in adopted)
    logit_rows = [counts.logit_rows for counts, _ in adopted]
    assert logit_rows == sorted(logit_rows, reverse=True)


@pytest.fixture(scope="module")
def planner(folder: Path) -> PassPlanner:
    with LLM(folder, context=CONTEXT) as llm:
        planner = engine_of(llm).planner.pass_planner
        assert planner is not None
        return planner


def of_tokens(num_tokens: int) -> Counts:
    return Counts(num_tokens, num_tokens, num_tokens)


@pytest.fixture
def budget() -> PageBudget:
    return PageBudget(24 << 20)


@pytest.fixture
def room(budget: PageBudget) -> Iterator[PagedRoom]:
    yield paged_room(32 << 20, budget)


def test_memory_comes_and_goes_with_the_passes(
    planner: PassPlanner, budget: PageBudget, room: PagedRoom
) -> None:
    plans, others = PassPlans(planner, room), budget.open("others")
    [account] = [account for account in budget.accounts if account.owner == "workspace"]
    long = plans.for_pass(of_tokens(1500))
    assert 0 <= account.num_bytes - long.needed_bytes < 4096
    assert sum(long.chunks.values()) == 4
    short = plans.for_pass(of_tokens(100))
    assert account.num_bytes - long.needed_bytes < 4096  # nobody asked for it
    room.shrink(short.placement.arena_bytes, short.library_bytes)
    assert 0 <= account.num_bytes - short.needed_bytes < 4096
    least_bytes = planner.least_bytes(of_tokens(1500))
    others.draw(budget.num_free_bytes + account.num_bytes - least_bytes - 4096)
    tight = plans.for_pass(of_tokens(1500))
    assert tight.needed_bytes <= long.needed_bytes and budget.num_free_bytes >= 0
    room.shrink()
    assert account.num_bytes == 0


def test_what_libraries_held_is_given_back_for_a_larger_range(
    budget: PageBudget, room: PagedRoom
) -> None:
    """Memory that one pass no longer needs pays for the next one's only once it is free."""

    def plan(range_bytes: int, library_bytes: int) -> PassPlan:
        return PassPlan(Counts(1, 1, 1), {}, ArenaPlaces({}, range_bytes), library_bytes, "")

    half = budget.num_bytes // 2
    room.hold(plan(half, half))
    room.hold(plan(half + (1 << 20), half - (1 << 20)))
    assert budget.num_free_bytes == 0


def test_others_give_way_to_a_pass_or_it_is_refused(
    planner: PassPlanner, budget: PageBudget, room: PagedRoom
) -> None:
    plans, others = PassPlans(planner, room), budget.open("others")
    others.draw(budget.num_bytes - 8192)
    with pytest.raises(PlanError, match="and 4097 are free"):
        plans.for_pass(of_tokens(1500))
    others.give_way = lambda num_bytes: None
    with pytest.raises(PageError, match="workspace wants .* bytes more"):
        plans.for_pass(of_tokens(1500))
    others.give_way = others.give_back
    plan = plans.for_pass(of_tokens(1500))
    assert plan.needed_bytes == planner.least_bytes(of_tokens(1500))
    assert budget.num_free_bytes < 4096


def test_what_cannot_fit_is_refused_with_the_numbers(planner: PassPlanner) -> None:
    least_bytes = planner.least_bytes(of_tokens(1500))
    with pytest.raises(PlanError, match=f"1500 tokens needs {least_bytes} bytes .* Lower"):
        planner.plan(of_tokens(1500), least_bytes - 1)


def test_a_plan_that_is_known_is_not_searched_again(planner: PassPlanner, room: PagedRoom) -> None:
    plans = PassPlans(planner, room)
    assert plans.for_pass(of_tokens(1500)) is plans.for_pass(of_tokens(1500))


def test_largest_counts_are_the_whole_cache(folder: Path) -> None:
    with LLM(folder, context=CONTEXT) as llm:
        counts = engine_of(llm).planner.largest_counts
        assert counts.tokens == counts.logit_rows == llm.plan.max_rows
