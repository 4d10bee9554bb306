"""Places a pass' transient buffers in one memory range.

A pass is a graph of numbers: its transients, the sets of transients alive together, and the moments
at which one is added. A registrar draws it from one run of the model's own forward
(`memory/workspace.py`). Offsets are by first fit, as in Mosaic's planner: each transient gets the
lowest place free of all transients that are alive with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lowtide.core import align_up

Path = tuple[str, ...]
"""Identity of a transient: names taken, and with a minus released, in the open scopes so far.

Equal layers have equal paths, and so share their places.
"""


class Transient(NamedTuple):
    """A buffer. `beside`: indices, ascending, of buffers alive when it is taken."""

    path: Path
    num_bytes: int
    beside: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.path[-1]


class LibraryOutput(NamedTuple):
    """Memory that an operator without an `out=` form allocates itself, outside the range."""

    name: str
    num_bytes: int


class Moment(NamedTuple):
    """Everything alive just after an addition."""

    alive: tuple[int, ...]
    library: tuple[LibraryOutput, ...]


class Place(NamedTuple):
    """Bytes `start` to `start + num_bytes` of the range, for a transient of at most this size."""

    start: int
    num_bytes: int

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True)
class ArenaPlaces:
    """Places of a graph's transients, by path, in a range of `arena_bytes`."""

    places: Mapping[Path, Place]
    arena_bytes: int


UNPLANNED = ArenaPlaces({}, 0)

MAX_TRIES = 8
"""Orders of each kind that are tried."""


class Recording:
    """Record of one pass, or of several that share a plan, by a registrar.

    A transient taken in several sizes gets the largest, and conflicts with every buffer that was
    ever alive with it.
    """

    def __init__(self) -> None:
        self._indexes: dict[Path, int] = {}
        self._num_bytes: list[int] = []
        self._beside: list[set[int]] = []
        self._moments: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}

    def note(self, alive: Sequence[tuple[Path, int]], library: Sequence[LibraryOutput]) -> None:
        """Record the live buffers and their bytes, in the order of taking, after each change."""
        indexes = [self._index(path) for path, _ in alive]
        for position, (i, (_, num_bytes)) in enumerate(zip(indexes, alive, strict=True)):
            self._num_bytes[i] = max(self._num_bytes[i], num_bytes)
            self._beside[i].update(indexes[:position])
        key = (tuple(indexes), tuple(output.name for output in library))
        held = self._moments.setdefault(key, [0] * len(library))
        for j, output in enumerate(library):
            held[j] = max(held[j], output.num_bytes)

    def graph(self) -> Graph:
        transients = zip(self._indexes, self._num_bytes, self._beside, strict=True)
        return Graph(
            tuple(
                Transient(path, num_bytes, tuple(sorted(beside)))
                for path, num_bytes, beside in transients
            ),
            tuple(
                Moment(alive, tuple(map(LibraryOutput, names, held)))
                for (alive, names), held in self._moments.items()
            ),
        )

    def _index(self, path: Path) -> int:
        if path not in self._indexes:
            self._num_bytes.append(0)
            self._beside.append(set())
        return self._indexes.setdefault(path, len(self._indexes))


@dataclass(frozen=True)
class Graph:
    """Transients of a pass, in the order in which they are first taken."""

    transients: tuple[Transient, ...]
    moments: tuple[Moment, ...]

    @cached_property
    def placement(self) -> ArenaPlaces:
        """First-fit placement in the order of taking or by size.

        Transients that end too high are moved to earlier in the order, a few times.
        """
        indexes = range(len(self.transients))
        largest_first = sorted(indexes, key=lambda i: -self.transients[i].num_bytes)
        best = first_fit(self, indexes)
        for order in (list(indexes), largest_first):
            for _ in range(MAX_TRIES):
                if best.arena_bytes == self.least_bytes:
                    return best
                placement = first_fit(self, order)
                best = min(best, placement, key=lambda placement: placement.arena_bytes)
                order = self._sooner(order, placement)
        return best

    @cached_property
    def beside(self) -> list[set[int]]:
        """Transients alive together with each one at some time, taken before or after it."""
        beside = [set(transient.beside) for transient in self.transients]
        for i, transient in enumerate(self.transients):
            for other in transient.beside:
                beside[other].add(i)
        return beside

    @cached_property
    def least_bytes(self) -> int:
        """Most bytes alive together, the lower bound of every placement."""
        return max((self.alive_bytes(moment) for moment in self.moments), default=0)

    @cached_property
    def library_bytes(self) -> int:
        """Most bytes that libraries hold together."""
        return max((_library_bytes(moment) for moment in self.moments), default=0)

    @property
    def needed_bytes(self) -> int:
        """Bytes that a plan needs: the range, all of which stays in memory, and libraries."""
        return self.placement.arena_bytes + self.library_bytes

    @property
    def needed_parts(self) -> tuple[tuple[str, int], ...]:
        """Parts of `needed_bytes` by name, without gaps in the range.

        They are the transients at the range's peak, and the library outputs at theirs, perhaps
        another moment.
        """
        nothing = Moment((), ())
        range_peak = max(self.moments, key=self.alive_bytes, default=nothing)
        library_peak = max(self.moments, key=_library_bytes, default=nothing)
        alive = [self.transients[i] for i in range_peak.alive]
        return (
            *((transient.name, align_up(transient.num_bytes)) for transient in alive),
            *library_peak.library,
        )

    def alive_bytes(self, moment: Moment) -> int:
        """Return the bytes of the range alive at a moment, without libraries' outputs."""
        return sum(align_up(self.transients[i].num_bytes) for i in moment.alive)

    def _sooner(self, order: list[int], placement: ArenaPlaces) -> list[int]:
        """Move transients that end above the lower bound to half their position in the order."""
        order = list(order)
        stops = [placement.places[transient.path].stop for transient in self.transients]
        for i in [i for i in order if stops[i] > self.least_bytes]:
            position = order.index(i)
            order.insert(position // 2, order.pop(position))
        return order


def first_fit(graph: Graph, order: Sequence[int]) -> ArenaPlaces:
    """Place each transient, in this order, at the lowest place that none beside it has."""
    places: dict[int, Place] = {}
    for i in order:
        num_bytes = align_up(graph.transients[i].num_bytes)
        start = lowest_gap((places[j] for j in graph.beside[i] if j in places), num_bytes)
        places[i] = Place(start, num_bytes)
    return ArenaPlaces(
        {graph.transients[i].path: place for i, place in places.items()},
        max((place.stop for place in places.values()), default=0),
    )


def lowest_gap(taken: Iterable[Place], num_bytes: int) -> int:
    """Return the lowest start of `num_bytes` free bytes between taken places."""
    start = 0
    for place in sorted(taken):
        if place.start - start >= num_bytes:
            break
        start = max(start, place.stop)
    return start


def _library_bytes(moment: Moment) -> int:
    return sum(output.num_bytes for output in moment.library)
