"""Qwen3 without experts.

Grouped-query attention with an RMS norm on each query and key head before the rotary embedding; a
gated MLP in every layer.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class Qwen3(Decoder):
    """Tensor names and layers of Qwen3."""
