"""The measured parts of docs/evidence.md: for each paper its headline numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lowtide.lab.bench import Spread
from reporting.memory import PROMPT_SHARE, part_gains
from reporting.papers import NEAR, effect, is_near
from reporting.results import Line, Results
from reporting.tables import (
    MIN_TURNS,
    Cell,
    Row,
    by_machine,
    not_measured,
    number,
    percent,
    shown,
    turns_of,
)

_HEAD = ("", "paper", "here", "verdict", "why", "command")
MAX_CELL = 100
"""Characters of a cell that names each of its numbers; of more their range is shown."""


class Claim(NamedTuple):
    """A published number or range, and what there is for it."""

    of: str
    published: str
    low: float
    high: float
    values: Sequence[float]
    lines: Sequence[Line]  # that the values are made of; without any it is named below the table
    why: str
    command: str
    neutral: float = 1.0  # the value without any effect
    form: Callable[[float], Cell] = number
    for_all: bool = False  # whether each value has to be in the range, not their mean
    is_most: bool = False  # "up to": whether the most of the values has to be

    @property
    def is_reproduced(self) -> bool:
        """Whether what is here is in the published range, with some of its effect for slack."""
        low, high = (end - self.neutral for end in (self.low, self.high))
        low, high = low - NEAR * abs(low), high + NEAR * abs(high)
        values = self.values if self.for_all else [statistics.fmean(self.values)]
        if self.is_most:
            values = [max(self.values)]
        return all(low <= value - self.neutral <= high for value in values)

    @property
    def cells(self) -> Sequence[Cell]:
        here = self.form(statistics.fmean(self.values))
        if len(self.values) > 1:
            here += f" ({self.form(min(self.values))} to {self.form(max(self.values))})"
        verdict = "reproduced" if self.is_reproduced else "differs"
        return (self.of, self.published, here, verdict, self.why, f"`{self.command}`")


def mosaic(results: Results, page: Path) -> str:
    """Its longest sequences, its parts, and what they cost."""
    cells = []
    if results.has("max_context"):
        cells = results.newest("max_context", with_lines_of=("cell",)).of("cell")
        cells = [line for line in cells if line["prompt_share"] == PROMPT_SHARE]
    even = results.newest_lines("planned_memory", "evenness", ("model", "num_tokens", "side"))
    even = [line for line in even if line["side"] == "lowtide under the cap"]
    timed = results.newest_lines("step_time", "step time", ("model", "num_tokens", "lane", "depth"))
    timed = [line for line in timed if line["depth"] != "2 layers" and turns_of(line, "step_s")]
    chunked = results.newest_lines("step_time", "chunked", ("model", "num_tokens", "operator"))
    chunked = [line for line in chunked if turns_of(line, "over_one")]
    reserved = results.newest_lines("mosaic_ablation", "reserved", ("model", "side", "num_tokens"))
    lazy = results.newest_lines("mosaic_ablation", "lazy over static", ("model", "num_tokens"))
    lazy = [line for line in lazy if "each_lazy_s" in line.row]
    gains, part_lines = part_gains(results)
    context, alone = "make bench-large ONLY=max_context", "make bench-large ONLY=mosaic_ablation"
    steps = "make bench-large ONLY=step_time"
    claims = [
        *(
            Claim(
                f"longest sequence over {name}",
                str(published),
                published,
                published,
                [line[f"over_{side}"] for line in cells],
                cells,
                why,
                context,
            )
            for name, side, published, why in (
                ("plain torch", "ported", 26.74, "planned, not run"),
                ("transformers", "transformers", 32.98, "its peak is plain torch's: one result"),
                ("compiled", "compiled", 15.89, "compiled for a CPU it takes more, not less"),
            )
        ),
        Claim(
            "peak over average of live bytes, lower by",
            "2.71",
            2.71,
            2.71,
            [line["lower_by"] for line in even],
            even,
            "one model and length, at which little is chunked; nearer where all is divided",
            "make bench-large ONLY=planned_memory",
        ),
        *(
            Claim(
                f"ablation, {name}",
                f"+{low:.0%} to {high:.0%}",
                low,
                high,
                gains[name],
                part_lines,
                why,
                alone,
                neutral=0.0,
                form=percent,
            )
            for name, low, high, why in (
                ("manager", 0.79, 1.97, "by plans, three models and two caps"),
                ("mask-only", 0.89, 1.14, "by plans; half of the tokens are prompt"),
                ("chunking", 2.21, 6.73, "by plans; attention and experts are divided, too"),
            )
        ),
        Claim(
            "what CUDA's allocator reserves beyond what is alive",
            "+22 to 78%",
            0.218,
            0.783,
            [line["inflation"] for line in reserved],
            reserved,
            "its rules replayed for three models; no GPU",
            alone,
            neutral=0.0,
            form=percent,
        ),
        Claim(
            "time of a step over plain torch",
            "0.77 to 0.96",
            0.767,
            0.959,
            [line["over_ported"] for line in timed],
            timed,
            "extrapolated from few layers; the skipped head is a part of it",
            steps,
            for_all=True,
        ),
        *(
            Claim(
                f"time of four chunks over one, {name}",
                f"below {most}",
                1.0,
                most,
                [line["over_one"] for line in of],
                of,
                "ties: chunks are the same tiles, turns differ by more; an eighth of the length",
                steps,
                form="{:.3f}".format,
            )
            for name, operator, most in (("head", "logits", 1.005), ("MLP", "mlp", 1.02))
            for of in [[line for line in chunked if line["operator"] == operator]]
        ),
        Claim(
            "time that lazy chunking saves of static",
            "5.5 to 21.5%",
            0.055,
            0.215,
            [line["saved"] for line in lazy],
            lazy,
            "ties; two layers of three models, on two cores",
            alone,
            neutral=0.0,
            form=percent,
        ),
    ]
    return _said(claims, page)


def tide(results: Results, page: Path) -> str:
    """Its interval, on recorded routing: of a trained model, and of random weights."""
    if not results.has("tau"):
        return not_measured("tau")
    run = results.newest("tau", with_lines_of=("anchor",))
    waiting = [line for line in run.of("tau") if line["waits"]]
    lines = [line for line in waiting if line["model"].startswith("demo")]
    random = [line for line in waiting if line["model"].startswith("synth")]
    given = [line for line in waiting if line["routing"] == "synthetic"]
    routing = [line for line in run.of("routing") if line["model"].startswith("demo")]
    far = [line["similarity_at_5"] for line in routing]
    distinct = [line["distinct_experts_by_step"] for line in routing]
    command = "make bench-large ONLY=tau"
    claims = [
        *(
            Claim(
                f"over tau = 1, the Mixtral-Offload baseline, in every setting, {of}",
                "1.2 to 1.4",
                1.2,
                1.4,
                [line["paper_over_tau_1"] for line in found],
                found,
                why,
                command,
                for_all=True,  # "consistent"
            )
            for of, found, why in (
                (
                    "routing of the demo model",
                    lines,
                    "even the best interval in hindsight saves little time on it",
                ),
                ("of random weights", random, "steps are less alike than the paper's"),
                ("as alike as the paper says", given, "synthetic, of both of the paper's models"),
            )
        ),
        Claim(
            "over Fiddler, in every setting, other routing included",
            "up to 1.5",
            1.0,
            1.5,
            [line["paper_over_fiddler"] for line in waiting],
            waiting,
            "Fiddler knows the favourites of another run; one anchor of its machine is this ratio",
            command,
            for_all=True,
        ),
        Claim(
            "over an interval drawn at random",
            "up to 1.4",
            1.4,
            1.4,
            [line["paper_over_random"] for line in waiting],
            waiting,
            "means of five draws, in every setting",
            command,
            is_most=True,
        ),
        Claim(
            "cosine of neighbouring steps",
            "0.985",
            0.985,
            0.985,
            [line["similarity"] for line in routing],
            routing,
            "of the demo model; less with random weights, else given",
            command,
            form="{:.3f}".format,
        ),
        Claim(
            "cosine of steps 5 apart",
            "0.95",
            0.95,
            0.95,
            far,
            routing,
            "of the demo model",
            command,
            form="{:.3f}".format,
        ),
        Claim(
            "activated experts, last step over first (Figure 2a)",
            "rises",
            1.1,
            10.0,
            [one[-1] / one[0] for one in distinct],
            routing,
            "of the demo model; with random weights fewer or a few more",
            command,
        ),
    ]
    return _said(claims, page)


_SIMULATES = "make bench ONLY=dali"
_DALI_WHY = {
    "Figure 12": "one joint setting; which baseline settings the paper had is open",
    "Figure 13": "both sides have the same residents in a prompt, as the paper says",
    "Figure 17": "all else is DALI's own; at which shares of residents is not said",
    "Figure 18": "hit rates of two windows less those of others; routing is synthetic",
    "Figure 19": "the greedy is what the machine was fitted to, the rest is held out",
    "Figure 22": "Mixtral, by the means of the text",
    "Table 4": "no expert is resident; counted by what the optimum is better",
    "Table 6": "another implementation's planning, beside simulated time",
    "Table 8": "features of the demo models, which are shallow",
    "Table 9": "over HybriMoE, by window; residents and text are not in the paper",
}


def dali(results: Results, page: Path) -> str:
    """Its figures and tables, all in one setting."""
    if not results.has("dali"):
        return not_measured("dali")
    lines = results.newest("dali").of("number")
    held_out = [line for line in lines if "repeats" not in line.row]
    by_place = {place: [one for one in held_out if one["place"] == place] for place in _DALI_WHY}
    rows: list[Row] = [(of, _of_place(place, of)) for place, of in by_place.items() if of]
    absent = ", ".join(place for place, of in by_place.items() if not of)
    head = ("", "numbers", "effect over the published one", *_HEAD[3:])
    told = shown("dali", head, rows, page)
    return f"{told}\n\nNot simulated yet: {absent} (`{_SIMULATES}`)." if absent else told


def _of_place(place: str, lines: Sequence[Line]) -> Sequence[Cell]:
    """The numbers of a figure or table, and how many are reproduced."""
    effects = list(map(effect, lines))
    told = ", ".join(f"{line['of']} {one:.2f}" for line, one in zip(lines, effects, strict=True))
    if len(told) > MAX_CELL:
        told = f"{min(effects):.2f} to {max(effects):.2f}"
    verdict = f"{sum(map(is_near, lines))} of {len(lines)} reproduced"
    return (place, str(len(lines)), told, verdict, _DALI_WHY[place], f"`{_SIMULATES}`")


def buddymoe(results: Results, page: Path) -> str:
    """Speed and bytes by standing in, and whether buddies are better than others."""
    full = results.newest("buddy full").lines if results.has("buddy full") else ()
    full = [line for line in full if turns_of(line, "waited_ms")]
    buddies = [line for line in full if line["what"].startswith("buddy")]
    exact = {line["model"]: line for line in full if line["what"] == "exact"}
    small_runs = results.newest_of_each("buddy", "tier")
    expected = [line for line in small_runs if line["what"] == "expected"]
    better, fewer = (
        [line for line in expected if line["claim"] == f"buddy rho 2 {claim}"]
        for claim in ("loses less than random rho 2", "moves 20% fewer bytes")
    )
    full_size, small = "make bench-large ONLY=buddy_full", "make bench-large ONLY=buddy"
    waited = [
        _median(line, "waited_ms") / _median(exact[line["model"]], "waited_ms") for line in buddies
    ]
    claims = [
        Claim(
            "tokens/s over exact",
            "up to 1.10",
            1.1,
            1.1,
            [line["speed_up"] for line in buddies],
            buddies,
            "more: experts come from disk, 3 of 8 are resident, weights are random",
            full_size,
            is_most=True,
        ),
        Claim(
            "waited per absent expert, over exact (Table 1: 9 to 10 ms to about none)",
            "0",
            0.0,
            0.1,
            waited,
            [*buddies, *exact.values()],
            "of a bounded rho's, some are waited for",
            full_size,
            neutral=0.0,
            form=percent,
        ),
        Claim(
            "substitution's share of a layer (negligible is taken for 1%)",
            "negligible",
            0.0,
            0.01,
            [_median(line, "share_of_layers") for line in buddies],
            buddies,
            "of one row a pass, which pays most",
            full_size,
            neutral=0.0,
            form="{:.1%}".format,
        ),
        Claim(
            "buddy rho 2 loses less than random rho 2, in cells",
            "all",
            1.0,
            1.0,
            [statistics.fmean(line["is_met"] for line in better)] if better else [],
            better,
            "experts of the demo models are hardly alike, so no buddy is near",
            small,
            neutral=0.0,
            form=percent,
        ),
        Claim(
            "bytes moved, fewer by (caption: 20%; text: exact moves 20% more)",
            "17 to 20%",
            1 / 6,
            0.2,
            [line["saved"] for line in fewer],
            fewer,
            "rho 2 of 4, 3 of 8 resident, from disk and over an emulated link",
            small,
            neutral=0.0,
            form=percent,
        ),
    ]
    return _said(claims, page)


def _median(line: Line, name: str) -> float:
    return Spread.of(line[f"each_{name}"]).median


def _said(claims: Sequence[Claim], page: Path) -> str:
    """A table of each machine's claims, then those that there is nothing for."""
    rows: list[Row] = [(claim.lines, claim.cells) for claim in claims if claim.lines]
    absent = [f"{claim.of} (`{claim.command}`)" for claim in claims if not claim.lines]
    parts = [by_machine(_HEAD, rows, page)] if rows else []
    if absent:
        parts.append(f"Not measured yet in {MIN_TURNS} turns or more: {'; '.join(absent)}.")
    return "\n\n".join(parts)
