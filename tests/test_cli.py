"""The command line, against an engine that only pretends."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from programs import python
from rich.console import Console
from typer.testing import CliRunner

import lowtide.lab.profiles
from lowtide.cli import chat, command, screen
from lowtide.cli.answer import Answer, ask_showing, make_view
from lowtide.cli.app import app
from lowtide.cli.command import errors_reported
from lowtide.cli.conversation import ChatIO, TerminalChat
from lowtide.cli.live import MASK, LiveView
from lowtide.cli.plan import format_object
from lowtide.cli.prompt import parse_ids, read_prompt
from lowtide.cli.report import answer_object, json_line, plan_object, speed_line
from lowtide.cli.screen import FILE_WIDTH, ProgressBars, printable, stderr_console, stdout_console
from lowtide.cli.text import TextWriter
from lowtide.cli.turns import Turns
from lowtide.config import Canvas, Causal
from lowtide.config.sampling import PublishedSampling
from lowtide.core import Step, StepKind
from lowtide.decode.request import TokenLogprobs
from lowtide.errors import ConfigError, PlanError, StorageError, UsageError
from lowtide.lab.verbs.simulate import check_same_shape
from lowtide.model_folder.tokenizer import TextStream
from lowtide.params import AUTOREGRESSIVE_ONLY, SamplingParams
from lowtide.parsing.answer_pieces import AnswerPieces, PlainText
from lowtide.parsing.pieces import Text, joined
from lowtide.plan import FormatPlan, MemoryPlan, SpeedRange, TierPlan, WeightFormats
from lowtide.policies.receipt import Receipt
from lowtide.replay.trace import Pass, Trace, TraceShape

MODEL = str(Path(__file__).parent / "goldens" / "llada2-a")
MIB = 1 << 20

PLAN = MemoryPlan(
    host=TierPlan(8 * MIB, 2 * MIB, MIB, MIB, MIB, 4096, 96),
    context=256,
    max_rows=512,
    minimum_bytes=5 * MIB,
    full_bytes=20 * MIB,
    overhead_bytes=300 * MIB,
    num_experts=160,
    residents_per_layer=(19, 19),
    policy="tide",
    reason="8 MiB holds 38 of 160 experts, so tide chooses which.",
)
BY_FORMAT = (
    FormatPlan("own", 8 * MIB, 0.25, SpeedRange(2.0, 3.0, 4.0)),
    FormatPlan("q4", 2 * MIB, 1.0, SpeedRange(8.0, 9.0, 10.0)),
)


@dataclasses.dataclass(frozen=True)
class Draft:
    request: int
    block_start: int
    tokens: Sequence[int]
    is_masked: Sequence[bool]
    num_forwards: int
    num_shown: int


@dataclasses.dataclass(frozen=True)
class Committed:
    request: int
    tokens: Sequence[int]
    text: str = ""
    reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    forwards: int
    kv_cache: str = "exact"
    formats: WeightFormats = dataclasses.field(default_factory=WeightFormats)
    receipt: Receipt | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    text: str
    finish_reason: str
    usage: Usage
    logprobs: list[Any] | None = None
    reasoning: str = ""


class Letters:
    """A tokenizer whose ids are code points."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(m["content"] for m in messages))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def piece(self, token_id: int) -> str:
        return chr(token_id)

    def token_id(self, text: str) -> None:
        """None of the tokens that mark thoughts."""

    def stream(self) -> TextStream:
        return TextStream(self)  # type: ignore[arg-type]


LETTERS: Any = Letters()


class PretendLLM:
    """Answers every prompt with `answer`, in blocks of four, and records how it was asked."""

    answer = "one\ntwo\x1b[2J"
    fault: BaseException | None = None
    plan = PLAN
    kernels = "compiled, AVX2"
    path = Path("model")
    config = types.SimpleNamespace(
        decoding=Canvas(),
        max_positions=4096,
        sampling=PublishedSampling(),
    )
    current_pass = None
    latest: PretendLLM

    def __init__(self, model: str, **options: object) -> None:
        self.model, self.options = model, options
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.is_closed = False
        self.tokenizer: Letters | None = Letters()
        PretendLLM.latest = self
        progress = options["progress"]
        if callable(progress):
            progress("loading", 1, 1)

    def planned_passes(self, num_tokens: int, params: SamplingParams) -> list[Any]:
        return []

    def __enter__(self) -> PretendLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def generate(
        self,
        prompts: Sequence[object],
        params: SamplingParams,
        on_event: Callable[[object], None] | None = None,
        raw: bool = False,
    ) -> list[Completion]:
        print("a library that chatters")
        [prompt] = prompts
        self.asked.append((prompt, params))
        ids = [ord(c) for c in self.answer]
        pieces = AnswerPieces(PlainText(LETTERS), params.stop_strings)
        for start in range(0, len(ids), 4):
            block = ids[start : start + 4]
            if on_event is not None:
                is_masked, num_tokens = [i % 2 == 1 for i in range(len(block))], len(block)
                on_event(Draft(0, 100 + start, block, is_masked, 1, num_tokens))
                on_event(Draft(0, 100 + start, block, [False] * num_tokens, 2, num_tokens))
                on_event(Committed(0, block, joined(pieces.push(block), Text)))
            if self.fault is not None:
                raise self.fault
        return [Completion(ids, self.answer, "stop", Usage(3, len(ids), 6))]

    def token_ids(self, prompt: Any, **_: object) -> Any:
        return prompt

    def max_new_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return 1000

    def params_in_force(self, params: SamplingParams) -> SamplingParams:
        return params

    def stats(self) -> dict[str, object]:
        return {
            "hit_rate": np.float64(0.75),
            "tokens_per_s": 2.5,
            "bytes_read": np.int64(5),
            "odd": float("nan"),
        }


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PretendLLM]]:
    llm = types.ModuleType("lowtide.llm")
    llm.LLM = PretendLLM  # type: ignore[attr-defined]
    llm.plan_model = lambda model, **options: PLAN  # type: ignore[attr-defined]
    in_full = types.SimpleNamespace(memory=PLAN, passes=None, by_format=BY_FORMAT)
    llm.plan_in_full = lambda model, **options: in_full  # type: ignore[attr-defined]
    llm.check_request = lambda *_, **options: None  # type: ignore[attr-defined]
    decode = types.ModuleType("lowtide.decode.request")
    decode.Draft, decode.Committed = Draft, Committed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lowtide.llm", llm)
    monkeypatch.setitem(sys.modules, "lowtide.decode.request", decode)
    monkeypatch.setattr(PretendLLM, "fault", None)
    yield PretendLLM


