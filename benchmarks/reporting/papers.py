"""The measured parts of docs/policies.md: what DALI reports, and what is simulated here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from reporting.results import Line, Results, Run
from reporting.tables import Cell, caption, link, number, percent, table

NOT_MEASURED = (
    "Not measured yet: `make bench ONLY={script}` writes the lines, `make report` this part of the "
    "page."
)
_NUMBERS = ("", "", "published", "here", "here over published")
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
        return NOT_MEASURED.format(script="exchange")
    run = results.newest("exchange")
    rows = [(line, _merit(line)) for line in run.of("merit")]
    other = run.of("other hybrimoes")
    names = [name for name in other[0].row if name.startswith(("from ", "without "))]
    head = ("model", "batch", "phase", *names)
    others = [(line, (*_at(line), *(number(line[name]) for name in names))) for line in other]
    parts = [
        f"Means of all batches (geometric), {_layers(run)} of each model:",
        _means(run, names, page),
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
        return NOT_MEASURED.format(script="dali")
    lines = [line for line in run.lines if line["what"] in ("number", "fitted")]
    lines.sort(key=lambda line: _order(line["place"]))
    rows = [(line, _number(line)) for line in lines]
    parts = [table(_NUMBERS, rows, page), caption(run), _planned(lines)]
    return "\n\n".join(filter(None, parts))


def _planned(lines: Sequence[Line]) -> str:
    """What a layer's planning takes here, and would take by Table 6: of lines that tell."""
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


def _number(line: Line) -> Sequence[Cell]:
    published, here = line["published"], line["here"]
    shown, over = _value(line, here), f"{here / published:.2f}"
    if line["what"] == "fitted":
        over += ", fitted"
    elif line["num_cases"] > 1:
        shown += f" ({_value(line, line['least'])} to {_value(line, line['most'])})"
    return (line["place"], line["of"], _value(line, published), shown, over)


def _value(line: Line, value: float) -> Cell:
    """Table 6 has shares of the time."""
    return f"{value:.2%}" if line["place"] == "Table 6" else number(value)


def _means(run: Run, others: Sequence[str], page: Path) -> str:
    """Of the lines of each model and phase, and of all models."""
    names = ["dali_over_hybrimoe", "dali_over_hybrimoe_greedy", "placement", "assignment"]
    names += ["prefetch", "swaps_in_idle_time_over_dali"]
    head = ("model", "phase", *_PARTS[3:4], *_PARTS[5:10], *others, "lines")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    models = dict.fromkeys(line["model"] for line in run.of("merit"))
    for phase in ("decode", "prefill"):
        for models_of in (*((one,) for one in models), tuple(models)):
            merits, other = (
                [one for one in run.of(w) if one["model"] in models_of and one["phase"] == phase]
                for w in ("merit", "other hybrimoes")
            )
            means = [_mean(merits, name) for name in names] + [_mean(other, n) for n in others]
            model = models_of[0] if len(models_of) == 1 else "all"
            ends = f"{link(merits[0], page)} to {link(other[-1], page)}"
            lines.append(f"| {' | '.join([model, phase, *means, ends])} |")
    return "\n".join(lines)


def _mean(lines: Sequence[Line], name: str) -> Cell:
    return number(statistics.geometric_mean(line[name] for line in lines))


def _merit(line: Line) -> Sequence[Cell]:
    names = ("dali_over_hybrimoe", "published", "dali_over_hybrimoe_greedy")
    names += ("placement", "assignment", "prefetch", "swaps_in_idle_time_over_dali")
    hits = f"{percent(line['dali_hits'])}; {percent(line['hybrimoe_hits'])}"
    return (*_at(line), *(number(line[name]) for name in names), hits)


def _at(line: Line) -> tuple[Cell, ...]:
    return (line["model"], str(line["batch"]), line["phase"])
