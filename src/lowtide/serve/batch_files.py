"""The two files of a batch: input lines with requests, and output lines with answers.

Both have the form of OpenAI's batches: a JSON object per line, identified by `custom_id`. Only ids
and positions of lines are held in memory. Imports nothing of the `serve` extra.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from lowtide.errors import StorageError, UsageError
from lowtide.files.json_file import shown
from lowtide.files.whole_file import whole_file

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that a line may use; others get an error in their output line."""

HEAD = b'{"id": "batch_req_'
"""Beginning of every answer, by which a partial answer is recognised."""

SYNC_S = 1.0
"""Interval at which results are flushed to disk."""

MAX_LINE_BYTES = 64 << 20
"""Longer lines are refused: no request is that long."""

MAX_DEPTH = 512
"""Deepest nesting of a line: Python reads and writes it from any depth of its own calls."""


class Asked(NamedTuple):
    """An input line's position in its file, and the id of its answer."""

    number: int  # from 1
    custom_id: str
    start: int  # bytes
    num_bytes: int


class AskedLines:
    """Index of an input file's lines; the file stays open until `close`."""

    def __init__(self, file: IO[bytes], served_name: str | None = None) -> None:
        """Read and check all lines.

        served_name: the only model that lines may name; None: any. Raises UsageError with the
        number of the first wrong line, StorageError if the file cannot be read.
        """
        self._file = file
        try:
            self.lines = list(_indexed(file, served_name))
        except OSError as error:
            raise _unreadable(error) from error
        if not self.lines:
            raise UsageError("The input has no lines: there is nothing to answer.")

    def request(self, asked: Asked) -> dict[str, Any]:
        """Read a line again. Raise UsageError if the file has changed."""
        try:
            self._file.seek(asked.start)
            text = self._file.read(asked.num_bytes)
        except OSError as error:
            raise _unreadable(error) from error
        try:
            read = _checked(json.loads(text), asked.number)
        except (ValueError, RecursionError, UsageError):
            read = {}
        if read.get("custom_id") != asked.custom_id:
            raise UsageError(f"Line {asked.number} of the input was changed while it was answered.")
        return read

    def shard(self, index: int, count: int) -> list[Asked]:
        """Return every `count`-th line, starting with the `index`-th (from 1)."""
        return self.lines[index - 1 :: count]


@dataclass
class Results:
    """A locked output file, in which each answer is one complete line.

    Made by `open`. done: ids with an answer. errors: those whose answer is an error.
    """

    path: Path
    file: io.FileIO
    done: dict[str, tuple[int, int]]  # start and length in bytes, by id
    errors: set[str] = field(default_factory=set)
    synced_s: float = 0.0

    @classmethod
    def open(cls, path: Path, source: IO[bytes] | None, known: Mapping[str, Asked]) -> Results:
        """Open an earlier run's output or a new file; an incomplete last line is cut off.

        source: the input, which must be another file. known: the input's lines by id. Raises
        UsageError for a file that is not an output of this input or is being written by another
        run, StorageError if it cannot be written.
        """
        try:
            # Not truncated, and never replaced: what is there are answers.
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            file = io.FileIO(number, "r+")
        except OSError as error:
            raise _unwritable(path, error, " Name another file.") from error
        try:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{path} is not a file: name one, or - for standard output.")
            if source is not None and os.path.samestat(found, os.fstat(source.fileno())):
                raise UsageError(f"{path} is the input: name another file for the answers.")
            _lock(file, path)
            results = cls(path, file, {})
            results._read(known)
            return results
        except BaseException:
            file.close()
            raise

    def write(self, custom_id: str, line: bytes, is_error: bool) -> None:
        """Append an answer. Raise StorageError, leaving no part of it in the file."""
        start = self.file.seek(0, os.SEEK_END)
        try:
            left = memoryview(line)
            while left:  # a full disk takes a part, and then refuses
                left = left[self.file.write(left) :]
        except OSError as error:
            self._cut(start)
            way_out = f" {len(self.done)} answers are in it; make room and run again to go on."
            raise _unwritable(self.path, error, way_out) from error
        self.done[custom_id] = (start, len(line))
        if is_error:
            self.errors.add(custom_id)
        if time.monotonic() - self.synced_s >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Flush to disk, so that a power failure loses nothing."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            way_out = f" {len(self.done)} answers were written; make room and run again to go on."
            raise _unwritable(self.path, error, way_out) from error
        self.synced_s = time.monotonic()

    def sort(self, order: list[Asked]) -> None:
        """Rewrite the file atomically, with its answers in the order of `order`."""
        places = [self.done[asked.custom_id] for asked in order if asked.custom_id in self.done]
        if places == sorted(places):
            return
        with whole_file(self.path, "output", _is_output) as sorted_file:
            with self._reader() as reader:
                for start, num_bytes in places:
                    reader.seek(start)
                    sorted_file.write(reader.read(num_bytes))

    def close(self) -> None:
        """Flush the file and release its lock, however the run has ended."""
        with suppress(OSError):
            os.fsync(self.file.fileno())
        self.file.close()

    def _cut(self, num_bytes: int) -> None:
        try:
            self.file.truncate(num_bytes)
        except OSError:  # the next run cuts what stayed
            return

    def _reader(self) -> IO[bytes]:
        """Open the same file from its beginning, with a larger buffer."""
        self.file.seek(0)
        return os.fdopen(os.dup(self.file.fileno()), "rb")

    def _read(self, known: Mapping[str, Asked]) -> None:
        start = 0
        with self._reader() as reader:
            for number, line in enumerate(reader, 1):
                is_whole = line.endswith(b"\n")
                if not is_whole and (line.startswith(HEAD) or HEAD.startswith(line)):
                    break  # a run ended while writing it
                answer = _answer(line) if is_whole else None
                if answer is None or answer["custom_id"] not in known:
                    raise UsageError(
                        f"{self.path} has other lines than answers to this input (line {number}): "
                        "name another file for them."
                    )
                self.done[answer["custom_id"]] = (start, len(line))
                if is_error(answer):
                    self.errors.add(answer["custom_id"])
                start += len(line)
        self._cut(start)