def run(*arguments: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def refused(*arguments: str, code: int = 2, stdin: str | bytes | None = None) -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return str(result.stderr)


# generate


def test_json_is_one_object_and_nothing_else() -> None:
    result = run("generate", MODEL, "-p", "hi", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert list(answer) == [
        *("token_ids", "text", "finish_reason", "usage", "stats", "plan", "kernels"),
        "chat_template",
    ]
    assert answer["text"] == PretendLLM.answer
    assert answer["kernels"] == PretendLLM.kernels
    counts = {"prompt_tokens": 3, "completion_tokens": 11, "forwards": 6}
    own = dict.fromkeys(("experts", "dense", "head", "activations"), "own")
    own |= {"is_calibrated": False}
    assert answer["usage"] == {**counts, "kv_cache": "exact", "formats": own, "receipt": None}
    assert answer["plan"]["formats"] == own
    assert answer["stats"]["hit_rate"] == 0.75 and answer["stats"]["odd"] is None
    assert answer["stats"]["tokens_per_s"] == 2.5
    assert answer["plan"]["minimum_bytes"] == 5 * MIB
    assert "chatters" in result.stderr
    assert PretendLLM.latest.is_closed


def test_plain_output_is_the_text_with_a_line_on_stderr_before_and_after_it() -> None:
    result = run("generate", MODEL, "-p", "hi")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(PretendLLM.answer + "\n")
    for said in ("38 of 160 experts", "tide", "11 tokens · ", "tokens/s"):
        assert said in result.stderr
        assert said not in result.stdout
    more = ("6 passes in", "1.8 tokens each", "hit rate 75%")
    assert not any(said in result.stderr for said in more)
    assert "memory plan" not in result.stderr
    result = run("generate", MODEL, "-p", "hi", "-v")
    assert all(said in result.stderr for said in more)


def test_raw_and_system_make_the_prompt() -> None:
    user = {"role": "user", "content": "hi"}
    for flags, prompt in (
        ([], [user]),
        (["--system", "be brief"], [{"role": "system", "content": "be brief"}, user]),
        (["--raw"], "hi"),
    ):
        assert run("generate", MODEL, "hi", *flags).exit_code == 0
        assert PretendLLM.latest.asked[0][0] == prompt
        assert run("chat", MODEL, *flags, stdin="hi\n").exit_code == 0
        assert PretendLLM.latest.asked[0][0] == prompt
        told = json.loads(run("generate", MODEL, "hi", "--json", *flags).stdout)
        assert told["chat_template"] is (flags != ["--raw"])
    assert "--raw leaves out" in refused("generate", MODEL, "hi", "--raw", "--system", "x")
    assert "which is left out" in refused("generate", MODEL, "hi", "--raw", "--think")
    assert "no enable_thinking" in refused("chat", MODEL, "--raw", "--think")


def test_more_or_less_is_said_of_the_plan_when_asked() -> None:
    loud = run("generate", MODEL, "-p", "hi", "-v")
    assert f"kernels: {PretendLLM.kernels}" in loud.stderr
    for said in ("memory plan", "expert slots", "tokens/s"):
        assert said in loud.stderr
    quiet = run("generate", MODEL, "-p", "hi", "--quiet")
    assert quiet.stdout == loud.stdout and not quiet.stderr


def test_every_parameter_reaches_the_engine() -> None:
    flags = "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 3"
    flags += " --stop a --stop b --ignore-eos --block-length 8 --steps 4 --threshold 0.8"
    flags += " --remasking low_confidence"
    flags += " --edit-threshold 0.7 --max-post-steps 2 --cfg-scale 1 --eos-early-stop"
    flags += " --eps 0.01 --alg-temp 0.2 --factor 1.5"
    flags += " --policy lru --policy-option tau=2 --context 64 --host-memory 8MiB --kv-cache false"
    result = run("generate", MODEL, "--prompt-ids", "5 17 3", *flags.split())
    assert result.exit_code == 0, result.output
    [(prompt, params)] = PretendLLM.latest.asked
    assert prompt == [5, 17, 3]
    unset = [f.name for p in (params, params.diffusion) for f in dataclasses.fields(p)]
    given = [getattr(p, f.name) for p in (params, params.diffusion) for f in dataclasses.fields(p)]
    missing = {name for name, value in zip(unset, given, strict=True) if value is None}
    assert missing == set(AUTOREGRESSIVE_ONLY)
    assert params.stop == ["a", "b"] and params.diffusion.eos_early_stop is True
    options = PretendLLM.latest.options
    assert options["policy_options"] == {"tau": "2"} and options["kv_cache"] is False
    assert options["host_memory"] == "8MiB" and options["seed"] == 3


def test_autoregressive_models_have_parameters_of_their_own() -> None:
    flags = "--repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5 --logprobs 2"
    assert run("generate", "demo:chat", "-p", "hi", *flags.split()).exit_code == 0
    [(_, params)] = PretendLLM.latest.asked
    assert None not in [getattr(params, name) for name in AUTOREGRESSIVE_ONLY]
    assert "logprobs is for autoregressive models; LLaDA2" in refused(
        "generate", MODEL, "-p", "hi", "--logprobs", "0"
    )
    assert "steps is for diffusion models; Bailing" in refused(
        "generate", "demo:chat", "-p", "hi", "--steps", "3"
    )


def test_a_file_on_standard_input_follows_the_text(tmp_path: Path) -> None:
    for text in (["-p", "explain"], ["explain"]):
        assert run("generate", MODEL, *text, stdin="two\nlines\n").exit_code == 0
        [message] = PretendLLM.latest.asked[0][0]
        assert message["content"] == "explain\n\ntwo\nlines"
    assert run("generate", MODEL, "explain", stdin="").exit_code == 0
    assert PretendLLM.latest.asked[0][0][0]["content"] == "explain"
    (tmp_path / "code").write_text("x = 1\n")
    script = "from lowtide.cli.prompt import read_prompt; print(read_prompt('explain', None))"
    for shell in ('"$0" -c "$1" < code', 'cat code | "$0" -c "$1"', '"$0" -c "$1" < /dev/null'):
        command = ["sh", "-c", shell, sys.executable, script]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        expected = "explain\n" if "null" in shell else "explain\n\nx = 1\n"
        assert done.stdout == expected, done


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_input_that_cannot_be_read_is_told() -> None:
    with open("/proc/self/mem", "rb") as unreadable:
        result = subprocess.run(
            [sys.executable, "-m", "lowtide", "generate", MODEL],
            stdin=unreadable,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 2
    assert result.stderr == "lowtide: standard input cannot be read: Input/output error.\n"


def test_prompt_from_stdin_loses_one_newline() -> None:
    for arguments in (("-p", "-"), ()):
        assert run("generate", MODEL, *arguments, stdin="two\nlines\n\n").exit_code == 0
        assert PretendLLM.latest.asked[0][0] == [{"role": "user", "content": "two\nlines\n"}]


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["-p", ""], None, "empty"),
        (["--prompt-ids", " "], None, "empty"),
        ([], "", "empty"),
        (["-p", "-"], b"\xff\xfe", "not UTF-8"),
        (["-p", "x\udcff"], None, "not valid UTF-8"),
        (["-p", "x\ud800"], None, "not valid UTF-8"),
        (["--prompt-ids", "5 x"], None, "'x'"),
        (["--prompt-ids", "-5"], None, "'-5'"),
        (["--prompt-ids", "99999999999"], None, "not a token id"),
        (["-p", "a", "--prompt-ids", "5"], None, "not both"),
        (["--prompt-ids", "5", "--system", "x"], None, "--system"),
        (["-p", "a", "--max-tokens", str(10**12)], None, "--max-tokens must be"),
        (["-p", "a", "--max-tokens", "9" * 9999], None, "--max-tokens"),
        (["-p", "a", "--temperature", "nan"], None, "temperature"),
        (["-p", "a", "--host-memory", "much"], None, "--host-memory"),
        (["-p", "a", "--device-option", "link_GBps=2"], None, "emulated"),
        (["-p", "a", "--config", "absent.toml"], None, "absent.toml"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], stdin: str | bytes | None, said: str) -> None:
    assert said in refused("generate", MODEL, *arguments, stdin=stdin)


def test_errors_choose_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault, code in (
        (UsageError("u"), 2),
        (ConfigError("c"), 2),
        (PlanError("needs 5 bytes"), 1),
        (StorageError("s"), 1),
        (KeyboardInterrupt(), 130),
    ):
        monkeypatch.setattr(PretendLLM, "fault", fault)
        assert str(fault) in refused("generate", MODEL, "-p", "a", code=code)
        assert PretendLLM.latest.is_closed


def test_with_json_an_error_is_the_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendLLM, "fault", PlanError("needs 5 bytes"))
    result = run("generate", MODEL, "-p", "a", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": {"type": "PlanError", "message": "needs 5 bytes"}}
    assert "needs 5 bytes" in result.stderr


# plan, chat, models


def test_plan_prints_the_table_and_the_reason() -> None:
    result = run("plan", MODEL)
    assert result.exit_code == 0, result.output
    for said in ("dense", "kv cache", "workspace", "ring", "expert slots", "budget", PLAN.reason):
        assert said in result.stdout


def test_plan_json_has_the_promised_names() -> None:
    plan = json.loads(run("plan", MODEL, "--json").stdout)
    has_template = plan.pop("chat_template")
    assert plan.pop("by_format") == [format_object(row) for row in BY_FORMAT]
    assert plan.pop("faster_format") == "q4" and plan.pop("max_positions") == 1024
    assert plan == json.loads(json.dumps(plan_object(PLAN))) and has_template is False
    assert plan["minimum_bytes"] < plan["budget_bytes"] < plan["full_bytes"]
    assert plan["overhead_bytes"] == 300 * MIB
    host = plan["tiers"]["host"]
    assert host["used_bytes"] == 5 * MIB + 96 * 4096 <= host["budget_bytes"]


def test_chat_keeps_the_conversation() -> None:
    result = run("chat", MODEL, stdin="hello\n\n/clear\nagain\nmore\n/exit\nnever\n")
    assert result.exit_code == 0, result.output
    prompts = [prompt for prompt, _ in PretendLLM.latest.asked]
    assert [len(prompt) for prompt in prompts] == [1, 1, 3]
    assert [m["role"] for m in prompts[2]] == ["user", "assistant", "user"]
    assert "38 of 160 experts in memory (tide)" in result.stderr


def test_chat_outlives_a_refused_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendLLM, "fault", PlanError("too long"))
    result = run("chat", MODEL, stdin="a\nb\n")
    assert result.exit_code == 0
    assert result.stderr.count("lowtide: too long") == 2


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm: Any = PretendLLM(MODEL, progress=None)
    places = ChatIO(terminal(), Console(file=io.StringIO()))
    conversation = TerminalChat(llm, SamplingParams(), Turns(True), places, str)
    for said, fault in (("hello", KeyboardInterrupt()), ("go on", None)):
        monkeypatch.setattr(sys, "stdin", Screen(f"{said}\n"))
        llm.fault = fault
        conversation.run()
    assert [m["content"] for m in llm.asked[1][0]] == ["hello", "one\n", "go on"]


