"""LLaDA (8B, 1.5): a dense Llama whose positions all see each other.

Attention without norms or biases, every head with keys of its own as published; queries and keys
are rotated in float32 and rounded once (`rope_full_precision`), which in bfloat16 is not what
Llama does.
"""

from __future__ import annotations

import torch

from lowtide.families.llada.names import NAMES
from lowtide.models.decoder import Decoder


class LLaDA(Decoder):
    """Names and numbers of LLaDA."""

    names = NAMES
    rotation_dtype = torch.float32
