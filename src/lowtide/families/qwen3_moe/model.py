"""Qwen3-MoE (Qwen3-30B-A3B and relatives).

Grouped-query attention with an RMS norm on each query and key head before the rotary embedding;
softmax routing whose top-k weights are renormalised; no shared expert.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class Qwen3Moe(Decoder):
    """Tensor names and layers of Qwen3-MoE."""
