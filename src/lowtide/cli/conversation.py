"""The loop of `lowtide chat`: turns, commands, and the context left for an answer."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from lowtide.cli.answer import Answer, ask_showing, cut_line, make_view
from lowtide.cli.line_editor import LineEditor, without_echo
from lowtide.cli.options import FLAGS, OPTIONS
from lowtide.cli.report import reads_ahead_text
from lowtide.cli.screen import printable
from lowtide.cli.turns import Turns
from lowtide.config import format_size
from lowtide.errors import LowtideError, UsageError
from lowtide.files.json_file import meant
from lowtide.model_folder.demos import can_answer, tasks_of
from lowtide.option import Group, in_words
from lowtide.params import ELSEWHERE, SamplingParams, hint, with_keywords

if TYPE_CHECKING:
    from lowtide.llm import LLM

LEAST_ANSWER_TOKENS = 64
"""Least room for an answer; old turns are dropped to keep it, or `max_tokens` if that is less."""

HELP = """\
/help               this
/clear              forget the conversation
/system TEXT        set the system message; without TEXT: show it
/set NAME VALUE     set a parameter, such as temperature 0.7; without: list all
/set NAME default   restore its default
/retry              write another answer to the last message
/save FILE          write the conversation to a file, as JSON
/load FILE          continue a saved conversation
/stats              show tokens, passes and reads so far
/bye                leave (or Ctrl-D)
\"\"\"                 begin and end a message of several lines; pasted text needs none
Ctrl-C stops an answer."""

SETTABLE = {o.name: o for o in OPTIONS if o.group in (Group.SAMPLING, Group.DIFFUSION)}
for _only_in_generate in ("n", "logprobs"):
    SETTABLE.pop(_only_in_generate)

_AT_START = {name: flag for name, flag in FLAGS.items() if name not in SETTABLE}
"""Flags of options that only the start of a conversation takes; the others are names of `/set`."""

SETTINGS_HEAD = f"{'':20}{'in force':15}{'default':15}"

DEFAULT = "default"
"""Value in `/set NAME VALUE` that restores the default."""


class ChatIO(NamedTuple):
    """Consoles for answers and messages, and the file that keeps typed lines."""

    out: Console
    err: Console
    history: Path | None = None


class Dialogue(abc.ABC):
    """Loop that reads turns and has them answered.

    Owns the turns and the sampling parameters in force.
    """

    def __init__(self, params: SamplingParams, turns: Turns, io: ChatIO) -> None:
        self._params = params
        self._turns = turns
        self._out, self._err, self._history = io
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._help(),
            "/?": lambda _: self._help(),
            "/clear": lambda _: self._clear(),
            "/system": self._set_system,
            "/set": self._set,
            "/retry": lambda _: self._retry(),
            "/save": self._save,
            "/load": self._load,
            "/stats": lambda _: self._show_stats(),
        }

    @abc.abstractmethod
    def _answer(self, line: str) -> None:
        """Answer a line and add the turn, also if Ctrl-C stops the answer."""

    @abc.abstractmethod
    def _show_stats(self) -> None: ...

    @abc.abstractmethod
    def _names(self) -> Sequence[str]:
        """Return the names of the parameters that apply here."""

    @abc.abstractmethod
    def _in_force(self, params: SamplingParams) -> SamplingParams:
        """Fill unset parameters with the values in force, as far as they are known.

        Raises UsageError or UnsupportedError for parameters that an answer cannot have here.
        """

    def run(self) -> None:
        """Read turns until /bye or the end of input."""
        if sys.stdin.isatty():
            template = "" if self._turns.has_template else " No chat template: plain continuation."
            self._say(f"/help shows commands, /bye leaves.{template}")
        editor = LineEditor([*self._commands, *LEAVING], self._history)
        while (line := self._read(editor)) is not None:
            word, _, rest = line.strip().partition(" ")
            is_command = line.startswith("/")
            if is_command and word in LEAVING:
                return
            if is_command and word in self._commands:
                self._reported(self._commands[word], rest.strip())
            elif is_command and word[1:].isalpha():
                near = meant(word, [*self._commands, *LEAVING])
                self._say(
                    f"Unknown command {word} (try /help).{near} To send it as text, start with a "
                    "space."
                )
            elif word:
                self._reported(self._answer, line)

    def _keep_stopped(self, line: str, text: str) -> None:
        """Keep the text of an answer that Ctrl-C stopped.

        Raises KeyboardInterrupt again, to end the program, if standard input is not a terminal.
        """
        if not sys.stdin.isatty():
            raise KeyboardInterrupt
        self._say("\n(stopped)")
        self._turns.add(line, text)

    def _read(self, editor: LineEditor) -> str | None:
        """Read the next line, or return None at the end of input.

        Ctrl-C drops a line that is being typed; if standard input is not a terminal it ends the
        program.
        """
        while True:
            try:
                return editor.read()
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self._say("\n/bye or Ctrl-D leaves.")

    def _reported(self, action: Callable[[str], None], text: str) -> None:
        """Run a command or an answer, and print its errors so that the conversation continues.

        Ctrl-C stops the action on a terminal and ends the program elsewhere.
        """
        try:
            action(text)
        except LowtideError as error:
            self._err.print(f"lowtide: {printable(in_words(str(error), _AT_START))}", style="red")
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            self._say("\n(stopped)")

    def _say(self, text: str) -> None:
        self._err.print(printable(text), style="dim")

    # Commands

    def _help(self) -> None:
        kept = "nowhere" if self._history is None else f"in {self._history} (--no-history: nowhere)"
        self._say(f"{HELP}\nWhat you type is kept {kept}.")

    def _retry(self) -> None:
        line, answer = self._turns.take_back()
        has_answered = False
        try:
            self._answer(line)
            has_answered = bool(self._turns.last_answer)
        finally:  # the old answer is replaced only by a new one
            if not has_answered:
                self._turns.put_back(line, answer)

    def _save(self, name: str) -> None:
        path = _named(name, "/save")
        self._turns.save(path)
        self._say(f"(saved {_counted(len(self._turns), 'turn')} to {path})")

    def _load(self, name: str) -> None:
        path = _named(name, "/load")
        self._turns.load(path)
        self._say(f"({_counted(len(self._turns), 'turn')} of {path})")

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
            self._say("\n".join([SETTINGS_HEAD, *map(self._setting, self._known())]))
            return
        name, value = name.replace("-", "_"), value.strip()
        if name not in SETTABLE:
            raise UsageError(
                f"{name!r} is not a parameter. {hint(name, self._known(), ELSEWHERE)} "
                "Options such as context can only be set when chat starts."
            )
        if value:
            self._change(name, value)
        self._say(f"{name}: {_shown(_value_of(self._in_force(self._params), name))}")

    def _known(self) -> list[str]:
        """List the parameters that can be set here."""
        return [name for name in SETTABLE if name in self._names()]

    def _change(self, name: str, value: str) -> None:
        """Set a parameter or restore its default.

        Raises UsageError or UnsupportedError, and changes nothing, if the next answer would be
        refused.
        """
        if value == DEFAULT:
            new = _value_of(SamplingParams(), name)
        else:
            new = _parsed(name, value)
        params = with_keywords(self._params, {name: new})
        self._in_force(params)
        self._params = params

    def _setting(self, name: str) -> str:
        """Describe a parameter in one line: value in force, default, and help."""
        values = (self._in_force(params) for params in (self._params, SamplingParams()))
        in_force, default = (_shown(_value_of(each, name)) for each in values)
        return f"{name:20}{in_force:15}{default:15} {SETTABLE[name].help}"


class TerminalChat(Dialogue):
    """Conversation with a model of this process."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        turns: Turns,
        io: ChatIO,
        answer_line: Callable[[Answer], str],
    ) -> None:
        """answer_line: make the note printed below an answer."""
        super().__init__(params, turns, io)
        self._llm = llm
        self._answer_line = answer_line
        self._in_force(params)

    def _names(self) -> Sequence[str]:
        return self._llm.answer_fields

    def _in_force(self, params: SamplingParams) -> SamplingParams:
        return self._llm.params_in_force(params)

    def _show_stats(self) -> None:
        self._say(stats_text(self._llm.stats(), self._llm.config.experts is not None))

    def _answer(self, line: str) -> None:
        token_ids, params = self._fitted(line)
        view, is_raw = make_view(self._llm, token_ids, self._out), not self._turns.has_template
        try:
            with without_echo():
                answer = ask_showing(self._llm, token_ids, params, is_raw, view)
        except KeyboardInterrupt:
            return self._keep_stopped(line, view.text)
        self._turns.add(line, answer.completion.text)
        if (tasks := tasks_of(self._llm.path)) and not can_answer(tasks, line):
            examples = ", ".join(task.example for task in tasks if task.example)
            self._say(f"(not one of this demo's tasks, so this means nothing; try {examples})")
        if self._out.is_terminal:
            self._say(self._answer_line(answer))
        if cut := cut_line(answer):
            room = self._llm.max_new_tokens(len(token_ids), params)
            is_full = answer.usage.completion_tokens == room
            self._say(f"{cut[:-1]}: the context is full)" if is_full else cut)

    def _fitted(self, line: str) -> tuple[list[int], SamplingParams]:
        """Make a prompt that leaves room for an answer, dropping the oldest turns if needed.

        Returns the prompt and the parameters of the answer. Raises UsageError for a line that is
        too long by itself.
        """
        num_dropped = 0
        while True:
            token_ids = self._llm.token_ids(
                self._turns.prompt_with(line, num_dropped),
                raw=not self._turns.has_template,
                template_options=self._turns.template_options,
            )
            room = self._llm.max_new_tokens(len(token_ids), self._params)
            least = min(self._params.max_tokens or LEAST_ANSWER_TOKENS, LEAST_ANSWER_TOKENS)
            if room >= least or num_dropped == len(self._turns):
                break
            num_dropped += 1
        if room < 1:
            raise UsageError(
                f"This message has {len(token_ids)} tokens, and the context leaves no room for an "
                "answer: shorten it, or begin again with a larger --context."
            )
        if num_dropped:
            self._turns.drop_oldest(num_dropped)
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            self._say(f"(the oldest {turns} dropped: the context is full)")
        if self._params.max_tokens is None:
            return token_ids, self._params
        return token_ids, replace(self._params, max_tokens=min(self._params.max_tokens, room))


