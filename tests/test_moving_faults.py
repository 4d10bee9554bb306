"""Requests that are cancelled, refused or many while memory moves; formats and caches beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf_oracle
import pytest
from examples import examples
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from inside import loop_of
from test_gguf_models import choosing
from test_moving_memory import CONTEXT, PROMPTS, answers, budget, moving_of
from test_moving_memory import model as model  # a fixture
from test_moving_memory import watched as watched  # a fixture
from test_moving_memory import words as words  # a fixture
from test_paged_arena import physical_bytes
from whole import passes_that_wait

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.errors import PageError
from lowtide.llm import plan_model
from lowtide.memory.host_pages import HostPages
from lowtide.model_writing.synth import synth

LONG = SamplingParams(max_tokens=900, ignore_eos=True)
TIGHT = 768  # tokens: what the longest prompt and its answer take, and no more


class System:
    """The kernel's answers to calls for memory: so many of the next ones are refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_passed = 0  # before any is refused
        self.num_refused = 0
        commit = HostPages.commit

        def answer(pages: HostPages, start: int, stop: int) -> None:
            if self.num_passed:
                self.num_passed -= 1
            elif self.num_refused:
                self.num_refused -= 1
                raise PageError("The system refuses.")
            commit(pages, start, stop)

        monkeypatch.setattr(HostPages, "commit", answer)

    def refuse(self, num_passed: int, num_refused: int) -> None:
        self.num_passed, self.num_refused = num_passed, num_refused


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    host_memory = budget(plan_model(model, context=CONTEXT), 12)
    with LLM(model, policy="lru", cache="off", context=CONTEXT, host_memory=host_memory) as llm:
        yield llm


def check_returned(llm: LLM) -> None:
    """Nobody runs: the cache has no memory, and the kernel counts as the budget does."""
    moving = moving_of(llm)
    shared = moving.shared
    [(arena, _)] = shared.kv.arenas
    assert shared.kv.committed_bytes == physical_bytes(arena) == 0
    assert physical_bytes(shared.arena) == shared.budget.shares()["expert slots"]
    moving.shared.slots.ledger.check_integrity()


def outcomes(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int] | PageError]:
    """Of requests that are asked at once, each by itself."""

    def ask(prompt: list[int]) -> list[int] | PageError:
        try:
            return answers(llm, [prompt])[0]
        except PageError as error:
            return error

    with ThreadPoolExecutor(max_workers=len(prompts)) as threads:
        return list(threads.map(ask, prompts))


def test_what_is_cancelled_while_memory_moves_gives_it_back(
    llm: LLM, words: list[list[int]], watched: list[dict[str, int]]
) -> None:
    with ThreadPoolExecutor() as threads:
        for num_events in (1, 3, 30):
            other = threads.submit(answers, llm, PROMPTS[:3])
            with closing(llm.stream(PROMPTS[3], LONG)) as left:
                for _ in range(num_events):
                    next(left)
            assert other.result() == words[:3]
    assert answers(llm) == words
    check_returned(llm)
    assert llm.stats()["num_slots_given"] > 0


# Of the calls that follow, so many are answered and so many refused; who then asks, and whether
# somebody leaves in the midst of it.
Fault = tuple[int, int, list[int], bool]


@examples(4)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(0, 30),
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.booleans(),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_a_refused_request_fails_alone_and_the_next_are_answered(
    model: Path, words: list[list[int]], faults: list[Fault]
) -> None:
    """The system may refuse at any call, a cache's or the slots', once or many times."""
    plan = plan_model(model, context=CONTEXT)
    options: dict[str, Any] = {"context": CONTEXT, "host_memory": budget(plan, 12)}
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(model, policy="lru", cache="off", **options) as llm,
    ):
        system = System(patch)
        for num_passed, num_refused, asked, leaves in faults:
            system.refuse(num_passed, num_refused)
            if leaves:
                with closing(llm.stream(PROMPTS[3], LONG)) as left:
                    try:
                        next(left)
                        next(left)
                    except PageError:
                        pass
            found = outcomes(llm, [PROMPTS[place] for place in asked])
            for place, each in zip(asked, found, strict=True):
                assert isinstance(each, PageError) or each == words[place]
            system.refuse(0, 0)
            assert answers(llm) == words
            check_returned(llm)


