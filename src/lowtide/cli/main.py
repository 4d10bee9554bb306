"""Where the `lowtide` command begins: what it needs is imported with Ctrl-C already understood."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 128 + 2  # as a shell reports a program that SIGINT ended


def main() -> None:
    """Run the command line; the exit code is 0, 1, 2 (wrong usage) or 130 (Ctrl-C)."""
    try:
        from lowtide.cli.app import app

        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
