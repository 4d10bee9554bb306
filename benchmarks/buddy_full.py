"""Substitution at published dimensions, from disk: speed alone, since the weights are random.

The experts of LLaDA2.0-mini, Qwen3-30B-A3B and DeepSeek-V2-Lite, the paper's model, in fewer
layers. Exact and BuddyMoE with rising rho take turns on one loaded model: tokens per second, bytes
read per token. Then each lane answers some more under a watch: the seconds waited for each expert
that was asked for and absent (the paper's Table 1), what a layer's experts take, which is all that
substitution can shorten, and what it takes of that itself, of 32 rows for the block model and of
one for the autoregressive ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import ismethod
from pathlib import Path
from typing import Any

from common.arguments import make_parser, run_script
from common.buddies import BUDDYMOE, Lane, Scale, calibrated, load_profile, redundancy
from common.ceilings import Disk, memory_ceiling
from common.inside import engine_of
from common.models import cache_folder
from common.record import Recorder, Row, say

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.config import ModelConfig
from lowtide.families import families, read_config_in
from lowtide.lab.bench import Load, Preset, PresetRun, take_turns
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model
from lowtide.model_writing.synth import write_checkpoint
from lowtide.policies.buddy_profile import BuddyProfile

LAYERS = {"llada2": 3, "qwen3_moe": 6, "deepseek_v2": 4}
"""Layers of some 1.6, 1.2 and 1.1 GB each; LLaDA2's and DeepSeek's first ones have no experts. A
pass of one row of Qwen3 reads 0.1 GB of a layer and 0.6 GB of head: a tenth of the pass with 48
layers, half of it with six."""

CONTEXT = 512
PROMPT = [1]
"""A prompt is exact by default, and one of many tokens asks for most experts: its reads, the same
in every lane, would hide those of the tokens that are written."""

STEPS = 4
"""Steps of a block. Random weights would take one for every token, and each reads 1 GB."""

SHARE = 0.375
"""Share of the experts that is resident."""

FASTER = 1.10
"""Tokens per second over exact's."""

WATCHED = 3
"""Answers per lane whose layers are timed, beside those whose speed counts."""

OWN_SHARE, OWN_S = 0.01, 20e-6
"""Ceilings of a substitution's cost: share of a layer at 32 rows, seconds at one."""


class Watch:
    """Seconds of a run's expert layers, and of the substitutions among them."""

    def __init__(self, llm: LLM) -> None:
        self.num_layers = self.num_asked = 0
        self.layers_s = self.asked_s = 0.0
        self._runtime: Any = engine_of(llm).experts

    @contextmanager
    def on(self) -> Iterator[None]:
        """Meanwhile both are timed."""
        runtime, policies, forward = self._runtime, self._runtime.policies, self._runtime.forward
        runtime.policies, runtime.forward = _Watched(policies, self), self._layer(forward)
        try:
            yield
        finally:
            runtime.policies = policies
            del runtime.forward

    def row(self) -> dict[str, float]:
        """Nothing of lanes that ask for no substitution: their layers are compiled together."""
        if not self.num_asked:
            return {}
        return {
            "substitution_us": 1e6 * self.asked_s / self.num_asked,
            "layer_us": 1e6 * self.layers_s / self.num_layers,
            "share_of_layers": self.asked_s / self.layers_s,
        }

    def _layer(self, forward: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> None:
            start_s = time.perf_counter()
            forward(*arguments, **named)
            self.layers_s += time.perf_counter() - start_s
            self.num_layers += 1

        return timed


class _Watched:
    """Policies whose substitution is timed."""

    def __init__(self, policies: Any, watch: Watch) -> None:
        self._policies = policies
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._policies, name)
        if name != "substitute" or not ismethod(value):
            return value

        def timed(facts: Any) -> Any:
            start_s = time.thread_time()  # of this thread alone, which does not wait in there
            answer = value(facts)
            self._watch.asked_s += time.thread_time() - start_s
            self._watch.num_asked += 1
            return answer

        return timed


