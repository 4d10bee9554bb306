"""Where the `lowtide` command begins: what it needs is imported with signals already understood."""

from __future__ import annotations

import gc
import os
import sys

from lowtide.cli import EXIT_INTERRUPTED

TYPE_CHECKING = False  # as in interrupts.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


def main() -> None:
    """Run the command line; the exit code is 0, 1, 2 (wrong usage), 129 (SIGHUP), 130 (Ctrl-C), 141
    (the output's reader has gone) or 143 (SIGTERM).
    """
    try:
        # Importing torch makes half a million objects that stay; looking for garbage among them, as
        # often as Python does by default, takes a tenth of a start's processor time.
        gc.set_threshold(50_000)
        _open_closed_streams()
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
    """The command line, with signals heard; ends clearly where memory or files are limited."""
    try:
        from lowtide.cli.interrupts import hear_signals

        hear_signals()
        from lowtide.cli.app import app
    except (ImportError, MemoryError, OSError) as error:
        _end_limited(error)
    return app


def _end_limited(error: Exception) -> NoReturn:
    first = (str(error).strip() or type(error).__name__).splitlines()[-1]
    print(
        f"lowtide: It cannot be started: {first}. Where memory or open files are limited "
        "(ulimit -v, ulimit -n) raise the limit, else install lowtide again.",
        file=sys.stderr,
    )
    sys.exit(1)


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
    except (ImportError, MemoryError) as error:  # of a verb, before it began
        _end_limited(error)
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
    is nothing, a message goes nowhere, and an answer cannot be written, which is an error. The next
    file that is opened would otherwise get that number, and whatever a library prints would go into
    it. A parent may also have left them so that a write ends before all is written.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # what runs below this program has it open, too
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
        elif number:
            try:
                os.set_blocking(number, True)
            except OSError:
                pass


def _forget_interrupt() -> None:
    """CPython remembers a Ctrl-C that ended code given as text, such as data classes make while
    they are imported, and `python -m` then ends by SIGINT although it was caught and the exit code
    is known. Other such code makes it forget: a named tuple's.
    """
    from collections import namedtuple

    namedtuple("Forgotten", ())
