"""Table of verbs: the line that help shows, and the module imported when one is used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from lowtide.cli.foreign_flags import Verb, Verbs
from lowtide.cli.importing import imports_reported
from lowtide.cli.interrupts import reraise_signal
from lowtide.registry import VERBS, extensions


class VerbEntry(NamedTuple):
    """A verb before its module is imported, which takes several times as long as this list."""

    module: str
    line: str  # first line of the function's docstring; empty for a name that is not listed
    function: str
    example: str  # a command that works

    def load(self) -> Callable[..., None]:
        module = import_module(self.module)
        reraise_signal()
        found: Callable[..., None] = getattr(module, self.function)
        return found


_LINES = {
    "generate": "Write one answer; notes on the plan and the speed go to standard error.",
    "chat": "Talk with a model, turn by turn; a model without a chat template continues the text.",
    "plan": "Show the memory that a model needs and would get here, and why.",
    "doctor": "Check this machine for faults; -v shows how fast its memory and disk are.",
    "serve": "Answer OpenAI, Anthropic and Ollama clients over HTTP, until Ctrl-C or SIGTERM.",
    "batch": "Answer a file of requests, one per line; an interrupted run resumes.",
    "bench": "Measure the machine, then a model's speed, under one policy or several.",
    "verify": "Prove that budgets and policies change no token and no bit; exit 1 if they do.",
    "calibrate": "Learn from a text which experts a model uses, so that policies keep the right "
    "ones.",
    "simulate": "Replay a recorded routing (generate --trace) under other policies and machines.",
    "quality": "Compare the quality and speed of settings such as --format q4 with the exact run.",
    "synth": "Write a model with random weights, to try and measure without a download.",
    "pack": "Save a model with weights rounded to 8 or 4 bits: smaller, and faster to read.",
    "pull": "Fetch a model from the hub: weights, configuration and tokenizer, never code.",
    "ls": "List the models that are on this machine.",
    "cache": "List the conversations that --cache-dir keeps on disk, or clear them.",
}
EXAMPLES = {
    "generate": "lowtide generate demo:autoregressive 'Sort 93 21 57 40 12'",
    "chat": "lowtide chat Qwen3-30B-A3B-Q4_K_M.gguf --host-memory 12GiB",
    "plan": "lowtide plan Qwen/Qwen3-30B-A3B --format q4",
    "doctor": "lowtide doctor -v",
    "serve": "lowtide serve Qwen3-30B-A3B-Q4_K_M.gguf --context 32k",
    "batch": "lowtide batch demo:autoregressive -i requests.jsonl -o answers.jsonl",
    "bench": "lowtide bench demo:autoregressive --policy lowtide,lru",
    "verify": "lowtide verify demo:diffusion",
    "calibrate": "lowtide calibrate demo:diffusion --out demo.lowtide",
    "simulate": "lowtide simulate trace --policy lowtide,lru,oracle --residents 0.25",
    "quality": "lowtide quality demo:diffusion --setting format=q8 --setting format=q4",
    "synth": "lowtide synth olmoe --size small --out olmoe-small",
    "pack": "lowtide pack allenai/OLMoE-1B-7B-0924-Instruct --format q4 --out olmoe-q4",
    "pull": "lowtide pull Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    "ls": "lowtide ls",
    "cache": "lowtide cache list --cache-dir conversations",
    "run": "lowtide run demo:autoregressive 'Roman 148'",
}
_SHARED_MODULES = {"synth": "models", "pack": "models", "pull": "models", "ls": "models"}
_WORKBENCH = ("bench", "verify", "calibrate", "simulate", "quality")


def _module(name: str) -> str:
    if name in _WORKBENCH:  # the only place outside lowtide.lab that names it
        return f"lowtide.lab.verbs.{name}"
    return f"lowtide.cli.{_SHARED_MODULES.get(name, name)}"


OWN_VERBS = {
    **{name: VerbEntry(_module(name), line, name, EXAMPLES[name]) for name, line in _LINES.items()},
    "run": VerbEntry("lowtide.cli.chat", "", "run", EXAMPLES["run"]),  # other programs' names
    "list": VerbEntry("lowtide.cli.models", "", "ls", EXAMPLES["ls"]),
}
"""Verbs by name, in the order of `--help`."""


class LazyVerbs(Verbs):
    """The command with all of its verbs, each imported on first use."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, known in OWN_VERBS.items():
            self.add_command(_LazyVerb(name, known))

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_extensions()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_extensions()
        return super().get_command(ctx, cmd_name)

    def _add_extensions(self) -> None:
        """Add other distributions' verbs: not for one of the package's own, as it takes time."""
        for said, point in extensions(VERBS).items():
            name, _, line = said.partition(":")
            if name not in self.commands:
                known = VerbEntry(point.module, line.strip(), point.attr, "")
                self.add_command(_LazyVerb(name, known))


class _LazyVerb(TyperCommand):
    """A verb's name and help line; the verb itself is imported for everything else."""

    def __init__(self, name: str, known: VerbEntry) -> None:
        super().__init__(name, help=known.line, hidden=not known.line)
        self.known = known

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Import the verb and make a context of it, in place of this stand-in."""
        one = typer.Typer(add_completion=False)
        epilog = f"For example: {self.known.example}" if self.known.example else None
        with imports_reported(self.known.module):
            function = self.known.load()
        one.command(self.name, cls=Verb, epilog=epilog)(function)
        verb: Any = typer.main.get_command(one)
        return verb.make_context(info_name, args, parent=parent, **extra)
