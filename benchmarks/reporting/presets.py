"""The measured parts of docs/policies.md that compare presets, by measurement and in hindsight."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from reporting.papers import NOT_MEASURED
from reporting.results import Line, Results, Run
from reporting.tables import Cell, caption, number, percent, table

_MODELS = ("synth:llada2", "demo:diffusion")
_SHARES = (0.25, 0.5, 0.75)
_EMULATED = ("policy", "emulated tokens/s: 25%", "50%", "75%", "hits at 50%")
_SIMULATED = ("simulated: 25%", "50%", "75%", "moved at 50%", "binds there")
_MACHINE = "rtx3090"
_LEADS = ("lowtide / best other", "lowtide / tide or dali", "dali / hybrimoe")
_SHOWN = ("lowtide", "dali", "hybrimoe", "fiddler", "tide", "lru")
_NEAR = 0.9  # of the oracle's speed, at least
_HOMES = {
    "host": "Beside an emulated device, all experts in host memory:",
    "disk": "Without a device, a part of the experts in memory, the others on disk:",
}
_VALIDATED = ("policy", "predicted, ms a pass", "measured", "predicted over measured", "holds")
_COUNTS = ("hits", "fetched", "reads", "moved", "prefetched", "moves_asked", "moves_done")
_RUNS = ("demo:diffusion", "demo:chat", "synth")
_TOPS = ("top_1", "top_2", "top_4", "top_8")
_PREDICTED = ("run", "predictor", *(f"of the {top[4:]} most wanted" for top in _TOPS))
_GAINED = ("run", "resident", "ahead", "predictor", "errors", "gain", "wasted")


def policies(results: Results, page: Path) -> str:
    """Every preset on the emulated link and in the simulator, and who leads by how much."""
    run = results.newest("policies", model=_MODELS[0])
    emulated = {(line["policy"], line["share"]): line for line in run.of("emulated")}
    simulated = {
        (line["policy"], line["share"]): line
        for line in run.of("simulated")
        if line["machine_profile"] == _MACHINE
    }
    rows = []
    for name in dict.fromkeys(name for name, _ in emulated):
        ours, replayed = ([of[name, s] for s in _SHARES] for of in (emulated, simulated))
        cells = [_policy(name), *(number(line["tokens_per_s"]) for line in ours)]
        cells += [percent(ours[1]["hit_rate"])]
        cells += [number(line["tokens_per_s"]) for line in replayed]
        rows.append((ours[1], (*cells, f"{replayed[1]['moved_GB']:.1f} GB", replayed[1]["binds"])))
    parts = [
        _emulation(run),
        table((*_EMULATED, *_SIMULATED), rows, page),
        "Who leads by how much, at 25, 50 and 75%:",
        table(("model", "time", *_LEADS), _leads(results), page),
        caption(run),
    ]
    return "\n\n".join(parts)


def _emulation(run: Run) -> str:
    """What the emulated device's times are like, and of how many turns medians are."""
    device, turns = run.of("device")[0], [line["num_turns"] for line in run.of("emulated")]
    least, most = min(turns), max(turns)
    counts = f"{most}" if least == most else f"{least} to {most}"
    return (
        f"The emulated link and host have the ratios of `{device['profile']}`; medians of {counts} "
        "interleaved turns, most of presets that may decide something."
    )


def hindsight(results: Results, page: Path) -> str:
    """Shares of the oracle's speed, and of the most hits that there can be."""
    if not results.has("hindsight"):
        return NOT_MEASURED.format(script="hindsight")
    run = results.newest("hindsight")
    head = ("run", "machine", *(f"`{name}`" for name in _SHOWN))
    head += ("hits of `lowtide`", "`lowtide` over the best other")
    rows = [(line, _shares(line)) for line in run.of("shares")]
    return "\n\n".join([_in_words(run), table(head, rows, page), caption(run)])


def validated(results: Results, page: Path) -> str:
    """The simulator's passes beside the runtime's, at both homes of experts."""
    homes = [home for home in _HOMES if results.has("simulate", home=home)]
    parts = []
    for home in homes:
        run = results.newest("simulate", home=home)
        rows = [(line, _validated(line)) for line in run.of("validate")]
        parts += [_HOMES[home], table((*_VALIDATED, "counts"), rows, page), caption(run)]
    return "\n\n".join(parts) or NOT_MEASURED.format(script="simulate")


def prefetch(results: Results, page: Path) -> str:
    """What predictors name of the next layer, and what that is worth in the simulator."""
    runs = [results.newest("prefetch", model=m) for m in _RUNS if results.has("prefetch", model=m)]
    if not runs:
        return NOT_MEASURED.format(script="prefetch")
    named = [
        (
            line,
            (run.first["settings"]["model"], line["predictor"], *(percent(line[t]) for t in _TOPS)),
        )
        for run in runs
        for line in run.of("accuracy")
    ]
    gained = [(line, _gained(line)) for run in runs for line in run.of("end to end")]
    parts = [table(_PREDICTED, named, page), "In the simulator, over no prefetch:"]
    return "\n\n".join([*parts, table(_GAINED, gained, page), *map(caption, runs)])


def _validated(line: Line) -> Sequence[Cell]:
    counted = {name: line[name] for name in _COUNTS if name in line.row}
    others = [n for n, one in counted.items() if {one["predicted"]} != set(one["measured"])]
    measured = f"{line['measured_ms']:g} ({line['least_ms']:g} to {line['most_ms']:g})"
    return (
        _policy(line["policy"]),
        f"{line['predicted_ms']:g}",
        measured,
        f"{1 + line['error']:.3f}",
        "yes" if line["holds"] else "no",
        f"other {', '.join(others)}" if others else "the same",
    )


def _gained(line: Line) -> Sequence[Cell]:
    at = (line["settings"]["model"], str(line["residents"]), str(line["num_prefetch"]))
    wasted = percent(line["wasted_share"])
    return (*at, line["predictor"], line["foresight"], f"{line['gain']:.3f}", wasted)


def _policy(name: str) -> Cell:
    preset, *options = name.split(" ")
    said = {"threshold": "by threshold", "greedy": "by greedy"}
    return ", ".join([f"`{preset}`", *(said.get(option, option) for option in options)])


def _leads(results: Results) -> list[tuple[Line, Sequence[Cell]]]:
    rows = []
    for model in _MODELS:
        run = results.newest("policies", model=model)
        for time in dict.fromkeys(line["time"] for line in run.of("ratios")):
            lines = [line for line in run.of("ratios") if line["time"] == time]
            first, *others = (", ".join(number(line[n]) for line in lines) for n in _LEADS)
            ties = [percent(line["share"]) for line in lines if _is_tie(run, line["share"])]
            if time == "emulated" and ties:
                first += f" (a tie at {', '.join(ties)})"
            rows.append((lines[0], (model, time, first, *others)))
    return rows


def _is_tie(run: Run, share: float) -> bool:
    """Whether turns of `lowtide` and of the best other preset have speeds in common."""
    lines = [line for line in run.of("emulated") if line["share"] == share]
    [ours] = (line for line in lines if line["policy"] == "lowtide")
    others = (line for line in lines if line["policy"] != "lowtide")
    best = max(others, key=lambda line: line["tokens_per_s"])
    return bool(ours["least"] <= best["most"] and best["least"] <= ours["most"])


def _shares(line: Line) -> Sequence[Cell]:
    """At each share of residents."""
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
