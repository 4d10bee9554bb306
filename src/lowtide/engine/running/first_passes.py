"""Measures a model at its first load: passes of one layer, then of more layers while time is left.

A decoder runs over the loaded weights, the plan's workspace and its KV cache. Absent experts are
computed with other experts' weights, so nothing is read, and the engine's policies, counters and
residents do not change.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from lowtide.core import Costs, IntArray
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Request
from lowtide.engine.opening.facts import SpeedFacts
from lowtide.engine.planning.prediction import known_speeds, predictor_of, speed_key
from lowtide.engine.running.decoding import decoding_kind, run_pass
from lowtide.engine.running.engine import Engine
from lowtide.errors import LowtideError
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.host_tier import HostTier
from lowtide.experts.layout import ExpertLayout
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import SlotLedger
from lowtide.experts.transfer import ticket_result
from lowtide.families import families
from lowtide.hardware.machine import DISTURBED
from lowtide.hardware.model_speeds import ModelSpeeds, keep_speeds
from lowtide.memory.cuda_streams import device_pass
from lowtide.models.decoder import Decoder
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs

LIMIT_S = 2.0
"""Extra time of a first load; passes and reads in progress are finished."""

COMPANIES = (1, 4)
"""Numbers of requests answered together, one measurement each."""

MIN_PASSES = 5
MAX_PASSES = 15

Ask = Callable[[int], Sequence[Request]]
"""Makes this many requests, each as long as there is room for."""

_log = logging.getLogger(__name__)


def with_prediction(engine: Engine, facts: SpeedFacts, ask: Ask) -> Engine:
    """Return a loaded engine whose plan predicts its speed, measuring once if needed.

    On the host, its own run will be stored. Closes the engine if interrupted.
    """
    known, key = known_speeds(facts), speed_key(facts, engine.kernels.name)
    try:
        found = measured_speeds(engine, known, ask)
    except BaseException:
        engine.close()
        raise
    if found != known:
        keep_speeds(key, lambda kept: replace(found, runs=kept.runs))
    predictor = predictor_of(facts, engine.plan, found)
    if predictor is None:
        return engine
    plan = replace(engine.plan, prediction=predictor.prediction())
    return replace(engine, plan=plan, speed_key=None if plan.gpu is not None else key)


def measured_speeds(engine: Engine, known: ModelSpeeds, ask: Ask) -> ModelSpeeds:
    """Return `known` with missing speeds measured on a loaded, idle model.

    Nothing is measured beside a device, whose costs are measured as it is opened. Disturbed
    measurements are left out.
    """
    if engine.plan.gpu is not None:
        return known
    end_s = perf_counter() + LIMIT_S
    try:
        with engine.executor.in_charge(), device_pass():
            if not known.reads and not engine.plan.everything_fits:
                known = replace(known, reads=_measured_reads(engine, end_s))
            if not known.passes:
                known = replace(known, passes=_measured_passes(engine, ask, end_s))
    except LowtideError as error:
        _log.warning("The model's speed could not be measured, and is not predicted: %s", error)
    return known


# Reads.


def _measured_reads(engine: Engine, end_s: float) -> tuple[tuple[int, float], ...]:
    """Return seconds of reading one expert, and as many together as there are free slots."""
    if isinstance(engine.experts, NoExperts):
        return ()
    host = engine.experts.host
    host.pause()
    draws = np.random.default_rng(0).permutation(host.ledger.num_layers * host.ledger.num_experts)
    order: list[int] = draws.tolist()
    points = []
    for count in dict.fromkeys((1, min(host.ledger.num_free, len(order)))):
        if not count:
            continue
        times: list[float] = []
        while len(times) < 3 or (len(times) < MAX_PASSES and perf_counter() < end_s - LIMIT_S / 2):
            order = order[count:] + order[:count]
            times.append(_read(host, order[:count])[0])
            if perf_counter() > end_s:
                break
        if _is_quiet(times):
            points.append((count, median(times)))
    return tuple(points)


def _read(host: HostTier, experts: Sequence[int]) -> tuple[float, list[int]]:
    """Read experts (layer * num_experts + expert) into free slots; return seconds and slots."""
    slots = [host.ledger.take() for _ in experts]
    start_s = perf_counter()
    tickets = [
        host.transfer.start(*divmod(number, host.ledger.num_experts), slot)
        for number, slot in zip(experts, slots, strict=True)
    ]
    try:
        for ticket in tickets:
            ticket_result(ticket)
        return perf_counter() - start_s, slots
    finally:
        for slot, ticket in zip(slots, tickets, strict=True):
            host.set_aside(slot, ticket)  # free once its read has ended, however that was
        host.settle()


# Passes.


def _measured_passes(engine: Engine, ask: Ask, end_s: float) -> tuple[tuple[int, float], ...]:
    """Return seconds of whole passes by their rows, for one request and for several."""
    with _stand_in(engine) as beside:
        if beside is None:
            return ()
        found: dict[int, float] = {}
        for index, company in enumerate(COMPANIES):
            left_s = (end_s - perf_counter()) / (len(COMPANIES) - index)
            timed = _pass_of(beside, partial(ask, company), left_s)
            if timed is None:
                break
            num_rows, seconds = timed
            found[num_rows] = max(seconds, *found.values(), 1e-9) if found else seconds
        return tuple(sorted(found.items()))


def _pass_of(
    beside: Engine, ask: Callable[[], Sequence[Request]], limit_s: float
) -> tuple[int, float] | None:
    """Return rows and seconds of a pass through all layers; None if time ran out."""
    num_layers, end_s = beside.model.config.num_layers, perf_counter() + limit_s
    if limit_s <= 0:
        return None
    one = _timed(beside, ask, 1, limit_s / 4)
    if one is None:
        return None
    num_rows, one_s = one
    left_s = end_s - perf_counter()
    affordable = int(left_s / (one_s * (MIN_PASSES + 2)))
    more = min(num_layers, max(1, affordable))
    if more == 1:
        return num_rows, one_s * num_layers
    several = _timed(beside, ask, more, left_s)
    if several is None:
        return num_rows, one_s * num_layers
    num_rows, several_s = several
    each_s = max(0.0, (several_s - one_s) / (more - 1))
    return num_rows, several_s + (num_layers - more) * each_s


def _timed(
    beside: Engine, ask: Callable[[], Sequence[Request]], num_layers: int, limit_s: float
) -> tuple[int, float] | None:
    """Time passes over the last `num_layers`; return rows and median seconds, the first left out.

    None if there was no pass, or it was disturbed.
    """
    model, total = beside.model, beside.model.config.num_layers
    model.run_layers = range(total - num_layers, total)
    kind = decoding_kind(beside)
    decoder = BatchDecoder(kind, model, beside.kv_cache, beside.plan.max_rows)  # takes nothing over
    times: defaultdict[int, list[float]] = defaultdict(list)
    end_s = perf_counter() + limit_s
    try:
        for request in ask():
            decoder.add(request)
        num_passes = 0
        while decoder.has_work and num_passes < MAX_PASSES + 2:
            before, start_s = model.num_rows, perf_counter()
            run_pass(beside, decoder)
            now_s = perf_counter()
            num_passes += 1
            if num_passes > 2:  # prompts, and what is slow the first time
                times[model.num_rows - before].append(now_s - start_s)
            if now_s > end_s and times:
                break
    finally:
        decoder.close()
    if not times:
        return None
    num_rows = max(times, key=lambda rows: len(times[rows]))
    seconds = times[num_rows]
    return (num_rows, median(seconds)) if num_rows and _is_quiet(seconds) else None


def _is_quiet(times: Sequence[float]) -> bool:
    """Return False if half of the repeats took much longer than the best."""
    return median(times) <= DISTURBED * min(times)


@contextmanager
def _stand_in(engine: Engine) -> Iterator[Engine | None]:
    """Provide the engine with an expert runtime that finds every expert resident.

    None if memory holds no expert's weights.
    """
    experts: ExpertRuntime | NoExperts = engine.experts
    if isinstance(experts, ExpertRuntime):
        runtime = _all_resident(engine, experts)
        if runtime is None:
            yield None
            return
        experts = runtime
    config, model = engine.model.config, engine.model
    made: Decoder = families()[config.family].model()(
        config, model.weights, experts, engine.kv_cache, model.compute
    )
    yield replace(engine, model=made, experts=experts, moving=None, stored=None)


def _all_resident(engine: Engine, experts: ExpertRuntime) -> ExpertRuntime | None:
    """Return a runtime over the same slots that gives every expert one, its own or another's."""
    executor, host, shape = experts.executor, experts.host, engine.model.config.moe_shape
    if not isinstance(executor, HostExpertExecutor):
        return None
    ledger = SlotLedger(shape.num_layers, shape.num_experts, host.ledger.max_slots)
    ledger.table[:] = host.ledger.table
    for layer, slots in enumerate(_slots_by_layer(host)):
        absent = np.flatnonzero(ledger.table[layer] < 0)
        if len(absent):
            if not len(slots):
                return None
            ledger.table[layer, absent] = slots[np.arange(len(absent)) * 7 % len(slots)]
    ledger.owner[:] = 0  # none is free, or could be given to another
    ledger.free.fill([])
    capacity = [shape.num_experts] * shape.num_layers
    costs = Costs.unknown(host.slots.layout.num_bytes)
    inputs = PolicyInputs(capacity, shape.num_experts, costs)
    policies = recipe("resident").policies_without_device(inputs)
    tier = HostTier(host.slots, ledger, host.transfer)
    beside = HostExpertExecutor(tier, executor.threads, executor.kernels, executor.batched)
    return ExpertRuntime(shape, policies, beside)


def _slots_by_layer(host: HostTier) -> list[IntArray]:
    """Return, by layer, slots whose bytes are valid as an expert of that layer.

    They are slots of residents of layers with the same formats, else free slots into which some are
    read.
    """
    layouts, table = host.slots.layout.layers, host.ledger.table
    found: dict[ExpertLayout, IntArray] = {}
    for layout in dict.fromkeys(layouts):
        slots = np.unique(table[[each == layout for each in layouts]])
        found[layout] = slots[slots >= 0]
    lacking = [layout for layout, slots in found.items() if not len(slots)]
    count = min(host.ledger.num_free // max(1, len(lacking)), host.ledger.num_experts)
    for layout in lacking:  # slots that were freed last are taken last
        first = layouts.index(layout) * host.ledger.num_experts
        found[layout] = np.array(_read(host, range(first, first + count))[1], np.int64)
    return [found[layout] for layout in layouts]
