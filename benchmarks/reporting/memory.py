"""The measured parts of docs/memory.md: what a denoising step takes, beside its plan and others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from common.growth import Growth

from lowtide.lab.bench import Spread
from reporting.results import Line, Results
from reporting.tables import (
    MIN_TURNS,
    Cell,
    Row,
    by_machine,
    not_measured,
    number,
    ratio,
    shown,
    with_range,
)

_SIDES = {
    "transformers": "transformers (a)",
    "ported": "plain torch (b)",
    "compiled": "compiled (c)",
}
PROMPT_SHARE = 0.5
"""r_p of the rows: it hardly matters, since the others compute all logits and lowtide's peak is not
at them."""
_LONGEST = (
    "model",
    "plain torch, bytes a token",
    *("24 GB: by its line", "by lowtide's plan", "over it"),
    *("40 GB: by its line", "by lowtide's plan", "over it"),
)
_LONGEST_HEAD = "*Planned, not run*: tokens that a line or a plan has room for."
_RUN_HEAD = (
    "*Run*: one step of a narrow model, beside what its line from shorter ones, or plan, says:"
)
_HELD = ("model", "tokens", "side", "expected, MB", "taken, MB", "taken less that")
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
_STEPS = ("model", "tokens", "r_p", "depth", "step, s")
_STEPS += ("over transformers (a)", "over plain torch (b)", "over compiled (c)")
_LAZY = ("model", "tokens", "static", "lazy", "saved")
_PLANNING = ("model", "tokens", "r_p", "plans", "of a step, us")
_EVERY = (
    "tokens",
    "step, s",
    "reading at the ceiling, s",
    "computing, s",
    "share of the ceiling",
    "over the larger",
    "bytes over the absent half",
    "aim",
)
_MOVING = (
    "model",
    "longest",
    "trace",
    "side",
    "tokens/s",
    "by bytes and processor time",
    "read, GB",
    "requests at once",
    "peak, MB",
    "within plan",
    "moving over it",
    "by bytes and processor time",
)


def longest(results: Results, page: Path) -> str:
    """Show the longest sequence under a cap, by the others' lines and by plans.

    A step that was run stands beside its line or plan.
    """
    if not results.has("max_context"):
        return not_measured("max_context")
    by_model: dict[str, list[Line]] = {}
    for line in results.newest("max_context", with_lines_of=("cell",)).of("cell"):
        if line["prompt_share"] == PROMPT_SHARE:
            by_model.setdefault(line["model"], []).append(line)
    lines = results.newest_lines("max_context", "growth", ("model", "side"))
    grown = {(line["model"], line["side"]): line for line in lines}
    rows: list[Row] = [_longest(cells, grown) for cells in by_model.values()]
    parts = [_LONGEST_HEAD, by_machine(_LONGEST, rows, page), _same_baselines(by_model, grown)]
    held = results.newest_lines("max_context", "run", ("model", "side"))
    if held:
        parts += [_RUN_HEAD, by_machine(_HELD, [([line], _held(line)) for line in held], page)]
    return "\n\n".join(parts)


def parts(results: Results, page: Path) -> str:
    """The longest sequence by Mosaic's parts, and what fusing the head gains in time."""
    lines = _part_lines(results)
    grown = _grown(results)
    timed = results.newest_lines("mosaic_ablation", "head alone", ("model", "num_tokens"))
    papers = [f"{name} (paper {gain})" for name, gain in _PAPER_GAINS.items()]
    head = ("model", "cap, GB", "plain torch (b), extrapolated", *papers, "what binds then")
    rows: list[Row] = [
        ([line, grown[line["model"]]], _parts(line, grown[line["model"]])) for line in lines
    ]
    said = [shown("mosaic_ablation", head, rows, page)]
    if timed:
        said += [
            "The head alone, seconds by turns, logits of masked rows kept and reduced at once:",
            by_machine(_HEADS, [([line], _heads(line)) for line in timed], page),
        ]
    return "\n\n".join(said)


def every_expert(results: Results, page: Path) -> str:
    """LLaDA-MoE with half of its experts in memory; every turn has a line for each length."""
    if not results.has("every expert"):
        return not_measured("every_expert")
    turns: dict[int, list[Line]] = {}
    for line in results.newest("every expert").of("half of the experts"):
        turns.setdefault(line["num_tokens"], []).append(line)
    rows: list[Row] = [(own, _half(own)) for own in turns.values() if len(own) >= MIN_TURNS]
    return shown("every_expert", _EVERY, rows, page)


def moving_memory(results: Results, page: Path) -> str:
    """Compare pages that move with constant divisions of the same budget.

    Rows are by model, trace and length; every turn has a line for each side, and runs of fewer than
    `MIN_TURNS` turns are left out.
    """
    found: dict[tuple[Cell, ...], dict[str, list[Line]]] = {}
    for run in sorted(results.runs, key=lambda run: run.ended):
        if run.first["benchmark"] == "moving_memory" and run.first.counts:
            sides: dict[str, list[Line]] = {}
            for line in run.lines:
                if "tokens_per_s" in line.row:
                    sides.setdefault(line["what"], []).append(line)
            if sides and min(map(len, sides.values())) >= MIN_TURNS:
                found[_run_of(run.first)] = sides
    rows: list[Row] = [
        (own, _moving_side(own, sides["moving"]))
        for sides in found.values()
        for own in sides.values()
    ]
    return shown("moving-memory", _MOVING, rows, page)


