"""`lowtide calibrate`: record how a text routes through a model's experts, for the policies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.table import Table
from rich.text import Text

from lowtide.cli.command import takes
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import find_model_with_experts, open_llm
from lowtide.cli.options import Settings
from lowtide.cli.report import json_line
from lowtide.cli.screen import ProgressBars, number_table, stdout_console
from lowtide.cli.text_file import read_text
from lowtide.errors import UsageError
from lowtide.files.whole_file import check_writable
from lowtide.option import Group
from lowtide.replay.calibration import GATES, TOP_SIZES, Calibration, default_path, is_calibration
from lowtide.replay.trace import TraceShape

if TYPE_CHECKING:
    from lowtide.lab.buddies import ProfileChoices
    from lowtide.lab.calibration_report import Budget
    from lowtide.policies.buddy_profile import BuddyProfile

_MAX_LAYERS = 40
"""Maximum number of rows in the table of buddies; more layers are sampled evenly."""


@takes(
    Group.CALIBRATION,
    "out",
    "machine",
    Group.ENGINE,
    Group.HUB,
    Group.OUTPUT,
    help_texts={
        "out": "The file to write; by default one in your cache, where lowtide looks for it.",
        "plot": "Draw pictures into this folder.",
        "machine": "Hardware profile for the table of refresh intervals; default: rtx3090.",
    },
)
def calibrate(
    model: ModelName,
    *,
    settings: Settings,
) -> None:
    """Learn from a text which experts a model uses, so that policies keep the right ones.

    Routing, residual vectors and statistics go to --out, or to a file in the user's cache. The
    table shows how often to choose residents again on --machine. --buddies also records which
    expert can replace which, for the policy buddymoe; --inputs records the inputs of experts'
    matrices, for pack and --format.
    """
    from lowtide.lab.profiles import load_profile

    machine = str(settings["machine"])
    text, profile = read_text(model, settings), load_profile(machine)
    with redirect_stdout(sys.stderr):
        calibration, path = _calibrate(model, text, settings)
    from lowtide.core import MoEShape
    from lowtide.lab.buddy_report import as_object as describe
    from lowtide.lab.calibration_report import as_object, plot, weigh_budgets

    budgets = weigh_budgets(calibration, profile.costs(MoEShape(*calibration.shape)))
    folder = settings.text("plot")
    plots = plot(calibration, Path(folder)) if folder is not None else []
    buddies = calibration.buddies
    if settings.flag("json"):
        files = {"path": str(path), "plots": [str(each) for each in plots]}
        told = {**files, "machine": machine, **as_object(calibration, budgets)}
        print(json_line(told if buddies is None else {**told, "buddies": describe(buddies)}))
        return
    stdout_console().print(Text(_sentence(model, settings.text("out"))))
    _show(calibration, budgets, machine)
    for written in (path, *plots):
        stdout_console().print(f"wrote {written}")


def _sentence(model: str, out: str | None) -> str:
    """Say when policies use this calibration."""
    when = "from now on" if out is None else f"given --calibration {out}"
    return (
        f"lowtide has learned which experts of {model} this text uses: {when}, policies choose by "
        "that what to keep in memory, and answers stay the same."
    )


def _show(calibration: Calibration, budgets: Sequence[Budget], machine: str) -> None:
    console, buddies = stdout_console(), calibration.buddies
    console.print(_gate_table(calibration))
    console.print(_budget_table(budgets, calibration.shape.num_experts, machine))
    if buddies is not None:
        console.print(_buddy_table(buddies))
    if (inputs := calibration.inputs) is not None:
        console.print(
            f"experts' inputs of {inputs.num_pairs} pairs of row and expert; {inputs.num_unseen} "
            f"of {inputs.num_rows.size} experts had none and have their layer's"
        )


def _calibrate(model: str, text: str, settings: Settings) -> tuple[Calibration, Path]:
    folder = find_model_with_experts(model, settings, "A calibration is of experts")
    from lowtide.lab.calibrate import calibrate as run
    from lowtide.lab.calibration_report import check_plots

    plots = settings.text("plot")
    if plots is not None:
        check_plots(Path(plots))
    out = settings.text("out")
    if out is not None:  # before it is loaded; the default's name is known only then
        check_writable(Path(out), "calibration", is_calibration)
    with open_llm(model, settings) as llm, ProgressBars() as progress:
        shape = TraceShape(*llm.config.moe_shape)
        if out is not None:
            path = Path(out)
        else:
            path = default_path(folder, llm.config.architecture, shape)
            check_writable(path, "calibration", is_calibration)
        num_pieces = cast(int, settings["pieces"])
        calibration = run(
            llm,
            text,
            model,
            num_pieces=num_pieces,
            buddies=settings.flag("buddies"),
            choices=_choices(settings, shape.num_layers),
            inputs=settings.flag("inputs"),
            progress=progress,
        )
    calibration.save(path)
    return calibration, path


def _choices(settings: Settings, num_layers: int) -> ProfileChoices:
    """Return the buddy profile's choices. Raise UsageError for an option that needs --buddies."""
    from lowtide.lab.buddies import ProfileChoices, layer_alphas

    alpha = settings.text("buddy_alpha")
    temperature = float(cast(float, settings["buddy_temperature"]))
    choices = ProfileChoices(
        settings.flag("buddy_weights"),
        temperature,
        None if alpha is None else layer_alphas(alpha, num_layers),
    )
    if choices != ProfileChoices() and not settings.flag("buddies"):
        raise UsageError(
            "--buddy-weights, --buddy-temperature and --buddy-alpha say how a buddy profile is "
            "made: add --buddies."
        )
    if not temperature > 0:
        raise UsageError(f"--buddy-temperature must be above 0, not {temperature:g}.")
    return choices


