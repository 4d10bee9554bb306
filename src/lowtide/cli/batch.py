"""`lowtide batch`: answer a file of requests, line by line, into another file."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import typer

from lowtide.cli.command import EXIT_FAILURE, takes
from lowtide.cli.generate import ModelName, show_plan
from lowtide.cli.interrupts import Terminated, reraise_signal
from lowtide.cli.opening import open_async
from lowtide.cli.options import Settings
from lowtide.cli.screen import ProgressBars, can_redraw, stderr_console
from lowtide.cli.serve import check_extra
from lowtide.errors import StorageError, UsageError
from lowtide.option import Group
from lowtide.progress import Progress
from lowtide.serve.batch_files import Asked, AskedLines, Results, Stream

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

REPORT_INTERVAL_S = 60.0
"""Time between two progress lines where no progress bar can be drawn."""


@takes(Group.BATCH, "served_name", Group.ENGINE, Group.HUB, "verbose", "config")
def batch(model: ModelName, *, settings: Settings) -> None:
    """Answer a file of requests, one per line; an interrupted run resumes."""
    check_extra("batch")
    if settings.flag("ray") and settings.text("policy_file") is not None:
        raise UsageError(
            "--policy-file names a file of this machine, and the nodes of --ray have none: leave "
            "one of them out, or install the policy there as a package with an entry point in "
            "lowtide.policies."
        )
    source, target = settings.text("input"), settings.text("output")
    if source is None or target is None:
        raise UsageError("batch needs two files: -i FILE of requests, -o FILE for the answers.")
    shard = parse_shard(settings.text("shard") or "1/1")
    from lowtide.serve.service import name_of

    served_name = settings.text("served_name") or name_of(model)
    only = None if settings.flag("any_model") else served_name
    with _input(source) as file:
        lines = AskedLines(file, only)
        mine = lines.shard(*shard)
        in_order = settings.flag("in_order")
        with _output(target, file, lines, mine if in_order else ()) as results:
            pending = [asked for asked in mine if asked.custom_id not in results.done]
            stopped = 0
            if pending:
                try:
                    run = _Run(model, served_name, lines, pending, results, settings)
                    stopped = _answered(run)
                except KeyboardInterrupt:
                    stopped = signal.SIGINT
                except Terminated as ended:
                    stopped = ended.number
            if isinstance(results, Results):
                results.sync()
                if in_order and not stopped:
                    results.sort(lines.lines)  # the file may hold answers of other shards, too
            num_errors = _report(results, mine, target, bool(stopped))
            if stopped:
                raise typer.Exit(128 + stopped)
            if num_errors and settings.flag("strict"):
                raise typer.Exit(EXIT_FAILURE)


def parse_shard(text: str) -> tuple[int, int]:
    """Read `2/5` as (2, 5). Raises UsageError."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise UsageError(f"--shard {text!r:.80} must be like 2/5, the second of five parts.")
    return index, count


@contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    """Open the request lines as a file that can be read twice."""
    if name == "-":
        with _kept(sys.stdin.buffer) as file:
            yield file
        return
    try:
        opened = open(name, "rb")
    except OSError as error:
        told = f"Input {name} cannot be read: {error.strerror}"
        raise StorageError(f"{told}; give a file of requests, or - for standard input.") from error
    with opened, nullcontext(opened) if opened.seekable() else _kept(opened) as file:
        yield file


