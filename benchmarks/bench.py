"""All measurements behind the pages' numbers, one script after the other, into docs/results/.

`make bench` runs those that need less than 5 GiB of disk and memory, within an hour on two quiet
cores; `make bench-large` the rest, within three hours, each after a look at the disk, and what a
script has put into the cache of models is deleted after it (`--keep`: not). `--list` says what
takes how long, and what was cut. A script that fails or hangs keeps no other from running, and is
named at the end.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from common.arguments import run_script
from common.models import cache_folder
from common.record import commit, say

from lowtide.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[1]


MAX_MINUTES, MAX_LARGE_MINUTES = 60, 180
"""Limits for all of `make bench`, and of `make bench-large`, on two quiet cores."""
LATE = 4
"""A script that takes longer than so many times its minutes and `MORE_MINUTES` is taken to hang."""
MORE_MINUTES = 10
CLEARING_S = 20
"""Time that an ended script has to end its processes and to delete its files."""


class Script(NamedTuple):
    """A script of this folder, what else it is called with, and what it takes.

    minutes: on two quiet cores, as measured and rounded up; models that it makes included.
    cut: what its arguments leave out, and why; without a word, nothing.
    """

    name: str
    minutes: float
    arguments: tuple[str, ...] = ()
    disk_GiB: int = 5
    cut: str = ""


SMALL = (
    Script(
        "cpu_kernels",
        1,
        (
            *("--shapes", "Qwen3-30B", "LLaDA2-mini", "--threads", "2"),
            *("--formats", "bf16", "q8", "q4", "q8-int8", "q4-int8"),
            *("--rows", "1", "2", "4", "8", "16", "32"),
        ),
        0,
        "two models' experts in bfloat16, q8 and q4; all formats of all take an hour",
    ),
    Script("decode", 4),
    Script("offload", 3),
    Script("ar_decode", 3, ("--prompt", "256", "--new", "48")),
    Script("absent", 3, ("--parts", "tmpfs", "block", "gguf"), cut="the disk; `--large` has it"),
    Script("batching", 1),
    Script("batch", 2),
    Script(
        "predictions",
        5,
        ("--models", "demo:autoregressive", "demo:diffusion", "qwen3_moe", "--runs", "3"),
        cut="larger families, whose models take minutes to make",
    ),
    Script(
        "conversation",
        1,
        ("--restarts", "3"),
        cut="a diffusion model's, long ones, and those of models that are partly in memory",
    ),
    Script(
        "serve_load",
        3,
        ("--parts", "memory", "turns", "--seconds", "20"),
        cut="the disk; `--large` has it",
    ),
    Script("simulate", 3, ("--validate", "--repeats", "3"), cut="3 turns of each preset, not 7"),
    Script("simulate", 1, ("--validate", "--home", "disk", "--repeats", "3"), cut="3 turns, not 7"),
    Script("gains", 2),
    Script("policies", 15),
    Script("exchange", 3, disk_GiB=0),
    Script("dali", 1, disk_GiB=0),
    Script("hindsight", 2),
    Script("locality", 1, disk_GiB=0),
    Script("prefetch", 1, ("--pieces", "6"), cut="half of the text's pieces"),
    Script("buddy_time", 1, disk_GiB=0),
)
LARGE = (
    Script("absent", 4, ("--parts", "disk"), disk_GiB=10),
    Script("serve_load", 5, ("--parts", "disk", "--seconds", "30"), disk_GiB=10),
    Script("full_size", 16, disk_GiB=45),
    Script("block_pass", 4, disk_GiB=16),
    Script(
        "larger_than_memory",
        11,
        ("--parts", "mapped", "--limit", "balloon"),
        42,
        "bfloat16, and 4 bits wholly in memory, which take as long again",
    ),
    Script("layer_kinds", 12, disk_GiB=10),
    Script(
        "qwen36", 10, ("--parts", "memory"), 7, "all layers from disk, 20 minutes and 22 GB more"
    ),
    Script("max_context", 9, disk_GiB=8),
    Script(
        "planned_memory",
        8,
        ("--models", "LLaDA-MoE", "--lengths", "1024", "4096", "16384", "--traced", "2048"),
        20,
        "8,192 and 32,768 tokens, which take an hour more with the dense models",
    ),
    Script(
        "planned_memory",
        9,
        (
            *("--models", "LLaDA-8B", "Dream-7B", "--parts", "planned"),
            *("--lengths", "1024", "16384"),
        ),
        8,
        "4,096 tokens, too, and how even the use of dense models is",
    ),
    Script(
        "mosaic_ablation",
        17,
        ("--traced", "8192", "--timed", "2048", "--repeats", "3"),
        8,
        "one length for the allocator's replay and one for times; 3 turns, not 5",
    ),
    Script("step_time", 15, ("--parts", "sides", "planning"), disk_GiB=8),
    Script(
        "step_time",
        2,
        ("--parts", "chunks", "--models", "LLaDA-8B", "--chunked", "4096"),
        8,
        "chunks of the other models, and of longer sequences",
    ),
    Script(
        "every_expert",
        8,
        ("--steps", "3", "--repeats", "3"),
        8,
        "3 steps of each length and turn, not 6",
    ),
    Script(
        "moving_memory",
        10,
        (
            *("--families", "qwen3_moe", "--traces", "chats", "--longest", "4096"),
            *("--new", "32", "--constants", "2", "--repeats", "3"),
        ),
        5,
        "documents, which have nothing to lend; other families, longer requests and answers, "
        "constant caches of other sizes",
    ),
    Script(
        "buddy_full",
        8,
        ("--families", "deepseek_v2"),
        8,
        "the shapes of LLaDA2.0-mini and Qwen3-30B-A3B",
    ),
    Script("tau", 6, ("--layers", "2"), 5, "2 layers of the synthetic models, which are alike"),
    Script(
        "buddy",
        6,
        ("--tiers", "disk", "--tokens", "512", "--pieces", "32", "--repeats", "0"),
        cut="speeds, which `buddy_full` has in a published shape",
    ),
    Script(
        "buddy",
        14,
        (
            *("--tiers", "link", "--shares", "0.375"),
            *("--tokens", "512", "--pieces", "32", "--new", "32"),
        ),
        cut="two of three shares of residents; answers of 32 tokens, not 64",
    ),
    Script("buddy_profile", 2, disk_GiB=0),
    Script("format_quality", 2, disk_GiB=0),
)


def main() -> None:
    options = _options()
    scripts = chosen(options.only, is_large=options.large)
    if options.list:
        print(listed(scripts))
        return
    if commit().endswith("+"):
        raise UsageError("Files differ from their commit: what is measured could not be repeated.")
    failed = []
    for script in scripts:
        with forgotten(cache_folder(), options.large and not options.keep):
            if not _run(script, options.out):
                failed.append(script.name)
    if failed:
        raise UsageError(f"Failed: {', '.join(failed)}; the others' lines are in {options.out}.")


def chosen(names: Sequence[str] | None, *, is_large: bool) -> tuple[Script, ...]:
    """All of one kind, or those named: as this kind runs them, else as the other one does.

    Raises UsageError for a name that neither has.
    """
    first, second = (LARGE, SMALL) if is_large else (SMALL, LARGE)
    if names is None:
        return first
    found: list[Script] = []
    for name in names:
        calls = [one for one in first if one.name == name]
        calls = calls or [one for one in second if one.name == name]
        if not calls:
            known = ", ".join(sorted({script.name for script in (*SMALL, *LARGE)}))
            raise UsageError(f"No script {name}; there are {known}.")
        found += calls
    return tuple(found)


def listed(scripts: Sequence[Script]) -> str:
    """List the calls, with the minutes of each and of all."""
    lines = []
    for script in scripts:
        call = " ".join((f"{script.name}.py", *script.arguments))
        told = f"  # {script.cut}" if script.cut else ""
        lines.append(f"{script.minutes:4g} min  {script.disk_GiB:3} GiB  {call}{told}")
    total = sum(script.minutes for script in scripts)
    return "\n".join([*lines, f"{total:4g} min in all, on two quiet cores"])


@contextmanager
def forgotten(models: Path, is_wanted: bool) -> Iterator[None]:
    """Deletes what comes into the folder meanwhile, if that is wanted."""
    models.mkdir(parents=True, exist_ok=True)
    before = set(models.iterdir())
    try:
        yield
    finally:
        for path in set(models.iterdir()) - before if is_wanted else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            say(f"Deleted {path}.")


def _run(script: Script, folder: Path) -> bool:
    """Runs one script; false if it failed or cannot run here."""
    models = cache_folder()
    free_GiB = shutil.disk_usage(models).free / (1 << 30)
    if free_GiB < script.disk_GiB:
        say(f"{script.name}: needs {script.disk_GiB} GiB in {models}, {free_GiB:.0f} are free.")
        return False
    today = datetime.datetime.now(datetime.UTC).date()
    out = folder / f"{today}-{script.name.replace('_', '-')}.jsonl"
    command = [sys.executable, f"benchmarks/{script.name}.py", *script.arguments, "--out", str(out)]
    start_s = time.monotonic()
    status = run_status(command, 60 * (LATE * script.minutes + MORE_MINUTES))
    minutes = (time.monotonic() - start_s) / 60
    told = "ended, since it takes too long" if status is None else f"exit status {status}"
    say(f"{script.name}: {minutes:.1f} minutes, {told}.")
    return status == 0


def run_status(command: Sequence[str], limit_s: float) -> int | None:
    """A command's exit status; none if it runs longer and is ended, with all that it started."""
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # also where this script is interrupted
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A script and all that it started: first it is asked to, so that its temporary models go."""
    try:
        process.terminate()
        process.wait(CLEARING_S)
    except subprocess.TimeoutExpired:
        say("It does not end by itself.")
    finally:
        with suppress(ProcessLookupError):  # where nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--large", action="store_true", help="what needs more than 5 GiB, or hours")
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", help="these alone")
    parser.add_argument("--keep", action="store_true", help="models of large scripts, too")
    parser.add_argument("--list", action="store_true", help="run nothing: say what would be")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="(docs/results)")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
