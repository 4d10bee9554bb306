"""`lowtide chat` and chat templates on the command line, against an engine that only pretends."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowtide.answers.completion import Completion, Usage
from lowtide.cli.conversation import HELP, LEAVING, SETTABLE, ChatIO, TerminalChat, stats_text
from lowtide.cli.line_editor import LineEditor
from lowtide.cli.turns import Turns
from lowtide.config import Causal
from lowtide.config.sampling import PublishedSampling
from lowtide.decode.intake import Intake
from lowtide.decode.kinds import make_kind
from lowtide.decode.request import Committed
from lowtide.families import families, read_config
from lowtide.model_folder.model_config import has_chat_template
from lowtide.params import SamplingParams, with_published


class Words:
    """A model that has a context of 100 words and answers with ten."""

    tokenizer: Any = None
    path = Path("model")

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.prompts: list[Any] = []
        self.config: Any = Config()

    def token_ids(self, prompt: Any, **_: object) -> list[int]:
        self.prompts.append(prompt)
        text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
        return [1] * len(text.split())

    def max_new_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return 100 - num_prompt_tokens

    @property
    def answer_fields(self) -> tuple[str, ...]:
        return tuple(SETTABLE)

    def params_in_force(self, params: SamplingParams) -> SamplingParams:
        return params

    def generate(
        self,
        prompts: list[Any],
        params: SamplingParams,
        on_event: Callable[[Any], None],
        raw: bool,
    ) -> list[Completion]:
        self.asked.append((prompts[0], params))
        room = params.max_tokens or self.max_new_tokens(len(prompts[0]), params)
        num_tokens = min(10, room)
        on_event(Committed(0, (2,) * num_tokens))
        reason = "length" if num_tokens == room else "stop"
        usage = Usage(len(prompts[0]), num_tokens, 3)
        return [Completion([2] * num_tokens, "word " * num_tokens, reason, usage)]

    def stats(self) -> dict[str, float]:
        done = {"committed_tokens": 20, "forwards": 1, "generation_s": 4.0, "tokens_per_s": 5.0}
        experts = {"num_hits": 750, "num_misses": 250, "hit_rate": 0.75, "read_bytes": 1 << 30}
        return {**done, **experts}


class Config:
    decoding = Causal()
    experts = "some"


class Talk:
    """A conversation over `Words`, and what it says."""

    def __init__(self, has_template: bool = True, llm: Any = None, **params: Any) -> None:
        self.llm = llm or Words()
        self.err = io.StringIO()
        self.out = io.StringIO()
        self.turns = Turns(has_template)
        self.conversation = TerminalChat(
            self.llm,
            SamplingParams(**params),
            self.turns,
            ChatIO(Console(file=self.out, width=200), Console(file=self.err, width=200)),
            lambda answer: f"{answer.usage.completion_tokens} tokens",
        )

    def says(self, *lines: str) -> str:
        """Return the conversation's output on standard error for these lines."""
        self.err.truncate(0)
        self.err.seek(0)
        stdin, sys.stdin = sys.stdin, io.StringIO("\n".join([*lines, ""]))
        try:
            self.conversation.run()
        finally:
            sys.stdin = stdin
        return self.err.getvalue()


# templates


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


def test_a_message_that_is_too_long_by_itself_costs_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does Ctrl-C while it is found how many turns are to be dropped."""
    talk = Talk(max_tokens=10)
    talk.says("one", "two", "three")
    before = talk.turns.messages()
    said = talk.says("word " * 100)
    assert "This message has 100 tokens" in said and "dropped" not in said
    assert talk.turns.messages() == before
    calls, token_ids = itertools.count(), talk.llm.token_ids

    def interrupted(prompt: Any, **options: object) -> list[int]:
        if next(calls):
            raise KeyboardInterrupt
        return token_ids(prompt, **options)

    monkeypatch.setattr(talk.llm, "token_ids", interrupted)
    with pytest.raises(KeyboardInterrupt):
        talk.says("word " * 90)
    assert talk.turns.messages() == before


def test_an_answer_is_given_up_for_another_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any time of another answer, typed: before its first word the old one stays."""
    talk = Talk(max_tokens=10)
    talk.says("one", "two")
    before = talk.turns.messages()

    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("generate", "token_ids", "max_new_tokens"):
        talk.err.truncate(0)
        talk.err.seek(0)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", Typed("/retry\n"))
            patch.setattr(talk.llm, name, interrupted)
            talk.conversation.run()
        assert "(stopped)" in talk.err.getvalue()
        assert talk.turns.messages() == before


