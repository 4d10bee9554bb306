"""Numbers of DALI's figures and tables."""

from __future__ import annotations

from collections.abc import Mapping

FIGURE_12: Mapping[str, tuple[str, float]] = {
    "over llama.cpp": ("layer-split", 3.97),
    "over KTransformers": ("layer-split", 2.16),
    "over MoE-Lightning": ("moe-lightning", 1.48),
    "over HybriMoE": ("hybrimoe", 1.32),
    "over Fiddler": ("fiddler", 14.3),
}
"""Decoding speed over others', means over three models and batches, and our preset for each."""
FIGURE_13: Mapping[str, tuple[str, float]] = {
    "over llama.cpp": ("layer-split", 7.62),
    "over KTransformers": ("layer-split", 3.80),
    "over MoE-Lightning": ("moe-lightning", 2.45),
    "over HybriMoE": ("hybrimoe", 2.00),
}
"""The same of prefill, on DeepSeek-V2-Lite."""
FIGURE_17 = 1.23
"""DALI's cache over HybriMoE's, all else DALI's, batch 4: at shares that are not said."""
FIGURE_18: Mapping[tuple[tuple[int, int], tuple[int, int]], float] = {
    ((2, 16), (2, 8)): 0.042,
    ((4, 8), (8, 8)): 0.071,
}
"""Lead in hit rate of one (w_size, u_size) over another; DeepSeek, batch 4."""
FIGURE_18D = 1.0
"""Hit rate that some layer reaches at the end of an answer: Mixtral, batch 4, 64 new tokens, half
of the experts cached, a window of (8, 1); groups of 8 tokens."""
FIGURE_19: Mapping[str, float] = {"+ greedy": 4.1, "+ prefetch": 1.09, "+ cache": 1.38}
"""Gain of each part over those before it, on Mixtral and Qwen."""
FIGURE_22: Mapping[str, tuple[str, float]] = {
    "over llama.cpp": ("layer-split", 2.78),
    "over KTransformers": ("layer-split", 1.96),
    "over HybriMoE": ("hybrimoe", 1.47),
}
"""Decoding speed over others', means over answers of 128 to 1,024 tokens; Mixtral, batch 16."""
TABLE_4: Mapping[tuple[str, int], tuple[float, float]] = {
    ("DeepSeek-V2-Lite", 16): (12.4, 14.4),
    ("DeepSeek-V2-Lite", 32): (19.7, 22.4),
    ("Mixtral-8x7B", 16): (22.6, 26.7),
    ("Mixtral-8x7B", 32): (28.0, 30.4),
}
"""Seconds of the MoE layers under the optimal and under the greedy assignment."""
TABLE_6: Mapping[str, Mapping[int, float]] = {
    "hybrimoe": {32: 0.0287, 64: 0.0294, 256: 0.0302, 1024: 0.0312, 2048: 0.0308},
    "dali": {32: 0.0484, 64: 0.0454, 256: 0.0451, 1024: 0.0424, 2048: 0.0436},
}
"""Share of the time that scheduling takes, by sequence length; DeepSeek, batch 8."""
TABLE_8: Mapping[str, tuple[float, float]] = {"Qwen": (0.79, 0.93), "Mixtral": (0.79, 0.89)}
"""Mean cosine of the features used and the next gate's true ones: raw, with the residual."""
TABLE_9: Mapping[str, Mapping[tuple[int, int] | None, float]] = {
    "DeepSeek-V2-Lite": {
        None: 1.25, (2, 8): 1.84, (2, 16): 1.76, (4, 8): 1.89, (4, 16): 1.83, (8, 8): 1.97,
    },
    "Qwen3-30B-A3B": {
        None: 1.75, (2, 8): 1.88, (2, 16): 1.82, (4, 8): 1.96, (4, 16): 1.92, (8, 8): 1.94,
    },
    "Mixtral-8x7B": {
        None: 1.65, (2, 1): 1.92, (2, 2): 1.89, (4, 1): 2.02, (4, 2): 1.87, (8, 1): 1.98,
    },
}  # fmt: skip
"""Tokens per second of a sequence by (w_size, u_size), `None` is HybriMoE; batch 32."""
