"""LLaDA-MoE (7B-A1B): Qwen3-MoE's layers with bidirectional attention.

An RMS norm on each query and key head before the rotary embedding; softmax routing whose top-k
weights are not renormalised; no shared expert.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class LLaDAMoE(Decoder):
    """Tensor names and layers of LLaDA-MoE."""
