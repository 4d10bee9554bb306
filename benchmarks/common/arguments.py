"""The command line options that every benchmark script has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lowtide.cli.interrupts import install_signal_handlers
from lowtide.errors import LowtideError


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--out`; description: a script's docstring, which begins with it."""
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    return parser


def add_model(parser: argparse.ArgumentParser, size: str, family: str = "llada2") -> None:
    """`--model`; family, size: of the synthetic one that is made by default."""
    parser.add_argument(
        "--model",
        type=Path,
        help=f"model folder; made with `synth {family} --size {size}` where it does not exist "
        "(default: one in the user's cache)",
    )


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """`--parts`: which measurements of a script are taken, all by default."""
    parser.add_argument(
        "--parts", nargs="+", choices=parts, default=list(parts), help="which measurements"
    )


def run_script(main: Callable[[], None]) -> None:
    """Runs `main`; an error of lowtide's is a message and exit status 1.

    SIGTERM ends it as Ctrl-C does, by an exception: what it started ends and what it wrote goes.
    """
    install_signal_handlers()
    try:
        main()
    except LowtideError as error:
        sys.exit(f"error: {error}")
