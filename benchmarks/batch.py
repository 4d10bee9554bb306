"""`lowtide batch` beside `generate` of the same questions, in turn, on one engine.

The ceiling is `generate`: what a line costs above it goes to reading its line, to the server's
checks and to writing its answer. Half of the runs have answers of so many tokens, the other half
the model's own, which are short. Passes, seconds and processor time of the process, whose compute
threads count with the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

from common.arguments import make_parser, run_script
from common.record import Recorder, say

from lowtide import AsyncLLM
from lowtide.serve.batch import answer_all, answering, default_at_once
from lowtide.serve.batch_files import AskedLines

WANTED_OVER_GENERATE = 0.9
WANTED_MS_A_LINE = 2.5
WANTED_PASSES = 1.1


class Spent(NamedTuple):
    """Cost of one run of all questions."""

    num_tokens: int
    num_passes: int
    seconds: float
    cpu_s: float


class Answered:
    """Sink of a batch that keeps nothing but the number of tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def write(self, custom_id: str, line: bytes, is_error: bool) -> None:
        if is_error:
            raise SystemExit(f"{custom_id} has an error: {line.decode()}")
        self.num_tokens += json.loads(line)["response"]["body"]["usage"]["completion_tokens"]


def main() -> None:
    asyncio.run(_measure(_options()))


async def _measure(options: argparse.Namespace) -> None:
    async with AsyncLLM(options.model, context=options.context, progress=False) as llm:
        at_once = default_at_once(llm)
        settings = {
            "model": options.model,
            "context": options.context,
            "num_lines": options.lines,
            "at_once": at_once,
            "repeats": options.repeats,
        }
        recorder = Recorder("batch", settings, options.out)
        prompts = [
            [{"role": "user", "content": f"{number % 90} + {number * 7 % 90}"}]
            for number in range(options.lines)
        ]
        long = {"max_tokens": options.new, "ignore_eos": True}
        for name, fields in (("the model's own", {}), (f"of {options.new} tokens", long)):
            fields = {"temperature": 0, **fields}
            values = await _beside(llm, prompts, fields, at_once, options.repeats)
            recorder.write("batch", {"answers": name, **values})


async def _beside(
    llm: AsyncLLM,
    prompts: Sequence[Any],
    fields: Mapping[str, Any],
    at_once: int,
    num_repeats: int,
) -> dict[str, Any]:
    async def generated() -> int:
        answers = await llm.generate(prompts, **fields)
        return sum(len(answer.token_ids) for answer in answers)

    async def batched() -> int:
        sink = Answered()
        lines = AskedLines(BytesIO(b"".join(map(_line, range(len(prompts)), prompts))))
        async with answering(llm, "model", at_once) as answerer:
            stop = asyncio.Event()
            await answer_all(answerer, lines, lines.lines, sink, at_once, stop, lambda *_: None)
        return sink.num_tokens

    def _line(number: int, messages: object) -> bytes:
        body = {"messages": messages, **fields}
        line = {"custom_id": f"n{number}", "url": "/v1/chat/completions", "body": body}
        return json.dumps(line).encode() + b"\n"

    await llm.generate(prompts[:16], **fields)  # what is made once
    turns = [(await _spent(llm, generated), await _spent(llm, batched)) for _ in range(num_repeats)]
    if any(ours.num_tokens != python.num_tokens for python, ours in turns):
        raise SystemExit("The batch has another number of tokens than generate.")
    over = [python.seconds / ours.seconds for python, ours in turns]
    above_ms = [1e3 * (ours.cpu_s - python.cpu_s) / len(prompts) for python, ours in turns]
    passes = [ours.num_passes / python.num_passes for python, ours in turns]
    say(
        f"{statistics.median(over):.2f} of generate's tokens/s, {statistics.median(above_ms):.2f} "
        f"ms a line above it, {statistics.median(passes):.2f} times its passes"
    )
    return {
        "num_tokens": turns[0][0].num_tokens,
        "generate_passes": turns[0][0].num_passes,
        **_each("generate_tokens_per_s", [one.num_tokens / one.seconds for one, _ in turns]),
        **_each("batch_tokens_per_s", [one.num_tokens / one.seconds for _, one in turns]),
        **_each("over_generate", over),
        **_each("cpu_ms_above", above_ms),
        **_each("passes_over_generate", passes),
        "wanted_over_generate": WANTED_OVER_GENERATE,
        "wanted_cpu_ms_above": WANTED_MS_A_LINE,
        "wanted_passes_over_generate": WANTED_PASSES,
    }


async def _spent(llm: AsyncLLM, work: Callable[[], Awaitable[int]]) -> Spent:
    before = (await llm.stats())["forwards"]
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    num_tokens = await work()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    num_passes = round((await llm.stats())["forwards"] - before)
    return Spent(num_tokens, num_passes, seconds, cpu_s)


def _each(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Their median, and all of them."""
    return {name: statistics.median(values), f"each_{name}": list(values)}


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo:autoregressive", help="folder, file or demo")
    parser.add_argument("--context", type=int, default=2048, help="tokens of all that run at once")
    parser.add_argument("--lines", type=int, default=1000, help="questions")
    parser.add_argument("--new", type=int, default=64, help="new tokens of the longer answers")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
