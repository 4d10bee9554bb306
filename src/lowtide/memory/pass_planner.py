"""Plans of passes by their counts: chunks, placement and memory. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lowtide.errors import PlanError
from lowtide.memory.chunking import (
    EACH_TILE,
    OPERATOR_TILES,
    TILE_ROWS,
    Counts,
    LogitNeeds,
    num_tiles,
    one_more,
)
from lowtide.memory.planner import ArenaPlaces, Graph
from lowtide.memory.template import Template, bounds

MAX_PLANS = 128
"""Number of cached plans; a request needs at most 16."""


@dataclass(frozen=True)
class PassPlan:
    """Plan of passes of up to these counts: chunks, placement and memory.

    `binding`: the operator whose rows cause the peak of the range, or the name of the largest part.
    """

    counts: Counts
    chunks: Mapping[str, int]
    placement: ArenaPlaces
    library_bytes: int  # most that libraries hold outside the range
    binding: str

    @property
    def needed_bytes(self) -> int:
        """Bytes of the range, all of which stays in memory, and of libraries."""
        return self.placement.arena_bytes + self.library_bytes


@dataclass(frozen=True, repr=False, eq=False)
class PassPlanner:
    """Cached plans of one model's bidirectional passes.

    short: graph of all passes no longer than a tile.
    head_of: makes the template of the logits of one kind, computed from hidden states after a pass.
    """

    short: Graph
    forward: Template
    head_of: Callable[[LogitNeeds], Template]
    by_tile: frozenset[str] = frozenset()
    """Operators that take each tile by itself, however much memory there is."""
    _templates: dict[tuple[LogitNeeds, ...], Template] = field(default_factory=dict)
    _plans: dict[tuple[Counts, int, int], PassPlan] = field(default_factory=dict)
    _least_bytes: dict[Counts, int] = field(default_factory=dict)

    def plan(self, counts: Counts, free_bytes: int, range_bytes: int | None = None) -> PassPlan:
        """Return the plan with the fewest chunks that fits.

        Raises PlanError, with the numbers, if none does. range_bytes: share of `free_bytes` for the
        range, by default all.
        """
        key = (counts, free_bytes, free_bytes if range_bytes is None else range_bytes)
        if key not in self._plans:
            if len(self._plans) == MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._search(*key)
        return self._plans[key]

    def held(self, plan: PassPlan) -> tuple[tuple[str, int], ...]:
        """List the parts of a plan's memory by name, with their bytes."""
        if plan.counts.tokens <= TILE_ROWS:
            return self.short.needed_parts
        return self.template(plan.counts).at(bounds(plan.counts, plan.chunks)).needed_parts

    def least_bytes(self, counts: Counts) -> int:
        """Return the bytes needed by all passes of up to these counts, with one tile per chunk."""
        if counts not in self._least_bytes:
            if len(self._least_bytes) == MAX_PLANS:
                self._least_bytes.clear()
            graph = self._needed(counts, self._most_chunks(counts))
            self._least_bytes[counts] = graph.needed_bytes
        return self._least_bytes[counts]

    def whole_bytes(self, counts: Counts) -> int:
        """Return the bytes needed if every operator takes all rows at once."""
        return self._needed(counts, self._fewest_chunks()).needed_bytes

    def _search(self, counts: Counts, free_bytes: int, range_bytes: int) -> PassPlan:
        if counts.tokens <= TILE_ROWS:
            return self._short_plan(counts, free_bytes, range_bytes)
        template, chunks = self.template(counts), self._fewest_chunks()
        library_bytes = template.library_bytes(bounds(counts, chunks))
        limit_bytes = min(range_bytes, free_bytes - library_bytes)  # of the range
        while True:
            values = bounds(counts, chunks)
            peak_bytes, moment = template.peak(values)
            if peak_bytes <= limit_bytes:
                graph = template.at(values)
                if graph.placement.arena_bytes <= limit_bytes:
                    binding = self._binding(template, graph, moment)
                    return _plan(counts, chunks, graph, binding)
            operator = self._divisible(template, counts, chunks, moment)
            if operator is None:
                raise self._refusal(counts, min(free_bytes, range_bytes))
            chunks[operator] = _divided(template, counts, chunks, operator, moment, limit_bytes)

    def _short_plan(self, counts: Counts, free_bytes: int, range_bytes: int) -> PassPlan:
        if self.short.needed_bytes > free_bytes or self.short.placement.arena_bytes > range_bytes:
            raise self._refusal(counts, min(free_bytes, range_bytes))
        binding = max(self.short.needed_parts, key=lambda held: held[1])[0]
        return _plan(counts, EACH_TILE, self.short, binding)

    def template(self, counts: Counts) -> Template:
        """Return the template of long passes with these statistics of logits, made once."""
        if counts.asked not in self._templates:
            template = self.forward
            for asked in counts.asked:
                template = template.joined(self.head_of(asked))
            self._templates[counts.asked] = template
        return self._templates[counts.asked]

    def _needed(self, counts: Counts, chunks: Mapping[str, int]) -> Graph:
        """Return the graph of the short passes or of the long one, whichever needs more."""
        if counts.tokens <= TILE_ROWS:
            return self.short
        graph = self.template(counts).at(bounds(counts, chunks))
        return max(graph, self.short, key=lambda graph: graph.needed_bytes)

    def _divisible(
        self, template: Template, counts: Counts, chunks: Mapping[str, int], moment: int
    ) -> str | None:
        """Return the operator whose rows are alive at the moment, if they can be fewer."""
        for operator in chunks:
            if template.grows_with(moment, operator) and one_more(counts, operator, chunks):
                return operator
        return None

    def _binding(self, template: Template, graph: Graph, moment: int) -> str:
        for operator in OPERATOR_TILES:
            if template.grows_with(moment, operator):
                return operator
        return max(graph.needed_parts, key=lambda held: held[1])[0]

    def _fewest_chunks(self) -> dict[str, int]:
        return {op: 1 for op in OPERATOR_TILES if op not in self.by_tile}

    def _most_chunks(self, counts: Counts) -> dict[str, int]:
        return {op: num_tiles(counts.rows_of(op), rows) for op, rows in OPERATOR_TILES.items()}

    def _refusal(self, counts: Counts, free_bytes: int) -> PlanError:
        graph = self._needed(counts, self._most_chunks(counts))
        largest = sorted(graph.needed_parts, key=lambda held: -held[1])[:3]
        names = ", ".join(f"{name} {num_bytes}" for name, num_bytes in largest)
        return PlanError(
            f"A pass of {counts.tokens} tokens needs {graph.needed_bytes} bytes of workspace "
            f"however its operators are divided, and {free_bytes} are free; most of it is {names}. "
            "Lower `context`, or raise `host_memory`."
        )


def _divided(
    template: Template,
    counts: Counts,
    chunks: Mapping[str, int],
    operator: str,
    moment: int,
    range_bytes: int,
) -> int:
    """Return the least larger number of chunks that fits at a moment, else the greatest.

    Smaller numbers would be divided further: chunks of other operators only add to that memory.
    """
    most = num_tiles(counts.rows_of(operator), OPERATOR_TILES[operator])

    def fits(together: int) -> bool:
        values = bounds(counts, {**chunks, operator: -(-most // together)})
        return template.alive_bytes(moment, values) <= range_bytes

    fewer = range(1, -(-most // chunks[operator]))  # tiles together
    together = bisect_left(fewer, True, key=lambda together: not fits(together))
    return -(-most // max(1, together))


def _plan(counts: Counts, chunks: Mapping[str, int], graph: Graph, binding: str) -> PassPlan:
    return PassPlan(counts, chunks, graph.placement, graph.library_bytes, binding)
