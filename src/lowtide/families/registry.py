"""Registry of families: the folders beside this file, and those registered by others."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from lowtide.config import ModelConfig
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.config.quantisation import MODELOPT_NAME, with_modelopt
from lowtide.config.sampling import read_sampling
from lowtide.config.token_ids import read_eos_token_ids
from lowtide.core import NOTHING
from lowtide.errors import ConfigError, InternalError, UnsupportedError
from lowtide.families.family import Family
from lowtide.families.gguf import GgufArchitecture, GgufKeys
from lowtide.families.unsupported import SOME_THAT_RUN, Unsupported, runs
from lowtide.families.unsupported import why_unsupported as explained
from lowtide.files.json_file import read_object, shown
from lowtide.files.regular_file import FETCH_AGAIN

MAX_CONFIG_BYTES = 16 << 20
_MENDED = f"Correct the value, give another as a config override, or {FETCH_AGAIN}"

_registered: dict[str, Family] = {}


def families() -> Mapping[str, Family]:
    """Return all known families by name."""
    _register_own()
    return MappingProxyType(_registered)


def own_names() -> tuple[str, ...]:
    """List the names of lowtide's own families without importing them."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return tuple(module.name for module in modules if module.ispkg)


def register(family: Family) -> None:
    """Register a family; raises ValueError if a name or architecture is taken."""
    taken = _taken_by(family) & {
        name for other in _registered.values() for name in _taken_by(other)
    }
    if taken:
        raise ValueError(f"The family {family.name}: {', '.join(sorted(taken))} is taken.")
    _registered[family.name] = family


def _taken_by(family: Family) -> set[str]:
    """Return all names that no other family may have."""
    gguf = family.gguf
    of_gguf = {f"GGUF's {gguf.name}"} if gguf is not None and gguf.suits is None else set()
    return {family.name, *family.architectures, *of_gguf}


def unregister(name: str) -> None:
    """Remove a family; raises KeyError for an unknown name."""
    del _registered[name]


def supported_architectures() -> tuple[str, ...]:
    """List all supported names under `architectures` in alphabetical order."""
    return tuple(sorted(name for each in families().values() for name in each.architectures))


def why_unsupported(names: Iterable[str], keys: Mapping[str, object]) -> Unsupported:
    """Explain why a model without a family does not run.

    names: its own names, the most specific first.
    keys: of its `config.json` or of a GGUF file's metadata.
    """
    return explained(names, keys, _running())


def _running() -> set[str]:
    """Return the names of series that run."""
    return {name for each in families().values() for name in (each.name, *each.series)}


