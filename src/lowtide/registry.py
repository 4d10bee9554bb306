"""Registries of names that users give: built-in, registered, and from entry points.

A distribution adds to a group by an entry point, which is imported when its name is used:

    [project.entry-points."lowtide.policies"]
    mine = "my_package.policies:MINE"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import count
from typing import TypeVar
from weakref import WeakValueDictionary

from lowtide.errors import UsageError

T = TypeVar("T")

POLICIES = "lowtide.policies"
DEVICES = "lowtide.devices"
VERBS = "lowtide.verbs"

WORKBENCH_OPTIONS = "lowtide.lab.options"
"""Module of the options of the workbench's verbs, which the environment and files may set."""

_WORKBENCH: Mapping[str, Mapping[str, str]] = {
    DEVICES: {"emulated": "lowtide.lab.emulated.kind:EMULATED"},
    POLICIES: {
        "all-host": "lowtide.lab.baselines:ALL_HOST",
        "on-demand": "lowtide.lab.baselines:ON_DEMAND",
        "static": "lowtide.lab.baselines:STATIC",
        "tide-released": "lowtide.lab.baselines:TIDE_RELEASED",
        "dali-exact": "lowtide.lab.baselines:DALI_EXACT",
        "dali-beam": "lowtide.lab.baselines:DALI_BEAM",
        "fiddler": "lowtide.lab.baselines:FIDDLER",
        "hybrimoe": "lowtide.lab.baselines:HYBRIMOE",
        "layer-split": "lowtide.lab.baselines:LAYER_SPLIT",
        "edgemoe": "lowtide.lab.baselines:EDGEMOE",
        "moe-lightning": "lowtide.lab.baselines:MOE_LIGHTNING",
    },
}
"""Entry points of `lowtide.lab`.

They are listed here because a source tree that is run without being installed (`make gpu`) has no
metadata.
"""


@cache
def extensions(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, the workbench's first."""
    own = {
        name: EntryPoint(name, value, group) for name, value in _WORKBENCH.get(group, {}).items()
    }
    return {**{point.name: point for point in entry_points(group=group)}, **own}


class Registry(MutableMapping[str, T]):
    """Registry of one group of names and their values, all of one type."""

    def __init__(self, group: str, noun: str, kind: type[T], own: Mapping[str, T]) -> None:
        """Create the registry; noun: of one entry, for messages."""
        self._group, self._noun, self._kind = group, noun, kind
        self._known = dict(own)
        self._unlisted: WeakValueDictionary[str, T] = WeakValueDictionary()

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in extensions(self._group) or name in self._unlisted

    def __iter__(self) -> Iterator[str]:
        """Iterate over every name that is listed; nothing is imported."""
        return iter(dict.fromkeys([*self._known, *extensions(self._group)]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> T:
        """Return a value.

        Raises KeyError, or UsageError for an entry point that cannot be imported.
        """
        if name in self._unlisted:
            return self._unlisted[name]
        if name not in self._known:
            self._known[name] = self._loaded(extensions(self._group)[name])
        return self._known[name]

    def name_of(self, value: T) -> str:
        """Return the name of this very value, such as `recipe-1` where it was given none.

        A name of that kind is not listed, and is free again once nothing refers to the value.
        """
        for names in (self._known, self._unlisted):
            for name, known in list(names.items()):
                if known is value:
                    return name
        kind = self._kind.__name__.lower()
        name = next(name for number in count(1) if (name := f"{kind}-{number}") not in self)
        self._unlisted[name] = self._checked(value, name)
        return name

    def register(self, name: str, value: T) -> None:
        """Add an entry in this process; raises UsageError for a name that is taken."""
        if name in self:
            raise UsageError(f"There is a {self._noun} {name!r} already; choose another name.")
        self._known[name] = self._checked(value, name)

    def __setitem__(self, name: str, value: T) -> None:
        self._known[name] = self._checked(value, name)

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def _loaded(self, point: EntryPoint) -> T:
        try:
            value = point.load()
        except Exception as error:  # whatever a stranger's module raises
            raise UsageError(
                f"The {self._noun} {point.name!r} cannot be imported from {point.value}: {error}. "
                "Mend the package that names it, or uninstall it."
            ) from error
        return self._checked(value, f"{point.name} ({point.value})")

    def _checked(self, value: object, name: str) -> T:
        if not isinstance(value, self._kind):
            raise UsageError(
                f"The {self._noun} {name} must be a {self._kind.__name__}, not {value!r:.80}; mend "
                "the code that registers it."
            )
        return value
