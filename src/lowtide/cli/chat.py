"""`lowtide chat` and `lowtide run`: a conversation in the terminal."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.command import takes
from lowtide.cli.conversation import ChatIO, TerminalChat
from lowtide.cli.generate import (
    ANSWER_OPTIONS,
    ModelName,
    PromptIds,
    PromptText,
    Words,
    answer_line,
    model_names,
    show_plan,
    show_sampling,
    show_tasks,
    write_answer,
)
from lowtide.cli.line_editor import history_file
from lowtide.cli.opening import open_llm
from lowtide.cli.options import OPTIONS, Settings
from lowtide.cli.prompt import think_options
from lowtide.cli.remote import RemoteDialogue, chosen_model, server_at
from lowtide.cli.screen import stderr_console, stdout_console
from lowtide.cli.turns import Turns
from lowtide.errors import UsageError
from lowtide.option import Group
from lowtide.params import SamplingParams

UNLISTED = ("json", "n", "logprobs")
"""Options that chat accepts only to name their replacement."""

_ANSWER_OPTIONS = [o.name for o in OPTIONS if o.group in (Group.SAMPLING, Group.DIFFUSION)]
REMOTE_OPTIONS = ("system", "think", *_ANSWER_OPTIONS, "verbose", "config")


@takes(
    Group.PROMPT,
    Group.ENGINE,
    Group.HUB,
    Group.SAMPLING,
    Group.DIFFUSION,
    Group.OUTPUT,
    unlisted=UNLISTED,
)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, GGUF file, hub id or demo; with --url a name of the server's.",
            metavar="MODEL",
            autocompletion=model_names,
        ),
    ] = None,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="ADDRESS",
            help="Talk with a server's model instead, such as http://localhost:8000.",
        ),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Remember what you type for next time.")
    ] = True,
    *,
    settings: Settings,
) -> None:
    """Talk with a model, turn by turn; a model without a chat template continues the text."""
    if words:
        one = shlex.join(["lowtide", "generate", str(model), " ".join(words)])
        raise UsageError(f"chat asks for text once it has begun; for one answer: {one}")
    kept = history_file() if history else None
    if url is not None:
        talk_to(url, model, settings, kept)
    elif model is not None:
        talk(model, settings, kept)
    else:
        raise UsageError("Name a model, or the --url of a server.")


@takes(*ANSWER_OPTIONS)
def run(
    model: ModelName,
    words: Words = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    *,
    settings: Settings,
) -> None:
    """Write one answer, as generate does; without a text, on a terminal, chat."""
    is_asked = bool(words) or prompt is not None or prompt_ids is not None
    if is_asked or not sys.stdin.isatty():
        write_answer(model, words, prompt, prompt_ids, settings)
    else:
        talk(model, settings, history_file())


def talk(model: str, settings: Settings, history: Path | None) -> None:
    """Hold a conversation until the user leaves.

    history: file that keeps typed lines for the next conversation, or None.
    """
    params = _params_of_turns(settings)
    with open_llm(model, settings) as llm:
        if llm.tokenizer is None:
            from lowtide.model_folder.tokenizer import NO_TOKENIZER

            raise UsageError(
                f"{NO_TOKENIZER}, so there is no text to talk in; it answers to "
                'generate --prompt-ids "5 17 3".'
            )
        has_template = llm.tokenizer.has_chat_template and not settings.flag("raw")
        think = think_options(settings.choice("think"), llm.tokenizer if has_template else None)
        turns = Turns(has_template, settings.text("system"), think)
        show_plan(llm, settings)
        show_tasks(llm, settings)
        show_sampling(llm, params, settings)
        io = ChatIO(stdout_console(), stderr_console(), history)
        line = partial(answer_line, llm=llm, is_verbose=settings.flag("verbose"))
        TerminalChat(llm, params, turns, io, line).run()


def talk_to(url: str, model: str | None, settings: Settings, history: Path | None) -> None:
    """Hold a conversation with a server's model.

    Raises UsageError for options that only the server can set.
    """
    params = _params_of_turns(settings)
    sources = settings.sources.items()
    unused = [flag for name, flag in sources if name not in REMOTE_OPTIONS and flag[:2] == "--"]
    if unused:
        raise UsageError(
            f"{', '.join(unused)}: the server has its own; with --url leave this out, and give it "
            "to lowtide serve."
        )
    server, think = server_at(url), settings.choice("think")
    template_options = {} if think is None else {"enable_thinking": think}
    turns = Turns(True, settings.text("system"), template_options)
    io = ChatIO(stdout_console(), stderr_console(), history)
    RemoteDialogue(server, chosen_model(server, model), params, turns, io).run()


def _params_of_turns(settings: Settings) -> SamplingParams:
    params = settings.sampling_params()
    if settings.flag("json"):
        raise UsageError("chat prints text; for one JSON object use generate --json.")
    if params.n > 1:
        raise UsageError("chat goes on from one answer; for several use generate --n.")
    if params.logprobs is not None:
        raise UsageError("chat prints text alone; for log-probabilities use generate --json.")
    return params
