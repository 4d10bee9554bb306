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
from lowtide.cli.report import json_line
from lowtide.cli.screen import stderr_console, stdout_console
from lowtide.config import format_size
from lowtide.errors import UsageError
from lowtide.options import Group, Settings

if TYPE_CHECKING:
    from lowtide.lab.verify import Verdict


@takes(Group.ENGINE, Group.HUB, Group.OUTPUT)
def verify(model: ModelName, *, settings: Settings) -> None:
    """Prove that budgets and policies change no token and no bit; exit 1 if they do."""
    options = settings.engine_options()
    for name in ("host_memory", "policy", "policy_options"):
        options.pop(name, None)
        if settings.is_given(name.replace("policy_options", "policy_option")):
            raise UsageError(f"verify chooses {name} itself: it runs several; leave it out.")
    with redirect_stdout(sys.stderr):
        folder = find_model(model, settings)
        from lowtide.lab.verify import verify as compare

        verdicts = compare(str(folder), on_verdict=_show_progress, **options)  # type: ignore[arg-type]
    is_kept = all(verdict.is_same for verdict in verdicts)
    if settings.flag("json"):
        rows = [dataclasses.asdict(verdict) for verdict in verdicts]
        print(json_line({"is_same": is_kept, "runs": rows}))
    else:
        stdout_console().print(_table(verdicts))
    if not is_kept:
        raise typer.Exit(EXIT_FAILURE)


def _show_progress(verdict: Verdict) -> None:
    if stderr_console().is_terminal:
        stderr_console().print(f"{verdict.policy} at {format_size(verdict.budget_bytes)}: done")


def _table(verdicts: list[Verdict]) -> Table:
    table = Table(title="against the run with most experts resident", title_justify="left")
    for name in ("policy", "budget", "residents", "hit rate", "layers", "logits", "tokens"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for verdict in verdicts:
        layers = f"{verdict.largest_layer_difference:g} from {verdict.first_layer}"
        tokens = f"differ at {verdict.first_token}"
        table.add_row(
            verdict.policy,
            format_size(verdict.budget_bytes),
            str(verdict.num_residents),
            f"{verdict.hit_rate:.0%}",
            "same bits" if verdict.first_layer is None else layers,
            _difference(verdict.largest_logit_difference),
            "same" if verdict.first_token is None else tokens,
        )
    return table


def _difference(value: float) -> str:
    return f"differ by {value:g}" if value else "same bits"
