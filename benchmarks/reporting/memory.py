"""The measured parts of docs/memory.md: what a denoising step takes, beside its plan and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from common.growth import Growth

from reporting.results import Line, Results, Run
from reporting.tables import (
    Cell,
    caption,
    captions,
    link,
    median_and_spread,
    number,
    percent,
    ratio,
    table,
)

_SIDES = {
    "transformers": "transformers (a)",
    "ported": "plain torch (b)",
    "compiled": "compiled (c)",
}
_PLANNED = ("model", "tokens", "operators", "plan, MB", "measured less plan", "arena less plan")
_EVEN = ("model", "tokens", "", "peak, MB", "peak over average", "lower by; paper 2.71")
_PAPER_GAINS = {
    "manager": "+79 to 197%",
    "mask-only": "+89 to 114%",
    "chunking": "+221 to 673%",
    "fused head": "has none",
}
_HEADS = ("model", "tokens", "masked", "kept", "reduced at once", "over kept")
_RESERVED = ("model", "forward", "tokens", "alive, MB", "reserved, MB", "more", "resident, MB")
_STEPS = ("model", "tokens", "r_p", "depth", "step, s", "over transformers", "over plain torch")
_PLANNING = ("model", "tokens", "r_p", "plans", "the longest, ms", "of a step, us")
_EVERY = (
    "tokens",
    "step, s",
    "reading at the ceiling, s",
    "computing, s",
    "share of the ceiling",
    "over the larger",
    "bytes over the absent half",
)
_VERDICT = "elastic over constant"
_RUN = ("model", "longest", "trace")
_ELASTIC = (
    *_RUN,
    "side",
    "tokens/s",
    "by bytes and processor time",
    "read, GB",
    "requests at once",
    "peak, MB",
)
_OVER_CONSTANT = (
    *_RUN,
    "elastic over the best constant",
    "by bytes and processor time",
    "over the longest request's",
    "within plan",
)


def longest(results: Results, page: Path) -> str:
    """The longest sequence under a cap: cells and the others' growth."""
    run = results.newest("max_context")
    cells = run.of("cell")
    sides = [side for side in _SIDES if f"over_{side}" in cells[0].row]
    # A run may have taken the others' steps of an earlier one (`--theirs`).
    theirs = results.newest_lines("max_context", "growth", ("model", "side"))
    grown = [line for line in theirs if line["side"] in sides]
    head = ("model", "cap, GB", "r_p", "lowtide", *(_SIDES[side] for side in sides))
    growth = ("model", "side", "bytes per token", "off a straight line")
    parts = [
        table(head, [(line, _cell(line, sides)) for line in cells], page),
        "What the others were measured to take:",
        table(growth, [(line, _growth(line)) for line in grown], page),
        captions(grown + cells),
    ]
    return "\n\n".join(parts)


def planned(results: Results, page: Path) -> str:
    """What steps took beside their plans, and how even their use is."""
    lines = results.newest_lines("planned_memory", "planned", ("model", "num_tokens", "chunks"))
    even = results.newest_lines("planned_memory", "evenness", ("model", "num_tokens", "side"))
    parts = [table(_PLANNED, [(line, _planned(line)) for line in lines], page)]
    if even:
        parts += [
            "How even: peak over average of live bytes, one step, at full depth:",
            table(_EVEN, [(line, _even(line)) for line in even], page),
        ]
    return "\n\n".join([*parts, captions(lines + even)])


def parts(results: Results, page: Path) -> str:
    """The longest sequence by Mosaic's parts, and what fusing the head gains in time."""
    lines = _part_lines(results)
    grown = _grown(results)
    timed = results.newest_lines("mosaic_ablation", "head alone", ("model", "num_tokens"))
    papers = [f"{name} (paper {gain})" for name, gain in _PAPER_GAINS.items()]
    head = ("model", "cap, GB", "plain torch (b), extrapolated", *papers, "what binds then")
    said = [table(head, [(line, _parts(line, grown[line["model"]], page)) for line in lines], page)]
    if timed:
        said += [
            "The head alone, seconds by turns, logits of masked rows kept and reduced at once:",
            table(_HEADS, [(line, _heads(line)) for line in timed], page),
        ]
    return "\n\n".join([*said, captions(lines + timed)])


