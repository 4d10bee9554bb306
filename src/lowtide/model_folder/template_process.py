"""The process that renders chat templates (`template_worker.py`), as its parent sees it.

One for the whole program: started by the first conversation, kept for the next, and started again
after a template broke a limit. It ends with the program.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import UsageError
from lowtide.files.json_file import printable

_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """Owns the child and the turns of the threads that ask it. Knows nothing of templates."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, object], wall_s: float) -> dict[str, Any]:
        """The child's answer to a request of plain JSON values.

        Raises UsageError where it gave none: after `wall_s` seconds, or stopped by the system for
        what it used.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._turn:
            child = self._running()
            try:
                answer = _asked(child, line, wall_s)
            except BaseException:
                self._end()  # an answer of which half was read would be taken for the next one's
                raise
            if answer.get("is_last"):
                self._end()
        return answer

    def close(self) -> None:
        """Ends the child, after the render under way."""
        with self._turn:
            self._end()

    def forget(self) -> None:
        """In a fork of the program: the child is the parent's, and so may be the turn."""
        child, self._child, self._turn = self._child, None, threading.Lock()
        if child is not None:
            _close_pipes(child)
            child.returncode = 0  # not to be waited for here

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            self._child = _started()
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            _close_pipes(child)


def _started() -> subprocess.Popen[bytes]:
    # -P: this package's own folder must not become a place where the child finds modules.
    command = [sys.executable, "-P", str(_WORKER)]
    pipe = subprocess.PIPE
    try:
        # A session of its own: Ctrl-C in a terminal is for the parent.
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
    except OSError as error:
        raise UsageError(f"No process could be started to render the template: {error}.") from error


def _asked(child: subprocess.Popen[bytes], line: bytes, wall_s: float) -> dict[str, Any]:
    """One question and its answer. Raises UsageError."""
    if child.stdin is None or child.stdout is None:
        raise UsageError("The process that renders templates has no pipes.")
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        child.kill()

    timer = threading.Timer(wall_s, stop)
    timer.daemon = True
    timer.start()
    try:
        _write(child.stdin.fileno(), line)
        answered = _read_line(child.stdout.fileno())
    except OSError:
        answered = b""  # it ended before it had read the question
    finally:
        timer.cancel()
    if not answered.endswith(b"\n"):
        raise _failure(child, wall_s if is_late.is_set() else None)
    answer = json.loads(answered)
    return answer if isinstance(answer, dict) else {}


def _failure(child: subprocess.Popen[bytes], late_s: float | None) -> UsageError:
    """Why there was no answer: the child has ended, or was stopped after `late_s` seconds."""
    try:
        code = child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if late_s is not None:
        return UsageError(
            f"The model's chat template did not finish within {late_s:g} s; give a plain text "
            "prompt instead."
        )
    if code < 0:
        return UsageError(
            f"The model's chat template was stopped (signal {-code}): it used more processor time "
            "or memory than a template may."
        )
    said = child.stderr.read() if child.stderr is not None else b""
    detail = printable(said.decode(errors="replace").strip()[-300:])
    return UsageError(f"The model's chat template could not be rendered: {detail}")


def _write(pipe: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _read_line(pipe: int) -> bytes:
    parts = []
    while part := os.read(pipe, 1 << 20):
        parts.append(part)
        if part.endswith(b"\n"):
            break
    return b"".join(parts)


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


TEMPLATES = TemplateProcess()
"""The program's only one: a model's template is run for whole conversations, a few in a second."""

atexit.register(TEMPLATES.close)
os.register_at_fork(after_in_child=TEMPLATES.forget)
