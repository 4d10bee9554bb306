"""Habits from ten other programs: the first command that their users type works, or is corrected.

The correction is the line that works.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from demo_folder import templated_demo
from programs import python
from rich.console import Console
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.cli.foreign_flags import FLAGS, VERBS, Verb
from lowtide.cli.live import LiveView
from lowtide.cli.options import OPTIONS, resolve
from lowtide.cli.verbs import OWN_VERBS
from lowtide.lab.verify import Verdict

DEMO = "demo:autoregressive"
SHORT = ["--context", "64", "--host-memory", "12M"]


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "200"})


WORKS = {
    "ollama run MODEL TEXT": ["run", DEMO, "2 + 2", "--max-tokens", "3", *SHORT],
    "ollama list": ["list"],
    "ollama run --verbose": ["run", DEMO, "2 + 2", "--verbose", "--max-tokens", "3", *SHORT],
    "llama-cli -p": ["generate", DEMO, "-p", "2 + 2", "--max-tokens", "3", *SHORT],
    "transformers' underscores": ["generate", DEMO, "2 + 2", "--max_tokens=3", *SHORT],
    "vllm's values": ["generate", DEMO, "2 + 2", "--max-tokens=3", "--dtype", "float32", *SHORT],
    "a flag first": ["generate", "--max-tokens", "3", *SHORT, DEMO, "2 + 2"],
    "ollama run without quotes": ["run", DEMO, "2", "+", "2", "--max-tokens", "3", *SHORT],
    "-h": ["-h"],
    "-h of a verb": ["generate", "-h"],
    "-V": ["-V"],
    "a prompt like a flag": ["generate", DEMO, "-p", "-n", "--max-tokens", "3", *SHORT],
}


@pytest.mark.parametrize("arguments", WORKS.values(), ids=WORKS.keys())
def test_it_works(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


ANSWERED = {
    "llama-cli -m": (["generate", "-m", "x.gguf", "-p", "hi"], "first argument"),
    "llama-cli -n": (["generate", DEMO, "-p", "hi", "-n", "64"], "--max-tokens"),
    "llama-cli -c": (["generate", DEMO, "-p", "hi", "-c", "4096"], "--context"),
    "llama-cli -ngl": (["generate", DEMO, "-p", "hi", "-ngl", "99"], "--gpu-memory"),
    "llama-cli --temp": (["generate", DEMO, "-p", "hi", "--temp", "0.7"], "--temperature"),
    "ollama serve": (["serve"], "Missing argument 'MODEL'"),
    "ollama show": (["show", "llama3"], "lowtide plan"),
    "ollama ps": (["ps"], "lowtide ls"),
    "ollama rm": (["rm", "llama3"], "lowtide ls"),
    "ollama run without a prompt": (["run", DEMO, "-p", ""], "empty"),
    "a name of ollama's": (["plan", "llama3"], "name of Ollama"),
    "mlx-lm's server": (["server", "org/name"], "lowtide serve MODEL"),
    "vllm's memory": (["chat", DEMO, "--gpu-memory-utilization", "0.9"], "--gpu-memory 90%"),
    "vllm's context": (["chat", DEMO, "--max-model-len", "4096"], "--context"),
    "transformers' length": (["run", DEMO, "hi", "--max_new_tokens", "9"], "--max-tokens"),
    "trust": (["plan", DEMO, "--trust-remote-code"], "no code"),
    "hf download": (["download", "org/name"], "lowtide pull"),
    "two prompts": (["generate", DEMO, "a", "-p", "b"], "two prompts"),
    "llama-cli's own name left out": (["-m", "x.gguf", "-p", "hi"], "first argument"),
    "llamafile's": (["--model", "x.gguf"], "first argument"),
    "an option first": (["--json", "plan", DEMO], "--json comes after the verb"),
    "an option with a value first": (["--host_memory=9M", "plan", DEMO], "after the verb"),
    "a model alone": ([DEMO], f"lowtide generate {DEMO} 'text', or lowtide chat {DEMO}"),
    "a file alone": (["./my model.gguf"], "lowtide chat './my model.gguf'"),
    "a page of the hub": (
        ["https://huggingface.co/org/name"],
        "lowtide generate https://huggingface",
    ),
    "a tag in the verb's place": (["org/name:Q4"], "lowtide generate org/name:Q4 'text'"),
    "a flag in the text": (
        ["run", DEMO, "what", "does", "-t", "do"],
        "use quotes or put it after --",
    ),
    "ollama help": (["help", "run"], "lowtide VERB --help"),
    "a misspelt verb": (["genrate", DEMO], "Did you mean generate?"),
    "ollama search": (["search", "qwen"], "lowtide pull"),
    "llama-embedding": (["embed", DEMO], "no embeddings"),
    "llama-perplexity": (["perplexity", DEMO, "-f", "wiki.raw"], "lowtide quality"),
    "ollama chat with text": (["chat", DEMO, "hello", "you"], f"generate {DEMO} 'hello you'"),
    "transformers' value": (["run", DEMO, "hi", "--max_new_tokens=9"], "Instead: --max-tokens"),
}


@pytest.mark.parametrize(("arguments", "said"), ANSWERED.values(), ids=ANSWERED.keys())
def test_it_is_answered_with_the_line_that_does(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2), result.output
    assert said in result.stderr and "Traceback" not in result.output


def test_what_is_answered_is_none_of_ours_and_the_answers_are() -> None:
    flags = {option.flag for option in OPTIONS}
    assert not flags & set(FLAGS)
    words = " ".join([*FLAGS.values(), *VERBS.values()]).split()
    named = {word.strip(":,;") for word in words if word.startswith("--")}
    assert named <= flags | {"--help", "--version", "--install-completion"}
    assert not set(OWN_VERBS) & set(VERBS) and {"run", "list"} <= set(OWN_VERBS)


@pytest.mark.parametrize("name", [name for name, verb in OWN_VERBS.items() if verb.line])
def test_a_verb_is_listed_by_its_own_first_line(name: str) -> None:
    """The list is known before any verb is imported; a verb's own help has all of its text."""
    verb = OWN_VERBS[name]
    assert inspect.getdoc(verb.load()).partition("\n")[0] == verb.line
    assert " ".join(verb.line.split()[:4]) in run("--help").stdout
    assert " ".join(verb.line.split()[:4]) in run(name, "--help").stdout


