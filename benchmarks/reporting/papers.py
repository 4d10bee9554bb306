"""The measured parts of docs/policies.md: what DALI and TIDE report, and what is simulated here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from reporting.results import Line, Results, Run
from reporting.tables import Cell, Row, caption, links, not_measured, number, percent, table

_SHARES = ("Figure 18", "Table 6")
"""Places whose numbers are shares: of hits, and of the time."""
_NUMBERS = ("", "", "published", "here", "effect over the published one", "")
NEAR = 0.15
"""Largest distance from the published effect, as a share of it, that counts as reproduced."""
_PARTS = (
    "model",
    "batch",
    "phase",
    "`dali` over `hybrimoe`",
    "published mean",
    "over its greedy",
    "its placement",
    "its assignment",
    "its prefetch",
    "swaps in idle time",
    "hits, `dali`; `hybrimoe`",
)


def dali(results: Results, page: Path) -> str:
    """DALI's Figures 12 and 13 against HybriMoE, part by part."""
    if not results.has("exchange"):
        return not_measured("exchange")
    run = results.newest("exchange")
    rows: list[Row] = [([line], _merit(line)) for line in run.of("merit")]
    other = run.of("other hybrimoes")
    names = [name for name in other[0].row if name.startswith(("from ", "without "))]
    head = ("model", "batch", "phase", *names)
    others = [([line], (*_at(line), *(number(line[name]) for name in names))) for line in other]
    parts = [
        f"Means of all batches (geometric), {_layers(run)} of each model:",
        table(("model", "phase", *_PARTS[3:4], *_PARTS[5:10], *names), _means(run, names), page),
        "Each by itself:",
        table(_PARTS, rows, page),
        "`dali` over a `hybrimoe` that fetches from so many tokens, and over one without cache:",
        table(head, others, page),
        caption(run),
    ]
    return "\n\n".join(parts)


def _layers(run: Run) -> str:
    return f"{run.first['settings']['layers']} layers"


def dali_numbers(results: Results, page: Path) -> str:
    """DALI's figures and tables, number by number."""
    run = results.newest("dali") if results.has("dali") else None
    if run is None or not run.of("number"):
        return not_measured("dali")
    lines = [line for line in run.lines if line["what"] in ("number", "fitted")]
    lines.sort(key=lambda line: _order(line["place"]))
    rows: list[Row] = [([line], _number(line)) for line in lines]
    parts = [_tally(lines), table(_NUMBERS, rows, page), caption(run), _planned(lines)]
    return "\n\n".join(filter(None, parts))


def _planned(lines: Sequence[Line]) -> str:
    """Return a layer's planning time here beside Table 6's, over the lines that have it."""
    taken: dict[str, list[float]] = {}
    needed: dict[str, list[float]] = {}
    for line in lines:
        if "planned_us" not in line.row:
            continue
        preset, published = line["of"].split(",")[0], line["published"]
        taken.setdefault(preset, []).append(line["planned_us"])
        needed.setdefault(preset, []).append(published / (1 - published) * line["layer_us"])
    parts = [
        f"`{preset}`'s shares want {_range(needed[preset])} us, where it takes {_range(us)} here"
        for preset, us in taken.items()
    ]
    return f"Planning of a layer in Table 6: {'; '.join(parts)}." if parts else ""


