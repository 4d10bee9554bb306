"""Walks all of docs/guide.md as a new user would, and writes there what was really printed.

python tools/walk.py           # 2 to 3 minutes of a quiet machine

Every command of the page is run, in its order, on a fresh clone of what is committed, in a
pseudo-terminal with an empty home: once with 80 columns, whose output becomes the page's, and once
with 120. What was printed at both widths is kept in docs/guide.json; a test compares the page with
it. Ends with an error where a command does not end as the page says it does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from terminal import recorded

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGE, KEPT = DOCS / "guide.md", DOCS / "guide.json"
WIDTHS = (80, 120)
"""Columns; the page has the first one's."""

_BLOCK = re.compile(r"```(sh|python)\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
_TYPED = "> "  # begins a line that is typed into the command above it
_FAILS = re.compile(r" # exit code (\d+)$")


class Step(NamedTuple):
    """One block of the page that is run, and the output that stands below it."""

    language: str  # sh or python
    content: str
    output: str

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each with the lines that are typed into it."""
        if self.language == "python":
            return [("python guide.py", [])]
        found: list[tuple[str, list[str]]] = []
        for line in self.content.splitlines():
            if line.startswith(_TYPED):
                found[-1][1].append(line.removeprefix(_TYPED))
            else:
                found.append((line, []))
        return found


def steps(page: str) -> list[Step]:
    """All that is run, in the page's order."""
    return [Step(*match.groups()) for match in _BLOCK.finditer(page)]


def fresh_clone(folder: Path) -> Path:
    """Clones what is committed into `folder`; returns where its packages are."""
    command = ["git", "clone", "--quiet", str(REPOSITORY), str(folder)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return folder / "src"


def walked(some: Iterable[Step], columns: int, source: Path | None = None) -> list[str]:
    """Return each step's output on a terminal of `columns`, in a home that is empty at first.

    source: the folder that lowtide is imported from, if not this process's own.
    """
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        home = Path(name)
        environment = _environment(home)
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        return [_printed(step, columns, home, environment) for step in some]


def normalised(text: str) -> str:
    """Remove the numbers and frames, which differ between machines and runs."""
    text = re.sub(r"\d[\d.,]*(?:e[-+]?\d+)?", "N", text)
    return re.sub(r"[\s━─┏┳┓┃┡╇┩│├┼┤└┴┘]+", " ", text).strip()


def with_outputs(page: str, outputs: Iterable[str]) -> str:
    """The page with these below its commands."""
    left = iter(outputs)
    return _BLOCK.sub(lambda m: f"```{m[1]}\n{m[2]}```\n\n```text\n{next(left)}\n```\n", page)


def _environment(home: Path) -> dict[str, str]:
    """Nothing of this user's but where Python and its packages are."""
    programs = home / ".local" / "bin"
    programs.mkdir(parents=True)
    for program, words in (("lowtide", "-m lowtide"), ("python", "")):
        path = programs / program
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        path.chmod(0o755)
    kept = {key: os.environ[key] for key in ("PYTHONPATH", "LANG", "TMPDIR") if key in os.environ}
    path_names = f"{programs}:{os.environ.get('PATH', os.defpath)}"
    return {**kept, "HOME": str(home), "PATH": path_names, "TERM": "xterm-256color"}


def _printed(step: Step, columns: int, home: Path, environment: Mapping[str, str]) -> str:
    if step.language == "python":
        (home / "guide.py").write_text(step.content, encoding="utf-8")
    shown = []
    for command, typed in step.commands():
        expected = _FAILS.search(command)
        command = _FAILS.sub("", command)
        print(f"{columns}: {command}", flush=True)
        done = recorded(["sh", "-c", command], columns, home, environment, typed)
        text = done.screen(columns).text()
        if done.exit_code != (int(expected[1]) if expected else 0):
            raise SystemExit(f"{command} ended with {done.exit_code}:\n{text}")
        shown.append(text.replace(str(home), "~"))
    return "\n".join(shown)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    some = steps(page)
    with tempfile.TemporaryDirectory(prefix="clone-") as name:
        source = fresh_clone(Path(name) / "lowtide")
        outputs = {columns: walked(some, columns, source) for columns in WIDTHS}
    for narrow, wide in zip(*outputs.values(), strict=True):
        print(f"--- same words at both widths: {normalised(narrow) == normalised(wide)}")
    kept = [
        {
            "commands": step.content,
            "outputs": {str(columns): texts[i] for columns, texts in outputs.items()},
        }
        for i, step in enumerate(some)
    ]
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(with_outputs(page, outputs[WIDTHS[0]]), encoding="utf-8")


if __name__ == "__main__":
    main()
