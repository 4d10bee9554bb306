"""The measured parts of docs/quality.md and docs/buddymoe.md: what settings that change words cost
and save, and whether a model has anything that can stand in for anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from reporting.fronts import front_picture, shown_share
from reporting.results import Line, Results
from reporting.tables import Cell, caption, median_and_spread, number, percent, table

NOT_MEASURED = (
    "Not measured yet: `make bench ONLY={script}` writes the lines, `make report` this part of "
    "the page."
)
_PICTURE = "![What each way with absent experts loses, beside its speed](buddymoe.svg)"
_NUM_LEAST = 3
_HEAD = (
    "lane",
    "nats lost",
    "KL",
    "agree",
    "right",
    "tokens/s over exact",
    "bytes over exact",
    "ms waited per absent expert",
)
_FULL = (
    "model",
    "resident",
    "lane",
    "tokens/s",
    "over exact",
    "a layer's experts over exact's",
    "GB read per token",
    "ms waited per absent expert",
    "substitution, us of a layer",
    "share of the layer",
)
_TIMES = ("lane", "", "rows", "one decision, us", "both, us", "what was saved, us")
_ALPHAS = ("0.5", "0.75", "0.95", "0.99")
_PROFILE = (
    "model",
    "layer",
    "concentration",
    "affinity, nats",
    "most and least chosen over the mean",
    f"peers that cover {', '.join(_ALPHAS)}",
)
_FORMATS = (
    "model",
    "budget",
    "format",
    "weights, MB",
    "resident",
    "loss, nats",
    "nats lost",
    "KL",
    "agree",
    "right",
    "MB read per pass",
    "tokens/s",
)


def buddies(results: Results, page: Path) -> str:
    """A table for each model and tier, at the share of residents nearest to 3 of 8, then what was
    expected of all cells and how many of them met it."""
    if not results.has("buddy"):
        return NOT_MEASURED.format(script="buddy")
    run = results.newest("buddy")
    cells = [line for line in run.lines if "resident_share" in line.row]
    lanes = [line for line in cells if line["what"] != "expected" and "loss" in line.row]
    shown = shown_share(lanes)
    parts = []
    chosen = [line for line in lanes if line["resident_share"] == shown]
    for (model, tier), group in groupby(chosen, lambda line: (line["model"], line["tier"])):
        rows = list(group)
        exact = next(line for line in rows if line["what"] == "exact")
        title = f"`{model}`, {tier}, {percent(shown)} of the experts resident:"
        cells_of = [(line, _lane(line, exact)) for line in rows]
        parts += [f"{title}\n\n{table(_HEAD, cells_of, page)}", *_bound(rows, exact)]
    expected = [line for line in cells if line["what"] == "expected"]
    picture = [_PICTURE] if front_picture(results) is not None else []
    return "\n\n".join([*picture, *parts, _claims(expected, page), caption(run)])


def buddies_full(results: Results, page: Path) -> str:
    """Published dimensions from disk: speed, and what a miss takes under each policy."""
    return _newest_with(results, page, "buddy full", "substitution_us", _FULL, _full)


def decisions(results: Results, page: Path) -> str:
    """What a substitution itself takes of a layer."""
    return _newest_with(results, page, "buddy time", "substitute_us", _TIMES, _decision)


def profiles(results: Results, page: Path) -> str:
    """Layer by layer what buddies live on."""
    return _newest_with(results, page, "buddy profile", "layer", _PROFILE, _profile)


def formats(results: Results, page: Path) -> str:
    """Each format at each budget, beside the model as it is stored with everything in memory."""
    return _newest_with(results, page, "format quality", "kl", _FORMATS, _format)


def _newest_with(
    results: Results,
    page: Path,
    benchmark: str,
    value: str,
    head: Sequence[Cell],
    cells: Callable[[Line], Sequence[Cell]],
) -> str:
    """The lines of a script's last run that have a value, as a table; or that none was run yet."""
    if not results.has(benchmark):
        return NOT_MEASURED.format(script=benchmark.replace(" ", "_"))
    run = results.newest(benchmark)
    rows = [(line, cells(line)) for line in run.lines if value in line.row]
    return f"{table(head, rows, page)}\n\n{caption(run)}"


