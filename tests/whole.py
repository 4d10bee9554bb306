"""Shared parts of the tests of the whole engine: visible budgets, routing and trajectories."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hash_model import is_all_free
from inside import engine_of, loop_of, worker_of
from torch import Tensor

from lowtide import AsyncLLM
from lowtide.core import Step
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.block_diffusion import BlockDiffusion
from lowtide.decode.masked_diffusion import MaskedDiffusion
from lowtide.decode.request import Draft, Event, Finished, Prefill, Request
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.planning.planner import Planner
from lowtide.engine.running import worker
from lowtide.engine.running.engine import Engine
from lowtide.experts.account import account_of
from lowtide.experts.rows import LayerCall, Routing
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.transfer import DiskTransfer
from lowtide.llm import LLM, plan_model
from lowtide.params import SamplingParams
from lowtide.plan import MemoryPlan
from lowtide.reading.file_reader import FileReader, Read, Ticket

LIMIT_S = 180
"""Waiting longer than this means a hang; nothing that tests wait for takes more than moments."""

Trajectories = dict[int, list[list[int]]]
"""By request: the token row of every denoising pass, as it went in."""


def planner_of(model: OpenModel) -> Planner:
    """Make the planner of a model as it was opened."""
    return Planner.of(model.facts.config, model.memory, model.options.asked)


class Setting(NamedTuple):
    """A policy, and a budget as a share of the way from the least to everything."""

    policy: str
    share: float
    options: dict[str, str] = {}

    def __str__(self) -> str:
        return f"{self.policy}-{self.share:.0%}"

    def open(self, folder: Path, **options: object) -> LLM:
        """The model under this setting."""
        return LLM(
            folder,
            policy=self.policy,
            policy_options=self.options,
            host_memory=budget_bytes(folder, self.share, **options),
            **options,
        )


SETTINGS = [
    Setting("auto", 0.0),
    Setting("tide", 0.0),
    Setting("tide", 0.5, {"tau": "2"}),
    Setting("tide", 1.0),
    Setting("lru", 0.0),
    Setting("lru", 0.5),
    Setting("lru", 1.0),
    Setting("static", 0.0),
    Setting("static", 0.5),
    Setting("static", 1.0),
    Setting("resident", 1.0),
]
"""Every policy at the least, a middle and the full budget."""


def budget_bytes(folder: Path, share: float, **options: object) -> int:
    """The budget that lies `share` of the way from `minimum_bytes` to `full_bytes`."""
    plan = _plan(folder, **options)
    return plan.minimum_bytes + int((plan.full_bytes - plan.minimum_bytes) * share)


def _plan(folder: Path, **options: object) -> MemoryPlan:
    """Made once for each folder and its options."""
    key = repr((folder, sorted(options.items())))
    if key not in _PLANS:
        _PLANS[key] = plan_model(folder, **options)
    return _PLANS[key]


_PLANS: dict[str, MemoryPlan] = {}


def answers(llm: LLM, requests: Sequence[Request]) -> tuple[list[Finished], Trajectories]:
    """Decodes requests, each with parameters of its own, as one flat batch."""
    with trajectories_noted() as trajectories:
        events = list(loop_of(llm).answers(requests))
    finished = {event.request: event for event in events if isinstance(event, Finished)}
    return [finished[request.id] for request in requests], trajectories


def decoded(decoder: BatchDecoder[Any], requests: Iterable[Request]) -> list[Event]:
    """Run requests through a decoder; free all room however it ends."""
    events: list[Event] = []
    try:
        for request in requests:
            decoder.add(request)
        while decoder.has_work:
            events += decoder.step()
    finally:
        decoder.close()
    return events


@contextmanager
def trajectories_noted() -> Iterator[Trajectories]:
    """The trajectories of everything that is generated inside."""
    trajectories: Trajectories = {}

    def noting(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(kind: Any, model: Any, hidden: Tensor, entries: Any, *rest: Any) -> Any:
            for entry in entries:
                if not entry.is_final:
                    rows = trajectories.setdefault(entry.sequence.request.id, [])
                    rows.append(entry.sequence.tokens[: entry.stop].tolist())
            return choose(kind, model, hidden, entries, *rest)

        return chosen

    with pytest.MonkeyPatch.context() as patch:
        for kind in (BlockDiffusion, MaskedDiffusion):
            patch.setattr(kind, "choose", noting(kind.choose))
        yield trajectories


def token_rows(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[list[list[int]]]:
    """Of each request to a bidirectional model: its row before the first step and after each."""
    mask = llm.config.decoding.mask_token_id
    pairs = zip(prompts, params, strict=True)
    rows = [[[*prompt, *[mask] * each.max_tokens]] for prompt, each in pairs]

    def note(event: Event) -> None:
        if isinstance(event, Draft):
            row = list(rows[event.request][-1])
            row[event.block_start : event.block_start + len(event.tokens)] = event.tokens
            rows[event.request].append(row)

    llm.generate(prompts, params, on_event=note)
    return rows


@contextmanager
def routing_noted(llm: LLM) -> Iterator[dict[int, list[Tensor]]]:
    """By MoE layer: the expert ids [rows, k] of every forward pass inside."""
    noted: dict[int, list[Tensor]] = {}
    experts = engine_of(llm).experts
    forward = experts.forward

    def noting(call: LayerCall) -> None:
        noted.setdefault(call.layer, []).append(call.routing.experts.clone())
        forward(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "forward", noting)
        yield noted


class SeenLayer(NamedTuple):
    """Copies of what a layer was given and made. x [rows, hidden]."""

    layer: int
    step: Step
    x: Tensor
    routing: Routing
    out: Tensor


class Observed:
    """An observer that keeps all that it sees."""

    def __init__(self) -> None:
        self.layers: list[SeenLayer] = []

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        copies = Routing(*(part.clone() for part in routing))
        self.layers.append(SeenLayer(layer, step, x.clone(), copies, out.clone()))


def rows_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every layer that the runtime is asked for from now on."""
    asked: list[int] = []
    forward = ExpertRuntime.forward

    def noting(runtime: ExpertRuntime, call: LayerCall) -> None:
        asked.append(len(call.x))
        forward(runtime, call)

    monkeypatch.setattr(ExpertRuntime, "forward", noting)
    return asked


