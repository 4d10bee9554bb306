"""A pass' graph for any counts, with sizes as sums of counts times bytes.

The model's own forward is registered at a few concrete counts. Each time it must take the same
transients, and each size must be a whole number of bytes per count. The coefficients are solved for
and checked against every sample. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core import ALIGNMENT, IntArray, align_up
from lowtide.errors import InternalError
from lowtide.memory.chunking import (
    OPERATOR_TILES,
    TILE_ROWS,
    Counts,
    at_most,
    chunk_rows,
    longest_chunk,
    longest_tile,
    window_rows,
)
from lowtide.memory.planner import Graph, LibraryOutput, Moment, Transient

SYMBOLS = (
    *("1", "tokens", "keys", "logit rows", "tile", "attention tile", "attention window"),
    *("logits tile", *OPERATOR_TILES),
)

_SYMBOLS_OF = {
    operator: (operator, "attention window") if operator == "attention" else (operator,)
    for operator in OPERATOR_TILES
}
"""Symbols that decrease with shorter chunks of an operator."""

HEAD_ROWS = 16
"""Rows of logits are computed in multiples of this."""


def symbols(counts: Counts, chunks: Mapping[str, int]) -> IntArray:
    """Return the value of each of `SYMBOLS` in a pass of exactly these counts."""
    tiles = [
        longest_tile(counts.tokens, TILE_ROWS),
        longest_tile(counts.block, OPERATOR_TILES["attention"]),
    ]
    longest = {op: longest_chunk(counts, op, chunks) for op in OPERATOR_TILES}
    return _values(counts, chunks, tiles, longest)


def bounds(counts: Counts, chunks: Mapping[str, int]) -> IntArray:
    """Return upper bounds of `SYMBOLS` for all passes of up to these counts."""
    tiles = [at_most(counts.tokens, TILE_ROWS), at_most(counts.block, OPERATOR_TILES["attention"])]
    longest = {
        op: at_most(counts.rows_at_once(op), chunk_rows(counts, op, chunks))
        for op in OPERATOR_TILES
    }
    return _values(counts, chunks, tiles, longest)


def _values(
    counts: Counts, chunks: Mapping[str, int], tiles: list[int], longest: dict[str, int]
) -> IntArray:
    window = window_rows(counts.tokens, chunk_rows(counts, "attention", chunks))
    longest["logits"] = align_up(longest["logits"], HEAD_ROWS)
    head_tile = min(longest["logits"], OPERATOR_TILES["logits"])
    known = [1, counts.tokens, counts.keys, counts.logit_rows, *tiles, window, head_tile]
    return np.array([*known, *longest.values()], np.int64)


@dataclass(frozen=True)
class Sample:
    """A registered pass."""

    counts: Counts
    chunks: Mapping[str, int]
    graph: Graph


@dataclass(frozen=True)
class Template:
    """A graph with symbolic sizes.

    `sizes` [transients, symbols] and `library` [outputs of all moments, symbols] in bytes; `alive`
    [moments, transients] and `holds` [moments, outputs] are 1 where a moment has it.
    """

    graph: Graph  # of the first sample
    sizes: IntArray
    library: IntArray
    alive: IntArray
    holds: IntArray

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Template:
        """Fit a template to registered passes.

        Raises InternalError if passes differ in more than counts, or sizes are not proportional to
        counts.
        """
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
        coefficients = _solve(values, library.reshape(len(samples), -1), outputs).T
        if coefficients[:, -len(OPERATOR_TILES) :].any():
            raise InternalError("What a library holds depends on how many tiles run together.")
        return cls(
            first,
            _solve(values, sizes, names).T,
            coefficients,
            _membership([moment.alive for moment in first.moments], len(names)),
            _membership(_numbered(first.moments), len(outputs)),
        )

    def joined(self, other: Template) -> Template:
        """Return the template of a pass that does both, one after the other."""
        first = list(self.graph.transients)
        indexes: list[int] = []  # in the joined graph, of the transients of `other`
        known = {transient.path: i for i, transient in enumerate(first)}
        new: list[int] = []
        for i, transient in enumerate(other.graph.transients):
            if transient.path not in known:
                known[transient.path] = len(first)
                beside = tuple(indexes[j] for j in transient.beside)
                first.append(transient._replace(beside=beside))
                new.append(i)
            indexes.append(known[transient.path])
        moments = list(self.graph.moments)
        library = [self.library]
        seen = {(moment.alive, _names(moment)) for moment in moments}
        for moment, numbers in zip(
            other.graph.moments, _numbered(other.graph.moments), strict=True
        ):
            alive = tuple(indexes[i] for i in moment.alive)
            if (alive, _names(moment)) not in seen:
                moments.append(moment._replace(alive=alive))
                library.append(other.library[numbers.start : numbers.stop])
        joined = np.concatenate(library)
        return Template(
            Graph(tuple(first), tuple(moments)),
            np.concatenate([self.sizes, other.sizes[new]]),
            joined,
            _membership([moment.alive for moment in moments], len(first)),
            _membership(_numbered(moments), len(joined)),
        )

    def at(self, values: IntArray) -> Graph:
        """Return the graph for values of `SYMBOLS`."""
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
        """Return the most bytes of the range alive together, and the moment; quicker than `at`.

        The result is a lower bound of the placement of `at`.
        """
        in_range = self.alive @ self._aligned(values)
        moment = int(in_range.argmax())
        return int(in_range[moment]), moment

    def alive_bytes(self, moment: int, values: IntArray) -> int:
        """Return the bytes of the range alive at a moment."""
        return int(self.alive[moment] @ self._aligned(values))

    def library_bytes(self, values: IntArray) -> int:
        """Return the most bytes that libraries hold together, for any number of tiles per chunk."""
        return int((self.holds @ (self.library @ values)).max())

    def _aligned(self, values: IntArray) -> IntArray:
        aligned: IntArray = -(-(self.sizes @ values) // ALIGNMENT) * ALIGNMENT
        return aligned

    def grows_with(self, moment: int, operator: str) -> bool:
        """Return True if longer chunks of an operator increase the memory at a moment."""
        columns = [i for i, symbol in enumerate(SYMBOLS) if symbol in _SYMBOLS_OF[operator]]
        return bool((self.alive[moment] @ self.sizes[:, columns] > 0).any())


def _form(graph: Graph) -> object:
    """Return everything but the sizes."""
    return (
        [(transient.path, transient.beside) for transient in graph.transients],
        [(moment.alive, _names(moment)) for moment in graph.moments],
    )


def _names(moment: Moment) -> tuple[str, ...]:
    return tuple(output.name for output in moment.library)


def _outputs(graph: Graph) -> list[int]:
    return [output.num_bytes for moment in graph.moments for output in moment.library]


def _numbered(moments: Sequence[Moment]) -> list[range]:
    """Number the outputs of all moments consecutively."""
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
    """Solve for the bytes per symbol: [symbols, sizes].

    values: [samples, symbols]; sizes: [samples, ...].
    """
    varied = np.flatnonzero((values != values[0]).any(0) | (np.arange(values.shape[1]) == 0))
    if np.linalg.matrix_rank(values[:, varied]) < len(varied):
        raise InternalError("The registered passes do not tell what sizes depend on.")
    found = np.linalg.lstsq(values[:, varied].astype(float), sizes.astype(float), rcond=None)[0]
    coefficients: IntArray = np.zeros((values.shape[1], sizes.shape[1]), np.int64)
    coefficients[varied] = np.rint(found)
    wrong = np.flatnonzero((values @ coefficients != sizes).any(0) | (coefficients < 0).any(0))
    if len(wrong):
        raise InternalError(
            f"The size of {names[wrong[0]]} does not grow with counts in proportion: "
            f"{sizes[:, wrong[0]].tolist()} bytes for {values.tolist()}."
        )
    return coefficients
