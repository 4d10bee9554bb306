"""Presets taking turns on an emulated device: what the benchmarks of policies share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from common.models import model_folder
from common.record import REPOSITORY, Row, say
from common.simulated import published
from lowtide import LLM, SamplingParams
from lowtide.core import MemoryPlan
from lowtide.engine import EngineConfig, open_model
from lowtide.errors import InternalError, PlanError
from lowtide.experts.emulated import COMPUTE, HOST, LINK, EmulatedDevice, measure_device_s
from lowtide.experts.hybrid import HybridRuntime
from lowtide.lab.bench import Spread
from lowtide.lab.budgets import budget_of_share
from lowtide.lab.calibrate import calibrate
from lowtide.lab.record import recorded
from lowtide.llm import plan_model
from lowtide.params import DiffusionParams
from lowtide.profiles import load_profile
from lowtide.trace import Trace

PROFILE = "rtx3090"
FAMILY = "llada2"  # the published model whose experts' proportions are emulated
_NUM_PIECES = 8  # of the text that calibrates
_PROMPT_TOKENS = 64


class Model(NamedTuple):
    """A model to measure: `reference` as `LLM` takes it, with as many layers as are wanted."""

    name: str
    reference: str
    num_layers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of `LLM`."""
        overrides = {} if self.num_layers is None else {"num_hidden_layers": self.num_layers}
        return {"context": 512, "config_overrides": overrides}


class Learned(NamedTuple):
    """What a run with every expert in its place tells of a model, before presets take turns."""

    prompts: list[list[int]]  # the first one warms, the second is measured
    params: SamplingParams
    token_ids: list[list[int]]  # the answers
    trace: Trace  # of both
    known: Trace  # of other prompts


class Stretch(NamedTuple):
    """What a preset did in a stretch of time, and how busy the machine's parts were."""

    num_tokens: float
    num_passes: float
    seconds: float
    experts_s: float  # of it, in the layers' experts
    busy_s: Mapping[str, float]  # by stream
    counts: Mapping[str, float]  # of the runtime

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def s_per_pass(self) -> float:
        return self.seconds / self.num_passes


def find_model(name: str, num_layers: int | None) -> Model:
    """`synth:llada2` is the small synthetic checkpoint, made if need be, with fewer layers."""
    if name == "synth:llada2":
        return Model(name, str(model_folder(None, "small")), num_layers)
    return Model(name, name)


