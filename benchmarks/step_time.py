"""Time of a denoising step: lowtide, the published forward ported, compiled, and transformers.

LLaDA-8B, Dream-7B and LLaDA-MoE, published shapes, bfloat16; two and four layers are measured and
continued to all of them, because the head is a third of a model of two layers and a twentieth of
the whole one. All sides are in one process over the same weights and take turns. The paper's own
ratios to the ported forward, 0.77 (LLaDA-MoE at r_p 0.9) and 0.96 (Dream at 0.1), are of whole
models; the rows of two layers beside them are labelled.

Then chunking by operator, one chunk against four, in turn; and the time of planning: the search at
each distinct step shape, and a search through all chunk counts, to see if it reaches any further.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from common.arguments import add_parts, make_parser, run_script
from common.ceilings import memory_ceiling
from common.growth import at_full_depth
from common.masked_shapes import MODELS, MaskedShape, masked_shapes, num_masked
from common.masked_sides import SIDES, WARM_UP_TOKENS, Side, canvas, open_sides, read_weights
from common.planned_model import HeadForm, PlannedStep, StepModel
from common.planning_time import compare_search, plan_request
from common.record import Recorder, Row, say
from torch import Tensor

from lowtide.engine.running.engine import Engine
from lowtide.families import read_config_in
from lowtide.memory.arena import Arena
from lowtide.memory.chunking import MAX_BUCKETS

PARTS = ("sides", "chunks", "planning")
LAYERS = (2, 4)
CAP_BYTES = 24_000_000_000
NUM_CHUNKS = 4
PLANNING_SHARE, PLANNING_S = 0.01, 0.2e-3
"""Of a step, and at least so long: what planning may take of each in the mean."""

PLAN_S = 5e-3
"""Ceiling of the time for a plan that was not known."""

UNDIVIDED = {"mlp": 1, "experts": 1, "attention": 1, "logits": 1}

Run = Callable[[], object]


def main() -> None:
    options = _options()
    settings = {
        "lengths": options.lengths,
        "prompt_shares": options.shares,
        "chunked_length": options.chunked,
        "repeats": options.repeats,
    }
    recorder = Recorder("step_time", settings, options.out)
    recorder.write("ceiling", memory_ceiling())
    for shape in masked_shapes(options.models):
        steps_s: dict[tuple[int, float], float] = {}
        if "sides" in options.parts:
            model = StepModel(shape.folder(max(LAYERS)))
            with torch.inference_mode(), model.loaded() as engine:
                steps_s = _time_sides(recorder, shape, model, engine, options)
        folder = shape.folder(min(LAYERS))
        if "chunks" in options.parts:
            _time_chunks(recorder, shape, folder, options)
        if "planning" in options.parts:
            _time_planning(recorder, shape, StepModel(folder), options, steps_s)


def _time_sides(
    recorder: Recorder,
    shape: MaskedShape,
    model: StepModel,
    engine: Engine,
    options: argparse.Namespace,
) -> dict[tuple[int, float], float]:
    """Time all lanes at every length, with two and four layers.

    Returns seconds of lowtide's whole steps, by tokens and prompt's share.
    """
    steps_s = {}
    config, weights = engine.model.config, read_weights(engine.facts.folder)
    sides = {
        num_layers: open_sides(config, weights, options.sides, num_layers)
        for num_layers in sorted(LAYERS, reverse=True)
    }
    for each in sides.values():
        for side in each.values():
            for length in WARM_UP_TOKENS:
                side.step(canvas(config, length, length // 2))
    for num_tokens in options.lengths:
        runs = _our_runs(shape, model, engine, num_tokens, options.shares)
        token_ids = canvas(config, num_tokens, num_tokens // 2)
        for num_layers in LAYERS:
            for name, side in sides[num_layers].items():
                runs[name, num_layers] = _their_run(side, token_ids)
        rounds = _in_turn(runs, options.repeats, num_warm=1)
        whole_s = _record_sides(recorder, shape, num_tokens, rounds)
        for share in options.shares:
            steps_s[num_tokens, share] = statistics.median(whole_s[_lane(share)])
    return steps_s


def _our_runs(
    shape: MaskedShape, model: StepModel, engine: Engine, num_tokens: int, shares: Sequence[float]
) -> dict[tuple[str, int], Run]:
    """By the plans under the cap; all in one arena, since only one runs at a time."""
    free_bytes = CAP_BYTES - shape.weight_bytes
    plans = {
        share: model.plan(num_tokens, num_masked(num_tokens, share), free_bytes) for share in shares
    }
    arena = Arena(max(plan.placement.arena_bytes for plan in plans.values()))
    return {
        (_lane(share), num_layers): PlannedStep(
            engine, plan, model.form, num_layers=num_layers, arena=arena
        ).run
        for num_layers in LAYERS
        for share, plan in plans.items()
    }


def _lane(share: float) -> str:
    return f"lowtide r_p {share}"


def _their_run(side: Side, token_ids: Tensor) -> Run:
    return lambda: side.step(token_ids)


def _record_sides(
    recorder: Recorder,
    shape: MaskedShape,
    num_tokens: int,
    rounds: Mapping[tuple[str, int], Sequence[float]],
) -> Mapping[str, Sequence[float]]:
    """Seconds of whole steps by lane, round by round."""
    lanes = list(dict.fromkeys(lane for lane, _ in rounds))
    fewest = {lane: rounds[lane, LAYERS[0]] for lane in lanes}
    whole = {
        lane: [
            at_full_depth(dict(zip(LAYERS, times, strict=True)), shape.num_layers)
            for times in zip(*(rounds[lane, layers] for layers in LAYERS), strict=True)
        ]
        for lane in lanes
    }
    for depth, seconds in (
        ("2 layers", fewest),
        ("all layers, extrapolated from 2 and 4", whole),
    ):
        for lane in (lane for lane in lanes if lane.startswith("lowtide")):
            named = {"step": lane} | {n: n for n in lanes if not n.startswith("lowtide")}
            medians = {f"{n}_s": statistics.median(seconds[of]) for n, of in named.items()}
            ratios = {
                f"over_{name}": medians["step_s"] / medians[f"{name}_s"]
                for name in named
                if name != "step"
            }
            values = {
                "model": shape.name,
                "num_tokens": num_tokens,
                "lane": lane,
                "depth": depth,
                **medians,
                **{f"each_{name}_s": list(seconds[of]) for name, of in named.items()},
                **ratios,
            }
            recorder.write("step time", values)
            said = ", ".join(f"{over:.2f} {name}" for name, over in ratios.items())
            say(f"{shape.name}, {num_tokens} tokens, {depth}, {lane}: {said}")
    return whole


def _time_chunks(
    recorder: Recorder, shape: MaskedShape, folder: Path, options: argparse.Namespace
) -> None:
    """One chunk against four, operator by operator, of a model of one layer; the head alone."""
    num_tokens = options.chunked
    masked = num_masked(num_tokens, 0.9)
    model = StepModel(folder, 1, HeadForm.MASKED)
    inner = "mlp" if read_config_in(folder).experts is None else "experts"
    with torch.inference_mode(), model.loaded() as engine:
        runs: dict[tuple[str, int], Run] = {}
        for operator in ("none", inner, "attention"):
            chunks = UNDIVIDED if operator == "none" else {**UNDIVIDED, operator: NUM_CHUNKS}
            plan = model.plan_of(num_tokens, masked, chunks)
            runs[operator, 1] = PlannedStep(engine, plan, model.form).run
        for num_chunks in (1, NUM_CHUNKS):
            plan = model.plan_of(num_tokens, masked, {**UNDIVIDED, "logits": num_chunks})
            step = PlannedStep(engine, plan, model.form)
            runs["logits", num_chunks] = step.head_alone()
        rounds = _in_turn(runs, options.repeats, num_warm=0)
    pairs = {name: ((name, 1), ("none", 1)) for name in (inner, "attention")}
    pairs["logits"] = (("logits", NUM_CHUNKS), ("logits", 1))
    each = {
        operator: [many / one for many, one in zip(rounds[of], rounds[whole], strict=True)]
        for operator, (of, whole) in pairs.items()
    }
    ratios = {operator: statistics.median(values) for operator, values in each.items()}
    for operator, ratio in ratios.items():
        values = {
            "model": shape.name,
            "num_tokens": num_tokens,
            "operator": operator,
            "num_chunks": NUM_CHUNKS,
            "over_one": ratio,
            "each_over_one": each[operator],
            "paper": {"logits": 1.005, "mlp": 1.02}.get(operator),
        }
        recorder.write("chunked", values)
    said = ", ".join(f"{operator} {ratio:.3f}" for operator, ratio in ratios.items())
    say(f"{shape.name}, {num_tokens} tokens, {NUM_CHUNKS} chunks over one: {said}")


def _time_planning(
    recorder: Recorder,
    shape: MaskedShape,
    model: StepModel,
    options: argparse.Namespace,
    steps_s: Mapping[tuple[int, float], float],
) -> None:
    """steps_s: of steps that were timed, beside which planning is judged; others count nothing."""
    free_bytes = CAP_BYTES - shape.weight_bytes
    for num_tokens in options.planned:
        for share in options.shares:
            masked = num_masked(num_tokens, share)
            turns = [
                plan_request(model, num_tokens, masked, free_bytes) for _ in range(options.repeats)
            ]
            each_s = [turn["per_step_s"] for turn in turns]
            values = {
                **turns[0],
                "most_s": statistics.median(turn["most_s"] for turn in turns),
                "per_step_s": statistics.median(each_s),
                "each_per_step_s": each_s,
            }
            where = {"model": shape.name, "num_tokens": num_tokens, "prompt_share": share}
            step_s = steps_s.get((num_tokens, share))
            recorder.write(
                "planning", {**where, "step_s": step_s, **values, **_judged(values, step_s)}
            )
            say(
                f"{shape.name}, {num_tokens} tokens, r_p {share}: {values['num_plans']} plans, at "
                f"most {1e3 * values['most_s']:.2f} ms each, {1e6 * values['per_step_s']:.0f} us "
                "of each step"
            )
    values = compare_search(model, 6000)
    recorder.write("search", {"model": shape.name, **values})
    say(
        f"{shape.name}: longest {values['longest']} tokens, by brute force "
        f"{values['brute_force_longest']}, search {1e3 * values['search_s']:.2f} ms, brute force "
        f"{1e3 * values['brute_force_s']:.0f} ms"
    )


def _judged(values: Row, step_s: float | None) -> dict[str, bool]:
    allowed_s = max(PLANNING_SHARE * (step_s or 0.0), PLANNING_S)
    return {
        "is_within_a_step": values["per_step_s"] <= allowed_s,
        "is_a_plan_short": values["most_s"] <= PLAN_S,
        "are_plans_few": values["num_plans"] <= MAX_BUCKETS,
    }


def _in_turn(
    runs: Mapping[tuple[str, int], Run], repeats: int, num_warm: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of each by round, all in turn, after `num_warm` rounds that do not count."""
    rounds = [{key: _seconds(run) for key, run in runs.items()} for _ in range(num_warm + repeats)][
        num_warm:
    ]
    return {key: [each[key] for each in rounds] for key in runs}


def _seconds(run: Run) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_parts(parser, PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.5, 0.9], help="r_p")
    parser.add_argument(
        "--planned",
        type=int,
        nargs="+",
        default=[1024, 4096, 16384, 32768],
        help="tokens of steps that are planned",
    )
    parser.add_argument(
        "--chunked", type=int, default=8192, help="tokens of one chunk against four"
    )
    parser.add_argument("--repeats", type=int, default=3, help="steps of each, in turn")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
