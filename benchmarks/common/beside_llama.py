"""lowtide and llama.cpp on one GGUF file, wholly in memory: a process each, one after the other.

llama.cpp runs as it does unasked (weights copied into a layout of its own) and with mapped weights.
The rate at which memory is read is measured before and after each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.causal import with_ratios
from common.ceilings import memory_ceiling
from common.memory import choose_limit
from common.record import say
from common.worker import in_process
from lowtide.model_folder.gguf_header import GgufHeader

OURS = "lowtide, int8"

_GIGA = 1e9


def rows_in_memory(
    file: Path, num_prompt: int, token_bytes: int, settings: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each lane, those of llama.cpp with our speeds over theirs.

    num_prompt: tokens of each prompt. token_bytes: that a token of an answer goes through.
    settings: num_new and repeats of `causal.measure`.
    """
    own = {"lane": "lowtide", "policy": "resident", "budget_bytes": None}
    peer = {"lane": "llama.cpp", "gguf": str(file)}
    lanes: dict[str, dict[str, Any]] = {
        OURS: {"activations": "int8", **own},
        "llama.cpp": {"maps": False, "repacks": True, **peer},
        "lowtide, exact rows": {"activations": "own", **own},
        "llama.cpp, mapped": {"maps": True, "repacks": False, **peer},
    }
    rows, no_limit = {}, choose_limit("none")
    for name, facts in installed(lanes).items():
        before = memory_ceiling()
        row = in_process("causal", causal_task(file, num_prompt, settings, facts), no_limit, 0)
        rows[name] = row | rates(row, token_bytes, before, memory_ceiling())
    yield from with_ratios(rows, OURS)


def causal_task(
    file: Path, num_prompt: int, settings: Mapping[str, int], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of `causal.measure` for one lane."""
    context = num_prompt + settings["num_new"] + 16
    return {
        "model": str(file),
        "context": context,
        "num_prompt": num_prompt,
        "num_new": settings["num_new"],
        "repeats": settings["repeats"],
        **facts,
    }


def rates(
    row: Mapping[str, Any],
    token_bytes: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> dict[str, Any]:
    """Return the bytes a second of answers, beside the rate at which memory is read."""
    name = max(before, key=lambda key: ("read" in key, key))
    ceilings = [before[name], after[name]]
    rate = row["decode_tokens_per_s"] * token_bytes / _GIGA
    return {
        "token_bytes": token_bytes,
        "GBps": rate,
        "memory_GBps": ceilings,
        "of_ceiling": rate / statistics.mean(ceilings),
    }


def weight_bytes_of_token(file: Path, share_of_experts: float) -> int:
    """Return the bytes of all weights that a token goes through, those of its experts once."""
    found = 0.0
    for name, tensor in GgufHeader.read(file).tensors.items():
        if name != "token_embd.weight":
            found += tensor.num_bytes * (share_of_experts if "_exps." in name else 1)
    return int(found)


def installed(lanes: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the lanes that can be run here, and say what is left out."""
    has_peer = find_spec("llama_cpp") is not None
    if not has_peer:
        say("llama.cpp is left out: llama_cpp is not installed (`make peers`).")
    return {name: x for name, x in lanes.items() if has_peer or x["lane"] == "lowtide"}
