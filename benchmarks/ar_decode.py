"""Autoregressive decoding at batch 1: lowtide, transformers and llama.cpp on the same weights.

In memory all answer the same prompts in one process, in turn, so that they share what the machine
is doing at the time; lowtide once more without its own kernels (`reference`). With half and a
quarter of the experts in memory lowtide and transformers, with accelerate's disk offload, have a
process of their own each. lowtide reads past the page cache; transformers has two lanes, its pages
dropped before every pass and kept. llama.cpp, which maps its weights, is compared in
`larger_than_memory.py`: a model as small as this one stays in memory under every limit that the
process itself fits in.

The same file in llama.cpp's own types (`--types`), stored by llama.cpp, whose rows are always of 8
bits: lowtide with exact rows and with rows of 8 bits; and beside it lowtide's own format of as many
bits with rows of 8.

Answers are not compared here: in bfloat16 every engine rounds elsewhere, and the random weights of
`synth` make other tokens of that. `tests/test_llm_oracle.py` compares logits in float32. On a busy
machine ratios mean little: peers divide each product and wait for the slowest core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.arguments import add_model, make_parser, run_script
from common.causal import (
    Answer,
    Lane,
    make_prompt,
    open_llama_cpp,
    open_lowtide,
    open_transformers,
    speeds,
    with_ratios,
)
from common.ceilings import Disk, memory_ceiling
from common.gguf_file import quantise_gguf, write_gguf
from common.memory import LIMITS, MemoryLimit, choose_limit
from common.models import model_folder
from common.record import Recorder, say
from common.worker import LIMIT_SLACK_BYTES, in_process

from lowtide.errors import UsageError
from lowtide.llm import plan_model
from lowtide.plan import MemoryPlan

Opener = Callable[[], AbstractContextManager[Lane]]

LANES = ("lowtide", "reference", "transformers", "llama.cpp")

_OWN = {"Q8_0": "q8", "Q4_0": "q4"}


def main() -> None:
    options = _options()
    folder = model_folder(options.model, "small", "qwen3_moe")
    limit = choose_limit(options.limit)
    settings = {
        "model": folder.name,
        "num_prompt": options.prompt,
        "num_new": options.new,
        "repeats": options.repeats,
        "policy": options.policy,
        "limit": limit.kind,
        "limit_reason": limit.reason,
    }
    recorder = Recorder("ar_decode", settings, options.out)
    gguf = _gguf(folder, options.lanes, recorder)
    lanes = [lane for lane in options.lanes if lane != "llama.cpp" or gguf is not None]
    plan = plan_model(folder, context=_context(options))
    disk = Disk(folder, plan.host.slot_bytes, 1 << 28)
    recorder.write("ceiling", {**memory_ceiling(), **disk.measure()})
    if not options.only_offload:
        _in_memory(recorder, folder, gguf, lanes, options)
        for kind in options.types if gguf is not None else ():
            _packed(recorder, folder, quantise_gguf(gguf, kind), kind, options)
    on_disk = [lane for lane in lanes if lane in ("lowtide", "transformers")]
    for share in options.shares:
        _on_disk(recorder, folder, on_disk, options, limit, share, plan)


def _in_memory(
    recorder: Recorder,
    folder: Path,
    gguf: Path | None,
    lanes: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """All lanes, in this process."""
    openers = {name: partial(_open, name, folder, gguf, _context(options)) for name in lanes}
    _record(recorder, "in memory", _race(openers, folder, options))


def _packed(
    recorder: Recorder, folder: Path, gguf: Path, kind: str, options: argparse.Namespace
) -> None:
    """One file in a type of llama.cpp's, all in memory."""
    context = _context(options)
    openers: dict[str, Opener] = {
        "lowtide": partial(open_lowtide, gguf, context, None, "resident", activations="own"),
        "llama.cpp": partial(open_llama_cpp, gguf, context, maps=False),
        "lowtide, int8": partial(open_lowtide, gguf, context, None, "resident", activations="int8"),
    }
    if kind in _OWN:
        name = f"lowtide, {_OWN[kind]} and int8"
        openers[name] = partial(
            open_lowtide,
            folder,
            context,
            None,
            "resident",
            format=_OWN[kind],
            activations="int8",
        )
    rows = _race(openers, folder, options)
    _record(
        recorder,
        kind,
        {name: {**row, "file_bytes": gguf.stat().st_size} for name, row in rows.items()},
    )


