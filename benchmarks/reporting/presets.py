"""The measured parts of docs/policies.md that compare presets, by measurement and in hindsight."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from lowtide.lab.bench import Spread
from reporting.results import Line, Results, Run
from reporting.tables import (
    MIN_TURNS,
    Cell,
    Row,
    caption,
    captions,
    not_measured,
    number,
    percent,
    ratio,
    shown,
    table,
    turns_of,
    with_range,
)

_MODELS = ("synth:llada2", "demo:diffusion")
_EMULATED = ("policy", "tokens/s: 25%", "50%", "75%", "hits at 50%", "`lowtide` over it")
_SIMULATED = ("policy", "simulated tokens/s: 25%", "50%", "75%", "moved at 50%", "binds there")
_MACHINE = "rtx3090"
_LEADS = ("lowtide / best other", "lowtide / tide or dali", "dali / hybrimoe")
_SHOWN = ("lowtide", "dali", "hybrimoe", "fiddler", "tide", "lru")
_NEAR = 0.9  # of the oracle's speed, at least
_HOMES = {
    "host": "Beside an emulated device, all experts in host memory:",
    "disk": "Without a device, a part of the experts in memory, the others on disk:",
}
_VALIDATED = ("policy", "predicted, ms a pass", "measured", "predicted over measured", "holds")
_OFF = 0.05
"""Largest error of a prediction; it may also lie within turns that are further apart."""
_COUNTS = ("hits", "fetched", "reads", "moved", "prefetched", "moves_asked", "moves_done")
_RUNS = ("demo:diffusion", "demo:chat", "demo-12-layers", "synth")
_TOPS = ("top_1", "top_2", "top_4", "top_8")
_PREDICTED = ("run", "predictor", *(f"of the {top[4:]} most wanted" for top in _TOPS))
_GAINED = ("run", "resident", "ahead", "predictor", "errors", "gain", "wasted")


def policies(results: Results, page: Path) -> str:
    """Every preset on the emulated link and in the simulator, and who leads by how much."""
    if not results.has("policies", model=_MODELS[0]):
        return not_measured("policies")
    run = results.newest("policies", model=_MODELS[0])
    leads = ("model", "time", *_LEADS)
    parts = [
        f"Emulated, the link and the host in the ratios of `{run.of('device')[0]['profile']}`:",
        shown("policies", _EMULATED, _emulated(run), page),
        "Simulated:",
        table(_SIMULATED, _simulated(run), page),
        "Who leads by how much, at 25, 50 and 75%:",
        table(leads, _leads(results), page),
        caption(run),
    ]
    return "\n\n".join(parts)


def _emulated(run: Run) -> list[Row]:
    """Presets that had their turns at some share."""
    lines: dict[str, list[Line]] = {}
    for line in run.of("emulated"):
        lines.setdefault(line["policy"], []).append(line)
    turns = {name: [turns_of(line, "tokens_per_s") for line in own] for name, own in lines.items()}
    rows: list[Row] = []
    for name, own in turns.items():
        if not any(own):
            continue
        speeds = ("" if one is None else with_range(one) for one in own)
        pairs = zip(turns.get("lowtide", ()), own, strict=False)
        over = "; ".join(
            "none" if first is None or second is None else ratio(first, second)
            for first, second in pairs
        )
        hits = percent(lines[name][1]["hit_rate"])
        cells = (_policy(name), *speeds, hits, "" if name == "lowtide" else over)
        rows.append((lines[name], cells))
    return rows


def _simulated(run: Run) -> list[Row]:
    lines: dict[str, list[Line]] = {}
    for line in run.of("simulated"):
        if line["machine_profile"] == _MACHINE:
            lines.setdefault(line["policy"], []).append(line)
    rows: list[Row] = []
    for name, own in lines.items():
        speeds = (number(line["tokens_per_s"]) for line in own)
        moved, binds = f"{own[1]['moved_GB']:.1f} GB", own[1]["binds"]
        rows.append((own, (_policy(name), *speeds, moved, binds)))
    return rows


def hindsight(results: Results, page: Path) -> str:
    """Shares of the oracle's speed, and of the most hits that there can be."""
    if not results.has("hindsight"):
        return not_measured("hindsight")
    run = results.newest("hindsight")
    head = ("run", "machine", *(f"`{name}`" for name in _SHOWN))
    head += ("hits of `lowtide`", "`lowtide` over the best other")
    rows: list[Row] = [([line], _shares(line)) for line in run.of("shares")]
    return "\n\n".join([_in_words(run), table(head, rows, page), caption(run)])


