"""`lowtide synth`, `pack`, `pull` and `ls`: write, fetch and list models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table

from lowtide.cli.command import takes
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import find_model, quiet_downloads
from lowtide.cli.options import Settings
from lowtide.cli.report import json_line
from lowtide.cli.screen import ProgressBars, stderr_console, stdout_console
from lowtide.config import format_size
from lowtide.engine.opening.weight_formats import check_packed
from lowtide.errors import UsageError
from lowtide.families.registry import own_names
from lowtide.option import Group

if TYPE_CHECKING:
    from lowtide.model_folder.other_programs import OtherFile


@takes(
    "size",
    "out",
    "seed",
    Group.OUTPUT,
    help_texts={
        "out": "The folder to write; it must be new or empty.",
        "seed": "Equal seeds write equal weights. Default: 0.",
    },
)
def synth(
    family: Annotated[
        str, typer.Argument(help=f"A model family: {', '.join(own_names())}.", metavar="FAMILY")
    ],
    *,
    settings: Settings,
) -> None:
    """Write a model with random weights, to try and measure without a download."""
    out = _out("synth", settings)
    seed = cast(int, settings["seed"]) if settings.is_given("seed") else 0
    from lowtide.model_writing.synth import synth as write_model

    with ProgressBars() as progress:
        size = settings.text("size") or "tiny"
        folder = write_model(family, size, out, seed=seed, progress=progress)
    _report(settings, "wrote", folder)


@takes(
    "format",
    "expert_dtype",
    "dense_dtype",
    "calibration",
    "by_expert",
    "out",
    Group.HUB,
    Group.OUTPUT,
    help_texts={
        "format": "Format to write: q8 or q4, weights rounded to 8 or 4 bits.",
        "out": "The folder to write, itself a model; an interrupted run resumes there.",
    },
)
def pack(model: ModelName, *, settings: Settings) -> None:
    """Save a model with weights rounded to 8 or 4 bits: smaller, and faster to read.

    With --calibration (from lowtide calibrate --inputs) rounding favours the weights that experts
    use most. With --by-expert a GGUF model's experts are copied beside it, each in one piece, and
    read from there.
    """
    if settings.flag("by_expert"):
        return _pack_experts(model, settings)
    out = _out("pack", settings)
    format, experts, dense = map(settings.text, ("format", "expert_dtype", "dense_dtype"))
    check_packed(format, experts, dense)  # before anything is fetched
    folder = find_model(model, settings)
    from lowtide.model_writing.pack import pack as write_packed

    with ProgressBars() as progress:
        written = write_packed(
            folder,
            out,
            format,
            experts,
            dense,
            progress,
            calibration=settings.text("calibration"),
        )
    _report(settings, "wrote", written)


def _pack_experts(model: str, settings: Settings) -> None:
    for name in ("format", "expert_dtype", "dense_dtype", "calibration", "out"):
        if settings.is_given(name):
            option = name.replace("_", "-")
            raise UsageError(
                f"--by-expert copies experts as they are, beside their model: leave --{option} out."
            )
    folder = find_model(model, settings)
    from lowtide.model_writing.pack_experts import pack_experts

    with ProgressBars() as progress:
        written = pack_experts(folder, progress)
    _report(settings, "wrote", written)


@takes(Group.HUB, Group.OUTPUT, unlisted=("offline",))
def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A hub id: org/name, org/name@revision or org/name:Q4_K_M.", metavar="MODEL"
        ),
    ],
    *,
    settings: Settings,
) -> None:
    """Fetch a model from the hub: weights, configuration and tokenizer, never code."""
    if settings.flag("offline"):
        raise UsageError("pull fetches from the hub, which --offline forbids.")
    quiet_downloads()
    from lowtide.model_folder import hub

    with ProgressBars() as progress:
        folder = hub.pull(model, progress)
    _report(settings, "fetched", folder)


@takes(Group.OUTPUT)
def ls(*, settings: Settings) -> None:
    """List the models that are on this machine."""
    quiet_downloads()
    from lowtide.model_folder.hub import list_models
    from lowtide.model_folder.hub_cache import cache_folder
    from lowtide.model_folder.ollama_names import model_folders
    from lowtide.model_folder.other_programs import lm_studio_folders, other_files

    models, others = list_models(), other_files()
    looked_in = [cache_folder(), *lm_studio_folders(), *model_folders()]
    if settings.flag("json"):
        rows, files = (
            [dataclasses.asdict(each) | {"path": str(each.path)} for each in found]
            for found in (models, others)
        )
        print(json_line({"models": rows, "files": files, "looked_in": list(map(str, looked_in))}))
        return
    table = Table()
    for column in ("model", "revision", "size", "path"):
        is_size = column == "size"
        table.add_column(column, justify="right" if is_size else "left", overflow="fold")
    for m in models:
        size = format_size(m.num_bytes) + ("" if m.is_complete else " (incomplete)")
        table.add_row(m.name, m.revision[:12], size, str(m.path))
    stdout_console().print(table)
    if others:
        stdout_console().print(_table_of_others(others))
    places = ", ".join(str(folder) for folder in looked_in if folder.is_dir()) or cache_folder()
    stderr_console().print(
        f"Looked in {places}. Any other folder or GGUF file: give its path in place of a name.",
        style="dim",
    )


def _table_of_others(others: Sequence[OtherFile]) -> Table:
    """Make a table of other programs' GGUF files; lowtide needs their paths, not their names."""
    table = Table(title="GGUF files of other programs: give the path", title_justify="left")
    for column in ("of", "name there", "size", "path"):
        is_size = column == "size"
        table.add_column(column, justify="right" if is_size else "left", overflow="fold")
    for each in others:
        table.add_row(each.program, each.name, format_size(each.num_bytes), str(each.path))
    return table


def _out(verb: str, settings: Settings) -> Path:
    out = settings.text("out")
    if out is None:
        raise UsageError(f"{verb} needs --out FOLDER, the folder to write.")
    return Path(out)


def _report(settings: Settings, done: str, path: Path) -> None:
    files = path.iterdir() if path.is_dir() else [path]
    num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    if settings.flag("json"):
        print(json_line({"path": str(path), "bytes": num_bytes}))
    else:
        print(f"{done} {path} ({format_size(num_bytes)})")
