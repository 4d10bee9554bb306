"""Declaration of options as dataclass fields.

    @dataclass(frozen=True)
    class Params:
        steps: int | None = option(Group.DIFFUSION, "Denoising steps.", low=1)

The kind of a value follows from the field's annotation. `options_of` lists a class's options for
the command line, the environment and TOML files; `tools/options_page.py` writes docs/options.md,
the tables of docs/python.md and the keywords of `LLM` from them; `check_options` checks an
instance.

Messages and help texts name options as Python does, between backticks: `context`, or `device="cpu"`
for an advised value. `in_words` writes them as the command line's user calls them.

Imports no torch, so that a wrong value is refused at once.
"""

from __future__ import annotations

import enum
import functools
import json
import numbers
import operator
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from lowtide.config import parse_size
from lowtide.core import CacheMode
from lowtide.errors import UsageError
from lowtide.files.json_file import shown

ENV_PREFIX = "LOWTIDE_"

MAX_INTEGER = 2**31 - 1

_APPROXIMATE_CACHES = [mode.value for mode in CacheMode if mode is not CacheMode.EXACT]

_NAMED = re.compile(r'`(\w+)(?:="([^`"]*)")?`')

_DECLARED = "option"  # key of a dataclass field's metadata


class Kind(enum.Enum):
    """Type of an option's value, in whatever notation it is given."""

    TEXT = "text"
    PATH = "path"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "true or false"
    CACHE = "mode"  # true, false, prefix or dual
    SIZE = "size"  # kept as text: bytes, 10GiB, 80%, auto
    CORES = "cores"  # a number, or a list as 0,2-3
    TEXTS = "texts"  # repeatable
    PAIRS = "NAME=VALUE"  # repeatable, values are text
    JSON_PAIRS = "NAME=JSON"  # repeatable
    OBJECT = "object"  # of Python alone


_KINDS = {
    "str": Kind.TEXT,
    "str | os.PathLike[str]": Kind.PATH,
    "int": Kind.INTEGER,
    "float": Kind.NUMBER,
    "bool": Kind.BOOLEAN,
    "bool | str": Kind.CACHE,
    "str | int": Kind.SIZE,
    "int | str | Sequence[int]": Kind.CORES,
    "str | Sequence[str]": Kind.TEXTS,
    "Mapping[str, str]": Kind.PAIRS,
    "Mapping[str, object]": Kind.JSON_PAIRS,
    "Progress | bool": Kind.OBJECT,
    "DiffusionParams": Kind.OBJECT,
}
"""Kinds by a field's annotation, without its `| None`."""


