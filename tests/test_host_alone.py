"""Without a device: traces replayed by hand, and `auto` that goes by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowtide import LLM, SamplingParams
from lowtide.core import Costs, Curve, Step, StepKind
from lowtide.lab.baselines import COMPARED
from lowtide.lab.calibrate import calibrate
from lowtide.lab.simulation.host_alone import compare_alone
from lowtide.lab.simulation.host_reads_ahead import AheadSlots
from lowtide.lab.simulation.simulator import Report
from lowtide.llm import plan_model
from lowtide.policies.prefetch import PrefetchOutcome
from lowtide.policies.reads_ahead import NUM_KEPT, NUM_TRIED
from lowtide.policies.recipe import PolicyInputs
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
    static, lru = compare_alone(trace, ("static", "lru"), PolicyInputs([2], 8, COSTS))
    # Dense 1; both there: two computed in 6. One absent: read in 10.
    assert static.total_s == 7 + 11 + 7 and static.num_fetched == 1
    assert static.hit_rate == 5 / 6 and static.num_tokens == 3
    # Empty at first: two reads; then 2 in place of 1, and the other way round.
    assert lru.total_s == 21 + 11 + 11 and lru.num_fetched == 4 and lru.binds == "link"
    assert lru.link_s == 40 and lru.host_s == 3 * 7
    around = PolicyInputs([2], 8, replace(COSTS, sync_s=0.5))
    [static] = compare_alone(trace, ["static"], around)
    assert static.total_s == 7 + 11.5 + 7, "of the layer that reads"
    [slow] = compare_alone(trace, ["static"], PolicyInputs([8], 8, COSTS))
    assert slow.binds == "host" and slow.num_fetched == 0 and slow.total_s == 21


def test_no_more_are_resident_than_there_is_room_for() -> None:
    draw = np.random.default_rng(3)
    trace = make_trace([draw.permutation(8)[:3].tolist() for _ in range(40)])
    reports = compare_alone(trace, COMPARED, PolicyInputs([3], 8, COSTS))
    # Three of eight at random: no policy can know whom.
    assert all(report.hit_rate < 0.7 for report in reports)


def two_layers(num_passes: int) -> Trace:
    """Return a trace of passes of one row, whose first layer always asks for experts 0 and 1.

    The second layer asks for 2 and 3, and for 4 and 5, in turn.
    """
    writer = TraceWriter("m", TraceShape(2, 8, 2))
    for index in range(num_passes):
        second = [2, 3] if index % 2 else [4, 5]
        ids = np.array([[[0, 1], second]])
        writer.append(Step(StepKind.DECODE, index), 0, ids, num_committed=1)
    return writer.trace()


def replay_ahead(num_passes: int, ahead: AheadSlots, read_s: float = 10.0) -> Report:
    costs = replace(COSTS, link_s=read_s)
    resident = np.zeros((2, 8))
    resident[0] = 1.0
    setting = replace(PolicyInputs([8, 0], 8, costs), frequency=resident)
    [report] = compare_alone(two_layers(num_passes), ["static"], setting, ahead)
    return report


def test_reads_ahead_by_the_next_layer_s_router() -> None:
    num_passes = 2 * NUM_TRIED + NUM_KEPT
    plain = replay_ahead(num_passes, AheadSlots())
    # The first layer: dense 1, two in 6. The second one: dense 1, its reads 20.
    assert plain.total_s == num_passes * (7 + 21) and plain.num_prefetched == 0
    found = replay_ahead(num_passes, AheadSlots(2, 1, gate_accuracy=1.0))
    num_ahead = NUM_TRIED + NUM_KEPT
    # From the first layer's reads, of which there are none, to the second one's router: 6 + 1.
    assert found.total_s == pytest.approx(plain.total_s - num_ahead * 7)
    assert found.prefetch == PrefetchOutcome(0, 2 * num_ahead, 0), "none is there in time"
    assert found.num_fetched == plain.num_fetched and found.link_s == pytest.approx(plain.link_s)
    one = replay_ahead(num_passes, AheadSlots(1, 1, gate_accuracy=1.0), read_s=4.0)
    assert one.prefetch == PrefetchOutcome(num_ahead, 0, 0), "a slot for one"


def test_reads_ahead_that_save_nothing_are_switched_off() -> None:
    num_passes = 2 * NUM_TRIED + 100
    wrong = replay_ahead(num_passes, AheadSlots(4, 1, gate_accuracy=0.0, piece_share=0.5))
    plain = replay_ahead(num_passes, AheadSlots())
    assert wrong.prefetch.num_wasted > NUM_TRIED, "of a trial"
    assert wrong.num_prefetched <= 2 * NUM_TRIED, "two a pass"
    assert plain.total_s < wrong.total_s < plain.total_s + 5.0 * NUM_TRIED


def test_reads_ahead_of_layers_that_ask_for_nearly_all() -> None:
    writer = TraceWriter("m", TraceShape(2, 4, 4))
    for index in range(2):
        ids = np.tile(np.arange(4), (1, 2, 1))
        writer.append(Step(StepKind.DENOISE, index), 0, ids, num_committed=1)
    setting = replace(PolicyInputs([2, 2], 4, COSTS))
    [plain] = compare_alone(writer.trace(), ["static"], setting)
    # Two are read in 20 while four are computed in 12: the disk is not idle but for the dense 1.
    assert plain.total_s == 4 * 21
    [found] = compare_alone(writer.trace(), ["static"], setting, AheadSlots(1))
    assert found.total_s == 21 + 3 * 20 and found.prefetch == PrefetchOutcome(0, 3, 0)
    [compiled] = compare_alone(writer.trace(), ["static"], setting, AheadSlots(1, 8))
    assert compiled.total_s == plain.total_s, "by itself, without reads ahead"


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


def test_auto_is_lowtide_on_the_host_also_with_a_calibration(calibration: Path) -> None:
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate([PROMPT], PARAMS)[0].token_ids
    for options in ({}, {"calibration": str(calibration)}):
        with open_half(**options) as llm:
            assert llm.plan.policy == "lowtide"
            assert llm.generate([PROMPT], PARAMS)[0].token_ids == expected
    with LLM(MODEL, **OPTIONS, calibration=str(calibration)) as llm:
        assert llm.plan.policy == "resident"
    with open_half(policy="lru", calibration=str(calibration)) as llm:
        assert llm.plan.policy == "lru" and llm.plan.reason == "asked for"
