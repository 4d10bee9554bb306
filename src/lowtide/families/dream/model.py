"""Dream (7B): a dense Qwen2 with bidirectional attention.

Grouped-query attention with biased query, key and value projections. Logits are those of the next
position: see `config.Decoding.logits_shift`.
"""

from __future__ import annotations

from lowtide.models.decoder import Decoder


class Dream(Decoder):
    """Tensor names and layers of Dream."""
