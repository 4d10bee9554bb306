"""Presets by batch: decoding and prefill of an autoregressive model on the emulated device.

One engine takes every preset in turn, each from its own first residents, with the same slots,
costs, calibration and prompts; half of the experts are resident. The ceiling is another engine
with all of them. Whatever the preset, the answers must be the same.

Time is emulated: the link and the host keep an RTX 3090's ratios to a core of this machine, so
ratios mean something and tokens per second do not. The published ratios compare whole systems
(with HybriMoE's threshold, llama.cpp, KTransformers); ours compare policies over one runtime. The
row "device" has the emulated costs beside the profile's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from common.arguments import make_parser, run_script
from common.emulated import SLOWDOWN, STREAMS, Stretch, Totals, Track, check_home
from common.models import model_folder
from common.record import Recorder, say

from lowtide import LLM
from lowtide.config import ModelConfig
from lowtide.core import MoEShape, align_up
from lowtide.decode.autoregressive import Autoregressive
from lowtide.decode.request import Committed, Request
from lowtide.engine.opening import MAX_PASS_ROWS
from lowtide.errors import InternalError, UsageError
from lowtide.lab.calibrate import calibrate
from lowtide.llm import plan_model
from lowtide.memory.budget import DEVICE_STAGING_SLOTS
from lowtide.memory.kv_cache import GRANULE_TOKENS
from lowtide.params import SamplingParams
from lowtide.plan import MemoryPlan
from lowtide.profiles import load_profile
from lowtide.replay.calibration import GATES, Calibration

Ids = list[list[int]]


class Family(NamedTuple):
    """How a family is measured: a few of its small size's layers, with DALI's own settings."""

    num_layers: int  # of the model, MoE or not
    dali: Mapping[str, str]  # as published for it
    published: MoEShape  # one layer of the model that DALI ran


_USUAL = {"w_size": "4", "u_size": "8", "num_prefetch": "4"}
FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family(4, _USUAL, MoEShape(1, 128, 8, 2048, 768)),
    "deepseek_v2": Family(5, _USUAL, MoEShape(1, 64, 6, 2048, 1408)),
    "mixtral": Family(
        4, {**_USUAL, "u_size": "1", "num_prefetch": "1"}, MoEShape(1, 8, 2, 4096, 14336)
    ),
}

PRESETS = ("dali", "lowtide", "hybrimoe", "layer-split", "lru", "fiddler", "tide", "all-host")
PLANNING_PRESETS = ("dali", "hybrimoe", "lowtide")
CEILING = "resident"
PROFILE = "rtx3090"  # what an emulated device takes its ratios from

# DALI over others, by phase; it has no LRU cache end to end.
PUBLISHED: Mapping[str, Mapping[str, Sequence[float]]] = {
    "decode": {"hybrimoe": [1.32], "layer-split": [2.16, 3.97], "fiddler": [14.3]},
    "prefill": {"hybrimoe": [2.00], "layer-split": [3.80, 7.62]},
}

PUBLISHED_PLANNING_SHARE = {"dali": 0.045, "hybrimoe": 0.0301}  # Table 6, batch 8

_COUNTS = (
    "num_hits",
    "num_misses",
    "num_on_host",
    "num_fetched",
    "num_moved",
    "num_prefetched",
    "prefetch_num_hits",
    "prefetch_num_late",
    "prefetch_num_wasted",
)
_TOKENS = (1, 8, 64)  # of an expert, where costs are shown


class Answers:
    """Prompts being answered greedily, pass by pass."""

    def __init__(self, decoder: Autoregressive, num_prompts: int) -> None:
        self._decoder = decoder
        self.token_ids: Ids = [[] for _ in range(num_prompts)]

    def begin(self) -> None:
        """Passes until every prompt has its first token."""
        while not all(self.token_ids):
            self._step()

    def go_on(self, num_passes: int) -> None:
        """As many passes, each with a token for every prompt."""
        for _ in range(num_passes):
            num_tokens = self._step()
            if num_tokens != len(self.token_ids):
                raise InternalError(f"{num_tokens} of {len(self.token_ids)} prompts went on.")

    def _step(self) -> int:
        """One pass; how many prompts got a token."""
        num_tokens = 0
        for event in self._decoder.step():
            if isinstance(event, Committed):
                self.token_ids[event.request] += event.tokens
                num_tokens += len(event.tokens)
        return num_tokens


@contextmanager
def answering(track: Track, prompts: Ids, num_passes: int) -> Iterator[Answers]:
    """Answers that may go on for `num_passes` passes once all have begun."""
    engine = track.engine
    decoder = Autoregressive(engine.model, engine.kv_cache, MAX_PASS_ROWS)
    params = SamplingParams(max_tokens=_num_new(len(prompts), num_passes), ignore_eos=True)
    with engine.executor.in_charge():
        try:
            for index, prompt in enumerate(prompts):
                decoder.add(Request(id=index, prompt=prompt, params=params))
            yield Answers(decoder, len(prompts))
        finally:
            decoder.close()


def decode(track: Track, prompts: Ids, num_warm: int, num_timed: int) -> Stretch:
    """Passes of one token per prompt, after others that are not timed."""
    with answering(track, prompts, num_warm + num_timed) as answers:
        answers.begin()
        answers.go_on(num_warm)
        before = track.totals()
        answers.go_on(num_timed)
        taken = track.totals() - before
    return Stretch(num_timed * len(prompts), taken, answers.token_ids)


def prefill(track: Track, prompts: Ids) -> Stretch:
    """The last of `prompts`, which are read one after the other."""
    token_ids: Ids = []
    for prompt in prompts:
        with answering(track, [prompt], 0) as answers:
            before = track.totals()
            answers.begin()
            taken = track.totals() - before
        token_ids += answers.token_ids
    return Stretch(len(prompts[-1]), taken, token_ids)


class Ratios(NamedTuple):
    """DALI's speed over another's."""

    tokens_per_s: float
    experts: float  # of the routed experts' time alone: few layers leave the rest a large share


class Race:
    """Presets in one engine, in turn, and the ceiling in its own."""

    def __init__(
        self, budget: Track, ceiling: Track, presets: Sequence[str], dali: Mapping[str, str]
    ) -> None:
        """`dali`: the options of that preset."""
        self.budget = budget
        self._ceiling = ceiling
        self._presets = presets
        self._dali = dali

    def run(
        self, work: Callable[[Track], Stretch], num_repeats: int, repeated: Collection[str]
    ) -> dict[str, list[Stretch]]:
        """What each lane took, every time; the lanes take turns.

        All once; again only DALI, the ceiling and those `repeated`, whose ratios are published.
        """
        lanes = (CEILING, *self._presets)
        taken: dict[str, list[Stretch]] = {name: [] for name in lanes}
        again = [name for name in lanes if name in (CEILING, "dali", *repeated)]
        for names in (lanes, *[again] * (num_repeats - 1)):
            for name in names:
                track = self._ceiling if name == CEILING else self.under(name)
                taken[name].append(work(track))
        return taken

    def under(self, preset: str) -> Track:
        """The engine with the budget, from the preset's first residents."""
        self.budget.adopt(preset, self._dali if preset == "dali" else {})
        return self.budget


