"""Idle time of the link to a device between one layer's work and the next layer's demand."""

from __future__ import annotations

from time import perf_counter


class IdleTime:
    """Measures the time from the end of each layer's work to the next layer's demand.

    It includes attention and router and, after the last layer, the head, sampling and the
    embedding, in wall-clock seconds. The shorter of the last two counts, so that a pause between
    requests is not taken for the end of a pass.
    """

    def __init__(self, num_layers: int) -> None:
        self._last_s: list[tuple[float, ...]] = [()] * num_layers
        self._begun: tuple[int, float] | None = None

    def begin(self, layer: int) -> None:
        """Record that a layer's work has been queued."""
        self._begun = (layer, perf_counter())

    def end(self) -> None:
        """Record that the next layer's demand is known."""
        if self._begun is not None:
            layer, left_s = self._begun
            self._last_s[layer] = (*self._last_s[layer][-1:], perf_counter() - left_s)
            self._begun = None

    def forget(self) -> None:
        """Forget the work that was queued last: more was queued since, without a look."""
        self._begun = None

    def expected_s(self, layer: int, known_s: float) -> float:
        """Return the expected time after a layer; `known_s` until it has been measured twice."""
        seen = self._last_s[layer]
        return min(seen) if len(seen) == 2 else known_s
