"""LLaDA-MoE (7B-A1B): the body of Qwen3-MoE, whose positions all see each other.

Attention with an RMS norm on each query and key head before the rotary embedding; experts chosen
by a softmax whose top-k weights are not renormalised, without a shared expert.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class LLaDAMoE(Decoder):
    """Names and numbers of LLaDA-MoE."""
