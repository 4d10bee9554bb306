"""All measurements behind the pages' numbers, one script after the other, into docs/results/.

`make bench` runs those that need less than 5 GiB of disk and memory; `make bench-large` the rest,
each after a look at the disk. A script that fails keeps no other from running.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common.arguments import run_script
from common.models import cache_folder
from common.record import commit, say

from lowtide.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[1]


class Script(NamedTuple):
    """A script of this folder, what else it is called with, and the disk that its models take."""

    name: str
    arguments: tuple[str, ...] = ()
    disk_GiB: int = 5


SMALL = (
    Script("cpu_kernels", disk_GiB=0),
    Script("pack"),
    Script("decode"),
    Script("offload"),
    Script("ar_decode"),
    Script("batching"),
    Script("overlap"),
    Script("simulate"),
    Script("policies"),
    Script("exchange", ("--layers", "2"), disk_GiB=0),
    Script("tau", ("--synthetic", "--layers", "2"), disk_GiB=0),
    Script("dali", disk_GiB=0),
    Script("hindsight"),
    Script("buddy", disk_GiB=0),
    Script("buddy_time", disk_GiB=0),
)
LARGE = (
    Script("full_size", disk_GiB=32),
    Script("larger_than_memory", disk_GiB=60),
    Script("max_context", disk_GiB=8),
    Script("planned_memory", disk_GiB=8),
    Script("mosaic_ablation", disk_GiB=8),
    Script("step_time", disk_GiB=8),
    Script("every_expert", disk_GiB=8),
    Script("elastic", disk_GiB=16),
    Script("buddy_full", disk_GiB=64),
)


def main() -> None:
    options = _options()
    if commit().endswith("+"):
        raise UsageError("Files differ from their commit: nobody could repeat what is measured.")
    failed = [script.name for script in _chosen(options) if not _run(script, options.out)]
    if failed:
        raise UsageError(f"Failed: {', '.join(failed)}; the others' lines are in {options.out}.")


def _chosen(options: argparse.Namespace) -> tuple[Script, ...]:
    scripts = LARGE if options.large else SMALL
    if options.only is None:
        return scripts
    known = {script.name: script for script in (*SMALL, *LARGE)}
    unknown = [name for name in options.only if name not in known]
    if unknown:
        raise UsageError(f"No script {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    return tuple(known[name] for name in options.only)


def _run(script: Script, folder: Path) -> bool:
    """Runs one script; false if it failed or cannot run here."""
    models = cache_folder()
    models.mkdir(parents=True, exist_ok=True)
    free_GiB = shutil.disk_usage(models).free / (1 << 30)
    if free_GiB < script.disk_GiB:
        say(f"{script.name}: needs {script.disk_GiB} GiB in {models}, {free_GiB:.0f} are free.")
        return False
    today = datetime.datetime.now(datetime.UTC).date()
    out = folder / f"{today}-{script.name.replace('_', '-')}.jsonl"
    command = [sys.executable, f"benchmarks/{script.name}.py", *script.arguments, "--out", str(out)]
    start_s = time.monotonic()
    status = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL).returncode
    say(f"{script.name}: {(time.monotonic() - start_s) / 60:.1f} minutes, exit status {status}.")
    return status == 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--large", action="store_true", help="what needs more than 5 GiB")
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", help="these alone")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="(docs/results)")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