def validated(results: Results, page: Path) -> str:
    """The simulator's passes beside the runtime's, at both homes of experts."""
    homes = [home for home in _HOMES if results.has("simulate", home=home)]
    parts = []
    for home in homes:
        run = results.newest("simulate", home=home)
        timed = [line for line in run.of("validate") if _measured(line)]
        rows: list[Row] = [([line], _validated(line)) for line in timed]
        parts += [_HOMES[home], shown("simulate", (*_VALIDATED, "counts"), rows, page)]
    return "\n\n".join(parts) or not_measured("simulate")


def _measured(line: Line) -> Spread | None:
    """Milliseconds of a pass."""
    num_turns = line["settings"]["repeats"]
    found = Spread(line["measured_ms"], line["least_ms"], line["most_ms"])
    return found if num_turns >= MIN_TURNS else None


def prefetch(results: Results, page: Path) -> str:
    """Show the predictors' names for the next layer, and their worth in the simulator."""
    runs = [results.newest("prefetch", model=m) for m in _RUNS if results.has("prefetch", model=m)]
    if not runs:
        return not_measured("prefetch")
    named = [
        (
            [line],
            (run.first["settings"]["model"], line["predictor"], *(percent(line[t]) for t in _TOPS)),
        )
        for run in runs
        for line in run.of("accuracy")
    ]
    gained = [([line], _gained(line)) for run in runs for line in run.of("end to end")]
    parts = [table(_PREDICTED, named, page), "In the simulator, over no prefetch:"]
    lines = [line for run in runs for line in run.lines]
    return "\n\n".join([*parts, table(_GAINED, gained, page), captions(lines)])


def _validated(line: Line) -> Sequence[Cell]:
    counted = {name: line[name] for name in _COUNTS if name in line.row}
    others = [n for n, one in counted.items() if {one["predicted"]} != set(one["measured"])]
    measured = f"{line['measured_ms']:g} ({line['least_ms']:g} to {line['most_ms']:g})"
    return (
        _policy(line["policy"]),
        f"{line['predicted_ms']:g}",
        measured,
        f"{1 + line['error']:.3f}",
        _held(line),
        f"other {', '.join(others)}" if others else "the same",
    )


def _held(line: Line) -> Cell:
    if abs(line["error"]) <= _OFF:
        return "yes"
    return "within the turns" if line["holds"] else "no"


def _gained(line: Line) -> Sequence[Cell]:
    at = (line["settings"]["model"], str(line["residents"]), str(line["num_prefetch"]))
    wasted = percent(line["wasted_share"])
    return (*at, line["predictor"], line["foresight"], f"{line['gain']:.3f}", wasted)


def _policy(name: str) -> Cell:
    preset, *options = name.split(" ")
    said = {"threshold": "by threshold", "greedy": "by greedy"}
    return ", ".join([f"`{preset}`", *(said.get(option, option) for option in options)])


def _leads(results: Results) -> list[Row]:
    """Simulated ones; of emulated ones the table of turns has what there is to say."""
    rows: list[Row] = []
    for model in _MODELS:
        run = results.newest("policies", model=model)
        for time in dict.fromkeys(line["time"] for line in run.of("ratios")):
            if time.startswith("emulated"):
                continue
            lines = [line for line in run.of("ratios") if line["time"] == time]
            cells = (", ".join(number(line[name]) for line in lines) for name in _LEADS)
            rows.append((lines, (model, time, *cells)))
    return rows


def _shares(line: Line) -> Sequence[Cell]:
    """Make a cell for each share of residents."""
    cells = line["by_share"].values()

    def told(what: str, name: str) -> Cell:
        return ", ".join(number(cell[what][name]) for cell in cells)

    speeds = (told("of_oracle", name) for name in _SHOWN)
    hits, lead = told("of_most_hits", "lowtide"), told("over_best_other", "lowtide")
    return (line["trace"], line["machine_profile"], *speeds, hits, lead)


def _in_words(run: Run) -> str:
    parts = []
    for routing in dict.fromkeys(line["routing"] for line in run.of("shares")):
        lines = [line for line in run.of("shares") if line["routing"] == routing]
        cells = [cell for line in lines for cell in line["by_share"].values()]
        speeds = [cell["of_oracle"]["lowtide"] for cell in cells]
        leads = [cell["over_best_other"]["lowtide"] for cell in cells]
        parts.append(
            f"{routing.capitalize()} runs: `lowtide` has {number(min(speeds))} to "
            f"{number(max(speeds))} of the oracle's tokens/s (geometric mean "
            f"{number(statistics.geometric_mean(speeds))}), at least {_NEAR} in "
            f"{sum(speed >= _NEAR for speed in speeds)} of {len(cells)} cells; it is the fastest "
            f"in {sum(lead >= 1 for lead in leads)}, {min(leads):.4f} to {number(max(leads))} "
            "times the best other."
        )
    return " ".join(parts)