def _race(
    openers: Mapping[str, Opener], folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """A whole answer of each lane in turn, after a warm-up of each."""
    prompts = [make_prompt(folder, options.prompt, seed) for seed in range(options.repeats)]
    with ExitStack() as stack:
        opened = {name: stack.enter_context(opener()) for name, opener in openers.items()}
        answers: dict[str, list[Answer]] = {name: [] for name in opened}
        for lane in opened.values():
            lane.answer(prompts[0], 2)
        for prompt in prompts:
            for name, lane in opened.items():
                answers[name].append(lane.answer(prompt, options.new))
        return {
            name: {**speeds(options.prompt, answers[name]), **lane.facts}
            for name, lane in opened.items()
        }


def _on_disk(
    recorder: Recorder,
    folder: Path,
    lanes: Sequence[str],
    options: argparse.Namespace,
    limit: MemoryLimit,
    share: float,
    plan: MemoryPlan,
) -> None:
    """Each lane in a process of its own, under the budget that holds `share` of the experts."""
    away_bytes = int((1 - share) * plan.num_experts * plan.host.slot_bytes)
    budget_bytes = plan.full_bytes - away_bytes
    rows = {}
    named = {"lowtide": ("lowtide", False), "transformers": ("transformers", True)}
    named["transformers with its page cache"] = ("transformers", False)
    for name, (lane, drops_pages) in named.items():
        if lane not in lanes:
            continue
        task = {
            "lane": lane,
            "model": str(folder),
            "policy": options.policy,
            "context": _context(options),
            "budget_bytes": budget_bytes,
            "num_prompt": options.prompt,
            "num_new": options.new if lane == "lowtide" else options.peer_new,
            "repeats": 1 + options.repeats,  # the first one cold
            "drops_pages": drops_pages,
        }
        rows[name] = in_process("causal", task, limit, budget_bytes + LIMIT_SLACK_BYTES)
    _record(recorder, f"{share:.0%} of the experts in memory", rows)


def _record(recorder: Recorder, what: str, rows: Mapping[str, dict[str, Any]]) -> None:
    for row in with_ratios(rows, "lowtide"):
        recorder.write(what, row)


def _gguf(folder: Path, lanes: Sequence[str], recorder: Recorder) -> Path | None:
    """llama.cpp's file; None without the packages that write and read one."""
    if "llama.cpp" not in lanes:
        return None
    missing = [package for package in ("llama_cpp", "gguf") if find_spec(package) is None]
    if missing:
        say(f"llama.cpp is left out: {', '.join(missing)} not installed.")
        recorder.write("llama.cpp", {"not_installed": missing})
        return None
    return write_gguf(folder, folder.parent / f"{folder.name}-gguf" / "model.gguf")


def _open(name: str, folder: Path, gguf: Path | None, context: int) -> AbstractContextManager[Lane]:
    if name in ("lowtide", "reference"):
        kernels = "auto" if name == "lowtide" else name
        return open_lowtide(folder, context, None, "resident", kernels=kernels)
    if name == "transformers":
        return open_transformers(folder, None)
    if gguf is None:
        raise UsageError(f"There is no lane {name!r}.")
    return open_llama_cpp(gguf, context, maps=False)


def _context(options: argparse.Namespace) -> int:
    return int(options.prompt + options.new)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "small", "qwen3_moe")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--peer-new", type=int, default=4, help="new tokens of offloading peers")
    parser.add_argument("--repeats", type=int, default=3, help="answers, for medians")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.5, 0.25], help="of the experts in memory"
    )
    parser.add_argument(
        "--types", nargs="*", default=["Q8_0", "Q4_0", "Q4_K_M"], help="of llama.cpp's own"
    )
    parser.add_argument("--only-offload", action="store_true", help="leave out the race in memory")
    parser.add_argument("--policy", default="auto", help="under a budget")
    parser.add_argument("--limit", choices=LIMITS, default="auto", help="how memory is limited")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
