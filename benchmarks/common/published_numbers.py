"""Published numbers beside those that are found here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from common.record import Recorder, Row, say


class Numbers:
    """Writes published numbers with what is found here, all in one setting."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def write(
        self,
        place: str,
        of: str,
        published: float,
        values: Sequence[float],
        *,
        neutral: float = 1.0,
        repeats: str = "",
        details: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """An arithmetic mean over cases, as papers have it.

        neutral: the value without any effect, 1 of a ratio and 0 of an amount; repeats: the place
        whose number is said again here; details: what else the row tells.
        """
        here = float(np.mean(values))
        row: Row = {"place": place, "of": of, "published": published, "here": here}
        row |= {"neutral": neutral, "num_cases": len(values)}
        row |= {"least": float(min(values)), "most": float(max(values))}
        if min(values) > 0:
            row["geometric_mean"] = float(np.exp(np.mean(np.log(values))))
        row |= details
        if repeats:
            row["repeats"] = repeats
        self._recorder.write("number", row)
        say(f"{place}, {of}: {here:.3f}, published {published:.3g}")

    def fitted(self, place: str, of: str, published: float, here: float) -> None:
        """A number that the machine was fitted to: no result."""
        row: Row = {"place": place, "of": of, "published": published, "here": here}
        self._recorder.write("fitted", row)
