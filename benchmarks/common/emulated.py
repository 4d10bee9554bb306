"""Presets taking turns on an emulated device: what the benchmarks of policies share."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import ismethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

from common.inside import engine_of
from common.models import model_folder
from common.record import Row, say
from common.simulated import published
from common.texts import text_for, token_ids
from lowtide import LLM, SamplingParams
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.running.engine import Engine
from lowtide.errors import InternalError, PlanError
from lowtide.hardware.core_speed import measure_device_s
from lowtide.lab.bench import Spread
from lowtide.lab.budgets import budget_of_share
from lowtide.lab.calibrate import calibrate
from lowtide.lab.emulated.device import COMPUTE, HOST, LINK, EmulatedDevice
from lowtide.lab.profiles import load_profile
from lowtide.llm import plan_model
from lowtide.params import DiffusionParams
from lowtide.plan import MemoryPlan
from lowtide.record import recorded
from lowtide.replay.trace import Trace

PROFILE = "dali-3090"
FAMILY = "llada2"  # the published model whose experts' proportions are emulated
STREAMS = (COMPUTE, LINK, HOST)
SLOWDOWN = 2.0
"""Factor of the device's time. Its thread then leaves a core to others for half of the time, as a
real device always would."""

_LEAST_EXPERT_S = 3e-4  # on the device, with one token: several times a thread's wake-up
_NUM_PIECES = 8  # of the text that calibrates
_PROMPT_TOKENS = 64

_TIMED = {
    "look_ahead": "planning_s",  # and what else a layer asks of its policies
    "_predict": "gate_s",  # the next layer's router, which a prefetch may want
    "forward": "experts_s",  # all of it, with the experts themselves
}
"""Methods of the device tier and of the runtime, and under which name their time is added up."""

BETWEEN = "between_s"
"""The time from a layer's experts to the next layer's of the same pass, added up."""


class Model(NamedTuple):
    """A model to measure: `reference` as `LLM` takes it, with as many layers as are wanted."""

    name: str
    reference: str
    num_layers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of `LLM`."""
        overrides = {} if self.num_layers is None else {"num_hidden_layers": self.num_layers}
        return {"context": 512, "config_overrides": overrides}


class Learned(NamedTuple):
    """A model's facts from a run with every expert in its place, before presets take turns."""

    prompts: list[list[int]]  # the last one is measured, the others warm
    params: SamplingParams
    token_ids: list[list[int]]  # the answers
    trace: Trace  # of them
    known: Trace  # of other prompts


