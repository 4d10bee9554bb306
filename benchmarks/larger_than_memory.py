"""A model 1.3 times as large as the machine's memory: lowtide and llama.cpp on the same weights.

Layers of Qwen3-30B-A3B, as many as make that size, with random weights. Three parts:

- bf16: lowtide (two policies) under a budget of host memory, llama.cpp over mapped weights with all
  of the machine's memory free;
- q4: everything in memory, lowtide packed as q4, exact and with activations in 8 bits, llama.cpp
  with Q4_0, whose products always round activations; bytes of weights per token stated for both;
- mapped: one Q4_0 file under a memory limit that it is 1.3 times as large as (`--limit balloon`
  makes one), read by lowtide and mapped by llama.cpp, which may not copy it into its own layout:
  with that it takes twice the file.

Every lane has a process of its own and starts cold: what it reads is dropped from the page cache
once, before it loads. Its first answer stands beside the later ones, which find what it kept in
memory or in the page cache. What memory there was is sampled during the answers; lines of a limit
that moved are marked `refused`.

Checkpoint and GGUF files are written tensor by tensor, each after a look at the disk; the bfloat16
GGUF is deleted before anything else is made of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from common.arguments import add_model, add_parts, make_parser, run_script
from common.causal import with_ratios
from common.ceilings import Disk, memory_ceiling
from common.cut_models import cut_model, weight_bytes
from common.gguf_file import write_gguf
from common.memory import LIMITS, MOST_MOVED, MemoryLimit, choose_limit, drop_pages, moved_share
from common.models import stored_as
from common.record import Recorder, say
from common.worker import LIMIT_SLACK_BYTES, in_process

from lowtide.config import parse_size
from lowtide.hardware.memory import total_memory_bytes
from lowtide.llm import plan_model

PARTS = ("bf16", "q4", "mapped")
TIMES_MEMORY = 1.3
POLICIES = ("lowtide", "lru")


def main() -> None:
    options = _options()
    folder = _checkpoint(options)
    settings = {
        "model": folder.name,
        "weight_bytes": weight_bytes(folder),
        "memory_bytes": total_memory_bytes(),
        "host_memory": options.host_memory,
        "num_prompt": options.prompt,
        "num_new": options.new,
        "repeats": options.repeats,
        "page_cache": "dropped once, before each lane loads",
    }
    bench = _Bench(options, folder, Recorder("larger_than_memory", settings, options.out))
    plan = plan_model(folder, context=options.prompt + options.new)
    disk = Disk(folder, plan.host.slot_bytes, 4 << 30)
    bench.recorder.write("ceiling", {**memory_ceiling(), **disk.measure()})
    for part in options.parts:
        {"bf16": _bf16, "q4": _q4, "mapped": _mapped}[part](bench)


class _Bench(NamedTuple):
    """Options, folder and recorder of all parts."""

    options: argparse.Namespace
    folder: Path
    recorder: Recorder

    def measure(
        self, lane: str, facts: Mapping[str, Any], limit: MemoryLimit, limit_bytes: int = 0
    ) -> dict[str, Any]:
        task = {
            "lane": lane,
            "model": str(self.folder),
            "context": self.options.prompt + self.options.new,
            "num_prompt": self.options.prompt,
            "num_new": self.options.new,
            "repeats": self.options.repeats,
            "budget_bytes": None,
            **facts,
        }
        row = in_process("causal", task, limit, limit_bytes)
        return row | judged(row, limit_bytes if limit.kind == "balloon" else None)

    def gguf(self, name: str, is_quantised: bool) -> Path | None:
        """llama.cpp's file; None without the package that writes one."""
        if find_spec("gguf") is None:
            return None
        target = self.folder.parent / f"{self.folder.name}-gguf-{name}" / "model.gguf"
        return write_gguf(self.folder, target, is_quantised)

    def record(self, what: str, rows: Mapping[str, dict[str, Any]], ours: str) -> None:
        for row in with_ratios(rows, ours):
            self.recorder.write(what, row)

    def has_llama_cpp(self, gguf: Path | None, what: str) -> bool:
        is_there = gguf is not None and find_spec("llama_cpp") is not None
        if not is_there:
            say("llama.cpp is left out: llama_cpp and gguf are not both installed.")
            self.recorder.write(what, {"lane": "llama.cpp", "not_installed": True})
        return is_there


