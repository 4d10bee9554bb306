"""`lowtide bench`: measures how fast a model writes here, under one or several presets.

One engine is loaded, and the presets take turns on it round by round. So all have the same bytes,
device and state of the machine, and only policies are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from lowtide.cli.options import FLAGS
from lowtide.core import hit_rate
from lowtide.decode.prompts import Prompt
from lowtide.decode.request import Prefill
from lowtide.devices.kind import is_paced
from lowtide.doctor.diagnosis import Skipped
from lowtide.doctor.doctor import machine_rates
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.facts import SpeedFacts
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.planning.prediction import predictor_of
from lowtide.errors import PlanError, UsageError
from lowtide.hardware.machine import Machine, Rate, this_machine
from lowtide.hardware.memory import peak_resident_bytes, reset_peak
from lowtide.lab.budgets import budget_of_share
from lowtide.lab.verify import NUM_PROMPT_TOKENS, random_prompt
from lowtide.llm import LLM, plan_model
from lowtide.option import in_words
from lowtide.params import SamplingParams
from lowtide.plan import MemoryPlan, SpeedRange
from lowtide.progress import Progress, no_progress

DEFAULT_SHARE = 0.5
"""Share of experts that are resident if no budget is given."""

PREFILL_TOKENS = 256
"""Prompt length for timing prefill, or as many tokens as the context has room for."""

MAX_NEW_TOKENS = 64
"""Default length of an answer, or as many tokens as the context has room for."""


class Preset(NamedTuple):
    """A policy by name, with its options."""

    name: str
    options: Mapping[str, str] = {}

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])


class Spread(NamedTuple):
    """Repeats of one measurement."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


class BenchTurn(NamedTuple):
    """One answer: committed tokens, seconds, and counters of experts."""

    num_tokens: float
    seconds: float
    num_forwards: float
    num_hits: float  # activated experts that were resident
    num_activated: float
    link_bytes: float
    read_bytes: float
    prefill_tokens_per_s: float
    predicted: SpeedRange | None = None  # of such passes; None: nothing was measured here

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(slots=True)
class PresetRun:
    """One preset's turns, or why it had none."""

    preset: Preset
    policy: str = ""  # what it stood for, if it is `auto`
    turns: list[BenchTurn] = field(default_factory=list)
    reason: str = ""  # why it cannot run

    @property
    def tokens_per_s(self) -> Spread:
        return Spread.of([turn.tokens_per_s for turn in self.turns])

    @property
    def prefill_tokens_per_s(self) -> Spread:
        return Spread.of([turn.prefill_tokens_per_s for turn in self.turns])

    @property
    def predicted(self) -> SpeedRange | None:
        """The median predicted speed for the turns' passes; None if unknown."""
        found = [turn.predicted for turn in self.turns if turn.predicted is not None]
        return SpeedRange(*map(median, zip(*found, strict=True))) if found else None

    @property
    def hit_rate(self) -> float:
        return hit_rate(self._total("num_hits"), self._total("num_activated"))

    @property
    def link_bytes_per_token(self) -> float:
        return self._total("link_bytes") / self._total("num_tokens")

    @property
    def read_bytes_per_token(self) -> float:
        return self._total("read_bytes") / self._total("num_tokens")

    def as_dict(self) -> dict[str, Any]:
        """Return rates per second; for a preset that cannot run, its name and the reason."""
        named = {"preset": self.preset.name, "policy_options": dict(self.preset.options)}
        if not self.turns:
            return {**named, "reason": self.reason}
        names = ("hit_rate", "link_bytes_per_token", "read_bytes_per_token")
        return {
            **named,
            "policy": self.policy,
            "tokens_per_s": self.tokens_per_s._asdict(),
            "predicted_tokens_per_s": self.predicted and self.predicted._asdict(),
            "prefill_tokens_per_s": self.prefill_tokens_per_s._asdict(),
            **{name: getattr(self, name) for name in names},
            "num_tokens": int(self.turns[0].num_tokens),
            "num_forwards": int(self.turns[0].num_forwards),
        }

    def _total(self, name: str) -> float:
        return sum(float(getattr(turn, name)) for turn in self.turns)


