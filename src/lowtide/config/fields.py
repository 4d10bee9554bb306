"""Typed access to the keys of one `config.json`, checking every value as it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any

from lowtide.errors import ConfigError, UnsupportedError, UsageError
from lowtide.files.json_file import meant, shown

# Far above any model, low enough that no product of sizes leaves 63 bits or fills memory.
MAX_VOCAB = 2**24
MAX_WIDTH = 2**20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_EXPERTS = 4096
MAX_POSITIONS = 2**28

OTHER_MODEL = "choose another model"
"""Way out of what a family does not compute: the end of an error message."""


class Fields:
    """The keys of one `config.json`, and a record of those that were read.

    A null value counts as absent. Alternative names of a key must not disagree.
    """

    def __init__(
        self, values: Mapping[str, object], prefix: str = "", file: str = "config.json"
    ) -> None:
        self.values, self.prefix, self.file = values, prefix, file
        self.asked: set[str] = set()
        self._own_names: Mapping[str, str] = {}

    def renamed(self, own_names: Mapping[str, str]) -> Fields:
        """Return the same keys under other names.

        own_names: this file's key for each such name.
        """
        renamed = Fields(self.values, self.prefix, self.file)
        renamed.asked, renamed._own_names = self.asked, own_names
        return renamed

    def raw(self, *names: str) -> object | None:
        names = self._own(names)
        self.asked.update(names)
        found = [name for name in names if self.values.get(name) is not None]
        if not found:
            return None
        first, *others = found
        for other in others:
            if self.values[other] != self.values[first]:
                raise self.error(first, f"contradicts {other} {shown(self.values[other])}")
        return self.values[first]

    def is_null(self, name: str) -> bool:
        """Return True if the file has the key, and null as its value."""
        return self.raw(name) is None and self._own((name,))[0] in self.values

    def integer(self, *names: str, low: int, high: int, default: int | None = None) -> int:
        value = self.optional_integer(*names, low=low, high=high)
        value = default if value is None else value
        if value is None:
            raise self._missing(names)
        return value

    def optional_integer(self, *names: str, low: int, high: int) -> int | None:
        must = f"must be an integer from {low} to {high}"
        value: int | None = self._checked(names, int, must, low, high)
        return value

    def optional_number(self, *names: str, low: float, high: float) -> float | None:
        must = f"must be a number from {low} to {high}"
        value = self._checked(names, int | float, must, low, high)
        return None if value is None else float(value)

    def number(self, *names: str, low: float, high: float) -> float:
        value = self.optional_number(*names, low=low, high=high)
        if value is None:
            raise self._missing(names)
        return value

    def boolean(self, *names: str, default: bool) -> bool:
        value: bool | None = self._checked(names, bool, "must be true or false")
        return default if value is None else value

    def text(self, *names: str, default: str) -> str:
        value: str | None = self._checked(names, str, "must be a text")
        return default if value is None else value

    def only(self, name: str, supported: object) -> None:
        """Refuse values other than `supported`."""
        value = self.raw(name)
        if value is not None and (type(value) is not type(supported) or value != supported):
            raise UnsupportedError(
                f"config.json: {self._shown_name(name)} {shown(value)} is not supported, only "
                f"{shown(supported)}; {OTHER_MODEL}."
            )

    def refuse(self, name: str) -> None:
        """Refuse a feature that any value switches on."""
        value = self.raw(name)
        if value is not None:
            raise UnsupportedError(
                f"config.json: {self._shown_name(name)} {shown(value)} is not supported; "
                f"{OTHER_MODEL}."
            )

    def refuse_unread(self, name: str) -> None:
        """Refuse an override whose key was never read: it would have no effect."""
        if name in self.asked:
            return
        near = meant(name, self.asked)
        raise UsageError(
            f"The config override {shown(name)} is not a key that lowtide reads.{near}"
        )

    def error(self, name: str, problem: str) -> ConfigError:
        [own] = self._own((name,))
        value = shown(self.values[own])
        return ConfigError(f"{self.file}: {self.prefix}{own} {value} {problem}.")

    def _checked(
        self,
        names: tuple[str, ...],
        kind: type | UnionType,
        must: str,
        low: float | None = None,
        high: float = math.inf,
    ) -> Any:
        """Return the value, if any, after checking its kind and, with `low`, its range."""
        value: Any = self.raw(*names)
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if value is not None and not (is_kind and (low is None or low <= value <= high)):
            raise self.error(self._present(names), must)
        return value

    def _missing(self, names: tuple[str, ...]) -> ConfigError:
        return ConfigError(f"{self.file} has no {self.prefix}{' or '.join(self._own(names))}.")

    def _present(self, names: tuple[str, ...]) -> str:
        return next(name for name in self._own(names) if self.values.get(name) is not None)

    def _shown_name(self, name: str) -> str:
        return self.prefix + self._own((name,))[0]

    def _own(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._own_names.get(name, name) for name in names)
