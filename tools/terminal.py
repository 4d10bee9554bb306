"""A command in a pseudo-terminal, and what a reader of that terminal sees, moment by moment.

`recorded` runs it and keeps what it wrote and when; `Screen` obeys the control sequences that
lowtide's output has (cursor up and to the side, erasing, colours) and ignores all others.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROWS = 50

_SEQUENCE = re.compile(r"\x1b\[([?<>=]?)([\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>()][0B]?")
_QUIET_S = 0.4  # without output: it waits for what is typed


class Written(NamedTuple):
    """Text that came at one moment."""

    time_s: float
    text: str


class Recording(NamedTuple):
    """A command that has ended."""

    written: tuple[Written, ...]
    exit_code: int

    def screen(self, columns: int) -> Screen:
        """Return the terminal's screen at the end."""
        screen = Screen(columns)
        for written in self.written:
            screen.feed(written.text)
        return screen


class Cell(NamedTuple):
    """A character and its look: SGR codes in force, such as ("1", "32")."""

    char: str
    look: tuple[str, ...] = ()


@dataclass
class Screen:
    """Lines of a terminal that is as high as needed."""

    columns: int
    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    look: tuple[str, ...] = ()
    _rest: str = ""  # of a sequence that has not come whole

    def feed(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            if text[place] == "\x1b":
                match = _SEQUENCE.match(text, place)
                if match is None:
                    self._rest = text[place:]
                    return
                if match[3] and not match[1]:
                    self._obey(match[3], match[2])
                place = match.end()
            else:
                self._put(text[place])
                place += 1

    def text(self) -> str:
        """All lines, without the empty ones at the end."""
        shown = ["".join(cell.char for cell in line).rstrip() for line in self.lines]
        return "\n".join(shown).rstrip("\n")

    def _put(self, char: str) -> None:
        if char == "\n":
            self._down()
        elif char == "\r":
            self.column = 0
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char == "\t":
            for _ in range(8 - self.column % 8):
                self._put(" ")
        elif char.isprintable():
            if self.column == self.columns:
                self._down()
                self.column = 0
            line = self.lines[self.row]
            line += [Cell(" ")] * (self.column - len(line) + 1)
            line[self.column] = Cell(char, self.look)
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _obey(self, kind: str, codes: str) -> None:
        number = int(codes) if codes.isdigit() else 0
        line = self.lines[self.row]
        if kind == "A":
            self.row = max(0, self.row - max(1, number))
        elif kind == "B":
            for _ in range(max(1, number)):
                self._down()
        elif kind == "C":
            self.column = min(self.columns - 1, self.column + max(1, number))
        elif kind == "D":
            self.column = max(0, self.column - max(1, number))
        elif kind == "G":
            self.column = max(0, number - 1)
        elif kind == "K":
            line[:] = [] if number == 2 else line[: self.column]
        elif kind == "J":
            del line[self.column :]
            del self.lines[self.row + 1 :]
        elif kind == "m":
            given = tuple(code for code in codes.split(";") if code)
            self.look = () if given in ((), ("0",)) else self.look + given


def recorded(
    command: Sequence[str],
    columns: int,
    folder: Path,
    environment: Mapping[str, str],
    typed: Sequence[str] = (),
    limit_s: float = 300.0,
) -> Recording:
    """Runs `command` in `folder`; each line of `typed` is sent when it has become quiet."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env=dict(environment),
        start_new_session=True,
    )
    os.close(slave)
    try:
        written = _written(master, list(typed), limit_s)
        return Recording(tuple(written), process.wait(limit_s))
    finally:
        os.close(master)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _written(master: int, typed: list[str], limit_s: float) -> list[Written]:
    begin_s = time.monotonic()
    written: list[Written] = []
    bytes_held = b""
    while time.monotonic() - begin_s < limit_s:
        ready, _, _ = select.select([master], [], [], _QUIET_S)
        if not ready:
            if typed and written and _is_prompt(written[-1].text):
                os.write(master, typed.pop(0).encode() + b"\n")
            continue
        try:
            found = os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            return written
        if not found:
            return written
        bytes_held += found
        text = bytes_held.decode(errors="ignore")
        bytes_held = bytes_held[len(text.encode()) :]
        written.append(Written(time.monotonic() - begin_s, text))
    raise TimeoutError(f"It has not ended within {limit_s:g} s; it said: {written[-3:]}")


def _is_prompt(text: str) -> bool:
    """Return True if the text asks for a line: a prompt, or an editor that takes pasted text."""
    return text.endswith("> ") or "\x1b[?2004h" in text
