"""The loop that runs a loaded model for several threads.

Each thread gets the answer that it would get alone, or its own error; nothing hangs, nothing is
left behind.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from examples import examples
from hash_model import is_all_free
from hypothesis import given
from hypothesis import strategies as st
from inside import engine_of, intake_of, loop_of, worker_of
from whole import LIMIT_S, Setting, check_idle, settle, wait_until

from lowtide import SamplingParams
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Event, Finished, Prefill, Request
from lowtide.engine.running import policy_setting
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.loop import QueuedAnswers
from lowtide.engine.running.worker import WorkItem
from lowtide.errors import InternalError, LowtideError, PlanError, StorageError, UsageError
from lowtide.layers.batch import Batch
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth

FAMILIES = ("qwen3_moe", "llada2")
PROMPTS = ([5, 17, 3], [9], [44, 3, 3, 80] * 10, [7] * 20)
PARAMS = [
    SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=4, ignore_eos=True)
    for max_tokens, temperature in ((9, 0.0), (40, 0.0), (17, 0.9), (33, 0.0))
]


class Model(NamedTuple):
    """A model and what it answers to each prompt alone."""

    folder: Path
    answers: list[list[int]]
    logits: torch.Tensor  # of the first prompt

    def open(self, share: float = 0.4, **options: Any) -> LLM:
        return Setting("lru", share).open(self.folder, dtype="float32", **options)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = synth(request.param, "tiny", tmp_path_factory.mktemp("loop") / "model", seed=3)
    with Setting("lru", 1.0).open(folder, dtype="float32") as llm:
        pairs = zip(PROMPTS, PARAMS, strict=True)
        answers = [llm.generate([prompt], params)[0].token_ids for prompt, params in pairs]
        return Model(folder, answers, llm.logits(PROMPTS[0]))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = engine_threads()
    yield
    gc.collect()
    wait_until(lambda: not engine_threads() - before)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lowtide-engine"}


class Together:
    """Calls in threads of their own, and what became of each."""

    def __init__(self, *calls: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(len(calls), "test")
        self.futures: list[Future[Any]] = [self._pool.submit(call) for call in calls]

    def results(self) -> list[Any]:
        """In the order of the calls; exceptions are results."""
        errors = [future.exception(LIMIT_S) for future in self.futures]
        self._pool.shutdown()
        pairs = zip(errors, self.futures, strict=True)
        return [future.result() if error is None else error for error, future in pairs]


class Passes:
    """The model's passes, one by one: counted, held, failed as a test says."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch) -> None:
        self.num_segments: list[int] = []
        self.errors: dict[int, BaseException] = {}  # by the number of the pass
        self.is_held, self._may_go_on = threading.Event(), threading.Event()
        self._may_go_on.set()
        self._first_held = 0
        forward = engine_of(llm).model.forward

        def watched(batch: Any) -> Any:
            number = len(self.num_segments)
            self.num_segments.append(len(batch.segments))
            if number >= self._first_held and not self._may_go_on.is_set():
                self.is_held.set()
                assert self._may_go_on.wait(LIMIT_S)
            if number in self.errors:
                raise self.errors[number]
            return forward(batch)

        patch.setattr(engine_of(llm).model, "forward", watched)

    @contextmanager
    def held(self, first: int = 0) -> Iterator[None]:
        """Meanwhile the next pass does not end, or the one of number `first`."""
        self._first_held = first
        self.is_held.clear()
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()


def ask(llm: LLM, which: int) -> list[int]:
    return llm.generate([PROMPTS[which]], PARAMS[which])[0].token_ids


def asks(llm: LLM, which: int) -> Callable[[], list[int]]:
    return lambda: ask(llm, which)


def test_who_asks_at_once_shares_passes_and_gets_the_answer_it_gets_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.open() as llm:
        passes = Passes(llm, monkeypatch)
        with passes.held():
            first = Together(asks(llm, 1))
            assert passes.is_held.wait(LIMIT_S)
            others = Together(asks(llm, 0), asks(llm, 3), lambda: llm.generate([*PROMPTS], PARAMS))
            wait_until(lambda: worker_of(llm).mailbox.qsize() == 3)
        assert first.results() == [model.answers[1]]
        *alone, together = others.results()
        assert alone == [model.answers[0], model.answers[3]]
        assert [completion.token_ids for completion in together] == model.answers
        assert passes.num_segments[0] == 1 and max(passes.num_segments) >= 4
        check_idle(llm)


