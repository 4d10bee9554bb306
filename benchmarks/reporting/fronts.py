"""The picture of docs/buddymoe.md: what each way with absent experts loses, beside its speed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowtide.lab.bench import Spread
from reporting.results import Line, Results
from reporting.tables import percent, turns_of

KINDS = {
    "exact": ("exact", "#000000"),
    "random": ("random", "#bbbbbb"),
    "drop": ("left out", "#ccbb44"),
    "cache-prior": ("cache-prior", "#228833"),
    "buddy": ("BuddyMoE", "#4477aa"),
    "late": ("ours", "#ee6677"),
}
"""Kinds of lanes, by the option `miss`: name on the page, and colour."""

# Text as text, and the same names of parts in every run.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "lowtide", "font.size": 8}
_SAID = "bars: two standard errors, range of turns; named and joined: no other may match it"
MIN_ANSWERS = 8
"""Turns of a lane whose speed is shown, at least: lanes differ by less than a few answers do."""


class Mark(NamedTuple):
    """One lane."""

    name: str
    kind: str  # of `KINDS`
    gain: Spread  # the more the better
    lost: float  # nats per token
    error: float

    def may_match(self, other: Mark) -> bool:
        """Return True if this mark may gain as much as `other` and lose as little.

        The ranges of turns and two standard errors of each decide.
        """
        least_lost, most_lost = self.lost - 2 * self.error, other.lost + 2 * other.error
        return self.gain.most >= other.gain.least and least_lost <= most_lost


class Panel(NamedTuple):
    """One model on one tier."""

    title: str
    gain: str  # what is gained, in words
    marks: tuple[Mark, ...]

    @property
    def front(self) -> list[Mark]:
        """Marks that no other mark matches, in the order of their gain."""
        best = [
            mark
            for mark in self.marks
            if not any(other.may_match(mark) for other in self.marks if other is not mark)
        ]
        return sorted(best, key=lambda mark: mark.gain.median)


def front_picture(results: Results) -> str | None:
    """The newest panels of each tier as one SVG; None where no lane was scored."""
    if not results.has("buddy"):
        return None
    panels = list(panels_of(results.newest_of_each("buddy", "tier")))
    return svg(panels) if panels else None


def shown_share(lines: Sequence[Line]) -> float:
    """The share of residents that pages show: the one nearest to 3 of 8."""
    shares = {line["resident_share"] for line in lines if "resident_share" in line.row}
    return float(min(shares, key=lambda share: abs(share - 0.375)))


def panels_of(lines: Sequence[Line]) -> Iterator[Panel]:
    """Beside speed and beside bytes, of the lanes at the share that pages show."""
    lanes = [line for line in lines if "loss_difference" in line.row]
    if not lanes:
        return
    shown = shown_share(lanes)
    chosen = [line for line in lanes if line["resident_share"] == shown]
    for (model, tier), group in groupby(chosen, lambda line: (line["model"], line["tier"])):
        title, own = f"{model}, {tier}, {percent(shown)} resident", list(group)
        timed = [mark for line in own if (mark := _timed_mark(line)) is not None]
        if timed:
            yield Panel(title, "tokens/s over exact", tuple(timed))
        most = next(line["bytes_per_pass"] for line in own if line["what"] == "exact")
        if most:
            saved = [_mark(line, _only(1 - line["bytes_per_pass"] / most)) for line in own]
            yield Panel(title, "share of exact's bytes not moved", tuple(saved))


def svg(panels: Sequence[Panel]) -> str:
    """Panels two to a row, and below them which colour is what."""
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.9 * num_columns, 3.7 * num_rows + 0.5), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        kinds = {mark.kind for panel in panels for mark in panel.marks}
        for name, colour in (KINDS[kind] for kind in KINDS if kind in kinds):
            figure.axes[0].plot([], [], "o", color=colour, label=name)
        figure.legend(loc="outside lower center", ncols=len(kinds), title=_SAID)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()


def _timed_mark(line: Line) -> Mark | None:
    """Rate a lane by its speed over the median of exact; None for too few turns."""
    turns = turns_of(line, "tokens_per_s", MIN_ANSWERS)
    if turns is None:
        return None
    of_exact = turns.median / line["speed_up"]
    return _mark(line, Spread(*(each / of_exact for each in turns)))


def _only(value: float) -> Spread:
    return Spread(value, value, value)


def _mark(line: Line, gain: Spread) -> Mark:
    lost, miss = line["loss_difference"], line["policy_options"].get("miss", "exact")
    return Mark(line["what"], miss, gain, lost["mean"], lost["error"] or 0.0)


def _draw(axes: Axes, panel: Panel) -> None:
    for mark in panel.marks:
        colour = KINDS[mark.kind][1]
        gain, around = mark.gain, {"yerr": 2 * mark.error, "fmt": "o", "color": colour}
        below_above = [[gain.median - gain.least], [gain.most - gain.median]]
        axes.errorbar(gain.median, mark.lost, xerr=below_above, **around)
    joined = [(mark.gain.median, mark.lost) for mark in panel.front]
    axes.plot(*zip(*joined, strict=True), color="#888888", lw=1)
    for mark in panel.front:
        place = {"xytext": (5, 3), "textcoords": "offset points"}
        axes.annotate(mark.name, (mark.gain.median, mark.lost), fontsize=6, **place)
    axes.margins(x=0.2)
    axes.grid(color="#eeeeee")
    axes.set_title(panel.title, weight="bold")
    axes.set_xlabel(panel.gain)
    axes.set_ylabel("nats per token lost")