def test_an_answer_that_the_context_cut_is_told() -> None:
    talk = Talk(max_tokens=20)
    assert "(cut at 5 tokens: the context is full)" in talk.says("word " * 95)
    talk = Talk(max_tokens=5)
    assert "(cut at 5 tokens)" in talk.says("hi")
    assert "cut" not in Talk(max_tokens=50).says("hi")


def test_without_a_number_an_answer_may_be_as_long_as_the_context_leaves() -> None:
    talk = Talk()
    talk.says("hi there")
    [(_, params)] = talk.llm.asked
    assert params.max_tokens is None and "cut" not in talk.says("more")
    assert "(cut at 5 tokens: the context is full)" in Talk().says("word " * 95)


# commands


def test_commands() -> None:
    talk = Talk()
    assert HELP in talk.says("/help") and HELP in talk.says("/?")
    assert "be brief" in talk.says("/system be brief", "hello")
    assert [m["role"] for m in talk.llm.prompts[-1]] == ["system", "user"]
    said = talk.says("/stats")
    assert "20 tokens in 1 pass, 4.0 s: 5.0 tokens/s" in said
    assert "experts: 1,000 uses, 75.0% of them found in memory, 1.0 GiB read from disk" in said
    talk.llm.config.experts = None
    assert "experts" not in talk.says("/stats")
    ahead = {**talk.llm.stats(), "num_ahead": 1200, "num_late": 30, "num_wasted": 4}
    told = "1,204 experts read ahead: 1,200 used (30 of them late), 4 dropped"
    assert told in stats_text(ahead, False) and "ahead" not in said
    assert stats_text({"forwards": 0, "hit_rate": math.nan}, True) == "nothing yet"
    talk.says("/set temperature 0.5", "/set parameter stop x", "/set top-k 4", "/set steps 3", "a")
    params = talk.llm.asked[-1][1]
    assert (params.temperature, params.stop_strings) == (0.5, ("x",))
    assert params.top_k == 4 and params.diffusion.steps == 3
    shown = {line.split()[0]: line for line in talk.says("/set").splitlines() if line.strip()}
    assert set(SETTABLE) <= set(shown) and "Above 1: discourage" in shown["repetition_penalty"]
    assert " 0.5 " in shown["temperature"] and " 3 " in shown["steps"]
    assert "top_k: 4" in talk.says("/set top_k")
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
        (
            "/set top_k none",
            "an integer (4k is 4096), not 'none'; /set top_k default takes",
        ),
        ("/set foo 3", "stop, ignore_eos, block_length,"),
        ("/set logprobs 3", "'logprobs' is not a parameter"),
        ("/nothing at all", "Unknown command /nothing"),
        ("/retry", "no message yet"),
        ("/save", "/save needs the name of a file"),
        ("/save a\0b", "/save needs the name of a file"),
        ("/save ~no-such-user/x", "/save ~no-such-user/x: Could not determine home"),
        ("/load /no/such/file", "/no/such/file is missing"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(line: str, said: str) -> None:
    talk = Talk()
    assert said in talk.says(line)
    assert not talk.llm.asked


def test_paths_and_lines_that_begin_with_a_space_are_no_commands() -> None:
    talk = Talk(max_tokens=10)
    lines = ["/usr/bin is a folder", "never /bye", " /bye", " /nothing at all"]
    assert "Unknown command" not in talk.says(*lines, " ", "/quit", "never")
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


class OfAFamily(Words):
    """A model of a family, whose parameters are checked as the engine checks them."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.config = read_config(families()[family].sizes()["full"].config)
        self.intake = Intake(
            self.config, None, make_kind(self.config.decoding), context=4096, max_block_length=1024
        )
        self.params_in_force = self.intake.in_force

    @property
    def answer_fields(self) -> tuple[str, ...]:
        return self.intake.answer_fields()

    def generate(
        self, prompts: list[Any], params: SamplingParams, *args: Any, **named: Any
    ) -> list[Completion]:
        self.intake.requests(prompts, replace(params, stop=()))  # raises for what is refused
        return super().generate(prompts, params, *args, **named)


TRIED = {
    "temperature": "0.5",
    "top_k": "4",
    "top_p": "0.9",
    "min_p": "0.1",
    "max_tokens": "64",
    "repetition_penalty": "1.1",
    "presence_penalty": "1",
    "frequency_penalty": "1",
    "seed": "7",
    "stop": "x",
    "ignore_eos": "true",
    "block_length": "32",
    "steps": "8",
    "threshold": "0.5",
    "remasking": "entropy",
    "edit_threshold": "0.9",
    "cfg_scale": "1",
    "max_post_steps": "2",
    "eos_early_stop": "true",
    "eps": "0.01",
    "alg_temp": "0.1",
    "factor": "2",
}


@pytest.mark.parametrize("family", families())
def test_what_is_set_is_what_an_answer_may_be_asked(family: str) -> None:
    """Set every parameter of every kind, one at a time and all in a row.

    The next message is never refused, and each setting can be taken back.
    """
    assert set(TRIED) == set(SETTABLE)
    talk = Talk(llm=OfAFamily(family))

    def next_params() -> SamplingParams:
        assert "lowtide:" not in talk.says("/clear", "hello")
        params: SamplingParams = talk.llm.asked[-1][1]
        return params

    shown = {line.split()[0] for line in talk.says("/set").splitlines()[1:]}
    assert shown == set(talk.llm.answer_fields) & set(SETTABLE)
    for is_in_a_row in (False, True):
        before = next_params()
        for name, value in TRIED.items():
            said = talk.says(f"/set {name} {value}")
            after = next_params()
            if "lowtide:" in said:
                assert after == before
            else:
                assert f"{name}: {value}" in said and name in (*shown, "remasking")
            if not is_in_a_row:
                talk.says(f"/set {name} default")
                after = next_params()
                assert after == SamplingParams()
            before = after
    for name in [*TRIED, *TRIED]:  # a rule only after what belongs to it
        talk.says(f"/set {name} default")
    assert next_params() == SamplingParams()


def test_the_models_own_values_are_shown_in_force() -> None:
    published = PublishedSampling(temperature=0.6, top_p=0.95)
    talk = Talk()
    talk.llm.params_in_force = partial(with_published, published=published)
    for line, in_force in (
        ("/set", "0.6"),
        ("/set temperature 1", "1"),
        ("/set temperature default", "0.6"),
    ):
        talk.says(line)
        told = {row.split()[0]: row.split()[1:3] for row in talk.says("/set").splitlines()[1:]}
        assert told["temperature"] == [in_force, "0.6"] and told["top_p"] == ["0.95", "0.95"]


def test_a_file_of_the_user_is_not_written_over(tmp_path: Path) -> None:
    notes, saved = tmp_path / "notes.txt", tmp_path / "talk.json"
    notes.write_text("my precious notes")
    talk = Talk(max_tokens=10)
    said = talk.says("one", f"/save {notes}", f"/save {saved}", "two", f"/save {saved}")
    assert "no conversation that lowtide wrote" in said and "(saved 2 turns" in said
    assert notes.read_text() == "my precious notes"
    assert len(json.loads(saved.read_text())["messages"]) == 4


# lines


def test_messages_of_several_lines() -> None:
    talk = Talk()
    talk.says('"""one', "two", 'three"""', '"""single"""', '"""Doc.""" is one', '"""never closed')
    contents = [prompt[-1]["content"] for prompt in talk.llm.prompts]
    assert contents == ["one\ntwo\nthree", "single", '"""Doc.""" is one']


def test_a_pasted_text_that_begins_with_quotes_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a docstring, which comes as one line."""
    editor = LineEditor([], None)
    for text, said in (
        ('"""Doc."""\nimport os\n', '"""Doc."""\nimport os\n'),
        ('"""all of\nthis"""', "all of\nthis"),
        ('"""all of\nthis"""\n', "all of\nthis"),
    ):
        monkeypatch.setattr("builtins.input", lambda _, text=text: text)
        assert editor.read() == said


def test_the_last_message_is_answered_again() -> None:
    talk = Talk(max_tokens=10)
    talk.says("one", "two", "/retry")
    assert [prompt[-1]["content"] for prompt in talk.llm.prompts] == ["one", "two", "two"]
    assert len(talk.turns) == 2 and len(talk.llm.prompts[1]) == len(talk.llm.prompts[2])


def test_a_conversation_is_saved_and_gone_on_with(tmp_path: Path) -> None:
    talk, file = Talk(max_tokens=10), tmp_path / "talk.json"
    assert "(saved 2 turns to " in talk.says("/system be brief", "one", "two", f"/save {file}")
    other = Talk(max_tokens=10)
    assert "(2 turns of " in other.says("zero", f"/load {file}", "three")
    assert other.turns.messages()[:5] == talk.turns.messages()
    words = "word " * 10
    said = [message["content"] for message in other.llm.prompts[-1]]
    assert said == ["be brief", "one", words, "two", words, "three"]


def test_half_a_character_of_a_file_is_saved_as_it_was(tmp_path: Path) -> None:
    given, saved = tmp_path / "given.json", tmp_path / "saved.json"
    turns = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}]
    given.write_text(json.dumps({"messages": turns}))
    assert "(saved 1 turn to " in Talk().says(f"/load {given}", f"/save {saved}")
    assert json.loads(saved.read_text()) == {"messages": turns}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# a page", "is not a saved conversation"),
        ("[1]", "is not a saved conversation"),
        ("{}", "is not a saved conversation"),
        ('{"messages": [{"role": "user"}]}', "is not a saved conversation"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "an answer to it is missing"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "take turns"),
    ],
)
def test_a_file_that_holds_no_conversation(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    talk = Talk(max_tokens=10)
    assert said in talk.says("one", f"/load {file}") and len(talk.turns) == 1


EDITING = """
import resource, select, sys
from pathlib import Path
from lowtide.cli.line_editor import LineEditor, without_echo
editor = LineEditor(["/help", "/clear"], Path(sys.argv[1]) if sys.argv[1] else None)
if sys.argv[2]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as on a full disk
while (line := editor.read()) is not None:
    print("READ", repr(line))
    if line == "wait":
        with without_echo():
            print("ANSWER BEGINS", flush=True)
            select.select([sys.stdin], [], [])  # until something is typed
            print("ANSWER ENDS", flush=True)
"""


def typed(
    history: Path | str, keys: bytes, *later: tuple[bytes, bytes], is_full: bool = False
) -> str:
    """Return the terminal's output of a program that reads lines, for a user who types `keys`.

    later: further keys, each after what has to be shown before them. is_full: its disk.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm"}
        command = [sys.executable, "-c", EDITING, str(history), "full" * is_full]
        os.execve(sys.executable, command, environment)
    shown, parts = b"", [(b">", keys), *later]
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        if parts and parts[0][0] in shown:
            os.write(terminal, parts.pop(0)[1])
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 1024)
            except OSError:  # the program has ended
                break
    os.close(terminal)
    os.kill(pid, signal.SIGKILL) if time.monotonic() >= end_s else None
    assert os.waitpid(pid, 0)[1] == 0, shown
    return shown.decode()


