"""Qwen3.6-35B-A3B's shape with random weights: lowtide and llama.cpp on the same GGUF file.

- memory: twelve layers (nine delta-nets, three of attention) and the same share of the vocabulary,
  wholly in memory: answers behind short prompts, and prompts of 2,048 tokens. llama.cpp as it does
  unasked (weights copied into a layout of its own) and with mapped weights.
- disk: all forty layers under limits of memory, each with a skew of the routers that gives an LRU
  cache of that size the hit rate of trained routers; llama.cpp maps the file. What computing takes
  by itself is measured on the memory part's file.
- turns: turns 2 to 8 behind 16,000 tokens, on the memory part's file: the time to an answer's first
  token over that of the same rows behind a copy of the conversation, in the same engine. The floor
  is 1, and 1.10 is wanted.

Every lane has a process of its own, and they take turns; the rate at which memory is read is
measured before and after each. Bytes of a token are weights once, states read and written.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import qwen36_file as shape
from common.arguments import add_parts, make_parser, run_script
from common.beside_llama import (
    OURS,
    causal_task,
    installed,
    rates,
    rows_in_memory,
    weight_bytes_of_token,
)
from common.causal import with_ratios
from common.ceilings import Disk, memory_ceiling
from common.memory import LIMITS, choose_limit, drop_pages
from common.models import cache_folder
from common.qwen36_file import Sizes, write_qwen36
from common.record import Recorder, say
from common.turns import LAST_TURN, NEW_TOKENS, as_ratios, timed_turns
from common.worker import LIMIT_SLACK_BYTES, in_process

from lowtide import LLM
from lowtide.errors import UsageError
from lowtide.model_folder.gguf_header import GgufHeader

PARTS = ("memory", "disk", "turns")
MEMORY = Sizes(num_layers=12, num_words=74_496)
LIMITS_GIB = {16: 0.17, 8: 0.3}
"""Limits of the disk part, and the skew of its routers."""

SHORT, LONG = 64, 2048  # tokens of a prompt
SHARE_OF_EXPERTS = shape.NUM_CHOSEN / shape.NUM_EXPERTS


def main() -> None:
    if find_spec("gguf") is None:
        raise UsageError("The file is written with the package gguf: pip install gguf.")
    options = _options()
    settings = {"num_new": options.new, "repeats": options.repeats, "limit": options.limit}
    recorder = Recorder("qwen36", settings, options.out)
    if "memory" in options.parts:
        _in_memory(recorder, options)
    if "disk" in options.parts:
        for limit_GiB in options.limits:
            _on_disk(recorder, limit_GiB, options)
    if "turns" in options.parts:
        _turns(recorder, _file("memory", MEMORY), options.behind)


def _in_memory(recorder: Recorder, options: argparse.Namespace) -> None:
    file = _file("memory", MEMORY)
    for num_prompt in (SHORT, LONG):
        for row in rows_in_memory(file, num_prompt, token_bytes(file), _settings(options)):
            recorder.write(f"in memory, prompt of {num_prompt}", row)


def _on_disk(recorder: Recorder, limit_GiB: int, options: argparse.Namespace) -> None:
    limit, limit_bytes = choose_limit(options.limit), limit_GiB << 30
    file = _file("disk", Sizes(skew=LIMITS_GIB[limit_GiB]))
    experts = [each for name, each in GgufHeader.read(file).tensors.items() if "_exps." in name]
    slot_bytes = sum(each.num_bytes for each in experts) // (40 * shape.NUM_EXPERTS)
    budget_bytes = limit_bytes - LIMIT_SLACK_BYTES
    own = {"lane": "lowtide", "policy": options.policy, "budget_bytes": budget_bytes}
    lanes: dict[str, dict[str, Any]] = {
        OURS: {"activations": "int8", **own},
        "lowtide, exact rows": {"activations": "own", **own},
        "llama.cpp": {"lane": "llama.cpp", "gguf": str(file), "maps": True, "repacks": False},
    }
    rows = {}
    for name, facts in installed(lanes).items():
        drop_pages([file])
        disk, before = Disk(file, slot_bytes, 1 << 30).measure(), memory_ceiling()
        task = causal_task(file, SHORT, _settings(options), facts)
        row = in_process("causal", task, limit, limit_bytes)
        row |= rates(row, token_bytes(file), before, memory_ceiling())
        rows[name] = row | disk | {"slot_bytes": slot_bytes, "limit": limit.kind}
    for row in with_ratios(rows, OURS):
        recorder.write(f"in {limit_GiB} GiB", row)


def _turns(recorder: Recorder, model: Path, num_behind: int) -> None:
    context = 2 * (num_behind + 2 * LAST_TURN * (NEW_TOKENS + 64))  # and a copy
    before = memory_ceiling()
    with LLM(model, context=context, progress=False) as llm:
        values = as_ratios(timed_turns(llm, num_behind))
    ceilings = {"before": before, "after": memory_ceiling()}
    recorder.write(f"turns behind {num_behind} tokens", values | {"ceilings": ceilings})
    say(f"{num_behind} tokens behind: {values['ratio']:.3f} of the bare pass")


def token_bytes(file: Path) -> int:
    """Bytes that a token goes through: weights once, states read and written."""
    names = GgufHeader.read(file).tensors
    num_states = sum(name.endswith("ssm_out.weight") for name in names)
    state_bytes = 2 * 4 * shape.VALUE_HEADS * shape.STATE * shape.STATE
    return weight_bytes_of_token(file, SHARE_OF_EXPERTS) + num_states * state_bytes


def _settings(options: argparse.Namespace) -> dict[str, int]:
    return {"num_new": options.new, "repeats": options.repeats}


def _file(name: str, sizes: Sizes) -> Path:
    target = cache_folder() / f"qwen36-{name}" / f"skew-{sizes.skew:g}.gguf"
    if not target.exists():
        for other in target.parent.glob("*.gguf"):  # the disk has not room for two
            other.unlink()
        say(f"Writing {target} ...")
    return write_qwen36(target, sizes)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_parts(parser, PARTS)
    parser.add_argument("--limits", nargs="+", type=int, choices=LIMITS_GIB, default=[16, 8])
    parser.add_argument("--policy", default="lowtide")
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=6, help="answers, the first one cold")
    parser.add_argument("--behind", type=int, default=16_000, help="tokens of the first turn")
    parser.add_argument("--limit", choices=LIMITS, default="balloon", help="of the disk part")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
