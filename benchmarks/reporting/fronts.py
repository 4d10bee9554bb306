"""The picture of docs/quality.md: what each way with absent experts loses, beside its speed."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from reporting.results import Line, Results
from reporting.tables import percent

KINDS = {
    "exact": ("exact", "#000000"),
    "random": ("random", "#bbbbbb"),
    "drop": ("left out", "#ccbb44"),
    "cache-prior": ("cache-prior", "#228833"),
    "buddy": ("BuddyMoE", "#4477aa"),
    "late": ("ours", "#ee6677"),
}
"""What a lane does with absent experts (its option `miss`): its name here, and its colour."""

_WIDTH, _HEIGHT = 470, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 40, 50
_COLUMNS, _LEGEND, _LABEL_STEP = 2, 48, 12


class Mark(NamedTuple):
    """One lane."""

    name: str
    kind: str  # of `KINDS`
    gain: float  # the more the better
    lost: float  # nats per token
    error: float


class Panel(NamedTuple):
    """One model on one tier."""

    title: str
    gain: str  # what is gained, in words
    marks: tuple[Mark, ...]

    @property
    def front(self) -> list[Mark]:
        """Those that no other beats: none gains as much, loses as little and is better at one.
        By what they gain."""
        best = [
            mark
            for mark in self.marks
            if not any(
                other.gain >= mark.gain
                and other.lost <= mark.lost
                and (other.gain, other.lost) != (mark.gain, mark.lost)
                for other in self.marks
            )
        ]
        return sorted(best, key=lambda mark: (mark.gain, mark.lost))


class Axis(NamedTuple):
    """A range of values on a range of the picture."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Some five round values."""
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(one * power for one in (1, 2, 5, 10) if one * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [step * number for number in range(first, last + 1)]


def front_picture(results: Results) -> str | None:
    """The newest run's panels as one SVG; None where no lane was scored."""
    if not results.has("buddy"):
        return None
    panels = list(panels_of(results.newest("buddy").lines))
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
        timed = [_mark(line, line["speed_up"]) for line in own if line["speed_up"] is not None]
        if timed:
            yield Panel(title, "tokens/s over exact", tuple(timed))
        most = next(line["bytes_per_pass"] for line in own if line["what"] == "exact")
        if most:
            saved = [_mark(line, 1 - line["bytes_per_pass"] / most) for line in own]
            yield Panel(title, "share of exact's bytes not moved", tuple(saved))


def svg(panels: Sequence[Panel]) -> str:
    """Panels two to a row, and below them which colour is what."""
    num_rows = -(-len(panels) // _COLUMNS)
    width = _WIDTH * min(_COLUMNS, len(panels))
    height = _HEIGHT * num_rows + _LEGEND
    drawn = []
    for number, panel in enumerate(panels):
        row, column = divmod(number, _COLUMNS)
        inside = "\n".join(_panel(panel))
        moved = f"transform='translate({column * _WIDTH} {row * _HEIGHT})'"
        drawn.append(f"<g {moved}>\n{inside}\n</g>")
    drawn += _legend(panels, height - 28)
    inside = "\n".join(drawn)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"height='{height}' font-family='sans-serif' font-size='11'>\n"
        f"<rect width='100%' height='100%' fill='#fff'/>\n{inside}\n</svg>\n"
    )


def _mark(line: Line, gain: float) -> Mark:
    lost, miss = line["loss_difference"], line["policy_options"].get("miss", "exact")
    return Mark(line["what"], miss, gain, lost["mean"], lost["error"] or 0.0)


def _panel(panel: Panel) -> list[str]:
    x, y = _axes(panel.marks)
    drawn = [_text(_LEFT, 22, panel.title, "font-weight='bold'"), *_grid(x, y, panel.gain)]
    points = " ".join(f"{x.at(mark.gain):.1f},{y.at(mark.lost):.1f}" for mark in panel.front)
    drawn.append(f"<polyline points='{points}' fill='none' stroke='#888'/>")
    for mark in panel.marks:
        drawn += _point(mark, x, y)
    return [*drawn, *_labels(panel.front, x, y)]


def _axes(marks: Sequence[Mark]) -> tuple[Axis, Axis]:
    """With room for the bars of two errors, and for labels on the right."""
    gains = [mark.gain for mark in marks]
    least = min(0.0, *(mark.lost - 2 * mark.error for mark in marks))
    most = max(0.01, *(mark.lost + 2 * mark.error for mark in marks))
    spread = max(max(gains) - min(gains), 0.1)
    margin = 0.05 * (most - least)
    return (
        Axis(min(gains) - 0.05 * spread, max(gains) + 0.4 * spread, _LEFT, _WIDTH - _RIGHT),
        Axis(least - margin, most + margin, _HEIGHT - _BOTTOM, _TOP),
    )


def _grid(x: Axis, y: Axis, gain: str) -> list[str]:
    drawn = []
    for value in x.ticks():
        drawn.append(_line(x.at(value), y.start, x.at(value), y.end, "#eee"))
        drawn.append(_text(x.at(value), y.start + 16, f"{value:.3g}", "text-anchor='middle'"))
    for value in y.ticks():
        drawn.append(_line(x.start, y.at(value), x.end, y.at(value), "#eee"))
        drawn.append(_text(x.start - 6, y.at(value) + 4, f"{value:.3g}", "text-anchor='end'"))
    middle, height = (x.start + x.end) / 2, (y.start + y.end) / 2
    drawn.append(_text(middle, y.start + 36, gain, "text-anchor='middle'"))
    turned = f"text-anchor='middle' transform='rotate(-90 14 {height:.1f})'"
    return [*drawn, _text(14, height, "nats per token lost", turned)]


def _point(mark: Mark, x: Axis, y: Axis) -> list[str]:
    colour = KINDS[mark.kind][1]
    across, down = x.at(mark.gain), y.at(mark.lost)
    low, high = y.at(mark.lost - 2 * mark.error), y.at(mark.lost + 2 * mark.error)
    said = html.escape(f"{mark.name}: {mark.gain:.3g}, {mark.lost:.3g} nats")
    return [
        _line(across, low, across, high, colour),
        f"<circle cx='{across:.1f}' cy='{down:.1f}' r='4' fill='{colour}'>"
        f"<title>{said}</title></circle>",
    ]


def _labels(marks: Sequence[Mark], x: Axis, y: Axis) -> list[str]:
    """Names beside the marks, from below, each far enough above the one before."""
    drawn, lowest = [], math.inf
    for mark in sorted(marks, key=lambda mark: mark.lost):
        lowest = min(y.at(mark.lost) - 3, lowest - _LABEL_STEP)
        drawn.append(_text(x.at(mark.gain) + 7, lowest, mark.name))
    return drawn


def _legend(panels: Sequence[Panel], below: float) -> list[str]:
    kinds = {mark.kind for panel in panels for mark in panel.marks}
    drawn, left = [], float(_LEFT)
    for kind, (name, colour) in KINDS.items():
        if kind in kinds:
            drawn.append(f"<circle cx='{left:.0f}' cy='{below - 4:.0f}' r='4' fill='{colour}'/>")
            drawn.append(_text(left + 8, below, name))
            left += 24 + 6 * len(name)
    said = "bars: two standard errors; named and joined: no other gains more and loses less"
    return [*drawn, _text(_LEFT - 4, below + 18, said)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'/>"


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{html.escape(text)}</text>"
