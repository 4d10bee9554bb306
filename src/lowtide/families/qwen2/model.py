"""Qwen2 and Qwen2.5.

Grouped-query attention with biased query, key and value projections; a gated MLP in every layer.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class Qwen2(Decoder):
    """Tensor names and layers of Qwen2."""