def _lane(line: Line, exact: Line) -> tuple[Cell, ...]:
    front = " \\*" if line["is_on_front"] else ""
    speed_up, exact_bytes = line["speed_up"], exact["bytes_per_pass"]
    return (
        line["what"] + front,
        _lost(line),
        f"{line['kl']['mean']:.3f}",
        percent(line["agreement"]["mean"]),
        percent(line["accuracy"]["mean"]),
        "" if speed_up is None else number(speed_up),
        "" if not exact_bytes else percent(line["bytes_per_pass"] / exact_bytes),
        _waited(line),
    )


def _bound(rows: list[Line], exact: Line) -> list[str]:
    """About what there is to gain: how fast those are that move the fewest bytes."""
    timed = [line for line in rows if line["speed_up"] is not None]
    if not exact["bytes_per_pass"] or len(timed) < 2 * _NUM_LEAST:
        return []
    least = sorted(timed, key=lambda line: line["bytes_per_pass"])[:_NUM_LEAST]
    shares = [line["bytes_per_pass"] / exact["bytes_per_pass"] for line in least]
    speeds = [line["speed_up"] for line in least]
    return [
        f"The {_NUM_LEAST} lanes that move the fewest bytes, {percent(shares[0])} to "
        f"{percent(shares[-1])} of exact's, write {number(min(speeds))} to {number(max(speeds))} "
        "times as fast: about what there is to gain by moving less."
    ]


def _waited(line: Line) -> Cell:
    """For each expert that a router asked for and that was absent, replaced or not."""
    counts = line["counts"]
    num_misses = counts.get("num_misses", 0.0)
    return f"{1e3 * counts['wait_s'] / num_misses:.3f}" if num_misses else ""


def _full(line: Line) -> tuple[Cell, ...]:
    return (
        line["model"],
        percent(line["resident_share"]),
        line["what"],
        number(line["tokens_per_s"]),
        number(line["speed_up"]),
        number(line["layers_speed_up"]),
        number(line["read_bytes_per_token"] / 1e9),
        number(line["waited_ms_per_miss"]),
        f"{line['substitution_us']:.0f}",
        f"{line['share_of_layers']:.2%}",
    )


def _decision(line: Line) -> tuple[Cell, ...]:
    times = (f"{line[name]:.0f}" for name in ("substitute_us", "both_us", "settle_us"))
    return (line["lane"], line["tier"], str(line["num_rows"]), *times)


def _profile(line: Line) -> tuple[Cell, ...]:
    peers = line["peers_of_alpha"]
    return (
        f"`{line['model']}`",
        str(line["layer"]),
        f"{line['concentration']:.3f}",
        f"{line['affinity_nats']:.3f}",
        f"{line['most_chosen']:.2f}; {line['least_chosen']:.2f}",
        ", ".join(f"{peers[alpha]:.1f}" for alpha in _ALPHAS) + f" of {line['num_experts'] - 1}",
    )


def _format(line: Line) -> tuple[Cell, ...]:
    share = line["budget_share"]
    return (
        f"`{line['model']}`",
        "everything" if share == 1 else f"{percent(share)} of the experts as stored",
        line["what"],
        number(line["weight_bytes"] / 1e6),
        percent(line["resident_share"]),
        f"{line['loss']['mean']:.3f}",
        _lost(line),
        f"{line['kl']['mean']:.4f}",
        f"{line['agreement']['mean']:.1%}",
        f"{line['accuracy']['mean']:.1%}",
        number(line["read_bytes_per_pass"] / 1e6),
        median_and_spread(line["each_tokens_per_s"]),
    )


def _lost(line: Line) -> Cell:
    lost = line["loss_difference"]
    return f"{lost['mean']:.3f} ± {lost['error'] or 0:.3f}"


def _claims(expected: list[Line], page: Path) -> str:
    """In how many cells (model, tier, share) each expectation was met; linked to the first."""
    by_claim: dict[str, dict[tuple[object, ...], Line]] = {}
    for line in expected:
        cell = tuple(line[name] for name in ("model", "tier", "resident_share"))
        by_claim.setdefault(line["claim"], {})[cell] = line
    rows = []
    for claim, cells in by_claim.items():
        first, *_ = lines = list(cells.values())
        met = f"{sum(line['is_met'] for line in lines)} of {len(lines)}"
        rows.append((first, (claim, met)))
    return table(("expected", "met in cells"), rows, page)
