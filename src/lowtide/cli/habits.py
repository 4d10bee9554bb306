"""What people type who know another program: it works, or the answer is the line that does."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from lowtide.errors import UsageError

_MODEL = "the model is the first argument, a folder or a hub id: lowtide generate MODEL"
_PLANNED = "--gpu-memory SIZE: what fits is placed expert by expert"
_CONTEXT = "--context TOKENS"
_MAX_TOKENS = "--max-tokens TOKENS"
_THREADS = "every core that there is computes; taskset bounds them"

VERBS = {
    "convert": "nothing has to be: models run from Hugging Face folders and GGUF files",
    "download": "lowtide pull ORG/NAME",
    "help": "lowtide --help, or lowtide VERB --help",
    "perplexity": "lowtide quality MODEL --text FILE",
    "ps": "nothing runs in the background; lowtide ls lists the models that are here",
    "quantize": "lowtide generate MODEL --format q4 'text' rounds weights as they are read",
    "rm": "models are folders and the hub's cache: delete what lowtide ls names",
    "serve": "there is no server yet; from Python, AsyncLLM answers many at once",
    "show": "lowtide plan MODEL",
    "version": "lowtide --version",
}
"""The ten commonest verbs of other programs that are none here."""

FLAGS = {
    "--ctx-size": _CONTEXT,
    "-c": _CONTEXT,
    "--gpu-memory-utilization": "--gpu-memory 90%",
    "--max-model-len": _CONTEXT,
    "--max-new-tokens": _MAX_TOKENS,
    "--model": _MODEL,
    "-m": _MODEL,
    "--n-gpu-layers": _PLANNED,
    "-ngl": _PLANNED,
    "--n-predict": _MAX_TOKENS,
    "-n": f"{_MAX_TOKENS} (--n is for several answers)",
    "--temp": "--temperature NUMBER",
    "--threads": _THREADS,
    "-t": _THREADS,
    "--trust-remote-code": "no code of a model's repository is ever run; leave it out",
}
"""The ten commonest flags of other programs that are none here, some with a short form."""


class Verb(TyperCommand):
    """A verb that understands `--max_tokens`, shows the rest of its options with `--help-all`, and
    answers other programs' flags with its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name: param for param in self.params for name in param.opts}
        args = [_dashed(arg, known) for arg in args]
        for name in _names(args, known):
            if name not in known and (line := _other_flag(name)):
                _answer(name, f"{line} (a word of the text stands behind --, or in quotes)")
        return super().parse_args(ctx, args)


class Verbs(TyperGroup):
    """The command, which answers other programs' verbs with its own, and flags and models that
    stand where a verb belongs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        name = args[0].partition("=")[0] if args else ""
        if line := _other_flag(name):
            _answer(name, line)
        mine = {option for param in self.params for option in (*param.opts, *ctx.help_option_names)}
        if name.startswith("-") and name not in mine and _dashed(name, own := _own_flags()) in own:
            _refuse(f"{name} comes after the verb: lowtide VERB MODEL {name}.")
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in VERBS:
            _answer(cmd_name, VERBS[cmd_name])
        if found is None and _is_model(cmd_name):
            model = shlex.quote(cmd_name)
            _answer(cmd_name, f"lowtide generate {model} 'text', or lowtide chat {model}")
        return found


def _answer(name: str, line: str) -> None:
    _refuse(f"{name} is not known here; instead: {line}.")


def _refuse(message: str) -> None:
    from lowtide.cli.command import errors_reported

    with errors_reported():
        raise UsageError(message)


def _own_flags() -> frozenset[str]:
    from lowtide.cli.options import OPTIONS

    return frozenset(name for option in OPTIONS for name in (option.flag, option.short) if name)


def _other_flag(name: str) -> str | None:
    """The line that does what a flag does elsewhere, also where that is written `--with_this`."""
    return FLAGS.get(name.replace("_", "-") if name.startswith("--") else name)


def _is_model(name: str) -> bool:
    return "/" in name or name.startswith("demo:") or name.endswith(".gguf")


def _dashed(arg: str, known: Collection[str]) -> str:
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