@pytest.mark.parametrize("name", OWN_VERBS)
def test_every_verb_has_an_example_that_it_takes(name: str) -> None:
    """In its help, and every flag and value of it is one of the verb's."""
    example = OWN_VERBS[name].example
    words = shlex.split(example)
    assert words[0] == "lowtide" and words[1] in (name, "ls")
    shown = " ".join(run(name, "--help").stdout.split())
    assert f"For example: {example}" in shown
    verb = OWN_VERBS[words[1]]
    one = typer.Typer(add_completion=False)
    one.command(cls=Verb)(verb.load())
    context = typer.main.get_command(one).make_context(words[1], words[2:])
    given = {
        option.name: context.params[option.name]
        for option in OPTIONS
        if context.params.get(option.name) not in (None, [])
    }
    resolve(given, {})


def completed(*words: str) -> set[str]:
    """Return fish's completions of the last word."""
    env = {"_LOWTIDE_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    env["_TYPER_COMPLETE_ARGS"] = " ".join(("lowtide", *words))
    result = CliRunner().invoke(app, env=env, prog_name="lowtide")
    return {line.partition("\t")[0] for line in result.stdout.splitlines() if line}


@pytest.mark.parametrize("name", OWN_VERBS)
def test_shells_complete_every_flag(name: str) -> None:
    everything = run(name, "--help-all" if "--help-all" in run(name, "--help").stdout else "--help")
    flags = set(re.findall(r"^│ +\*? *(--[a-z][-a-z0-9]*)", everything.stdout, flags=re.M))
    assert "--help" in flags and flags - {"--help", "--help-all"}
    assert flags <= completed(name, "--")


def test_shells_complete_verbs_and_models() -> None:
    assert {"generate", "serve", "simulate"} <= completed("")
    assert "serve" in completed("ser")
    assert "demo:autoregressive" in completed("generate", "demo:a")
    assert "demo:autoregressive" in completed("chat", "de") and not completed("plan", "./")
    assert "--install-completion" in run("completion").stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["-h"], ["-V"], [], ["nonsense"]],
    ids=" ".join,
)
def test_what_needs_no_verb_imports_none(arguments: list[str]) -> None:
    """Nor what verbs need: `--help` answers while numpy alone would still be imported."""
    code = (
        "import sys\n"
        f"sys.argv = ['lowtide', *{arguments!r}]\n"
        "from lowtide.cli.main import main\n"
        "try: main()\n"
        "finally:\n"
        "    late = ('torch', 'numpy', 'huggingface_hub', 'tokenizers', 'jinja2', 'httpx')\n"
        "    print(*sorted({*late, 'lowtide.cli.generate'} & set(sys.modules)), file=sys.stderr)"
    )
    result = python("-c", code)
    assert result.returncode in (0, 2) and "Traceback" not in result.stderr
    assert result.stderr.endswith("\n") and not result.stderr.splitlines()[-1]


