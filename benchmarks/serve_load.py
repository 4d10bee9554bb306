"""`lowtide serve` under load: clients that ask again as soon as they are answered.

The server is a process of its own, its clients are coroutines of this one, over the loopback. Three
parts:

- memory: `synth qwen3_moe --size small`, all of it in memory, and the default queue. One client's
  answers stand beside those of Python's API, in turn with them, and llama.cpp's server beside all,
  on the same weights, if it is installed;
- turns: the time to the first token of a conversation's turns 2 to 8 through the server, beside
  Python's and the pass that each takes, run bare (`conversation.py`), in turn;
- disk: six layers of Qwen3-30B-A3B's dimensions with a quarter of the experts in memory. Tokens per
  second stand beside those for which the bytes that were read take the disk at its ceiling, or all
  in memory the same load takes the processors, whichever is longer, and beside one client's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.arguments import add_model, add_parts, make_parser, run_script
from common.ceilings import Disk, memory_ceiling
from common.cut_models import model_of_layers
from common.gguf_file import write_gguf
from common.models import model_folder
from common.record import Recorder, say
from common.served import Body, Client, Load, Look, Server, load_with, serving
from common.turns import LAST_TURN, NEW_TOKENS, Turn, bare_pass_s, next_turn, text_ids

from lowtide import LLM, SamplingParams
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model

PARTS = ("memory", "turns", "disk")
CLIENTS = (1, 4, 16, 64)
PEER_CLIENTS = (1, 4)  # llama.cpp's server answers one request after the other
DISK_CLIENTS = (1, 4, 8)
NUM_CONVERSATIONS = 3
NUM_DISK_LAYERS = 6
DISK_SHARE = 0.25  # of the experts in memory
DISK_WORDS = 4  # a prompt of many asks for every expert
WORD_TOKENS = 5  # of six letters, at most
CEILING_BYTES = 2 << 30
PEER_PACKAGES = ("llama_cpp", "gguf", "pydantic_settings", "sse_starlette", "starlette_context")

WANTED_OVER_PYTHON = 1.05
WANTED_OF_BOUND = 0.9
WANTED_OVER_ONE = {4: 1.4, 8: 1.8}


def main() -> None:
    options = _options()
    for part in options.parts:
        {"memory": _memory, "turns": _turns, "disk": _disk}[part](options)


def _memory(options: argparse.Namespace) -> None:
    folder = model_folder(options.model, "small", "qwen3_moe")
    context = max(CLIENTS) * (WORD_TOKENS * options.words + options.new)
    facts = {"words": options.words, "new_tokens": options.new, "seconds": options.seconds}
    recorder = _recorder("memory", folder, context, facts, options)
    recorder.write("ceiling", memory_ceiling())
    with serving(*server_command(folder, context)) as server:
        for num_clients in CLIENTS:
            warm(server)
            row, _ = loaded(server, num_clients, options.words, options)
            recorder.write("load", {"lane": "lowtide", **row})
        with LLM(folder, context=context, progress=False) as llm:
            recorder.write("python", beside_python(server, llm, options))
    missing = [name for name in PEER_PACKAGES if find_spec(name) is None]
    if missing:
        say(f"llama.cpp's server is left out: {', '.join(missing)} not installed.")
        recorder.write("load", {"lane": "llama.cpp", "not_installed": missing})
        return
    with serving(*_llama_cpp(folder, context)) as server:
        # By default it makes words less likely that came before, which costs time.
        own = {"repeat_penalty": 1.0}
        for num_clients in PEER_CLIENTS:
            warm(server, **own)
            row, _ = loaded(server, num_clients, options.words, options, **own)
            recorder.write("load", {"lane": "llama.cpp", **row})


def _turns(options: argparse.Namespace) -> None:
    folder = model_folder(options.model, "small", "qwen3_moe")
    longest = options.behind + 2 * LAST_TURN * (NEW_TOKENS + 64)
    context = (NUM_CONVERSATIONS + 1) * longest  # and a copy
    facts = {"behind": options.behind, "turn_tokens": NEW_TOKENS}
    recorder = _recorder("turns", folder, context, facts, options)
    with (
        serving(*server_command(folder, context)) as server,
        LLM(folder, context=context, progress=False) as llm,
        closing(Client(server.url)) as client,
    ):
        turns = [
            turn
            for seed in range(NUM_CONVERSATIONS)
            for turn in time_turns(client, llm, options.behind, seed)
        ]
    over_python = [turn.served_s / turn.python_s for turn in turns]
    over_bare = [turn.served_s / turn.bare_s for turn in turns]
    values = {
        **_each("served_s", [turn.served_s for turn in turns]),
        **_each("python_s", [turn.python_s for turn in turns]),
        **_each("bare_s", [turn.bare_s for turn in turns]),
        **_each("over_python", over_python),
        "wanted_over_python": WANTED_OVER_PYTHON,
        **_each("over_bare", over_bare),
        "num_same_ids": sum(turn.has_same_ids for turn in turns),
    }
    recorder.write("turns", values)
    say(
        f"A turn: {statistics.median(over_python):.3f} of Python's, "
        f"{statistics.median(over_bare):.3f} of the bare pass"
    )


def _disk(options: argparse.Namespace) -> None:
    folder = model_of_layers("qwen3_moe", NUM_DISK_LAYERS)
    context = max(DISK_CLIENTS) * (WORD_TOKENS * DISK_WORDS + options.new)
    plan = plan_model(folder, context=context)
    budget = budget_of_share(plan, DISK_SHARE)
    facts = {"prompt_words": DISK_WORDS, "new_tokens": options.new, "seconds": options.seconds}
    facts |= {"share": DISK_SHARE, "budget_bytes": budget}
    recorder = _recorder("disk", folder, context, facts, options)
    loads = {}
    with serving(*server_command(folder, context, plan.full_bytes)) as server:
        for num_clients in DISK_CLIENTS:
            warm(server)
            row, loads[num_clients] = loaded(server, num_clients, DISK_WORDS, options)
            recorder.write("load", {"lane": "all in memory", **row})
    disk, one = Disk(folder, plan.host.slot_bytes, CEILING_BYTES), 0.0
    with serving(*server_command(folder, context, budget)) as server:
        for num_clients in DISK_CLIENTS:
            row = from_disk(server, loads[num_clients], disk, options)
            one = one or row["tokens_per_s"]
            over = {"over_one": row["tokens_per_s"] / one}
            over["wanted_over_one"] = WANTED_OVER_ONE.get(num_clients)
            recorder.write("load", {"lane": "disk", **row, **over})


def loaded(
    server: Server,
    num_clients: int,
    num_words: int,
    options: argparse.Namespace,
    look: Look = float,
    **more: object,
) -> tuple[dict[str, Any], Load]:
    """Load a server with `num_clients` clients; more: fields of their requests."""

    def body_of(number: int) -> Body:
        return _body(draw_words(num_words, num_clients, number), options.new, **more)

    before = server.resident_bytes
    load = load_with(server.url, num_clients, options.seconds, body_of, look)
    resident = {"resident_before_bytes": before, "resident_after_bytes": server.resident_bytes}
    say(f"{num_clients} clients: {load.tokens_per_s:.1f} tokens/s")
    return {**load.as_dict(), **resident}, load


def from_disk(
    server: Server, in_memory: Load, disk: Disk, options: argparse.Namespace
) -> dict[str, Any]:
    """The same load where experts are read, beside what it would take at least."""
    ceilings = [disk.measure()]
    warm(server)
    num_clients = in_memory.num_clients
    row, load = loaded(
        server, num_clients, DISK_WORDS, options, lambda: server.stats()["read_bytes"]
    )
    ceilings.append(disk.measure())
    rate = statistics.mean(each["random_read_GBps"] for each in ceilings)
    read_s = [each.growth / rate / 1e9 for each in load.stretches]
    computing_s = [each.num_tokens / in_memory.tokens_per_s for each in load.stretches]
    of_bound = [
        max(bounds) / each.seconds
        for *bounds, each in zip(read_s, computing_s, load.stretches, strict=True)
    ]
    say(f"{statistics.median(of_bound):.2f} of the bound")
    return {
        **row,
        "read_bytes": sum(each.growth for each in load.stretches),
        "random_read_GBps": rate,
        "read_s": sum(read_s),
        "computing_s": sum(computing_s),
        **_each("of_bound", of_bound),
        "wanted_of_bound": WANTED_OF_BOUND,
    }


def beside_python(server: Server, llm: LLM, options: argparse.Namespace) -> Mapping[str, Any]:
    """One client's answers and the same ones of `LLM`, in turn, by their whole time."""
    params = SamplingParams(max_tokens=options.new, temperature=0, ignore_eos=True)
    times: list[tuple[float, float]] = []
    with closing(Client(server.url)) as client:

        def served(text: str) -> None:
            client.ask(_body(text, options.new))

        def python(text: str) -> None:
            llm.generate([text], params, raw=True)

        for lane in (served, python):
            lane("warm")
        end_s = time.monotonic() + options.seconds
        while time.monotonic() < end_s:
            text = draw_words(options.words, 0, len(times))
            lanes = (served, python) if len(times) % 2 else (python, served)
            spent_s = {lane: _seconds(partial(lane, text)) for lane in lanes}
            times.append((spent_s[served], spent_s[python]))
    ratios = [ours / pythons for ours, pythons in times]
    say(f"One client: {statistics.median(ratios):.3f} of Python's time")
    return {
        **_each("served_s", [ours for ours, _ in times]),
        **_each("python_s", [pythons for _, pythons in times]),
        **_each("over_python", ratios),
        "wanted_over_python": WANTED_OVER_PYTHON,
    }


