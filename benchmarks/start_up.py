"""What a command costs before it does anything: processor time beside a bare `import torch`.

Every round starts each command once, in a process of its own, so that what else the machine does
meets all of them alike; a first round that is not counted leaves everything compiled and in the
page cache. Processor time is that of the whole process, to its end; `to first output` is wall time
until it writes. The ceiling of `plan` and `generate` is torch itself, without which neither can
run; `--help` needs no torch.

Wanted, on quiet cores: `plan` of a folder at most 1 s above torch, `--help` in 0.5 s, the demo's
answer in 2 s, torch included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.arguments import make_parser, run_script
from common.record import Recorder, say

from lowtide.model_writing.synth import synth

TORCH = "import torch"
WANTED_S = {"--help": 0.5, "plan FOLDER": 1.0, "an answer": 2.0}
"""Of `plan` above torch, of the others in all."""


class Start(NamedTuple):
    """One run of a command."""

    cpu_s: float
    first_output_s: float


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = synth("llada2", "tiny", Path(name) / "model", seed=0)
        runs = _runs(_commands(folder), options.rounds)
    recorder = Recorder("start_up", {"rounds": options.rounds}, options.out)
    torch_s = statistics.median(run.cpu_s for run in runs[TORCH])
    for what, starts in runs.items():
        cpu_s = [run.cpu_s for run in starts]
        median_s = statistics.median(cpu_s)
        first_s = statistics.median(run.first_output_s for run in starts)
        above_s = 0.0 if what in (TORCH, "--help") else median_s - torch_s
        values = {
            "cpu_s": median_s,
            "spread": (max(cpu_s) - min(cpu_s)) / median_s,
            "above_torch_s": above_s,
            "to_torch": median_s / torch_s,
            "first_output_s": first_s,
            "wanted_s": WANTED_S.get(what),
        }
        recorder.write(what, values)
        say(_line(what, values))


def _commands(folder: Path) -> dict[str, Sequence[str]]:
    """What is started, by its name."""
    return {
        TORCH: ("-c", "import torch; print(torch.__version__)"),
        "--help": ("-m", "lowtide", "--help"),
        "plan FOLDER": ("-m", "lowtide", "plan", str(folder)),
        "an answer": ("-m", "lowtide", "generate", "demo:autoregressive", "Roman 148"),
    }


def _runs(commands: Mapping[str, Sequence[str]], num_rounds: int) -> dict[str, list[Start]]:
    runs: dict[str, list[Start]] = {what: [] for what in commands}
    for counted in range(-1, num_rounds):
        for what, arguments in commands.items():
            start = _start(arguments)
            if counted >= 0:
                runs[what].append(start)
    return runs


def _start(arguments: Sequence[str]) -> Start:
    """Runs a command of Python's to its end. Code that it compiles is kept, as for any user."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdout is not None
    with process.stdout as out:
        out.read(1)
        first_output_s = time.perf_counter() - start_s
        out.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(arguments))
    return Start(usage.ru_utime + usage.ru_stime, first_output_s)


def _line(what: str, values: Mapping[str, float | None]) -> str:
    above = ""
    if what not in (TORCH, "--help"):
        above = f", {values['above_torch_s']:.2f} s above torch"
    wanted = "" if values["wanted_s"] is None else f" (wanted: {values['wanted_s']} s)"
    return (
        f"{what}: {values['cpu_s']:.2f} s of processor time{above}{wanted}, repeats within "
        f"{values['spread']:.0%}; first output after {values['first_output_s']:.2f} s"
    )


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="starts of each command")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