def test_events_are_called_by_the_place_of_their_prompt_and_come_in_order(model: Model) -> None:
    seen: list[Event] = []
    own_thread = threading.current_thread()

    def note(event: Event) -> None:
        assert threading.current_thread() is own_thread
        seen.append(event)

    with model.open() as llm:
        ask(llm, 0)
        llm.generate([*PROMPTS], PARAMS, note)
    assert {event.request for event in seen} == set(range(len(PROMPTS)))
    for place, answer in enumerate(model.answers):
        own = [event for event in seen if event.request == place]
        assert isinstance(own[0], Prefill) and own[0].num_total == len(PROMPTS[place])
        assert isinstance(own[-1], Finished) and list(own[-1].token_ids) == answer


def test_a_slow_reader_delays_no_other(model: Model) -> None:
    with model.open() as llm:
        stream = llm.stream(PROMPTS[1], PARAMS[1])
        events = [next(stream)]
        assert ask(llm, 3) == model.answers[3]
        wait_until(lambda: is_all_free(engine_of(llm).kv_cache))  # the stream has ended, unread
        events += stream
        assert isinstance(events[-1], Finished) and list(events[-1].token_ids) == model.answers[1]


def test_a_stream_that_is_dropped_ends(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.open() as llm:
        passes = Passes(llm, monkeypatch)
        with passes.held(first=3):
            stream = llm.stream(PROMPTS[2], replace(PARAMS[2], max_tokens=900))
            next(stream)
            assert passes.is_held.wait(LIMIT_S)
            del stream
            gc.collect()
        check_idle(llm)
        assert len(passes.num_segments) == 4


def test_a_callback_that_raises_ends_its_own_call_only(model: Model) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError

    with model.open() as llm:
        failing = lambda: llm.generate([*PROMPTS], PARAMS, fail)  # noqa: E731
        error, answer = Together(failing, asks(llm, 1)).results()
        assert isinstance(error, ZeroDivisionError) and answer == model.answers[1]
        check_idle(llm)


def test_ctrl_c_is_heard_at_once_and_ends_its_own_call_only(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.open() as llm:
        passes = Passes(llm, monkeypatch)
        with passes.held():
            other = Together(asks(llm, 1))
            assert passes.is_held.wait(LIMIT_S)
            for call in (asks(llm, 0), lambda: llm.logits(PROMPTS[0]), lambda: llm.stats()):
                interrupt = interrupt_once_it_waits()
                with pytest.raises(KeyboardInterrupt):
                    interrupt.start()
                    call()
                interrupt.join()
        assert other.results() == [model.answers[1]]
        assert len(passes.num_segments) <= len(model.answers[1])
        check_idle(llm)
        assert ask(llm, 0) == model.answers[0]


WAITS = {QueuedAnswers.events.__code__, WorkItem.result.__code__}


def interrupt_once_it_waits() -> threading.Thread:
    """Ctrl-C as soon as the main thread waits for what it has asked for."""
    main = threading.main_thread().ident

    def waits() -> bool:
        frames = traceback.walk_stack(sys._current_frames()[main])
        return any(frame.f_code in WAITS for frame, _ in frames)

    def interrupt() -> None:
        wait_until(waits)
        os.kill(os.getpid(), signal.SIGINT)

    return threading.Thread(target=interrupt)


def test_ctrl_c_ends_logits_between_their_passes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_heard, calls = threading.Event(), list[Batch]()
    with model.open() as llm:
        forward = engine_of(llm).model.forward

        def interrupting(batch: Batch) -> torch.Tensor:
            calls.append(batch)
            os.kill(os.getpid(), signal.SIGINT)
            assert is_heard.wait(LIMIT_S)
            return forward(batch)

        monkeypatch.setattr(engine_of(llm).model, "forward", interrupting)
        with pytest.raises(KeyboardInterrupt):
            llm.logits([5] * 900)
        is_heard.set()
        check_idle(llm)
        assert len(calls) == 1


def test_logits_that_have_no_room_beside_others_wait_for_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [5] * 523
    with model.open(context=600) as llm:
        alone = llm.logits(long)
        passes = Passes(llm, monkeypatch)
        with passes.held():
            first = Together(asks(llm, 0))
            assert passes.is_held.wait(LIMIT_S)
            others = Together(*[lambda: llm.logits(long)] * 3)
            wait_until(lambda: worker_of(llm).mailbox.qsize() == 3)
        assert first.results() == [model.answers[0]]
        assert all(torch.equal(logits, alone) for logits in others.results())
        check_idle(llm)


@pytest.mark.parametrize("error", [StorageError("sector 7"), MemoryError(), KeyboardInterrupt()])
def test_a_pass_that_fails_ends_those_who_took_part(
    model: Model, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with model.open(1.0, context=96) as llm:  # room for two at a time: no expert gives way
        passes = Passes(llm, monkeypatch)
        passes.errors[2] = error
        with passes.held():
            first = Together(asks(llm, 1))
            assert passes.is_held.wait(LIMIT_S)
            second = Together(asks(llm, 0))
            wait_until(lambda: worker_of(llm).mailbox.qsize() == 1)
            later = Together(asks(llm, 2), asks(llm, 3))
        errors = [*first.results(), *second.results()]
        assert [type(found) for found in errors] == [type(error)] * 2
        assert errors[0] is not errors[1] and errors[0].args == error.args
        assert all(found.__cause__ is error for found in errors)
        assert later.results() == model.answers[2:]
        check_idle(llm)


def test_a_request_that_cannot_be_had_fails_alone(model: Model) -> None:
    with model.open(context=96) as llm:
        [good] = intake_of(llm).requests([PROMPTS[0]], PARAMS[0])
        large = Request(prompt=[1] * 200, params=good.params)
        refused, events = Together(
            lambda: list(loop_of(llm).answers([large])), lambda: list(loop_of(llm).answers([good]))
        ).results()
        assert isinstance(refused, PlanError) and "and it holds" in str(refused)
        assert list(events[-1].token_ids) == model.answers[0]
        check_idle(llm)


def test_closing_ends_all_that_is_asked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model.open()
    passes = Passes(llm, monkeypatch)
    with passes.held():
        first = Together(asks(llm, 1))
        assert passes.is_held.wait(LIMIT_S)
        asked = Together(asks(llm, 0), lambda: llm.logits(PROMPTS[0]), llm.stats)
        closing = Together(llm.close, llm.close, llm.close)
        wait_until(lambda: worker_of(llm).is_closed)
        with worker_of(llm).gate:
            pass  # whoever closed it has told the engine
    for found in [*first.results(), *asked.results()[:2]]:
        assert isinstance(found, UsageError) and "closed" in str(found)
    assert closing.results() == [None] * 3
    with pytest.raises(UsageError, match="closed"):
        ask(llm, 0)
    assert llm.stats()["forwards"] >= 1
    assert is_all_free(engine_of(llm).kv_cache)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_is_told_though_closing_fails(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(decoder: BatchDecoder[Any, Any]) -> None:
        raise InternalError("as told")

    with model.open() as llm:
        passes = Passes(llm, monkeypatch)
        monkeypatch.setattr(BatchDecoder, "close", fails)
        with passes.held():
            asked = Together(asks(llm, 0))
            assert passes.is_held.wait(LIMIT_S)
            closing = Together(llm.close)
            wait_until(lambda: loop_of(llm).is_closed)
        [error] = asked.results()
        assert isinstance(error, UsageError) and "closed" in str(error)
        closing.results()


def test_a_model_without_references_ends_its_thread(model: Model) -> None:
    llm, before = model.open(), engine_threads()
    stream = llm.stream(PROMPTS[1], replace(PARAMS[1], max_tokens=900))
    next(stream)
    assert len(engine_threads() - before) == 1
    del llm, stream  # and the fixture waits for the thread's end


def test_a_system_without_another_thread_is_an_error(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with model.open() as llm:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(InternalError, match="no thread"):
                ask(llm, 0)
        assert ask(llm, 0) == model.answers[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("llada2", "tiny", tmp_path_factory.mktemp("programs") / "model", seed=3)


def run_program(folder: Path, program: str) -> None:
    """In a process of its own, which must end well and say nothing."""
    begin = (
        "import os\n"
        "from lowtide import LLM, SamplingParams, errors\n"
        f"folder = {str(folder)!r}\n"
        "llm = LLM(folder)\n"
        "long = SamplingParams(max_tokens=900, ignore_eos=True)\n"
        "ask = lambda: llm.generate([[5]], SamplingParams(max_tokens=2))\n"
        "ask()\n"
    )
    command = [sys.executable, "-c", begin + program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("program", ["", "stream = llm.stream([5], long); next(stream)"])
def test_a_program_may_end_without_closing(folder: Path, program: str) -> None:
    run_program(folder, program)


def test_a_fork_is_refused(folder: Path) -> None:
    program = (
        "child = os.fork()\n"
        "try:\n"
        "    ask()\n"
        "except errors.UsageError as error:\n"
        "    assert not child and 'fork' in str(error)\n"
        "    llm.close()\n"
        "else:\n"
        "    assert child and os.waitpid(child, 0)[1] == 0\n"
    )
    run_program(folder, program)


def test_a_fork_loads_a_model_of_its_own(folder: Path) -> None:
    program = (
        "import signal, torch\n"
        "[answer] = ask()\n"
        "torch.set_num_threads(2)\n"
        "torch.rand(1 << 20).add_(1)\n"  # by OpenMP's threads, which a fork leaves behind
        "child = os.fork()\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        f"    signal.alarm({LIMIT_S:.0f})\n"
        "    llm = LLM(folder, host_memory=llm.plan.minimum_bytes)\n"
        "    assert ask()[0].token_ids == answer.token_ids\n"
        "    torch.rand(1 << 20).add_(1)\n"
        "    llm.close()\n"
    )
    run_program(folder, program)


class Watcher:
    """An observer that does what it is told."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self.found: list[object] = []

    def saw_layer(self, *_: Any) -> None:
        self.found.append(self._act())


def test_settings_of_the_calling_thread_stay_its_own(model: Model) -> None:
    def settings() -> tuple[int, bool, str]:
        return torch.get_num_threads(), torch.is_inference_mode_enabled(), "thread"

    default = Together(torch.get_num_threads).results()
    with model.open() as llm:
        inside, beside = Watcher(settings), Watcher(lambda: threading.current_thread().name)
        ask(llm, 0)
        torch.set_num_threads(3)
        try:
            before = settings()
            with llm.observed(inside):
                ask(llm, 0)
            assert settings() == before
            assert Together(torch.get_num_threads).results() == [3]
        finally:
            torch.set_num_threads(1)
        with llm.observed(beside):
            Together(asks(llm, 0), asks(llm, 1)).results()
    assert set(inside.found) == {(1, True, "thread")}
    assert set(beside.found) == {"lowtide-engine"}
    assert default


def test_observers_may_read_but_not_ask_and_their_errors_are_the_clients(model: Model) -> None:
    with model.open() as llm:
        reading = Watcher(lambda: llm.stats()["forwards"])
        with llm.observed(reading):
            assert ask(llm, 0) == model.answers[0]
        assert len(set(reading.found)) > 1
        for act in (asks(llm, 0), lambda: llm.logits([5]), lambda: llm.adopt_policy("tide")):
            with llm.observed(Watcher(act)), pytest.raises(UsageError, match="during a pass"):
                ask(llm, 0)
        with llm.observed(Watcher(lambda: 1 / 0)), pytest.raises(ZeroDivisionError):
            ask(llm, 0)
        assert ask(llm, 0) == model.answers[0]
        with llm.observed(Watcher(llm.close)), pytest.raises(UsageError, match="closed"):
            ask(llm, 1)


def test_a_policy_is_adopted_in_the_midst_of_an_answer(model: Model) -> None:
    with model.open() as llm:
        stream = llm.stream(PROMPTS[1], PARAMS[1])
        events = [next(stream)]
        for policy in ("tide", "static", "lru"):
            llm.adopt_policy(policy)
        events += stream
        assert list(events[-1].token_ids) == model.answers[1]
        check_idle(llm)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_what_reads_take_is_measured_whatever_is_read_and_if_it_fails(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that were begun for a next step have slots; one that fails gives its own back."""
    folder = synth("llada_moe", "tiny", tmp_path / "m", seed=2)
    options: dict[str, Any] = {"context": 256, "policy": "lru", "kernels": kernels}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    memory = plan_model(folder, **options).minimum_bytes
    with LLM(folder, host_memory=memory, **options) as llm:

        def words() -> list[int]:
            return llm.generate([PROMPTS[0]], params)[0].token_ids

        def num_free(engine: Engine) -> int:
            host = engine.experts.host
            host.settle()
            return host.ledger.num_free

        def fails(ticket: object) -> int:
            raise StorageError("as told")

        expected = words()
        with closing(llm.stream(PROMPTS[0], params)) as left:
            next(left)
            next(left)
        llm.adopt_policy("lowtide")
        assert words() == expected
        before = loop_of(llm).run(num_free)
        with monkeypatch.context() as patch, pytest.raises(StorageError, match="as told"):
            patch.setattr(policy_setting, "ticket_result", fails)
            llm.adopt_policy("lowtide")
        wait_until(lambda: loop_of(llm).run(num_free) >= before)
        assert words() == expected


# Everything at once, at random


class Script(NamedTuple):
    """Steps of one thread, in order: a verb and a prompt's number."""

    steps: list[tuple[str, int]]

    def play(self, llm: LLM, model: Model, errors: Sequence[type[BaseException]]) -> None:
        for verb, which in self.steps:
            with suppress(*errors):
                getattr(self, f"_{verb}")(llm, model, which)

    def _generate(self, llm: LLM, model: Model, which: int) -> None:
        assert ask(llm, which) == model.answers[which]

    def _batch(self, llm: LLM, model: Model, which: int) -> None:
        chosen = [which, (which + 1) % 4, which]
        answers = llm.generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen])
        assert [a.token_ids for a in answers] == [model.answers[i] for i in chosen]

    def _stream(self, llm: LLM, model: Model, which: int) -> None:
        *_, last = llm.stream(PROMPTS[which], PARAMS[which])
        assert isinstance(last, Finished) and list(last.token_ids) == model.answers[which]

    def _leave(self, llm: LLM, model: Model, which: int) -> None:
        stream = llm.stream(PROMPTS[which], PARAMS[which])
        next(stream)  # it begins
        next(stream)
        if which % 2:
            stream.close()

    def _logits(self, llm: LLM, model: Model, which: int) -> None:
        logits = llm.logits(PROMPTS[0] + [which] * 520 * (which % 2))
        assert torch.equal(logits[:1], model.logits[:1]) or which % 2

    def _stats(self, llm: LLM, model: Model, which: int) -> None:
        assert llm.stats()["forwards"] >= 0

    def _adopt(self, llm: LLM, model: Model, which: int) -> None:
        llm.adopt_policy(("tide", "lru", "static", "lru")[which])

    def _close(self, llm: LLM, model: Model, which: int) -> None:
        llm.close()


verbs = st.sampled_from(
    ["generate"] * 4 + ["batch", "stream", "stream", "leave", "leave", "logits", "stats", "adopt"]
)
scripts = st.builds(Script, st.lists(st.tuples(verbs, st.integers(0, 3)), min_size=1, max_size=5))
faults = st.dictionaries(
    st.integers(0, 60),
    st.sampled_from([StorageError("a sector"), MemoryError("no page"), KeyboardInterrupt()]),
    max_size=3,
)


@examples(12)
@given(
    played=st.lists(scripts, min_size=2, max_size=4),
    errors=faults,
    closes=st.one_of(st.none(), st.integers(0, 3)),
    context=st.sampled_from([96, 600, 2000]),
)
def test_threads_that_ask_at_random(
    model: Model,
    played: list[Script],
    errors: dict[int, BaseException],
    closes: int | None,
    context: int,
) -> None:
    if closes is not None:
        played[0].steps.insert(min(closes, len(played[0].steps)), ("close", 0))
    allowed = {type(error) for error in errors.values()}
    allowed |= {UsageError} if closes is not None else set()
    allowed |= {PlanError} if context < 600 else set()  # logits of 523 tokens
    with model.open(context=context) as llm, pytest.MonkeyPatch.context() as patch:
        Passes(llm, patch).errors = errors
        calls = [lambda s=s: s.play(llm, model, tuple(allowed)) for s in played]
        assert Together(*calls).results() == [None] * len(played)
        if closes is None:
            errors.clear()
            gc.collect()
            settle(llm)
            worker = worker_of(llm)
            assert worker.is_idle and not worker.num_running
            check_idle(llm)
            assert ask(llm, 1) == model.answers[1]
    assert is_all_free(engine_of(llm).kv_cache)
    with suppress(LowtideError):
        ask(llm, 0)
