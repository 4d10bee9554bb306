"""Llama (2, 3 and models built like it).

Grouped-query attention without norms, as published without biases; a gated MLP in every layer.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class Llama(Decoder):
    """Tensor names and layers of Llama."""