class Ceilings(NamedTuple):
    """The machine's best rates, and which could not be measured and why."""

    machine: Machine
    rates: tuple[Rate, ...]
    skipped: tuple[Skipped, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.machine),
            "ceilings": [rate._asdict() for rate in self.rates],
            "skipped": [skipped._asdict() for skipped in self.skipped],
        }


class Peak(NamedTuple):
    """A tier's peak memory, and its planned memory; None if unknown."""

    tier: str
    peak_bytes: int | None
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that a bench found."""

    plan: MemoryPlan
    device: str  # a line on it; empty where there is none
    is_budget_given: bool
    prompt_tokens: int
    prefill_tokens: int
    max_tokens: int  # of each answer
    runs: tuple[PresetRun, ...]
    peaks: tuple[Peak, ...]

    def as_dict(self) -> dict[str, Any]:
        """All but the plan."""
        return {
            "device": self.device,
            "is_emulated": is_paced(self.plan.device),
            "is_budget_given": self.is_budget_given,
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens": self.prefill_tokens,
            "max_tokens": self.max_tokens,
            "runs": [run.as_dict() for run in self.runs],
            "peaks": [peak._asdict() for peak in self.peaks],
        }


def measure_ceilings(model: str | Path, **options: Any) -> Ceilings:
    """Measure the machine's rates; the disk's from the model's files.

    Raises as `plan_model` does, before measuring.
    """
    machine, skipped = this_machine(), list[Skipped]()
    opened = open_model(model, EngineConfig(**options))
    make_plan(opened)
    checkpoint = opened.facts.checkpoint
    rates = machine_rates(machine, checkpoint, skipped, with_products=True)
    return Ceilings(machine, tuple(rates), tuple(skipped))


def bench(
    model: str | Path,
    presets: Sequence[Preset],
    prompt: Prompt | None,
    params: SamplingParams,
    *,
    repeats: int,
    progress: Progress = no_progress,
    **options: Any,
) -> Result:
    """Load a model and measure every preset.

    prompt: seeded random ids if None, fewer than usual in a small context. Without `max_tokens`
    answers have `MAX_NEW_TOKENS`, or all that the context leaves. options: `LLM`'s, except the
    policy; without a budget for the fast tier, `DEFAULT_SHARE` of the experts is resident. Raises
    as `LLM` does; a preset that cannot run at this budget is reported with its reason.
    """
    budget = "host_memory" if plan_model(model, **options).gpu is None else "gpu_memory"
    is_given = options.get(budget, "auto") != "auto"
    if not is_given:
        full = plan_model(model, **options)
        options = {**options, budget: budget_of_share(full, DEFAULT_SHARE)}
    can_reset = _reset_peaks()
    with LLM(model, progress=progress, **{**options, "cache": "off"}) as llm:
        load = Load.of(llm, prompt, params)
        load = load._replace(
            predicts=partial(_predicted, open_model(model, EngineConfig(**options)).speed_facts)
        )
        runs = take_turns(llm, presets, load, repeats, progress)
        policies = ", ".join(preset.label for preset in presets)
        return Result(
            plan=replace(llm.plan, policy=policies, reason="policies take turns over one plan"),
            device=llm.device,
            is_budget_given=is_given,
            prompt_tokens=len(load.prompt),
            prefill_tokens=len(load.prefill),
            max_tokens=load.params.most_tokens,
            runs=tuple(runs),
            peaks=tuple(_peaks(llm.plan, can_reset)),
        )


class Load(NamedTuple):
    """The prompt and parameters of every turn."""

    prompt: list[int]
    prefill: list[int]  # the prompt that prefill is timed with
    params: SamplingParams
    predicts: Callable[[MemoryPlan, Mapping[str, float]], SpeedRange | None] = lambda plan, done: (
        None
    )

    @classmethod
    def of(cls, llm: LLM, prompt: Prompt | None, params: SamplingParams) -> Load:
        """Make a load in which all answers have the same number of tokens.

        No end token ends them; the likeliest tokens are taken unless a temperature is set.
        """
        params = replace(params, temperature=params.temperature or 0.0)
        ids = _own_prompt(llm, params) if prompt is None else llm.token_ids(prompt)
        if params.max_tokens is None:
            room = llm.max_new_tokens(len(ids), params)
            params = replace(params, max_tokens=max(1, min(MAX_NEW_TOKENS, room)))
        room = llm.plan.context - params.most_tokens - len(ids)
        num_prefill = max(len(ids), min(PREFILL_TOKENS, room))
        prefill = (ids * -(-num_prefill // len(ids)))[:num_prefill]
        return cls(ids, prefill, replace(params, ignore_eos=True))


def _own_prompt(llm: LLM, params: SamplingParams) -> list[int]:
    """Return random ids: half of a small context at most, leaving room for the answer."""
    context = llm.plan.context
    room = context - (params.max_tokens or context // 2)
    return random_prompt(llm.config, max(1, min(NUM_PROMPT_TOKENS, room)))


def take_turns(
    llm: LLM,
    presets: Sequence[Preset],
    load: Load,
    repeats: int,
    progress: Progress = no_progress,
) -> list[PresetRun]:
    """Run `repeats` rounds, in each of which every preset has one turn.

    A turn starts from the preset's first residents, is timed with a long prompt, and answers twice;
    the first answer only warms up the residents.
    """
    runs = [PresetRun(preset) for preset in presets]
    total = repeats * len(runs)
    for done in range(total):
        progress("measuring", done, total)
        run = runs[done % len(runs)]
        if not run.reason:
            _take_turn(llm, run, load)
    progress("measuring", total, total)
    return runs


def _take_turn(llm: LLM, run: PresetRun, load: Load) -> None:
    try:
        llm.adopt_policy(*run.preset)
    except (PlanError, UsageError) as error:  # names and options were known: it is the budget
        run.reason = in_words(str(error), FLAGS)
        return
    run.policy = llm.plan.policy
    prefill_s = _prefill_s(llm, load)
    llm.generate([load.prompt], load.params)
    before = llm.stats()
    llm.generate([load.prompt], load.params)
    after = llm.stats()
    done = {name: after[name] - before.get(name, 0.0) for name in after}
    run.turns.append(
        BenchTurn(
            num_tokens=done["committed_tokens"],
            seconds=done["generation_s"],
            num_forwards=done["forwards"],
            num_hits=done["num_hits"],
            num_activated=done["num_hits"] + done["num_misses"],
            link_bytes=done.get("link_bytes", 0.0),
            read_bytes=done["read_bytes"],
            prefill_tokens_per_s=len(load.prefill) / prefill_s,
            predicted=load.predicts(llm.plan, done),
        )
    )


def _predicted(facts: SpeedFacts, plan: MemoryPlan, done: Mapping[str, float]) -> SpeedRange | None:
    """Return the speed expected under `plan` for the passes counted in `done`."""
    predictor = predictor_of(facts, plan)
    if predictor is None:
        return None
    counts = (done["committed_tokens"], done["forwards"], done["num_rows"])
    return predictor.speed(*map(round, counts))


def _prefill_s(llm: LLM, load: Load) -> float:
    """Return the seconds until the end of the first pass that can write.

    That pass has the prompt's last tokens.
    """
    start_s = perf_counter()
    events = llm.stream(load.prefill, load.params)
    while isinstance(next(events), Prefill):
        pass
    seconds = perf_counter() - start_s
    events.close()
    return seconds


def _reset_peaks() -> bool:
    """Reset the process' peak memory; return False if that is not possible."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        reset_peak()
    except OSError:  # some containers forbid it
        return False
    return True


def _peaks(plan: MemoryPlan, can_reset: bool) -> list[Peak]:
    in_ram = [plan.host] if plan.gpu is None or plan.device == "cuda" else [plan.host, plan.gpu]
    planned_bytes = plan.overhead_bytes + sum(tier.used_bytes for tier in in_ram)
    peaks = [Peak("process", peak_resident_bytes() if can_reset else None, planned_bytes)]
    if plan.gpu is not None and plan.device == "cuda":
        peaks.append(Peak("gpu", torch.cuda.max_memory_allocated(), plan.gpu.used_bytes))
    return peaks