class Totals:
    """Counts of an engine since it was watched; the difference of two is a stretch."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __sub__(self, other: Totals) -> Totals:
        return Totals({name: value - other[name] for name, value in self._values.items()})


class Stretch(NamedTuple):
    """Work of a preset in a stretch of time."""

    num_tokens: int
    totals: Totals
    token_ids: list[list[int]]  # of whole answers, whatever came before the stretch too

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.totals["seconds"]

    @property
    def s_per_pass(self) -> float:
        return self.totals["seconds"] / self.totals["num_passes"]


def find_model(name: str, num_layers: int | None) -> Model:
    """`synth:llada2` is the small synthetic checkpoint, made if need be, with fewer layers."""
    if name == "synth:llada2":
        return Model(name, str(model_folder(None, "small")), num_layers)
    return Model(name, name)


def learn(
    model: Model, folder: Path, num_new: int, num_prompts: int = 2, steps: int | None = None
) -> tuple[Learned, Path]:
    """Calibrates a model and answers some prompts; the calibration's file lies in `folder`.

    steps: of a block, at most; the family's own by default.
    """
    path, trace_path = folder / "calibration", folder / "trace"
    say(f"{model.name}: calibrating, and recording the run that is measured ...")
    with LLM(model.reference, device="cpu", cache="off", **model.options) as llm:
        is_early = (
            None if llm.config.decoding.writes_in_order else False
        )  # all blocks whole, as published
        diffusion = DiffusionParams(steps=steps, eos_early_stop=is_early)
        params = SamplingParams(max_tokens=num_new, ignore_eos=True, diffusion=diffusion)
        ids = token_ids(llm, text_for(model.name))
        half = len(ids) // 2
        calibration = calibrate(llm, ids[:half], model.name, num_pieces=_NUM_PIECES)
        calibration.save(path)
        starts = (half + i * half // num_prompts for i in range(num_prompts))
        prompts = [ids[start:][:_PROMPT_TOKENS] for start in starts]
        with recorded(llm, trace_path, model.name):
            answers = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    return Learned(prompts, params, answers, Trace.load(trace_path), calibration.trace), path


def device_options(model: Model, least_slowdown: float = SLOWDOWN) -> dict[str, str]:
    """Speeds in the proportions of a published model's experts on a published machine.

    A tiny expert's own would be those of the link's latency, and shorter than a thread's wake-up.
    least_slowdown: of the device; the more, the less what else runs here counts.
    """
    opened = open_model(model.reference, EngineConfig(device="emulated", **model.options))
    experts = opened.memory.experts
    layout = experts.layout
    core_s = measure_device_s(layout, experts.shape, opened.kernels()).at(1)
    slowdown = max(least_slowdown, _LEAST_EXPERT_S / core_s)
    costs = load_profile(PROFILE).costs(published(FAMILY))
    link_s = costs.link_s / costs.device_s.at(1) * core_s * slowdown
    return {
        "device_slowdown": f"{slowdown:.4g}",
        "link_GBps": f"{layout.num_bytes / link_s / 1e9:.4g}",
        "link_latency_us": "0",
        "host_slowdown": f"{costs.host_s.at(1) / costs.device_s.at(1):.3g}",
    }


class _Watched:
    """Policies, the time of whose methods is added up as planning."""

    def __init__(self, policies: Any, timed: Callable[[Any, str], Any]) -> None:
        self._policies = policies
        self._timed = timed

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._policies, name)
        return self._timed(value, "planning_s") if ismethod(value) else value


class Track:
    """One engine with an emulated device, on which presets take turns and are watched.

    Its passes, its streams, and the time of its layers and policies are added up.
    """

    def __init__(self, llm: LLM) -> None:
        """llm: closed with the track. Raises InternalError if it has no emulated device."""
        runtime = engine_of(llm).experts
        if runtime.device is None or not isinstance(runtime.device.device, EmulatedDevice):
            raise InternalError("The engine has no emulated device.")
        self.llm = llm
        self.runtime, self.costs, self.device = runtime, runtime.device.costs, runtime.device.device
        self.device.timeline = []
        self._spent: Counter[str] = Counter()
        self._ended_s = 0.0  # when the last layer's experts did
        for method, name in _TIMED.items():
            owner = runtime if method == "forward" else runtime.device
            setattr(owner, method, self._timed(getattr(owner, method), name))
        self._watch_policies()

    @classmethod
    def open(
        cls, model: Model, share: float, speeds: Mapping[str, str], calibration: Path
    ) -> Track:
        """share: of the experts that is resident. Raises PlanError without host memory for all."""
        options = {**model.options, "device": "emulated", "device_options": speeds, "cache": "off"}
        plan = plan_model(model.reference, **options)
        check_home(plan)
        options |= {"gpu_memory": budget_of_share(plan, share), "calibration": str(calibration)}
        return cls(LLM(model.reference, **options))

    def __enter__(self) -> Track:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    @property
    def engine(self) -> Engine:
        """The present one: another preset makes another of the same parts."""
        return engine_of(self.llm)

    def adopt(self, preset: str, options: Mapping[str, Any]) -> None:
        """Starts from a preset's own first residents, which the link brings at once.

        Raises PlanError.
        """
        given = {name: str(value).lower() for name, value in options.items()}
        speeds = self.device.speeds
        self.device.speeds = replace(speeds, link_bytes_per_s=math.inf, link_latency_s=0.0)
        try:
            self.llm.adopt_policy(preset, given)
        finally:
            self.device.speeds = speeds
        self._watch_policies()

    def answer(self, prompt: list[int], params: SamplingParams, wanted: list[int]) -> Stretch:
        """One answer; raises InternalError if it is not the one that is `wanted`."""
        before = self.totals()
        [completion] = self.llm.generate([prompt], params)
        done = self.totals() - before
        if completion.token_ids != wanted:
            raise InternalError(f"{self.llm.plan.policy} wrote something else than all resident.")
        return Stretch(len(wanted), done, [completion.token_ids])

    def totals(self) -> Totals:
        """Return all totals so far: counts, passes, seconds by stream and by `_TIMED`."""
        spans, self.device.timeline = self.device.timeline or [], []
        for span in spans:
            self._spent[span.stream] += span.end_s - span.start_s
        return Totals(
            {
                **self.llm.stats(),
                **{name: self._spent[name] for name in (*STREAMS, *_TIMED.values(), BETWEEN)},
                "num_passes": self._spent["num_layers"] // self.llm.config.num_moe_layers,
                "seconds": time.perf_counter(),
            }
        )

    def describe(self) -> Row:
        """Return the emulated machine's speeds, in milliseconds per expert."""
        costs = self.costs
        return {
            "device": self.llm.device,
            "profile": PROFILE,
            "proportions_of": FAMILY,
            "expert_bytes": costs.expert_bytes,
            "link_ms": 1e3 * costs.link_s,
            "device_ms": [round(1e3 * costs.device_s.at(n), 4) for n in (1, 8, 64)],
            "host_ms": [round(1e3 * costs.host_s.at(n), 4) for n in (1, 8, 64)],
            "dense_ms": [round(1e3 * costs.dense_s.at(n), 4) for n in (1, 32)],
            "perfect_balance": 1 + costs.host_s.at(1) / costs.device_s.at(1),
            "num_residents": sum(self.llm.plan.residents_per_layer),
            "num_experts": self.llm.plan.num_experts,
        }

    def _watch_policies(self) -> None:
        policies: Any = self.runtime.policies
        if not isinstance(policies, _Watched):  # where a preset was refused, it is still the last
            self.runtime.policies = cast(Any, _Watched(policies, self._timed))

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start_s = time.perf_counter()
            answer = method(*arguments, **named)
            end_s = time.perf_counter()
            self._spent[name] += end_s - start_s
            if name == "experts_s":  # of one `LayerCall`
                self._spent["num_layers"] += 1
                self._spent[BETWEEN] += start_s - self._ended_s if arguments[0].layer else 0.0
                self._ended_s = end_s
            return answer

        return timed


