"""The `lowtide` command, whose verbs are imported on first use."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli.verbs import LazyVerbs
from lowtide.version import __version__

app = typer.Typer(
    name="lowtide",
    cls=LazyVerbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a fault of ours is shown as Python shows it
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"lowtide {__version__}")
        raise typer.Exit


@app.callback()
def _lowtide(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run mixture-of-experts language models in less memory than they have weights."""
