"""Results that are older than the code that they measure."""

from __future__ import annotations

import subprocess
from pathlib import Path

from reporting.results import Results, Run

SHARED = ("src/lowtide", "benchmarks/common")


def commits_since(repository: Path, run: Run) -> int | None:
    """Count the commits after a run's that changed the package, the script or its parts.

    Returns None if the repository does not know the run's commit.
    """
    name = str(run.first["benchmark"]).replace(" ", "_")
    known = run.first["commit"].rstrip("+")
    arguments = ["rev-list", "--count", f"{known}..HEAD", "--", *SHARED, f"benchmarks/{name}.py"]
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 else None


def aged(repository: Path, results: Results) -> list[str]:
    """A line of text for each run that is not of today's code, and for each that is refused."""
    lines = []
    for run in results.runs:
        where = f"{run.first.path}:{run.first.number} {run.first['benchmark']}"
        commits = commits_since(repository, run)
        if not run.first.is_clean:
            lines.append(f"{where}: refused, its files differed from {run.first['commit'][:-1]}")
        elif commits is None:
            lines.append(f"{where}: commit {run.first['commit']} is not known here")
        elif commits:
            lines.append(f"{where}: {commits} commits behind, measured {run.ended[:10]}")
    return lines
