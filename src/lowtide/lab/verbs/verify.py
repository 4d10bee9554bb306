"""`lowtide verify`: compare the offloaded run with the resident one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer
from rich.table import Table

from lowtide.cli.command import EXIT_FAILURE, takes
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import find_model
from lowtide.cli.options import Settings
from lowtide.cli.report import json_line
from lowtide.cli.screen import stderr_console, stdout_console
from lowtide.config import format_size
from lowtide.errors import UsageError
from lowtide.option import Group
from lowtide.policies.presets import AUTO, is_lossless

if TYPE_CHECKING:
    from lowtide.lab.agreement import Agreement
    from lowtide.lab.verify import Lossy, Verdict

_OWN_CHOICE = ("host_memory", "gpu_memory")


@takes(Group.ENGINE, Group.HUB, Group.OUTPUT)
def verify(model: ModelName, *, settings: Settings) -> None:
    """Prove that budgets and policies change no token and no bit; exit 1 if they do.

    Runs on the CPU, on the GPU if there is one, and with --device emulated on an emulated one. With
    --kv-cache prefix or dual, or with a --policy that changes words, it also counts the tokens that
    agree with the exact run.
    """
    options = settings.engine_options()
    lossy = _lossy(settings, options)
    for name in _OWN_CHOICE:
        options.pop(name, None)
        if settings.is_given(name):
            raise UsageError(f"verify chooses {name} itself: it runs several; leave it out.")
    with redirect_stdout(sys.stderr):
        folder = find_model(model, settings)
        from lowtide.lab.verify import verify as compare

        verdicts = compare(str(folder), on_verdict=_show_progress, lossy=lossy, **options)
        agreement = _agreement(str(folder), options)
    is_kept = all(verdict.is_same for verdict in verdicts if verdict.is_lossless)
    if settings.flag("json"):
        rows = [dataclasses.asdict(v) | {"is_same": v.is_same} for v in verdicts]
        found = {} if agreement is None else {"agreement": _agreement_object(agreement)}
        print(json_line({"is_same": is_kept, "runs": rows, **found}))
    else:
        stdout_console().print(_table(verdicts))
        if agreement is not None:
            stdout_console().print(_agreement_line(agreement))
        stdout_console().print(_verdict_line(verdicts))
    if not is_kept:
        raise typer.Exit(EXIT_FAILURE)


def _lossy(settings: Settings, options: dict[str, object]) -> Lossy | None:
    """Take a lossy policy out of the options; None if none was named.

    Raises UsageError for a lossless one, since verify runs all of those.
    """
    from lowtide.lab.verify import Lossy

    policy, policy_options = options.pop("policy", AUTO), options.pop("policy_options", {})
    if not settings.is_given("policy") and not settings.is_given("policy_option"):
        return None
    if is_lossless(str(policy)):
        raise UsageError(
            "verify runs every lossless policy; leave --policy and --policy-option out, or name "
            "one that changes words, to see by how much: --policy buddymoe."
        )
    return Lossy(str(policy), cast(Mapping[str, str], policy_options))


def _agreement(folder: str, options: Mapping[str, object]) -> Agreement | None:
    """Compare with exact mode if the options ask for an approximation."""
    if not isinstance(options["kv_cache"], str):
        return None
    from lowtide.lab.agreement import agreement
    from lowtide.lab.verify import random_prompt
    from lowtide.model_folder.model_config import load_config

    overrides = cast(Mapping[str, object], options.get("config_overrides", {}))
    prompt = random_prompt(load_config(Path(folder), overrides))
    return agreement(folder, prompt=prompt, **options)  # type: ignore[arg-type]


def _agreement_object(agreement: Agreement) -> dict[str, object]:
    shares = {"equal_share": agreement.equal_share, "likeliest_share": agreement.likeliest_share}
    return dataclasses.asdict(agreement) | shares


def _agreement_line(agreement: Agreement) -> str:
    first = agreement.first_different
    where = "" if first is None else f", the first other at {first}"
    return (
        f"{agreement.kv_cache} cache beside exact mode: {agreement.num_equal} of "
        f"{agreement.num_tokens} tokens are equal{where}; {agreement.num_likeliest} are what the "
        "exact model holds likeliest where they were written"
    )


def _verdict_line(verdicts: Sequence[Verdict]) -> str:
    """Summarise in one line whether all lossless runs agree, and their number."""
    promised = [verdict for verdict in verdicts if verdict.is_lossless and not verdict.reason]
    different = [verdict for verdict in promised if not verdict.is_same]
    most = max((max(v.divided.values(), default=1) for v in promised), default=1)
    budgets = {(verdict.device, verdict.budget_bytes) for verdict in promised}
    policies = {verdict.policy for verdict in promised}
    ran = f"{len(promised)} runs, {len(budgets)} budgets, {len(policies)} policies"
    if most > 1:
        ran += f", passes of {promised[0].num_long_tokens} tokens in up to {most} chunks"
    if not different:
        bits = "within the tolerance" if any(v.tolerance for v in promised) else "bit for bit"
        return f"verdict: the same {bits} ({ran})"
    worst = max(different, key=lambda verdict: verdict.largest_layer_difference)
    return (
        f"verdict: NOT the same in {len(different)} of {ran}; worst: {worst.policy} on "
        f"{worst.device} at {format_size(worst.budget_bytes)}"
    )


def _show_progress(verdict: Verdict) -> None:
    if stderr_console().is_terminal:
        at = f"{verdict.device}, {verdict.policy} at {format_size(verdict.budget_bytes)}"
        stderr_console().print(f"{at}: done")


def _table(verdicts: list[Verdict]) -> Table:
    """Make a table with a section per device and budget."""
    has_experts = any(v.num_residents or v.hit_rate > 0 for v in verdicts)
    table = Table(title=_title(verdicts, has_experts), title_justify="left")
    table.add_column("budget, resident experts" if has_experts else "budget", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for name in ("hits", "layers", "logits", "tokens")[not has_experts :]:
        table.add_column(name, justify="right")
    last = ""
    for verdict in verdicts:
        setting = f"{verdict.device} {format_size(verdict.budget_bytes)}"
        if has_experts:
            setting += f", {verdict.num_residents}"
        if setting != last:
            table.add_section()
        table.add_row(
            setting if setting != last else "",
            verdict.policy,
            *_outcome(verdict)[not has_experts :],
        )
        last = setting
    return table


def _title(verdicts: list[Verdict], has_experts: bool) -> str:
    title = "against the run with most experts resident" if has_experts else "against another run"
    if verdicts and not verdicts[0].formats.is_own:
        title += f", weights in {verdicts[0].formats} in both"
    for verdict in verdicts:
        if verdict.tolerance:
            within = f"{verdict.tolerance:g} of the largest value, given the same input"
            return f"{title}; on {verdict.device} layers within {within}"
    return title


def _outcome(verdict: Verdict) -> list[str]:
    if verdict.reason:
        return ["", "", "", "cannot run"]
    layers = _difference(verdict.largest_layer_difference)
    if verdict.first_layer is not None and verdict.is_lossless:
        layers += f" from {verdict.first_layer}"
    token = verdict.first_token
    tokens = "same" if token is None else f"differ at {token}"
    if not verdict.is_lossless:
        tokens = f"lossy: {verdict.num_equal_tokens} of {verdict.num_tokens} equal"
    return [
        f"{verdict.hit_rate:.0%}",
        layers,
        _difference(verdict.largest_logit_difference),
        tokens,
    ]


def _difference(value: float) -> str:
    return f"differ by {value:g}" if value else "same"