def test_ctrl_c_ends_a_conversation_that_is_not_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendLLM, "fault", KeyboardInterrupt())
    refused("chat", MODEL, stdin="hello\ngo on\n", code=130)
    assert len(PretendLLM.latest.asked) == 1


def test_an_argument_in_an_encoding_that_the_system_does_not_know() -> None:
    """It arrives as bytes: those of UTF-8 are read as such."""
    assert read_prompt("caf\udcc3\udca9", None) == "café"


def test_words_need_no_quotes_and_chat_has_none() -> None:
    assert run("generate", MODEL, "why", "is", "it", "--max-tokens", "3").exit_code == 0
    assert PretendLLM.latest.asked[0][0][-1]["content"] == "why is it"
    assert "lowtide generate 'my model' 'why not'" in refused("chat", "my model", "why", "not")


def test_synth_writes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def synth(family: str, size: str, out: Path, **options: Any) -> Path:
        asked.update(family=family, size=size, seed=options["seed"])
        out.mkdir()
        (out / "config.json").write_text("{}")
        options["progress"]("writing", 1, 2)
        return out

    module = types.ModuleType("lowtide.model_writing.synth")
    module.synth = synth  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lowtide.model_writing.synth", module)
    monkeypatch.setattr("lowtide.model_writing.synth", module, raising=False)
    out = str(tmp_path / "m")
    result = run("synth", "llada2", "--size", "small", "--out", out, "--seed", "4", "--json")
    assert json.loads(result.stdout) == {"path": out, "bytes": 2}, result.output
    assert asked == {"family": "llada2", "size": "small", "seed": 4}
    assert "--out" in refused("synth", "llada2")


