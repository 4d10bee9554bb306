"""`Family`: everything lowtide knows of one model family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from lowtide.config import ModelConfig, Published
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.gguf import GgufArchitecture
from lowtide.families.sizes import SynthSize, read_sizes

if TYPE_CHECKING:  # `schemas` imports families, `models` imports torch
    from lowtide.models.decoder import Decoder
    from lowtide.schemas.schema import ModelSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: how its files are read, and the class that computes it.

    No torch is imported before `model`.

    architectures: the names under `architectures` in `config.json`.
    read: reads that file's keys and refuses unsupported features by name.
    schema: names and shapes of the tensors.
    decoder: the model's class as `module:Class`.
    gguf: the family in GGUF files, if supported.
    series: what its models are called besides `name`, such as "kimi_k2".
    as_stored: the config of a checkpoint whose tensors have these names, of a family that is stored
        in several ways.
    own_sizes: checkpoints that `synth` can make, for a family without a `NAME/sizes.json`.
    """

    name: str
    architectures: tuple[str, ...]
    published: Published
    read: Callable[[Fields, Origin], ModelConfig]
    schema: Callable[[ModelConfig], ModelSchema]
    decoder: str
    gguf: GgufArchitecture | None = None
    series: tuple[str, ...] = ()
    as_stored: Callable[[ModelConfig, Iterable[str]], ModelConfig] | None = None
    own_sizes: Mapping[str, SynthSize] | None = None

    def sizes(self) -> Mapping[str, SynthSize]:
        """Return the checkpoints that `synth` can make."""
        return read_sizes(self.name) if self.own_sizes is None else self.own_sizes

    def model(self) -> type[Decoder]:
        """Import and return the model's class."""
        module, _, name = self.decoder.partition(":")
        found: type[Decoder] = getattr(import_module(module), name)
        return found
