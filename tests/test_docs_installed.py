"""What is installed or built beside the package: manual, completions, container, workflows."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lowtide.cli.options import OPTIONS
from lowtide.cli.verbs import OWN_VERBS

ROOT = Path(__file__).resolve().parents[1]
MANUAL = ROOT / "share" / "man" / "man1" / "lowtide.1"
BASH = ROOT / "share" / "bash-completion" / "completions" / "lowtide"
ZSH = ROOT / "share" / "zsh" / "site-functions" / "_lowtide"
FISH = ROOT / "share" / "fish" / "vendor_completions.d" / "lowtide.fish"

LISTED = [name for name, verb in OWN_VERBS.items() if verb.line]


# Manual and completions


def test_they_are_as_the_tool_writes_them() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "man_page.py"))["files"]()
    assert sorted(made) == sorted([MANUAL, BASH, ZSH, FISH])
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, "run make man"


def test_a_wheel_installs_all_of_them() -> None:
    listed = re.findall(r'"(share/[^"]+)" = \["(.+?)"\]', (ROOT / "pyproject.toml").read_text())
    files = [(folder, Path(path)) for folder, path in listed]
    assert all(Path(folder) == path.parent for folder, path in files)
    expected = [path.relative_to(ROOT) for path in (MANUAL, BASH, ZSH, FISH)]
    assert sorted(path for _, path in files) == sorted(expected)


def test_the_manual_has_every_verb_and_every_flag() -> None:
    text = MANUAL.read_text().replace("\\-", "-")
    for name in LISTED:
        assert f".B lowtide {name}" in text
    for option in OPTIONS:
        assert f"\\fB{option.flag}\\fR" in text, option.flag


def test_the_manual_is_set_without_a_warning() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tutf8", "-ww", "-rLL=100n", "-z", str(MANUAL)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        f"source {BASH}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _lowtide; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_verbs_flags_and_values() -> None:
    assert completed("lowtide", "") == LISTED
    assert completed("lowtide", "se") == ["serve"]
    assert "--host-memory" in completed("lowtide", "generate", "--host")
    assert completed("lowtide", "ls", "--thresh") == []
    [option] = [option for option in OPTIONS if option.name == "kernels"]
    assert completed("lowtide", "generate", "--kernels", "") == list(option.choices)
    assert completed("lowtide", "generate", "a-fil") == []  # files are bash's own


@pytest.mark.parametrize(("shell", "path"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)])
def test_shells_read_their_file(shell: str, path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


# The container


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile's last stage, a line each."""
    lines = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    found = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    pairs = [(name, rest.strip()) for name, _, rest in found]
    last = max(i for i, (name, _) in enumerate(pairs) if name == "FROM")
    return pairs[last:]


def test_a_container_runs_as_nobody_and_ends_by_sigterm() -> None:
    last = dict(instructions())
    assert last["USER"].isdecimal() and last["USER"] != "0"  # by number, as Kubernetes asks
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(last["ENTRYPOINT"]) == ["lowtide"]  # no shell, which would keep the signal
    assert json.loads(last["CMD"])[0] == "serve"


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False), (None, False)])
def test_its_health_is_asked_without_another_program(
    status: int | None, is_healthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [health] = [rest for name, rest in instructions() if name == "HEALTHCHECK"]
    program, *arguments = json.loads(health.partition(" CMD ")[2])
    assert program == "python"
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Health)
    monkeypatch.setattr(_Health, "status", status)
    asked = threading.Thread(target=server.serve_forever)
    if status is None:
        server.server_close()
    else:
        asked.start()
    try:
        environment = {"LOWTIDE_PORT": str(server.server_address[1])}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, timeout=60
        )
    finally:
        if status is not None:
            server.shutdown()
            asked.join()
            server.server_close()
    assert (done.returncode == 0) == is_healthy, done.stderr


def test_what_a_wheel_is_made_of_is_in_the_container() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*" and all((ROOT / name).exists() for name in let_in)
    named = {
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "src",
        "share",
        "README.md",
        "LICENSE",
    }
    assert named <= let_in


# Workflows


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_alone(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"run: *(.*)", text):
        make, target = command.split()
        assert make == "make" and (target in targets or target == '"$TARGET"')
    for named in re.findall(r"target: \[(.*)\]", text):
        assert set(named.split(", ")) <= targets
    for action in re.findall(r"uses: (\S+)", text):
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)