def median_speed(stretches: Sequence[Stretch], seconds: str) -> float:
    """Committed tokens per second; seconds: which of a stretch's times counts."""
    return statistics.median(one.num_tokens / one.totals[seconds] for one in stretches)


def stretches_row(stretches: Sequence[Stretch]) -> Row:
    """Medians with their spread, and where the time went."""
    speed = Spread.of([one.tokens_per_s for one in stretches])

    def total(name: str) -> float:
        return sum(one.totals[name] for one in stretches)

    seconds, num_passes = total("seconds"), total("num_passes")
    hits, misses = total("num_hits"), total("num_misses")
    names = ("num_on_host", "num_fetched", "num_moved", "num_prefetched", "prefetch_num_hits")
    return {
        "num_turns": len(stretches),
        "tokens_per_s": speed.median,
        "least": speed.least,
        "most": speed.most,
        "ms_per_pass": 1e3 * seconds / num_passes,
        "experts_share": total("experts_s") / seconds,
        "planning_share": total("planning_s") / seconds,
        "busy": {name: round(total(name) / seconds, 3) for name in STREAMS},
        "hit_rate": hits / max(1, hits + misses),
        "link_bytes_per_token": total("link_bytes") / sum(one.num_tokens for one in stretches),
        "per_pass": {name: round(total(name) / num_passes, 2) for name in names},
    }


def temporary_folder() -> TemporaryDirectory[str]:
    """Make a folder for the calibrations and traces of one run."""
    return TemporaryDirectory(prefix="lowtide-benchmark-")


def check_home(plan: MemoryPlan) -> None:
    if plan.host.num_slots < plan.num_experts:
        raise PlanError(
            f"Host memory has room for {plan.host.num_slots} of {plan.num_experts} experts, and "
            "policies are compared with all at home: free some, or measure a smaller model."
        )