def gguf_architectures(metadata: Mapping[str, object]) -> tuple[GgufArchitecture, ...]:
    """Return the architectures that a GGUF file's metadata may mean by their name.

    Raises UnsupportedError for an unsupported one, ConfigError if none is named.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigError(f"it names no general.architecture. {SOME_THAT_RUN}")
    known = [each.gguf for each in families().values() if each.gguf is not None]
    found = tuple(each for each in known if each.name == name)
    if not found:
        raise UnsupportedError(
            f"the architecture {shown(name)} is not read from GGUF files. "
            f"{why_unsupported([name], metadata)}"
        )
    return found


def gguf_architecture(metadata: Mapping[str, object], keys: GgufKeys) -> GgufArchitecture:
    """Return the one of `gguf_architectures` that suits the model; keys: of the same metadata.

    Raises UnsupportedError if none does.
    """
    known = gguf_architectures(metadata)
    suited = [each for each in known if each.suits is not None and each.suits(keys)]
    rest = [each for each in known if each.suits is None]
    if len(suited) > 1:
        raise InternalError(f"{len(suited)} families take the same {known[0].name} model.")
    if not suited and not rest:
        raise UnsupportedError(
            f"the architecture {shown(known[0].name)} is computed for other models, not for this "
            f"one. {SOME_THAT_RUN}"
        )
    return (suited or rest)[0]


def read_config_in(folder: Path, overrides: Mapping[str, object] = NOTHING) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` for end-of-text ids and sampling.

    `overrides` replace values under `config.json`'s own keys. Raises ConfigError for a file or
    value that cannot be right, UnsupportedError for a feature that lowtide does not have and
    UsageError for an override without effect.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} is not a folder; give the one that has the config.json.")
    config = _read(folder / "config.json")
    modelopt = _read_if_there(folder / MODELOPT_NAME)
    generation = _read_if_there(folder / "generation_config.json")
    return read_config(with_modelopt(config, modelopt), generation=generation, overrides=overrides)


def _read(path: Path) -> Mapping[str, object]:
    way_out = f"correct it, or {FETCH_AGAIN}" if path.exists() else FETCH_AGAIN
    return read_object(path, MAX_CONFIG_BYTES, ConfigError, way_out)


def _read_if_there(path: Path) -> Mapping[str, object]:
    return _read(path) if os.path.lexists(path) else NOTHING


def read_config(
    config: Mapping[str, object],
    *,
    generation: Mapping[str, object] = NOTHING,
    overrides: Mapping[str, object] = NOTHING,
    way_out: str = _MENDED,
) -> ModelConfig:
    """Read the contents of the two files; raises as `read_config_in` does.

    way_out: what to do about a value that cannot be right.
    """
    fields = Fields({**_of_text(config), **overrides})
    family, architecture = _family_of(fields)
    try:
        eos = read_eos_token_ids(fields, generation, "eos_token_id" in overrides)
        result = family.read(fields, Origin(family.name, architecture, family.published, eos))
    except ConfigError as error:
        raise ConfigError(f"{error} {way_out}.") from None
    for name in overrides:
        fields.refuse_unread(name)
    if not result.decoding.writes_in_order:
        return result
    return replace(result, sampling=read_sampling(generation))


_OF_BOTH = (
    "architectures",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
)
"""Keys that stand outside of `text_config`, or inside, where they count."""

_TIE = "tie_word_embeddings"
"""Key that counts outside: the head belongs to the whole model. Inside, tools leave a default."""


def _of_text(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys of the model that writes text, of one that also reads images or sound.

    Any other config is returned as it is, and a wrapper that no family answers to: its keys tell
    why it is not supported.
    """
    text, names = config.get("text_config"), config.get("architectures")
    if not isinstance(text, Mapping) or not isinstance(names, list):
        return config
    if not names or names[0] not in supported_architectures():
        return config
    outer = {key: config[key] for key in _OF_BOTH if key in config}
    inner = {key: value for key, value in text.items() if value is not None}
    tie = {_TIE: config[_TIE]} if config.get(_TIE) is not None else {}
    return {**outer, **inner, **tie, "architectures": names}


def _family_of(fields: Fields) -> tuple[Family, str]:
    """Return the family of a `config.json`, and its architecture's name."""
    names, model_type = fields.raw("architectures"), fields.values.get("model_type")
    architecture = names[0] if isinstance(names, list) and names else None
    for family in families().values():
        if isinstance(architecture, str) and architecture in family.architectures:
            return family, architecture
    # Several series have one architecture: `model_type` tells more than it.
    named = [name for name in (model_type, architecture) if isinstance(name, str)]
    told = str(why_unsupported(named, fields.values)) if named else ""
    if not named or runs(named[0], _running()):
        told = f"Supported: {', '.join(supported_architectures())}."
    if not isinstance(architecture, str):
        raise ConfigError(f"config.json names no architecture. {told}")
    raise ConfigError(
        f"config.json: the architecture {shown(architecture)} is not supported. {told}"
    )


@cache
def _register_own() -> None:
    package = __name__.rpartition(".")[0]
    for name in own_names():
        register(importlib.import_module(f"{package}.{name}").FAMILY)
