"""`lowtide simulate`: replay a recorded run under other policies, budgets and machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table

from lowtide.cli.command import takes
from lowtide.cli.options import Settings
from lowtide.cli.report import json_line
from lowtide.cli.screen import number_table, stderr_console, stdout_console
from lowtide.config import format_size
from lowtide.errors import UsageError
from lowtide.lab.policy_options import options_by_policy
from lowtide.option import Group
from lowtide.policies.presets import AUTO, ORACLE, parse_options
from lowtide.policies.tau import SolvedTau

if TYPE_CHECKING:
    from lowtide.lab.profiles import Profile
    from lowtide.lab.simulation.simulator import Report
    from lowtide.replay.calibration import Calibration
    from lowtide.replay.trace import Trace


COMPARED = "tide,dali,lowtide,lru,fiddler,hybrimoe,layer-split"


@takes(
    Group.SIMULATION,
    "policy",
    "policy_option",
    "calibration",
    Group.OUTPUT,
    help_texts={
        "policy": f"Policies to compare, separated by commas; oracle knows the future. Default: "
        f"{COMPARED.replace(',', ', ')}.",
        "calibration": "File from calibrate --out, for policies that use it.",
    },
)
def simulate(
    trace: Annotated[str, typer.Argument(help="File from generate --trace.", metavar="TRACE")],
    *,
    settings: Settings,
) -> None:
    """Replay a recorded routing (generate --trace) under other policies and machines.

    Nothing is computed: time is simulated. Each --policy-option applies to the policies that have
    it.
    """
    from lowtide.lab.profiles import load_profile
    from lowtide.replay.calibration import Calibration
    from lowtide.replay.trace import Trace

    machine, calibration = str(settings["machine"]), settings.text("calibration")
    residents, tau = cast(float, settings["residents"]), cast(int, settings["tau"])
    profile = load_profile(machine)
    recorded = Trace.load(Path(trace))
    known = None
    if calibration is not None:
        known = Calibration.load(Path(calibration), has_inputs=False)
    if not recorded.passes:
        raise UsageError(
            f"Trace {trace} has no passes: nothing ran while it was recorded. Record an answer, "
            "with lowtide generate --trace."
        )
    asked = str(settings["policy"])
    names = (COMPARED if asked == AUTO else asked).split(",")
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise UsageError("--policy names none; give at least one.")
    if AUTO in names:
        raise UsageError("auto stands for one of the policies; name those to compare.")
    if len({*names}) < len(names):
        raise UsageError(f"--policy names a policy twice: {', '.join(names)}.")
    given = cast(Mapping[str, str], settings["policy_option"] or {})
    options = {"tau": tau, **_parsed(names, given)}
    reports = _replay(recorded, known, profile, names, residents, options)
    if settings.flag("json"):
        runs = [report.as_dict() for report in reports]
        print(json_line({"trace": str(trace), "machine": machine, "runs": runs}))
        return
    stdout_console().print(_table(reports, f"{profile.name}; {residents:.0%} of the experts"))
    notes = ["simulated time of the MoE layers; what early gates foresee is in its column"]
    notes += _capacity_notes(recorded, profile, residents)
    for note in notes:
        stderr_console().print(note, style="dim")


def _parsed(presets: list[str], given: Mapping[str, str]) -> dict[str, object]:
    """Parse policy options; raises UsageError if no preset has one, or a replay cannot use it."""
    parsed: dict[str, object] = {}
    named = [preset for preset in presets if preset != ORACLE]
    for preset, own in options_by_policy(named, given).items():
        parsed |= parse_options(preset, own)
    if isinstance(parsed.get("tau"), SolvedTau):
        raise UsageError("tau=paper is solved for a model and its budget: give a number, or auto.")
    return parsed


def _replay(
    recorded: Trace,
    known: Calibration | None,
    profile: Profile,
    presets: list[str],
    residents: float,
    options: Mapping[str, object],
) -> list[Report]:
    from lowtide.core import MoEShape
    from lowtide.lab.simulation.foresight import measured_accuracy
    from lowtide.lab.simulation.simulator import compare
    from lowtide.policies.recipe import PolicyInputs

    shape = MoEShape(*recorded.shape)
    if not shape.hidden_size or not shape.expert_size:
        raise UsageError(
            "The trace does not say how large an expert is; record it again, with lowtide generate "
            "--trace."
        )
    if known is not None:
        check_same_shape(recorded, known)
    inputs = PolicyInputs(
        capacity=[round(residents * shape.num_experts)] * shape.num_layers,
        num_experts=shape.num_experts,
        costs=profile.costs(shape),
        frequency=known.frequency if known else None,
        following=known.following if known else None,
        hits=known.trace.hits() if known else None,
        options=options,
        buddies=known.buddies if known else None,
    )
    accuracy = measured_accuracy(known) if known else None
    return compare(recorded, presets, inputs, gate_accuracy=accuracy)


def _capacity_notes(recorded: Trace, profile: Profile, residents: float) -> list[str]:
    """Note where residents or experts exceed the profile's memory; the replay runs all the same."""
    from lowtide.core import MoEShape

    shape = MoEShape(*recorded.shape)
    all_bytes = profile.costs(shape).expert_bytes * shape.num_layers * shape.num_experts
    notes = []
    if residents * all_bytes > profile.device_memory_bytes:
        notes.append(
            f"The residents take {_size(residents * all_bytes)}; the device has "
            f"{_size(profile.device_memory_bytes)}."
        )
    if all_bytes > profile.host_memory_bytes:
        notes.append(
            f"All experts take {_size(all_bytes)} and the host has "
            f"{_size(profile.host_memory_bytes)}: reading the others from disk is not simulated."
        )
    return notes


def _size(num_bytes: float) -> str:
    return format_size(round(num_bytes))


def check_same_shape(recorded: Trace, known: Calibration) -> None:
    """Raise UsageError if trace and calibration are of models of different shapes."""
    if known.shape != recorded.shape:
        raise UsageError(
            f"The trace is of {recorded.model!r} and the calibration of {known.trace.model!r}, "
            "whose layers or experts differ; calibrate the model of the trace."
        )


def _table(reports: list[Report], title: str) -> Table:
    is_replaced = any(report.num_substituted for report in reports)
    names = ["policy", "tokens/s", "hit rate", "moved", "what binds", "early gate"]
    names += ["mass replaced"] if is_replaced else []
    table = number_table(title, names, left=["policy", "what binds", "early gate"])
    for report in reports:
        cells = [
            report.preset,
            f"{report.tokens_per_s:.1f}",
            f"{report.hit_rate:.0%}",
            format_size(report.moved_bytes),
            report.binds,
            report.foresight,
        ]
        table.add_row(*cells, *([f"{report.moved_share:.2%}"] if is_replaced else []))
    return table
