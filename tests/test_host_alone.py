"""Without a device: traces replayed by hand, and `auto` that goes by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowtide import LLM, SamplingParams
from lowtide.core import Costs, Curve, Step, StepKind
from lowtide.engine import policy_setting
from lowtide.lab.calibrate import calibrate
from lowtide.llm import plan_model
from lowtide.policies.presets import candidates
from lowtide.policies.recipe import Setting
from lowtide.replay.host_alone import compare_alone
from lowtide.replay.simulator import Report
from lowtide.replay.trace import Trace, TraceShape, TraceWriter

MODEL = Path(__file__).parent / "goldens" / "llada2-a"
OPTIONS: dict[str, Any] = {"device": "cpu", "context": 128}
PROMPT = [7, 3, 20, 9, 4]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
COMPUTE = Curve([(1, 3.0)])
COSTS = Costs(100, 10.0, Curve([(1, 10.0)]), COMPUTE, Curve([(1, 1.0)]), 0.0)


def make_trace(passes: list[list[int]]) -> Trace:
    """One row per pass of one layer; `passes[p]` are its experts."""
    writer = TraceWriter("m", TraceShape(1, 8, len(passes[0])))
    for index, ids in enumerate(passes):
        writer.append(Step(StepKind.DECODE, index), 0, np.array([[ids]]), num_committed=1)
    return writer.trace()


def test_layers_by_hand() -> None:
    trace = make_trace([[0, 1], [0, 2], [0, 1]])
    static, lru = compare_alone(trace, ("static", "lru"), Setting([2], 8, COSTS))
    # Dense 1; both there: two computed in 6. One absent: read in 10.
    assert static.total_s == 7 + 11 + 7 and static.num_fetched == 1
    assert static.hit_rate == 5 / 6 and static.num_tokens == 3
    # Empty at first: two reads; then 2 in place of 1, and the other way round.
    assert lru.total_s == 21 + 11 + 11 and lru.num_fetched == 4 and lru.binds == "link"
    assert lru.link_s == 40 and lru.host_s == 3 * 7
    around = Setting([2], 8, replace(COSTS, sync_s=0.5))
    [static] = compare_alone(trace, ["static"], around)
    assert static.total_s == 7 + 11.5 + 7, "of the layer that reads"
    [slow] = compare_alone(trace, ["static"], Setting([8], 8, COSTS))
    assert slow.binds == "host" and slow.num_fetched == 0 and slow.total_s == 21


def test_no_more_are_resident_than_there_is_room_for() -> None:
    draw = np.random.default_rng(3)
    trace = make_trace([draw.permutation(8)[:3].tolist() for _ in range(40)])
    reports = compare_alone(trace, candidates(), Setting([3], 8, COSTS))
    # Three of eight at random: no policy can know whom.
    assert all(report.hit_rate < 0.7 for report in reports)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "text.lowtide"
    with LLM(MODEL, **OPTIONS) as llm:
        ids = [3 + i * i % 50 for i in range(48)]
        calibrate(llm, ids, "tiny", num_pieces=2).save(path)
    return path


def open_half(**options: Any) -> LLM:
    plan = plan_model(MODEL, **OPTIONS)
    half = (plan.minimum_bytes + plan.full_bytes) // 2
    return LLM(MODEL, host_memory=half, **OPTIONS, **options)


def test_auto_goes_by_simulation_on_a_calibration(calibration: Path) -> None:
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate([PROMPT], PARAMS)[0].token_ids
    with open_half(calibration=str(calibration)) as llm:
        assert llm.plan.policy in candidates() and "simulated" in llm.plan.reason
        assert llm.generate([PROMPT], PARAMS)[0].token_ids == expected
    with open_half() as llm:
        assert llm.plan.policy == "lowtide" and "simulated" not in llm.plan.reason
    with LLM(MODEL, **OPTIONS, calibration=str(calibration)) as llm:
        assert llm.plan.policy == "resident"
    with open_half(policy="lru", calibration=str(calibration)) as llm:
        assert llm.plan.policy == "lru" and llm.plan.reason == "asked for"


def test_auto_adopts_whatever_was_fastest(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Setting] = []

    def compare(trace: Trace, presets: Sequence[str], setting: Setting) -> list[Report]:
        asked.append(setting)
        return [
            Report(name, num_tokens=9 if name == "tide" else 1, total_s=1.0) for name in presets
        ]

    monkeypatch.setattr(policy_setting, "compare_alone", compare)
    with open_half(calibration=str(calibration)) as llm:
        assert llm.plan.policy == "tide" and "9 tokens/s" in llm.plan.reason
        llm.generate([PROMPT], PARAMS)
    [setting] = asked
    assert setting.costs.fetch_s > 0 and setting.frequency is not None