LEAVING = ("/bye", "/exit", "/quit")


def _parsed(name: str, value: str) -> object:
    try:
        return SETTABLE[name].parse(value, f"/set {name}")
    except UsageError as error:
        told = str(error).rstrip(".")
        raise UsageError(f"{told}; /set {name} {DEFAULT} takes back what was set.") from None


def _value_of(params: SamplingParams, name: str) -> object:
    """Return a field of the sampling or the diffusion parameters."""
    return getattr(params if hasattr(params, name) else params.diffusion, name)


def _shown(value: object) -> str:
    """Format a value as a user would type it."""
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(value) if isinstance(value, list | tuple) else str(value)


def stats_text(stats: Mapping[str, Any], has_experts: bool) -> str:
    """Describe in words the statistics of `LLM.stats()`."""
    if not stats["forwards"]:
        return "nothing yet"
    lines = [
        f"{_counted(stats['committed_tokens'], 'token')} in {_counted(stats['forwards'], 'pass')}, "
        f"{stats['generation_s']:.1f} s: {stats['tokens_per_s']:.1f} tokens/s",
    ]
    num_used = stats["num_hits"] + stats["num_misses"] if has_experts else 0
    if num_used:
        lines.append(
            f"experts: {num_used:,} uses, {stats['hit_rate']:.1%} of them found in memory, "
            f"{format_size(stats['read_bytes'])} read from disk"
        )
    if ahead := reads_ahead_text(stats):
        lines.append(ahead)
    return "\n".join(lines)


def _named(name: str, command: str) -> Path:
    if not name or not name.isprintable():
        raise UsageError(f"{command} needs the name of a file, in characters that can be printed.")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # a home of no user
        raise UsageError(f"{command} {name}: {error}") from error


def _counted(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"
