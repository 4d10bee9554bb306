"""Continuous batching: requests of mixed lengths at once against one after another.

Both run on one engine, in turn, so that they share what the machine is doing at the time. The
ceiling is the mean number of tokens that a pass of the batch yields: the ratio if a pass cost the
same whatever its size. Ids are compared request by request.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common.arguments import make_parser, run_script
from common.ceilings import memory_ceiling
from common.memory import peak_resident_bytes
from common.record import Recorder, say

from lowtide import LLM, SamplingParams
from lowtide.errors import UsageError


class Load(NamedTuple):
    """Requests: a prompt and parameters for each."""

    prompts: list[list[int]]
    params: list[SamplingParams]


class Answers(NamedTuple):
    """Answers and cost of one way of running a load."""

    token_ids: list[list[int]]
    seconds: float
    num_forwards: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    options = _options()
    with LLM(
        options.model, dtype=options.dtype, host_memory=options.host_memory, cache="off"
    ) as llm:
        if not llm.config.decoding.writes_in_order:
            raise UsageError(f"{options.model} is not autoregressive.")
        load = _make_load(llm, options.requests, options.prompt, options.new)
        settings = {
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "num_requests": options.requests,
            "max_prompt_tokens": options.prompt,
            "max_new_tokens": options.new,
            "context": llm.plan.context,
            "policy": llm.plan.policy,
            "budget_bytes": llm.plan.budget_bytes,
            "repeats": options.repeats,
        }
        recorder = Recorder("batching", settings, options.out)
        recorder.write("ceiling", memory_ceiling())
        _together(llm, _make_load(llm, 2, 8, 4))  # warm
        together, alone = [], []
        for repeat in range(options.repeats):
            together.append(_together(llm, load))
            alone.append(_one_by_one(llm, load))
            say(
                f"{repeat + 1}: {together[-1].tokens_per_s:.0f} tokens/s at once, "
                f"{alone[-1].tokens_per_s:.0f} one after another"
            )
        _record(recorder, together, alone)


def _together(llm: LLM, load: Load) -> Answers:
    start_s, before = time.perf_counter(), llm.stats()["forwards"]
    completions = llm.generate(load.prompts, load.params)
    seconds = time.perf_counter() - start_s
    token_ids = [completion.token_ids for completion in completions]
    return Answers(token_ids, seconds, llm.stats()["forwards"] - before)


def _one_by_one(llm: LLM, load: Load) -> Answers:
    each = [
        _together(llm, Load([prompt], [params]))
        for prompt, params in zip(load.prompts, load.params, strict=True)
    ]
    return Answers(
        [answer.token_ids[0] for answer in each],
        sum(answer.seconds for answer in each),
        sum(answer.num_forwards for answer in each),
    )


def _record(recorder: Recorder, together: Sequence[Answers], alone: Sequence[Answers]) -> None:
    each = [[run.tokens_per_s for run in runs] for runs in (together, alone)]
    medians = [statistics.median(speeds) for speeds in each]
    pairs = zip(together[0].token_ids, alone[0].token_ids, strict=True)
    values = {
        "together_tokens_per_s": medians[0],
        "one_by_one_tokens_per_s": medians[1],
        "each_together_tokens_per_s": each[0],
        "each_one_by_one_tokens_per_s": each[1],
        "ratio": medians[0] / medians[1],
        "ceiling_ratio": together[0].num_tokens / together[0].num_forwards,
        "num_tokens": together[0].num_tokens,
        "num_same_ids": sum(first == second for first, second in pairs),
        "together_forwards": together[0].num_forwards,
        "one_by_one_forwards": alone[0].num_forwards,
        "peak_resident_bytes": peak_resident_bytes(),
    }
    recorder.write("batching", values)


def _make_load(llm: LLM, num_requests: int, max_prompt: int, max_new: int) -> Load:
    """Random prompts and numbers of new tokens."""
    draw = np.random.default_rng(0)
    prompts, params = [], []
    for _ in range(num_requests):
        length = int(draw.integers(*_range(max_prompt), endpoint=True))
        num_new = int(draw.integers(*_range(max_new), endpoint=True))
        prompts.append(draw.integers(1, llm.config.vocab_size, length).tolist())
        params.append(SamplingParams(max_tokens=num_new, ignore_eos=True))
    return Load(prompts, params)


def _range(most: int) -> tuple[int, int]:
    return max(1, most // 4), most


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo:chat", help="folder, hub id or demo:chat")
    parser.add_argument("--dtype", default="float32", help="compute type")
    parser.add_argument("--host-memory", default="auto", help="memory budget")
    parser.add_argument("--requests", type=int, default=32, help="requests at once")
    parser.add_argument("--prompt", type=int, default=24, help="longest prompt")
    parser.add_argument("--new", type=int, default=64, help="most new tokens")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