class Group(enum.Enum):
    """Section of an option; a command takes whole groups."""

    ENGINE = "Engine"
    PROMPT = "Prompt"
    SAMPLING = "Answer"
    DIFFUSION = "Diffusion"
    OUTPUT = "Output"
    SYNTH = "Synthetic model"
    HUB = "Hub"
    RECORD = "Recording"
    CALIBRATION = "Calibration"
    SIMULATION = "Simulation"
    BENCH = "Measurement"
    QUALITY = "Quality"
    DOCTOR = "Diagnosis"
    POLICY = "Policy"
    SERVE = "Server"
    BATCH = "Batch"
    PYTHON = "Python"  # a keyword only: no flag, variable or key


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting. `name` is also the TOML key, `keyword` that of a Python call."""

    name: str
    keyword: str
    kind: Kind
    group: Group
    help: str
    default: Any = None
    short: str | None = None  # a second flag
    is_common: bool = False
    low: float = 0
    high: float = MAX_INTEGER
    choices: tuple[str, ...] = ()  # of a text; empty: any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """The default as written in a TOML file."""
        text = str(self.default)
        return text.lower() if isinstance(self.default, bool) else text

    @property
    def is_repeatable(self) -> bool:
        return self.kind in (Kind.TEXTS, Kind.PAIRS, Kind.JSON_PAIRS)

    def parse(self, raw: object, source: str) -> object:
        """Parse a flag, variable or file value; raises UsageError naming `source`."""
        try:
            value = _PARSERS[self.kind](raw)
        except (ValueError, UsageError) as error:
            raise UsageError(f"{source}: {error}") from error
        self.check(value, source)
        return value

    def check(self, value: object, name: str) -> None:
        """Raise UsageError, naming `name`, for a value of another type or out of range."""
        if self.kind is Kind.INTEGER:
            check_int(name, value, int(self.low), int(self.high))
        elif self.kind is Kind.NUMBER:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not self.low <= value <= self.high:  # type: ignore[operator]
                raise UsageError(
                    f"{name} must be a number from {self.low} to {self.high}, not {shown(value)}."
                )
        elif self.kind is Kind.CACHE and not isinstance(value, bool):
            if value not in _APPROXIMATE_CACHES:
                raise UsageError(f"{name} must be true, false, prefix or dual, not {shown(value)}.")
        elif self.kind in _TYPES:
            kind, noun = _TYPES[self.kind]
            if not isinstance(value, kind):
                raise UsageError(f"{name} must be {noun}, not {shown(value)}.")
        if self.choices and value not in self.choices:
            known = ", ".join(self.choices)
            raise UsageError(f"{name} {shown(value)} is not known; choose {known}.")


_TYPES: Mapping[Kind, tuple[Any, str]] = {
    Kind.TEXT: (str, "a text"),
    Kind.PATH: (str | os.PathLike, "the path of a file"),
    Kind.BOOLEAN: (bool, "true or false"),
    Kind.PAIRS: (Mapping, "a mapping of names to values"),
    Kind.JSON_PAIRS: (Mapping, "a mapping of names to values"),
}


def option(group: Group, help: str, default: object = None, **declared: Any) -> Any:
    """Declare a dataclass field as an option.

    help: the whole documentation of the option, shown by pages and editors.
    default: a value, or the class that makes one.
    declared: further fields of `Option`; `name` if it differs from the field's.
    """
    metadata = {_DECLARED: {"group": group, "help": help, **declared}}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_KINDS_OF_DEFAULTS: Mapping[type, Kind] = {
    bool: Kind.BOOLEAN,
    int: Kind.INTEGER,
    float: Kind.NUMBER,
    str: Kind.TEXT,
}


def command_option(
    group: Group,
    name: str,
    help: str,
    default: object = None,
    *,
    kind: Kind | None = None,
    is_common: bool = True,
    **declared: Any,
) -> Option:
    """Declare an option of the command line alone.

    kind: by default that of `default`, or a path without one. declared: further fields of `Option`.
    """
    return Option(
        name=name,
        keyword=name,
        kind=kind or _KINDS_OF_DEFAULTS.get(type(default), Kind.PATH),
        group=group,
        help=help,
        default=default,
        is_common=is_common,
        **declared,
    )


@functools.cache
def options_of(params: Any) -> tuple[Option, ...]:
    """List the options that a dataclass declares, in order."""
    return tuple(
        Option(
            **{"name": f.name, **f.metadata[_DECLARED]},
            keyword=f.name,
            kind=_KINDS[str(f.type).removesuffix(" | None")],
            default=f.default if isinstance(f.default, str | int | float) else None,
        )
        for f in fields(params)
        if _DECLARED in f.metadata
    )


def check_options(params: Any) -> None:
    """Check the options of a frozen dataclass and convert numpy numbers to Python's.

    A field that is None by default may be None; so may a mapping, which is then empty. Raises
    UsageError.
    """
    params_class: Any = type(params)
    for each in options_of(params_class):
        given = value = getattr(params, each.keyword)
        if each.kind in (Kind.PAIRS, Kind.JSON_PAIRS) and value is None:
            value = {}
        elif value is None and each.default is None:
            continue
        elif each.kind in (Kind.INTEGER, Kind.NUMBER, Kind.SIZE, Kind.CORES):
            value = as_number(value)
        if value is not given:
            object.__setattr__(params, each.keyword, value)
        each.check(value, each.keyword)


def in_words(message: str, words: Mapping[str, str]) -> str:
    """Write the options that a message names as `words` calls them, by their Python names.

    An option without a word there keeps its name.
    """

    def word(named: re.Match[str]) -> str:
        name, value = named.groups()
        if name not in words:
            return named[0]
        return words[name] if value is None else f"{words[name]} {value}"

    return _NAMED.sub(word, message)


def check_int(name: str, value: object, low: int, high: int = MAX_INTEGER) -> int:
    """Return `value` as a Python integer. Raises UsageError."""
    number = as_number(value)
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise UsageError(f"{name} must be an integer from {low} to {high}, not {shown(value)}.")
    return number


def as_number(value: Any) -> Any:
    """Convert another library's number, such as numpy's, to Python's; return all else unchanged."""
    if isinstance(value, int | float) or str(getattr(value, "dtype", "")).endswith("bool"):
        return value
    with suppress(TypeError, RuntimeError):  # no integer, or a tensor without its numbers
        return operator.index(value)
    with suppress(OverflowError):
        return float(value) if isinstance(value, numbers.Real) else value
    return value


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"expected text, not {shown(raw)}")
    if not raw:
        raise ValueError("expected text, not an empty value")
    return raw