def main() -> None:
    options = _options()
    named = ("placement", "new", "steps", "repeats", "layers")
    recorder = Recorder("buddy full", {name: getattr(options, name) for name in named}, options.out)
    for family in options.families:
        folder = _folder(options.folder, family, options.size, options.layers)
        config = read_config_in(folder)
        calibration = folder.parent / f"{folder.name}.buddies"
        profile = load_profile(calibration) or _calibrate(folder, calibration, options)
        recorder.write("redundancy", {"model": folder.name, **redundancy(profile)})
        scale = Scale(config.moe.num_experts_per_token, config.moe.num_experts)
        lanes = make_lanes(options.placement, scale)
        for share in options.shares:
            _measure(recorder, folder, calibration, share, lanes, options)


def _measure(
    recorder: Recorder,
    folder: Path,
    calibration: Path,
    share: float,
    lanes: list[Lane],
    options: argparse.Namespace,
) -> None:
    """All lanes take turns on one loaded model, exact first, the disk measured before and after."""
    say(f"{folder.name}, {share:g} of the experts ...")
    shared: dict[str, Any] = {"context": CONTEXT, "calibration": str(calibration)}
    last = lanes[-1]
    wide = {"policy": last.policy, "policy_options": dict(last.options)}
    plan = plan_model(folder, **shared, **wide)
    budget_bytes = budget_of_share(plan, share)
    disk = Disk(folder, plan.host.slot_bytes, 1 << 30)
    where = {"model": folder.name, "resident_share": share, "budget_bytes": budget_bytes}
    recorder.write("ceiling", {**where, **memory_ceiling(), **disk.measure()})
    with LLM(folder, host_memory=budget_bytes, cache="off", **shared, **wide) as llm:
        load = make_load(llm.config, options)
        presets = [Preset(lane.policy, lane.options) for lane in lanes]
        runs = take_turns(llm, presets, load, options.repeats)
        for lane, run in zip(lanes, runs, strict=True):
            row = _row(run, runs[0])
            if not run.reason:
                row |= _watched(llm, lane, load)
            recorder.write(lane.name, {**where, **row})
            for expectation in _expectations(llm.config, lane, row):
                recorder.write("expected", {**where, **expectation})
    recorder.write("ceiling", {**where, **disk.measure()})


def _row(run: PresetRun, exact: PresetRun) -> Row:
    if run.reason:
        return {"reason": run.reason}
    speed, own = exact.tokens_per_s.median, run.tokens_per_s
    return {
        "tokens_per_s": own.median,
        "least": own.least,
        "most": own.most,
        "speed_up": own.median / speed,
        "read_bytes_per_token": run.read_bytes_per_token,
        "hit_rate": run.hit_rate,
    }


def _watched(llm: LLM, lane: Lane, load: Load) -> Row:
    """Measure further answers turn by turn, after one that finds the residents.

    Returns times by part and waits per miss: the medians, and under `each_` each turn's. Every lane
    draws with the same seeds.
    """
    llm.adopt_policy(lane.policy, lane.options)
    llm.generate([load.prompt], replace(load.params, seed=0))
    turns = [_watched_turn(llm, load, seed) for seed in range(1, 1 + WATCHED)]
    each = {name: [turn[name] for turn in turns] for name in turns[0]}
    medians = {name: statistics.median(values) for name, values in each.items()}
    return {**medians, **{f"each_{name}": values for name, values in each.items()}}


def _watched_turn(llm: LLM, load: Load, seed: int) -> dict[str, float]:
    watch, before = Watch(llm), llm.stats()
    with watch.on():
        llm.generate([load.prompt], replace(load.params, seed=seed))
    after = llm.stats()
    grown = {name: after[name] - before[name] for name in ("num_misses", "wait_s", "forwards")}
    return {
        "misses_per_pass": grown["num_misses"] / grown["forwards"],
        "waited_ms": 1e3 * grown["wait_s"] / max(1.0, grown["num_misses"]),  # per miss
        **watch.row(),
    }


