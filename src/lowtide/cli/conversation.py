"""The loop of `lowtide chat`: turns and commands, and the room that the context leaves them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lowtide.cli.answer import ask_live, ask_writing, has_view, live_view
from lowtide.cli.line_editor import LineEditor
from lowtide.cli.live import LiveView
from lowtide.cli.options import OPTIONS
from lowtide.cli.report import speed_line
from lowtide.cli.screen import printable
from lowtide.cli.text import TextWriter
from lowtide.cli.turns import Turns
from lowtide.errors import LowtideError, UsageError
from lowtide.option import Group
from lowtide.params import ELSEWHERE, SamplingParams, hint, with_keywords

if TYPE_CHECKING:
    from lowtide.llm import LLM

LEAST_ANSWER_TOKENS = 64
"""Old turns are dropped where less is left for an answer, or less than was asked for."""

HELP = """\
/help               this
/clear              forget the conversation
/system TEXT        tell the model something first; without TEXT: what it is told
/set NAME VALUE     change answers, such as temperature 0.7; without: those in force
/stats              what the engine did so far
/bye                leave, as Ctrl-D does
\"\"\"                 begins and ends a message of several lines
Ctrl-C stops an answer."""

SETTABLE = {o.name: o for o in OPTIONS if o.group in (Group.SAMPLING, Group.DIFFUSION)}
SETTABLE.pop("n")


class Conversation:
    """Asks for the next turn and answers it. Owns what was said and the parameters in force."""

    def __init__(
        self, llm: LLM, params: SamplingParams, turns: Turns, out: Console, err: Console
    ) -> None:
        self._llm = llm
        self._params = params
        self._turns = turns
        self._out = out
        self._err = err
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(HELP),
            "/?": lambda _: self._say(HELP),
            "/clear": lambda _: self._clear(),
            "/system": self._set_system,
            "/set": self._set,
            "/stats": lambda _: self._show_stats(),
        }

    def run(self) -> None:
        """Reads turns until /bye or the end of input."""
        if sys.stdin.isatty():
            template = "" if self._turns.has_template else " No chat template: plain continuation."
            self._say(f"/help shows commands, /bye leaves.{template}")
        with LineEditor([*self._commands, *LEAVING]) as editor:
            while (line := self._read(editor)) is not None:
                word, _, rest = line.strip().partition(" ")
                is_command = line.startswith("/")
                if is_command and word in LEAVING:
                    return
                if is_command and word in self._commands:
                    self._reported(self._commands[word], rest.strip())
                elif is_command and word[1:].isalpha():
                    self._say(
                        f"{word} is no command: /help lists them. A space before it sends it."
                    )
                elif word:
                    self._reported(self._answer, line)

    def _read(self, editor: LineEditor) -> str | None:
        """The next line. Ctrl-C drops the one that is being typed; of lines that are not typed it
        ends the program."""
        while True:
            try:
                return editor.read()
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self._say("\n/bye or Ctrl-D leaves.")

    def _reported(self, action: Callable[[str], None], text: str) -> None:
        """The conversation outlives what was refused."""
        try:
            action(text)
        except LowtideError as error:
            self._err.print(f"lowtide: {printable(str(error))}", style="red")

    def _say(self, text: str) -> None:
        self._err.print(printable(text), style="dim")

    # Commands

    def _clear(self) -> None:
        self._turns.clear()
        self._say("(forgotten)")

    def _set_system(self, text: str) -> None:
        if text:
            self._turns.set_system(text)
        self._say(f"system: {self._turns.system or '(nothing)'}")

    def _set(self, text: str) -> None:
        name, _, value = text.removeprefix("parameter ").partition(" ")
        if name == "system":
            self._set_system(value)
            return
        if not name:
            self._say(_shown(self._params))
            return
        name = name.replace("-", "_")
        if name not in SETTABLE:
            raise UsageError(
                f"{name!r} is no parameter. {hint(name, list(SETTABLE), ELSEWHERE)} What is given "
                "when chat begins, such as context, stays."
            )
        parsed = SETTABLE[name].parse(value.strip(), f"/set {name}")
        self._params = with_keywords(self._params, {name: parsed})
        self._say(f"{name}: {value.strip()}")

    def _show_stats(self) -> None:
        stats: dict[str, Any] = dict(self._llm.stats())
        if self._llm.config.experts is None:
            from lowtide.experts.none import NoExperts

            stats = {name: stats[name] for name in stats if name not in NoExperts().as_dict()}
        self._say("\n".join(f"{name}: {_number(value)}" for name, value in stats.items()))

    # Turns

    def _answer(self, line: str) -> None:
        """Answers a line; what is said stays, also of an answer that Ctrl-C stopped."""
        token_ids, params = self._fitted(line)
        view = self._view(token_ids)
        try:
            if isinstance(view, LiveView):
                answer = ask_live(self._llm, token_ids, params, view)
            else:
                answer = ask_writing(self._llm, token_ids, params, view)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            self._say("\n(stopped)")
            self._turns.add(line, view.text)
            return
        self._turns.add(line, answer.completion.text)
        if self._out.is_terminal:
            self._say(speed_line(answer.usage, self._llm.stats(), answer.generation_s))
        if (
            answer.completion.finish_reason == "length"
            and params.most_tokens < self._params.most_tokens
        ):
            self._say("(cut short: the context is full)")

    def _fitted(self, line: str) -> tuple[list[int], SamplingParams]:
        """A prompt that leaves room for an answer, without the oldest turns if need be, and the
        parameters of such an answer. Raises UsageError for a line that is too long by itself."""
        num_dropped = 0
        while True:
            token_ids = self._llm.token_ids(self._turns.prompt_with(line))
            room = self._llm.max_new_tokens(len(token_ids), self._params)
            if room >= min(self._params.most_tokens, LEAST_ANSWER_TOKENS) or not len(self._turns):
                break
            self._turns.drop_oldest()
            num_dropped += 1
        if num_dropped:
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            self._say(f"(the oldest {turns} dropped: the context is full)")
        if room < 1:
            raise UsageError(
                f"This message has {len(token_ids)} tokens, and the context leaves no room for an "
                "answer: shorten it, or begin again with a larger --context."
            )
        return token_ids, replace(self._params, max_tokens=min(self._params.most_tokens, room))

    def _view(self, token_ids: list[int]) -> LiveView | TextWriter:
        if has_view(self._llm, self._out):
            return live_view(self._llm, token_ids, self._out)
        return TextWriter(self._out.file, True, self._out.is_terminal)


LEAVING = ("/bye", "/exit", "/quit")


def _shown(params: SamplingParams) -> str:
    """What is in force, by the names that /set takes."""
    values = {**asdict(params), **asdict(params.diffusion)}
    given = {name: values[name] for name in SETTABLE if values[name] not in (None, ())}
    return "\n".join(f"{name}: {value}" for name, value in given.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