def wait_until(is_so: Callable[[], object]) -> None:
    """Until something is so, which is a matter of moments."""
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it does not come to that"
        time.sleep(1e-3)


@contextmanager
def passes_that_wait(llm: LLM | AsyncLLM) -> Iterator[None]:
    """Let each pass wait until the engine is told something, from the 40th after a request on.

    40 passes are a block and more. So no long answer ends before its reader has gone, on a machine
    of any speed.
    """
    mailbox, is_over, num_free = worker_of(llm).mailbox, threading.Event(), 40
    accept, run_pass = worker.Worker.accept, worker.run_pass

    def accepting(own: worker.Worker, queued: worker.Queued) -> None:
        nonlocal num_free
        num_free = 40
        accept(own, queued)

    def waiting(engine: Engine, decoder: BatchDecoder[Any]) -> list[Event]:
        nonlocal num_free
        num_free -= 1
        if num_free < 0:
            wait_until(lambda: is_over.is_set() or not mailbox.empty())
        return run_pass(engine, decoder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Worker, "accept", accepting)
        patch.setattr(worker, "run_pass", waiting)
        try:
            yield
        finally:
            is_over.set()


@contextmanager
def passes_watched(note: Callable[[Engine], object]) -> Iterator[None]:
    """Call `note` after each pass of requests inside, on the engine's thread."""
    run_pass = worker.run_pass

    def watched(engine: Engine, decoder: BatchDecoder[Any]) -> list[Event]:
        events = run_pass(engine, decoder)
        note(engine)
        return events

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run_pass", watched)
        yield


@contextmanager
def no_more_threads() -> Iterator[None]:
    """None of lowtide's that is made inside is left at the end; others may end at any time."""
    before = set(threading.enumerate())
    yield
    made = set(threading.enumerate()) - before
    assert not [thread.name for thread in made if thread.name.startswith("lowtide")]


def settle(llm: LLM) -> None:
    """Waits until the engine has heard of everything that happened before, and done it."""
    loop_of(llm).run(lambda engine: None)