class MeasuredTurn(NamedTuple):
    """Seconds to a turn's first token, and of the pass that it takes."""

    served_s: float
    python_s: float
    bare_s: float
    has_same_ids: bool


def time_turns(client: Client, llm: LLM, num_behind: int, seed: int) -> list[MeasuredTurn]:
    """Turns 2 to 8, asked for of both."""
    lanes = {"served": partial(_served_turn, client), "python": partial(next_turn, llm)}
    text = text_ids(llm, num_behind, LAST_TURN * seed)
    first = [lane(text) for lane in lanes.values()]
    text = [*text, *first[1].token_ids]
    measured = []
    for turn in range(2, LAST_TURN + 1):
        prompt = [*text, *text_ids(llm, NEW_TOKENS, LAST_TURN * seed + turn)]
        names = sorted(lanes, reverse=turn % 2 == 0)
        turns = {name: lanes[name](prompt) for name in names}
        served, python = turns["served"], turns["python"]
        if min(served.num_cached, python.num_cached) < num_behind - 64:
            raise SystemExit(f"Turn {turn} took over too few tokens of {num_behind}: {turns}")
        bare_s = bare_pass_s(llm, prompt, python.num_cached)
        has_same_ids = served.token_ids == python.token_ids
        measured.append(MeasuredTurn(served.first_s, python.first_s, bare_s, has_same_ids))
        text = [*prompt, *python.token_ids]
    return measured


