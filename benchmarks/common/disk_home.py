"""One engine without a device, part of whose experts are in memory and the others on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.emulated import Learned, Model, Stretch, Totals
from lowtide import LLM
from lowtide.core import Costs, Curve
from lowtide.errors import InternalError
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model

NUM_MEASURED = 5  # times that costs are measured


class DiskTrack:
    """Presets take turns in it; each begins with its own first residents. Reads are counted."""

    def __init__(self, llm: LLM) -> None:
        """llm: closed with the track. Raises InternalError if it has a device."""
        if llm._engine.experts.device is not None:
            raise InternalError("The engine has a device.")
        self.llm = llm
        self._expert_bytes = llm.plan.host.slot_bytes

    @classmethod
    def open(cls, model: Model, share: float, calibration: Path) -> DiskTrack:
        """share: of the experts that is in memory."""
        options = {**model.options, "device": "cpu"}
        budget = budget_of_share(plan_model(model.reference, **options), share)
        return cls(
            LLM(model.reference, host_memory=budget, calibration=str(calibration), **options)
        )

    def __enter__(self) -> DiskTrack:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def measure(self) -> Costs:
        """Of an expert, as the engine measures them for a preset that asks; of several times that
        with the median read. `lowtide` is in force then."""
        found = []
        for _ in range(NUM_MEASURED):
            self.adopt("lowtide", {})
            found.append(self.llm._engine.experts.policies.costs)
        return sorted(found, key=lambda costs: costs.link_s)[NUM_MEASURED // 2]

    def adopt(self, preset: str, options: Mapping[str, Any]) -> None:
        """Starts from a preset's own first residents."""
        self.llm.adopt_policy(preset, {name: str(value).lower() for name, value in options.items()})

    def answer(self, learned: Learned) -> Stretch:
        """To the first prompt; raises InternalError if it is not the one that is known."""
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


def pass_in_memory_s(model: Model, learned: Learned) -> float:
    """Seconds of a pass of the same answer with every expert in memory; the second of two."""
    with LLM(model.reference, device="cpu", **model.options) as llm:
        track = DiskTrack(llm)
        track.answer(learned)
        return track.answer(learned).s_per_pass


def replay_costs(measured: Costs, pass_s: float, mean_compute_s: float, num_layers: int) -> Costs:
    """Costs with which a layer takes, besides its experts, what a pass in memory does.

    mean_compute_s: of a pass's experts by `measured`.
    """
    rest_s = max(0.0, pass_s - mean_compute_s) / num_layers
    return Costs(
        measured.expert_bytes,
        measured.link_s,
        measured.host_s,
        measured.device_s,
        Curve([(1, rest_s)]),
        0.0,
    )