def test_ls_lists_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.model_folder import hub

    model = hub.LocalModel("org/name", "0123456789abcdef", 3 * MIB, tmp_path, False)
    monkeypatch.setattr(hub, "list_models", lambda: [model])
    assert "(incomplete)" in run("ls").stdout
    assert str(tmp_path) in run("ls").stdout  # however long: nothing is cut on a pipe
    assert "Looked in " in run("ls").stderr and "give its path" in run("ls").stderr
    [row] = json.loads(run("ls", "--json").stdout)["models"]
    assert row["name"] == "org/name" and row["num_bytes"] == 3 * MIB


def test_pull_and_offline_exclude_each_other() -> None:
    assert "--offline" in refused("pull", "org/name", "--offline")


def test_lines_break_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 40
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "33")
    for is_terminal in (False, True):
        monkeypatch.setattr(sys, "stderr", Screen() if is_terminal else io.StringIO())
        monkeypatch.setenv("NO_COLOR" if is_terminal else "FORCE_COLOR", "1")
        stderr_console().print(text.strip())
        lines = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
        assert len(lines) == (7 if is_terminal else 1)
        assert all(line.strip().endswith("word") for line in lines)


def test_a_view_is_drawn_where_it_can_be_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not into a file, whatever colours are asked for, nor on a terminal that only adds lines."""
    llm: Any = PretendLLM(MODEL, progress=None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for file, kind, is_drawn in (
        (io.StringIO(), "xterm", False),
        (Screen(), "dumb", False),
        (Screen(), "xterm", True),
    ):
        monkeypatch.setenv("TERM", kind)
        monkeypatch.setattr(sys, "stdout", file)
        assert isinstance(make_view(llm, [], stdout_console()), LiveView) == is_drawn


class Screen(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


# the live view


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=60, height=10)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_the_block_being_filled() -> None:
    console = terminal()
    llm: Any = PretendLLM(MODEL, progress=None)
    view = LiveView(console, Letters(), 3, clock=iter(range(100)).__next__)
    answer = ask_showing(llm, "hi", SamplingParams(), False, view)
    drawn = shown(console)
    assert MASK in drawn
    assert answer.completion.text == PretendLLM.answer
    assert "\x1b[2J" not in drawn  # a model's text does not reach the terminal as a command


def test_drawing_is_throttled() -> None:
    now_s = 0.0
    view = LiveView(terminal(), Letters(), 0, clock=lambda: now_s)
    with view:
        for step in range(1000):
            now_s = step / 1000
            view.draft(0, [65, 66], [True, False])
    assert view.num_frames <= 21


def test_the_view_prints_the_answer_once_and_skips_the_prompt() -> None:
    console = Console(file=io.StringIO(), width=60)  # no terminal: no frames, only what stays
    view = LiveView(console, Letters(), 2)
    with view:
        view.draft(0, [80, 81, 65, 66], [False, False, False, True])
        view.commit([65, 10, 66], "A\nB")
        view.commit([67, 88], "CX")
        view.finish("A\nBC")
    assert shown(console).split() == ["A", "BC"]


def test_without_a_tokenizer_the_view_shows_ids() -> None:
    console = terminal()
    with LiveView(console, None, 0) as view:
        view.draft(0, [5, 17], [False, True])
        view.commit([5, 17], "")
    assert view.text == "5 17"


@pytest.mark.parametrize(
    "opened", [ProgressBars, lambda: LiveView(screen.stderr_console(), None, 0)]
)
def test_a_ctrl_c_before_the_first_frame_leaves_the_cursor_shown(
    opened: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = terminal()
    monkeypatch.setattr(screen, "stderr_console", lambda: console)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(console, "push_render_hook", interrupted)  # the cursor is hidden by then
        opened().__enter__()
    assert shown(console).rfind("\x1b[?25h") > shown(console).rfind("\x1b[?25l") >= 0


# plain text as it comes


def commit(shown: TextWriter | LiveView, pieces: AnswerPieces, piece: str) -> None:
    """As an event of a model's answer would."""
    ids = [ord(c) for c in piece]
    shown.commit(ids, joined(pieces.push(ids), Text))


