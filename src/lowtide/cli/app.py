"""The `lowtide` command: one verb per thing a user wants."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide import __version__
from lowtide.cli.bench import bench
from lowtide.cli.calibrate import calibrate
from lowtide.cli.chat import chat
from lowtide.cli.doctor import doctor
from lowtide.cli.generate import generate
from lowtide.cli.habits import Verb, Verbs
from lowtide.cli.models import ls, pack, pull, synth
from lowtide.cli.plan import plan
from lowtide.cli.quality import quality
from lowtide.cli.simulate import simulate
from lowtide.cli.verify import verify

app = typer.Typer(
    name="lowtide",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a fault of ours is shown as Python shows it
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    generate,
    chat,
    plan,
    doctor,
    bench,
    verify,
    calibrate,
    simulate,
    quality,
    synth,
    pack,
    pull,
    ls,
):
    app.command(verb.__name__, cls=Verb)(verb)
app.command("run", hidden=True, cls=Verb)(generate)  # as others call them
app.command("list", hidden=True, cls=Verb)(ls)


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
