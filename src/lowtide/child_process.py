"""A child process with limits of its own, for work that this process must survive.

The child is a script that answers each line of JSON with one. The first request starts it; it is
kept for the next, restarted after it has ended, and ends with the program.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowtide.files.long_json import write_json

START_S = 120.0
"""Time limit for the child's answer to the greeting."""


class ChildError(Exception):
    """A question that got no answer.

    late_s: the limit after which the child was stopped. signal: the signal that ended it, 0 for
    none. said: the end of its standard error, or why it could not be started.
    """

    def __init__(self, said: str = "", signal: int = 0, late_s: float | None = None) -> None:
        super().__init__(said or f"signal {signal}")
        self.said, self.signal, self.late_s = said, signal, late_s


class ChildProcess:
    """Owns the child, and the order in which threads use each lane.

    Knows nothing of the requests. Lanes are pairs of pipes: the first is the child's standard input
    and output, the numbers of the others are its arguments. greeting: sent once to every new child,
    on the first lane. env: additional environment variables.
    """

    def __init__(
        self,
        script: Path,
        num_lanes: int = 1,
        greeting: Callable[[], Mapping[str, object]] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._script, self._greeting, self._env = script, greeting, dict(env or {})
        self._turns = [threading.Lock() for _ in range(num_lanes)]
        self._change = threading.Lock()  # of the child
        self._child: subprocess.Popen[bytes] | None = None
        self._lanes: list[_Lane] = []
        _CHILDREN.add(self)

    def ask(self, request: Mapping[str, object], wall_s: float, lane: int = 0) -> dict[str, Any]:
        """Return the child's answer to a request of plain JSON values.

        Raises ChildError if there is none: after `wall_s` seconds, or because the child ended.
        """
        line = write_json(request).encode() + b"\n"
        with self._turns[lane]:
            child, lanes = self._running()
            try:
                answer = _asked(child, lanes[lane], line, wall_s)
            except BaseException:
                self._end(child)  # an answer of which half was read would be taken for the next's
                raise
            if answer.get("is_last"):
                self._end(child)
        return answer

    def start(self) -> None:
        """Start the child if there is none. Raise ChildError."""
        self._running()

    def close(self) -> None:
        """End the child after its present work."""
        with self._change:
            child = self._child
        for turn in self._turns:
            turn.acquire()
        try:
            self._end(child)
        finally:
            for turn in self._turns:
                turn.release()

    def forget(self) -> None:
        """Forget the child in a fork of the program: it is the parent's, and so are held locks."""
        child, self._child, self._lanes = self._child, None, []
        self._turns, self._change = [threading.Lock() for _ in self._turns], threading.Lock()
        if child is not None:
            _close_errors(child)
            child.returncode = 0  # not to be waited for here

    def _running(self) -> tuple[subprocess.Popen[bytes], Sequence[_Lane]]:
        with self._change:
            child = self._child
            if child is not None and child.poll() is not None:
                self._end_now()
                child = None
            if child is None:
                child, self._lanes = _started(self._script, len(self._turns), self._env)
                self._child = child
                try:
                    self._greet(child)
                except BaseException:
                    self._end_now()
                    raise
            return child, self._lanes

    def _greet(self, child: subprocess.Popen[bytes]) -> None:
        if self._greeting is None:
            return
        line = json.dumps(self._greeting()).encode() + b"\n"
        answer = _asked(child, self._lanes[0], line, START_S)
        if "error" in answer:
            raise ChildError(str(answer["error"]))

    def _end(self, child: subprocess.Popen[bytes] | None) -> None:
        """End this child, unless another lane has already replaced it."""
        with self._change:
            if self._child is child:
                self._end_now()

    def _end_now(self) -> None:
        child, self._child, self._lanes = self._child, None, []
        if child is not None:
            _kill(child)
            child.wait()
            _close_errors(child)

    def __del__(self) -> None:
        self._end_now()


class _Lane:
    """Our end of a pair of pipes: one for questions, one for answers.

    Closed with the last thread that uses it, since its numbers may be other files' then.
    """

    def __init__(self) -> None:
        self.of_child: tuple[int, ...] = ()
        self.questions = self.answers = -1
        asked, self.questions = os.pipe()
        try:
            self.answers, answered = os.pipe()
        except OSError:
            os.close(asked)
            raise
        self.of_child = (asked, answered)
        os.set_blocking(self.questions, False)  # a child that does not read must not block us

    def close_child_s_ends(self) -> None:
        """Close the child's ends of the pipes, once the child has them."""
        ends, self.of_child = self.of_child, ()
        for end in ends:
            os.close(end)

    def __del__(self) -> None:
        for end in (*self.of_child, self.questions, self.answers):
            if end >= 0:
                os.close(end)


def _started(
    script: Path, num_lanes: int, env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], list[_Lane]]:
    """Start a child with its lanes. Raise ChildError."""
    try:
        lanes = [_Lane() for _ in range(num_lanes)]
        first, *others = (lane.of_child for lane in lanes)
        passed = [end for ends in others for end in ends]
        child = subprocess.Popen(
            # -P: this package's own folder must not become a place where the child finds modules.
            [sys.executable, "-P", str(script), *map(str, passed)],
            stdin=first[0],
            stdout=first[1],
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent
            pass_fds=passed,
            env={**os.environ, **env},
        )
    except OSError as error:
        raise ChildError(
            f"no process could be started: {error}; raise the limit of open files, memory or "
            "processes (ulimit -n, -v, -u, or the container's)"
        ) from error
    for lane in lanes:
        lane.close_child_s_ends()
    return child, lanes


