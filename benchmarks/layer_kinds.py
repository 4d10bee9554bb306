"""Decoding with layers of other kinds than plain attention, wholly in memory, beside its bound.

    python benchmarks/layer_kinds.py --models gpt_oss --depths 64 4096 --rows own

Six published layers and a vocabulary of 50,000: gpt-oss-20b's windows, sinks and clamped experts in
MXFP4, and DeepSeek-V2-Lite's latents in 4 bits. A line for each depth and kind of rows, with the
bytes that a token goes through (weights once, keys and values as far as layers see) over the rate
at which memory is read, which is measured before and after.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.arguments import make_parser, run_script
from common.causal import Answer, Lowtide, make_prompt, speeds
from common.ceilings import memory_ceiling
from common.cut_models import model_of_layers
from common.record import Recorder
from common.run import loaded_engine

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.running.engine import Engine

MODELS = {"gpt_oss": None, "deepseek_v2": "q4"}
"""Families, and the format that their weights are read as; None: as published."""

NUM_LAYERS, NUM_WORDS = 6, 50_000
NUM_PROMPT = 512  # of the prompt that is timed
_GIGA = 1e9


def main() -> None:
    options = _options()
    settings = {
        "num_layers": NUM_LAYERS,
        "num_words": NUM_WORDS,
        "num_prompt": NUM_PROMPT,
        "num_new": options.new,
        "repeats": options.repeats,
    }
    recorder = Recorder("layer_kinds", settings, options.out)
    for model in options.models:
        folder = options.folder or model_of_layers(model, NUM_LAYERS, NUM_WORDS)
        for rows in options.rows:
            _measure(recorder, model, folder, rows, options)


def _measure(
    recorder: Recorder, model: str, folder: Path, rows: str, options: argparse.Namespace
) -> None:
    config = EngineConfig(
        context=max(*options.depths, NUM_PROMPT) + options.new + 16,
        policy="resident",
        activations=rows,  # type: ignore[arg-type]
        format=MODELS[model] if folder.is_dir() else None,
    )
    with loaded_engine(str(folder), config) as engine:
        lane, named = Lowtide(engine), {"model": model, "rows": rows}
        lane.answer(make_prompt(folder, NUM_PROMPT, 0), 4)
        before = memory_ceiling()
        prompts = [lane.answer(make_prompt(folder, NUM_PROMPT, i), 1) for i in range(3)]
        prompt_s = statistics.median(answer.prefill_s for answer in prompts)
        recorder.write("prompt", {**named, "prefill_tokens_per_s": NUM_PROMPT / prompt_s})
        for depth in options.depths:
            answers = [
                lane.answer(make_prompt(folder, depth, seed), options.new)
                for seed in range(options.repeats)
            ]
            recorder.write(f"depth {depth}", {**named, **_rates(engine, depth, answers, before)})


def _rates(
    engine: Engine, depth: int, answers: Sequence[Answer], before: dict[str, float]
) -> dict[str, Any]:
    """Speed, bytes a token, and their rate over memory's, the mean of before and after."""
    ceilings = [_read_GBps(each) for each in (before, memory_ceiling())]
    found, token_bytes = speeds(depth, answers), _token_bytes(engine, depth)
    rate = found["decode_tokens_per_s"] * token_bytes / _GIGA
    return {
        "decode_tokens_per_s": found["decode_tokens_per_s"],
        "each_decode": found["each_decode"],
        "token_bytes": token_bytes,
        "GBps": rate,
        "memory_GBps": ceilings,
        "of_ceiling": rate / statistics.mean(ceilings),
    }


def _read_GBps(ceiling: dict[str, float]) -> float:
    return max(rate for name, rate in ceiling.items() if name.startswith("memory_read"))


def _token_bytes(engine: Engine, depth: int) -> int:
    """Return the bytes a token reads: matrices, experts, keys and values of `depth` tokens."""
    model, config = engine.model, engine.model.config
    weights = {name: weight.nbytes for name, weight in model.weights.items()}
    if not config.tie_word_embeddings:
        del weights[f"{model.names.embedding}.weight"]
    of_experts = config.moe.num_experts_per_token * len(config.moe_layers)
    seen_bytes = 0
    for layer, each in enumerate(config.layers):
        seen = min(depth, getattr(each.mixer, "window", 0) or depth)
        arrays = {x.data_ptr(): x for x in model.kv_cache.arrays(layer) or ()}  # a latent is one
        seen_bytes += seen * sum(x[:, 0].nbytes for x in arrays.values())
    return sum(weights.values()) + of_experts * engine.plan.host.slot_bytes + seen_bytes


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", choices=("own", "int8"), default=["own", "int8"])
    parser.add_argument("--depths", nargs="+", type=int, default=[64, 4096])
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a model of these layers that is there already")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
