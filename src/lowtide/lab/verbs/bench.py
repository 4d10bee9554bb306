"""`lowtide bench`: measure a model's speed here, under one policy or several."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table
from rich.text import Text

from lowtide.cli.answer import Prompt
from lowtide.cli.command import EXIT_FAILURE, takes
from lowtide.cli.doctor import machine_line, rates_table
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import find_model
from lowtide.cli.options import Settings
from lowtide.cli.outlook import per_second
from lowtide.cli.prompt import read_prompt
from lowtide.cli.report import json_line, plan_object, plan_table
from lowtide.cli.screen import ProgressBars, stdout_console
from lowtide.config import format_size
from lowtide.devices.kind import is_paced
from lowtide.errors import UsageError
from lowtide.lab.policy_options import options_by_policy
from lowtide.option import Group
from lowtide.params import SamplingParams
from lowtide.version import __version__

if TYPE_CHECKING:
    from lowtide.lab.bench import Ceilings, Peak, PresetRun, Result


@takes(
    Group.BENCH,
    Group.ENGINE,
    Group.HUB,
    Group.SAMPLING,
    Group.DIFFUSION,
    Group.OUTPUT,
    unlisted=("stop", "n"),
    help_texts={
        "max_tokens": "Length of each answer in tokens; unset: 64, or what the context leaves.",
        "policy": "Policies to compare, separated by commas. Default: auto.",
    },
)
def bench(
    model: ModelName,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="Text to continue; random tokens if not given."),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Measure the machine, then a model's speed, under one policy or several.

    Without a budget, half of the experts are resident.
    """
    params, repeats = _params(settings), cast(int, settings["repeats"])
    if repeats < 1:
        raise UsageError(f"--repeats must be at least 1, not {repeats}.")
    question = None if prompt is None else read_prompt(prompt, None)
    options = settings.engine_options()
    names = [name.strip() for name in str(options.pop("policy")).split(",")]
    if not all(names):
        raise UsageError(f"--policy {','.join(names)}: a name is missing before or after a comma.")
    if len(set(names)) < len(names):
        raise UsageError(f"--policy names a policy twice: {', '.join(names)}.")
    own_options = cast(Mapping[str, str], options.pop("policy_options", {}))
    policies = options_by_policy(names, own_options)
    with redirect_stdout(sys.stderr):
        folder = str(find_model(model, settings))
        if (profile := settings.text("profile")) is not None:
            from lowtide.lab.machine_profile import check_profile

            check_profile(Path(profile), str(options["device"]))
        ceilings, result = _measured(folder, policies, question, params, repeats, options)
        if profile is not None:
            _save_profile(model, folder, Path(profile), options)
    if settings.flag("json"):
        print(json_line(_object(model, repeats, ceilings, result)))
    else:
        _print(model, repeats, ceilings, result)
    if all(run.reason for run in result.runs):
        raise typer.Exit(EXIT_FAILURE)


def _measured(
    folder: str,
    policies: Mapping[str, Mapping[str, str]],
    prompt: Prompt | None,
    params: SamplingParams,
    repeats: int,
    options: dict[str, Any],
) -> tuple[Ceilings, Result]:
    """Measure the machine's ceilings and the model under each policy.

    A prompt or answer that does not fit is refused before anything is measured.
    """
    from lowtide.lab import bench as lab
    from lowtide.llm import check_request

    check_request(folder, lambda _: [0] if prompt is None else prompt, params, **options)
    with ProgressBars() as progress:
        progress("measuring the machine", 0, 1)
        ceilings = lab.measure_ceilings(folder, **options)
        progress("measuring the machine", 1, 1)
        result = lab.bench(
            folder,
            [lab.Preset(name, own) for name, own in policies.items()],
            prompt,
            params,
            repeats=repeats,
            progress=progress,
            **options,
        )
    return ceilings, result


def _save_profile(model: str, folder: str, path: Path, options: dict[str, Any]) -> None:
    from lowtide.doctor.doctor import diagnose
    from lowtide.lab.machine_profile import save_profile

    with ProgressBars() as progress:
        save_profile(diagnose(folder, name=model, progress=progress, **options), path)