def test_text_is_written_as_it_comes_and_held_where_a_stop_may_begin() -> None:
    out = io.StringIO()
    writer = TextWriter(out, True, is_terminal=False)
    pieces = AnswerPieces(PlainText(LETTERS), ["<end>", "\n\n"])
    parts = [("hello", "hello"), (" <en", "hello "), ("vy>\n", "hello <envy>")]
    for piece, shown_so_far in parts:
        commit(writer, pieces, piece)
        assert out.getvalue() == writer.text == shown_so_far
    commit(writer, pieces, "!<end>more")
    assert out.getvalue() == "hello <envy>\n!"
    commit(writer, pieces, "and more")
    assert out.getvalue() == writer.text == "hello <envy>\n!"
    writer.finish("hello <envy>\n!")
    assert out.getvalue() == "hello <envy>\n!\n"


def test_the_view_shows_what_a_stop_string_leaves() -> None:
    console = Console(file=io.StringIO(), width=60)
    view, pieces = LiveView(console, LETTERS, 0), AnswerPieces(PlainText(LETTERS), ["<end>"])
    with view:
        for piece, shown_so_far in [("A\nB<en", "A\nB"), ("d>C", "A\nB"), ("D", "A\nB")]:
            commit(view, pieces, piece)
            assert view.text == shown_so_far
        view.finish("A\nB")
    assert shown(console).split() == ["A", "B"]


def test_without_a_tokenizer_ids_are_written() -> None:
    out = io.StringIO()
    writer = TextWriter(out, False, is_terminal=False)
    writer.commit([5], "")
    writer.commit([17], "")
    writer.finish("")
    assert out.getvalue() == "5 17 \n"


def test_an_autoregressive_answer_is_written_on_a_terminal_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = types.SimpleNamespace(decoding=Causal(), max_positions=4096)
    monkeypatch.setattr(PretendLLM, "config", config)
    llm: Any = PretendLLM(MODEL, progress=None)
    out, turns = terminal(), Turns(True)
    places = ChatIO(out, Console(file=io.StringIO()))
    conversation = TerminalChat(llm, SamplingParams(), turns, places, str)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    conversation.run()
    assert shown(out) == "one\ntwo\ufffd[2J\n"
    monkeypatch.setattr(sys, "stdin", Screen("again\n"))
    llm.fault = KeyboardInterrupt()
    conversation.run()
    assert llm.asked[1][0][1]["content"] == PretendLLM.answer
    assert turns.last_answer == "one\n"


def test_logprobs_are_part_of_the_object_when_asked_for() -> None:
    of_token = TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.5)))
    completion: Any = Completion([5], "a", "stop", Usage(1, 1, 1), [of_token])
    answer = json.loads(json_line(answer_object([completion], {}, PLAN)))
    top = [[5, -0.5], [6, -1.5]]
    assert answer["logprobs"] == [{"token_id": 5, "logprob": -0.5, "top": top}]


# small pieces


def test_ids_come_with_spaces_or_commas() -> None:
    assert parse_ids(" 5 17,3\n") == [5, 17, 3]


def test_control_characters_are_shown_not_obeyed() -> None:
    assert printable("a\tb\r\nc\x1b]0;x\x07\x9b") == "a\tb\nc\ufffd]0;x\ufffd\ufffd"


def test_json_is_strict() -> None:
    value = {"a": np.int64(1), "b": [float("inf"), (True, None)], "c": np.arange(2)}
    assert json.loads(json_line(value)) == {"a": 1, "b": [None, [True, None]], "c": [0, 1]}


def told_of(usage: Usage, generation_s: float = 1.0, first_s: float = 1.0) -> Answer:
    completion: Any = Completion([0] * usage.completion_tokens, "", "stop", usage)
    return Answer([completion], generation_s, first_s, min(1, usage.completion_tokens))


def test_speed_line_survives_an_empty_answer() -> None:
    empty = told_of(Usage(1, 0, 0), 0.0, 0.0)
    assert speed_line(empty) == "0 tokens · 0.0 tokens/s"
    assert speed_line(empty, {}) == "0 tokens · 0.0 tokens/s · 0 passes in 0.0 s"


