"""Which verbs there are: what a list of them shows, and where each is once it is used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from lowtide.cli.habits import Verb, Verbs
from lowtide.cli.interrupts import end_if_asked


class Known(NamedTuple):
    """A verb before its module is imported, which takes several times as long as this list."""

    module: str  # in this package
    line: str  # its function's first, as a test promises; nothing for a name that is not listed
    function: str
    example: str  # a command that works

    def load(self) -> Callable[..., None]:
        module = import_module(f"{__package__}.{self.module}")
        end_if_asked()
        found: Callable[..., None] = module.__dict__[self.function]
        return found


_LINES = {
    "generate": "Write one answer; a line on the plan and one on the speed go to standard error.",
    "chat": "Talk with a model, turn by turn; a model without a chat template continues the text.",
    "plan": "Show what a model needs and what it would get here, and why.",
    "doctor": "Say what is wrong with this machine, if anything, and measure it; -v shows the "
    "numbers.",
    "serve": "Answer OpenAI, Anthropic and Ollama clients over HTTP, until Ctrl-C or SIGTERM.",
    "batch": "Answer a file of requests, a line each; a run that was ended goes on where it was.",
    "bench": "Measure the machine, then how fast a model writes; --policy takes several, by "
    "commas.",
    "verify": "Prove that budgets and policies change no token and no bit; exit 1 if they do.",
    "calibrate": "Learn from a text which experts a model uses, so that policies keep the right "
    "ones.",
    "simulate": "Replay a recorded routing (generate --trace) under other policies and machines.",
    "quality": "Measure what --format q4 and other settings do to a model's words, beside the "
    "exact run.",
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

OWN_VERBS = {
    **{
        name: Known(_SHARED_MODULES.get(name, name), line, name, EXAMPLES[name])
        for name, line in _LINES.items()
    },
    "run": Known("chat", "", "run", EXAMPLES["run"]),  # as others call them
    "list": Known("models", "", "ls", EXAMPLES["ls"]),
}
"""By name, in the order of `--help`."""


class LateVerbs(Verbs):
    """The command with all of its verbs, each imported when it is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, known in OWN_VERBS.items():
            self.add_command(_LateVerb(name, known))


class _LateVerb(TyperCommand):
    """A verb's name and line; whatever it is used for, the verb itself does."""

    def __init__(self, name: str, known: Known) -> None:
        super().__init__(name, help=known.line, hidden=not known.line)
        self.known = known

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """The verb's own; who asks runs the command that is in it."""
        one = typer.Typer(add_completion=False)
        epilog = f"For example: {self.known.example}"
        one.command(self.name, cls=Verb, epilog=epilog)(self.known.load())
        verb: Any = typer.main.get_command(one)
        return verb.make_context(info_name, args, parent=parent, **extra)
