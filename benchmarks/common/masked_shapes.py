"""Bidirectional models of published shapes, cut to a few layers.

A pass's transients are as large in a model of two layers as in all of them: layers take turns. So
a cut model is measured, and the bytes of the layers that it lacks are charged against the budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from common.models import cache_folder
from common.record import say
from lowtide.families import SynthSize, families
from lowtide.model_writing.synth import write_checkpoint
from lowtide.model_writing.synth_weights import tensors_of

_NARROW = {"d_model": 256, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 768}
_LAYERS = {"llada": "n_layers", "llada_moe": "num_hidden_layers", "dream": "num_hidden_layers"}


@dataclass(frozen=True)
class MaskedShape:
    """A family at one of three sizes: published, tiny for tests, or narrow.

    A long step of the narrow one can be run on any machine.
    """

    name: str
    family: str
    size: str  # "full", "tiny" or "narrow"

    @property
    def num_layers(self) -> int:
        """As published."""
        num_layers: int = self._published.config[_LAYERS[self.family]]
        return num_layers

    @cached_property
    def weight_bytes(self) -> int:
        """Of all layers, in the checkpoint's type."""
        return self.cut_bytes(self.num_layers)

    def cut_bytes(self, num_layers: int) -> int:
        """Of the weights of so many layers, embedding and head included."""
        return sum(tensor.output.num_bytes for tensor in tensors_of(self._cut(num_layers)))

    def folder(self, num_layers: int) -> Path:
        """A checkpoint of random weights with so many layers, made once and kept."""
        folder = cache_folder() / f"{self.family}-{self.size}-{num_layers}-layers"
        if not (folder / "config.json").is_file():
            num_bytes = self.cut_bytes(num_layers)
            say(f"Making {folder}, {num_bytes / 1e9:.1f} GB ...")
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self._cut(num_layers), folder)
        return folder

    def config_alone(self, num_layers: int, folder: Path) -> Path:
        """`folder` with the model's config.json and nothing else: what planning needs."""
        text = json.dumps(self._cut(num_layers).config)
        (folder / "config.json").write_text(text, encoding="utf-8")
        return folder

    @property
    def _published(self) -> SynthSize:
        sizes = families()[self.family].sizes()
        if self.size != "narrow":
            return sizes[self.size]
        return replace(sizes["small"], config={**sizes["small"].config, **_NARROW})

    def _cut(self, num_layers: int) -> SynthSize:
        published = self._published
        config = {**published.config, _LAYERS[self.family]: num_layers}
        return replace(published, config=config)


MODELS = {"LLaDA-8B": "llada", "Dream-7B": "dream", "LLaDA-MoE": "llada_moe"}

NARROW = MaskedShape("LLaDA, narrow", "llada", "narrow")
"""LLaDA with a vocabulary of 32,768 and a sixteenth of the width, so that logits are still what a
step takes."""


def masked_shapes(names: list[str], size: str = "full") -> list[MaskedShape]:
    """The models of these names."""
    return [MaskedShape(name, MODELS[name], size) for name in names]


def num_masked(num_tokens: int, prompt_share: float) -> int:
    """Rows that may change in the first step. prompt_share: the paper's r_p, prompt over all."""
    return max(1, num_tokens - math.floor(num_tokens * prompt_share))


def settings_of(shape: MaskedShape) -> Mapping[str, str]:
    """Return the settings that another process makes the shape of."""
    return {"name": shape.name, "family": shape.family, "size": shape.size}
