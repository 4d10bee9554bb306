"""Answers of a user's own policy that cannot be carried out: an error, and the engine goes on.

Ranks are read by compiled code from their addresses: what they must be is asked first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from whole import check_account, check_idle

from lowtide import LLM, SamplingParams
from lowtide.core import Assignment, Facts, IntArray, Moves, Step
from lowtide.errors import InternalError
from lowtide.policies.assignment import Greedy
from lowtide.policies.placement import LRU, Placement
from lowtide.policies.prefetch import Ahead, Prefetch
from lowtide.policies.ranks import Ranks
from lowtide.policies.recipe import PolicyInputs, Recipe

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[7, 3, 20, 9, 4], [4, 9, 20]]


class Fair(Placement):
    """Ranks as they should be; cases change them."""

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs.num_layers, inputs.num_experts)
        self.inputs = inputs
        self.ranks = np.zeros((inputs.num_layers, inputs.num_experts))

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        return Ranks(self.ranks, capacity, per_expert=1)


def ranked(change: Callable[[Ranks], Any]) -> Recipe:
    class Changed(Fair):
        def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
            answer: Ranks = change(super().begin_pass(step, num_residents, capacity))
            return answer

    return Recipe(Changed)


def beginning(first: Any) -> Recipe:
    class Begins(Fair):
        def initial(self, layer: int) -> IntArray:
            ids: IntArray = first
            return ids

    return Recipe(Begins)


def moving(change: Callable[[Moves], Moves]) -> Recipe:
    class Moving(Fair):
        def update(self, facts: Facts) -> Moves:
            return change(super().update(facts))

    return Recipe(Moving)


def assigned(change: Callable[[Assignment], Any]) -> Recipe:
    greedy = Greedy()
    return Recipe(
        lambda inputs: LRU(inputs.num_layers, inputs.num_experts),
        lambda inputs: lambda facts: change(greedy(facts)),
    )


class Fetching(Prefetch):
    def __init__(self, ids: list[int]) -> None:
        super().__init__(len(ids))
        self._ids = np.array(ids)

    def score(self, ahead: Ahead) -> IntArray:
        return self._ids

    def choose(self, ahead: Ahead) -> IntArray:
        return self._ids


def prefetching(*ids: int) -> Recipe:
    def made(inputs: PolicyInputs) -> Prefetch:
        return Fetching([*ids])

    return Recipe(lambda inputs: LRU(inputs.num_layers, inputs.num_experts), prefetch=made)


WRONG_RANKS = {
    "no ranks": (lambda r: None, "which is no Ranks"),
    "too few experts": (lambda r: r._replace(rank=r.rank[:, :3].copy()), "an array of float64"),
    "too few layers": (lambda r: r._replace(room=r.room[:1].copy()), "an array of int64"),
    "single precision": (lambda r: r._replace(rank=r.rank.astype(np.float32)), "of float64"),
    "cannot be changed": (
        lambda r: r._replace(rank=np.broadcast_to(r.rank[0], r.rank.shape)),
        "that can be changed",
    ),
    "no numbers": (lambda r: r._replace(rank=r.rank + np.nan), "no numbers"),
    "no room": (lambda r: r._replace(room=r.room - 99), "room of layers"),
    "room beyond": (lambda r: r._replace(room=r.room + 1), "room of layers"),
    "raised by nan": (lambda r: r._replace(per_token=np.nan), "give finite numbers"),
    "at most fewer than none": (lambda r: r._replace(most=-2), "give a number from 0"),
    "no clock": (lambda r: r._replace(clock=np.zeros(0, np.int64)), "A placement's clock"),
    "no worth": (lambda r: r._replace(worth=np.zeros(0)), "A placement's worth"),
}
NO_IDS = np.empty(0, np.int64)
BESIDE_A_DEVICE = {
    "admits no expert": (
        moving(lambda m: m._replace(admit=np.append(m.admit, -1))),
        "admits expert -1; there are 32",
    ),
    "evicts an unknown one": (
        moving(lambda m: m._replace(evict=np.append(m.evict, 32))),
        "evicts expert 32; there are 32",
    ),
    "runs nobody": (assigned(lambda a: Assignment(NO_IDS, NO_IDS, NO_IDS)), "each once"),
    "runs one twice": (
        assigned(lambda a: a._replace(host=np.append(a.host, a.host[:1]), fetch=a.host)),
        "each once",
    ),
    "runs an unknown one": (
        assigned(lambda a: a._replace(host=np.append(a.host, 32))),
        "each once",
    ),
    "no assignment": (assigned(lambda a: None), "which is no Assignment"),
    "prefetches an unknown one": (prefetching(3, 32), "prefetches expert 32"),
    "prefetches one twice": (prefetching(3, 3), "one of them twice"),
}
BEGINNINGS = {
    "no expert": (np.array([-1, 0]), "begins with expert -1; there are 32"),
    "one twice": (np.array([1, 1]), "one of them twice"),
    "a list": ([0, 1], "not an array of expert ids"),
}


def open_demo(policy: Recipe | str, device: str = "cpu") -> LLM:
    memory = "host_memory" if device == "cpu" else "gpu_memory"
    return LLM("demo:autoregressive", device=device, policy=policy, context=256, **{memory: "6MiB"})


def ids(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    with open_demo("lru") as llm:
        return ids(llm)


def check_refused(policy: Recipe, device: str, words: str, right: list[list[int]]) -> None:
    with open_demo(policy, device) as llm:
        for _ in range(2):
            with pytest.raises(InternalError, match=words):
                llm.generate(PROMPTS, PARAMS)
            check_account(llm)
        llm.adopt_policy("lru")
        assert ids(llm) == right
        check_idle(llm)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", WRONG_RANKS)
def test_ranks_that_decide_nothing(name: str, device: str, right: list[list[int]]) -> None:
    change, words = WRONG_RANKS[name]
    check_refused(ranked(change), device, words, right)


@pytest.mark.parametrize("name", BESIDE_A_DEVICE)
def test_answers_beside_a_device(name: str, right: list[list[int]]) -> None:
    policy, words = BESIDE_A_DEVICE[name]
    check_refused(policy, "emulated", words, right)


@pytest.mark.parametrize("name", BEGINNINGS)
def test_first_residents(name: str) -> None:
    first, words = BEGINNINGS[name]
    with pytest.raises(InternalError, match=words):
        open_demo(beginning(first))


def test_answers_that_are_fair(right: list[list[int]]) -> None:
    for device in ("cpu", "emulated"):
        with open_demo(Recipe(Fair), device) as llm:
            assert ids(llm) == right
            check_account(llm)
