"""BuddyMoE on the trained demo models: what each way with absent experts costs and saves.

At falling shares of resident experts every lane scores the same held-out code in decoding's own
passes, and then all of them take turns at writing. Exact waits for every expert; random, drop and
cache-prior are the baselines; BuddyMoE has the paper's settings by proportion (rho 3 of 6 is 2 of
4, 16 buddies of 64 experts are 8 of 32), gates off as in its tables and on; ours substitutes only
what would be late. Differences are of pairs of tokens, with the errors of stretches of text.

On the disk tier for real, and on an emulated link, whose speeds are those of scaled time. How much
redundancy a model's routing has stands beside its numbers: without any, no buddy can help.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.arguments import make_parser, run_script
from common.baselines import register_baselines
from common.buddies import Lane, Scale, calibrated, lanes, redundancy
from common.ceilings import memory_ceiling
from common.emulated import Model, device_options, temporary_folder
from common.record import Recorder, Row, say

from lowtide.cli.plotting import check_plot
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.families import read_config_in
from lowtide.lab.quality import QualityReport, QualityWork, quality
from lowtide.lab.quality import Row as Scored
from lowtide.lab.quality_plot import plot
from lowtide.lab.quality_scores import Estimate
from lowtide.lab.quality_text import Scope
from lowtide.model_folder.demo_tasks import held_out_text
from lowtide.model_folder.hub import resolve_model

MODELS = ("demo:chat", "demo:diffusion")
TIERS = ("disk", "link")
SHARES = (0.75, 0.5, 0.375)
CONTEXT = 512

BYTES_AT = 0.375
"""The share of residents at which BuddyMoE's bytes are judged."""

FEWER_BYTES = 0.2
REMOVED = 0.5
"""Of random's loss in nats that BuddyMoE removes, at least."""

SPEED_UP = 1.3
"""Ours over exact on the disk tier, where it loses `ACCURACY_LOST` at most, relatively."""

ACCURACY_LOST = 0.01


class Cell(NamedTuple):
    """One model, tier and share; its lanes by name."""

    model: str
    tier: str
    share: float
    rows: Mapping[str, Scored]
    report: QualityReport

    @property
    def facts(self) -> Row:
        return {"model": self.model, "tier": self.tier, "resident_share": self.share}

    def paired_loss(self, first: str, second: str) -> Estimate:
        """Return the loss of the first lane less the second's, in nats per token."""
        assert self.report.scored is not None
        lost, other = (self.rows[lane].scores.loss for lane in (first, second))
        return self.report.scored.estimate(lost - other)

    def bytes_per_pass(self, lane: str) -> float:
        passes = self.rows[lane].passes
        assert passes is not None
        return passes.per_pass("read_bytes" if self.tier == "disk" else "link_bytes")


def main() -> None:
    options = _options()
    for name in options.tiers:
        if options.plots is not None:
            options.plots.mkdir(parents=True, exist_ok=True)
            check_plot(options.plots / f"{name}.png")
    named = ("tokens", "repeats", "new", "placement", "pieces")
    recorder = Recorder("buddy", {name: getattr(options, name) for name in named}, options.out)
    recorder.write("ceiling", memory_ceiling())
    text = held_out_text()
    with temporary_folder() as folder:
        for model in options.models:
            config = read_config_in(resolve_model(model))
            path = Path(folder) / f"{Path(model).name}.buddies"
            profile = calibrated(model, path, options.pieces, context=CONTEXT)
            recorder.write("redundancy", {"model": model, **redundancy(profile)})
            register_baselines(options.placement, config.moe)
            scale = Scale(config.moe.num_experts_per_token, config.moe.num_experts)
            for tier, share in itertools.product(options.tiers, options.shares):
                wanted = lanes(scale, options.placement)
                cell = _measure(options, model, tier, share, wanted, path, text)
                _record(recorder, cell, wanted, options)


def _measure(
    options: argparse.Namespace,
    model: str,
    tier: str,
    share: float,
    wanted: Sequence[Lane],
    calibration: Path,
    text: str,
) -> Cell:
    """All lanes of a cell, on one loaded model."""
    say(f"{model}, {tier}, {share:g} of the experts: {len(wanted)} lanes ...")
    shared: dict[str, Any] = {"context": CONTEXT, "device": "cpu"}
    shared["calibration"] = str(calibration)
    if tier == "link":
        shared |= {"device": "emulated", "device_options": device_options(Model(model, model))}
    opened = open_model(model, EngineConfig(**shared))
    work = QualityWork(
        scope=Scope(options.tokens, 256), max_tokens=options.new, repeats=options.repeats
    ).with_text(opened.facts.tokenizer, text)
    report = quality(model, [lane.setting(share) for lane in wanted], work, **shared)
    names = [lane.name for lane in wanted]
    return Cell(model, tier, share, dict(zip(names, report.rows, strict=True)), report)


def _record(
    recorder: Recorder, cell: Cell, wanted: Sequence[Lane], options: argparse.Namespace
) -> None:
    for lane in wanted:
        recorder.write(lane.name, {**cell.facts, **lane_row(cell, lane)})
    for expectation in expectations(cell, wanted):
        recorder.write("expected", {**cell.facts, **expectation})
    if options.plots is not None:
        name = f"{cell.model.replace(':', '-')}-{cell.tier}-{cell.share:g}.png"
        plot(cell.report, options.plots / name)


