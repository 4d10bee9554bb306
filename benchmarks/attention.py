"""Attention of one row behind many tokens, beside torch's and reading the same bytes.

    python benchmarks/attention.py --models gpt-oss-20b --depths 4096 16384

Heads have the shapes of published models. Keys and values of several layers, together larger than
the caches, are gone through in turn, as a model's passes do. Every round measures both ways, one
after the other; rates are in bytes of keys and values, medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from common.arguments import make_parser, run_script
from common.ceilings import memory_ceiling
from common.record import Recorder, say

from lowtide.kernels.choice import choose_kernels

_GIGA = 1e9
_RING_BYTES = 128 << 20


class Heads(NamedTuple):
    """Of queries and of keys, and their width."""

    num_heads: int
    num_key_heads: int
    width: int


MODELS = {
    "gpt-oss-20b": Heads(64, 8, 64),
    "Qwen3-30B": Heads(32, 4, 128),
    "Qwen3.6-35B": Heads(16, 2, 256),
    "OLMoE": Heads(16, 16, 128),
}

Attend = Callable[[torch.Tensor, torch.Tensor], None]
"""Attention over keys and values [key heads, tokens, width]."""


def main() -> None:
    options = _options()
    num_threads = torch.get_num_threads()
    settings = {"rounds": options.rounds, "num_threads": num_threads}
    recorder = Recorder("attention", settings, options.out)
    with torch.inference_mode():
        for model in options.models:
            for depth in options.depths:
                _measure(recorder, model, depth, options.rounds, num_threads)


def _measure(recorder: Recorder, model: str, depth: int, rounds: int, num_threads: int) -> None:
    heads = MODELS[model]
    num_bytes = 2 * heads.num_key_heads * depth * heads.width * torch.bfloat16.itemsize
    num_layers = max(2, _RING_BYTES // num_bytes)
    shape = num_layers, 2, heads.num_key_heads, depth, heads.width
    layers = torch.randn(shape, dtype=torch.bfloat16)
    ways = {"lowtide": _own(heads, num_threads), "torch": _torch(heads)}
    ceiling = max(memory_ceiling().values())
    each: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, attend in ways.items():
            start_s = time.perf_counter()
            for keys, values in layers:
                attend(keys, values)
            seconds = time.perf_counter() - start_s
            if number > 0:  # the first warms
                each[name].append(num_layers * num_bytes / seconds / _GIGA)
    for name, rates in each.items():
        rate = statistics.median(rates)
        row = {
            "model": model,
            "depth": depth,
            "way": name,
            "GBps": rate,
            "each_GBps": [round(one, 3) for one in rates],
            "layer_ms": num_bytes / rate / _GIGA * 1e3,
            "memory_GBps": ceiling,
            "of_ceiling": rate / ceiling,
        }
        recorder.write("a row", row)
        say(f"{model}, {depth} tokens, {name}: {rate:.1f} GB/s, {row['layer_ms']:.2f} ms a layer")


def _own(heads: Heads, num_threads: int) -> Attend:
    query = torch.randn(heads.num_heads, heads.width).bfloat16()
    out = torch.empty_like(query)
    kernels = choose_kernels("auto", torch.bfloat16)
    return lambda keys, values: kernels.attend_row(query, keys, values, None, out, num_threads)


def _torch(heads: Heads) -> Attend:
    query = torch.randn(1, heads.num_heads, 1, heads.width).bfloat16()

    def attend(keys: torch.Tensor, values: torch.Tensor) -> None:
        torch.nn.functional.scaled_dot_product_attention(
            query, keys[None], values[None], enable_gqa=True
        )

    return attend


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--depths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