def _range(values: Sequence[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"


def _order(place: str) -> tuple[str, int]:
    """Figures before tables, by number."""
    kind, number_of = place.split(" ")
    return kind, int(number_of)


def effect(line: Line) -> float:
    """Return the found effect over the published one, each less its neutral value."""
    neutral: float = line["neutral"]
    return (line["here"] - neutral) / (line["published"] - neutral)


def is_near(line: Line) -> bool:
    return abs(effect(line) - 1) <= NEAR


def _tally(lines: Sequence[Line]) -> str:
    """Count the reproduced numbers among those that are held out and published once."""
    held_out = [line for line in lines if line["what"] == "number" and "repeats" not in line.row]
    num_fitted = sum(line["what"] == "fitted" for line in lines)
    by_place: dict[str, list[bool]] = {}
    for line in held_out:
        by_place.setdefault(line["place"], []).append(is_near(line))
    parts = ", ".join(f"{place} {sum(near)} of {len(near)}" for place, near in by_place.items())
    return (
        f"Of {len(held_out)} held-out numbers, all in one setting, "
        f"**{sum(map(is_near, held_out))} are reproduced**: the effect is within {NEAR:.0%} of "
        f"the published one ({parts}). {num_fitted} that the machine was fitted to and "
        f"{len(lines) - len(held_out) - num_fitted} that say another one again do not count."
    )


def _number(line: Line) -> Sequence[Cell]:
    published, here = line["published"], line["here"]
    shown, cells = _value(line, here), (line["place"], line["of"], _value(line, published))
    if line["what"] == "fitted":
        return (*cells, shown, f"{here / published:.2f}", "fitted")
    if line["num_cases"] > 1:
        shown += f" ({_value(line, line['least'])} to {_value(line, line['most'])})"
    verdict = "reproduced" if is_near(line) else "differs"
    verdict = f"says {line['repeats']} again" if "repeats" in line.row else verdict
    return (*cells, shown, f"{effect(line):.2f}", verdict)


def _value(line: Line, value: float) -> Cell:
    return f"{value:.2%}" if line["place"] in _SHARES else number(value)


def _means(run: Run, others: Sequence[str]) -> list[Row]:
    """Average the lines of each model and phase, and of all models."""
    names = ["dali_over_hybrimoe", "dali_over_hybrimoe_greedy", "placement", "assignment"]
    names += ["prefetch", "swaps_in_idle_time_over_dali"]
    rows: list[Row] = []
    models = dict.fromkeys(line["model"] for line in run.of("merit"))
    for phase in ("decode", "prefill"):
        for models_of in (*((one,) for one in models), tuple(models)):
            merits, other = (
                [one for one in run.of(w) if one["model"] in models_of and one["phase"] == phase]
                for w in ("merit", "other hybrimoes")
            )
            means = [_mean(merits, name) for name in names] + [_mean(other, n) for n in others]
            model = models_of[0] if len(models_of) == 1 else "all"
            rows.append(([*merits, *other], (model, phase, *means)))
    return rows


def _mean(lines: Sequence[Line], name: str) -> Cell:
    return number(statistics.geometric_mean(line[name] for line in lines))


def _merit(line: Line) -> Sequence[Cell]:
    names = ("dali_over_hybrimoe", "published", "dali_over_hybrimoe_greedy")
    names += ("placement", "assignment", "prefetch", "swaps_in_idle_time_over_dali")
    hits = f"{percent(line['dali_hits'])}; {percent(line['hybrimoe_hits'])}"
    return (*_at(line), *(number(line[name]) for name in names), hits)


def _at(line: Line) -> tuple[Cell, ...]:
    return (line["model"], str(line["batch"]), line["phase"])


_TIDE = (
    "",
    "routing",
    "cells",
    "over tau = 1 (paper 1.2 to 1.4)",
    "over Fiddler (paper up to 1.4, 1.5)",
    "slower than Fiddler in",
    "over a random interval (paper up to 1.4)",
)
_ROUTING = (
    "",
    "block",
    "threshold",
    "steps",
    "cosine of neighbours (paper 0.985)",
    "5 steps apart (paper 0.95)",
    "experts, first to last step",
    "best tau",
    "over tau = 1",
    "over Fiddler",
)


def tide(results: Results, page: Path) -> str:
    """TIDE's tables and figures, by kind of routing, then run by run."""
    if not results.has("tau"):
        return not_measured("tau")
    run = results.newest("tau", with_lines_of=("anchor",))
    waiting = [line for line in run.of("tau") if line["waits"]]
    kinds: dict[tuple[str, str], list[Line]] = {}
    for line in waiting:
        kinds.setdefault((line["model"], line["routing"]), []).append(line)
    by_kind: list[Row] = [(of, _kind(*kind, of)) for kind, of in kinds.items()]
    anchors = [
        f"`{line['machine_profile']}` has {line['here']:.2f} for {line['published']:.2f}, "
        f"{line['here'] / line['published'] - 1:+.0%} (line {links([line], page)})"
        for line in run.of("anchor")
    ]
    rows: list[Row] = []
    for line in run.of("routing"):
        tried = _same_run(line, waiting)
        rows.append(([line, *tried], _routing(line, tried)))
    parts = [
        "How well the machines' one anchor, the baseline tau = 1 over Fiddler, is met within what "
        f"such hosts can do: {'; '.join(anchors)}.",
        "The best interval where steps wait for moves; means, and the least and the most of "
        "12, 25 and 50% of the experts resident and of all blocks and thresholds:",
        table(_TIDE, by_kind, page),
        "Run by run, means over the three shares:",
        table(_ROUTING, rows, page),
        caption(run),
    ]
    return "\n\n".join(parts)


def _kind(model: str, routing: str, of: Sequence[Line]) -> Sequence[Cell]:
    over_fiddler = [line["auto_over_fiddler"] for line in of]
    over_drawn = [line["auto_tokens_per_s"] / s for line in of for s in line["random_tokens_per_s"]]
    return (
        model,
        "recorded" if routing == "recorded" else "synthetic, as alike as the paper says",
        str(len(of)),
        _mean_and_range([line["auto_over_tau_1"] for line in of]),
        _mean_and_range(over_fiddler),
        f"{sum(ratio < 1 for ratio in over_fiddler)} of {len(of)}",
        _mean_and_range(over_drawn),
    )


def _same_run(routing: Line, lines: Sequence[Line]) -> Sequence[Line]:
    """The intervals that were tried on one trace, by share of residents."""
    names = ("model", "routing", "block_length", "threshold")
    return [line for line in lines if all(line[name] == routing[name] for name in names)]


def _routing(line: Line, of: Sequence[Line]) -> Sequence[Cell]:
    distinct, far = line["distinct_experts_by_step"], line["similarity_at_5"]
    return (
        f"{line['model']}, {line['routing']}",
        str(line["block_length"]),
        "" if line["threshold"] is None else f"{line['threshold']:g}",
        str(line["num_steps"]),
        f"{line['similarity']:.3f}",
        "" if far is None else f"{far:.3f}",
        f"{distinct[0]:.0f} to {distinct[-1]:.0f}",
        ", ".join(str(one["auto_tau"]) for one in of),
        _mean_and_range([one["auto_over_tau_1"] for one in of]),
        _mean_and_range([one["auto_over_fiddler"] for one in of]),
    )


def _mean_and_range(values: Sequence[float]) -> Cell:
    return f"{number(statistics.fmean(values))} ({_range(values)})"