def _served_turn(client: Client, prompt: Sequence[int]) -> Turn:
    reply = client.ask(_body(prompt, NEW_TOKENS, return_token_ids=True))
    return Turn(reply.times_s[0], list(reply.token_ids), reply.num_cached)


def warm(server: Server, **more: object) -> None:
    """A short answer. Once it is there, abandoned requests have ended."""
    with closing(Client(server.url)) as client:
        client.ask(_body("warm", 2, **more))


def _body(prompt: str | Sequence[int], num_new: int, **more: object) -> Body:
    return {
        "prompt": prompt,
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def draw_words(count: int, *seed: int) -> str:
    """Words of six letters, unlike those of another seed."""
    letters = np.random.default_rng(seed).integers(*map(ord, "a{"), (count, 6), dtype=np.uint8)
    return " ".join(word.tobytes().decode() for word in letters)


def server_command(model: Path, context: int, budget: int | None = None) -> Sequence[str]:
    """Return the command for `serving`; without a budget, lowtide takes its default."""
    memory = () if budget is None else ("--host-memory", str(budget))
    return ("lowtide", "serve", str(model), "--context", str(context), *memory)


def _llama_cpp(folder: Path, context: int) -> Sequence[str]:
    """llama.cpp's server on the same weights in bfloat16, with as many threads."""
    target = folder.parent / f"{folder.name}-gguf" / "with-words.gguf"
    gguf = write_gguf(folder, target, has_words=True)
    threads = str(torch.get_num_threads())
    given = {"model": gguf, "n_ctx": context, "n_threads": threads, "n_threads_batch": threads}
    given |= {"interrupt_requests": False, "logits_all": False, "verbose": False}
    pairs = [(f"--{name}", str(value)) for name, value in given.items()]
    return ("llama_cpp.server", *(text for pair in pairs for text in pair))


def _recorder(
    part: str, model: Path, context: int, facts: Mapping[str, Any], options: argparse.Namespace
) -> Recorder:
    settings = {"part": part, "model": model.name, "context": context, **facts}
    return Recorder("serve_load", settings, options.out)


def _each(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Their median, and all of them."""
    each = [float(f"{value:.5g}") for value in values]
    return {name: statistics.median(values), f"each_{name}": each}


def _seconds(work: partial[None]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "small", "qwen3_moe")
    add_parts(parser, PARTS)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each number of clients")
    parser.add_argument("--words", type=int, default=40, help="of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of an answer")
    parser.add_argument("--behind", type=int, default=1000, help="tokens of the first turn")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
