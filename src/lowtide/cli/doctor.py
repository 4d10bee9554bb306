"""`lowtide doctor`: name faults of this machine, a model that runs well on it, and its rates."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lowtide.cli.command import takes
from lowtide.cli.generate import model_names
from lowtide.cli.opening import find_model
from lowtide.cli.options import Settings
from lowtide.cli.outlook import per_second
from lowtide.cli.report import json_line
from lowtide.cli.screen import ProgressBars, number_table, stdout_console
from lowtide.config import format_size
from lowtide.option import Group
from lowtide.plan import OWN_FORMAT

if TYPE_CHECKING:
    from lowtide.doctor.checkup import Suggestion
    from lowtide.doctor.diagnosis import Diagnosis, ExpertCosts
    from lowtide.hardware.machine import Machine, Rate
    from lowtide.hardware.measure import Measurements, Point
    from lowtide.hardware.timing import Timing

WIDE_SPREAD = 0.5
"""Relative spread of repeats above which a measurement is called unreliable."""

OptionalModelName = Annotated[
    str | None,
    typer.Argument(
        help="A folder, GGUF file, hub id or demo whose experts are measured, too.",
        metavar="MODEL",
        autocompletion=model_names,
    ),
]


@takes(Group.ENGINE, Group.HUB, Group.DOCTOR, Group.OUTPUT)
def doctor(
    model: OptionalModelName = None,
    *,
    settings: Settings,
) -> None:
    """Check this machine for faults; -v shows how fast its memory and disk are.

    With MODEL the costs of its experts here are measured, too; with a GPU its plans use them.
    """
    options = settings.engine_options()
    with redirect_stdout(sys.stderr):
        folder = None if model is None else find_model(model, settings)
        from lowtide.doctor.checkup import Present, faults, suggestion
        from lowtide.doctor.doctor import diagnose

        with ProgressBars() as progress:
            diagnosis = diagnose(
                folder,
                name=model or "",
                is_fresh=settings.flag("fresh"),
                progress=progress,
                **options,
            )
        found, suggested = faults(diagnosis, Present.now()), suggestion()
    if settings.flag("json"):
        runs_well = suggested and suggested._asdict()
        print(json_line({**diagnosis.as_dict(), "faults": found, "runs_well": runs_well}))
    else:
        _print("\n".join(verdict(diagnosis, found, suggested)), diagnosis, settings.flag("verbose"))


def verdict(
    diagnosis: Diagnosis, found: Sequence[str], suggested: Suggestion | None
) -> Iterator[str]:
    """List faults, skipped measurements and a model that runs well, a line each."""
    if not found and not diagnosis.skipped:
        yield "Nothing is wrong with this machine."
    if len(found) == 1:
        yield f"To fix: {found[0]}"
    elif found:
        yield f"{len(found)} things to fix:"
        yield from (f"- {fault}" for fault in found)
    yield from (f"{name} was not measured: {reason}" for name, reason in diagnosis.skipped)
    for costs in diagnosis.costs:
        spread = costs.stored.measurements.spread
        if spread > WIDE_SPREAD:
            yield (
                f"Repeats lie {spread:.0%} of their median apart: something else used the machine. "
                "Measure again with --fresh when it is quiet."
            )
    yield _suggestion_line(suggested)


def _suggestion_line(suggested: Suggestion | None) -> str:
    if suggested is None:
        return (
            "No published model fits into the free memory: some of its experts "
            "will be read from disk (lowtide plan MODEL)."
        )
    way = "" if suggested.format == OWN_FORMAT else f" with --format {suggested.format}"
    at_most = suggested.at_most
    speed = "" if at_most is None else f", at most {per_second(at_most)} tokens/s"
    memory = format_size(suggested.memory_bytes)
    return f"Runs well here: {suggested.hub_id}{way}, all of it in memory ({memory}){speed}."


def _print(verdict: str, diagnosis: Diagnosis, is_verbose: bool) -> None:
    console = stdout_console()
    console.print(Text(verdict))
    if not is_verbose:
        console.print("lowtide doctor -v shows what was measured.")
        return
    console.print(machine_line(diagnosis.machine))
    console.print(rates_table(diagnosis.rates))
    for costs in diagnosis.costs:
        console.print(_costs_table(costs))
        console.print(Text(_moves_line(costs)))


def machine_line(machine: Machine) -> str:
    """Describe the machine in one line."""
    gpu = machine.gpu or "no GPU"
    memory = format_size(machine.memory_bytes)
    return f"{machine.cpu} · {machine.num_cores} cores · {memory} · {gpu} · {machine.kernel}"


def rates_table(rates: Sequence[Rate]) -> Table:
    """Make a table of the machine's rates and ceilings."""
    columns = ("what", "measured", "repeats within", "ceiling")
    table = number_table("this machine at its best", columns, left=["what"])
    for rate in rates:
        how = "specified" if rate.is_specified else "best repeat"
        ceiling = f"{_per_s(rate.ceiling, rate.unit)}, {how}"
        table.add_row(rate.name, _per_s(rate.per_s, rate.unit), f"{rate.spread:.0%}", ceiling)
    return table


def _costs_table(costs: ExpertCosts) -> Table:
    measurements = costs.stored.measurements
    size = format_size(measurements.expert_bytes)
    title = f"{costs.name}: experts of {size}, {costs.dtype}, measured {costs.stored.date[:10]}"
    curves = {"expert on host": measurements.host}
    if measurements.device:
        curves["expert on device"] = measurements.device
    curves[f"rest of layer, {format_size(costs.dense_bytes)}"] = measurements.dense
    table = number_table(title, ["tokens", *(f"{name}, ms" for name in curves)])
    for count in sorted({point.num_tokens for curve in curves.values() for point in curve}):
        table.add_row(str(count), *[_cell(curve, count) for curve in curves.values()])
    return table


def _cell(curve: Sequence[Point], num_tokens: int) -> str:
    """Format a point of a curve; empty where the curve has no such point."""
    median_s = {point.num_tokens: point.timing.median_s for point in curve}
    return _milliseconds(median_s[num_tokens]) if num_tokens in median_s else ""


def _moves_line(costs: ExpertCosts) -> str:
    """Describe the time to move an expert, and the share of the memory rate that it computes at."""
    measurements = costs.stored.measurements
    parts = [f"{_rate(measurements, measurements.host[0].timing)} of weights with 1 token"]
    if costs.device:
        parts.append(costs.device)
    if measurements.link is not None:
        parts.append(f"fetched in {_move(measurements, measurements.link)}")
    if measurements.sync is not None:
        parts.append(f"synchronised in {measurements.sync.median_s * 1e6:.0f} us")
    if measurements.disk_read is not None:
        how = "direct" if measurements.is_read_direct else "through the page cache"
        parts.append(f"read in {_move(measurements, measurements.disk_read)}, {how}")
    return " · ".join(parts)


def _move(measurements: Measurements, timing: Timing) -> str:
    return f"{_milliseconds(timing.median_s)} ms ({_rate(measurements, timing)})"


def _rate(measurements: Measurements, timing: Timing) -> str:
    return _per_s(measurements.expert_bytes / timing.median_s, "B")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _per_s(per_s: float, unit: str) -> str:
    return f"{per_s / 1e9:.3g} G{unit}/s"