def main() -> None:
    options = _options()
    folder = model_folder(options.model, "small", options.family)
    num_layers = min(ModelConfig.load(folder).num_layers, FAMILIES[options.family].num_layers)
    overrides = {"num_hidden_layers": num_layers}
    plan = plan_model(
        folder, device="emulated", context=_context(options), config_overrides=overrides
    )
    check_home(plan)
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        calibration = Path(temporary) / "calibration.lowtide"
        _calibrate(folder, overrides, options.pieces, calibration)
        budget, ceiling = (
            stack.enter_context(Track(LLM(folder, **each)))
            for each in _llm_options(plan, overrides, calibration)
        )
        race = Race(budget, ceiling, options.presets, FAMILIES[options.family].dali)
        settings = _settings(options, folder, budget)
        recorder = Recorder("batches", settings, options.out)
        recorder.write("device", _device(budget))
        recorder.write("early gates", _accuracy(calibration))
        race.run(lambda track: decode(track, _prompts(track, 2, 8), 1, 1), 1, ())  # warm
        _measure_decode(recorder, race, options)
        _measure_prefill(recorder, race, options)
        _measure_planning(recorder, race, options)


def _measure_decode(recorder: Recorder, race: Race, options: argparse.Namespace) -> None:
    ratios: dict[str, list[Ratios]] = {}
    for batch in options.batches:
        prompts = _prompts(race.budget, batch, options.prompt)

        def work(track: Track, prompts: Ids = prompts) -> Stretch:
            return decode(track, prompts, options.warm, options.new)

        taken = race.run(work, options.repeats, PUBLISHED["decode"])
        for name, ratio in _write(recorder, race, "decode", batch, taken).items():
            ratios.setdefault(name, []).append(ratio)
    means = {
        name: Ratios(*(statistics.mean(column) for column in zip(*each, strict=True)))
        for name, each in ratios.items()
    }
    _write_ratios(recorder, race, "decode", "mean", means)