def _integer(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    try:
        text = _text(raw)
        return int(text[:-1]) << 10 if text[-1] in "kK" else int(text)  # 8k is 8,192
    except ValueError:
        raise ValueError(f"expected an integer (4k is 4096), not {shown(raw)}") from None


def _number(raw: object) -> float:
    try:
        if isinstance(raw, int | float) and not isinstance(raw, bool):
            return float(raw)
        return float(_text(raw))
    except (ValueError, OverflowError):
        raise ValueError(f"expected a number, not {shown(raw)}") from None


def _boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if not isinstance(raw, str) or raw.strip().lower() not in words:
        raise ValueError(f"expected true or false, not {shown(raw)}")
    return words[raw.strip().lower()]


def _cache(raw: object) -> bool | str:
    if isinstance(raw, str) and raw.strip().lower() in _APPROXIMATE_CACHES:
        return raw.strip().lower()
    try:
        return _boolean(raw)
    except ValueError:
        raise ValueError(f"expected true, false, prefix or dual, not {shown(raw)}") from None


def _size(raw: object) -> str:
    text = str(_integer(raw)) if isinstance(raw, int) else _text(raw).strip()
    if text != "auto":
        parse_size(text, total=2**62)  # checked now, resolved where the machine is known
    return text


def _cores(raw: object) -> str:
    if isinstance(raw, list):  # of a TOML file
        return ",".join(str(_integer(item)) for item in raw)
    return str(_integer(raw)) if isinstance(raw, int) else _text(raw).strip()


def _texts(raw: object) -> list[str]:
    return [_text(item) for item in (raw if isinstance(raw, list) else [raw])]


def _pairs(raw: object) -> dict[str, str]:
    if isinstance(raw, Mapping):
        return {_text(name): _scalar(value) for name, value in raw.items()}
    return dict(_split_pair(item) for item in _texts(raw))


def _json_pairs(raw: object) -> dict[str, object]:
    if isinstance(raw, Mapping):
        return {_text(name): value for name, value in raw.items()}
    return {name: _json(value) for name, value in map(_split_pair, _texts(raw))}


def _split_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise ValueError(f"expected NAME=VALUE, not {shown(text)}")
    return name.strip(), value.strip()


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"expected a single value, not {shown(value)}")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{shown(text)} is not JSON (text needs double quotes)") from None


_PARSERS: Mapping[Kind, Callable[[object], object]] = {
    Kind.TEXT: _text,
    Kind.PATH: _text,
    Kind.INTEGER: _integer,
    Kind.NUMBER: _number,
    Kind.BOOLEAN: _boolean,
    Kind.CACHE: _cache,
    Kind.SIZE: _size,
    Kind.CORES: _cores,
    Kind.TEXTS: _texts,
    Kind.PAIRS: _pairs,
    Kind.JSON_PAIRS: _json_pairs,
}
