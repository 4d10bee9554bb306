"""How long a layer's caller stays away: time in which the link to a device has nothing demanded."""

from __future__ import annotations

from time import perf_counter


class AwayTime:
    """Times from the end of each layer's work to the next layer's demand: attention and router,
    behind the last layer also the head, sampling and the embedding.

    Seconds of the clock, whatever computes meanwhile. The lesser of the last two counts, so that a
    pause between two requests is taken for no pass's end.
    """

    def __init__(self, num_layers: int) -> None:
        self._last_s: list[tuple[float, ...]] = [()] * num_layers
        self._left: tuple[int, float] | None = None

    def leave(self, layer: int) -> None:
        """A layer's work has been queued: its caller goes on."""
        self._left = (layer, perf_counter())

    def come_back(self) -> None:
        """The next layer's demand is known."""
        if self._left is not None:
            layer, left_s = self._left
            self._last_s[layer] = (*self._last_s[layer][-1:], perf_counter() - left_s)
            self._left = None

    def expected_s(self, layer: int, known_s: float) -> float:
        """What is to be expected behind a layer; `known_s` until it has been seen twice."""
        seen = self._last_s[layer]
        return min(seen) if len(seen) == 2 else known_s
