"""Long prompts with experts on disk: absent experts are read once for several chunks.

Every operator has the rows of one chunk, so tokens, bits, states and snapshots are those of a
model that takes one chunk after the other.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from inside import loop_of, worker_of
from test_kept_sequences import Case, make_request, run
from torch import Tensor
from whole import wait_until

from lowtide import LLM, SamplingParams
from lowtide.core import Reuse
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.kinds import make_kind
from lowtide.decode.request import Event, Finished, Prefill, Request
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.planning import plan as planning
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.loop import QueuedAnswers
from lowtide.errors import StorageError
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.transfer import DiskTransfer
from lowtide.layers.batch import Batch
from lowtide.llm import plan_model
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.memory.workspace import Workspace
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Decoder
from lowtide.reading.file_reader import Ticket

FAMILIES = ("qwen3_moe", "lfm2_moe", "qwen3_5_moe", "deepseek_v3")
"""Keys alone, convolutions, matrices, latents behind a dense layer."""

CONTEXT = 4096
TEXT = [(7 * i + i // 11) % 200 for i in range(3000)]
ANSWER = SamplingParams(max_tokens=4, ignore_eos=True)


class Model(NamedTuple):
    folder: Path

    def open(self, share: float, **options: Any) -> LLM:
        """Open with a share of the bytes between the least that runs and all."""
        options = {"context": CONTEXT, "dtype": "float32", **options}
        plan = plan_model(self.folder, **options)
        budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
        return LLM(self.folder, host_memory=budget, **options)


def written(family: str, folder: Path) -> Model:
    return Model(synth(family, "tiny", folder / "model", seed=5))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return written(request.param, tmp_path_factory.mktemp("chunks"))


@pytest.fixture(scope="module", autouse=True)
def rows_have_room() -> Iterator[None]:
    """A sixteenth of a tiny model's experts is less memory than a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "PROMPT_SHARE", 1)
        yield


class Seen(NamedTuple):
    """A pass."""

    batch: Batch
    reads: Counter[tuple[int, int]]  # by layer and expert
    last: Tensor  # hidden states

    @property
    def chunks(self) -> list[int]:
        """Lengths."""
        ends = self.batch.chunk_ends or (len(self.batch.token_ids),)
        return [stop - start for start, stop in itertools.pairwise((0, *ends))]