def learn(model: Model, folder: Path, num_new: int) -> tuple[Learned, Path]:
    """Calibrates a model and answers two prompts; the calibration's file lies in `folder`."""
    text = "".join(p.read_text() for p in sorted((REPOSITORY / "lowtide").rglob("*.py")))
    path, trace_path = folder / "calibration", folder / "trace"
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, diffusion=DiffusionParams())
    say(f"{model.name}: calibrating, and recording the run that is measured ...")
    with LLM(model.reference, device="cpu", **model.options) as llm:
        ids = _token_ids(llm, text)
        half = len(ids) // 2
        calibration = calibrate(llm, ids[:half], model.name, num_pieces=_NUM_PIECES)
        calibration.save(path)
        prompts = [ids[start:][:_PROMPT_TOKENS] for start in (half, half + half // 2)]
        with recorded(llm, trace_path, model.name):
            answers = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    return Learned(prompts, params, answers, Trace.load(trace_path), calibration.trace), path


def device_options(model: Model) -> dict[str, str]:
    """Speeds in the proportions of a published model's experts on a published machine.

    A tiny expert's own would be those of the link's latency. Relative to what an expert with one
    token takes on a core of this machine, which is measured here.
    """
    opened = open_model(model.reference, EngineConfig(device="emulated", **model.options))
    layout = opened.slot_layout
    device_s = measure_device_s(layout, opened.config.moe_shape, opened.products).at(1)
    costs = load_profile(PROFILE).costs(published(FAMILY))
    link_s = costs.link_s / costs.device_s.at(1) * device_s
    return {
        "link_GBps": f"{layout.num_bytes / link_s / 1e9:.4g}",
        "link_latency_us": "0",
        "host_slowdown": f"{costs.host_s.at(1) / costs.device_s.at(1):.3g}",
    }


class Track:
    """One engine with an emulated device, on which presets take turns."""

    def __init__(
        self, model: Model, share: float, speeds: Mapping[str, str], calibration: Path
    ) -> None:
        """share: of the experts that is resident. Raises PlanError without host memory for all."""
        options = {**model.options, "device": "emulated", "device_options": speeds}
        plan = plan_model(model.reference, **options)
        _check_home(plan)
        options |= {"gpu_memory": budget_of_share(plan, share), "calibration": str(calibration)}
        self.llm = LLM(model.reference, **options)
        runtime = self.llm._engine.experts
        if not isinstance(runtime, HybridRuntime) or not isinstance(runtime.device, EmulatedDevice):
            raise InternalError("The engine has no emulated device.")
        self.runtime, self.device = runtime, runtime.device
        self._experts_s = 0.0
        self._forward = runtime.forward
        runtime.forward = self._timed_forward  # type: ignore[method-assign]

    def __enter__(self) -> Track:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def adopt(self, preset: str, options: Mapping[str, Any]) -> None:
        """Starts from a preset's own first residents. Raises PlanError."""
        given = {name: str(value).lower() for name, value in options.items()}
        self.llm.adopt_policy(preset, given)

    def answer(self, prompt: list[int], params: SamplingParams, wanted: list[int]) -> Stretch:
        """One answer; raises InternalError if it is not the one that is `wanted`."""
        before, self._experts_s, self.device.timeline = self.llm.stats(), 0.0, []
        [completion] = self.llm.generate([prompt], params)
        if completion.token_ids != wanted:
            raise InternalError(f"{self.llm.plan.policy} wrote something else than all resident.")
        spans, self.device.timeline = self.device.timeline, None
        after = self.llm.stats()
        done = {name: after[name] - before[name] for name in after}
        busy_s = dict.fromkeys((COMPUTE, LINK, HOST), 0.0)
        for span in spans:
            busy_s[span.stream] += span.end_s - span.start_s
        return Stretch(
            num_tokens=done["committed_tokens"],
            num_passes=done["forwards"],
            seconds=done["generation_s"],
            experts_s=self._experts_s,
            busy_s=busy_s,
            counts=done,
        )

    def describe(self) -> Row:
        """What the machine is made to be, in milliseconds per expert."""
        costs = self.runtime.costs
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

    def _timed_forward(self, *arguments: Any) -> None:
        start_s = time.perf_counter()
        self._forward(*arguments)
        self._experts_s += time.perf_counter() - start_s


def median_speed(stretches: Sequence[Stretch], seconds: str) -> float:
    """Committed tokens per second; seconds: which of a stretch's times counts."""
    return statistics.median(one.num_tokens / getattr(one, seconds) for one in stretches)


def stretches_row(stretches: Sequence[Stretch]) -> Row:
    """Medians with their spread, and where the time went."""
    speed = Spread.of([one.tokens_per_s for one in stretches])
    seconds = sum(one.seconds for one in stretches)
    num_tokens = sum(one.num_tokens for one in stretches)
    num_passes = sum(one.num_passes for one in stretches)
    hits, misses = (sum(s.counts[name] for s in stretches) for name in ("num_hits", "num_misses"))
    names = ("num_on_host", "num_fetched", "num_moved", "num_prefetched", "prefetch_num_hits")
    return {
        "tokens_per_s": speed.median,
        "least": speed.least,
        "most": speed.most,
        "ms_per_pass": 1e3 * seconds / num_passes,
        "experts_share": sum(one.experts_s for one in stretches) / seconds,
        "busy": {
            name: round(sum(one.busy_s[name] for one in stretches) / seconds, 3)
            for name in (COMPUTE, LINK, HOST)
        },
        "hit_rate": hits / max(1, hits + misses),
        "link_bytes_per_token": sum(s.counts["link_bytes"] for s in stretches) / num_tokens,
        "per_pass": {n: round(sum(s.counts[n] for s in stretches) / num_passes, 2) for n in names},
    }


def temporary_folder() -> TemporaryDirectory[str]:
    """For calibrations and traces of one run."""
    return TemporaryDirectory(prefix="lowtide-benchmark-")


def _token_ids(llm: LLM, text: str) -> list[int]:
    """A demo's tokens; a synthetic model's tokenizer knows its own words only, so bytes do."""
    if llm.config.vocab_size < 10_000 and llm.tokenizer is not None:
        return list(llm.tokenizer.encode(text))
    return (1 + np.frombuffer(text.encode(), np.uint8).astype(np.int64)).tolist()


def _check_home(plan: MemoryPlan) -> None:
    if plan.host.num_slots < plan.num_experts:
        raise PlanError(
            f"Host memory has room for {plan.host.num_slots} of {plan.num_experts} experts, and "
            "policies are compared with all at home: free some, or measure a smaller model."
        )