def _gate_table(calibration: Calibration) -> Table:
    from lowtide.lab.calibration_report import previous_step

    columns = ["by", "routed", *(f"top {n}" for n in TOP_SIZES), "cosine"]
    table = number_table("the next layer's routing, foreseen", columns, left=["by"])
    accuracy = calibration.accuracy
    for gate, name in enumerate(GATES):
        shares = [accuracy.routed[gate].mean(), *accuracy.top[gate].mean(axis=0)]
        row = [f"{share:.0%}" for share in shares] + [f"{accuracy.cosine[gate].mean():.3f}"]
        table.add_row(f"{name} gate", *row)
    tops = previous_step(calibration.trace).mean(axis=0)
    table.add_row("previous step", "", *(f"{share:.0%}" for share in tops), "")
    return table


def _budget_table(budgets: Sequence[Budget], num_experts: int, machine: str) -> Table:
    title = f"refresh intervals (tau) of policy tide on {machine}"
    columns = ("residents", "drift", "missed, tau 1", "tau 4", "tau by paper", "by simulation")
    table = number_table(title, columns)
    for budget in budgets:
        table.add_row(
            f"{budget.num_residents} of {num_experts}",
            f"{budget.drift:.0%}",
            f"{budget.misses[0]:.0%}",
            f"{budget.misses[3]:.0%}",
            str(budget.paper_tau),
            str(budget.auto_tau),
        )
    return table


def _buddy_table(profile: BuddyProfile) -> Table:
    """Make a table with one row per layer.

    Columns: mean number of peers that reach alpha, mean length of a buddy list, experts that no
    token chose, and measures of how co-activation is spread.
    """
    from lowtide.lab.buddy_report import TOP_PEERS, layer_reports
    from lowtide.policies.buddy_profile import DEFAULT_K_MAX

    low, high = min(alphas := profile.alpha_of_layers()), max(alphas)
    alpha = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    title = f"buddies, alpha {alpha}, at most {DEFAULT_K_MAX} of {profile.num_experts - 1}"
    columns = ["layer", "reach it", "list", "unseen"]
    table = number_table(title, [*columns, f"top {TOP_PEERS}", "concentration", "affinity"])
    reports = list(enumerate(layer_reports(profile)))
    for layer, report in reports[:: -(-len(reports) // _MAX_LAYERS)]:
        table.add_row(
            str(layer),
            f"{report.reaches_alpha:.1f}",
            f"{report.list_length:.1f}",
            str(report.num_unseen),
            f"{report.top_peers:.0%}",
            f"{report.concentration:.3f}",
            f"{report.affinity:.3f}",
        )
    return table
