"""The system's C++ compiler, and commands with a time limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from lowtide.errors import UnsupportedError
from lowtide.files.json_file import printable

_COMPILERS = ("c++", "g++", "clang++")
# No flag of this machine: variants are chosen at run time. None that changes arithmetic either.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-pthread")
POLL_S = 0.005
_LIMIT_S = 120.0
_MOST_CHARS = 500  # of a compiler's error


def find_compiler() -> str:
    """Return the path of a C++ compiler; UnsupportedError if there is none."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise UnsupportedError(f"There is no C++ compiler; install one of {', '.join(_COMPILERS)}.")


def zig_for(machine: str, glibc: str) -> list[str]:
    """Return the command of zig's C++ compiler, a package of PyPI, for wheels.

    machine: as `platform.machine` names it. glibc: oldest version of systems that load the library.
    """
    # Its driver turns -O3 into -O2. -s leaves out symbols for debuggers.
    target = f"{machine}-linux-gnu.{glibc}"
    return [sys.executable, "-m", "ziglang", "c++", "-target", target, "-Xclang", "-O3", "-s"]


def version_of(compiler: str) -> bytes:
    """Return the output of the compiler's `--version`."""
    return run([compiler, "--version"])


def run(command: Sequence[str], scratch: Path | None = None, limit_s: float = _LIMIT_S) -> bytes:
    """Run a command to its end and return its output; see `Running`."""
    running = Running(command, scratch, limit_s)
    try:
        while not running.has_ended():
            time.sleep(POLL_S)
    except BaseException:
        running.stop()
        raise
    return running.output()


class Running:
    """Running command; callers poll `has_ended`, or stop it."""

    def __init__(
        self, command: Sequence[str], scratch: Path | None = None, limit_s: float = _LIMIT_S
    ) -> None:
        """Start the command; scratch: its folder of temporary files, by default the system's."""
        self._name, self._limit_s, self._start_s = command[0], limit_s, time.monotonic()
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        started: Future[subprocess.Popen[bytes]] = Future()

        def start() -> None:
            try:
                process = subprocess.Popen(
                    command,
                    stdout=self._output,
                    stderr=self._errors,
                    env=_environment(scratch),
                    start_new_session=True,
                )
                started.set_result(process)
            except BaseException as error:
                started.set_exception(error)

        # Handlers of signals run on the main thread: one that raises inside Popen would leave a
        # process that is never stopped. It may raise as soon as the other thread is being started.
        try:
            threading.Thread(target=start).start()
            self._process = started.result()
        except RuntimeError:  # no thread can be started, so there is no process
            raise
        except BaseException:
            with suppress(OSError):
                self._process = started.result()
                self.stop()
            raise

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def has_ended(self) -> bool:
        """Return True once it has ended; UnsupportedError beyond the time limit."""
        if self._process.poll() is not None:
            return True
        if self.elapsed_s > self._limit_s:
            raise UnsupportedError(f"{self._name} has not ended within {self._limit_s:g} s.")
        return False

    def output(self) -> bytes:
        """Return the output; UnsupportedError if the command failed."""
        with self._output, self._errors:
            if self._process.returncode:
                self._errors.seek(0)
                said = _telling_line(self._errors.read())
                raise UnsupportedError(f"{self._name} failed: {said}.")
            self._output.seek(0)
            return self._output.read()

    def stop(self) -> None:
        """Stop its whole process group: the compiler's children do the work."""
        with self._output, self._errors, suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _environment(scratch: Path | None) -> Mapping[str, str]:
    environment = {**os.environ, "LC_ALL": "C"}  # `_telling_line` reads English
    return environment if scratch is None else {**environment, "TMPDIR": str(scratch)}


def _telling_line(errors: bytes) -> str:
    """Return the first error line of a compiler's output; hundreds may follow from it."""
    lines = errors.decode(errors="replace").strip().splitlines()
    telling = [line for line in lines if "error:" in line] or lines[-1:]
    return (
        printable(telling[0].strip()[:_MOST_CHARS]).rstrip(".") if telling else "it did not say why"
    )