def _measure_prefill(recorder: Recorder, race: Race, options: argparse.Namespace) -> None:
    """The second of two prompts: a cache that starts empty is filled by the first."""
    prompts = _prompts(race.budget, 2, options.prefill)
    taken = race.run(lambda track: prefill(track, prompts), options.repeats, PUBLISHED["prefill"])
    _write(recorder, race, "prefill", 1, taken)


def _measure_planning(recorder: Recorder, race: Race, options: argparse.Namespace) -> None:
    """What the policies take of the passes so far, at each of the lengths of one answer."""
    prompts = _prompts(race.budget, options.planning_batch, options.prompt)
    speedup = _speedup(race.budget, FAMILIES[options.family].published)
    for preset in (name for name in PLANNING_PRESETS if name in options.presets):
        track, num_done = race.under(preset), 0
        with answering(track, prompts, max(options.lengths)) as answers:
            answers.begin()
            before = track.totals()
            for length in sorted(options.lengths):
                answers.go_on(length - num_done)
                num_done = length
                row = _planning(
                    preset, track.totals() - before, track.llm.config.num_moe_layers, speedup
                )
                values = {"preset": preset, "batch": len(prompts), "num_new": length, **row}
                recorder.write("planning", {**values, **_emulated(race)})
                say(
                    f"planning, {preset}, {length} tokens: {row['planning_us_per_layer']:.0f} us "
                    f"per layer, {row['planning_share']:.2%} of the time, "
                    f"{row['planning_share_unscaled']:.1%} were the rest not stretched"
                )


def _planning(preset: str, taken: Totals, num_layers: int, speedup: float) -> dict[str, Any]:
    planning_s, seconds = taken["planning_s"], taken["seconds"]
    per_layer_us = 1e6 / taken["num_passes"] / num_layers
    return {
        "planning_us_per_layer": planning_s * per_layer_us,
        "gate_us_per_layer": taken["gate_s"] * per_layer_us,
        "layer_us": seconds * per_layer_us,
        "planning_share": planning_s / seconds,
        # Policies are as fast here as there, all else is stretched.
        "planning_share_unscaled": planning_s / (planning_s + (seconds - planning_s) / speedup),
        "speedup_unscaled": speedup,
        "published_share": PUBLISHED_PLANNING_SHARE.get(preset),
    }


def _write(
    recorder: Recorder, race: Race, phase: str, batch: int, taken: Mapping[str, list[Stretch]]
) -> dict[str, Ratios]:
    """A row for each lane, and one with DALI's speed over theirs, which is returned."""
    medians = {
        name: statistics.median(t.tokens_per_s for t in each) for name, each in taken.items()
    }
    wanted = taken[CEILING][0].token_ids
    for name, each in taken.items():
        middle = min(each, key=lambda t: abs(t.tokens_per_s - medians[name]))
        values = {
            "preset": name,
            "batch": batch,
            "tokens_per_s": medians[name],
            "share_of_ceiling": medians[name] / medians[CEILING],
            "each_tokens_per_s": [round(t.tokens_per_s, 2) for t in each],
            "same_ids": all(t.token_ids == wanted for t in each),
            **_totals_row(middle.totals),
        }
        recorder.write(phase, {**values, **_emulated(race)})
        is_same = "same ids" if values["same_ids"] else "OTHER IDS"
        say(f"{phase}, batch {batch}, {name}: {medians[name]:.2f} tokens/s, {is_same}")
    ratios = _ratios_of_dali(medians, taken)
    _write_ratios(recorder, race, phase, batch, ratios)
    return ratios


