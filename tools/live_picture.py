"""Draws docs/live.svg: `lowtide generate` on a terminal, as it was really seen, moment by moment.

python tools/live_picture.py

The command is run in a pseudo-terminal. What its screen showed, and for how long, becomes an SVG
that moves by itself wherever pictures of web pages are shown; nothing but this file's own text is
in it.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from terminal import Cell, Recording, Screen, recorded

PICTURE = Path(__file__).parents[1] / "docs" / "live.svg"
COMMAND = (
    r"printf 'Solve sudoku:\n45. .12\n..2 5.6\n3.5 .6.\n621 435\n.1. 65.\n.64 ..3'"
    " | lowtide generate demo:diffusion --context 512 --host-memory 6M --threshold 1"
)
MAX_BYTES = 500_000

COLUMNS = 146
FRAME_S = 0.05  # what is shown for less is left out
END_S = 4.0  # of the last frame
_WIDTH, _HEIGHT, _EDGE = 8.4, 18, 14  # of a character, a line, the frame; in pixels
_COLOURS = {"2": "#6e7681", "32": "#3fb950", "1": "#f0f6fc"}
_INK, _PAPER = "#c9d1d9", "#0d1117"

Lines = tuple[tuple[Cell, ...], ...]


class Frame(NamedTuple):
    """Screen from one moment on."""

    time_s: float
    lines: Lines


def frames(recording: Recording, columns: int = COLUMNS) -> list[Frame]:
    """Each screen that stood for `FRAME_S` at least, in the run's own time; the first at 0."""
    screen, found = Screen(columns), list[Frame]()
    for time_s, text in recording.written:
        screen.feed(text)
        lines = _trimmed(screen.lines)
        if found and time_s - found[-1].time_s < FRAME_S:
            found[-1] = Frame(found[-1].time_s, lines)
        elif not found or lines != found[-1].lines:
            found.append(Frame(time_s, lines))
    begin_s = found[0].time_s
    return [Frame(frame.time_s - begin_s, frame.lines) for frame in found]


def picture(command: str, some: Sequence[Frame]) -> str:
    """An SVG that shows `command` and below it one frame after the other, for ever."""
    num_lines = 1 + max(len(frame.lines) for frame in some)
    width = round(COLUMNS * _WIDTH + 2 * _EDGE)
    height = num_lines * _HEIGHT + 2 * _EDGE
    total_s = some[-1].time_s + END_S
    ends_s = [frame.time_s for frame in some[1:]] + [total_s]
    shown = [
        _frame(frame, end_s, total_s, is_last=frame is some[-1])
        for frame, end_s in zip(some, ends_s, strict=True)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="ui-monospace,Menlo,Consolas,monospace" font-size="14" '
        f'fill="{_INK}" xml:space="preserve"><title>{escape(command)}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="{_PAPER}"/>'
    )
    prompt = _line(0, [Cell(char, ("1",)) for char in f"$ {command}"])
    return "\n".join([head, prompt, *shown, "</svg>", ""])


def _frame(frame: Frame, end_s: float, total_s: float, is_last: bool) -> str:
    """Draw one frame. Where pictures do not move, the last one is shown."""
    begin, end = frame.time_s / total_s, min(1.0, end_s / total_s)
    times, values = [f"{begin:.4f}", f"{end:.4f}"], ["inline", "none"]
    if begin > 0:
        times, values = ["0", *times], ["none", *values]
    if is_last:
        times, values = times[:-1], values[:-1]
    lines = "".join(_line(1 + row, line) for row, line in enumerate(frame.lines))
    return (
        f'<g display="{"inline" if is_last else "none"}"><animate attributeName="display" '
        f'dur="{total_s:.2f}s" repeatCount="indefinite" calcMode="discrete" '
        f'keyTimes="{";".join(times)}" values="{";".join(values)}"/>{lines}</g>'
    )


def _line(row: int, cells: Iterable[Cell]) -> str:
    """Text elements, one for each look, at their columns."""
    parts, column = [], 0
    for look, some in groupby(cells, key=lambda cell: cell.look):
        text = "".join(cell.char for cell in some)
        if text.strip():
            x, y = _EDGE + column * _WIDTH, _EDGE + row * _HEIGHT + 13
            length = round(len(text) * _WIDTH, 1)
            colour = next((f' fill="{_COLOURS[c]}"' for c in reversed(look) if c in _COLOURS), "")
            bold = ' font-weight="bold"' if "1" in look else ""
            parts.append(
                f'<text x="{x:.1f}" y="{y}" textLength="{length}"{colour}{bold}>'
                f"{escape(text)}</text>"
            )
        column += len(text)
    return "".join(parts)


def _trimmed(lines: Sequence[Sequence[Cell]]) -> Lines:
    return tuple(tuple(line) for line in lines)


def main() -> None:
    program = f"{shlex.quote(sys.executable)} -m lowtide"
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = ["sh", "-c", COMMAND.replace("lowtide", program, 1)]
    with tempfile.TemporaryDirectory() as folder:
        recorded(command, COLUMNS, Path(folder), environment)  # kernels are compiled now
        recording = recorded(command, COLUMNS, Path(folder), environment)
    if recording.exit_code:
        raise SystemExit(recording.screen(COLUMNS).text())
    text = picture(COMMAND, frames(recording))
    if len(text.encode()) > MAX_BYTES:
        raise SystemExit(f"The picture has {len(text.encode())} bytes; at most {MAX_BYTES}.")
    PICTURE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
