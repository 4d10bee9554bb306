"""Kept sequences on disk: finds and restores the beginning of a prompt, and writes new ones."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import IntArray
from lowtide.decode.sequence_writer import SequenceWriter
from lowtide.errors import LowtideError
from lowtide.files.array_file import Contradiction
from lowtide.files.kept_file import MODEL_BYTES, Chunk, FileHead, KeyLayout, num_common
from lowtide.files.own_folder import FolderEntry
from lowtide.files.stored_files import StoredFiles
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.reading.kept_chunks import ChunkReader

_log = logging.getLogger(__name__)


class StoredBeginning(NamedTuple):
    """A file with the keys and values of a prompt's first `num_tokens` tokens."""

    entry: FolderEntry
    head: FileHead
    num_tokens: int


class StoredSequences:
    """One model's stored sequences. Used on the engine's thread, between passes.

    Faults of files or the disk are logged; they are never a request's error.
    """

    def __init__(
        self,
        files: StoredFiles,
        digest: bytes,
        model_name: str,
        kv_cache: KVCache,
        layout: KeyLayout,
    ) -> None:
        """digest: of everything that determines a token's keys and values."""
        self._files, self._digest, self._layout = files, digest, layout
        self._kv_cache = kv_cache
        self._reader = ChunkReader(layout, files.key)
        self._writer = SequenceWriter(files, kv_cache, layout, model_name)

    def find(self, prompt: IntArray, block_length: int, unit: int) -> StoredBeginning | None:
        """Return the file with the longest beginning of a prompt, in multiples of `unit` tokens.

        With states it is the file with the largest snapshot in what they have in common, and with
        windows one that has all that the next row sees.
        """
        best = None
        try:
            stored = self._files.of_model(self._model(block_length))
        except OSError as error:
            _log.warning("%s cannot be listed: %s.", self._files.folder.path, error.strerror)
            return None
        for entry, head in stored:
            sizes = len(head.tokens), len(head.snapshots), head.firsts
            are_windows = len(head.firsts) == len(self._layout.windows)
            if not are_windows or entry.num_bytes != self._layout.file_bytes(*sizes):
                self._files.distrust(entry, f"it has {entry.num_bytes} bytes")
                continue
            num_tokens = self._layout.largest_cut(head, num_common(head.tokens, prompt), unit)
            if best is None or num_tokens > best.num_tokens:
                best = StoredBeginning(entry, head, num_tokens)
        return best

    def restore(self, found: StoredBeginning, kv: KVRange) -> bool:
        """Read keys, values and snapshots into a new range with memory, after `begin_at`.

        Returns False if the file is damaged or gone; `find` then returns another.
        """
        folder, name, num_tokens = self._files.folder, found.entry.name, found.num_tokens
        firsts = self._kv_cache.firsts(kv)
        rows = [
            self._kv_cache.rows_of(kv, first, num_tokens - first, group)
            for group, first in enumerate(firsts)
        ]
        states = self._kv_cache.restored_states(kv, num_tokens, found.head.snapshots)

        def place(chunk: Chunk, content: NDArray[np.uint8]) -> None:
            if chunk.snapshot:
                target = states[chunk.snapshot]
                target[chunk.offset : chunk.offset + chunk.num_bytes] = content
                return
            tokens, start = chunk.tokens, firsts[chunk.group]
            first, stop = max(tokens.start, start), min(tokens.stop, num_tokens)
            found_here = self._layout.of_group(chunk.group).content(content, len(tokens))
            for own, stored in zip(rows[chunk.group], found_here, strict=True):
                own[:, :, :, first - start : stop - start] = stored[
                    :, :, :, first - tokens.start : stop - tokens.start
                ]

        chunks = [
            chunk
            for chunk in self._layout.all_chunks(found.head)
            if chunk.snapshot in states
            or max(chunk.tokens.start, firsts[chunk.group]) < min(chunk.tokens.stop, num_tokens)
        ]
        try:
            self._reader.read(folder.open(name), found.head, chunks, place)
        except (Contradiction, LowtideError, OSError) as error:
            self._files.distrust(found.entry, error)
            return False
        self._kv_cache.claim(kv, 0, num_tokens)
        self._kv_cache.snapshot(kv, may_drop=False)
        with suppress(OSError):
            folder.touch(name)
        return True

    def offer(self, tokens: IntArray, block_length: int, kv: KVRange) -> None:
        """Queue a newly kept range for writing, beside passes."""
        self._writer.offer(self._model(block_length), tokens, kv)

    def drain(self) -> None:
        """Wait until everything kept is written."""
        self._writer.drain()

    def stop_waiting(self) -> None:
        """Make a pending read fail soon. May be called on any thread."""
        self._reader.stop_waiting()

    def close(self) -> None:
        """End all threads, and close the folder unless one still uses it."""
        if all([self._writer.close(), self._reader.close()]):
            self._files.close()

    def _model(self, block_length: int) -> bytes:
        """Return the digest that names files.

        It includes the block length, because tokens of a block see each other.
        """
        content = self._digest + block_length.to_bytes(8, "little")
        return hashlib.blake2b(content, digest_size=MODEL_BYTES).digest()
