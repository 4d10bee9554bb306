"""A preset is one place: here one is added, with an option of its own, used, and taken out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from common.synth_trace import synth_trace
from hypothesis import given
from hypothesis import strategies as st

from lowtide import LLM, SamplingParams
from lowtide.core import Assignment, BoolArray, Facts, IntArray, MoEShape, Step
from lowtide.errors import UsageError
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import simulate
from lowtide.llm import plan_model
from lowtide.policies.assignment import divide
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.placement import Placement
from lowtide.policies.presets import (
    AUTO,
    check_policy,
    lossless_presets,
    preset_names,
    recipe,
    register,
    unregister,
)
from lowtide.policies.ranks import Ranks
from lowtide.policies.recipe import PolicyInputs, PolicyOption, Recipe
from lowtide.replay.trace import TraceShape

MODEL = Path(__file__).parent / "goldens" / "llada2-a"
DOCUMENT = Path(__file__).parents[1] / "docs" / "policies.md"
STRIDE = PolicyOption("stride", 2, 1, 9)


class EveryNth(Placement):
    """Keeps every so many experts, starting from the step's index."""

    def __init__(self, num_layers: int, num_experts: int, stride: int) -> None:
        super().__init__(num_layers, num_experts)
        self._stride = stride

    def initial(self, layer: int) -> IntArray:
        return np.empty(0, np.int64)

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        self._rank.fill(0)
        self._rank[:, step.index % self._stride :: self._stride] = 1
        return Ranks(self._rank, capacity)

    def may_enter(self, facts: Facts) -> BoolArray:
        return ~facts.is_kept


class EverySecond:
    """The device has every second expert of a step."""

    def __call__(self, facts: Facts) -> Assignment:
        experts, is_resident = facts.demand.experts, facts.demand.is_resident
        mask = np.arange(len(experts)) % 2 == 0
        return divide(facts.demand, mask & (is_resident | facts.can_fetch))


TOY = Recipe(
    lambda s: EveryNth(s.num_layers, s.num_experts, STRIDE.of(s)),
    lambda s: EverySecond(),
    options=(STRIDE,),
)


@pytest.fixture
def toy() -> Iterator[str]:
    register("toy", TOY)
    yield "toy"
    unregister("toy")


def test_a_preset_that_is_not_there_is_refused_and_one_that_is_cannot_be_added() -> None:
    with pytest.raises(UsageError, match="'toy' is not known"):
        check_policy("toy", {})
    with pytest.raises(UsageError, match="'toy' is not known"):
        unregister("toy")
    for name in ("tide", "auto"):
        with pytest.raises(UsageError, match="already"):
            register(name, TOY)


def test_its_name_and_its_option_are_checked(toy: str) -> None:
    assert toy in preset_names() and toy in lossless_presets()
    check_policy(toy, {})
    check_policy(toy, {"stride": "3"})
    with pytest.raises(UsageError, match="stride must be a whole number from 1 to 9, not '0'"):
        check_policy(toy, {"stride": "0"})
    with pytest.raises(UsageError, match="no option 'tau'; its options: stride"):
        check_policy(toy, {"tau": "4"})


@given(
    low=st.floats(-1e6, 1e6),
    width=st.floats(0.5, 1e6),
    share=st.floats(0, 1),
    is_whole=st.booleans(),
)
def test_an_option_takes_its_type_from_its_default(
    low: float, width: float, share: float, is_whole: bool
) -> None:
    ends = (int(low), int(low) + 1 + int(width)) if is_whole else (low, low + width)
    default = ends[0] if is_whole else low + share * width
    given: list[PolicyOption[float | None]] = [
        PolicyOption("x", default, *ends),
        PolicyOption("x", None, *ends),
    ]
    for option in given:
        assert option.is_whole == is_whole
        value = ends[0] + share * (ends[1] - ends[0])
        text = f"{value:.6f}"
        if is_whole:
            with pytest.raises(UsageError, match="a whole number from"):
                option.parse(text)
        elif ends[0] <= float(text) <= ends[1]:
            assert option.parse(text) == float(text)
    assert PolicyOption("decay", 0.9, 0.0, 1.0).parse("0.5") == 0.5
    assert not PolicyOption("decay", 0.9, 0, 1).is_whole and PolicyOption("n", 3, 0.0, 9.0).is_whole


def test_it_is_simulated(toy: str) -> None:
    shape = TraceShape(2, 16, 2, 64, 32)
    trace = synth_trace(shape, num_blocks=2, steps_per_block=3, num_prompt_rows=4)
    setting = PolicyInputs([8, 8], 16, load_profile("rtx3090").costs(MoEShape(*shape)))
    reports = [simulate(trace, toy, setting.having(stride=n)) for n in (1, 2, 9)]
    assert all(report.num_tokens == trace.num_committed for report in reports)
    assert len({report.num_moved for report in reports}) == 3


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_it_runs_a_model_and_changes_no_token(toy: str, device: str) -> None:
    prompt, params = [7, 3, 20, 9, 4], SamplingParams(max_tokens=8, ignore_eos=True)
    options: dict[str, object] = {"context": 128, "device": device}
    plan = plan_model(MODEL, **options)
    half = (plan.minimum_bytes + plan.full_bytes) // 2
    options["host_memory" if device == "cpu" else "gpu_memory"] = half
    ids = []
    for policy, own in ((toy, {"stride": "3"}), ("tide", {})):
        with LLM(MODEL, policy=policy, policy_options=own, **options) as llm:
            assert llm.plan.policy == policy
            ids.append(llm.generate([prompt], params)[0].token_ids)
            assert llm.stats()["num_misses"] > 0
    assert ids[0] == ids[1]


def test_the_document_has_every_preset_and_every_option() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, made in CATALOGUE.items():
        assert f"`{name}`" in text
        for option in made.options:
            assert f"`{option.name}" in text, (name, option.name)


@pytest.mark.parametrize("name", [*preset_names(), AUTO])
def test_a_run_on_the_host_says_what_of_its_policy_is_not_used(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line where a preset that was asked for is its placement alone there."""
    made = None if name == AUTO else recipe(name)
    plan = plan_model(MODEL, context=64)
    budget = plan.minimum_bytes + 4 * plan.host.slot_bytes
    if name == "resident":
        budget = plan.full_bytes
    options = {"miss": "wait"} if name == "buddymoe" else {}  # it has no profile
    given = {"context": 64, "device": "cpu", "policy": name, "host_memory": budget}
    with LLM(MODEL, policy_options=options, **given):  # type: ignore[arg-type]
        pass
    said = [r.getMessage() for r in caplog.records if "placement alone" in r.getMessage()]
    is_told = made is not None and bool(made.unused_without_device) and name != "resident"
    assert len(said) == int(is_told)
    if is_told:
        assert said[0].startswith(f"Without a device {name} is its placement alone: its ")