def _params(settings: Settings) -> SamplingParams:
    params = settings.sampling_params()
    if params.stop:
        raise UsageError("bench writes answers of one length: leave --stop out.")
    if params.n > 1:
        raise UsageError("bench times one answer at a time: leave --n out.")
    return params


def _object(model: str, repeats: int, ceilings: Ceilings, result: Result) -> dict[str, object]:
    return {
        "model": model,
        "version": __version__,
        **ceilings.as_dict(),
        **result.as_dict(),
        "repeats": repeats,
        "plan": plan_object(result.plan),
    }


def _print(model: str, repeats: int, ceilings: Ceilings, result: Result) -> None:
    console = stdout_console()
    console.print(Text(_sentence(result, model)))
    console.print(machine_line(ceilings.machine))
    console.print(rates_table(ceilings.rates))
    for name, reason in ceilings.skipped:
        console.print(Text(f"{name} was not measured: {reason}"))
    if result.device:
        console.print(Text(result.device))
    console.print(plan_table(result.plan))
    title = (
        f"{model}, {result.plan.device}, lowtide {__version__} · {result.max_tokens} tokens after "
        f"{result.prompt_tokens} · medians of {repeats}"
    )
    console.print(_table(title, result.runs, bool(result.plan.num_experts)))
    for line in _notes(result):
        console.print(Text(line))


def _sentence(result: Result, model: str) -> str:
    """Say how fast the model writes here under the fastest of the policies."""
    ran = [run for run in result.runs if run.turns]
    if not ran:
        return f"{model} cannot run like this."
    best = max(ran, key=lambda run: run.tokens_per_s.median)
    median, *ends = (per_second(number) for number in best.tokens_per_s)
    told = f"{model} writes {median} tokens/s here ({ends[0]} to {ends[1]})"
    if len(ran) > 1:
        told += f" under {best.preset.label}, the fastest of {len(ran)} policies"
    resident, num_experts = sum(result.plan.residents_per_layer), result.plan.num_experts
    if num_experts:
        told += f", with {resident / num_experts:.0%} of its experts in memory"
    return f"{told}."


def _table(title: str, runs: tuple[PresetRun, ...], has_experts: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("policy", no_wrap=True)
    names = ["tokens/s", "range", "predicted", "prefill/s"]
    names += ["hits", "link/token", "disk/token"] if has_experts else []
    for name in names:
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(*_row(run)[: 1 + len(names)])
    return table


def _row(run: PresetRun) -> list[str]:
    label = run.preset.label
    if run.policy not in ("", run.preset.name):
        label += f": {run.policy}"
    if run.reason:
        return [label, "cannot run"]
    predicted = "unknown"
    if run.predicted is not None:
        predicted = f"{per_second(run.predicted.least)} to {per_second(run.predicted.most)}"
    return [
        label,
        f"{run.tokens_per_s.median:.1f}",
        f"{run.tokens_per_s.least:.1f}-{run.tokens_per_s.most:.1f}",
        predicted,
        f"{run.prefill_tokens_per_s.median:.0f}",
        f"{run.hit_rate:.0%}",
        format_size(round(run.link_bytes_per_token)),
        format_size(round(run.read_bytes_per_token)),
    ]


def _notes(result: Result) -> list[str]:
    plan = result.plan
    notes = [f"{run.preset.label} cannot run: {run.reason}" for run in result.runs if run.reason]
    if not plan.num_experts:
        notes.append("The model has no experts: there is no policy to compare.")
    elif not result.is_budget_given:
        notes.append("No budget was given: half of the experts are resident.")
    if plan.gpu is None and plan.num_experts:
        notes.append("Without a GPU policies differ only in which experts they keep in memory.")
    if is_paced(plan.device):
        notes.append(
            "The device is emulated: speeds are those of scaled time; a higher --device-option "
            "device_slowdown keeps its threads out of each other's way."
        )
    notes.append(f"Prefill: {result.prefill_tokens} tokens, up to the first pass that writes.")
    return [*notes, *(_peak_line(peak) for peak in result.peaks)]


def _peak_line(peak: Peak) -> str:
    planned = format_size(peak.planned_bytes)
    if peak.peak_bytes is None:
        return f"peak memory of the {peak.tier}: not known; planned {planned}"
    return f"peak memory of the {peak.tier}: {format_size(peak.peak_bytes)} of {planned} planned"