def _expectations(config: ModelConfig, lane: Lane, row: Mapping[str, Any]) -> Iterator[Row]:
    if lane.miss == "exact" or "reason" in row:
        return
    claim = f"{lane.name} is {FASTER:.2f} times as fast as exact"
    yield {"claim": claim, "value": row["speed_up"], "is_met": row["speed_up"] >= FASTER}
    if not config.decoding.writes_in_order:
        own = row["share_of_layers"]
        claim = f"{lane.name}: substitution takes {OWN_SHARE:.0%} of a layer of a block's rows"
        yield {"claim": claim, "value": own, "is_met": own <= OWN_SHARE}
    else:
        own = row["substitution_us"]
        claim = f"{lane.name}: substitution takes {1e6 * OWN_S:.0f} us of a layer of one row"
        yield {"claim": claim, "value": own, "is_met": own <= 1e6 * OWN_S}


def make_lanes(placement: str, scale: Scale) -> list[Lane]:
    """The paper's rho by proportion, to no bound; ours last, which is told most of a pass."""

    def lossy(miss: str, rho: str) -> Lane:
        name = f"{'ours' if miss == 'late' else miss} rho {rho}"
        own = {"placement": placement, "miss": miss, "rho": rho, "max_mass": "off"}
        own |= {"tae": "off", "beta": "off"}
        return Lane(name, BUDDYMOE, own)

    rhos = scale.rhos()
    buddies = [lossy("buddy", rho) for rho in rhos]
    return [Lane("exact", placement), *buddies, lossy("late", rhos[0])]


def make_load(config: ModelConfig, options: argparse.Namespace) -> Load:
    """Build a load whose answers draw new tokens each time.

    With random weights the likeliest tokens repeat, and residents would be found once for all.

    A block model writes twice as many, two blocks with the prompt: the first one's tokens, exact by
    default, are put into the cache with the second one's first pass, as in any longer answer.
    """
    num_new, diffusion = options.new, DiffusionParams()
    if not config.decoding.writes_in_order:
        num_new = 2 * options.new - len(PROMPT)
        diffusion = DiffusionParams(steps=options.steps, eos_early_stop=False)
    params = SamplingParams(
        temperature=1.0, max_tokens=num_new, ignore_eos=True, diffusion=diffusion
    )
    return Load(PROMPT, PROMPT, params)


def _folder(base: Path, family: str, size: str, num_layers: int | None) -> Path:
    """A checkpoint of a family's published dimensions with fewer layers, made if need be."""
    num_layers = num_layers or LAYERS[family]
    folder = base / f"{family}-{size}-{num_layers}-layers"
    if not (folder / "config.json").exists():
        say(f"Making {folder} ...")
        made = families()[family].sizes()[size]
        write_checkpoint(
            replace(made, config={**made.config, "num_hidden_layers": num_layers}), folder
        )
    return folder


def _calibrate(folder: Path, path: Path, options: argparse.Namespace) -> BuddyProfile:
    plan = plan_model(folder, context=CONTEXT)
    budget_bytes = budget_of_share(plan, 0.5)
    return calibrated(str(folder), path, options.pieces, context=CONTEXT, host_memory=budget_bytes)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--layers", type=int, help="of every model (3, 6 and 4)")
    parser.add_argument("--size", default="full", help="a key of the family's sizes")
    parser.add_argument("--folder", type=Path, default=None, help="where models are kept")
    parser.add_argument("--shares", type=float, nargs="+", default=[SHARE])
    parser.add_argument("--placement", default="lowtide", help="who stays resident")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer, or of a block")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a block")
    parser.add_argument("--repeats", type=int, default=8, help="answers per lane")
    parser.add_argument("--pieces", type=int, default=16, help="of the calibration's text")
    options = parser.parse_args()
    options.folder = options.folder or cache_folder()
    return options


if __name__ == "__main__":
    run_script(main)
