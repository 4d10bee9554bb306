"""Verbs and flags of other programs, answered with lowtide's own."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lowtide.cli import EXIT_USAGE
from lowtide.files.json_file import meant

_MODEL = "the model is the first argument, a folder or a hub id: lowtide generate MODEL"
_PLANNED = "--gpu-memory SIZE: what fits is placed expert by expert"
_CONTEXT = "--context TOKENS"
_MAX_TOKENS = "--max-tokens TOKENS"
_THREADS = "--cores NUMBER (all are used if it is left out)"

VERBS = {
    "completion": "lowtide --install-completion, once for your shell",
    "convert": "models run from Hugging Face folders and GGUF files as they are",
    "download": "lowtide pull ORG/NAME",
    "embed": "lowtide only writes text; it has no embeddings",
    "help": "lowtide --help, or lowtide VERB --help",
    "perplexity": "lowtide quality MODEL --text FILE",
    "ps": "nothing runs in the background; lowtide ls lists the models that are here",
    "quantize": "lowtide generate MODEL --format q4 'text' rounds weights as they are read",
    "rm": "models are folders and the hub's cache: delete what lowtide ls names",
    "search": "find a model on the hub's pages, then lowtide pull ORG/NAME",
    "server": "lowtide serve MODEL",
    "show": "lowtide plan MODEL",
    "version": "lowtide --version",
}
"""Verbs of other programs, and their replacement here."""

FLAGS = {
    "--ctx": _CONTEXT,
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
    "--presets": "--policy NAME,NAME",
    "--num-ctx": _CONTEXT,
    "-n": f"{_MAX_TOKENS} (--n is for several answers)",
    "--temp": "--temperature NUMBER",
    "--threads": _THREADS,
    "-t": _THREADS,
    "--trust-remote-code": "no code of a model's repository is ever run; leave it out",
}
"""Flags of other programs, and their replacement here."""


class _Unconverted:
    """Command whose parameters need no converters.

    typer would import pydantic and build a converter for each of sixty options, given or not.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Include the program's own parameters, such as `--help`."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            vars(param).setdefault("process_value", partial(_as_given, param, param.process_value))
        return params


class Verb(_Unconverted, TyperCommand):
    """Verb that accepts `--max_tokens`, has `--help-all`, and answers other programs' flags."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Leave out hidden arguments, which exist only to be refused."""
        pieces = [self.options_metavar] if self.options_metavar else []
        for param in self.get_params(ctx):
            if not getattr(param, "hidden", False):
                pieces += param.get_usage_pieces(ctx)
        return pieces

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete all options, including those that only `--help-all` shows."""
        from lowtide.cli.command import unhide

        unhide(self)
        return super().shell_complete(ctx, incomplete)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [param for param in self.params if param.param_type_name == "option"]
        known = {name: param for param in options for name in param.opts}
        args = [_dashed(arg, known) for arg in args]
        for name in _names(args, known):
            if name not in known and (line := _other_flag(name)):
                _answer(name, f"{line} (if it is part of the text, use quotes or put it after --)")
        return super().parse_args(ctx, args)


class Verbs(_Unconverted, TyperGroup):
    """Command that answers other programs' verbs, and flags or models in a verb's place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        name = args[0].partition("=")[0] if args else ""
        if line := _other_flag(name):
            _answer(name, line)
        mine = {option for param in self.params for option in (*param.opts, *ctx.help_option_names)}
        if name.startswith("-") and name not in mine:
            from lowtide.cli.options import OPTIONS

            own = {flag for option in OPTIONS for flag in (option.flag, option.short) if flag}
            if _dashed(name, own) in own:
                _refuse(f"{name} comes after the verb: lowtide VERB MODEL {name}.")
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in VERBS:
            _answer(cmd_name, VERBS[cmd_name])
        is_model = "/" in cmd_name or cmd_name.startswith("demo:") or cmd_name.endswith(".gguf")
        if found is None and is_model:
            model = shlex.quote(cmd_name)
            ways = f"lowtide generate {model} 'text', or lowtide chat {model}"
            _refuse(f"A verb comes first: {ways}.")
        if found is None:
            near = meant(cmd_name, self.commands)
            _refuse(f"There is no verb {cmd_name}.{near} lowtide --help lists all.")
        return found


def _as_given(param: Any, converts: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Return a parameter's value unconverted: a text, a list of them or a flag.

    converts: typer's own conversion, which refuses missing values.
    """
    if param.required and param.value_is_missing(value):
        return converts(ctx, value)
    if param.multiple or param.nargs == -1:
        value = list(value or ())
    return value if param.callback is None else param.callback(ctx, param, value)


def _answer(name: str, line: str) -> None:
    _refuse(f"There is no {name} here. Instead: {line}.")


def _refuse(message: str) -> None:
    """End the program as `errors_reported` does, without importing what options need."""
    from lowtide.cli.screen import printable, stderr_console

    stderr_console().print(f"lowtide: {printable(message)}")
    raise typer.Exit(EXIT_USAGE)


def _other_flag(name: str) -> str | None:
    """Look up another program's flag, also if written `--with_underscores`."""
    return FLAGS.get(name.replace("_", "-") if name.startswith("--") else name)


def _dashed(arg: str, known: Collection[str]) -> str:
    name, equals, value = arg.partition("=")
    dashed = name.replace("_", "-")
    return dashed + equals + value if arg.startswith("--") and dashed in known else arg


def _names(args: Sequence[str], known: dict[str, Any]) -> Iterator[str]:
    """Yield the names of options among arguments, skipping the values of known ones."""
    previous = ""
    for arg in args:
        if arg == "--":
            return
        if arg.startswith("-") and (previous not in known or known[previous].is_flag):
            yield arg.partition("=")[0]
        previous = arg