def reserved(results: Results, page: Path) -> str:
    """What CUDA's allocator would reserve, and the time that lazy chunking saves."""
    run = results.newest("mosaic_ablation", with_lines_of=("reserved", "lazy over static"))
    lazy = run.of("lazy over static")
    said = "; ".join(
        f"{line['num_tokens']:,} tokens {percent(line['saved'])} (line {link(line, page)})"
        for line in lazy
    )
    parts = [
        "What CUDA's caching rules would reserve for the others' steps (the paper: 21.8 to 78.3% "
        "more than is alive), and what is resident here:",
        table(_RESERVED, [(line, _reserved(line)) for line in run.of("reserved")], page),
        f"Time that lazy chunking saves of static chunking's (the paper: 5.5 to 21.5%): {said}.",
        caption(run),
    ]
    return "\n\n".join(parts)


def steps(results: Results, page: Path) -> str:
    """What a step takes beside the others' steps, chunks beside one, and planning."""
    keys = ("model", "num_tokens", "lane", "depth")
    timed = results.newest_lines("step_time", "step time", keys)
    chunked = results.newest_lines("step_time", "chunked", ("model", "num_tokens", "operator"))
    plans = results.newest_lines("step_time", "planning", ("model", "num_tokens", "prompt_share"))
    head = ("model", "tokens", "operator", "four chunks over one", "paper")
    parts = [
        table(_STEPS, [(line, _step(line)) for line in timed], page),
        table(head, [(line, _chunked(line)) for line in chunked], page),
        table(_PLANNING, [(line, _planning(line)) for line in plans], page),
        captions(timed + chunked + plans),
    ]
    return "\n\n".join(parts)


def every_expert(results: Results, page: Path) -> str:
    """LLaDA-MoE with half of its experts in memory."""
    run = results.newest("every expert")
    rows = [(line, _half(line)) for line in run.of("half of the experts")]
    return f"{table(_EVERY, rows, page)}\n\n{caption(run)}"


def elastic(results: Results, page: Path) -> str:
    """Pages that move against constant divisions of the same budget, by model, trace and length."""
    found: dict[tuple[Cell, ...], Sequence[Line]] = {}
    for run in sorted(results.runs, key=lambda run: run.ended):
        if run.first["benchmark"] == "elastic" and run.first.is_clean and run.of(_VERDICT):
            found[_run_of(run.first)] = _last_finished(run)
    lines = [line for of_run in found.values() for line in of_run]
    rows = [(line, _elastic(line)) for line in lines if "tokens_per_s" in line.row]
    verdicts = [(line, _verdict(line)) for line in lines if line["what"] == _VERDICT]
    parts = [table(_ELASTIC, rows, page), table(_OVER_CONSTANT, verdicts, page), captions(lines)]
    return "\n\n".join(parts)


def _cell(line: Line, sides: Sequence[str]) -> Sequence[Cell]:
    """Tokens of each side, those that were not run in brackets, and lowtide's over them."""
    reached = [f"{_tokens(line, side)}: {number(line[f'over_{side}'])} times" for side in sides]
    cap, share = number(line["cap_bytes"] / 1e9), str(line["prompt_share"])
    return (line["model"], cap, share, _tokens(line, "lowtide"), *reached)


def _tokens(line: Line, side: str) -> Cell:
    how = line[f"{side}_how"]
    return f"{line[f'{side}_num_tokens']:,}" + ("" if how == "run" else f" ({how})")


def _growth(line: Line) -> Sequence[Cell]:
    side = _SIDES[line["side"]]
    return (line["model"], side, f"{line['slope']:,.0f}", f"{line['residual']:.2%}")


def _planned(line: Line) -> Sequence[Cell]:
    chunks = ", ".join(f"{name} {count}" for name, count in line["chunks"].items() if count > 1)
    return (
        *_length(line),
        chunks or "whole",
        _mega(line["planned_bytes"]),
        f"{line['off_bytes'] / 1e6:+.1f}" + ("" if line["is_as_planned"] else ", beyond the aim"),
        f"{line['arena_off_bytes'] / 1e6:+.1f}",
    )


def _even(line: Line) -> Sequence[Cell]:
    even, lower = number(line["peak_over_average"]), number(line["lower_by"])
    return (*_length(line), line["side"], _mega(line["peak_bytes"]), even, lower)


def _parts(line: Line, grown: Line, page: Path) -> Sequence[Cell]:
    """Tokens of each part, and how many more than with those before it."""
    tokens = _tokens_by_part(line, grown)
    cells = [f"{tokens[0]:,} ({link(grown, page)})"]
    cells += [f"{now:,} ({now / before - 1:+.0%})" for before, now in pairwise(tokens)]
    return (line["model"], number(line["cap_gb"]), *cells, line["binding"])


