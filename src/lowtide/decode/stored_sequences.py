"""Kept sequences on disk: what of a request's beginning is in a file, and what goes into one."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from typing import Any, NamedTuple

from numpy.typing import NDArray

from lowtide.core import IntArray
from lowtide.decode.sequence_writer import SequenceWriter
from lowtide.errors import LowtideError
from lowtide.files.array_file import Contradiction
from lowtide.files.kept_file import MODEL_BYTES, FileHead, KeyLayout, num_common
from lowtide.files.own_folder import FolderEntry
from lowtide.files.stored_files import StoredFiles
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.reading.kept_chunks import ChunkReader

_log = logging.getLogger(__name__)


class StoredBeginning(NamedTuple):
    """A file that has keys and values of a request's first `num_tokens` tokens."""

    entry: FolderEntry
    head: FileHead
    num_tokens: int


class StoredSequences:
    """Those of one model, in its KV cache and in files. On the engine's thread, between passes.

    Whatever is wrong with a file or the disk is a line in the log, never an error of a request.
    """

    def __init__(
        self,
        files: StoredFiles,
        digest: bytes,
        model_name: str,
        kv_cache: KVCache,
        layout: KeyLayout,
    ) -> None:
        """digest: of all that decides what keys and values a token has."""
        self._files, self._digest, self._layout = files, digest, layout
        self._kv_cache = kv_cache
        self._reader = ChunkReader(layout, files.key)
        self._writer = SequenceWriter(files, kv_cache, layout, model_name)

    def find(self, prompt: IntArray, block_length: int, unit: int) -> StoredBeginning | None:
        """The file with most of a prompt's beginning, in multiples of `unit` tokens."""
        best = None
        try:
            stored = self._files.of_model(self._model(block_length))
        except OSError as error:
            _log.warning("%s cannot be listed: %s.", self._files.folder.path, error.strerror)
            return None
        for entry, head in stored:
            if entry.num_bytes != self._layout.file_bytes(len(head.tokens)):
                self._files.distrust(entry, f"it has {entry.num_bytes} bytes")
                continue
            num_tokens = num_common(head.tokens, prompt) // unit * unit
            if best is None or num_tokens > best.num_tokens:
                best = StoredBeginning(entry, head, num_tokens)
        return best

    def restore(self, found: StoredBeginning, kv: KVRange) -> bool:
        """Read keys and values into a new range, whose memory is there.

        Returns False where the file is damaged or gone: `find` returns another then.
        """
        folder, name, num_tokens = self._files.folder, found.entry.name, found.num_tokens
        rows = self._kv_cache.rows(kv, 0, num_tokens)

        def place(first: int, content: NDArray[Any]) -> None:
            target = rows[:, :, :, first : first + content.shape[3]]
            target[...] = content[:, :, :, : target.shape[3]]

        try:
            self._reader.read(folder.open(name), found.head, num_tokens, place)
        except (Contradiction, LowtideError, OSError) as error:
            self._files.distrust(found.entry, error)
            return False
        self._kv_cache.claim(kv, 0, num_tokens)
        with suppress(OSError):
            folder.touch(name)
        return True

    def offer(self, tokens: IntArray, block_length: int, kv: KVRange) -> None:
        """Has a range that was just kept written, beside passes."""
        self._writer.offer(self._model(block_length), tokens, kv)

    def drain(self) -> None:
        """Waits until what is kept is written."""
        self._writer.drain()

    def stop_waiting(self) -> None:
        """A read that is waited for fails soon. May be called on any thread."""
        self._reader.stop_waiting()

    def close(self) -> None:
        """Ends all threads and closes the folder, unless a thread uses it yet."""
        if all([self._writer.close(), self._reader.close()]):
            self._files.close()

    def _model(self, block_length: int) -> bytes:
        """What names files: a block's tokens see each other, so its length decides, too."""
        content = self._digest + block_length.to_bytes(8, "little")
        return hashlib.blake2b(content, digest_size=MODEL_BYTES).digest()
