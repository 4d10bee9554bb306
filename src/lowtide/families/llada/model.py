"""LLaDA (8B, 1.5): a dense Llama with bidirectional attention.

Attention without norms or biases, with a key head per query head as published. Queries and keys are
rotated in float32 and rounded once (`rope_full_precision`); in bfloat16 Llama differs there.
"""

from __future__ import annotations

import torch

from lowtide.families.llada.names import NAMES
from lowtide.models.decoder import Decoder


class LLaDA(Decoder):
    """Tensor names and layers of LLaDA."""

    names = NAMES
    rotation_dtype = torch.float32