def test_lines_are_edited_remembered_and_completed(tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    shown = typed(history, b"hello\x01>> \r/cl\t", (b"ear", b"\r\x04"))
    assert "READ '>> hello'" in shown and "READ '/clear" in shown
    assert history.stat().st_mode & 0o077 == 0 and ">> hello" in history.read_text()
    assert "READ '>> hello'" in typed(history, b"\x1b[A\x1b[A\r\x04")  # from the last time
    assert "READ 'forgotten'" in typed("", b"forgotten\r\x04")


def test_what_a_full_disk_does_not_keep_is_answered_all_the_same(tmp_path: Path) -> None:
    shown = typed(tmp_path / "history", b"one\rtwo\r\x04", is_full=True)
    assert "READ 'one'" in shown and "READ 'two'" in shown
    assert not (tmp_path / "history").stat().st_size


def test_a_pasted_text_is_one_message(tmp_path: Path) -> None:
    pasted = b"\x1b[200~def f():\r    return 1\r\rexplain\x1b[201~\r\x04"
    assert "READ 'def f():\\n    return 1\\n\\nexplain'" in typed("", pasted)


def test_what_is_typed_ahead_is_drawn_once_and_read_next() -> None:
    shown = typed("", b"wait\r", (b"ANSWER BEGINS", b"and then\r\x04"))
    answer = shown.partition("ANSWER BEGINS")[2].partition("ANSWER ENDS")
    assert "and then" not in answer[0] and "READ 'and then'" in answer[2]


def test_without_a_terminal_lines_are_read_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    editor = LineEditor(["/help"], None)
    assert [editor.read(), editor.read(), editor.read()] == ["one", "two", None]
