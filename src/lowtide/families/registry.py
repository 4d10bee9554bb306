"""Which families there are: the folders beside this file, and what else was registered."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from lowtide.config import ModelConfig
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.config.sampling import read_sampling
from lowtide.config.token_ids import read_eos_token_ids
from lowtide.core import NOTHING
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.families.family import Family
from lowtide.families.gguf import GgufArchitecture
from lowtide.families.unsupported import why_unsupported
from lowtide.files.json_file import read_object, shown

MAX_CONFIG_BYTES = 16 << 20

_registered: dict[str, Family] = {}


def families() -> Mapping[str, Family]:
    """All of them, by name."""
    _register_own()
    return MappingProxyType(_registered)


def own_names() -> tuple[str, ...]:
    """The names of lowtide's own families, without importing any of them."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return tuple(module.name for module in modules if module.ispkg)


def register(family: Family) -> None:
    """Makes a family known; raises ValueError for a name or architecture that is taken."""
    taken = {family.name, *family.architectures} & {
        name for other in _registered.values() for name in (other.name, *other.architectures)
    }
    if taken:
        raise ValueError(f"The family {family.name}: {', '.join(sorted(taken))} is taken.")
    _registered[family.name] = family


def unregister(name: str) -> None:
    """Forgets a family; raises KeyError if there is none of that name."""
    del _registered[name]


def supported_architectures() -> tuple[str, ...]:
    """The names under `architectures` that can be read, in alphabetical order."""
    return tuple(sorted(name for each in families().values() for name in each.architectures))


def gguf_architecture(name: str) -> GgufArchitecture:
    """What GGUF files call so; raises UnsupportedError for any other name."""
    known = {each.gguf.name: each.gguf for each in families().values() if each.gguf is not None}
    if name not in known:
        raise UnsupportedError(
            f"the architecture {shown(name)} is not read from GGUF files; supported: "
            f"{', '.join(sorted(known))}."
        )
    return known[name]


def read_config_in(folder: Path, overrides: Mapping[str, object] = NOTHING) -> ModelConfig:
    """Reads `config.json`, and `generation_config.json` for end-of-text ids and sampling.

    `overrides` replace values under `config.json`'s own keys. Raises ConfigError for a file
    or value that cannot be right, UnsupportedError for a feature that lowtide does not have
    and UsageError for an override that would have no effect.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} is not a folder.")
    config = read_object(folder / "config.json", MAX_CONFIG_BYTES, ConfigError)
    path = folder / "generation_config.json"
    exists = os.path.lexists(path)
    generation = read_object(path, MAX_CONFIG_BYTES, ConfigError) if exists else NOTHING
    return read_config(config, generation=generation, overrides=overrides)


def read_config(
    config: Mapping[str, object],
    *,
    generation: Mapping[str, object] = NOTHING,
    overrides: Mapping[str, object] = NOTHING,
) -> ModelConfig:
    """The same from the contents of the two files; raises as `read_config_in` does."""
    fields = Fields({**config, **overrides})
    family, architecture = _family_of(fields)
    eos = read_eos_token_ids(fields, generation, "eos_token_id" in overrides)
    result = family.read(fields, Origin(family.name, architecture, family.published, eos))
    for name in overrides:
        fields.refuse_unread(name)
    return result if result.is_diffusion else replace(result, sampling=read_sampling(generation))


def _family_of(fields: Fields) -> tuple[Family, str]:
    """The family of a `config.json`, and which of its architectures this is."""
    names = fields.raw("architectures")
    supported = ", ".join(supported_architectures())
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(f"config.json names no architecture; supported: {supported}.")
    for family in families().values():
        if names[0] in family.architectures:
            return family, names[0]
    known = why_unsupported(names[0])
    told = f"Supported: {supported}."
    if known is not None:
        instead = ", ".join(known.instead)
        told = f"It is {known.name}: {known.reason}. Models that do run: {instead}."
    raise ConfigError(f"config.json: the architecture {shown(names[0])} is not supported. {told}")


@cache
def _register_own() -> None:
    package = __name__.rpartition(".")[0]
    for name in own_names():
        register(importlib.import_module(f"{package}.{name}").FAMILY)