def _tokens_by_part(line: Line, grown: Line) -> list[int]:
    """The longest sequence of plain torch, by its straight line, and with each part of Mosaic."""
    growth = Growth(grown["intercept"], grown["slope"], grown["residual"])
    ported = growth.longest(line["free_bytes"]) // 16 * 16
    return [ported, *(line["longest"][name] for name in _PAPER_GAINS)]


def _grown(results: Results) -> Mapping[str, Line]:
    """How plain torch's step grows, by model."""
    lines = results.newest_lines("max_context", "growth", ("model", "side"))
    return {line["model"]: line for line in lines if line["side"] == "ported"}


def part_gains(results: Results) -> tuple[dict[str, list[float]], list[Line]]:
    """By part of Mosaic what it adds to the longest sequence in each row, and the rows' lines."""
    lines, grown = _part_lines(results), _grown(results)
    gains: dict[str, list[float]] = {name: [] for name in _PAPER_GAINS}
    for line in lines:
        tokens = _tokens_by_part(line, grown[line["model"]])
        for name, (before, now) in zip(gains, pairwise(tokens), strict=True):
            gains[name].append(now / before - 1)
    return gains, lines


def _part_lines(results: Results) -> list[Line]:
    return results.newest_lines("mosaic_ablation", "planned parts", ("model", "cap_gb"))


def _heads(line: Line) -> Sequence[Cell]:
    kept, fused = line["times_s"]["masked"], line["times_s"]["fused"]
    spread = (median_and_spread(kept), median_and_spread(fused))
    return (*_length(line), f"{line['num_masked']:,}", *spread, ratio(fused, kept))


def _reserved(line: Line) -> Sequence[Cell]:
    megas = (_mega(line["live_bytes"]), _mega(line["reserved_bytes"]))
    more, resident = f"{line['inflation']:+.0%}", _mega(line["resident_bytes"])
    return (line["model"], line["side"], f"{line['num_tokens']:,}", *megas, more, resident)


def _step(line: Line) -> Sequence[Cell]:
    over = [line.row.get(f"over_{side}") for side in ("transformers", "ported")]
    share = line["lane"].removeprefix("lowtide r_p ")
    ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in over)
    return (*_length(line), share, line["depth"], number(line["step_s"]), *ratios)


def _chunked(line: Line) -> Sequence[Cell]:
    paper = line["paper"]
    over = f"{line['over_one']:.3f}"
    return (*_length(line), line["operator"], over, "" if paper is None else f"{paper:.3f}")


def _planning(line: Line) -> Sequence[Cell]:
    most, per_step = f"{1e3 * line['most_s']:.2f}", number(1e6 * line["per_step_s"])
    return (*_length(line), str(line["prompt_share"]), str(line["num_plans"]), most, per_step)


def _half(line: Line) -> Sequence[Cell]:
    names = ("step_s", "ideal_read_s", "computing_s")
    return (
        f"{line['num_tokens']:,}",
        *(number(line[name]) for name in names),
        percent(line["of_ceiling"]),
        f"{line['over_larger']:.2f}",
        f"{line['over_absent']:.3f}",
    )


def _elastic(line: Line) -> Sequence[Cell]:
    return (
        *_run_of(line),
        line["what"],
        number(line["tokens_per_s"]),
        number(line["ideal_tokens_per_s"]),
        number(line["read_bytes"] / 1e9),
        str(line["max_running"]),
        _mega(line["max_peak_bytes"]),
    )


def _verdict(line: Line) -> Sequence[Cell]:
    best = "tokens_per_s_over_best"
    names = (best, f"ideal_{best}", "tokens_per_s_over_today")
    is_within = "yes" if line["is_within_plan"] else "no"
    return (*_run_of(line), *(f"{line[name]:.2f}" for name in names), is_within)


def _last_finished(run: Run) -> Sequence[Line]:
    """Of all that a run measured, what led to its last verdict: from a ceiling on."""
    whats = [line["what"] for line in run.lines]
    stop = len(whats) - whats[::-1].index(_VERDICT)
    start = max(place for place in range(stop) if whats[place] == "ceiling")
    return run.lines[start:stop]


def _run_of(line: Line) -> tuple[Cell, ...]:
    settings = line["settings"]
    return (settings["model"], f"{settings['longest']:,}", settings["trace"])


def _length(line: Line) -> tuple[Cell, Cell]:
    return (line["model"], f"{line['num_tokens']:,}")


def _mega(num_bytes: float) -> Cell:
    return number(num_bytes / 1e6)