def judged(row: Mapping[str, Any], limit_bytes: int | None) -> dict[str, Any]:
    """Judge if a lane had the same memory during all its answers; name the reason if not.

    limit_bytes: None where there is no limit but what was available when the lane started.
    """
    limit_bytes = limit_bytes or row["room_at_start_bytes"]
    moved = moved_share(limit_bytes, row["room_least_bytes"], row["room_most_bytes"])
    judgement: dict[str, Any] = {"limit_bytes": limit_bytes, "limit_moved_share": moved}
    if moved > MOST_MOVED:
        reason = f"the limit of {limit_bytes} bytes moved by {moved:.1%} during the answers"
        say(f"Refused: {reason}.")
        judgement["refused"] = reason
    return judgement


def _bf16(bench: _Bench) -> None:
    options, free = bench.options, choose_limit("none")
    budget_bytes = parse_size(options.host_memory)
    rows = {
        policy: bench.measure("lowtide", {"policy": policy, "budget_bytes": budget_bytes}, free)
        for policy in POLICIES
    }
    if find_spec("llama_cpp") is not None:
        gguf = bench.gguf("bf16", is_quantised=False)
        if bench.has_llama_cpp(gguf, "bf16"):
            facts = {"gguf": str(gguf), "maps": True}
            rows["llama.cpp"] = bench.measure("llama.cpp", facts, free)
        if gguf is not None:
            gguf.unlink()
    else:
        bench.has_llama_cpp(None, "bf16")
    bench.record("bf16", rows, POLICIES[0])


def _q4(bench: _Bench) -> None:
    free = choose_limit("none")
    rows = {}
    for name, weights in (("exact", "q4"), ("int8 activations", "q4+int8")):
        packed, activations = stored_as(bench.folder, weights)
        facts = {"policy": "resident", "weights": str(packed), "activations": activations}
        rows[name] = bench.measure("lowtide", facts, free)
        rows[name]["bytes_per_token"] = _bytes_per_token(packed, bench.folder)
    gguf = bench.gguf("q4_0", is_quantised=True)
    if bench.has_llama_cpp(gguf, "q4"):
        assert gguf is not None
        rows["llama.cpp"] = bench.measure("llama.cpp", {"gguf": str(gguf), "maps": False}, free)
        rows["llama.cpp"]["bytes_per_token"] = _bytes_per_token(gguf.parent, bench.folder)
    bench.record("q4", rows, "int8 activations")


def _mapped(bench: _Bench) -> None:
    gguf = bench.gguf("q4_0", is_quantised=True)
    if gguf is None:
        say("There is nothing to map: gguf is not installed.")
        return
    limit = choose_limit(bench.options.limit)
    limit_bytes = int(gguf.stat().st_size / TIMES_MEMORY)
    budget_bytes = limit_bytes if limit.kind == "none" else limit_bytes - LIMIT_SLACK_BYTES
    facts = {"policy": POLICIES[0], "weights": str(gguf), "budget_bytes": budget_bytes}
    drop_pages([gguf, bench.folder])  # also writes to the disk what is not there yet
    rows = {
        name: bench.measure("lowtide", {**facts, "activations": activations}, limit, limit_bytes)
        for name, activations in (("lowtide", "own"), ("int8 activations", "int8"))
    }
    if bench.has_llama_cpp(gguf, "mapped"):
        facts = {"gguf": str(gguf), "maps": True, "repacks": False}
        rows["llama.cpp"] = bench.measure("llama.cpp", facts, limit, limit_bytes)
    for row in rows.values():
        row |= {"limit": limit.kind, "limit_reason": limit.reason}
    bench.record("mapped", rows, "lowtide")


def _bytes_per_token(weights: Path, folder: Path) -> int:
    """About what a token reads: all but the embedding, of the experts those that it asks for."""
    config = json.loads((folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = 3 * layers * config["num_experts"] * hidden * config["moe_intermediate_size"]
    embedding = config["vocab_size"] * hidden
    asked = experts * config["num_experts_per_tok"] // config["num_experts"]
    all_weights = weight_bytes(folder) // 2  # bfloat16
    in_all = sum(path.stat().st_size for path in weights.iterdir() if path.suffix != ".json")
    return in_all * (all_weights - embedding - experts + asked) // all_weights


def _checkpoint(options: argparse.Namespace) -> Path:
    """`--model`, or one that is made once and kept; the disk is looked at first."""
    if options.model is not None:
        return Path(options.model)
    return cut_model("qwen3_moe", int(TIMES_MEMORY * total_memory_bytes()))


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "full", "qwen3_moe")
    add_parts(parser, PARTS)
    parser.add_argument("--host-memory", default="19GiB", help="lowtide's budget in bf16")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--new", type=int, default=24, help="new tokens")
    parser.add_argument("--repeats", type=int, default=8, help="answers, the first one cold")
    parser.add_argument("--limit", choices=LIMITS, default="auto", help="how memory is limited")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
