"""The plan of a step of some shape: chunk counts, places, and what they need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lowtide.errors import PlanError
from lowtide.memory.chunking import OPERATOR_TILES, Counts, bucket, num_tiles, one_more
from lowtide.memory.planner import Graph, Placement
from lowtide.memory.template import Template, symbols

GRANULE_TOKENS = 16
"""Between two such multiples a tile may have a remainder, and need more than the longer pass."""


@dataclass(frozen=True)
class PassPlan:
    """How a pass of some counts runs. `binding`: the operator whose rows make the peak, or the
    name of the largest buffer there."""

    counts: Counts
    chunks: Mapping[str, int]
    placement: Placement
    needed_bytes: int  # library outputs included
    binding: str


@dataclass(frozen=True)
class PassPlanner:
    """Plans of one model's bidirectional passes, remembered by what they were asked for."""

    template: Template
    by_tile: frozenset[str] = frozenset()
    """Operators that take each tile by itself, however much room there is."""
    _plans: dict[tuple[Counts, int], PassPlan] = field(default_factory=dict, repr=False)

    def plan(self, counts: Counts, free_bytes: int) -> PassPlan:
        """With the fewest chunks that fit. Raises PlanError, with the numbers, where none does."""
        key = (counts, free_bytes)
        if key not in self._plans:
            self._plans[key] = self._search(counts, free_bytes)
        return self._plans[key]

    def plan_step(self, counts: Counts, max_masked: int, free_bytes: int) -> PassPlan:
        """`plan` for a step of a request that began with `max_masked` masks: one of a few."""
        masked = bucket(counts.logit_rows, max_masked)
        return self.plan(counts._replace(logit_rows=masked), free_bytes)

    def least_bytes(self, counts: Counts) -> int:
        """Needed where every tile is by itself."""
        return self._needed(counts, self._most_chunks(counts))[1]

    def longest(
        self, counts_of: Callable[[int], Counts], free_bytes_of: Callable[[int], int], limit: int
    ) -> int:
        """The most tokens, up to `limit`, of a pass that fits; 0 where none does.

        counts_of, free_bytes_of: of so many tokens; the first does not shrink, the second does not
        grow with them.
        """

        def fits(num_tokens: int) -> bool:
            return self.least_bytes(counts_of(num_tokens)) <= free_bytes_of(num_tokens)

        low, high = 0, limit // GRANULE_TOKENS + 1  # in granules: fits, does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * GRANULE_TOKENS) else (low, middle)
        first = low * GRANULE_TOKENS
        candidates = range(min(limit, first + GRANULE_TOKENS - 1), first, -1)
        return next((num_tokens for num_tokens in candidates if fits(num_tokens)), first)

    def _search(self, counts: Counts, free_bytes: int) -> PassPlan:
        chunks = {op: 1 for op in OPERATOR_TILES if op not in self.by_tile}
        while True:
            peak_bytes, moment = self.template.peak(symbols(counts, chunks))
            if peak_bytes <= free_bytes:
                graph, needed_bytes = self._needed(counts, chunks)
                if needed_bytes <= free_bytes:
                    binding = self._binding(graph, moment)
                    return PassPlan(counts, chunks, graph.placement, needed_bytes, binding)
            operator = self._divisible(counts, chunks, moment)
            if operator is None:
                raise self._refusal(counts, free_bytes)
            chunks[operator] = one_more(counts, operator, chunks) or 1

    def _needed(self, counts: Counts, chunks: Mapping[str, int]) -> tuple[Graph, int]:
        graph = self.template.at(symbols(counts, chunks))
        return graph, graph.needed_bytes

    def _divisible(self, counts: Counts, chunks: Mapping[str, int], moment: int) -> str | None:
        """The operator whose rows are alive at the moment, where they can be fewer."""
        for operator in chunks:
            if self.template.grows_with(moment, operator) and one_more(counts, operator, chunks):
                return operator
        return None

    def _binding(self, graph: Graph, moment: int) -> str:
        for operator in OPERATOR_TILES:
            if self.template.grows_with(moment, operator):
                return operator
        return max(graph.peak, key=lambda held: held[1])[0]

    def _most_chunks(self, counts: Counts) -> dict[str, int]:
        return {op: num_tiles(counts.rows_of(op), rows) for op, rows in OPERATOR_TILES.items()}

    def _refusal(self, counts: Counts, free_bytes: int) -> PlanError:
        graph, needed_bytes = self._needed(counts, self._most_chunks(counts))
        largest = sorted(graph.peak, key=lambda held: -held[1])[:3]
        names = ", ".join(f"{name} {num_bytes}" for name, num_bytes in largest)
        return PlanError(
            f"A pass of {counts.tokens} tokens needs {needed_bytes} bytes of workspace however its "
            f"operators are divided, and {free_bytes} are free; most of it is {names}. Lower "
            "--context, or raise --host-memory."
        )
