"""`lowtide chat` and chat templates on the command line, against an engine that only pretends."""

from __future__ import annotations

import io
import os
import pty
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowtide.answers.completion import Completion, Usage
from lowtide.cli.conversation import HELP, LEAVING, SETTABLE, Conversation
from lowtide.cli.line_editor import LineEditor
from lowtide.cli.prompt import Question
from lowtide.cli.turns import Turns
from lowtide.decode.request import Committed
from lowtide.errors import UsageError
from lowtide.model_folder.model_config import has_chat_template
from lowtide.params import SamplingParams

TALK = [{"role": "user", "content": "hi"}]


class Templated:
    has_chat_template = True


class Words:
    """A model that has a context of 100 words and answers with ten."""

    tokenizer: Any = None

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.prompts: list[Any] = []
        self.config: Any = Config()

    def token_ids(self, prompt: Any) -> list[int]:
        self.prompts.append(prompt)
        text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
        return [1] * len(text.split())

    def max_new_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return 100 - num_prompt_tokens

    def generate(
        self, prompts: list[Any], params: SamplingParams, on_event: Callable[[Any], None]
    ) -> list[Completion]:
        self.asked.append((prompts[0], params))
        num_tokens = min(10, params.max_tokens)
        on_event(Committed(0, (2,) * num_tokens))
        reason = "length" if num_tokens == params.max_tokens else "stop"
        usage = Usage(len(prompts[0]), num_tokens, 3)
        return [Completion([2] * num_tokens, "word " * num_tokens, reason, usage)]

    def stats(self) -> dict[str, float]:
        return {"hit_rate": 0.123456, "passes": 7}


class Config:
    is_diffusion = False
    experts = "some"


class Talk:
    """A conversation over `Words`, and what it says."""

    def __init__(self, has_template: bool = True, **params: Any) -> None:
        self.llm: Any = Words()
        self.err = io.StringIO()
        self.out = io.StringIO()
        self.turns = Turns(has_template)
        self.conversation = Conversation(
            self.llm,
            SamplingParams(**params),
            self.turns,
            Console(file=self.out, width=200),
            Console(file=self.err, width=200),
        )

    def says(self, *lines: str) -> str:
        """What is said to these lines on standard error."""
        self.err.truncate(0)
        self.err.seek(0)
        stdin, sys.stdin = sys.stdin, io.StringIO("\n".join([*lines, ""]))
        try:
            self.conversation.run()
        finally:
            sys.stdin = stdin
        return self.err.getvalue()


# templates


def test_a_template_makes_the_prompt_where_there_is_one_and_nobody_minds() -> None:
    templated: Any = Templated()
    assert Question("hi").prompt(templated) == TALK
    assert Question("hi", system="be brief").prompt(templated) == [
        {"role": "system", "content": "be brief"},
        *TALK,
    ]
    assert Question("hi", is_raw=True).prompt(templated) == "hi"
    assert Question("hi").prompt(None) == "hi" and not Question("hi").is_templated(None)
    assert Question([5, 17]).prompt(templated) == [5, 17]
    for wrong in (
        lambda: Question("hi", system="x").prompt(None),
        lambda: Question("hi", system="x", is_raw=True),
        lambda: Question([5], system="x"),
    ):
        with pytest.raises(UsageError, match="--system"):
            wrong()


