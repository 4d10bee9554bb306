"""Experts on disk: lowtide at falling memory budgets, against accelerate's disk offload.

Every run has a process of its own. Reads are compared with what lowtide's reader reaches with
nothing else to do, measured just before and after. lowtide reads past the page cache. The peer has
two rows: its pages dropped before each of its passes, so that it has no memory outside its budget
either, and kept, so that files which fit into the rest of the machine's memory stay there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.arguments import add_model, make_parser, run_script
from common.ceilings import Disk, memory_ceiling
from common.memory import LIMITS, MemoryLimit, choose_limit
from common.models import model_folder, stored_as
from common.record import Recorder, say
from common.worker import LIMIT_SLACK_BYTES, in_process, measure_lowtide

from lowtide.llm import plan_model
from lowtide.plan import OWN_FORMAT, MemoryPlan

LEAST = 0.0
"""Stands for the least budget that runs, among shares of the experts."""


def main() -> None:
    options = _options()
    folder = model_folder(options.model, "small")
    limit = choose_limit(options.limit)
    say(f"Memory limit: {limit.kind} ({limit.reason}).")
    settings = {
        "model": folder.name,
        "num_prompt": options.prompt,
        "num_new": options.new,
        "repeats": options.repeats,
        "policy": options.policy,
        "policy_options": dict(option.split("=", 1) for option in options.policy_option),
        "limit": limit.kind,
        "limit_reason": limit.reason,
    }
    recorder = Recorder("offload", settings, options.out)
    context = options.prompt + options.new + 32
    plan = plan_model(folder, context=context)
    disk = Disk(folder, plan.host.slot_bytes, 1 << 30)
    recorder.write("ceiling", {**memory_ceiling(), **disk.measure()})
    runs: dict[int, dict[str, Any]] = {}
    for weights, share, budget_bytes in _lanes(plan, options):
        stored, activations = stored_as(folder, weights)
        task = {
            **settings,
            "model": str(stored),
            "activations": activations,
            "context": context,
            "budget_bytes": budget_bytes,
        }
        run = measure_lowtide(task, limit, disk)
        recorder.write("lowtide", {"experts_in_memory": _name(share), "weights": weights, **run})
        if weights == OWN_FORMAT:
            runs[budget_bytes] = run
    if options.peer_shares:
        _peer_rows(recorder, folder, plan, limit, options, runs)


def _lanes(plan: MemoryPlan, options: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    """Weights and a budget, by the share of the model's own experts that it holds."""
    for share, budget_bytes in _budgets(plan, options.shares):
        yield OWN_FORMAT, share, budget_bytes
    for weights in options.weights:
        for share, budget_bytes in _budgets(plan, options.weights_shares):
            yield weights, share, budget_bytes


def _budgets(plan: MemoryPlan, shares: list[float]) -> Iterator[tuple[float, int]]:
    """Each share of the experts with the budget whose slots hold it; `LEAST` with the least."""
    experts_bytes = plan.num_experts * plan.host.slot_bytes
    for share in shares:
        away_bytes = int((1 - share) * experts_bytes)
        is_least = share == LEAST
        yield share, plan.minimum_bytes if is_least else plan.full_bytes - away_bytes


def _peer_rows(
    recorder: Recorder,
    folder: Path,
    plan: MemoryPlan,
    limit: MemoryLimit,
    options: argparse.Namespace,
    runs: dict[int, dict[str, Any]],
) -> None:
    """The peer at lowtide's budgets. Its tokens per second are converted, not waited for.

    Its first pass is measured: the shortest one, since it recomputes everything. How many tokens a
    pass commits is the decoder's and the model's affair, so lowtide's figure holds.
    """
    from common.peer import convert  # imports transformers

    peer_model = folder.parent / f"{folder.name}-glm4-moe"
    if not peer_model.exists():
        say(f"Writing {peer_model} ...")
    convert(folder, peer_model)
    for share, budget_bytes in _budgets(plan, options.peer_shares):
        for drops_pages in (True, False):
            task = {
                "model": str(folder),
                "peer_model": str(peer_model),
                "max_memory_bytes": budget_bytes,
                "num_prompt": options.prompt,
                "num_new": options.new,
                "repeats": options.repeats,
                "drops_pages": drops_pages,
            }
            run = in_process("peer", task, limit, budget_bytes + LIMIT_SLACK_BYTES)
            row = {"experts_in_memory": _name(share), **run}
            row |= _converted(run, runs.get(budget_bytes))
            recorder.write("transformers with accelerate's disk offload", row)


def _converted(run: dict[str, Any], ours: dict[str, Any] | None) -> dict[str, Any]:
    """Tokens per second of the peer's passes, where lowtide ran at the same budget."""
    if ours is None:
        return {}
    per_forward = ours["num_tokens"] / ours["num_forwards"]
    speeds = [per_forward / seconds for seconds in run["each_s_per_forward"]]
    tokens_per_s = statistics.median(speeds)
    return {
        "tokens_per_s": tokens_per_s,
        "each_tokens_per_s": speeds,
        "how": "first pass of the same decoder without a cache, times lowtide's tokens per pass",
        "ratio": ours["tokens_per_s"] / tokens_per_s,
    }


def _name(share: float) -> float | str:
    return "least" if share == LEAST else share


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "small")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--new", type=int, default=96, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3, help="answers, and passes of the peer")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[1.0, 0.75, 0.5, 0.25, LEAST],
        help="shares of the experts that fit into memory; 0: the least budget that runs",
    )
    parser.add_argument(
        "--weights",
        nargs="*",
        default=["q4", "q4+int8"],
        help="formats that the model is packed in too",
    )
    parser.add_argument(
        "--weights-shares",
        type=float,
        nargs="+",
        default=[0.25],
        help="their budgets, by the share of the model's own experts that these hold",
    )
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--policy-option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--peer-shares", type=float, nargs="*", default=[0.5], help="of the peer")
    parser.add_argument("--limit", choices=LIMITS, default="auto", help="how memory is limited")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
