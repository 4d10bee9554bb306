"""Where the `lowtide` command begins: what it needs is imported with signals already understood."""

from __future__ import annotations

import gc
import os
import sys

from lowtide.cli import EXIT_INTERRUPTED

TYPE_CHECKING = False  # as in interrupts.py
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Run the command line; the exit code is 0, 1, 2 (wrong usage), 129 (SIGHUP), 130 (Ctrl-C), 141
    (the output's reader has gone) or 143 (SIGTERM)."""
    try:
        # Importing torch makes half a million objects that stay; looking for garbage among them, as
        # often as Python does by default, takes a tenth of a start's processor time.
        gc.set_threshold(50_000)
        _open_closed_streams()
        from lowtide.cli.interrupts import hear_signals

        hear_signals()
        from lowtide.cli.app import app

        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        # A line that is not UTF-8 is refused where it is used, and the next one is read.
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        _run(app)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        _forget_interrupt()
        gc.freeze()  # nor at the end: all of it goes with the process


def _run(app: Callable[[], None]) -> None:
    """Runs it; also what is no verb's, such as help, ends clearly on a full disk."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        # Where what is no verb's was not read typer makes an exit of it, with code 1.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _end_unread()
    except BrokenPipeError:
        _end_unread()
    except OSError as error:
        from lowtide.cli.command import EXIT_FAILURE, is_of_stdout

        if not is_of_stdout(error):
            raise
        sys.exit(EXIT_FAILURE)


def _end_unread() -> None:
    from lowtide.cli.command import EXIT_BROKEN_PIPE, close_stdout

    close_stdout()
    sys.exit(EXIT_BROKEN_PIPE)


def _open_closed_streams() -> None:
    """The parent process may have closed standard input, output or error: what is read there
    is nothing, and what is written goes nowhere. The next file that is opened would otherwise get
    that number, and whatever a library prints would go into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # what runs below this program has it open, too
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)


def _forget_interrupt() -> None:
    """CPython remembers a Ctrl-C that ended code given as text, such as data classes make while
    they are imported, and `python -m` then ends by SIGINT although it was caught and the exit code
    is known. Other such code makes it forget: a named tuple's."""
    from collections import namedtuple

    namedtuple("Forgotten", ())
