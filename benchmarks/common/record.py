"""One JSON line per measurement, with what it takes to judge it: machine, commit, settings."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from lowtide.hardware.machine import cpu_model

REPOSITORY = Path(__file__).resolve().parents[2]

Row = dict[str, object]


class Recorder:
    """Prints JSON lines on standard output and appends them to `out` where one is given."""

    def __init__(self, benchmark: str, settings: Mapping[str, object], out: Path | None) -> None:
        self._benchmark = benchmark
        self._settings = dict(settings)
        self._out = out
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)

    def write(self, what: str, values: Mapping[str, object]) -> Row:
        """Records one measurement named `what`; returns the whole line."""
        row: Row = {
            "benchmark": self._benchmark,
            "what": what,
            **{name: _rounded(value) for name, value in values.items()},
            "settings": self._settings,
            "machine": {**machine(), "load_1min": round(os.getloadavg()[0], 2)},
            "processor_s": round(processor_s(), 2),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        line = json.dumps(row)
        print(line, flush=True)
        if self._out is not None:
            with open(self._out, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        return row


def say(text: str) -> None:
    """A line for people, on standard error: standard output holds JSON lines only."""
    print(text, file=sys.stderr, flush=True)


def processor_s() -> float:
    """Return the processor time of this script so far, and of its processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@functools.cache
def machine() -> Mapping[str, object]:
    """Return the facts of this machine that stand beside its numbers."""
    return {
        "cpu": cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@functools.cache
def commit() -> str:
    """The repository's commit, `+` behind it when files differ from it; `unknown` elsewhere.

    Files in `docs/`, where results go, decide nothing that is measured.
    """
    name = _git("rev-parse", "--short=12", "HEAD")
    if name is None:
        return "unknown"
    differing = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return name + ("+" if differing else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _rounded(value: object) -> object:
    """Five significant digits: more would claim what no measurement here can."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