def test_who_is_refused_in_the_midst_of_growing_leaves_room_for_the_next(
    llm: LLM, words: list[list[int]], system: System, watched: list[dict[str, int]]
) -> None:
    """Its prompt has memory, the tokens after it have none."""
    events = llm.stream(PROMPTS[1], LONG)
    with passes_that_wait(llm):
        next(events)  # it begins
        next(events)
        shared = moving_of(llm).shared
        assert shared.kv is not None and shared.kv.committed_bytes > 0
        system.refuse(0, 1 << 30)
    with pytest.raises(PageError, match="refuses"):
        list(events)
    system.refuse(0, 0)
    check_returned(llm)
    assert answers(llm) == words


def test_thirty_at_once_are_answered_as_one(
    llm: LLM, words: list[list[int]], watched: list[dict[str, int]]
) -> None:
    places = [(7 * i) % 4 for i in range(30)]
    found = answers(llm, [PROMPTS[place] for place in places])
    assert found == [words[place] for place in places]
    check_returned(llm)
    assert max(shares["KV cache"] for shares in watched) > 0


@pytest.mark.parametrize(
    ("device", "form"),
    [("cpu", {"format": "q4"}), ("emulated", {"format": "q8", "activations": "int8"})],
)
def test_rounded_weights_move_as_their_own(
    form: dict[str, Any], device: str, model: Path, watched: list[dict[str, int]]
) -> None:
    options: dict[str, Any] = {"context": TIGHT, "device": device, **form}
    check_moving(lambda **others: LLM(model, **options, **others), model, options)


def test_ggufs_packed_experts_move(
    tmp_path: Path, watched: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of different types: a slot is as large as the largest."""
    sizes = {**gguf_oracle.SIZES["qwen3_moe"], "num_experts": 24}
    monkeypatch.setitem(gguf_oracle.SIZES, "qwen3_moe", sizes)
    path = tmp_path / "model.gguf"
    kinds = (Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.IQ4_XS)
    write_gguf(path, "qwen3_moe", gguf_oracle.random_model("qwen3_moe", 0), choosing(kinds))
    options: dict[str, Any] = {"context": TIGHT}
    check_moving(lambda **others: LLM(path, **options, **others), path, options)


def check_moving(load: Callable[..., LLM], path: Path, options: dict[str, Any]) -> None:
    """The same words and logits with memory that moved as with everything resident."""
    plan = plan_model(path, **options)
    name = "host_memory" if plan.gpu is None else "gpu_memory"
    memory = plan.minimum_bytes + 10 * plan.fast_tier.slot_bytes
    found = []
    for limit in ({}, {name: memory}):
        with load(policy="lru", cache="off", **limit) as llm:
            words = [answers(llm), [answers(llm, [prompt])[0] for prompt in PROMPTS]]
            found.append((words, llm.logits(PROMPTS[3]).numpy().tobytes()))
            stats = llm.stats()
            if limit:
                check_returned(llm)
    assert found[0] == found[1]
    assert stats["num_slots_lent"] > 0 and stats["num_slots_given"] > 0


@pytest.mark.parametrize("kv_cache", [True, "prefix", "dual"])
def test_passes_that_are_cancelled_or_refused_leave_the_others_their_words(
    kv_cache: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLaDA-MoE, whose workspace moves, and under `prefix` and `dual` its cache as well."""
    folder = synth("llada_moe", "tiny", tmp_path / "m", seed=2)
    options: dict[str, Any] = {"context": 1024, "kv_cache": kv_cache}
    plan = plan_model(folder, **options)
    memory = plan.minimum_bytes + 4 * plan.host.slot_bytes
    diffusion = DiffusionParams(steps=4, block_length=32)
    params = SamplingParams(max_tokens=64, ignore_eos=True, diffusion=diffusion)
    prompts = [[i % 40 for i in range(n)] for n in (20, 700, 300, 60)]

    def words(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
        return [list(completion.token_ids) for completion in llm.generate(prompts, params)]

    with LLM(folder, **options) as llm:  # bfloat16's roundings may differ in a batch
        alone, together = [words(llm, [prompt]) for prompt in prompts], words(llm, prompts)
    with LLM(folder, policy="lru", cache="off", host_memory=memory, **options) as llm:
        system, num_refused = System(monkeypatch), 0
        room = moving_of(llm).shared.room
        for num_passed in (0, 4):
            with closing(llm.stream(prompts[1], params)) as left:
                next(left)
            loop_of(llm).run(lambda _: room.shrink())
            system.refuse(num_passed, 1 << 30)
            for prompt, expected in zip(prompts, alone, strict=True):
                try:
                    assert words(llm, [prompt]) == expected
                except PageError:
                    num_refused += 1
            system.refuse(0, 0)
            assert words(llm, prompts) == together
        shared = moving_of(llm).shared
    assert num_refused > 0
    assert shared.budget.num_free_bytes == shared.budget.num_bytes
    assert physical_bytes(shared.arena) == 0