def _asked(
    child: subprocess.Popen[bytes], lane: _Lane, line: bytes, wall_s: float
) -> dict[str, Any]:
    """Send one request and return its answer. Raise ChildError."""
    end_s = time.monotonic() + wall_s
    late_s = None
    try:
        _write(lane.questions, line, end_s)
        answered = _read_line(lane.answers, end_s)
    except TimeoutError:
        _kill(child)
        answered, late_s = b"", wall_s
    except OSError:
        answered = b""  # it ended before it had read the question
    if not answered.endswith(b"\n"):
        raise _failure(child, late_s)
    answer = json.loads(answered)
    return answer if isinstance(answer, dict) else {}


def _failure(child: subprocess.Popen[bytes], late_s: float | None) -> ChildError:
    """Return the reason of a missing answer: the child ended, or was stopped after `late_s`."""
    try:
        code = child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        _kill(child)
        code = child.wait()
    if code < 0 or late_s is not None:
        return ChildError(signal=max(0, -code), late_s=late_s)
    said = b""
    with suppress(ValueError):  # another lane has closed it
        said = child.stderr.read() if child.stderr is not None else b""
    return ChildError(said.decode(errors="replace").strip()[-300:])


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and everything it has started, which is in its session."""
    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()


def _write(pipe: int, data: bytes, end_s: float) -> None:
    """Write all of `data`. Raises TimeoutError, or OSError once the pipe has no reader."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(pipe, rest) :]
        except BlockingIOError:
            _wait(pipe, select.POLLOUT, end_s)


def _read_line(pipe: int, end_s: float) -> bytes:
    """Read a line, or its beginning if the other end is closed. Raise TimeoutError."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        _wait(pipe, select.POLLIN, end_s)
        part = os.read(pipe, 1 << 20)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _wait(pipe: int, event: int, end_s: float) -> None:
    """Wait until a pipe is ready or its other end is closed. Raise TimeoutError."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0, math.ceil(1000 * (end_s - time.monotonic())))):
        raise TimeoutError


def _close_errors(child: subprocess.Popen[bytes]) -> None:
    if child.stderr is not None:
        child.stderr.close()


_CHILDREN: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _close_all() -> None:
    for child in list(_CHILDREN):
        child.close()


def _forget_all() -> None:
    for child in list(_CHILDREN):
        child.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
