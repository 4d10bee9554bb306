"""The measured parts of docs/policies.md: what TIDE and DALI report, and what is simulated here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reporting.results import Line, Results
from reporting.tables import Cell, caption, number, percent, table

NOT_MEASURED = (
    "Not measured yet: `benchmarks/{script}.py --out docs/results/{script}.jsonl` writes the "
    "lines, `make report` this part of the page."
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
        table(_PARTS, rows, page),
        "`dali` over a `hybrimoe` that fetches from so many tokens, and over one without cache:",
        table(head, others, page),
        caption(run),
    ]
    return "\n\n".join(parts)


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
