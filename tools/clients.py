"""Real coding agents against the server, to the end of a small repair: `make clients`.

python tools/clients.py             # a minute for each, after 770 MB that npm fetches once
python tools/clients.py TEMPLATE    # and again with a model with states and Qwen3.5's template

TEMPLATE is a file that the sdist of llama-cpp-python has: Qwen3.5-4B.jinja in vendor/llama.cpp/
models/templates.

Codex CLI and Claude Code, of pinned versions in the user's cache, are each run on a repository
with a failing test, as `lowtide serve --print-config` says, and Codex again with `--oss`, as if an
Ollama served it, in a network namespace that has the loopback alone. The model is tiny and random,
and its answers follow a script, token by token through the real engine
(`tests/forced_serving.py`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from forced_serving import TEMPLATE, ForcedService, agent_model  # noqa: E402
from serving import serving_app  # noqa: E402
from small_tokenizers import CODER, QWEN, CallFormat  # noqa: E402
from starlette.types import ASGIApp, Message, Receive, Scope, Send  # noqa: E402

from lowtide import AsyncLLM  # noqa: E402
from lowtide.decode.kept_sequences import TEMPLATE_TOKENS  # noqa: E402
from lowtide.files.folders import cache_folder  # noqa: E402
from lowtide.serve.app import build_app  # noqa: E402
from lowtide.serve.context import AGENT_TOKENS  # noqa: E402

INSIDE = "--inside"  # this process has the loopback alone
LIMIT_S = 300.0
PROMPT = "Repair the failing test."
MODEL = "model"

WRONG = "    return sum(values) / (len(values) + 1)\n"
RIGHT = "    return sum(values) / len(values)\n"
FILES = {
    "mean.py": f"def mean(values):\n{WRONG}",
    "test_mean.py": (
        "import unittest\n\nfrom mean import mean\n\n\nclass TestMean(unittest.TestCase):\n"
        "    def test_mean(self):\n        self.assertEqual(mean([1, 3]), 2)\n"
    ),
}
PICTURE = "mean.png"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
RUN_TEST = "python3 -m unittest"


class Writing(NamedTuple):
    """Form of a model's answers.

    calls: form of its calls. before: what begins a thought. thought: of an answer that has none
    in particular. gap: between a text and a call.
    """

    calls: CallFormat
    before: str
    thought: str
    gap: str

    def answer(self, text: str, *call: tuple[str, dict[str, object]], thought: str = "") -> str:
        """Return an answer as it is written, with a call after its text."""
        thought = thought or self.thought
        begun = f"{self.before}{thought}\n</think>\n\n" if thought else ""
        return begun + text + (self.gap if text and call else "") + self.calls.text(*call)

    def look(self, call: tuple[str, dict[str, object]]) -> str:
        """Return a first answer, whose thought is told."""
        return self.answer("I run the tests.", call, thought="Which test fails?")


USUAL = Writing(QWEN, "<think>\n", "", "\n")
IN_THOUGHT = Writing(CODER, "", "What comes next?", "\n\n")
"""Prompts end with the mark of a thought, so that each answer has one."""

END = "The test passes."


class Agent(NamedTuple):
    """Program of npm's that is to work with lowtide.

    name: as `--print-config` has it. arguments: before the prompt. script: the model's answers,
    turn by turn, in a repository that lies in a folder.
    """

    name: str
    package: str
    version: str
    arguments: tuple[str, ...]
    script: Callable[[Path, Writing], list[str]]

    @property
    def is_oss(self) -> bool:
        """True if the agent asks for an Ollama, not for a server that it is told of."""
        return "--oss" in self.arguments


def codex_script(_: Path, writing: Writing) -> list[str]:
    run = ("exec_command", {"cmd": RUN_TEST})
    hunk = f"*** Update File: mean.py\n@@\n-{WRONG}+{RIGHT}"
    patch = ("apply_patch", {"input": f"*** Begin Patch\n{hunk}*** End Patch\n"})
    write = writing.answer
    return [writing.look(run), write("", patch), write("", run), write(END)]


def codex_oss_script(folder: Path, writing: Writing) -> list[str]:
    """Codex knows nothing of the model, and gives it no `apply_patch`."""
    mend = f"sed -i 's|{WRONG.strip()}|{RIGHT.strip()}|' mean.py"
    run, mended = (("exec_command", {"cmd": command}) for command in (RUN_TEST, mend))
    look = ("view_image", {"path": str(folder / PICTURE)})
    write = writing.answer
    return [writing.look(run), *(write("", call) for call in (look, mended, run)), write(END)]


def claude_script(folder: Path, writing: Writing) -> list[str]:
    run = ("Bash", {"command": RUN_TEST, "description": "Run the tests"})
    file = {"file_path": str(folder / "mean.py")}
    edit = ("Edit", {**file, "old_string": WRONG, "new_string": RIGHT})
    look = ("Read", {"file_path": str(folder / PICTURE)})
    calls = (look, ("Read", file), edit, run)
    return [writing.look(run), *(writing.answer("", call) for call in calls), writing.answer(END)]


CODEX = ("codex", "@openai/codex", "0.169.0")
CODEX_ARGUMENTS = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
OSS = ("--oss", "--local-provider", "ollama", "-m", MODEL)
AGENTS = (
    Agent(*CODEX, CODEX_ARGUMENTS, codex_script),
    Agent(*CODEX, (*CODEX_ARGUMENTS, *OSS), codex_oss_script),
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        "2.1.330",
        ("--allowedTools", "Bash,Read,Edit", "-p"),
        claude_script,
    ),
)


def main() -> None:
    programs = cache_folder() / "agents"
    if INSIDE not in sys.argv:
        _install(programs)
        os.execvp("unshare", [*_namespace(), sys.executable, __file__, INSIDE, *sys.argv[1:]])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    found = _all_repaired(programs, USUAL, "qwen3_moe", TEMPLATE)
    for path in sys.argv[2:]:
        template = Path(path).read_text(encoding="utf-8")
        found += _all_repaired(programs, IN_THOUGHT, "qwen3_5_moe", template)
    sys.exit(any(found))


def _all_repaired(programs: Path, writing: Writing, family: str, template: str) -> list[list[str]]:
    """Run each agent with a model of a family."""
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        model = agent_model(Path(name) / MODEL, AGENT_TOKENS, family, template)
        llm = AsyncLLM(model, context=AGENT_TOKENS, host_memory="256MiB")
        try:
            print(family)
            return [_repaired(agent, programs, llm, Path(name), writing) for agent in AGENTS]
        finally:
            asyncio.run(llm.close())


def _install(folder: Path) -> None:
    """Fetches what is not there in its pinned version."""
    wanted = {agent.package: agent.version for agent in AGENTS}
    files = {package: folder / "node_modules" / package / "package.json" for package in wanted}
    found = {p: json.loads(f.read_text())["version"] for p, f in files.items() if f.exists()}
    if found == wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    pinned = [f"{package}@{version}" for package, version in wanted.items()]
    options = ["--prefix", str(folder), "--no-audit", "--no-fund"]
    subprocess.run(["npm", "install", *options, *pinned], check=True)


def _namespace() -> list[str]:
    """Return the command that runs another with the loopback alone.

    It works as root, or else in a namespace where this user counts as root. Ends the program where
    neither is allowed.
    """
    for options in ([], ["--map-root-user"]):
        command = ["unshare", "--net", *options]
        tried = subprocess.run([*command, "true"], capture_output=True, text=True)
        if not tried.returncode:
            return command
    raise SystemExit(
        f"No network namespace can be made here ({tried.stderr.strip()}), and agents run in "
        "nothing else: they would speak with their makers. Run this as root, or let users make "
        "namespaces (on Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0)."
    )


def _repaired(
    agent: Agent, programs: Path, llm: AsyncLLM, folder: Path, writing: Writing
) -> list[str]:
    """Runs an agent and prints what came of it. Returns what is not as it should be."""
    home = Path(tempfile.mkdtemp(prefix=agent.name, dir=folder))
    repository = home / "repository"
    repository.mkdir()
    for name, text in FILES.items():
        (repository / name).write_text(text)
    (repository / PICTURE).write_bytes(PIXEL)
    script = agent.script(repository, writing)
    service = ForcedService(llm, script, writing.answer("A repair."))
    requests = Requests(build_app(service))
    with serving_app(requests) as url:
        told = _run(agent, programs, home, repository, _config(agent, folder / MODEL, url))
    print(f"{agent.name} {agent.version}{' --oss' * agent.is_oss}")
    for request, count in requests.counts.items():
        print(f"  {count} x {request}")
    for each in service.answered:
        done, num_tools = each.done, len(each.ask.tools)
        print(
            f"  {num_tools:2} tools, {done.num_prompt:6,} prompt tokens, of them "
            f"{done.num_resumed:6,} kept, {done.num_new:4,} new"
        )
    wrong = list(_wrong(service, requests, repository, len(script)))
    print("\n".join([*(f"  WRONG: {each}" for each in wrong), *([told] if wrong else [])]))
    return wrong


def _wrong(
    service: ForcedService, requests: Requests, repository: Path, num_turns: int
) -> Iterator[str]:
    tested = subprocess.run(RUN_TEST.split(), cwd=repository, capture_output=True, text=True)
    if tested.returncode:
        yield f"the test fails:\n{tested.stderr}"
    turns = [each for each in service.answered if each.ask.tools]
    if len(turns) != num_turns:
        yield f"{len(turns)} turns, and the script has {num_turns}"
    for before, after in pairwise(each.done for each in turns):
        # A template may drop what it added at the end for an answer.
        if after.num_resumed < before.num_prompt - TEMPLATE_TOKENS:
            yield f"a turn computes again what was there: {after.num_resumed:,} tokens kept"
    last = turns[-1].ask.conversation.turns if turns else ()
    outputs = [turn.text for turn in last if turn.role == "tool"]
    if not outputs or "FAILED" not in outputs[0] or "OK" not in outputs[-1]:
        yield "what the tests printed did not come back"
    if service.num_refused:
        yield f"{service.num_refused} answers are not of their own request's grammar"
    yield from (request for request in requests.counts if not request.endswith(" 200"))


def _config(agent: Agent, model: Path, url: str) -> str:
    """Return the lines that a user would be told to use."""
    if agent.is_oss:
        return f"export CODEX_OSS_BASE_URL={url}/v1\n"
    options = ["--port", url.rpartition(":")[2], "--context", str(AGENT_TOKENS)]
    command = [sys.executable, "-m", "lowtide", "serve", str(model), *options]
    command += ["--print-config", agent.name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _run(agent: Agent, programs: Path, home: Path, repository: Path, config: str) -> str:
    """Run an agent to its end, or for `LIMIT_S`, and return its output.

    config: files, each after its name, or lines for a shell.
    """
    files = re.split(r"^# ~/(.+)\n", config, flags=re.MULTILINE)
    for name, text in zip(files[1::2], files[2::2], strict=True):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    program = programs / "node_modules" / ".bin" / agent.name
    command = [str(program), *agent.arguments, PROMPT]
    path_names = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    with subprocess.Popen(
        ["sh", "-c", f'{files[0]}exec "$@"', "sh", *command],
        cwd=repository,
        env={"HOME": str(home), "PATH": path_names, "LANG": "C.UTF-8", "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            return running.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired as error:
            told = (error.stdout or b"").decode(errors="replace")  # bytes, though `text` is set
            return f"{told}\nIt did not end within {LIMIT_S:g} s."
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # with all that it started


class Requests:
    """Around an app: counts requests by method, path and status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.counts: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.counts[f"{scope['method']} {scope['path']} {message['status']}"] += 1
            await send(message)

        await self._app(scope, receive, noted)


if __name__ == "__main__":
    main()
