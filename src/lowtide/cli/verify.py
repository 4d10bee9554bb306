"""`lowtide verify`: the offloaded run against the resident one."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from lowtide.cli.command import EXIT_FAILURE, takes
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import find_model
from lowtide.cli.options import Group, Settings
from lowtide.cli.report import json_line
from lowtide.cli.screen import stderr_console, stdout_console
from lowtide.config import format_size
from lowtide.errors import UsageError

if TYPE_CHECKING:
    from lowtide.lab.verify import Verdict

# The option, and the keyword that it becomes.
_OWN_CHOICE = {
    "host_memory": "host_memory",
    "gpu_memory": "gpu_memory",
    "policy": "policy",
    "policy_option": "policy_options",
}


@takes(Group.ENGINE, Group.HUB, Group.OUTPUT)
def verify(model: ModelName, *, settings: Settings) -> None:
    """Prove that budgets and policies change no token and no bit; exit 1 if they do.

    On the CPU, on the GPU if there is one, and with --device emulated on an emulated one.
    """
    options = settings.engine_options()
    for name, keyword in _OWN_CHOICE.items():
        options.pop(keyword, None)
        if settings.is_given(name):
            raise UsageError(f"verify chooses {keyword} itself: it runs several; leave it out.")
    with redirect_stdout(sys.stderr):
        folder = find_model(model, settings)
        from lowtide.lab.verify import verify as compare

        verdicts = compare(str(folder), on_verdict=_show_progress, **options)  # type: ignore[arg-type]
    is_kept = all(verdict.is_same for verdict in verdicts)
    if settings.flag("json"):
        rows = [dataclasses.asdict(v) | {"is_same": v.is_same} for v in verdicts]
        print(json_line({"is_same": is_kept, "runs": rows}))
    else:
        stdout_console().print(_table(verdicts))
    if not is_kept:
        raise typer.Exit(EXIT_FAILURE)


def _show_progress(verdict: Verdict) -> None:
    if stderr_console().is_terminal:
        at = f"{verdict.device}, {verdict.policy} at {format_size(verdict.budget_bytes)}"
        stderr_console().print(f"{at}: done")


def _table(verdicts: list[Verdict]) -> Table:
    """A section for each device and budget."""
    table = Table(title=_title(verdicts), title_justify="left")
    table.add_column("budget, resident experts", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for name in ("hits", "layers", "logits", "tokens"):
        table.add_column(name, justify="right")
    last = ""
    for verdict in verdicts:
        setting = f"{verdict.device} {format_size(verdict.budget_bytes)}, {verdict.num_residents}"
        if setting != last:
            table.add_section()
        table.add_row(setting if setting != last else "", verdict.policy, *_outcome(verdict))
        last = setting
    return table


def _title(verdicts: list[Verdict]) -> str:
    title = "against the run with most experts resident"
    for verdict in verdicts:
        if verdict.tolerance:
            within = f"{verdict.tolerance:g} of the largest value, given the same input"
            return f"{title}; on {verdict.device} layers within {within}"
    return title


def _outcome(verdict: Verdict) -> list[str]:
    if verdict.reason:
        return ["", "", "", "cannot run"]
    layers = _difference(verdict.largest_layer_difference)
    if verdict.first_layer is not None:
        layers += f" from {verdict.first_layer}"
    token = verdict.first_token
    return [
        f"{verdict.hit_rate:.0%}",
        layers,
        _difference(verdict.largest_logit_difference),
        "same" if token is None else f"differ at {token}",
    ]


def _difference(value: float) -> str:
    return f"differ by {value:g}" if value else "same"