def test_a_speed_is_that_of_the_tokens_behind_the_first() -> None:
    """A plan predicts how fast tokens follow each other; the prompt has a time of its own."""
    long_prompt = told_of(Usage(900, 11, 11), 9.0, first_s=8.0)
    assert speed_line(long_prompt) == "11 tokens · 10.0 tokens/s"
    assert "first after 8.0 s" in speed_line(long_prompt, {})
    assert speed_line(told_of(Usage(900, 1, 1), 4.0, first_s=4.0)) == "1 token · 0.2 tokens/s"
    at_once = Answer(told_of(Usage(9, 32, 4)).completions, 4.0, first_s=4.0, num_first=32)
    assert speed_line(at_once) == "32 tokens · 8.0 tokens/s"  # a block of a diffusion model


def test_an_approximation_is_named_where_the_speed_is() -> None:
    usage = Usage(1, 2, 2, "dual")
    assert speed_line(told_of(usage)).endswith("approximate: dual cache")
    receipt = Receipt(9, 2, (1, 2), 8.0, 1.0, 30, 1)
    lossy = told_of(dataclasses.replace(usage, receipt=receipt))
    assert speed_line(lossy).endswith("3 experts replaced, 12.5% of the router's weight")
    exact = told_of(dataclasses.replace(usage, kv_cache="exact"))
    assert "approximate" not in speed_line(exact)
    assert "true, false, prefix or dual" in refused("plan", MODEL, "--kv-cache", "all")


def test_a_terminal_without_a_prompt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Screen())
    with pytest.raises(UsageError, match="no prompt"):
        read_prompt(None, None)


def test_run_without_a_text_chats_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    talked: list[str] = []
    monkeypatch.setattr(chat, "talk", lambda model, *_, **__: talked.append(model))
    monkeypatch.setattr(chat, "sys", types.SimpleNamespace(stdin=Screen()))
    assert run("run", MODEL).exit_code == 0 and talked == [MODEL]
    assert run("run", MODEL, "hi").exit_code == 0 and talked == [MODEL]


# as a program of its own


def test_the_program_says_its_version() -> None:
    assert python("-m", "lowtide", "--version").stdout == "lowtide 0.1.0\n"


def test_tables_have_room_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert stdout_console().width >= FILE_WIDTH


def test_messages_are_shown_where_a_terminal_says_it_has_no_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    stderr_console().print("It is said.")
    assert capsys.readouterr().err == "It is said.\n"


def test_a_folder_that_was_removed_is_told_in_one_line(tmp_path: Path) -> None:
    command = f'cd {tmp_path} && rmdir {tmp_path} && {sys.executable} -m lowtide plan "a model"'
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "The current folder cannot be used: No such file or directory" in result.stderr


@pytest.mark.parametrize(
    ("closed", "said"),
    [("<&-", "the prompt is empty"), (">&-", "empty"), ("2>&-", ""), ("<&- >&- 2>&-", "")],
)
def test_streams_may_be_closed(closed: str, said: str, tmp_path: Path) -> None:
    """Output for a closed stream is dropped, and never reaches a file that is opened later."""
    command = f"{sys.executable} -m lowtide generate {MODEL} {closed}"
    result = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        timeout=120,
    )
    assert result.returncode == 2 and not result.stdout
    assert said in result.stderr and "Traceback" not in result.stderr
    assert not [*tmp_path.iterdir()]


def test_closed_streams_are_opened_by_their_own_numbers() -> None:
    code = (
        "import os, sys\n"
        "from lowtide.cli.main import main\n"
        "sys.argv = ['lowtide', 'no-such-verb']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "found = [os.fstat(n).st_rdev == os.stat(os.devnull).st_rdev for n in range(3)]\n"
        "read = sys.stdin.read()\n"
        "print('lost'); print('lost', file=sys.stderr)\n"
        "os.write(9, repr((found, read)).encode())"
    )
    result = subprocess.run(
        ["sh", "-c", f'exec 9>&1 <&- >&- 2>&-; {sys.executable} -c "$0"', code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.stdout, result.stderr) == ("([True, True, True], '')", "")


def test_a_line_that_is_not_utf_8_is_refused_and_the_next_is_answered() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "lowtide", "chat", "demo:autoregressive", "--max-tokens", "2"],
        input=b"caf\xe9\n2 + 2\n",
        capture_output=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    place = len("<|user|>") + 3  # in what the chat template makes of it
    assert result.stderr.count(b"not valid Unicode at character %d" % place) == 1
    assert len(result.stdout.decode().strip()) > 0


@pytest.mark.parametrize("name", ["ImportError", "MemoryError", "SystemError", "OSError"])
def test_a_verb_that_cannot_be_imported_ends_in_one_line(name: str) -> None:
    code = (
        "import importlib, sys\n"
        "class Finder:\n"
        "    def find_spec(self, module, *_):\n"
        f"        if module == 'lowtide.cli.models': raise {name}('no room')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['lowtide', 'ls']\n"
        "from lowtide.cli.main import main\n"
        "main()"
    )
    result = python("-c", code)
    [line] = result.stderr.splitlines()
    subject = "A library cannot be loaded" if name == "ImportError" else "It cannot be started"
    assert result.returncode == 1 and line.startswith(f"lowtide: {subject}: no room. ")


