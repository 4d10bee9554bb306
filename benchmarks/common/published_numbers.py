"""Published numbers beside those that are found here, and beside what experiments make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from common.record import Recorder, Row, say


class Numbers:
    """Writes published numbers with what is found here, and what an experiment makes of them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def write(
        self,
        place: str,
        of: str,
        published: float,
        values: Sequence[float],
        *,
        experiment: str = "",
        details: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """A mean over cases; experiment: what was otherwise, the published setting by default;
        details: what else the row tells."""
        here = float(np.exp(np.mean(np.log(values))))
        row: Row = {"place": place, "of": of, "published": published, "here": here}
        row |= {"arithmetic_mean": float(np.mean(values)), "num_cases": len(values)}
        row |= {"least": float(min(values)), "most": float(max(values))}
        row |= details
        if experiment:
            row["experiment"] = experiment
        self._recorder.write("experiment" if experiment else "number", row)
        told = f", {experiment}" if experiment else ""
        say(f"{place}, {of}{told}: {here:.3f}, published {published:g}")

    def fitted(self, place: str, of: str, published: float, here: float) -> None:
        """A number that the machine was fitted to: no result."""
        row: Row = {"place": place, "of": of, "published": published, "here": here}
        self._recorder.write("fitted", row)