def _longest(cells: Sequence[Line], grown: Mapping[tuple[str, str], Line]) -> Row:
    """A model's row: under each cap what plain torch's line, and lowtide's plan, has room for."""
    slope = grown[cells[0]["model"], "ported"]
    told = [f"{slope['slope']:,.0f}"]
    for line in cells:
        told += [f"{line[name]:,}" for name in ("ported_num_tokens", "planned_tokens")]
        told.append(number(line["over_ported"]))
    return [slope, *cells], (cells[0]["model"], *told)


def _same_baselines(models: Iterable[str], grown: Mapping[tuple[str, str], Line]) -> str:
    """Show the other baselines' memory over plain torch's; equal ones are one result."""
    told = []
    for side in ("transformers", "compiled"):
        over = [grown[one, side]["slope"] / grown[one, "ported"]["slope"] for one in models]
        told.append(f"{_SIDES[side]} {min(over):.3f} to {max(over):.3f}")
    return (
        f"Bytes a token over plain torch's: {', '.join(told)}. Where that is one, their peak is "
        "the same two arrays of logits, and they are one result; compiled for a CPU, sampling has "
        "arrays of its own."
    )


def _held(line: Line) -> Sequence[Cell]:
    side = _SIDES.get(line["side"], line["side"])
    by = "plan" if line["side"] == "lowtide" else "line"
    megas = (f"{_mega(line['expected_bytes'])} by its {by}", _mega(line["step_bytes"]))
    off = f"{(line['step_bytes'] - line['expected_bytes']) / 1e6:+.1f} MB, {line['off']:+.1%}"
    return (*_length(line), side, *megas, off)


def _parts(line: Line, grown: Line) -> Sequence[Cell]:
    """Tokens of each part, and how many more than with those before it."""
    tokens = _tokens_by_part(line, grown)
    cells = [f"{tokens[0]:,}"]
    cells += [f"{now:,} ({now / before - 1:+.0%})" for before, now in pairwise(tokens)]
    return (line["model"], number(line["cap_gb"]), *cells, line["binding"])


def _tokens_by_part(line: Line, grown: Line) -> list[int]:
    """The longest sequence of plain torch, by its straight line, and with each part of Mosaic."""
    growth = Growth(grown["intercept"], grown["slope"], grown["residual"])
    ported = growth.longest(line["free_bytes"]) // 16 * 16
    return [ported, *(line["longest"][name] for name in _PAPER_GAINS)]


def _grown(results: Results) -> Mapping[str, Line]:
    """Map models to the line that measured how plain torch's step grows."""
    lines = results.newest_lines("max_context", "growth", ("model", "side"))
    return {line["model"]: line for line in lines if line["side"] == "ported"}


def part_gains(results: Results) -> tuple[dict[str, list[float]], list[Line]]:
    """Return the gain in the longest sequence by part of Mosaic, a number for each row.

    The lines are those of the rows and of plain torch's growth.
    """
    lines, grown = _part_lines(results), _grown(results)
    gains: dict[str, list[float]] = {name: [] for name in _PAPER_GAINS}
    for line in lines:
        tokens = _tokens_by_part(line, grown[line["model"]])
        for name, (before, now) in zip(gains, pairwise(tokens), strict=True):
            gains[name].append(now / before - 1)
    return gains, [*lines, *(grown[line["model"]] for line in lines)]


def _part_lines(results: Results) -> list[Line]:
    return results.newest_lines("mosaic_ablation", "planned parts", ("model", "cap_gb"))


def _heads(line: Line) -> Sequence[Cell]:
    kept, fused = (Spread.of(line["times_s"][name]) for name in ("masked", "fused"))
    masked = f"{line['num_masked']:,}"
    return (*_length(line), masked, with_range(kept), with_range(fused), ratio(fused, kept))


def _half(lines: Sequence[Line]) -> Sequence[Cell]:
    def turns(name: str) -> Spread:
        return Spread.of([line[name] for line in lines])

    names = ("step_s", "ideal_read_s", "computing_s", "of_ceiling", "over_larger")
    missed = [name for name in ("is_at_the_ceiling", "is_the_larger") if _has_missed(lines, name)]
    return (
        f"{lines[0]['num_tokens']:,}",
        *(with_range(turns(name)) for name in names),
        f"{turns('over_absent').median:.3f}",
        "missed" if missed else "met",
    )


def _has_missed(lines: Sequence[Line], aim: str) -> bool:
    """Return True if a turn of a length that is held to an aim missed it."""
    return any(line.row.get(aim) is False for line in lines)


def _moving_side(lines: Sequence[Line], moving: Sequence[Line]) -> Sequence[Cell]:
    """Return the cells of one side; moving: the side whose pages move."""

    def turns(of: Sequence[Line], name: str) -> Spread:
        return Spread.of([line[name] for line in of])

    names = ("tokens_per_s", "ideal_tokens_per_s")
    own = [turns(lines, name) for name in names]
    over = [ratio(turns(moving, name), of) for name, of in zip(names, own, strict=True)]
    return (
        *_run_of(lines[0]),
        lines[0]["what"],
        *map(with_range, own),
        number(turns(lines, "read_bytes").median / 1e9),
        str(max(line["max_running"] for line in lines)),
        _mega(max(line["max_peak_bytes"] for line in lines)),
        "yes" if all(line["is_within_plan"] for line in lines) else "no",
        *(over if lines is not moving else ("", "")),
    )


def _run_of(line: Line) -> tuple[Cell, ...]:
    settings = line["settings"]
    return (settings["model"], f"{settings['longest']:,}", settings["trace"])


def _length(line: Line) -> tuple[Cell, Cell]:
    return (line["model"], f"{line['num_tokens']:,}")


def _mega(num_bytes: float) -> Cell:
    return number(num_bytes / 1e6)
