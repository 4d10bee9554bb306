"""What people type who know another program: it works, or the answer is the line that does."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from lowtide.errors import UsageError
from lowtide.model_folder.way_out import way_out

FIRST = "the model is the first argument, a folder or a hub id: lowtide generate MODEL"
NO_SERVER = "there is no server yet; from Python, AsyncLLM answers many at once"
PLANNED = "--gpu-memory SIZE: what fits is placed expert by expert"
FULL_CACHE = "keys and values are kept in the type that is computed in; leave it out"
DEFAULT = "leave it out: there is nothing to choose"

VERBS = {
    "benchmark": "lowtide bench MODEL",
    "cli": "lowtide generate MODEL 'text', or lowtide chat MODEL",
    "complete": "lowtide generate MODEL 'text' --raw",
    "convert": "nothing has to be: models run from Hugging Face folders and GGUF files",
    "create": "lowtide synth FAMILY --out FOLDER makes a model of random weights",
    "download": "lowtide pull ORG/NAME",
    "eval": "lowtide quality MODEL --text FILE",
    "help": "lowtide --help, or lowtide VERB --help",
    "info": "lowtide plan MODEL",
    "interactive": "lowtide chat MODEL",
    "login": "HF_TOKEN in the environment",
    "perplexity": "lowtide quality MODEL --text FILE",
    "ps": "nothing runs in the background; lowtide ls lists the models that are here",
    "quantize": "lowtide generate MODEL --format q4 'text' rounds weights as they are read",
    "rm": "models are folders and the hub's cache: delete what lowtide ls names",
    "serve": NO_SERVER,
    "server": NO_SERVER,
    "show": "lowtide plan MODEL",
    "stop": "nothing runs in the background",
    "version": "lowtide --version",
}
"""Verbs of other programs that are none here."""

FLAGS = {
    "--attn-implementation": DEFAULT,
    "--batch-size": DEFAULT,
    "--cache-dir": "HF_HOME=FOLDER in the environment",
    "--cache-type-k": FULL_CACHE,
    "--cache-type-v": FULL_CACHE,
    "--chat-template": "the model's own is applied; --raw takes the text as it is",
    "--color": DEFAULT,
    "--cpu-moe": PLANNED,
    "--cpu-offload-gb": "--gpu-memory says what the GPU may hold; the rest is offloaded",
    "--ctx-size": "--context TOKENS",
    "--device-map": "--device, with --gpu-memory and --host-memory as budgets",
    "--do-sample": "--temperature above 0 draws, 0 takes the likeliest",
    "--download-dir": "HF_HOME=FOLDER in the environment",
    "--enforce-eager": DEFAULT,
    "--file": "pipe it in: lowtide generate MODEL < FILE",
    "--flash-attn": DEFAULT,
    "--gpu-layers": PLANNED,
    "--gpu-memory-utilization": "--gpu-memory 90%",
    "--grammar": "no answer is bound to a grammar; leave it out",
    "--hf-repo": FIRST,
    "--host": NO_SERVER,
    "--interactive": "lowtide chat MODEL",
    "--jinja": "the model's chat template is applied anyway; leave it out",
    "--json-schema": "no answer is bound to a grammar; leave it out",
    "--kv-cache-dtype": FULL_CACHE,
    "--load-in-4bit": "--format q4",
    "--load-in-8bit": "--format q8",
    "--local-dir": "HF_HOME=FOLDER in the environment",
    "--log-disable": "--quiet",
    "--max-length": "--max-tokens TOKENS, of new ones alone",
    "--max-model-len": "--context TOKENS",
    "--max-new-tokens": "--max-tokens TOKENS",
    "--model": FIRST,
    "--mlock": "there is no lock on memory to choose; leave it out",
    "--mmproj": "there is no vision",
    "--model-name-or-path": FIRST,
    "--model-path": FIRST,
    "--n-cpu-moe": PLANNED,
    "--n-gpu-layers": PLANNED,
    "--n-predict": "--max-tokens TOKENS",
    "--no-mmap": "weights are never mapped; leave it out",
    "--num-ctx": "--context TOKENS",
    "--num-predict": "--max-tokens TOKENS",
    "--num-return-sequences": "--n NUMBER",
    "--output": "lowtide generate MODEL 'text' > FILE",
    "--override-tensor": PLANNED,
    "--port": NO_SERVER,
    "--prompt": "text to answer: lowtide generate MODEL 'text'",
    "--quantization": "--format q8 or q4, or a model that is stored so",
    "--repeat-penalty": "--repetition-penalty NUMBER",
    "--reverse-prompt": "--stop TEXT",
    "--revision": "ORG/NAME@REVISION as the model",
    "--single-turn": "lowtide generate MODEL 'text'",
    "--stream": "answers are written as they come; leave it out",
    "--system-prompt": "--system TEXT",
    "--temp": "--temperature NUMBER",
    "--tensor-parallel-size": "one GPU is used; leave it out",
    "--threads": "every core that there is computes; taskset bounds them",
    "--token": "HF_TOKEN in the environment",
    "--tokenizer": "it is read from the model's folder; leave it out",
    "--torch-dtype": "--dtype TYPE",
    "--trust-remote-code": "no code of a model's repository is ever run; leave it out",
    "-b": DEFAULT,
    "-c": "--context TOKENS",
    "-cmoe": PLANNED,
    "-cnv": "lowtide chat MODEL",
    "-ctk": FULL_CACHE,
    "-ctv": FULL_CACHE,
    "-f": "pipe it in: lowtide generate MODEL < FILE",
    "-fa": DEFAULT,
    "-hf": FIRST,
    "-i": "lowtide chat MODEL",
    "-m": FIRST,
    "-n": "--max-tokens TOKENS (--n is for several answers)",
    "-ncmoe": PLANNED,
    "-ngl": PLANNED,
    "-no-cnv": "--raw",
    "-o": "lowtide generate MODEL 'text' > FILE",
    "-ot": PLANNED,
    "-p": "text to answer: lowtide generate MODEL 'text'",
    "-r": "--stop TEXT",
    "-s": "--seed NUMBER",
    "-st": "lowtide generate MODEL 'text'",
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
        if found is None and (meant := way_out(cmd_name)):
            _refuse(f"{cmd_name} is no verb.{meant}")
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
