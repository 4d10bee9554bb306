"""A conversation's next turn beside the same rows at the same positions, their keys in place.

Turns 2 to 8 of one conversation are asked for one after the other; `first_s` is the time to an
answer's first token, or of a diffusion model to its first draft. Beside each, in the same engine
and in turn, the pass that it takes is run bare: its new rows over a copy of the conversation's
keys, and the logits of the rows that are read. The ratio's floor is 1, and 1.10 is wanted.

Then prompts that nothing is taken over of, in an engine that keeps and one that does not, in turn,
both loaded at once: what keeping costs a conversation that is not continued, of which at most 1% is
wanted. `keeping_cost_budget_bytes` is the budget of the two together.

With `--restarts` also the first turn of engines that find the conversation in files: over reading
as many bytes at the disk's ceiling and the turn after it, whose keys are in place. The floor is 1,
and 1.25 is wanted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.arguments import add_model, make_parser, run_script
from common.ceilings import read_ceiling
from common.models import model_folder
from common.record import Recorder, say
from common.turns import (
    LAST_TURN,
    NEW_TOKENS,
    answered,
    as_ratios,
    next_turn,
    text_ids,
    timed_turns,
)

from lowtide import LLM
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model

READ_BYTES = 1 << 20
"""As a kept sequence's chunks are read."""


def main() -> None:
    options = _options()
    folder = model_folder(options.model, options.size, options.family)
    context = 2 * (options.behind + 2 * LAST_TURN * (NEW_TOKENS + 64))  # and a copy
    chosen = {"context": context, "progress": False}
    plan = plan_model(folder, **chosen)
    budget = budget_of_share(plan, options.share)
    with LLM(folder, host_memory=budget, **chosen) as llm:
        values = as_ratios(timed_turns(llm, options.behind))
        settings = {
            "model": folder.name,
            "share": options.share,
            "tokens_behind": options.behind,
            "new_tokens": NEW_TOKENS,
            "budget_bytes": budget,
            "policy": llm.plan.policy,
            "repeats": options.repeats,
        }
    cost = _keeping_cost(folder, {**chosen, "host_memory": budget}, options)
    values |= {"keeping_cost": cost, "wanted_keeping_cost": 0.01}
    values["keeping_cost_budget_bytes"] = 2 * budget
    if options.restarts:
        chosen["host_memory"] = budget
        values |= _after_restarts(folder, chosen, options.behind, options.restarts)
    Recorder("conversation", settings, options.out).write("conversation", values)
    say(
        f"{options.behind} tokens behind: {values['ratio']:.3f} of the bare pass "
        f"({values['first_s'] * 1e3:.1f} ms), keeping costs {cost:.1%}"
    )


def _after_restarts(
    folder: Path, chosen: dict[str, Any], num_behind: int, count: int
) -> dict[str, object]:
    """The first turn of so many engines, over reading its bytes and the second one."""
    times = []
    with TemporaryDirectory(prefix="kept-", dir=folder.parent) as place:
        chosen = {**chosen, "cache_dir": place}
        with LLM(folder, **chosen) as llm:
            text = text_ids(llm, num_behind, 0)
            text += answered(llm, text)
        for restart in range(count):
            [file] = Path(place).iterdir()
            num_bytes = file.stat().st_size
            rate = read_ceiling([file], READ_BYTES, num_bytes)["sequential_read_GBps"]
            with LLM(folder, **chosen) as llm:
                text += text_ids(llm, NEW_TOKENS, 2 * restart)
                first_s, answer, num_cached = next_turn(llm, text)
                if num_cached < num_behind - 64:
                    raise SystemExit(f"A restart took over {num_cached} tokens of {num_behind}.")
                text += [*answer, *text_ids(llm, NEW_TOKENS, 2 * restart + 1)]
                warm_s, answer, _ = next_turn(llm, text)
                text += answer
            times.append((first_s, num_bytes / rate / 1e9, warm_s))
    ratios = [first_s / (read_s + warm_s) for first_s, read_s, warm_s in times]
    return {
        "restart_s": statistics.median(first_s for first_s, *_ in times),
        "restart_read_s": statistics.median(read_s for _, read_s, _ in times),
        "restart_ratio": statistics.median(ratios),
        "restart_ratios": [round(ratio, 3) for ratio in ratios],
        "wanted_restart_ratio": 1.25,
    }


def _keeping_cost(folder: Path, chosen: dict[str, Any], options: argparse.Namespace) -> float:
    """Measure how much longer answers to new prompts take with keeping, as a share of without.

    Both engines are loaded at once, with the chosen budget each.
    """
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    num_prompt = min(options.behind, 512)
    with LLM(folder, cache="on", **chosen) as keeps, LLM(folder, cache="off", **chosen) as forgets:
        engines = [("on", keeps), ("off", forgets)]
        for repeat in range(options.repeats + 1):
            for name, llm in engines if repeat % 2 else engines[::-1]:
                start_s = time.perf_counter()
                answered(llm, text_ids(llm, num_prompt, 100 + 2 * repeat + (name == "on")))
                if repeat:
                    seconds[name].append(time.perf_counter() - start_s)
    return statistics.median(seconds["on"]) / statistics.median(seconds["off"]) - 1


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "small", "qwen3_moe")
    parser.add_argument("--family", default="qwen3_moe", help="of the synthetic model")
    parser.add_argument("--size", default="small", help="of the synthetic model")
    parser.add_argument("--share", type=float, default=1.0, help="of the experts in memory")
    parser.add_argument("--behind", type=int, default=1000, help="tokens of the first turn")
    parser.add_argument("--repeats", type=int, default=9, help="new prompts of each kind")
    parser.add_argument("--restarts", type=int, default=0, help="engines that read what was kept")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
