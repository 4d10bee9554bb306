"""Entry point of the `lowtide` command: imports the rest with signal handlers installed."""

from __future__ import annotations

import gc
import io
import os
import sys

from lowtide.cli import EXIT_INTERRUPTED

TYPE_CHECKING = False  # as in interrupts.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TextIO


def main() -> None:
    """Run the command line.

    The exit code is 0, 1, 2 (wrong usage), 129 (SIGHUP), 130 (Ctrl-C), 141 (the output's reader has
    gone) or 143 (SIGTERM).
    """
    try:
        # Importing torch makes half a million objects that stay; looking for garbage among them, as
        # often as Python does by default, takes a tenth of a start's processor time.
        gc.set_threshold(50_000)
        _open_closed_streams()
        sys.stderr = _messages(sys.stderr)
        app = _imported()
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        # A line that is not UTF-8 is refused where it is used, and the next one is read.
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        _run(app)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        _forget_interrupt()
        gc.freeze()  # nor at the end: all of it goes with the process


def _imported() -> Callable[[], None]:
    """Install signal handlers and import the command line."""
    from lowtide.cli.importing import imports_reported

    with imports_reported():
        from lowtide.cli.interrupts import install_signal_handlers

        install_signal_handlers()
        from lowtide.cli.app import app
    return app


def _run(app: Callable[[], None]) -> None:
    """Run the command; help and usage also end clearly on a full disk."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        # For help and usage typer turns a broken pipe into an exit with code 1.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _end_unread()
    except BrokenPipeError:
        _end_unread()
    except MemoryError as error:  # of help and usage: a verb reports its own
        from lowtide.cli.importing import end_limited

        end_limited(error)
    except OSError as error:
        from lowtide.cli.command import EXIT_FAILURE, report_stdout_error

        if not report_stdout_error(error):
            raise
        sys.exit(EXIT_FAILURE)


def _end_unread() -> None:
    from lowtide.cli.command import EXIT_BROKEN_PIPE, close_stdout

    close_stdout()
    sys.exit(EXIT_BROKEN_PIPE)


def _open_closed_streams() -> None:
    """Open standard input, output and error where the parent process closed them.

    Input is then empty, messages are dropped, and writing an answer is an error. Otherwise the next
    opened file would get that number and receive whatever a library prints. Streams that the parent
    left non-blocking, where a write may end early, are made blocking.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # child processes have it open, too
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
        elif number:
            try:
                os.set_blocking(number, True)
            except OSError:
                pass


class _MessageFile(io.FileIO):
    """Standard error, where a message that cannot be written is dropped.

    An answer matters more than the notes on it, whose file may lie on a full disk.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _messages(stream: TextIO) -> TextIO:
    file = io.BufferedWriter(_MessageFile(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)


def _forget_interrupt() -> None:
    """Make CPython forget a Ctrl-C that interrupted code run from a string.

    Data classes run such code while they are imported; `python -m` would then end by SIGINT
    although the interrupt was caught and the exit code is known. Running other such code, a named
    tuple's, clears it.
    """
    from collections import namedtuple

    namedtuple("Forgotten", ())
