"""What people type who know another program: it works, or the answer is the line that does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lowtide.errors import UsageError

FIRST = "the model is the first argument, a folder or a hub id: lowtide generate MODEL"

VERBS = {
    "cli": "lowtide generate MODEL 'text', or lowtide chat MODEL",
    "complete": "lowtide generate MODEL 'text' --raw",
    "convert": "nothing has to be: models run from Hugging Face folders and GGUF files",
    "create": "lowtide synth FAMILY --out FOLDER makes a model of random weights",
    "download": "lowtide pull ORG/NAME",
    "info": "lowtide plan MODEL",
    "interactive": "lowtide chat MODEL",
    "ps": "nothing runs in the background; lowtide ls lists the models that are here",
    "quantize": "lowtide generate MODEL --format q4 'text' rounds weights as they are read",
    "rm": "models are folders and the hub's cache: delete what lowtide ls names",
    "serve": "there is no server yet; from Python, AsyncLLM answers many at once",
    "show": "lowtide plan MODEL",
    "stop": "nothing runs in the background",
}
"""Verbs of other programs that are none here."""

FLAGS = {
    "--cpu-offload-gb": "--gpu-memory says what the GPU may hold; the rest is offloaded",
    "--ctx-size": "--context TOKENS",
    "--device-map": "--device, with --gpu-memory and --host-memory as budgets",
    "--do-sample": "--temperature above 0 draws, 0 takes the likeliest",
    "--file": "pipe it in: lowtide generate MODEL < FILE",
    "--gpu-layers": "--gpu-memory SIZE: what fits is placed expert by expert",
    "--gpu-memory-utilization": "--gpu-memory 90%",
    "--hf-repo": FIRST,
    "--interactive": "lowtide chat MODEL",
    "--load-in-4bit": "--format q4",
    "--load-in-8bit": "--format q8",
    "--max-model-len": "--context TOKENS",
    "--max-new-tokens": "--max-tokens TOKENS",
    "--model": FIRST,
    "--model-name-or-path": FIRST,
    "--n-gpu-layers": "--gpu-memory SIZE: what fits is placed expert by expert",
    "--n-predict": "--max-tokens TOKENS",
    "--num-predict": "--max-tokens TOKENS",
    "--repeat-penalty": "--repetition-penalty NUMBER",
    "--system-prompt": "--system TEXT",
    "--temp": "--temperature NUMBER",
    "--tensor-parallel-size": "one GPU is used; leave it out",
    "--threads": "every core that there is computes; taskset bounds them",
    "--torch-dtype": "--dtype TYPE",
    "--trust-remote-code": "no code of a model's repository is ever run; leave it out",
    "-c": "--context TOKENS",
    "-cnv": "lowtide chat MODEL",
    "-f": "pipe it in: lowtide generate MODEL < FILE",
    "-hf": FIRST,
    "-i": "lowtide chat MODEL",
    "-m": FIRST,
    "-n": "--max-tokens TOKENS (--n is for several answers)",
    "-ngl": "--gpu-memory SIZE: what fits is placed expert by expert",
    "-s": "--seed NUMBER",
    "-sys": "--system TEXT",
    "-t": "every core that there is computes; taskset bounds them",
    "-tp": "one GPU is used; leave it out",
}
"""Flags of other programs that are none here."""


class Verb(TyperCommand):
    """A verb that understands `--max_tokens`, shows the rest of its options with `--help-all`, and
    answers other programs' flags with its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name: param for param in self.params for name in param.opts}
        args = [_dashed(arg, known) for arg in args]
        for name in _names(args, known):
            if name not in known and name in FLAGS:
                _answer(name, FLAGS[name])
        return super().parse_args(ctx, args)


class Verbs(TyperGroup):
    """The command, which answers other programs' verbs with its own."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in VERBS:
            _answer(cmd_name, VERBS[cmd_name])
        return found


def show_all(ctx: typer.Context, is_wanted: bool) -> None:
    """What `--help-all` does."""
    if is_wanted:
        for param in ctx.command.params:
            param.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


def _answer(name: str, line: str) -> None:
    from lowtide.cli.command import errors_reported

    with errors_reported():
        raise UsageError(f"{name} is not known here; instead: {line}.")


def _dashed(arg: str, known: dict[str, Any]) -> str:
    name, equals, value = arg.partition("=")
    dashed = name.replace("_", "-")
    return dashed + equals + value if arg.startswith("--") and dashed in known else arg


def _names(args: Sequence[str], known: dict[str, Any]) -> Iterator[str]:
    """The names of options among arguments; what follows a known one may be its value."""
    previous = ""
    for arg in args:
        if arg == "--":
            return
        if arg.startswith("-") and (previous not in known or known[previous].is_flag):
            yield arg.partition("=")[0]
        previous = arg
