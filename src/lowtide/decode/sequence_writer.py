"""Writes kept sequences to files, in a thread of its own, while passes run.

A kept sequence may be evicted at any time; a partly written file is then discarded.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from functools import partial
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.config import format_size
from lowtide.core import IntArray
from lowtide.errors import StorageError
from lowtide.files.kept_file import FileHead, KeyLayout, num_common, seal
from lowtide.files.stored_files import StoredFiles, file_name
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.threads.daemon_pool import DaemonPool

SETTLE_S = 2.0
"""Delay before writing, so that a conversation that continues meanwhile is not written twice."""

DRAIN_LIMIT_S = 30.0
CLOSE_LIMIT_S = 1.0

_log = logging.getLogger(__name__)


class _WaitingSequence(NamedTuple):
    """A sequence to write at `due_s`, if it is still kept then."""

    model: bytes
    tokens: IntArray
    kv: KVRange
    num_kept: int  # as `KVCache.copy_kept` is asked
    due_s: float


class _RangeGone(Exception):
    """The sequence's range has been given to another one."""


class SequenceWriter:
    """Owns the writing thread, which starts with the first sequence."""

    def __init__(
        self, files: StoredFiles, kv_cache: KVCache, layout: KeyLayout, model_name: str
    ) -> None:
        self._files, self._kv_cache, self._layout = files, kv_cache, layout
        self._model_name = model_name
        self._thread = DaemonPool(1, "lowtide-store")
        self._is_hurried = threading.Event()
        self._stored: dict[str, KVRange] = {}  # by the name of the file that has all of it

    def offer(self, model: bytes, tokens: IntArray, kv: KVRange) -> None:
        """Queue a newly kept range for writing."""
        waiting = _WaitingSequence(model, tokens, kv, kv.num_kept, monotonic() + SETTLE_S)
        try:
            self._thread.submit(partial(self._write_or_log, waiting))
        except StorageError as error:
            self._log_failure(error)

    def drain(self) -> None:
        """Wait until all queued ranges that are still kept are written, at most `DRAIN_LIMIT_S`."""
        self._is_hurried.set()
        if not self._thread.drain(DRAIN_LIMIT_S):
            self._log_failure(f"the disk has taken {DRAIN_LIMIT_S:g} s")

    def close(self) -> bool:
        """End the thread. Return False if it is still writing and uses the folder."""
        self._is_hurried.set()
        return self._thread.close(CLOSE_LIMIT_S)

    def _write_or_log(self, waiting: _WaitingSequence) -> int:
        """Write a sequence, or log why not; return the bytes written."""
        self._is_hurried.wait(max(0.0, waiting.due_s - monotonic()))
        try:
            return self._write(waiting)
        except _RangeGone:
            return 0
        except Exception as error:  # no fault of writing may fail a request
            self._log_failure(error)
            return 0

    def _write(self, waiting: _WaitingSequence) -> int:
        files, tokens = self._files, waiting.tokens
        snapshots = self._kv_cache.kept_snapshots(waiting.kv, waiting.num_kept)
        firsts = self._kv_cache.kept_firsts(waiting.kv, waiting.num_kept)
        if snapshots is None or firsts is None:
            raise _RangeGone
        stored = {entry.name: head for entry, head in files.of_model(waiting.model)}
        num_shared = {name: num_common(head.tokens, tokens) for name, head in stored.items()}
        for name, head in stored.items():
            is_cut = self._layout.largest_cut(head, len(tokens), 1) == len(tokens)
            if num_shared[name] == len(tokens) and is_cut and {*snapshots} <= {*head.snapshots}:
                files.folder.touch(name)  # all of it is there
                self._note_stored(name, waiting)
                return 0
        new_name = file_name(waiting.model, tokens)
        superseded = [
            name
            for name, head in stored.items()
            if num_shared[name] == len(head.tokens)
            and {*head.snapshots} <= {*snapshots}
            and name != new_name
        ]
        num_bytes = self._layout.file_bytes(len(tokens), len(snapshots), firsts)
        if num_bytes > files.most_bytes:
            raise StorageError(
                f"{len(tokens)} tokens take {format_size(num_bytes)} of cache_disk, which is "
                f"{format_size(files.most_bytes)}"
            )
        files.make_room(num_bytes, superseded)
        of_model = waiting.model, self._model_name
        head = FileHead.of(*of_model, tokens, snapshots, files.key, firsts)
        with files.folder.writing(new_name) as descriptor:
            _write_all(descriptor, head.stored)
            for chunk in self._chunks(waiting, head):
                _write_all(descriptor, chunk.data)
        for old in superseded:
            files.folder.remove(old)
        self._note_stored(new_name, waiting)
        return num_bytes

    def _note_stored(self, name: str, waiting: _WaitingSequence) -> None:
        """Mark a range as completely stored, and unmark ranges whose files are gone."""
        names = {entry.name for entry, _ in self._files.of_model(waiting.model)}
        for gone in self._stored.keys() - names:
            kv = self._stored.pop(gone)
            if kv not in self._stored.values():  # another file has what it became
                kv.num_stored = 0
        self._stored[name] = waiting.kv
        waiting.kv.num_stored = waiting.num_kept

    def _chunks(self, waiting: _WaitingSequence, head: FileHead) -> Iterator[NDArray[np.uint8]]:
        """Yield the chunks in stored form, each valid until the next. Raise _RangeGone."""
        layout, cache = self._layout, self._kv_cache
        held = waiting.kv, waiting.num_kept
        buffer = np.empty(layout.most_stored_bytes, np.uint8)
        for chunk in layout.all_chunks(head):
            stored = buffer[: chunk.stored_bytes]
            own = stored[: chunk.num_bytes]
            if chunk.snapshot:
                is_there = cache.copy_kept_states(*held, chunk.snapshot, chunk.offset, own)
            else:
                content = layout.of_group(chunk.group).content(stored, len(chunk.tokens))
                is_there = cache.copy_kept(*held, chunk.tokens.start, content, chunk.group)
            if not is_there:
                raise _RangeGone
            seal(stored, chunk, head, self._files.key)
            yield stored

    def _log_failure(self, reason: object) -> None:
        text = reason.strerror if isinstance(reason, OSError) else str(reason).rstrip(".")
        _log.warning("A conversation is not kept in %s: %s.", self._files.folder.path, text)


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
