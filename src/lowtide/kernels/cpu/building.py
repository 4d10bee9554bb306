"""Compilation of the kernels' files, each once per machine, into the user's cache.

This process will run the cached code. So its folder and files must belong to this user alone, no
other user may be able to replace the folder, and a digest at the end of each file shows that it is
whole. An object is stored as soon as it is compiled, so it survives a failure of others. A lock is
held during compilation and ends with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from lowtide.errors import StorageError
from lowtide.files.folders import cache_folder
from lowtide.kernels.cpu.compiler import FLAGS, POLL_S, Running, find_compiler, run, version_of
from lowtide.kernels.cpu.sources import PACKED, ROUNDED, Digests, Part
from lowtide.progress import Progress, no_progress

_LIMIT_S = 120.0  # of a file
_WHEEL_LIMIT_S = 900.0  # the same for a wheel: no answer waits, and other builds may use the cores
_REPORT_S = 0.5  # between two reports
_DAY_S = 86400.0
_OLD_S = {  # older files are removed: see `_remove_old`
    **dict.fromkeys(("build-*", "*.lock"), _DAY_S),
    **dict.fromkeys(("*.so", "*.o"), 30 * _DAY_S),
}
_DIGEST_BYTES = hashlib.sha256().digest_size
SYSTEM_FOLDERS = tuple(map(Path, ("/", "/home", "/tmp", "/var", "/var/tmp")))
"""Folders that belong to root on every Linux, whatever root's number in a container."""

_TYPE_S = {f"{PACKED}/": 2.5, f"{ROUNDED}/": 3.5}
_FILE_S = {"products": 4.0, "quantised_pack": 4.0, "int8_columns": 3.5, "packed": 2.5}
_OTHER_FILE_S = 1.0
"""Seconds of one core that compiling a file takes, by its part or name; for the time estimate."""

_log = logging.getLogger(__name__)


def kept_libraries(parts: Sequence[Part], report: Progress = no_progress) -> list[Path]:
    """Return the libraries of these parts in the user's cache; compile the missing ones.

    Raises UnsupportedError if they cannot be compiled, StorageError if the cache cannot be written
    or is not this user's own.
    """
    compiler = find_compiler()
    try:
        digests = Digests(version_of(compiler))
        folder = _private_folder()
        paths = [folder / library_name(each, digests) for each in parts]
        for path in paths:
            _note_use(path)  # first, so that no other process removes it as old
        missing = [
            each for each, path in zip(parts, paths, strict=True) if _whole_image(path) is None
        ]
        if missing:
            _remove_old(folder)
            _Build(folder, [compiler], digests, _LIMIT_S, report).make(missing)
    except OSError as error:
        raise StorageError(
            f"{error.filename or cache_folder()} cannot be used: {error.strerror or error}; "
            "XDG_CACHE_HOME names another cache folder."
        ) from error
    return paths


def build_library(part: Part, folder: Path, compiler: Sequence[str], machine: str) -> None:
    """Compile a part into a folder of a wheel, named by its sources and machine alone.

    compiler: command that compiles for `machine`. Raises UnsupportedError if it fails.
    """
    digests = Digests(machine=machine)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        _Build(Path(name), compiler, digests, _WHEEL_LIMIT_S).make([part])
        shutil.copy(Path(name) / library_name(part, digests), folder)


def library_name(part: Part, digests: Digests) -> str:
    """Return the file name of a part."""
    return f"{part.name.replace('/', '-')}-{digests.of(part.sources, part.folder)}.so"


class _File(NamedTuple):
    """Source file, the path of its object, and the expected seconds of compilation."""

    source: Path
    object: Path
    includes: Path
    expected_s: float


class _Build:
    """Build of libraries in a folder that other processes share."""

    def __init__(
        self,
        folder: Path,
        compiler: Sequence[str],
        digests: Digests,
        limit_s: float,
        report: Progress = no_progress,
    ) -> None:
        self._folder, self._compiler, self._digests = folder, compiler, digests
        self._limit_s, self._report = limit_s, report

    def make(self, parts: Sequence[Part]) -> None:
        of_parts = [[self._file(each, source) for source in each.sources] for each in parts]
        files = [file for of_part in of_parts for file in of_part]
        missing = [file for file in files if _whole_image(file.object) is None]
        if missing:
            _log_start(missing)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="build-") as scratch:
            self._compile(missing, Path(scratch))
            for each, of_part in zip(parts, of_parts, strict=True):
                path = self._folder / library_name(each, self._digests)
                self._link([file.object for file in of_part], path, Path(scratch))

    def _file(self, part: Part, source: Path) -> _File:
        name = f"{source.stem}-{self._digests.of([source], part.folder)}.o"
        of_type = [s for start, s in _TYPE_S.items() if part.name.startswith(start)]
        expected_s = of_type[0] if of_type else _FILE_S.get(source.stem, _OTHER_FILE_S)
        return _File(source, self._folder / name, part.folder, expected_s)

    def _compile(self, files: Sequence[_File], scratch: Path) -> None:
        """Compile files, one per core at a time, the longest first.

        Files that another process is compiling are waited for.
        """
        watch = _Watch(files, self._report)
        waiting = sorted(files, key=lambda file: -file.expected_s)
        running: dict[_File, tuple[Running, _Lock]] = {}
        try:
            while waiting or running:
                for file in list(waiting):
                    if len(running) >= len(os.sched_getaffinity(0)):
                        break
                    lock = _Lock.take(file.object.with_suffix(".lock"))
                    if lock is None:
                        continue
                    waiting.remove(file)
                    if _whole_image(file.object) is None:
                        running[file] = self._start(file, scratch), lock
                    else:
                        lock.release()  # another has compiled it
                for file, (command, lock) in list(running.items()):
                    if command.has_ended():
                        del running[file]
                        with lock:
                            command.output()
                            _keep(scratch / file.object.name, file.object)
                watch.report({file: each.elapsed_s for file, (each, _) in running.items()}, waiting)
                time.sleep(POLL_S if running else 10 * POLL_S)
        finally:
            for command, lock in running.values():
                with lock:
                    command.stop()

    def _start(self, file: _File, scratch: Path) -> Running:
        made = str(scratch / file.object.name)
        includes = f"-I{file.includes}"
        command = [*self._compiler, *FLAGS, includes, "-c", str(file.source), "-o", made]
        return Running(command, scratch, self._limit_s)

    def _link(self, objects: Sequence[Path], path: Path, scratch: Path) -> None:
        inputs = []
        for number, each in enumerate(objects):
            image = _whole_image(each)
            if image is None:
                raise StorageError(f"{each} was changed while it was used; try again.")
            _note_use(each)
            inputs.append(scratch / f"{path.stem}-{number}.o")
            inputs[-1].write_bytes(image)
        made = scratch / path.name
        command = [*self._compiler, *FLAGS, "-shared", *map(str, inputs), "-o", str(made)]
        run(command, scratch, self._limit_s)
        _keep(made, path)


