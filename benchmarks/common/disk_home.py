"""One engine without a device, part of whose experts are in memory and the others on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.emulated import Learned, Model, Stretch, Totals
from common.inside import engine_of
from common.memory import division_kept
from lowtide import LLM
from lowtide.core import Costs, Curve
from lowtide.errors import InternalError
from lowtide.lab.ahead_slots import ahead_slots
from lowtide.lab.budgets import budget_of_share
from lowtide.lab.simulation.host_reads_ahead import AheadSlots
from lowtide.llm import plan_model
from lowtide.reading.file_reader import Ticket
from lowtide.replay.calibration import Calibration

NUM_MEASURED = 5  # times that costs are measured


class DiskTrack:
    """Presets take turns in it; each begins with its own first residents. Reads are counted."""

    def __init__(self, llm: LLM) -> None:
        """llm: closed with the track. Raises InternalError if it has a device."""
        if engine_of(llm).experts.device is not None:
            raise InternalError("The engine has a device.")
        self.llm = llm
        self._expert_bytes = llm.plan.host.slot_bytes

    @classmethod
    def open(cls, model: Model, share: float, calibration: Path) -> DiskTrack:
        """share: of the experts that is in memory, and stays so many, as a replay has them."""
        options = {**model.options, "device": "cpu", "cache": "off"}
        budget = budget_of_share(plan_model(model.reference, **options), share)
        with division_kept():
            return cls(
                LLM(model.reference, host_memory=budget, calibration=str(calibration), **options)
            )

    def __enter__(self) -> DiskTrack:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def measure(self) -> Costs:
        """Measure an expert's costs several times; return those with the median read.

        The engine measures them as for a preset that asks, and `lowtide` is in force then.
        """
        found = []
        for _ in range(NUM_MEASURED):
            self.adopt("lowtide", {})
            found.append(engine_of(self.llm).experts.policies.costs)
        return sorted(found, key=lambda costs: costs.link_s)[NUM_MEASURED // 2]

    def around_reads_s(self, learned: Learned) -> float:
        """Measure a reading layer's time before its first read and after its last one.

        The residents stay (`static`).
        """
        self.adopt("static", {})
        with LayerClock(self.llm) as clock:
            self.answer(learned)
        return clock.around_reads_s

    def ahead_slots(self, calibration: Calibration) -> AheadSlots:
        """Return the slots that reads ahead of a layer are decided by."""
        return ahead_slots(engine_of(self.llm), calibration)

    def adopt(self, preset: str, options: Mapping[str, Any]) -> None:
        """Starts from a preset's own first residents."""
        self.llm.adopt_policy(preset, {name: str(value).lower() for name, value in options.items()})

    def answer(self, learned: Learned) -> Stretch:
        """Answer the first prompt; raises InternalError if the answer is not the known one."""
        before = self._totals()
        [completion] = self.llm.generate([learned.prompts[0]], learned.params)
        done = self._totals() - before
        wanted = learned.token_ids[0]
        if completion.token_ids != wanted:
            raise InternalError(f"{self.llm.plan.policy} wrote something else than all in memory.")
        return Stretch(len(wanted), done, [completion.token_ids])

    def _totals(self) -> Totals:
        stats = self.llm.stats()
        return Totals(
            {
                **{name: value for name, value in stats.items() if isinstance(value, int | float)},
                "num_fetched": stats["read_bytes"] / self._expert_bytes,
                "num_passes": stats["forwards"],
                "seconds": time.perf_counter(),
            }
        )


class InMemory(NamedTuple):
    """A pass with every expert in memory, its layers asked for one by one as beside a disk."""

    pass_s: float
    experts_s: float  # of that, all layers' experts


def measure_in_memory(model: Model, learned: Learned) -> InMemory:
    """Measure the same answer with all experts in memory; the second run of two counts."""
    with LLM(model.reference, device="cpu", cache="off", **model.options) as llm:
        track = DiskTrack(llm)
        track.answer(learned)
        with LayerClock(llm) as clock:
            stretch = track.answer(learned)
    return InMemory(stretch.s_per_pass, clock.experts_s / stretch.totals["num_passes"])


class LayerClock:
    """Clock of the experts' time in an engine without a device, and of its part around reads.

    Around reads: before the first of a layer begins and after the last has ended.
    """

    def __init__(self, llm: LLM) -> None:
        self.experts_s = self.around_s = 0.0
        self.num_reading = 0  # layers that read
        self._runtime: Any = engine_of(llm).experts
        self._forward, self._start = self._runtime.forward, self._runtime.host.transfer.start
        self._begun_s = self._ended_s = math.inf

    @property
    def around_reads_s(self) -> float:
        """Mean time around the reads of a layer that reads."""
        return self.around_s / max(1, self.num_reading)

    def __enter__(self) -> LayerClock:
        self._runtime.forward = self._timed
        self._runtime.host.transfer.start = self._timed_start
        self._runtime.observer = self  # with an observer layers are asked for one by one
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.observer = None
        del self._runtime.forward, self._runtime.host.transfer.start

    def saw_layer(self, *_: object) -> None:
        """Observe a layer, so that it is run by the runtime."""

    def _timed(self, *arguments: Any, **named: Any) -> None:
        self._begun_s = math.inf
        start_s = time.perf_counter()
        self._forward(*arguments, **named)
        end_s = time.perf_counter()
        self.experts_s += end_s - start_s
        if self._begun_s < self._ended_s < end_s:
            self.around_s += self._begun_s - start_s + end_s - self._ended_s
            self.num_reading += 1

    def _timed_start(self, *arguments: Any) -> Ticket:
        self._begun_s = min(self._begun_s, time.perf_counter())
        ticket: Ticket = self._start(*arguments)
        ticket.add_done_callback(self._note_end)
        return ticket

    def _note_end(self, _: Ticket) -> None:
        self._ended_s = time.perf_counter()


def replay_costs(
    measured: Costs, memory: InMemory, one_by_one_s: float, around_s: float, num_layers: int
) -> Costs:
    """Return costs with which each replayed layer takes the time that one takes in memory.

    A layer that reads takes `around_s` more.

    one_by_one_s: a pass's experts by `measured`, each by itself; the experts of a layer in one call
    take less, or more where threads are waited for.
    """
    return Costs(
        measured.expert_bytes,
        measured.link_s,
        measured.host_s,
        measured.device_s.scaled(memory.experts_s / one_by_one_s),
        Curve([(1, (memory.pass_s - memory.experts_s) / num_layers)]),
        around_s,
    )