def test_texts_and_flags_are_taken_without_a_library_that_converts_them() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['lowtide', 'plan', '/no/such/model', '--json', '--policy-option', 'tau=4']\n"
        "from lowtide.cli.main import main\n"
        "try: main()\n"
        "finally: print('pydantic' in sys.modules, file=sys.stderr)"
    )
    result = python("-c", code)
    assert result.returncode and "no/such/model" in result.stderr
    assert result.stderr.splitlines()[-1] == "False"


def test_help_has_the_common_options_and_help_all_has_all() -> None:
    shown, everything = run("generate", "--help").stdout, run("generate", "--help-all").stdout
    own = [option for option in OPTIONS if f"{option.flag} " in everything]
    assert 40 < len(own) and all(f"{o.flag} " in shown for o in own if o.is_common)
    assert sum(option.is_common for option in own) == 11  # and -p makes twelve
    assert not [o.flag for o in own if not o.is_common and f" {o.flag} " in shown]
    for verb in ("plan", "chat", "bench", "verify", "calibrate", "quality"):
        assert "--help-all" in run(verb, "--help").stdout
        assert "--check-weights" in run(verb, "--help-all").stdout


def test_plan_and_json_say_whether_there_is_a_template(tmp_path: Path) -> None:
    model = str(templated_demo(tmp_path, None))
    assert "no chat template" in run("plan", model, *SHORT).stdout
    assert json.loads(run("plan", model, "--json", *SHORT).stdout)["chat_template"] is False
    asked = ["generate", model, "2 + 2", "--max-tokens", "2", "--json", "--n", "2", *SHORT]
    answer = json.loads(run(*asked).stdout)
    assert answer["chat_template"] is False and len(answer["answers"]) == 2
    assert "no chat template" in run("chat", model, "--system", "x", *SHORT).stderr
    assert "--system" in run("generate", model, "2 + 2", "--system", "x", *SHORT).stderr


def test_plan_says_that_a_chat_template_is_applied(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    model = str(templated_demo(tmp_path, template))
    assert "go through the model's chat template" in run("plan", model, *SHORT).stdout
    assert json.loads(run("plan", model, "--json", *SHORT).stdout)["chat_template"] is True


def test_a_narrower_terminal_leaves_no_old_lines() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=20, legacy_windows=False)
    tokenizer: Any = object()  # else ids are shown
    with LiveView(console, tokenizer, 0) as view:
        view.commit([], "x" * 150)  # lines of 60, 60 and 30 cells
        file.truncate(0)
        console.width = 25  # which are 3, 3 and 2 now
        view.commit([], "")
        assert file.getvalue().count("\x1b[1A") == 3 + 3 + 2 - 1
        file.truncate(0)
        console.width = 60
        view.commit([], "")
        assert file.getvalue().count("\x1b[1A") == 6 - 1  # lines that end stay as they are
        view.finish("")


@pytest.mark.parametrize("verb", ["plan", "generate"])
@pytest.mark.parametrize(
    ("context", "said"),
    [("4096", "the model has 2048 positions"), ("2048", ""), ("64", ""), ("16", "too short for")],
)
def test_a_context_that_no_text_can_use_is_told(verb: str, context: str, said: str) -> None:
    text = [] if verb == "plan" else ["2 + 2", "--max-tokens", "1"]
    result = run(verb, DEMO, *text, "--context", context)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("context ")]
    assert [said in line for line in lines] == [True] * bool(said)


def test_help_all_is_there_where_it_adds_something() -> None:
    for name in OWN_VERBS:
        shown = run(name, "--help").stdout
        if "--help-all" not in shown:
            assert "--config " in shown and "--config " in " ".join(completed(name, "--")) + " "
        else:
            added = run(name, "--help-all").stdout.count("\n│ --") - shown.count("\n│ --")
            assert added > 1, name


def test_an_argument_may_be_named_as_its_place_is() -> None:
    """`lowtide simulate trace --policy lru`, of a file that is called trace."""
    assert "trace is missing" in run("simulate", "trace", "--policy", "lru").stderr


def test_verify_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Verdict("cpu", policy, b, 0, 3, 0.0) for policy in ("lru", "tide") for b in (1, 2)]
    monkeypatch.setattr("lowtide.lab.verify.verify", lambda *_, **__: runs)
    ended = run("verify", DEMO)
    same = "verdict: the same bit for bit (4 runs, 2 budgets, 2 policies)"
    assert ended.exit_code == 0 and ended.stdout.splitlines()[-1] == same
    runs.append(
        Verdict("cpu", "dali", 1 << 20, 0, 3, 0.0, largest_layer_difference=0.5, first_layer=1)
    )
    ended = run("verify", DEMO)
    line = ended.stdout.splitlines()[-1]
    assert ended.exit_code == 1 and line.startswith("verdict: NOT the same in 1 of 5 runs")
    assert "dali on cpu at 1.0 MiB" in line
