"""OLMoE (1B-7B).

Queries and keys are normalised over all heads together; softmax routing whose top-k weights are not
renormalised as published; no shared expert.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class Olmoe(Decoder):
    """Tensor names and layers of OLMoE."""