def _totals_row(totals: Totals) -> dict[str, Any]:
    """Counts per pass, and what its streams and its policies take of the time."""
    num_passes, seconds = totals["num_passes"], totals["seconds"]
    return {
        "s_per_pass": seconds / num_passes,
        "experts_s_per_pass": totals["experts_s"] / num_passes,
        "per_pass": {name: round(totals[name] / num_passes, 2) for name in _COUNTS},
        "busy": {name: round(totals[name] / seconds, 3) for name in STREAMS},
        "planning_share": totals["planning_s"] / seconds,
        "gate_share": totals["gate_s"] / seconds,
    }


def _ratios_of_dali(
    medians: Mapping[str, float], taken: Mapping[str, list[Stretch]]
) -> dict[str, Ratios]:
    experts_s = {
        name: statistics.median(t.totals["experts_s"] for t in each) for name, each in taken.items()
    }
    return {
        name: Ratios(medians["dali"] / medians[name], experts_s[name] / experts_s["dali"])
        for name in medians
        if name != "dali"
    }


def _write_ratios(
    recorder: Recorder, race: Race, phase: str, batch: int | str, ratios: Mapping[str, Ratios]
) -> None:
    for name, ratio in ratios.items():
        published = PUBLISHED[phase].get(name)
        values = {"over": name, "batch": batch, **ratio._asdict(), "published": published}
        recorder.write(f"{phase}: dali over others", {**values, **_emulated(race)})
        say(
            f"{phase}, batch {batch}: dali {ratio.tokens_per_s:.2f}x {name}, "
            f"{ratio.experts:.2f}x in the experts' time (published: {published})"
        )


def _emulated(race: Race) -> dict[str, str]:
    """What every row says of the time it was measured in."""
    return {"time": "emulated", "device": race.budget.device.describe()}


def _device(track: Track) -> dict[str, Any]:
    """The emulated costs of an expert beside the profile's, by tokens."""
    costs = track.costs
    shape, dtype = track.engine.opened.config.moe_shape, track.engine.opened.dtype
    profile = load_profile(PROFILE).costs(shape, dtype.itemsize)
    rows = {"device": track.device.describe(), "time": "emulated"}
    for name, c in (("emulated", costs), ("profile", profile)):
        rows[name] = {
            "link_over_device": round(c.link_s / c.device_s.at(1), 1),
            "host_over_device": {n: round(c.host_s.at(n) / c.device_s.at(n), 1) for n in _TOKENS},
            "host_over_link": {n: round(c.host_s.at(n) / c.link_s, 2) for n in _TOKENS},
        }
    seconds = {n: costs.device_s.at(n) for n in _TOKENS}
    return {**rows, "device_s": seconds, "link_s": costs.link_s, "num_staging": costs.num_staging}


def _accuracy(calibration: Path) -> dict[str, Any]:
    """Of each token's experts the share foreseen, and the features' cosine, by predicted layer."""
    accuracy = Calibration.load(calibration).accuracy
    return {
        gate: {"routed": routed.round(3).tolist(), "cosine": cosine.round(3).tolist()}
        for gate, routed, cosine in zip(GATES, accuracy.routed, accuracy.cosine, strict=True)
    }


def _speedup(track: Track, published: MoEShape) -> float:
    """How much faster the profile's machine runs an expert of the published model."""
    expert_s = load_profile(PROFILE).costs(published).device_s.at(1)
    return track.device.speeds.device_s.at(1) / expert_s