def test_a_part_that_lowtide_lacks_is_a_fault_of_ours() -> None:
    code = (
        "import sys\n"
        "sys.modules['lowtide.cli.models'] = None\n"
        "sys.argv = ['lowtide', 'ls']\n"
        "from lowtide.cli.main import main\n"
        "main()"
    )
    result = python("-c", code)
    assert result.returncode == 1 and result.stderr.startswith("Traceback")
    assert "ModuleNotFoundError: import of lowtide.cli.models halted" in result.stderr


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("import nowhere", "No module named 'nowhere'"),
        ("from lowtide.extend import Gone", "cannot import name 'Gone'"),
    ],
)
def test_an_extension_s_verb_that_lacks_a_module_is_named(
    text: str, lacks: str, tmp_path: Path
) -> None:
    (tmp_path / "own_verbs.py").write_text(text)
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from importlib.metadata import EntryPoint\n"
        "from lowtide.cli import verbs\n"
        "verbs.extensions = lambda group: {'own': EntryPoint('own', 'own_verbs:own', group)}\n"
        "sys.argv = ['lowtide', 'own']\n"
        "from lowtide.cli.main import main\n"
        "main()"
    )
    result = python("-c", code)
    [line] = result.stderr.splitlines()
    assert result.returncode == 1
    assert line.startswith(f"lowtide: own_verbs cannot be loaded: {lacks}")
    assert "install what it needs" in line


def test_a_running_verb_that_fails_does_not_blame_its_start() -> None:
    code = (
        "import sys\n"
        "from lowtide.model_folder import hub\n"
        "def failing(): raise SystemError('a fault of ours')\n"
        "hub.list_models = failing\n"
        "sys.argv = ['lowtide', 'ls']\n"
        "from lowtide.cli.main import main\n"
        "main()"
    )
    said = python("-c", code).stderr
    assert said.endswith("SystemError: a fault of ours\n") and "cannot be started" not in said


def test_an_absurd_request_is_refused_without_torch() -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['lowtide', 'generate', {MODEL!r}, '-p', 'a', '--max-tokens', '{10**12}']\n"
        "from lowtide.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    result = python("-c", code)
    assert result.stdout == "2 False\n"


def test_ctrl_c_while_the_program_is_imported_ends_quietly() -> None:
    program_text = (
        "import sys\n"
        "from lowtide.cli.main import main\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'lowtide.cli.app': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "main()"
    )
    result = python("-c", program_text)
    assert (result.returncode, result.stderr) == (130, "")


ENDS = [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)]
WAITS = "for _ in range(3000): time.sleep(0.01)\n"
HEARD = "if NUMBER == signal.SIGHUP: signal.signal(NUMBER, signal.SIG_DFL)"
"""Under nohup it is ignored."""


@pytest.mark.parametrize(("number", "code"), ENDS)
@pytest.mark.parametrize(
    "happens",
    [
        # Dropped: a callback, or an object's end, is nobody's to raise from.
        "x = type('X', (), {})()\n"
        "    r = weakref.ref(x, lambda _: signal.raise_signal(NUMBER))\n"
        "    del x\n"
        f"    {WAITS}",
        f"type('X', (), {{'__del__': lambda x: signal.raise_signal(NUMBER)}})()\n    {WAITS}",
        # Within code given as text, such as a dataclass makes while it is imported.
        "exec('signal.raise_signal(NUMBER)')\n",
        "signal.raise_signal(NUMBER)\n",
    ],
)
def test_no_signal_is_lost_and_each_ends_with_the_same_code(
    happens: str, number: str, code: int, tmp_path: Path
) -> None:
    program = (
        "import signal, sys, time, types, weakref\n"
        f"NUMBER = signal.{number}\n"
        f"{HEARD}\n"
        "import lowtide.cli\n"
        "def app():\n"
        f"    {happens}"
        "stub = types.ModuleType('lowtide.cli.app')\n"
        "stub.app = app\n"
        "sys.modules['lowtide.cli.app'] = stub\n"
        "from lowtide.cli.main import main\n"
        "main()\n"
    )
    assert ended(program, tmp_path) == (code, "")


@pytest.mark.parametrize(("number", "code"), ENDS)
@pytest.mark.parametrize(
    "happens",
    [
        "try: signal.raise_signal(NUMBER)\nexcept: pass\n",
        "x = set()\nr = weakref.ref(x, lambda _: signal.raise_signal(NUMBER))\ndel x\n",
    ],
)
def test_a_signal_that_an_import_caught_ends_the_program_once(
    happens: str, number: str, code: int, tmp_path: Path
) -> None:
    """Torch and what it imports try some modules, whatever these raise."""
    (tmp_path / "verb.py").write_text(
        f"import signal, weakref\nNUMBER = signal.{number}\n{happens}def verb(): print(5)\n"
    )
    program = (
        "import signal, sys, time\n"
        f"NUMBER = signal.{number}\n"
        f"{HEARD}\n"
        "sys.argv = ['lowtide', 'ls']\n"
        "from lowtide.cli import main, verbs\n"
        "verbs.import_module = lambda name: __import__('verb')\n"
        "verbs.OWN_VERBS['ls'] = verbs.VerbEntry('verb', 'x', 'verb', '')\n"
        "try: main.main()\n"
        "finally:\n"
        "    time.sleep(0.3)\n"
        "    print('cleared up')\n"
    )
    assert ended(program, tmp_path) == (code, "cleared up\n")


def ended(program: str, folder: Path) -> tuple[int, str]:
    """Its exit code, and all that it printed."""
    (folder / "program.py").write_text(program)
    result = python("-m", "program", cwd=folder)
    return result.returncode, result.stdout + result.stderr


