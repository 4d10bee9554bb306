"""What an option is: its kind, its group, and how a value of it is read.

Which there are is said in `options.py`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lowtide.config import parse_size
from lowtide.core import CacheMode
from lowtide.errors import UsageError

ENV_PREFIX = "LOWTIDE_"


class Kind(enum.Enum):
    """What a value is, however it was written."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "true or false"
    CACHE = "mode"  # true, false, prefix or dual
    SIZE = "size"  # kept as text: bytes, 10GiB, 80%, auto
    TEXTS = "texts"  # repeatable
    PAIRS = "NAME=VALUE"  # repeatable, values are text
    JSON_PAIRS = "NAME=JSON"  # repeatable


class Group(enum.Enum):
    """What an option is for; a command takes whole groups."""

    ENGINE = "Engine"
    PROMPT = "Prompt"
    SAMPLING = "Answer"
    DIFFUSION = "Diffusion"
    OUTPUT = "Output"
    SYNTH = "Synthetic model"
    HUB = "Hub"
    RECORD = "Recording"
    CALIBRATION = "Calibration"
    BUDDIES = "Buddies"
    SIMULATION = "Simulation"
    BENCH = "Measurement"
    QUALITY = "Quality"
    DOCTOR = "Diagnosis"


@dataclass(frozen=True, slots=True)
class Option:
    """One thing a user can set. `name` is also the TOML key."""

    name: str
    kind: Kind
    group: Group
    help: str
    default: object = None
    short: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def is_repeatable(self) -> bool:
        return self.kind in (Kind.TEXTS, Kind.PAIRS, Kind.JSON_PAIRS)

    def parse(self, raw: object, source: str) -> object:
        """The value of `raw`, as a flag, variable or file gave it; UsageError names `source`."""
        try:
            return _PARSERS[self.kind](raw)
        except (ValueError, UsageError) as error:
            raise UsageError(f"{source}: {error}") from error


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"expected text, not {raw!r}")
    if not raw:
        raise ValueError("expected text, not an empty value")
    return raw


def _integer(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    try:
        return int(_text(raw))
    except ValueError:
        raise ValueError(f"expected an integer, not {_shown(raw)}") from None


def _number(raw: object) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    try:
        return float(_text(raw))
    except ValueError:
        raise ValueError(f"expected a number, not {_shown(raw)}") from None


def _boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if not isinstance(raw, str) or raw.strip().lower() not in words:
        raise ValueError(f"expected true or false, not {_shown(raw)}")
    return words[raw.strip().lower()]


def _cache(raw: object) -> bool | str:
    approximate = [mode.value for mode in CacheMode if mode is not CacheMode.EXACT]
    if isinstance(raw, str) and raw.strip().lower() in approximate:
        return raw.strip().lower()
    try:
        return _boolean(raw)
    except ValueError:
        raise ValueError(f"expected true, false, prefix or dual, not {_shown(raw)}") from None


def _size(raw: object) -> str:
    text = str(_integer(raw)) if isinstance(raw, int) else _text(raw).strip()
    if text != "auto":
        parse_size(text, total=2**62)  # checked now, resolved where the machine is known
    return text


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
        raise ValueError(f"expected NAME=VALUE, not {_shown(text)}")
    return name.strip(), value.strip()


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"expected a single value, not {_shown(value)}")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{_shown(text)} is not JSON (text needs double quotes)") from None


def _shown(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."


_PARSERS: Mapping[Kind, Callable[[object], object]] = {
    Kind.TEXT: _text,
    Kind.INTEGER: _integer,
    Kind.NUMBER: _number,
    Kind.BOOLEAN: _boolean,
    Kind.CACHE: _cache,
    Kind.SIZE: _size,
    Kind.TEXTS: _texts,
    Kind.PAIRS: _pairs,
    Kind.JSON_PAIRS: _json_pairs,
}
