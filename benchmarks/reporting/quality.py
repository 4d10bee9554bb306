"""The measured part of docs/quality.md: what each way with absent experts costs and saves."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from reporting.results import Line, Results
from reporting.tables import Cell, caption, number, percent, table

NOT_MEASURED = (
    "Not measured yet: `make bench ONLY=buddy` writes the lines, `make report` this part of the "
    "page."
)
_HEAD = ("lane", "nats lost", "KL", "agree", "right", "tokens/s over exact", "bytes over exact")


def buddies(results: Results, page: Path) -> str:
    """A table for each model and tier, at the share of residents nearest to 3 of 8, then what was
    expected of all cells and how many of them met it."""
    if not results.has("buddy"):
        return NOT_MEASURED
    run = results.newest("buddy")
    cells = [line for line in run.lines if "resident_share" in line.row]
    lanes = [line for line in cells if line["what"] != "expected" and "loss" in line.row]
    shown = min({line["resident_share"] for line in lanes}, key=lambda share: abs(share - 0.375))
    parts = []
    chosen = [line for line in lanes if line["resident_share"] == shown]
    for (model, tier), group in groupby(chosen, lambda line: (line["model"], line["tier"])):
        rows = list(group)
        exact = next(line for line in rows if line["what"] == "exact")
        title = f"`{model}`, {tier}, {percent(shown)} of the experts resident:"
        cells_of = [(line, _lane(line, exact)) for line in rows]
        parts.append(f"{title}\n\n{table(_HEAD, cells_of, page)}")
    expected = [line for line in cells if line["what"] == "expected"]
    return "\n\n".join([*parts, _claims(expected, page), caption(run)])


def _lane(line: Line, exact: Line) -> tuple[Cell, ...]:
    front = " \\*" if line["is_on_front"] else ""
    lost, speed_up = line["loss_difference"], line["speed_up"]
    exact_bytes = exact["bytes_per_pass"]
    return (
        line["what"] + front,
        f"{lost['mean']:.3f} ± {lost['error'] or 0:.3f}",
        f"{line['kl']['mean']:.3f}",
        percent(line["agreement"]["mean"]),
        percent(line["accuracy"]["mean"]),
        "" if speed_up is None else number(speed_up),
        "" if not exact_bytes else percent(line["bytes_per_pass"] / exact_bytes),
    )


def _claims(expected: list[Line], page: Path) -> str:
    """In how many cells (model, tier, share) each expectation was met; linked to the first."""
    by_claim: dict[str, list[Line]] = {}
    for line in expected:
        by_claim.setdefault(line["claim"], []).append(line)
    rows = [
        (lines[0], (claim, f"{sum(line['is_met'] for line in lines)} of {len(lines)}"))
        for claim, lines in by_claim.items()
    ]
    return table(("expected", "met in cells"), rows, page)
