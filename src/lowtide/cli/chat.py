"""`lowtide chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from lowtide.cli.answer import Prompt, ask_live, ask_writing, has_view, live_view
from lowtide.cli.command import takes
from lowtide.cli.generate import ModelName
from lowtide.cli.live import LiveView
from lowtide.cli.opening import open_llm
from lowtide.cli.options import Group, Settings
from lowtide.cli.report import plan_table, speed_line
from lowtide.cli.screen import printable, stderr_console, stdout_console
from lowtide.cli.text import TextWriter
from lowtide.errors import LowtideError, UsageError
from lowtide.params import SamplingParams

if TYPE_CHECKING:
    from lowtide.llm import LLM

HELP = "Ctrl-C stops an answer. /clear starts anew, /exit or Ctrl-D leaves."


@takes(Group.ENGINE, Group.HUB, Group.SAMPLING, Group.DIFFUSION, Group.OUTPUT)
def chat(model: ModelName, *, settings: Settings) -> None:
    """Talk with a model, turn by turn; a model without a chat template continues the text."""
    params = settings.sampling_params()
    if settings.flag("json"):
        raise UsageError("chat prints text; for one JSON object use generate --json.")
    if params.n > 1:
        raise UsageError("chat goes on from one answer; for several use generate --n.")
    with open_llm(model, settings) as llm:
        if llm.tokenizer is None:
            raise UsageError(
                "this model has no tokenizer.json, so there is no text to talk in; it answers to "
                'generate --prompt-ids "5 17 3".'
            )
        stderr_console().print(plan_table(llm.plan))
        Conversation(llm, params, stdout_console(), stderr_console()).run()


class Conversation:
    """Turns so far, and the loop that asks for the next one.

    Owns the history. With a chat template it is messages; without, one growing text.
    """

    def __init__(self, llm: LLM, params: SamplingParams, out: Console, err: Console) -> None:
        self._llm = llm
        self._params = params
        self._out = out
        self._err = err
        tokenizer = llm.tokenizer
        self._has_template = tokenizer is not None and tokenizer.has_chat_template
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def run(self) -> None:
        """Read turns until /exit or the end of input."""
        if sys.stdin.isatty():
            template = "" if self._has_template else " No chat template: plain continuation."
            self._err.print(HELP + template)
        while (line := self._read_line()) is not None:
            if line.strip() == "/exit":
                return
            if line.strip() == "/clear":
                self._messages, self._text = [], ""
            elif line.strip():
                self._turn(line)

    def _read_line(self) -> str | None:
        """The next turn, or None at the end of input. Ctrl-C drops the line being typed."""
        while True:
            try:
                return input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                self._err.print(f"\n{HELP}")

    def _turn(self, line: str) -> None:
        prompt = self._prompt_with(line)
        try:
            answer = self._answer(prompt)
        except LowtideError as error:  # the conversation outlives a turn that was refused
            self._err.print(f"lowtide: {printable(str(error))}", style="red")
            return
        self._remember(line, answer)

    def _answer(self, prompt: Prompt) -> str:
        """The text of an answer, in full or up to where Ctrl-C stopped it; it is on the screen."""
        view = self._view(prompt)
        try:
            if isinstance(view, LiveView):
                answer = ask_live(self._llm, prompt, self._params, view)
            else:
                answer = ask_writing(self._llm, prompt, self._params, view)
        except KeyboardInterrupt:
            self._err.print("\n(stopped)", style="dim")
            return view.text
        if not self._out.is_terminal:
            return answer.completion.text
        line = speed_line(answer.completion.usage, self._llm.stats(), answer.generation_s)
        self._err.print(line, style="dim", soft_wrap=True)
        return answer.completion.text

    def _view(self, prompt: Prompt) -> LiveView | TextWriter:
        stop = self._params.stop
        if has_view(self._llm, self._out):
            return live_view(self._llm, prompt, stop, self._out)
        return TextWriter(self._out.file, self._llm.tokenizer, stop, self._out.is_terminal)

    def _prompt_with(self, line: str) -> Prompt:
        if self._has_template:
            return [*self._messages, {"role": "user", "content": line}]
        return self._text + line

    def _remember(self, line: str, answer: str) -> None:
        if self._has_template:
            self._messages.append({"role": "user", "content": line})
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._text += line + answer
