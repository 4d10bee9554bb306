"""Pages that move against every constant division of the same budget, over one trace of requests.

Chats that allow for long answers and end early, many at once, and one sequence of the greatest
length; or documents, which all come at once and use all that they ask for, so that there is nothing
to lend. Moving: KV cache and expert slots share the budget. Constant: up to five contexts, first
what the longest request needs (its plan, whose division stays) and what all that ask at once need
(what foresight would choose), then all that the budget holds and those between; requests that find
no room wait. Each side has a process of its own and runs the whole trace, by turns; the ceiling is
the disk's. The ratio is of tokens/s over the best constant division.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from common.arguments import make_parser, run_script
from common.ceilings import Disk
from common.cut_models import cut_model, weight_bytes
from common.memory import LIMITS, MemoryLimit, choose_limit
from common.moving_trace import (
    Arrival,
    bidirectional_trace,
    documents_trace,
    mixed_trace,
    most_at_once,
)
from common.record import Recorder, Row, say
from common.worker import LIMIT_SLACK_BYTES, in_process

from lowtide.core import align_up
from lowtide.errors import PlanError
from lowtide.llm import plan_model
from lowtide.memory.kv_cache import GRANULE_TOKENS

LONGEST = {"llada2": 32768, "qwen3_moe": 32768, "llada_moe": 4096}
TRACES = ("chats", "documents")
BIDIRECTIONAL = "llada_moe"
NUM_CONSTANTS = 5
Runs = dict[str, list[dict[str, Any]]]


def main() -> None:
    options = _options()
    limit = choose_limit(options.limit)
    say(f"Memory limit: {limit.kind} ({limit.reason}).")
    for family, kind in product(options.families, options.traces):
        if family == BIDIRECTIONAL and kind == "documents":
            say(f"{family}: its chats ask for whole answers already; no documents.")
        else:
            _measure(family, kind, options, limit)


def _trace(family: str, kind: str, longest: int, num_new: int) -> list[Arrival]:
    if family == BIDIRECTIONAL:  # a step computes all of its rows, and there is one for each token
        return bidirectional_trace(longest, max(4, num_new // 16))
    make_trace = documents_trace if kind == "documents" else mixed_trace
    return make_trace(longest, num_new)


def _measure(family: str, kind: str, options: argparse.Namespace, limit: MemoryLimit) -> None:
    folder = cut_model(family, round(options.model_GB * 1e9))
    longest = min(options.longest or LONGEST[family], LONGEST[family])
    trace = _trace(family, kind, longest, options.new)
    budget_bytes = int(weight_bytes(folder) * options.share)
    settings = {
        "model": folder.name,
        "trace": kind,
        "budget_bytes": budget_bytes,
        "longest": longest,
        "num_requests": len(trace),
        "num_new": options.new,
        "constants": options.constants,
        "policy": options.policy,
        "limit": limit.kind,
    }
    recorder = Recorder("moving_memory", settings, options.out)
    contexts = _contexts(folder, budget_bytes, longest, most_at_once(trace))
    contexts = _spread(contexts, options.constants)
    plan = plan_model(folder, host_memory=budget_bytes, context=longest)
    disk = Disk(folder, plan.host.slot_bytes, 2 << 30)
    ceiling = disk.measure()
    recorder.write("ceiling", ceiling)
    common = {
        "model": str(folder),
        "budget_bytes": budget_bytes,
        "policy": options.policy,
        "trace": trace,
        "read_GBps": ceiling["random_read_GBps"],
    }
    # As many rows as a pass has there is workspace for: a bidirectional one's are all sequences'.
    at_once = max(longest, most_at_once(trace))
    moving_context = at_once if family == BIDIRECTIONAL else longest
    sides = {"moving": {**common, "context": moving_context, "moves": True}}
    for context in contexts:
        sides[f"constant, {context} tokens"] = {**common, "context": context, "moves": False}
    runs: Runs = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, side in sides.items():
            runs[name].append(_run(side, limit))
            recorder.write(name, {"context": side["context"], **runs[name][-1]})
    _conclude(recorder, runs)


def _run(side: dict[str, Any], limit: MemoryLimit) -> dict[str, Any]:
    return in_process("moving_memory", side, limit, side["budget_bytes"] + LIMIT_SLACK_BYTES)


def _conclude(recorder: Recorder, runs: Runs) -> Row:
    """Record the speed with pages that move over the constant divisions; medians over the turns."""
    verdict: dict[str, object] = {}
    constant = [name for name in runs if name != "moving"]
    for what in ("tokens_per_s", "ideal_tokens_per_s"):
        speed = {name: _median(runs[name], what) for name in runs}
        best = max(constant, key=speed.__getitem__)
        verdict |= {
            f"{what}_over_best": speed["moving"] / speed[best],
            f"{what}_over_today": speed["moving"] / speed[constant[0]],
            f"best_by_{what}": best,
        }
    every = [run for side in runs.values() for run in side]
    return recorder.write(
        "moving over constant",
        {
            **verdict,
            "max_running": {name: _median(side, "max_running") for name, side in runs.items()},
            "is_within_plan": all(run["is_within_plan"] for run in every),
        },
    )


def _median(runs: Sequence[dict[str, Any]], what: str) -> float:
    return statistics.median(run[what] for run in runs)


def _contexts(folder: Path, budget_bytes: int, longest: int, at_once: int) -> list[int]:
    """Return five constant caches that hold the longest request, smallest first.

    The sizes: one longest request, all requests at once (the choice of foresight), the largest that
    a plan within the budget has, and two between them.
    """
    most = _most_tokens(folder, budget_bytes, longest)
    at_once = min(max(at_once, longest), most)
    wanted = [longest, (longest + at_once) // 2, at_once, (at_once + most) // 2, most]
    return sorted({align_up(tokens - GRANULE_TOKENS + 1, GRANULE_TOKENS) for tokens in wanted})


def _spread(contexts: Sequence[int], number: int) -> list[int]:
    """Return `number` of the contexts, the least and the middle one (foresight's) among them."""
    if number >= len(contexts):
        return list(contexts)
    order = [0, len(contexts) // 2, len(contexts) - 1, 1, 3]
    return sorted(contexts[place] for place in order[:number])


def _most_tokens(folder: Path, budget_bytes: int, longest: int) -> int:
    low, high = longest, longest * 64
    while high - low > longest // 16:
        middle = (low + high) // 2
        can_plan = _can_plan(folder, budget_bytes, middle)
        low, high = (middle, high) if can_plan else (low, middle)
    return low


def _can_plan(folder: Path, budget_bytes: int, context: int) -> bool:
    try:
        plan_model(folder, host_memory=budget_bytes, context=context)
    except PlanError:
        return False
    return True


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=list(LONGEST), default=list(LONGEST))
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--constants", type=int, default=NUM_CONSTANTS, help="constant divisions")
    parser.add_argument("--model-GB", type=float, default=5.0, help="of a model's layers at most")
    parser.add_argument("--share", type=float, default=0.5, help="of it, the budget")
    parser.add_argument("--longest", type=int, help="tokens of the longest request (as published)")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--repeats", type=int, default=1, help="turns of all sides")
    parser.add_argument("--limit", choices=LIMITS, default="none", help="how memory is limited")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