def _log_start(files: Sequence[_File]) -> None:
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    left_s = max(sum(file.expected_s for file in files) / _num_at_once(files), 1)
    _log.warning("Compiling kernels for this processor (once): %s, about %.0f s.", count, left_s)


def _num_at_once(files: Sequence[_File]) -> int:
    return min(len(files), len(os.sched_getaffinity(0)))


class _Watch:
    """Progress report of a compilation, with an estimate of the time left."""

    def __init__(self, files: Sequence[_File], report: Progress) -> None:
        self._files, self._report = files, report
        self._start_s = self._reported_s = time.monotonic()

    def report(self, running: Mapping[_File, float], waiting: Sequence[_File]) -> None:
        """Report progress; running: elapsed seconds of each file."""
        now_s, left = time.monotonic(), {*running, *waiting}
        if left and now_s - self._reported_s < _REPORT_S:
            return
        self._reported_s = now_s
        all_s = sum(file.expected_s for file in self._files)
        left_s = sum(file.expected_s for file in left)
        left_s -= sum(min(s, 0.9 * file.expected_s) for file, s in running.items())
        done_s, elapsed_s = all_s - left_s, now_s - self._start_s
        # The expected speed at first, then the measured one.
        per_s = (done_s + _num_at_once(self._files)) / (elapsed_s + 1)
        more_s = max(left_s / per_s, 1)
        num_done, total = len(self._files) - len(left), len(self._files)
        line = f"compiling kernels: {num_done} of {total}, about {more_s:.0f} s more"
        self._report(line, num_done, total)


class _Lock:
    """Lock on the compilation of a file; released when the process ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Take the lock; None if another process holds it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks: two may compile the same
            pass
        return cls(path, descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        # A process that opened the file before it was removed finds the compiled object.
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _keep(made: Path, path: Path) -> None:
    """Append the digest to a file and move it to `path` atomically."""
    with made.open("ab") as file:  # loaders ignore what follows the sections
        file.write(hashlib.sha256(made.read_bytes()).digest())
    made.chmod(0o700)
    made.replace(path)


def _private_folder() -> Path:
    """Return the folder of cached kernels; StorageError if others could write into it."""
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or not _is_private(folder.stat()):
        raise StorageError(
            f"{folder} does not belong to this user alone; remove it, or make it so (chmod 700)."
        )
    for parent in sorted({*folder.absolute().parents, *folder.resolve().parents}):
        _check_parent(parent, folder)
    return folder


def _check_parent(parent: Path, folder: Path) -> None:
    """Check that no other user can replace `folder` by renaming entries of `parent`.

    Raises StorageError if a user other than this one and root can. Groups are trusted: many systems
    give every user one of their own.
    """
    facts = parent.stat()
    is_open = facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX
    is_trusted = parent in SYSTEM_FOLDERS or facts.st_uid in (0, os.getuid())
    if is_trusted and not is_open:
        return
    why = "may be written by anybody" if is_open else "belongs to another user"
    raise StorageError(
        f"{parent} {why}, who could replace the compiled kernels in {folder}; XDG_CACHE_HOME names "
        "another cache folder."
    )


def _is_private(facts: os.stat_result) -> bool:
    """Return True if the file is the user's own and nobody else may write it."""
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _whole_image(path: Path) -> bytes | None:
    """Read a cached file; None unless it is this user's and its digest is right."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or not _is_private(facts):
            return None
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    image, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None


def _note_use(path: Path) -> None:
    with suppress(OSError):  # a cache that may only be read, or has no such file
        os.utime(path, follow_symlinks=False)


def _remove_old(folder: Path) -> None:
    """Remove leftovers of killed compilations, and files of old sources."""
    for pattern, limit_s in _OLD_S.items():
        for path in folder.glob(pattern):
            with suppress(OSError):  # another process is at it, too
                if time.time() - path.lstat().st_mtime > limit_s:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
