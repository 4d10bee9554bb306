"""`Family`: all that lowtide knows of one model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from lowtide.config import ModelConfig, Published
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.gguf import GgufArchitecture
from lowtide.families.sizes import SynthSize, read_sizes

if TYPE_CHECKING:  # the one asks families for their schemas, the other imports torch
    from lowtide.models.decoder import Decoder
    from lowtide.schemas.schema import ModelSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's files are read, and what computes it. Holds no torch until `model`.

    architectures: the names under `architectures` in `config.json`. read: that file's keys; it
    refuses by name what the model does not do. schema: names and shapes of the tensors. decoder:
    where its class is, as `module:Class`. gguf: the family in GGUF files, if it is read from them.
    own_sizes: the checkpoints that `synth` can make, of a family without a `NAME/sizes.json`.
    """

    name: str
    architectures: tuple[str, ...]
    published: Published
    read: Callable[[Fields, Origin], ModelConfig]
    schema: Callable[[ModelConfig], ModelSchema]
    decoder: str
    gguf: GgufArchitecture | None = None
    own_sizes: Mapping[str, SynthSize] | None = None

    def sizes(self) -> Mapping[str, SynthSize]:
        """The checkpoints that `synth` can make."""
        return read_sizes(self.name) if self.own_sizes is None else self.own_sizes

    def model(self) -> type[Decoder]:
        """The class that computes it, whose file is imported now."""
        module, _, name = self.decoder.partition(":")
        found: type[Decoder] = getattr(import_module(module), name)
        return found
