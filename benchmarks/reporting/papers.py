"""The measured parts of docs/policies.md: what TIDE and DALI report, and what is simulated here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from reporting.results import Line, Results, Run
from reporting.tables import Cell, caption, link, number, percent, table

NOT_MEASURED = (
    "Not measured yet: `make bench ONLY={script}` writes the lines, `make report` this part of the "
    "page."
)
_INTERVALS = (
    "model",
    "block",
    "residents",
    "waits",
    "best over tau = 1 (1.2 to 1.4)",
    "best over Fiddler (up to 1.4; 1.5)",
    "Eq. 7 over a random one (up to 1.4)",
    "best over a random one",
    "Eq. 7's interval; best",
    "`tau=auto` over best",
    "misses at the least and the most tau",
    "moved there",
)
_ROUTING = ("model", "block", "distinct experts, first and last step", "1 step apart", "5 apart")
_DRIFTS = ("cosine of neighbours", "moves copy back", "residents", "best over tau = 1", "its tau")
_NUMBERS = ("", "", "published", "here", "here over published", "within 15%")
_WITHIN = 0.15
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


def tide(results: Results, page: Path) -> str:
    """TIDE's Tables 1 and 2 and Figures 2, 4 and 5, of synthetic routing."""
    if not results.has("tau"):
        return NOT_MEASURED.format(script="tau")
    run = results.newest("tau")
    sweeps = [line for line in run.of("tau") if line["routing"] == "synthetic"]
    routings = [line for line in run.of("routing") if line["routing"] == "synthetic"]
    others = [line for line in run.of("others") if line["routing"] == "synthetic"]
    speeds = ("model", "block", "residents", "`lru`", "`fiddler`", "`dali`", "`lowtide`")
    parts = [
        "Intervals, TIDE's numbers in brackets:",
        table(_INTERVALS, [(line, _interval(line)) for line in sweeps], page),
        _choices(sweeps),
        "Table 1 of LLaDA2.0-mini, block 32, waiting (1.2 to 1.4), with steps that are less alike, "
        "and with the evicted expert copied back at each move:",
        table(_DRIFTS, [(line, _drift(line)) for line in run.of("drift")], page),
        "Its Figure 2, likeness as the cosine of hits (above 0.95 at 5 steps):",
        table(_ROUTING, [(line, _routing(line)) for line in routings], page),
        "Its Figure 5, tokens/s of other presets:",
        table(speeds, [(line, _others(line)) for line in others], page),
        caption(run),
    ]
    return "\n\n".join(parts)


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
    """DALI's figures and tables, number by number, with the experiment that comes nearest."""
    text = _numbers(results, "dali", page)
    planned = _planned(results.newest("dali")) if results.has("dali") else ""
    return f"{text}\n\n{planned}" if planned else text


def _planned(run: Run) -> str:
    """What a layer's planning takes here, and would take by Table 6: of lines that tell."""
    told = [line for line in run.lines if "planned_us" in line.row]
    lines: dict[str, dict[str, list[float]]] = {}
    for line in told:
        preset, experiment = line["of"].split(",")[0], line.row.get("experiment", "")
        lines.setdefault(preset, {}).setdefault(experiment, []).append(line["planned_us"])
        published = line["published"]
        needed_us = published / (1 - published) * line["layer_us"]
        lines[preset].setdefault("needed", []).append(needed_us)
    parts = [
        f"`{preset}`'s shares want {_range(of['needed'])} us, where it takes {_range(of[''])} here"
        for preset, of in lines.items()
    ]
    return f"Planning of a layer in Table 6: {'; '.join(parts)}." if parts else ""


