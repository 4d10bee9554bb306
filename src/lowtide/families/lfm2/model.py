"""LFM2 and LFM2.5 without experts.

Gated short convolutions in most layers; in the others grouped-query attention with an RMS norm on
each query and key head before the rotary embedding; a gated MLP in every layer.
"""

from __future__ import annotations

from lowtide.config import ShortConvSpec
from lowtide.families.lfm2.names import NAMES
from lowtide.layers.short_conv import ShortConv
from lowtide.models.decoder import Attention, Decoder


class Lfm2(Decoder):
    """Tensor names and mixers of LFM2."""

    names = NAMES

    def attention(self, layer: int) -> Attention:
        if not isinstance(self.config.layers[layer].mixer, ShortConvSpec):
            return super().attention(layer)
        prefix = f"{self.names.layer(layer)}conv."
        return ShortConv(
            layer,
            self.config,
            self.linear(f"{prefix}in_proj"),
            self.tensor(f"{prefix}conv.weight"),
            self._bias(f"{prefix}conv"),
            self.linear(f"{prefix}out_proj"),
            self.kv_cache,
            self.compute,
        )