def check_idle(llm: LLM) -> None:
    """Between requests nothing is held: no lease, no taken slot, no room in the KV cache.

    Only a pass that was interrupted between two layers leaves what was read ahead of the second,
    for the next pass to drop.
    """
    settle(llm)
    experts = engine_of(llm).experts
    ledger = experts.host.ledger
    ledger.check_integrity()
    num_held = ledger.num_resident + len(experts.host.read_ahead)
    assert ledger.num_free + num_held == ledger.num_slots
    assert is_all_free(engine_of(llm).kv_cache)
    check_account(llm)


def check_second_turn(folder: Path, kept: Path, dtype: str, budget_bytes: int) -> None:
    """Assert that a second turn is that of a model that keeps nothing.

    Its keys and states are kept in memory or in the folder `kept`.
    """
    prompt, params = list(range(1, 200)), SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(folder, context=1024, dtype=dtype, cache="off") as llm:
        first = llm.generate([prompt], params)[0].token_ids
        again = [*prompt, *first, 7, 8, 9]
        second = llm.generate([again], params)[0].token_ids
    on_disk = {"cache_dir": str(kept)}
    given: dict[str, Any] = {"dtype": dtype, "cache": "exact", "host_memory": budget_bytes}
    for options in ({}, on_disk, on_disk):
        with LLM(folder, context=1024, **given, **options) as llm:
            assert llm.generate([prompt], params)[0].token_ids == first
            assert llm.generate([again], params)[0].token_ids == second


def check_account(llm: LLM) -> None:
    """Assert that an engine's counts of experts add up, whatever was run, cancelled or failed."""
    stats = loop_of(llm).stats()  # an `AsyncLLM` may have no event loop here
    account, slot_bytes = account_of(stats), engine_of(llm).experts.host.slots.layout.num_bytes
    for name in ("rows", "moves", "prefetched"):
        total, *parts = account[name].values()
        assert total == sum(parts) and min(parts) >= 0, (name, account[name])
    if "slots" in account:
        assert account["slots"]["planned"] == llm.plan.fast_tier.num_slots, account["slots"]
    link, disk = account["link"], account["disk"]
    assert link["bytes"] == link["experts"] * slot_bytes, link
    each = {*stored_bytes(llm)}
    if len(each) == 1:
        assert disk["bytes"] - disk["given_up_bytes"] == disk["experts"] * each.pop(), disk


def stored_bytes(llm: LLM) -> list[int]:
    """Return the bytes of an expert of each layer in the checkpoint."""
    return [sum(layer.part_bytes) for layer in engine_of(llm).facts.weight_map.experts.layers]


@contextmanager
def reads_counted() -> Iterator[list[Sequence[Read]]]:
    """Every list of reads that a `FileReader` is asked for inside."""
    asked: list[Sequence[Read]] = []
    submit = FileReader.submit

    def noting(reader: FileReader, reads: Sequence[Read]) -> Ticket:
        asked.append(reads)
        return submit(reader, reads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileReader, "submit", noting)
        yield asked


class PythonTransfer(DiskTransfer):
    """Reads by Python's threads alone, also where compiled ones could."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given[:4])  # without compiled kernels


@contextmanager
def reads_in_python() -> Iterator[None]:
    """Experts of the models that are opened inside are read by Python's threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.engine.running.experts.DiskTransfer", PythonTransfer)
        yield


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if two float32 tensors are equal bit by bit."""
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], Tensor]:
    """Return the model's answer, and the logits of prompt and answer."""
    [completion] = llm.generate([prompt], params)
    return completion.token_ids, llm.logits([*prompt, *completion.token_ids])


def residents(llm: LLM) -> list[list[int]]:
    """Of each layer, in the fast tier."""
    experts = engine_of(llm).experts
    ledger = experts.host.ledger if experts.device is None else experts.device.link.ledger
    return [ledger.is_resident(i).nonzero()[0].tolist() for i in range(ledger.num_layers)]


def own_events(events: Iterable[Event], index: int) -> list[Event]:
    """Return a request's events.

    They must not depend on neighbours, caching, or the division into passes.
    """
    return [e for e in events if e.request == index and not isinstance(e, Prefill)]


def make_request(
    index: int = 0,
    prompt: Sequence[int] = (1, 2, 4),
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    is_stopped: Callable[[Sequence[int]], bool] | None = None,
    **params: Any,
) -> Request:
    return Request(
        id=index,
        prompt=prompt,
        params=SamplingParams(**params),
        eos_token_ids=eos_token_ids,
        seed=seed,
        is_stopped=is_stopped,
    )
