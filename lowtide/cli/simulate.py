"""`lowtide simulate`: a recorded run replayed under other policies, budgets and machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lowtide.cli.command import takes
from lowtide.cli.report import json_line
from lowtide.cli.screen import stderr_console, stdout_console
from lowtide.config import format_size
from lowtide.errors import UsageError
from lowtide.options import Group, Settings

if TYPE_CHECKING:
    from lowtide.calibration import Calibration
    from lowtide.profiles import Profile
    from lowtide.simulate import Report
    from lowtide.trace import Trace

DEFAULT_PRESETS = "tide,dali,lowtide,lru,fiddler,hybrimoe,layer-split"


@takes(Group.OUTPUT)
def simulate(
    trace: Annotated[Path, typer.Argument(help="What generate --trace wrote.")],
    machine: Annotated[
        str, typer.Option(help="A hardware profile: rtx3090, a100-40gb, ... or a TOML file.")
    ] = "rtx3090",
    presets: Annotated[str, typer.Option(help="Policies, separated by commas.")] = DEFAULT_PRESETS,
    residents: Annotated[
        float, typer.Option(help="Share of each layer's experts that fits.", min=0.0, max=1.0)
    ] = 0.5,
    tau: Annotated[int, typer.Option(help="TIDE's refresh interval in steps.", min=1)] = 4,
    calibration: Annotated[
        Path | None,
        typer.Option(help="What calibrate wrote, for presets that know frequencies or features."),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Replay a trace in simulated time; nothing is computed."""
    from lowtide.calibration import Calibration
    from lowtide.profiles import load_profile
    from lowtide.trace import Trace

    profile = load_profile(machine)
    recorded = Trace.load(trace)
    known = Calibration.load(calibration) if calibration is not None else None
    if not recorded.passes:
        raise UsageError(f"Trace {trace} has no passes: nothing ran while it was recorded.")
    names = [name.strip() for name in presets.split(",") if name.strip()]
    if not names:
        raise UsageError("--presets names none; give at least one.")
    reports = _replay(recorded, known, profile, names, residents, tau)
    if settings.flag("json"):
        print(json_line({"trace": str(trace), "machine": machine, "runs": _objects(reports)}))
        return
    stdout_console().print(_table(reports, f"{profile.name}; {residents:.0%} of the experts"))
    rates = "published" if known is None else "measured"
    note = f"simulated time of the MoE layers; prefetch gates err at {rates} rates"
    stderr_console().print(note, style="dim")


def _replay(
    recorded: Trace,
    known: Calibration | None,
    profile: Profile,
    presets: list[str],
    residents: float,
    tau: int,
) -> list[Report]:
    from lowtide.core import MoEShape
    from lowtide.policies.catalogue import Setting
    from lowtide.simulate import GATE_ACCURACY, compare, measured_accuracy

    shape = MoEShape(*recorded.shape)
    if not shape.hidden_size or not shape.expert_size:
        raise UsageError("The trace does not say how large an expert is; record it again.")
    if known is not None:
        known.check(known.architecture, recorded.shape)
    setting = Setting(
        capacity=[round(residents * shape.num_experts)] * shape.num_layers,
        num_experts=shape.num_experts,
        costs=profile.costs(shape),
        frequency=known.frequency if known else None,
        following=known.following if known else None,
        hits=known.trace.hits() if known else None,
        tau=tau,
    )
    accuracy = measured_accuracy(known) if known else GATE_ACCURACY
    return compare(recorded, presets, setting, gate_accuracy=accuracy)


def _objects(reports: list[Report]) -> list[dict[str, object]]:
    return [report.as_dict() for report in reports]


def _table(reports: list[Report], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("policy", "tokens/s", "hit rate", "moved", "what binds"):
        table.add_column(name, justify="left" if name in ("policy", "what binds") else "right")
    for report in reports:
        table.add_row(
            report.preset,
            f"{report.tokens_per_s:.1f}",
            f"{report.hit_rate:.0%}",
            format_size(report.moved_bytes),
            report.binds,
        )
    return table