def test_whether_a_folder_has_a_template_is_known_without_its_tokenizer(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert not has_chat_template(tmp_path)  # there is no text to make
    (tmp_path / "tokenizer.json").write_text("not looked at")
    assert has_chat_template(tmp_path)


# the room that is left


def test_answers_shrink_to_what_the_context_has_left() -> None:
    talk = Talk(max_tokens=95)
    said = talk.says("one two three four five six seven eight")
    [(_, params)] = talk.llm.asked
    assert params.max_tokens == 92 and "dropped" not in said


def test_old_turns_are_dropped_with_a_note_and_never_the_newest() -> None:
    talk = Talk(max_tokens=80)
    said = talk.says(*["five words of a turn"] * 6)
    assert len(talk.llm.asked) == 6 and "lowtide:" not in said
    assert said.count("(the oldest turn was dropped: the context is full)") == 3
    for ids, params in talk.llm.asked:
        assert len(ids) + params.max_tokens <= 100 and params.max_tokens >= 64
    assert talk.llm.prompts[-1][-1]["content"] == "five words of a turn"


def test_a_message_that_is_too_long_by_itself_is_refused_and_forgotten() -> None:
    talk = Talk()
    said = talk.says("word " * 100, "short")
    assert "This message has 100 tokens" in said and "--context" in said
    assert len(talk.llm.asked) == 1 and len(talk.turns) == 1


def test_an_answer_that_the_context_cut_is_told() -> None:
    talk = Talk(max_tokens=20)
    assert "(cut short" in talk.says("word " * 95)
    talk = Talk(max_tokens=5)
    assert "(cut short" not in talk.says("hi")


# commands


def test_commands() -> None:
    talk = Talk()
    assert HELP in talk.says("/help") and HELP in talk.says("/?")
    assert "be brief" in talk.says("/system be brief", "hello")
    assert [m["role"] for m in talk.llm.prompts[-1]] == ["system", "user"]
    assert "hit_rate: 0.1235\npasses: 7" in talk.says("/stats")
    talk.says("/set temperature 0.5", "/set parameter stop x", "/set top-k 4", "/set steps 3", "a")
    params = talk.llm.asked[-1][1]
    assert (params.temperature, params.stop_strings) == (0.5, ("x",))
    assert params.top_k == 4 and params.diffusion.steps == 3
    shown = talk.says("/set")
    assert "temperature: 0.5" in shown and "steps: 3" in shown and "top_p" not in shown
    talk.says("/clear")
    assert not len(talk.turns) and talk.turns.system == "be brief"
    talk.says("/set system other")
    assert talk.turns.system == "other"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set num_predict 5", "called max_tokens here"),
        ("/set temprature 1", "Did you mean temperature"),
        ("/set num_ctx 4096", "context"),
        ("/set temperature hot", "/set temperature: expected a number"),
        ("/set temperature -1", "temperature must be a number"),
        ("/set top_k", "/set top_k: expected an integer"),
        ("/nothing at all", "/nothing is no command"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(line: str, said: str) -> None:
    talk = Talk()
    assert said in talk.says(line)
    assert not talk.llm.asked


def test_paths_and_lines_that_begin_with_a_space_are_no_commands() -> None:
    talk = Talk(max_tokens=10)
    lines = ["/usr/bin is a folder", "never /bye", " /bye", " /nothing at all"]
    assert "no command" not in talk.says(*lines, " ", "/quit", "never")
    assert [p[-1]["content"] for p in talk.llm.prompts] == lines


@pytest.mark.parametrize("word", LEAVING)
def test_there_are_several_words_to_leave_by(word: str) -> None:
    talk = Talk()
    talk.says("one", f"{word} ", "never")
    assert [p[-1]["content"] for p in talk.llm.prompts] == ["one"] and "/bye" in LEAVING


def test_without_a_template_the_text_goes_on() -> None:
    talk = Talk(has_template=False)
    assert "no chat template" in talk.says("a", "b", "/system x")
    assert talk.llm.prompts == ["a", "a" + "word " * 10 + "b"]


def test_every_parameter_that_chat_can_set_is_one() -> None:
    assert "n" not in SETTABLE and {"max_tokens", "threshold"} <= set(SETTABLE)


# lines


def test_messages_of_several_lines() -> None:
    talk = Talk()
    talk.says('"""one', "two", 'three"""', '"""single"""', '"""never closed')
    contents = [prompt[-1]["content"] for prompt in talk.llm.prompts]
    assert contents == ["one\ntwo\nthree", "single"]


EDITING = """
import sys
from pathlib import Path
from lowtide.cli.line_editor import LineEditor
with LineEditor(["/help", "/clear"], Path(sys.argv[1])) as editor:
    while (line := editor.read()) is not None:
        print("READ", repr(line))
"""


def typed(history: Path, keys: bytes) -> str:
    """What a program that reads lines shows somebody who types `keys` on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", EDITING, str(history)], {**os.environ})
    shown = b""
    while b"> " not in shown:
        shown += os.read(terminal, 1024)
    os.write(terminal, keys)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            shown += os.read(terminal, 1024)
        except OSError:  # the program has ended
            break
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    return shown.decode()


def test_lines_are_edited_remembered_and_completed(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    history = tmp_path / "state" / "history"
    shown = typed(history, b"hello\x01>> \r/cl\t\r\x04")
    assert "READ '>> hello'" in shown and "READ '/clear" in shown
    assert history.stat().st_mode & 0o077 == 0 and ">> hello" in history.read_text()
    assert "READ '>> hello'" in typed(history, b"\x1b[A\x1b[A\r\x04")  # from the last time


def test_without_the_library_lines_are_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.cli.line_editor.readline", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    with LineEditor(["/help"]) as editor:
        assert [editor.read(), editor.read(), editor.read()] == ["one", "two", None]
