"""Where the `lowtide` command begins: what it needs is imported with signals already understood."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 128 + 2  # as a shell reports a program that SIGINT ended


def main() -> None:
    """Run the command line; the exit code is 0, 1, 2 (wrong usage), 130 (Ctrl-C) or 143
    (SIGTERM)."""
    try:
        from lowtide.cli.interrupts import hear_signals

        hear_signals()
        from lowtide.cli.app import app

        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        _forget_interrupt()


def _forget_interrupt() -> None:
    """CPython remembers a Ctrl-C that ended code given as text, such as data classes make while
    they are imported, and `python -m` then ends by SIGINT although it was caught and the exit code
    is known. Other such code makes it forget: a named tuple's."""
    from collections import namedtuple

    namedtuple("Forgotten", ())