def _calibrate(folder: Path, overrides: Mapping[str, object], num_pieces: int, path: Path) -> None:
    """On random ids, which the measured prompts are too."""
    with LLM(folder, device="cpu", config_overrides=overrides) as llm:
        say(f"Calibrating on {num_pieces} pieces ...")
        token_ids = _random_ids(llm.config, 256 * num_pieces, seed=1)
        calibrate(llm, token_ids, folder.name, num_pieces=num_pieces).save(path)


def _llm_options(
    plan: MemoryPlan, overrides: Mapping[str, object], calibration: Path
) -> Iterator[dict[str, Any]]:
    """Of the one with half of the experts resident, then of the ceiling."""
    num_slots = plan.num_experts // 2 + DEVICE_STAGING_SLOTS
    for policy, gpu_memory in (
        ("all-host", plan.minimum_bytes + num_slots * plan.fast_tier.slot_bytes),
        (CEILING, plan.full_bytes),
    ):
        yield {
            "device": "emulated",
            "device_options": {"device_slowdown": str(SLOWDOWN)},
            "gpu_memory": gpu_memory,
            "host_memory": plan.host.used_bytes,
            "context": plan.context,
            "policy": policy,
            "calibration": str(calibration),
            "config_overrides": overrides,
        }


def _settings(options: argparse.Namespace, folder: Path, track: Track) -> dict[str, Any]:
    plan, config = track.engine.plan, track.engine.opened.config
    return {
        "model": folder.name,
        "shape": config.moe_shape._asdict(),
        "resident_share": sum(plan.residents_per_layer) / plan.num_experts,
        "num_slots": plan.fast_tier.num_slots,
        "num_prompt": options.prompt,
        "num_warm_passes": options.warm,
        "num_timed_passes": options.new,
        "num_prefill": options.prefill,
        "calibration": f"random ids, {options.pieces} pieces",
        "dali": FAMILIES[options.family].dali,
        "hybrimoe": "static threshold",
        "repeats": options.repeats,
    }


def _prompts(track: Track, num_prompts: int, num_tokens: int) -> Ids:
    config = track.engine.opened.config
    return [_random_ids(config, num_tokens, (0, index)) for index in range(num_prompts)]


def _random_ids(config: ModelConfig, num_tokens: int, seed: int | tuple[int, int]) -> list[int]:
    """Special ids, the last ones, are left out."""
    ordinary = min((config.vocab_size, *config.eos_token_ids))
    ids: list[int] = np.random.default_rng(seed).integers(0, ordinary, num_tokens).tolist()
    return ids


def _num_new(num_prompts: int, num_passes: int) -> int:
    """Of each prompt, at most: the first goes on while the last is still being read."""
    return num_passes + num_prompts + 1


def _context(options: argparse.Namespace) -> int:
    """Room for every prompt of a batch at once: one that waits would not be in the passes."""
    decoding = [(batch, options.warm + options.new) for batch in options.batches]
    planning = (options.planning_batch, max(options.lengths))
    needed = [
        batch * align_up(options.prompt + _num_new(batch, num_passes), GRANULE_TOKENS)
        for batch, num_passes in (*decoding, planning)
    ]
    return max(*needed, align_up(options.prefill + _num_new(1, 0), GRANULE_TOKENS))


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, "small", "FAMILY")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen3_moe")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=16, help="tokens before decoding (16)")
    parser.add_argument("--warm", type=int, default=8, help="passes before those timed (8)")
    parser.add_argument("--new", type=int, default=None, help="timed passes (12)")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prefill (512)")
    parser.add_argument("--planning-batch", type=int, default=None, help="for planning (8)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=None, help="for planning (128 256 512 1024)"
    )
    parser.add_argument("--pieces", type=int, default=None, help="to calibrate on (16)")
    parser.add_argument("--repeats", type=int, default=None, help="in turn, for medians (3)")
    options = parser.parse_args()
    if "dali" not in options.presets:
        raise UsageError("Ratios are dali's over others: --presets must have it.")
    names = ("new", "planning_batch", "lengths", "pieces", "repeats")
    usual = [4, 1, [128, 256], 4, 1] if options.quick else [12, 8, [128, 256, 512, 1024], 16, 3]
    for name, value in zip(names, usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    run_script(main)
