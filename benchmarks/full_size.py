"""A 16-billion-parameter model, 30 GiB of weights, on a small memory budget.

`synth llada2 --size full` has the published dimensions of LLaDA2.0-mini. Every policy has a
process of its own, and so has every kind of weights that more than one policy makes no sense for;
tokens per second, expert hits, bytes read and peak memory against the plan.
"""

from __future__ import annotations

import argparse

from common.arguments import add_model, make_parser, run_script
from common.ceilings import Disk, memory_ceiling
from common.memory import LIMITS, choose_limit
from common.models import model_folder, stored_as
from common.record import Recorder, say
from common.worker import measure_lowtide

from lowtide.config import parse_size
from lowtide.llm import plan_model
from lowtide.plan import OWN_FORMAT


def main() -> None:
    options = _options()
    folder = model_folder(options.model, "full")
    limit = choose_limit(options.limit)
    say(f"Memory limit: {limit.kind} ({limit.reason}).")
    settings = {
        "model": folder.name,
        "host_memory": options.host_memory,
        "num_prompt": options.prompt,
        "num_new": options.new,
        "repeats": options.repeats,
        "limit": limit.kind,
        "limit_reason": limit.reason,
    }
    recorder = Recorder("full size", settings, options.out)
    budget_bytes = parse_size(options.host_memory)
    plan = plan_model(folder, host_memory=budget_bytes, context=options.context)
    disk = Disk(folder, plan.host.slot_bytes, 4 << 30)
    recorder.write("ceiling", {**memory_ceiling(), **disk.measure()})
    lanes = [(policy, OWN_FORMAT) for policy in options.policies]
    for policy, weights in [*lanes, *(("auto", each) for each in options.weights)]:
        stored, activations = stored_as(folder, weights)
        task = {
            "model": str(stored),
            "activations": activations,
            "budget_bytes": budget_bytes,
            "context": options.context,
            "policy": policy,
            "policy_options": {},
            "num_prompt": options.prompt,
            "num_new": options.new,
            "repeats": options.repeats,
        }
        run = measure_lowtide(task, limit, disk)
        recorder.write("lowtide", {"policy": policy, "weights": weights, **run})


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "full")
    parser.add_argument("--host-memory", default="12GiB", help="the budget")
    parser.add_argument("--policies", nargs="+", default=["auto", "tide", "lru"])
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["q4", "q4+int8"],
        help="formats that the model is packed in, under `auto`",
    )
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3, help="answers, behind one block")
    parser.add_argument("--context", type=int, default=4096, help="tokens of KV cache")
    parser.add_argument("--limit", choices=LIMITS, default="auto", help="how memory is limited")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