def _range(values: Sequence[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"


def tide_numbers(results: Results, page: Path) -> str:
    """What TIDE's text says of its tables and figures, in the same way."""
    return _numbers(results, "tau", page)


def _numbers(results: Results, benchmark: str, page: Path) -> str:
    run = results.newest(benchmark) if results.has(benchmark) else None
    if run is None or not run.of("number"):
        return NOT_MEASURED.format(script=benchmark)
    tried: dict[tuple[str, str], list[Line]] = {}
    for line in run.of("experiment"):
        tried.setdefault((line["place"], line["of"]), []).append(line)
    lines = [line for line in run.lines if line["what"] in ("number", "fitted")]
    lines.sort(key=lambda line: _order(line["place"]))
    rows = [
        (line, _number(line, tried.get((line["place"], line["of"]), []), page)) for line in lines
    ]
    return "\n\n".join([_tally(run, tried), table(_NUMBERS, rows, page), caption(run)])


def _tally(run: Run, tried: Mapping[tuple[str, str], Sequence[Line]]) -> str:
    """How many numbers are near, as they stand and by an experiment."""
    numbers = run.of("number")
    others = [line for line in numbers if not _is_near(line)]
    moved = sum(any(map(_is_near, tried.get((one["place"], one["of"]), ()))) for one in others)
    return (
        f"Of {len(numbers)} published numbers that nothing was fitted to "
        f"{len(numbers) - len(others)} are within 15%, {moved} more by what stands beside them, "
        f"{len(others) - moved} by nothing that was tried."
    )


def _order(place: str) -> tuple[str, int]:
    """Figures before tables, by number."""
    kind, number_of = place.split(" ")
    return kind, int(number_of)


def _number(line: Line, tried: Sequence[Line], page: Path) -> Sequence[Cell]:
    published, here = line["published"], line["here"]
    shown = _value(line, here)
    if line["what"] == "number" and line["num_cases"] > 1:
        shown += f" ({_value(line, line['least'])} to {_value(line, line['most'])})"
    over = f"{here / published:.2f}"
    stands = _verdict(line, tried, page)
    return (line["place"], line["of"], _value(line, published), shown, over, stands)


def _verdict(line: Line, tried: Sequence[Line], page: Path) -> Cell:
    """Yes, or what was tried that comes nearest."""
    if line["what"] == "fitted":
        return "fitted"
    if _is_near(line):
        return "yes"
    nearest = min(tried, key=_distance, default=line)
    if _distance(nearest) >= _distance(line):
        return f"no, here{_span(line, tried)}" if tried else "no"
    over = f"{nearest['here'] / nearest['published']:.2f}"
    told = (
        f"{nearest['experiment']}: {_value(line, nearest['here'])} ({over}, {link(nearest, page)})"
    )
    return f"no; if {told}" + ("" if _is_near(nearest) else _span(line, tried))


def _span(line: Line, tried: Sequence[Line]) -> str:
    """How far all that was tried reaches, where none of it comes near."""
    values = [one["here"] for one in tried]
    ends = f"{_value(line, min(values))} to {_value(line, max(values))}"
    return f", of {len(values)} experiments the nearest; they span {ends}"


def _is_near(line: Line) -> bool:
    return abs(line["here"] / line["published"] - 1) <= _WITHIN


def _distance(line: Line) -> float:
    return abs(math.log(line["here"] / line["published"]))


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


def _choices(sweeps: Sequence[Line]) -> str:
    """How often each way of choosing an interval was right."""
    at_end = sum(line["paper_tau"] >= line["taus"][-1] - 1 for line in sweeps)
    loses = sum(line["paper_over_tau_1"] < 1 for line in sweeps)
    first = sum(line["auto_over_tau_1"] == 1 for line in sweeps)
    least = min(line["online_over_best"] for line in sweeps)
    return (
        f"Of these {len(sweeps)} sweeps Eq. 7 takes the last interval but one, or a longer one, in "
        f"{at_end} and is slower than tau = 1 in {loses}; tau = 1 is the best in {first}; "
        f"`tau=auto` is at least {number(least)} of the best."
    )


def _drift(line: Line) -> Sequence[Cell]:
    at = (f"{line['similarity']:g}", "yes" if line["copies_back"] else "no", str(line["residents"]))
    return (*at, number(line["best_over_tau_1"]), str(line["best_tau"]))


def _interval(line: Line) -> Sequence[Cell]:
    speeds, taus = line["tokens_per_s_by_tau"], line["taus"]
    misses, moved = line["miss_share_by_tau"], line["moved_by_tau"]
    return (
        line["model"],
        str(line["block_length"]),
        str(line["residents"]),
        "yes" if line["waits"] else "no",
        number(line["auto_over_tau_1"]),
        number(line["auto_over_fiddler"]),
        number(line["paper_over_random"]),
        number(line["auto_over_random"]),
        f"{line['paper_tau']}; {taus[speeds.index(max(speeds))]}",
        number(line["online_over_best"]),
        f"{number(misses[0])}, {number(misses[-1])}",
        f"{number(moved[0])}, {number(moved[-1])}",
    )


def _routing(line: Line) -> Sequence[Cell]:
    distinct, at_5 = line["distinct_experts_by_step"], line["similarity_at_5"]
    ends = f"{number(distinct[0])}, {number(distinct[-1])}"
    cosines = (f"{line['similarity']:.3f}", "" if at_5 is None else f"{at_5:.3f}")
    return (line["model"], str(line["block_length"]), ends, *cosines)


def _others(line: Line) -> Sequence[Cell]:
    names = ("lru", "fiddler", "dali", "lowtide")
    at = (line["model"], str(line["block_length"]), str(line["residents"]))
    return (*at, *(number(line[name]) for name in names))


def _merit(line: Line) -> Sequence[Cell]:
    names = ("dali_over_hybrimoe", "published", "dali_over_hybrimoe_greedy")
    names += ("placement", "assignment", "prefetch", "swaps_in_idle_time_over_dali")
    hits = f"{percent(line['dali_hits'])}; {percent(line['hybrimoe_hits'])}"
    return (*_at(line), *(number(line[name]) for name in names), hits)


def _at(line: Line) -> tuple[Cell, ...]:
    return (line["model"], str(line["batch"]), line["phase"])
