"""`LayerSpec`: the parts of one layer; and the layers of models in which most are alike."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.config.specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertSpec,
    LatentAttentionSpec,
    ShortConvSpec,
)
from lowtide.errors import ConfigError

Mixer = AttentionSpec | LatentAttentionSpec | ShortConvSpec | DeltaNetSpec
"""Part of a layer in which tokens see each other.

It says what a sequence keeps of each token (`cache_shape`; with a `window` of the last ones alone)
and of all of them (`states`).
"""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A dense MLP and experts in one layer."""

    dense: DenseSpec
    experts: ExpertSpec


MLP = DenseSpec | ExpertSpec | SideBySide
"""Part of a layer that works on each token by itself."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer, or sublayer where a model counts these; a part that it lacks is None."""

    mixer: Mixer | None
    mlp: MLP | None

    @property
    def dense(self) -> DenseSpec | None:
        """The MLP that every token uses, without a shared expert."""
        mlp = self.mlp.dense if isinstance(self.mlp, SideBySide) else self.mlp
        return mlp if isinstance(mlp, DenseSpec) else None

    @property
    def experts(self) -> ExpertSpec | None:
        mlp = self.mlp.experts if isinstance(self.mlp, SideBySide) else self.mlp
        return mlp if isinstance(mlp, ExpertSpec) else None


def layers_of(
    num_layers: int,
    mixer: Mixer,
    experts: ExpertSpec | None,
    dense_size: int = 0,
    moe_layers: Collection[int] | None = None,
) -> tuple[LayerSpec, ...]:
    """List the layers of a model with one kind of mixer, and either experts or a dense MLP.

    dense_size: width of the MLP in layers without experts.
    moe_layers: those with experts; by default all from `experts.first_layer` on.
    """
    dense = LayerSpec(mixer, DenseSpec(dense_size) if dense_size else None)
    if experts is None:
        return (dense,) * num_layers
    if moe_layers is None:
        moe_layers = range(experts.first_layer, num_layers)
    if not any(layer in moe_layers for layer in range(num_layers)):
        raise ConfigError(
            f"config.json: {num_layers} dense layers of {num_layers} leave no layer with experts."
        )
    sparse = LayerSpec(mixer, experts)
    return tuple(sparse if layer in moe_layers else dense for layer in range(num_layers))
