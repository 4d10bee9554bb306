"""`lowtide chat`: a conversation in the terminal."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from lowtide.cli.command import takes
from lowtide.cli.conversation import Conversation
from lowtide.cli.generate import ModelName, show_plan, show_sampling
from lowtide.cli.line_editor import history_file
from lowtide.cli.opening import open_llm
from lowtide.cli.options import Settings
from lowtide.cli.prompt import think_options
from lowtide.cli.screen import stderr_console, stdout_console
from lowtide.cli.turns import Turns
from lowtide.errors import UsageError
from lowtide.option import Group


@takes(Group.PROMPT, Group.ENGINE, Group.HUB, Group.SAMPLING, Group.DIFFUSION, Group.OUTPUT)
def chat(
    model: ModelName,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Remember what you type for next time.")
    ] = True,
    *,
    settings: Settings,
) -> None:
    """Talk with a model, turn by turn; a model without a chat template continues the text."""
    params = settings.sampling_params()
    if words:
        one = shlex.join(["lowtide", "generate", model, " ".join(words)])
        raise UsageError(f"chat asks for text once it has begun; for one answer: {one}")
    if settings.flag("json"):
        raise UsageError("chat prints text; for one JSON object use generate --json.")
    if params.n > 1:
        raise UsageError("chat goes on from one answer; for several use generate --n.")
    with open_llm(model, settings) as llm:
        if llm.tokenizer is None:
            from lowtide.model_folder.tokenizer import NO_TOKENIZER

            raise UsageError(
                f"{NO_TOKENIZER}, so there is no text to talk in; it answers to "
                'generate --prompt-ids "5 17 3".'
            )
        has_template = llm.tokenizer.has_chat_template and not settings.flag("raw")
        think = think_options(settings.choice("think"), llm.tokenizer)
        turns = Turns(has_template, settings.text("system"), think)
        show_plan(llm, model, settings)
        show_sampling(llm, params, settings)
        kept = history_file() if history else None
        Conversation(llm, params, turns, stdout_console(), stderr_console(), kept).run()
