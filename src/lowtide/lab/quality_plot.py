"""Speed against quality: which settings no other beats at both, and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lowtide.cli.plotting import check_plot, save_figure
from lowtide.lab.quality import QualityReport, Row


class QualityPoint(NamedTuple):
    """A setting that ran: its speed, and its loss against the reference."""

    label: str
    speed: float  # tokens/s, or passes/s where no answers were timed
    harm: float  # nats per token, or wrong answers where there was no text
    error: float  # of the harm; 0 where it is not known
    is_best: bool  # no other setting is at least as good at both and better at one


def points(rows: Sequence[Row]) -> list[QualityPoint]:
    """Return the settings that ran, in order."""
    measured = [(row, _speed(row), *_harm(row)) for row in rows if not row.reason]
    pairs = [(speed, harm) for _, speed, harm, _ in measured]
    return [
        QualityPoint(row.setting.label, speed, harm, error, is_best)
        for (row, speed, harm, error), is_best in zip(measured, front(pairs), strict=True)
    ]


def front(pairs: Sequence[tuple[float, float]]) -> list[bool]:
    """Mark the (speed, harm) pairs on the Pareto front."""
    return [
        not any(
            other[0] >= speed and other[1] <= harm and other != (speed, harm) for other in pairs
        )
        for speed, harm in pairs
    ]


def plot(report: QualityReport, path: Path) -> None:
    """Draw every setting, with a line through the best ones. Raise as `check_plot` does."""
    check_plot(path)
    from matplotlib.figure import Figure

    found = points(report.rows)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for point in found:
        axes.errorbar(point.speed, point.harm, yerr=2 * point.error, fmt="o", capsize=3)
        axes.annotate(point.label, (point.speed, point.harm), fontsize=7)
    best = sorted((point.speed, point.harm) for point in found if point.is_best)
    axes.plot(*zip(*best, strict=True), color="grey", linewidth=1, zorder=0)
    is_timed = any(row.tokens_per_s is not None for row in report.rows)
    axes.set_xlabel("tokens per second" if is_timed else "passes per second")
    is_text = report.sample is not None
    axes.set_ylabel("nats per token lost against exact" if is_text else "share of wrong answers")
    axes.set_title(f"{report.architecture}: bars are two standard errors")
    save_figure(figure, path)


def _speed(row: Row) -> float:
    if row.tokens_per_s is not None:
        return row.tokens_per_s
    return 0.0 if row.passes is None else row.passes.passes_per_s


def _harm(row: Row) -> tuple[float, float]:
    if row.comparison is not None:
        return row.comparison.loss_difference.mean, row.comparison.loss_difference.error or 0.0
    if row.choices is None:
        return 0.0, 0.0
    return 1 - row.choices.accuracy.raw.mean, row.choices.accuracy.raw.error or 0.0