@contextmanager
def watched_passes() -> Iterator[list[Seen]]:
    passes: list[Seen] = []
    reads: Counter[tuple[int, int]] = Counter()
    start, forward = DiskTransfer.start, Decoder.forward

    def noting_reads(transfer: DiskTransfer, layer: int, expert: int, slot: int) -> Ticket:
        reads[layer, expert] += 1
        return start(transfer, layer, expert, slot)

    def noting_passes(decoder: Decoder, batch: Batch) -> Tensor:
        reads.clear()
        hidden = forward(decoder, batch)
        passes.append(Seen(batch, Counter(reads), hidden[-1].clone()))
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskTransfer, "start", noting_reads)
        patch.setattr(Decoder, "forward", noting_passes)
        yield passes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_absent_expert_is_read_once_for_several_chunks(model: Model, dtype: str) -> None:
    with model.open(1.0, dtype=dtype) as llm, watched_passes() as one_by_one:
        assert llm.plan.prompt_chunks == 1  # there is nothing to read
        [whole] = llm.generate([TEXT], ANSWER)
    with model.open(0.6, dtype=dtype) as llm, watched_passes() as joined:
        num_chunks = llm.plan.prompt_chunks
        [found] = llm.generate([TEXT], ANSWER)
    assert found.token_ids == whole.token_ids
    chunks = [each for seen in one_by_one for each in seen.chunks]
    assert all(len(seen.chunks) == 1 for seen in one_by_one)
    assert [each for seen in joined for each in seen.chunks] == chunks
    prompts = [seen for seen in joined if sum(seen.chunks) > 1]
    num_read = [max(seen.reads.values()) for seen in prompts if seen.reads]
    assert num_read and max(num_read) == 1
    num_long = sum(each > 32 for each in chunks)
    num_short = sum(1 < each <= 32 for each in chunks)
    assert 1 < num_chunks == max(len(seen.chunks) for seen in prompts)
    assert len(prompts) - num_short <= -(-num_long // num_chunks) < num_long
    for one, other in zip(reversed(one_by_one), reversed(joined), strict=False):
        if sum(one.chunks) > 1:
            break
        assert torch.equal(one.last, other.last)


@examples(8)
@given(data=st.data())
def test_answers_are_those_of_one_chunk_at_a_time(model: Model, data: st.DataObject) -> None:
    """Whatever the budget and the policy, and whoever was cancelled before."""
    share = data.draw(st.sampled_from([0.0, 0.3, 0.6, 0.9]))
    policy = data.draw(st.sampled_from(["lru", "lowtide", "tide", "dali", "on-demand"]))
    cache = data.draw(st.sampled_from(["off", "exact"]))
    texts = data.draw(st.lists(st.sampled_from(ENDS), min_size=1, max_size=3))
    with model.open(share, policy=policy, cache=cache) as llm:
        for start, stop, num_heard in texts:
            text = TEXT[start:stop]
            if num_heard:
                events = llm.stream(text, ANSWER)
                for _ in range(num_heard):
                    next(events)
                events.close()
            [found] = llm.generate([text], ANSWER)
            assert found.token_ids == answer_one_by_one(model, start, stop)


ENDS = [(0, 3000, 0), (0, 3000, 3), (0, 1100, 2), (40, 2500, 0), (40, 2500, 5), (7, 640, 1)]
"""Of texts, and how many events of them are heard before they are cancelled."""

_known: dict[tuple[Model, int, int], tuple[int, ...]] = {}


def answer_one_by_one(model: Model, start: int, stop: int) -> tuple[int, ...]:
    key = model, start, stop
    if key not in _known:
        with model.open(1.0) as llm:
            [found] = llm.generate([TEXT[start:stop]], ANSWER)
        _known[key] = found.token_ids
    return _known[key]


def decoder_of(engine: Engine, num_chunks: int, reuse: Reuse = Reuse.OFF) -> Any:
    kind = make_kind(engine.model.config.decoding)
    rows = engine.plan.max_rows
    return BatchDecoder(
        *(kind, engine.model, engine.kv_cache, rows, reuse), max_chunks=lambda: num_chunks
    )


CASE = Case(1, Reuse.OFF, CONTEXT, MAX_PASS_ROWS)


def end_of(decoder: Any, request: Request) -> Finished:
    finished: dict[int, Finished] = {}
    run(decoder, 10_000, finished)
    return finished[request.id]


def test_a_fault_in_any_layer_and_chunk_leaves_the_sequence_as_before(model: Model) -> None:
    """The next step does what it was to do."""

    def work(engine: Engine) -> None:
        request = make_request(CASE, TEXT[:1400], 2, 0)
        decoder = decoder_of(engine, 1)
        decoder.add(request)
        expected = end_of(decoder, request)
        num_faults = 0
        for number in itertools.count():
            decoder = decoder_of(engine, engine.plan.prompt_chunks)
            again = make_request(CASE, TEXT[:1400], 2, 0)
            decoder.add(again)
            with failing(KVCache, "begin_chunk", number) as has_failed:
                finished = end_with_faults(decoder, again)
            assert finished.token_ids == expected.token_ids
            if not has_failed:
                break
            num_faults += 1
        num_layers = engine.model.config.num_layers
        assert num_faults == num_layers * num_joined(engine)
        for number in (0, 7, 20):
            decoder = decoder_of(engine, engine.plan.prompt_chunks)
            again = make_request(CASE, TEXT[:1400], 2, 0)
            decoder.add(again)
            with failing(DiskTransfer, "start", number) as has_failed:
                assert end_with_faults(decoder, again).token_ids == expected.token_ids
            assert has_failed

    with model.open(0.6) as llm:
        assert llm.plan.prompt_chunks > 1
        loop_of(llm).run(work)


def num_joined(engine: Engine) -> int:
    """The chunks of passes over several."""
    with watched_passes() as passes:
        decoder = decoder_of(engine, engine.plan.prompt_chunks)
        request = make_request(CASE, TEXT[:1400], 2, 0)
        decoder.add(request)
        end_of(decoder, request)
    return sum(len(seen.batch.chunk_ends) for seen in passes)


def end_with_faults(decoder: Any, request: Request) -> Finished:
    finished: dict[int, Finished] = {}
    while decoder.has_work:
        try:
            run(decoder, 1, finished)
        except StorageError as error:
            assert str(error) == "on purpose"
    return finished[request.id]


@contextmanager
def failing(owner: type, name: str, number: int) -> Iterator[list[int]]:
    """Fail one call of a method, counted from 0; yields a list that then has something."""
    method, counted, has_failed = getattr(owner, name), itertools.count(), list[int]()

    def fails(*arguments: Any) -> Any:
        if next(counted) == number:
            has_failed.append(number)
            raise StorageError("on purpose")
        return method(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield has_failed


@pytest.mark.parametrize("reuse", [Reuse.ON, Reuse.EXACT])
@pytest.mark.parametrize("model", ["lfm2_moe", "qwen3_5_moe"], indirect=True)
def test_snapshots_are_made_in_the_midst_of_a_pass(model: Model, reuse: Reuse) -> None:
    """Where passes over one chunk would end for them, with the same bits."""

    def snapshots(engine: Engine, num_chunks: int) -> dict[int, Tensor]:
        decoder = decoder_of(engine, num_chunks, reuse)
        with watched_passes() as passes:
            request = make_request(CASE, TEXT[:2900], 4, 0)
            decoder.add(request)
            end_of(decoder, request)
        assert max(len(seen.chunks) for seen in passes) == num_chunks
        [kept] = engine.kv_cache.kept
        places = engine.kv_cache.kept_snapshots(kept, kept.num_kept) or ()
        found = {place: torch.from_numpy(content(engine.kv_cache, kept, place)) for place in places}
        decoder.close()
        return found

    with model.open(0.6) as llm:
        one_by_one = loop_of(llm).run(lambda engine: snapshots(engine, 1))
        joined = loop_of(llm).run(lambda engine: snapshots(engine, llm.plan.prompt_chunks))
    assert one_by_one.keys() == joined.keys() and 2048 in joined
    assert all(torch.equal(one_by_one[place], joined[place]) for place in joined)


def content(kv_cache: KVCache, kept: KVRange, place: int) -> Any:
    target = np.zeros(kv_cache.snapshot_bytes, np.uint8)
    assert kv_cache.copy_kept_states(kept, kept.num_kept, place, 0, target)
    return target


class Gate:
    """Holds a pass before a layer's first chunk until it is opened."""

    def __init__(self) -> None:
        self.num_begun = 0  # layers, of all passes
        self._num_allowed = 0

    def allow(self, num_layers: int) -> None:
        self._num_allowed = num_layers

    def enter(self, kv_cache: KVCache, kv_range: KVRange, first: int) -> None:
        if not first:
            self.num_begun += 1
            wait_until(lambda: self.num_begun <= self._num_allowed)


@pytest.mark.parametrize("model", ["qwen3_5_moe"], indirect=True)
def test_mail_is_read_between_two_layers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks is answered, and a cancelled request ends its pass."""
    gate, begin_chunk = Gate(), KVCache.begin_chunk

    def begins(kv_cache: KVCache, kv_range: KVRange, first: int) -> None:
        gate.enter(kv_cache, kv_range, first)
        begin_chunk(kv_cache, kv_range, first)

    with model.open(0.6) as llm:
        monkeypatch.setattr(KVCache, "begin_chunk", begins)
        loop, request = loop_of(llm), make_request(CASE, TEXT, 4, 0)
        answers, stats = QueuedAnswers([request]), list[dict[str, float]]()
        loop.ask(answers)
        wait_until(lambda: gate.num_begun == 1)
        look = threading.Thread(target=lambda: stats.append(llm.stats()))
        look.start()
        wait_until(lambda: not worker_of(llm).mailbox.empty())
        gate.allow(1)
        wait_until(lambda: gate.num_begun == 2)
        look.join()
        [told] = stats
        assert told["num_rows"] == 0  # no pass has ended
        loop.drop(answers)
        gate.allow(2)
        loop.run(lambda engine: None)
        assert gate.num_begun == 2
        gate.allow(10**6)
        [found] = llm.generate([TEXT], ANSWER)
        assert found.token_ids == answer_one_by_one(model, 0, len(TEXT))


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_progress_is_told_within_a_pass(model: Model) -> None:
    with model.open(0.6) as llm:
        events: list[Event] = list(llm.stream(TEXT, ANSWER))
        num_chunks = llm.plan.prompt_chunks
    told = [event.num_done for event in events if isinstance(event, Prefill)]
    assert told == sorted(set(told)) and told[0] == 0 and told[-1] < len(TEXT)
    assert len(told) > 1 + len(TEXT) / (num_chunks * MAX_PASS_ROWS)


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_5_moe"], indirect=True)
def test_a_pass_stays_within_the_plans_workspace(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a plan gives to chunks, residents lack; all other numbers stay."""
    with model.open(0.6) as llm:
        joined, most, take = llm.plan, [0], Workspace.take

        def noting(workspace: Workspace, *wanted: Any) -> Tensor:
            found = take(workspace, *wanted)
            most[0] = max(most[0], workspace.state.top)
            return found

        monkeypatch.setattr(Workspace, "take", noting)
        llm.generate([TEXT], ANSWER)
    monkeypatch.setattr(planning, "PROMPT_SHARE", 1 << 60)
    with model.open(0.6) as llm:
        alone = llm.plan
    assert alone.prompt_chunks == 1 < joined.prompt_chunks
    assert alone.host.workspace_bytes < most[0] <= joined.host.workspace_bytes
    assert joined.host.used_bytes <= joined.host.budget_bytes == alone.host.budget_bytes
    assert sum(joined.residents_per_layer) < sum(alone.residents_per_layer)
    for name in ("minimum_bytes", "full_bytes", "overhead_bytes", "max_rows"):
        assert getattr(joined, name) == getattr(alone, name)
    assert "A long prompt reads absent experts once" in joined.reason
    assert "A long prompt" not in alone.reason


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_5_moe"], indirect=True)
def test_prompts_that_wait_for_each_other_share_passes_as_before(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first takes several chunks, and the rows that it leaves are those of the next."""
    texts = [TEXT[:1700], TEXT[5:2000], TEXT[9:700]]
    with model.open(0.6, cache="off") as llm:
        with watched_passes() as joined:
            found = [each.token_ids for each in llm.generate(texts, ANSWER)]
        monkeypatch.setattr(ExpertRuntime, "joins_chunks", False)
        with watched_passes() as one_by_one:
            expected = [each.token_ids for each in llm.generate(texts, ANSWER)]
    assert found == expected
    assert len(joined) < len(one_by_one)
    rows = [torch.cat([seen.batch.token_ids for seen in each]) for each in (one_by_one, joined)]
    assert torch.equal(*rows)
    chunks = [[n for seen in each for n in seen.chunks] for each in (one_by_one, joined)]
    assert chunks[0] == chunks[1]
