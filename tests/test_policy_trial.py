"""`auto` beside a device: two policies in turn, the faster one stays, and again later."""

from __future__ import annotations

import pytest

from lowtide.policies.trial import NUM_KEPT, NUM_TRIED, PolicyTrial


def run(trial: PolicyTrial, num_passes: int, seconds: dict[str, float], rows: int = 1) -> list[str]:
    """The policy of each pass."""
    ran = []
    for _ in range(num_passes):
        ran.append(trial.current)
        trial.note_pass(rows, seconds[trial.current])
    return ran


@pytest.mark.parametrize("faster", ["one", "two"])
def test_each_runs_twenty_passes_and_the_faster_one_stays(faster: str) -> None:
    trial = PolicyTrial("one", "two")
    seconds = {"one": 2.0, "two": 2.0} | {faster: 1.0}
    assert run(trial, 2 * NUM_TRIED, seconds) == ["one"] * NUM_TRIED + ["two"] * NUM_TRIED
    assert trial.current == faster and trial.verdict is not None
    assert (trial.verdict.faster_s, trial.verdict.slower_s) == (1.0, 2.0)
    assert set(run(trial, NUM_KEPT, seconds)) == {faster} and trial.verdict is None


def test_it_is_tried_again_from_the_policy_in_force() -> None:
    trial = PolicyTrial("one", "two")
    run(trial, 2 * NUM_TRIED + NUM_KEPT, {"one": 2.0, "two": 1.0})
    again = run(trial, 2 * NUM_TRIED, {"one": 1.0, "two": 2.0})
    assert again == ["two"] * NUM_TRIED + ["one"] * NUM_TRIED and trial.current == "one"


def test_prompts_are_not_compared_with_answers() -> None:
    """The second had a long prompt in each of its passes: nothing is known."""
    trial = PolicyTrial("one", "two")
    run(trial, NUM_TRIED, {"one": 1.0})
    run(trial, NUM_TRIED, {"two": 0.1}, rows=512)
    assert trial.current == "one" and "comparable" in str(trial.verdict)


def test_a_slow_beginning_of_cold_slots_decides_nothing() -> None:
    trial = PolicyTrial("one", "two")
    run(trial, NUM_TRIED, {"one": 1.0})
    run(trial, NUM_TRIED // 2 - 1, {"two": 9.0})
    run(trial, NUM_TRIED // 2 + 1, {"two": 0.9})
    assert trial.current == "two"