def lane_row(cell: Cell, lane: Lane) -> Row:
    """Return one lane's row, beside the exact one."""
    row = cell.rows[lane.name]
    if row.comparison is None or row.passes is None:
        return {"reason": row.reason}
    exact = cell.rows["exact"].tokens_per_s
    compared = row.comparison
    return {
        "tokens_per_s": row.tokens_per_s,
        **_range_of(row),
        "speed_up": row.tokens_per_s / exact if row.tokens_per_s and exact else None,
        "bytes_per_pass": cell.bytes_per_pass(lane.name),
        "passes_per_s": row.passes.passes_per_s,
        **{name: value for name, value in compared.as_dict().items() if name != "num_rows"},
        "of_mask_ratio": {f"{r:g}": c.loss._asdict() for r, c in row.of_ratio.items()},
        "counts": dict(row.passes.counts),
        "policy_options": {"miss": lane.miss, **lane.options},
    }


def _range_of(row: Scored) -> Row:
    """Of the turns that the speed is the median of."""
    if row.speed is None or not row.speed.turns:
        return {}
    speed = row.speed.tokens_per_s
    return {"least": speed.least, "most": speed.most, "num_turns": len(row.speed.turns)}


def expectations(cell: Cell, wanted: Sequence[Lane]) -> list[Row]:
    """Return the expectations of this cell and their results."""
    ran = {lane.name: lane for lane in wanted if not cell.rows[lane.name].reason}
    found = []
    for lane in ran.values():
        if lane.miss == "buddy" and f"random rho {lane.rho}" in ran:
            found.append(_better(cell, lane.name, f"random rho {lane.rho}"))
        if lane.name.startswith("buddy rho") and "random rho none" in ran:
            found.append(_removes(cell, lane.name))
            if lane.rho != "none":
                found.append(_better(cell, lane.name, "random rho none"))
    if cell.share == BYTES_AT:
        found += [_saves_bytes(cell, n) for n in ran if n.startswith("buddy rho")]
    if cell.tier == "disk":
        found += [_speeds_up(cell, name) for name, lane in ran.items() if lane.miss == "late"]
    return found


def _is_gain(mean: Estimate) -> bool:
    """By two standard errors."""
    return mean.error is not None and mean.mean > 2 * mean.error


def _better(cell: Cell, lane: str, other: str) -> Row:
    """By two standard errors, token by token; the exact lane is better than either by nature."""
    gain = cell.paired_loss(other, lane)
    claim = f"{lane} loses less than {other}"
    return {"claim": claim, "nats": gain._asdict(), "is_met": _is_gain(gain)}


def _removes(cell: Cell, lane: str) -> Row:
    """The share of random's loss that a lane removes, and whether that is `REMOVED` for sure."""
    exact, random, own = (cell.rows[n].scores.loss for n in ("exact", "random rho none", lane))
    assert cell.report.scored is not None
    lost = cell.paired_loss("random rho none", "exact").mean
    surplus = cell.report.scored.estimate((1 - REMOVED) * (random - exact) - (own - exact))
    removed = 1 - cell.paired_loss(lane, "exact").mean / lost if lost else None
    claim = f"{lane} removes {REMOVED:.0%} of random's loss"
    return {"claim": claim, "removed": removed, "is_met": _is_gain(surplus)}


def _saves_bytes(cell: Cell, lane: str) -> Row:
    exact, own = cell.bytes_per_pass("exact"), cell.bytes_per_pass(lane)
    saved = 1 - own / exact if exact else 0.0
    claim = f"{lane} moves {FEWER_BYTES:.0%} fewer bytes"
    return {"claim": claim, "saved": saved, "is_met": saved >= FEWER_BYTES}


def _speeds_up(cell: Cell, lane: str) -> Row:
    """Faster than exact, at an accuracy that is nearly its own."""
    exact, own = cell.rows["exact"], cell.rows[lane]
    assert exact.comparison is not None and own.comparison is not None
    ratio = None
    if exact.tokens_per_s and own.tokens_per_s:
        ratio = own.tokens_per_s / exact.tokens_per_s
    accuracy = exact.comparison.accuracy.mean
    lost = -own.comparison.accuracy_difference.mean / accuracy if accuracy else 0.0
    return {
        "claim": f"{lane} is {SPEED_UP} times as fast and loses {ACCURACY_LOST:.0%} of accuracy",
        "speed_up": ratio,
        "accuracy_lost": lost,
        "is_met": ratio is not None and ratio >= SPEED_UP and lost <= ACCURACY_LOST,
    }


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--placement", default="lowtide", help="who stays resident")
    parser.add_argument("--tokens", type=int, default=2048, help="scored per lane")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a timed answer")
    parser.add_argument("--repeats", type=int, default=8, help="timed answers per lane")
    parser.add_argument("--pieces", type=int, default=64, help="of the calibration's text")
    parser.add_argument("--plots", type=Path, help="folder for a picture of every cell")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
