"""The graph of a pass of any counts: sizes as sums of counts times bytes.

A model's own forward is registered at a few concrete counts. What is taken has to be the same each
time, and each size a whole number of bytes for each count: that is looked for and then checked, by
every sample. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core import ALIGNMENT, IntArray
from lowtide.errors import InternalError
from lowtide.memory.chunking import OPERATOR_TILES, Counts, longest_chunk, longest_tile
from lowtide.memory.planner import Graph, LibraryOutput, Moment, Transient

SYMBOLS = ("1", "tokens", "keys", "tile", "attention tile", *OPERATOR_TILES)


def symbols(counts: Counts, chunks: Mapping[str, int]) -> IntArray:
    """The value of each of `SYMBOLS`."""
    tile, attention = (
        longest_tile(counts.tokens, OPERATOR_TILES[op]) for op in ("mlp", "attention")
    )
    longest = [longest_chunk(counts, operator, chunks) for operator in OPERATOR_TILES]
    return np.array([1, counts.tokens, counts.keys, tile, attention, *longest], np.int64)


@dataclass(frozen=True)
class Sample:
    """A pass that was registered."""

    counts: Counts
    chunks: Mapping[str, int]
    graph: Graph


@dataclass(frozen=True)
class Template:
    """A graph whose sizes are symbolic. `sizes` [transients, symbols] and `library` [outputs of
    all moments, symbols] in bytes; `alive` [moments, transients] and `holds` [moments, outputs]
    are 1 where a moment has it."""

    graph: Graph  # of the first sample
    sizes: IntArray
    library: IntArray
    alive: IntArray
    holds: IntArray

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Template:
        """Raises InternalError where passes differ in more than counts, or sizes do not grow with
        counts in proportion."""
        first = samples[0].graph
        for sample in samples:
            if _form(sample.graph) != _form(first):
                raise InternalError(
                    f"Passes of {sample.counts} and {samples[0].counts} take different buffers."
                )
        values = np.stack([symbols(sample.counts, sample.chunks) for sample in samples])
        sizes = np.array([[t.num_bytes for t in s.graph.transients] for s in samples], np.int64)
        library = np.array([_outputs(sample.graph) for sample in samples], np.int64)
        names = [transient.name for transient in first.transients]
        outputs = [output.name for moment in first.moments for output in moment.library]
        return cls(
            first,
            _solve(values, sizes, names).T,
            _solve(values, library.reshape(len(samples), -1), outputs).T,
            _membership([moment.alive for moment in first.moments], len(names)),
            _membership(_numbered(first.moments), len(outputs)),
        )

    def at(self, values: IntArray) -> Graph:
        """The graph for the values of `SYMBOLS`."""
        sizes, library = (self.sizes @ values).tolist(), (self.library @ values).tolist()
        transients = tuple(
            Transient(old.path, num_bytes, old.beside)
            for old, num_bytes in zip(self.graph.transients, sizes, strict=True)
        )
        numbered = _numbered(self.graph.moments)
        moments = tuple(
            Moment(
                old.alive,
                tuple(
                    LibraryOutput(output.name, library[i])
                    for output, i in zip(old.library, numbers, strict=True)
                ),
            )
            for old, numbers in zip(self.graph.moments, numbered, strict=True)
        )
        return Graph(transients, moments)

    def peak(self, values: IntArray) -> tuple[int, int]:
        """Most bytes that are alive together, and at which moment; quicker than `at`."""
        aligned = -(-(self.sizes @ values) // ALIGNMENT) * ALIGNMENT
        num_bytes = self.alive @ aligned + self.holds @ (self.library @ values)
        moment = int(num_bytes.argmax())
        return int(num_bytes[moment]), moment

    def grows_with(self, moment: int, symbol: str) -> bool:
        """Whether what is alive then is more for more of it."""
        column = SYMBOLS.index(symbol)
        in_range = self.alive[moment] @ self.sizes[:, column]
        return bool(in_range + self.holds[moment] @ self.library[:, column] > 0)


def _form(graph: Graph) -> object:
    """All but the sizes."""
    return (
        [(transient.path, transient.beside) for transient in graph.transients],
        [(m.alive, [output.name for output in m.library]) for m in graph.moments],
    )


def _outputs(graph: Graph) -> list[int]:
    return [output.num_bytes for moment in graph.moments for output in moment.library]


def _numbered(moments: Sequence[Moment]) -> list[range]:
    """The outputs of each moment, numbered through."""
    numbers, start = [], 0
    for moment in moments:
        numbers.append(range(start, start + len(moment.library)))
        start += len(moment.library)
    return numbers


def _membership(rows: Sequence[Sequence[int]], num_columns: int) -> IntArray:
    members = np.zeros((len(rows), num_columns), np.int64)
    for row, columns in zip(members, rows, strict=True):
        row[list(columns)] = 1
    return members


def _solve(values: IntArray, sizes: IntArray, names: Sequence[str]) -> IntArray:
    """Bytes for each symbol: [symbols, sizes]. values [samples, symbols], sizes [samples, ...]."""
    if np.linalg.matrix_rank(values) < values.shape[1]:
        raise InternalError("The registered passes do not tell what sizes depend on.")
    found = np.linalg.lstsq(values.astype(float), sizes.astype(float), rcond=None)[0]
    coefficients: IntArray = np.rint(found).astype(np.int64)
    wrong = np.flatnonzero((values @ coefficients != sizes).any(0))
    if len(wrong):
        raise InternalError(
            f"The size of {names[wrong[0]]} does not grow with counts in proportion: "
            f"{sizes[:, wrong[0]].tolist()} bytes for {values.tolist()}."
        )
    return coefficients
