"""LLaDA-MoE with half of its experts in memory, where every step asks for all 64 of every layer.

No cache helps such a family: what is absent has to be read in each step, and nothing else has. Up
to 256 tokens a step is the reading: bytes are the absent half, at the disk's ceiling. Of longer
sequences a step is as long as the larger of reading and computing, which is what the same steps
take with all experts in memory. Published shapes, a few layers, each side a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from common.arguments import make_parser, run_script
from common.ceilings import Disk
from common.every_expert import NUM_WARM
from common.masked_shapes import masked_shapes
from common.memory import MemoryLimit
from common.record import Recorder, Row, say
from common.worker import in_process

from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model

MODEL = "LLaDA-MoE"
SHARE = 0.5
READING_TOKENS = 256
"""Up to so many a step is the reading."""

OF_CEILING, OFF_BYTES, OVER_LARGER = 0.9, 0.01, 1.1
NO_LIMIT = MemoryLimit("none", "lowtide's own budget is the limit")


def main() -> None:
    options = _options()
    [shape] = masked_shapes([MODEL])
    folder = shape.folder(options.layers)
    named = ("layers", "lengths", "steps", "policy", "repeats")
    recorder = Recorder("every expert", {n: getattr(options, n) for n in named}, options.out)
    context = max(options.lengths)
    plan = plan_model(folder, context=context)
    disk = Disk(folder, plan.host.slot_bytes, 2 << 30)
    task = {
        "model": str(folder),
        "context": context,
        "policy": options.policy,
        "lengths": options.lengths,
        "num_steps": options.steps,
    }
    budgets = {"half": budget_of_share(plan, SHARE), "whole": plan.full_bytes}
    for _ in range(options.repeats):
        before = disk.measure()
        sides = {
            name: in_process("every expert", {**task, "budget_bytes": budget_bytes}, NO_LIMIT, 0)
            for name, budget_bytes in budgets.items()
        }
        after = disk.measure()
        recorder.write("ceiling", after)
        read_GBps = statistics.mean(each["random_read_GBps"] for each in (before, after))
        for length in options.lengths:
            _record(recorder, length, sides, plan.host.slot_bytes, read_GBps)


def _record(
    recorder: Recorder, length: int, sides: dict[str, Any], slot_bytes: int, read_GBps: float
) -> None:
    half, whole = (sides[name]["steps"][str(length)] for name in ("half", "whole"))
    is_within = sides["half"]["peak_resident_bytes"] <= sides["half"]["allowed_bytes"]
    num_experts, num_residents = (sides["half"][n] for n in ("num_experts", "num_residents"))
    circumstances = {
        "num_tokens": length,
        "is_within_budget": is_within,
        "resident_share": num_residents / num_experts,
    }
    row = _row(half, whole, num_experts, num_residents, slot_bytes, read_GBps)
    recorder.write("half of the experts", {**circumstances, **row, **_judged(length, row)})
    say(
        f"{length} tokens: a step reads {row['over_absent']:.3f} of the absent half, at "
        f"{row['of_ceiling']:.2f} of the disk's ceiling, and takes {row['over_larger']:.2f} of the "
        f"larger of reading {row['ideal_read_s']:.2f} s and computing {row['computing_s']:.2f} s"
    )


def _row(
    half: Row, whole: Row, num_experts: int, num_residents: int, slot_bytes: int, read_GBps: float
) -> dict[str, float]:
    """Return the medians of steps, and their mean bytes over two totals of absent experts.

    The totals are all absent experts and the absent ones that the steps asked for (random weights
    may ask for a few less than all).
    """
    absent_bytes = (num_experts - num_residents) * slot_bytes
    asked_bytes = statistics.mean(half["num_absent"]) * slot_bytes
    step_s, computing_s = (statistics.median(side["seconds"]) for side in (half, whole))
    read_bytes = statistics.mean(half["read_bytes"])
    ideal_read_s = read_bytes / read_GBps / 1e9
    return {
        "step_s": step_s,
        "computing_s": computing_s,
        "ideal_read_s": ideal_read_s,
        "read_bytes": read_bytes,
        "over_absent": read_bytes / absent_bytes,
        "over_absent_asked": read_bytes / asked_bytes,
        "asked_of_all": statistics.mean(half["num_asked"]) / num_experts,
        "of_ceiling": ideal_read_s / step_s,
        "over_larger": step_s / max(ideal_read_s, computing_s),
    }


def _judged(length: int, row: dict[str, float]) -> dict[str, bool]:
    """Return the expectations of a length, each with its result."""
    judged = {"reads_the_absent": abs(row["over_absent_asked"] - 1) <= OFF_BYTES}
    if length <= READING_TOKENS:
        return {**judged, "is_at_the_ceiling": row["of_ceiling"] >= OF_CEILING}
    return {**judged, "is_the_larger": row["over_larger"] <= OVER_LARGER}


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 1024, 4096])
    parser.add_argument(
        "--steps", type=int, default=6, help=f"of each length, after {NUM_WARM} more"
    )
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--repeats", type=int, default=1, help="turns of both sides")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
