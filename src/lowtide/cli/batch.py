"""`lowtide batch`: a file of requests, answered line by line into another file."""

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
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import typer

from lowtide.cli.command import EXIT_FAILURE, takes
from lowtide.cli.generate import ModelName, show_plan
from lowtide.cli.interrupts import Terminated, end_if_asked
from lowtide.cli.opening import open_async
from lowtide.cli.options import Settings
from lowtide.cli.screen import ProgressBars, can_redraw, stderr_console
from lowtide.cli.serve import check_extra
from lowtide.errors import StorageError, UsageError
from lowtide.option import Group
from lowtide.progress import Progress
from lowtide.serve.batch_files import Asked, AskedLines, Results, Stream

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TOLD_EVERY_S = 60.0
"""Between two lines on how far it is, where no bar can be drawn."""


@takes(Group.BATCH, "served_name", Group.ENGINE, Group.HUB, "verbose", "config")
def batch(model: ModelName, *, settings: Settings) -> None:
    """Answer a file of requests, a line each; a run that was ended goes on where it was."""
    check_extra("batch")
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
                    stopped = _answered(model, served_name, lines, pending, results, settings)
                except KeyboardInterrupt:
                    stopped = signal.SIGINT
                except Terminated as ended:
                    stopped = ended.number
            if isinstance(results, Results):
                results.sync()
                if in_order and not stopped:
                    results.sort(lines.lines)  # those of other shards, too, which may be in it
            num_errors = _tell(results, mine, target, bool(stopped))
            if stopped:
                raise typer.Exit(128 + stopped)
            if num_errors and settings.flag("strict"):
                raise typer.Exit(EXIT_FAILURE)


def parse_shard(text: str) -> tuple[int, int]:
    """Read `2/5` as (2, 5). Raises UsageError."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise UsageError(f"--shard {text!r:.80} must be as 2/5: the second of five parts.")
    return index, count


@contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    """The lines that ask, in a file that can be read again."""
    if name == "-":
        with _kept(sys.stdin.buffer) as file:
            yield file
        return
    try:
        opened = open(name, "rb")
    except OSError as error:
        raise StorageError(f"Input {name} cannot be read: {error.strerror}.") from error
    with opened, nullcontext(opened) if opened.seekable() else _kept(opened) as file:
        yield file


@contextmanager
def _kept(pipe: IO[bytes]) -> Iterator[IO[bytes]]:
    """What comes through a pipe, in a temporary file."""
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
    """Raises UsageError where answers would be appended to the lines that ask."""
    try:
        found = os.fstat(sys.stdout.fileno())
    except OSError:  # none, which the first answer tells
        return
    if stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(source.fileno())):
        raise UsageError("Standard output is the input: name another file for the answers.")


def _answered(
    model: str,
    served_name: str,
    lines: AskedLines,
    pending: list[Asked],
    results: Results | Stream,
    settings: Settings,
) -> int:
    """Answers what is left; the signal that ended it, or 0."""
    if settings.flag("ray"):
        return _answered_on_cluster(model, served_name, lines, pending, results, settings)
    from lowtide.serve.batch import answer_all, answering, default_at_once

    llm = open_async(model, settings)
    end_if_asked()  # an import may have dropped what a signal raised
    show_plan(llm, model, settings)
    given = settings["at_once"]
    at_once = given if isinstance(given, int) else default_at_once(llm)

    async def run() -> int:
        with _progress() as progress, _signals() as signals:
            try:
                async with llm, answering(llm, served_name, at_once) as answerer:
                    await answer_all(
                        answerer, lines, pending, results, at_once, signals.stop, progress
                    )
            except asyncio.CancelledError:
                if not signals.number:
                    raise
        return signals.number

    return asyncio.run(run())


def _answered_on_cluster(
    model: str,
    served_name: str,
    lines: AskedLines,
    pending: list[Asked],
    results: Results | Stream,
    settings: Settings,
) -> int:
    """As `_answered`; lines under way at a signal are answered again by the next run."""
    check_extra("batch --ray", ("ray",), "ray")
    from lowtide.serve.batch_ray import answer_on_cluster

    given, options = settings["at_once"], settings.engine_options()
    at_once = given if isinstance(given, int) else None
    with _progress() as progress:
        answer_on_cluster(model, options, served_name, lines, pending, results, at_once, progress)
    return 0


class _Signals:
    """Ctrl-C, SIGTERM and SIGHUP: the first lets lines under way come to their end, a second does
    not.
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
        stderr_console().print("lowtide: ending the lines under way; once more ends at once.")


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
    """A bar on a terminal, elsewhere a line now and then."""
    return ProgressBars() if can_redraw(stderr_console()) else nullcontext(_Lines())


class _Lines:
    """Tells how far a run is every minute, and when it will end."""

    def __init__(self) -> None:
        self._begun_s = self._told_s = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            left = timedelta(seconds=round((now_s - self._begun_s) / done * (total - done)))
            stderr_console().print(f"{stage}: {done:,} of {total:,}, about {left} more")


def _tell(results: Results | Stream, mine: list[Asked], target: str, is_stopped: bool) -> int:
    """One line on what is answered; returns how many by an error."""
    num_done = sum(asked.custom_id in results.done for asked in mine)
    num_errors = sum(asked.custom_id in results.errors for asked in mine)
    errors = f", {num_errors:,} by an error" if num_errors else ""
    again = "; run again to go on" if is_stopped and target != "-" else ""
    stderr_console().print(f"{num_done:,} of {len(mine):,} lines are answered{errors}{again}.")
    return num_errors