@contextmanager
def _kept(pipe: IO[bytes]) -> Iterator[IO[bytes]]:
    """Copy a pipe to a temporary file."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(TemporaryFile())
            shutil.copyfileobj(pipe, file)
            file.seek(0)
        except OSError as error:
            raise StorageError(
                f"The input cannot be copied to a temporary file: {error.strerror}. Set TMPDIR to "
                "a folder with room, or name a file."
            ) from error
        yield file


@contextmanager
def _output(
    name: str, source: IO[bytes], lines: AskedLines, order: Sequence[Asked]
) -> Iterator[Results | Stream]:
    made: Results | Stream
    if name == "-":
        _check_stdout(source)
        made = Stream(sys.stdout.buffer, order)
    else:
        made = Results.open(Path(name), source, {each.custom_id: each for each in lines.lines})
    with closing(made):
        yield made


def _check_stdout(source: IO[bytes]) -> None:
    """Raise UsageError if the answers would be appended to the request file."""
    try:
        found = os.fstat(sys.stdout.fileno())
    except OSError:  # closed; writing the first answer reports it
        return
    if stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(source.fileno())):
        raise UsageError("Standard output is the input: name another file for the answers.")


@dataclass(frozen=True, slots=True)
class _Run:
    """The pending lines of a batch, the model that answers them, and where answers go."""

    model: str
    served_name: str
    lines: AskedLines
    pending: list[Asked]
    results: Results | Stream
    settings: Settings

    @property
    def at_once(self) -> int | None:
        """Number of lines that run at once; None: not given."""
        given = self.settings["at_once"]
        return given if isinstance(given, int) else None


def _answered(run: _Run) -> int:
    """Answer the pending lines; return the signal that stopped the run, or 0."""
    if run.settings.flag("ray"):
        return _answered_on_cluster(run)
    from lowtide.serve.batch import answer_all, answering, default_at_once

    llm = open_async(run.model, run.settings)
    reraise_signal()  # an import may have dropped what a signal raised
    show_plan(llm, run.settings)
    at_once = default_at_once(llm) if run.at_once is None else run.at_once

    async def answer() -> int:
        with _progress() as progress, _signals() as signals:
            try:
                async with llm, answering(llm, run.served_name, at_once) as answerer:
                    await answer_all(
                        answerer,
                        run.lines,
                        run.pending,
                        run.results,
                        at_once,
                        signals.stop,
                        progress,
                    )
            except asyncio.CancelledError:
                if not signals.number:
                    raise
        return signals.number

    return asyncio.run(answer())


def _answered_on_cluster(run: _Run) -> int:
    """Answer the pending lines on a Ray cluster.

    Lines that were under way when a signal came are answered again by the next run.
    """
    check_extra("batch --ray", ("ray",), "ray")
    from lowtide.serve.batch_ray import answer_on_cluster

    with _progress() as progress:
        answer_on_cluster(
            run.model,
            run.settings.engine_options(),
            run.served_name,
            run.lines,
            run.pending,
            run.results,
            run.at_once,
            progress,
        )
    return 0


class _Signals:
    """Handler of Ctrl-C, SIGTERM and SIGHUP.

    The first signal lets the lines under way finish; the second cancels them.
    """

    def __init__(self) -> None:
        self.number, self.stop = 0, asyncio.Event()
        self._task = asyncio.current_task()

    def hear(self, number: int) -> None:
        if self.number and self._task is not None:
            self._task.cancel()
            return
        self.number = number
        self.stop.set()
        stderr_console().print(
            "lowtide: finishing the lines under way; press again to stop at once."
        )


@contextmanager
def _signals() -> Iterator[_Signals]:
    loop, signals = asyncio.get_running_loop(), _Signals()
    before = {number: signal.getsignal(number) for number in _ENDING}
    heard = [number for number in _ENDING if before[number] != signal.SIG_IGN]  # as under nohup
    for number in heard:
        loop.add_signal_handler(number, signals.hear, number)
    try:
        yield signals
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


def _progress() -> AbstractContextManager[Progress]:
    """Return a progress bar on a terminal, elsewhere a line every minute."""
    return ProgressBars() if can_redraw(stderr_console()) else nullcontext(_Lines())


class _Lines:
    """Print progress and the expected end every minute."""

    def __init__(self) -> None:
        self._begun_s = self._told_s = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= REPORT_INTERVAL_S:
            self._told_s = now_s
            left = timedelta(seconds=round((now_s - self._begun_s) / done * (total - done)))
            stderr_console().print(f"{stage}: {done:,} of {total:,}, about {left} more")


def _report(results: Results | Stream, mine: list[Asked], target: str, is_stopped: bool) -> int:
    """Print how many lines are answered; return the number of errors."""
    num_done = sum(asked.custom_id in results.done for asked in mine)
    num_errors = sum(asked.custom_id in results.errors for asked in mine)
    errors = f", {num_errors:,} with an error" if num_errors else ""
    again = "; run again to continue" if is_stopped and target != "-" else ""
    stderr_console().print(f"{num_done:,} of {len(mine):,} lines are answered{errors}{again}.")
    return num_errors
