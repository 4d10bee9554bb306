"""Kept keys and expert slots in one memory: who gives way by measured seconds, and by the plan.

The same requests of two engines, one after the other. In `many` conversations take turns that are
three times as many as the plan has room for: seconds of all second turns. In `unused` nothing goes
on from a conversation that fills the plan's room, while a short prompt is answered at length:
seconds a token, of its last half.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.arguments import add_model, add_parts, make_parser, run_script
from common.models import model_folder
from common.record import Recorder, say
from common.turns import NEW_TOKENS, text_ids, turn_params

from lowtide import LLM, SamplingParams
from lowtide.decode.request import Committed
from lowtide.engine.running.engine import Engine
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model

NUM_CONVERSATIONS = 6
RULES = ("plan", "seconds")


def main() -> None:
    options = _options()
    folder = model_folder(options.model, options.size, options.family)
    for part in options.parts:
        _measure(part, folder, options)


def _measure(part: str, folder: Path, options: argparse.Namespace) -> None:
    run: Callable[[LLM, int, int], float] = _many if part == "many" else _unused
    # A third of the conversations; or one, and what is answered beside it.
    context = (2 if part == "many" else 1) * (options.behind + 4 * NEW_TOKENS)
    chosen: dict[str, Any] = {"context": context, "elastic": True, "progress": False}
    budget = budget_of_share(plan_model(folder, **chosen), options.share)
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    stats: dict[str, dict[str, float]] = {}
    for repeat in range(options.repeats):
        for rule in RULES if repeat % 2 else RULES[::-1]:
            with LLM(folder, host_memory=budget, **chosen) as llm:
                if rule == "plan":
                    llm._loop.run(_without_seconds)
                seconds[rule].append(run(llm, options.behind, options.tokens))
                stats[rule] = dict(llm.stats())
    names = ("num_kept", "num_kept_given_up", "num_slots", "num_slots_given", "num_misses")
    ratios = [s / p for p, s in zip(seconds["plan"], seconds["seconds"], strict=True)]
    settings = {
        "model": folder.name,
        "share": options.share,
        "tokens_behind": options.behind,
        "budget_bytes": budget,
        "repeats": options.repeats,
    }
    values = {
        "plan_s": statistics.median(seconds["plan"]),
        "seconds_s": statistics.median(seconds["seconds"]),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{f"{rule} {name}": stats[rule][name] for rule in RULES for name in names},
    }
    Recorder("kept_room", settings, options.out).write(part, values)
    say(f"{part}: {values['ratio']:.3f} of the plan's rule, {values['seconds_s'] * 1e3:.1f} ms")


def _many(llm: LLM, num_behind: int, _: int) -> float:
    """Seconds of all conversations' second turns."""
    texts = [text_ids(llm, num_behind, number) for number in range(NUM_CONVERSATIONS)]
    for number, text in enumerate(texts):
        text += llm.generate([text], turn_params())[0].token_ids
        text += text_ids(llm, NEW_TOKENS, 100 + number)
    start_s = time.perf_counter()
    for text in texts:
        llm.generate([text], turn_params())
    return time.perf_counter() - start_s


def _unused(llm: LLM, num_behind: int, num_tokens: int) -> float:
    """Seconds a token of the last half of a long answer, beside a conversation that has ended."""
    llm.generate([text_ids(llm, num_behind, 0)], SamplingParams(max_tokens=1))
    times: list[float] = []

    def note(event: object) -> None:
        if isinstance(event, Committed):
            times.append(time.perf_counter())

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    llm.generate([text_ids(llm, NEW_TOKENS, 1)], params, note)
    half = times[len(times) // 2 :]
    return (half[-1] - half[0]) / (len(half) - 1)


def _without_seconds(engine: Engine) -> None:
    """The plan decides, as before anything was measured."""
    assert engine.elastic is not None and engine.elastic._shared.kept is not None
    engine.elastic._shared.kept.slot_use = None


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "small", "qwen3_moe")
    add_parts(parser, ("many", "unused"))
    parser.add_argument("--family", default="qwen3_moe", help="of the synthetic model")
    parser.add_argument("--size", default="small", help="of the synthetic model")
    parser.add_argument("--share", type=float, default=0.4, help="of the experts in memory")
    parser.add_argument("--behind", type=int, default=1000, help="tokens of a first turn")
    parser.add_argument("--tokens", type=int, default=600, help="of the long answer")
    parser.add_argument("--repeats", type=int, default=3, help="engines for each rule")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