def test_the_package_imports_nothing_before_ctrl_c_is_understood() -> None:
    program_text = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import lowtide\n"
        "print(sorted(set(sys.modules) - before - {'__future__'}))"
    )
    result = python(
        "-S", "-c", program_text, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert result.stdout == "['lowtide', 'lowtide.errors', 'lowtide.version']\n", result.stderr


@pytest.mark.parametrize("words", [["--help"], [], ["ls"]])
def test_a_closed_reader_ends_every_command_quietly(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "lowtide", *words],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_warning_of_ours_is_a_notice_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert run("plan", MODEL).exit_code == 0
    own = str(Path(command.__file__).parents[1] / "reading" / "any.py")
    assert warnings.formatwarning("slow \x1b", UserWarning, own, 1) == "lowtide: slow \ufffd\n"
    assert "UserWarning: slow" in warnings.formatwarning("slow", UserWarning, "/any.py", 1)


def test_a_library_that_cannot_be_loaded_is_told_and_a_fault_of_ours_is_not_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit), errors_reported(wants_json=True):
        raise ImportError("libmkl.so: cannot map", name="torch._C")
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "ImportError"
    assert err.startswith(
        "lowtide: A library cannot be loaded: libmkl.so: cannot map. Where memory"
    )
    with pytest.raises(ModuleNotFoundError), errors_reported():
        raise ModuleNotFoundError("No module named 'lowtide.nowhere'", name="lowtide.nowhere")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes\nmore"),
        OSError(errno.EMFILE, "Too many open files", "x"),
    ],
    ids=str,
)
def test_a_limit_of_the_system_is_told_in_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, errors_reported():
        raise error
    told = capsys.readouterr().err
    assert caught.value.exit_code == 1 and told.count("\n") == 1
    assert told.startswith("lowtide: The system refuses memory") and "ulimit -v" in told
    with pytest.raises(RuntimeError, match="ours"), errors_reported():
        raise RuntimeError("ours")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("asked", [["--help"], ["ls"]])
def test_a_full_disk_behind_standard_output_is_told_in_one_line(asked: list[str]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "lowtide", *asked],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert result.returncode == 1
    assert result.stderr == (
        "lowtide: Standard output cannot be written: No space left on device.\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("asked", ["generate", "nothing"])
def test_an_answer_is_not_lost_with_the_messages(asked: str) -> None:
    """A log of messages may lie on a full disk, or its reader may have gone."""
    answer = ["generate", MODEL, "--prompt-ids", "1 2", "--max-tokens", "1"]
    arguments = answer if asked == "generate" else ["plan", "/nothing"]
    results = []
    for stderr in ("/dev/full", os.devnull):
        with open(stderr, "w") as file:
            command = [sys.executable, "-m", "lowtide", *arguments]
            results.append(
                subprocess.run(command, stdout=subprocess.PIPE, stderr=file, timeout=120)
            )
    assert results[0].stdout == results[1].stdout
    assert [each.returncode for each in results] == [0 if asked == "generate" else 1] * 2
    assert bool(results[0].stdout) == (asked == "generate")


# simulate


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    shape = TraceShape(2, 4, 1, hidden_size=8, expert_size=8)
    passes = (Pass(Step(StepKind.DENOISE, 0), 0, 2, 2),)
    path = tmp_path / "run.trace"
    ids = np.array([[[0], [1]], [[2], [1]]], np.uint16)
    rows = (np.ones((2, 2, 1), np.float32), np.zeros(2, np.int32), np.full(2, 2, np.uint8))
    Trace("org/name", shape, passes, ids, *rows).save(path)
    return str(path)


def test_what_is_simulated_can_come_from_the_environment_and_a_file(
    recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lowtide.toml"
    file.write_text('policy = "lru,all-host"\nresidents = 1.0\n')
    monkeypatch.setenv("LOWTIDE_MACHINE", "h100")
    told = json.loads(run("simulate", recorded, "--config", str(file), "--json").stdout)
    assert told["machine"] == "h100"
    assert [each["preset"] for each in told["runs"]] == ["lru", "all-host"]
    monkeypatch.setenv("LOWTIDE_CALIBRATION", str(tmp_path / "absent"))
    assert "absent is missing" in refused("simulate", recorded, code=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--residents", "1.5"], "from 0 to 1"),
        (["--residents", "nan"], "from 0 to 1"),
        (["--tau", "0"], "from 1 to"),
        (["--policy", ","], "names none"),
        (["--policy", "lru,tide,lru"], "--policy names a policy twice"),
        (["--policy", "lru,auto"], "name those to compare"),
        (["--presets", "lru"], "--policy NAME,NAME"),
    ],
)
def test_simulate_refuses_what_cannot_be(recorded: str, arguments: list[str], said: str) -> None:
    assert said in refused("simulate", recorded, *arguments)


def test_a_budget_that_the_machine_does_not_have_is_told(recorded: str, tmp_path: Path) -> None:
    shipped = Path(lowtide.lab.profiles.__file__).parent / "rtx3090.toml"
    assert "The residents take" not in run("simulate", recorded).stderr
    small = tmp_path / "small.toml"
    small.write_text(shipped.read_text().replace("memory_GB = 24", "memory_GB = 0.000001"))
    told = run("simulate", recorded, "--machine", str(small)).stderr
    assert "The residents take 1.5 KiB; the device has 1000 B." in told


def test_a_calibration_of_another_model_is_refused_by_both_names(recorded: str) -> None:
    nothing = (np.zeros((0, 3, 1), np.float32), np.zeros(0, np.int32), np.zeros(0, np.uint8))
    other = Trace("org/other", TraceShape(3, 4, 1), (), np.zeros((0, 3, 1), np.uint16), *nothing)
    known = types.SimpleNamespace(trace=other, shape=other.shape)
    with pytest.raises(UsageError, match="'org/name' and the calibration of 'org/other'"):
        check_same_shape(Trace.load(Path(recorded)), known)  # type: ignore[arg-type]