class Stream:
    """Answers on standard output, which cannot be read back."""

    def __init__(self, file: IO[bytes], order: Sequence[Asked] = ()) -> None:
        """order: all lines, in the output's order; by default answers are printed as they come."""
        self._file = file
        self._left = deque(asked.custom_id for asked in order)
        self._held: dict[str, bytes] = {}
        self.done: dict[str, tuple[int, int]] = {}
        self.errors: set[str] = set()

    def write(self, custom_id: str, line: bytes, is_error: bool) -> None:
        """Print an answer, or hold it back until all earlier ones are printed.

        Raises BrokenPipeError if the reader has gone.
        """
        self.done[custom_id] = (0, 0)
        if is_error:
            self.errors.add(custom_id)
        self._held[custom_id] = line
        if not self._left:
            self._print(custom_id)
        while self._left and self._left[0] in self._held:
            self._print(self._left.popleft())

    def close(self) -> None:
        """Print what is still held back, because the run has ended early."""
        while self._held:
            custom_id = self._left.popleft()
            if custom_id in self._held:
                self._print(custom_id)

    def _print(self, custom_id: str) -> None:
        self._file.write(self._held.pop(custom_id))
        self._file.flush()


def is_error(answer: Mapping[str, Any]) -> bool:
    """Return True if an answer's line is an error."""
    response = answer.get("response")
    return bool(answer.get("error")) or not response or response.get("status_code") != 200


def _is_output(file: IO[bytes]) -> bool:
    return file.read(len(HEAD)) == HEAD


def _indexed(file: IO[bytes], served_name: str | None) -> Iterator[Asked]:
    seen, start = dict[str, int](), 0
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(f"Line {number} of the input is longer than {MAX_LINE_BYTES} bytes.")
        if line.strip():
            read = _parsed(line, number)
            custom_id = read["custom_id"]
            if custom_id in seen:
                raise UsageError(
                    f"Line {number} of the input has the custom_id of line {seen[custom_id]}, "
                    f"{shown(custom_id)}: give each line one of its own."
                )
            _check_model(read, number, served_name)
            seen[custom_id] = number
            yield Asked(number, custom_id, start, len(line))
        start += len(line)


def _parsed(line: bytes, number: int) -> dict[str, Any]:
    try:
        read = _checked(json.loads(line), number)
    except ValueError:
        raise UsageError(
            f"Line {number} of the input is not JSON; each line is one request, "
            "an object in OpenAI's batch format."
        ) from None
    except RecursionError:
        raise _too_deep(number) from None
    level: list[object] = [read]
    for _ in range(MAX_DEPTH):
        level = [part for each in level for part in _parts(each)]
        if not level:
            return read
    raise _too_deep(number)


def _too_deep(number: int) -> UsageError:
    return UsageError(f"Line {number} of the input is nested too deeply; make it flatter.")


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _checked(read: object, number: int) -> dict[str, Any]:
    """Return a valid batch line. Raise UsageError for anything else."""
    if not isinstance(read, dict):
        raise UsageError(f"Line {number} of the input is not a JSON object.")
    for name, kind, noun in (
        ("custom_id", str, "a text"),
        ("url", str, "a path such as /v1/chat/completions"),
        ("body", dict, "an object"),
    ):
        if name not in read:
            raise UsageError(f"Line {number} of the input has no {name}: it must be {noun}.")
        if not isinstance(read[name], kind):
            raise UsageError(
                f"Line {number} of the input: {name} must be {noun}, not {shown(read[name])}."
            )
    if read.get("method", "POST") != "POST":
        raise UsageError(
            f"Line {number} of the input: method must be POST, not {shown(read['method'])}."
        )
    return read


def _check_model(read: Mapping[str, Any], number: int, served_name: str | None) -> None:
    model = read["body"].get("model")
    if served_name is None or model is None or model == served_name:
        return
    raise UsageError(
        f"Line {number} of the input asks for the model {shown(model)}, and this is "
        f"{served_name!r}: give --served-name, or --any-model to answer all lines with it."
    )


def _answer(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(answer, dict) and isinstance(answer.get("custom_id"), str)
    return answer if is_ours and {"response", "error"} <= answer.keys() else None


def _unreadable(error: OSError) -> StorageError:
    return StorageError(f"The input cannot be read: {error.strerror}; begin again with a copy.")


def _unwritable(path: Path, error: OSError, way_out: str) -> StorageError:
    return StorageError(f"Output {path} cannot be written: {error.strerror}.{way_out}")


def _lock(file: io.FileIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that has just sorted its answers has put another file there.
        is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        is_there = False
    if not is_there:
        raise UsageError(f"Another run writes to {path}; wait for it, or name another.")
