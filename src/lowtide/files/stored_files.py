"""Files of kept sequences in one folder, and their eviction.

A file's name is a digest of the model and one of the token ids. Files with other names are left
alone, and a file that fails its checks is reported once and skipped.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from lowtide.config import parse_size
from lowtide.core import IntArray
from lowtide.files.array_file import Contradiction
from lowtide.files.folders import state_folder
from lowtide.files.kept_file import MODEL_BYTES, FileHead
from lowtide.files.own_folder import FolderEntry, OwnFolder, own_secret

_IDS_BYTES = 8
_NAME = re.compile(
    rf"[0-9a-f]{{{2 * MODEL_BYTES}}}-[0-9a-f]{{{2 * _IDS_BYTES}}}\.keys(\.[0-9a-f]{{8}})?"
)

_log = logging.getLogger(__name__)


class StoredFile(NamedTuple):
    """A file and its head; without a head it is not trusted."""

    entry: FolderEntry
    head: FileHead | None


class StoredFiles:
    """Owner of the folder and a cache of its files' heads. Thread-safe."""

    def __init__(self, folder: OwnFolder, key: bytes, most_bytes: int) -> None:
        """key: of all MACs.

        most_bytes: limit for all files together.
        """
        self.folder, self.key, self.most_bytes = folder, key, most_bytes
        self._heads: dict[FolderEntry, FileHead | None] = {}
        self._gate = threading.Lock()

    @classmethod
    def open(cls, path: Path, limit: str | int, is_made: bool = True) -> StoredFiles:
        """Open a folder's files with a key from this user's state.

        limit: a size, or a share of the disk. Raises UsageError and StorageError as `OwnFolder` and
        `own_secret`.
        """
        with closing(OwnFolder(state_folder() / "keys")) as secrets:
            key = own_secret(secrets, "kept-sequences")
        folder = OwnFolder(path, is_made)
        return cls(folder, key, parse_size(limit, shutil.disk_usage(path).total))

    def close(self) -> None:
        self.folder.close()

    def listed(self) -> list[StoredFile]:
        """List all files, also unfinished ones. Raises OSError."""
        with self._gate:
            entries = self._entries()
            self._heads = {
                e: self._heads[e] if e in self._heads else self._head(e) for e in entries
            }
            return [StoredFile(*item) for item in self._heads.items()]

    def of_model(self, model: bytes) -> list[tuple[FolderEntry, FileHead]]:
        """List the complete files of this model. Raises OSError."""
        return [(e, head) for e, head in self.listed() if head is not None and head.model == model]

    def distrust(self, entry: FolderEntry, reason: object) -> None:
        """Report a defective file and ignore it until it changes."""
        with self._gate:
            self._heads[entry] = None
        self._warn(entry, reason)

    def make_room(self, num_bytes: int, first: Collection[str] = ()) -> None:
        """Remove files until `num_bytes` more fit: those in `first`, then the least recently used.

        Raises OSError.
        """
        entries = sorted(self._entries(), key=lambda e: (e.name not in first, e.used_ns))
        left_bytes = self.most_bytes - num_bytes - sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if left_bytes >= 0:
                return
            self.folder.remove(entry.name)
            left_bytes += entry.num_bytes

    def clear(self) -> list[FolderEntry]:
        """Remove all files and return them. Raises OSError."""
        entries = self._entries()
        for entry in entries:
            self.folder.remove(entry.name)
        return entries

    def _entries(self) -> list[FolderEntry]:
        return [entry for entry in self.folder.entries() if _NAME.fullmatch(entry.name)]

    def _head(self, entry: FolderEntry) -> FileHead | None:
        if not entry.name.endswith(".keys"):  # being written, or the writing was interrupted
            return None
        try:
            descriptor = self.folder.open(entry.name)
            try:
                head = FileHead.read(descriptor, self.key)
            finally:
                os.close(descriptor)
            if entry.name != file_name(head.model, head.tokens):
                raise Contradiction("it has another one's name")
            return head
        except FileNotFoundError:  # removed meanwhile
            return None
        except (Contradiction, OSError) as error:
            self._warn(entry, error)
            return None

    def _warn(self, entry: FolderEntry, reason: object) -> None:
        text = reason.strerror if isinstance(reason, OSError) else str(reason).rstrip(".")
        _log.warning("%s is ignored: %s.", self.folder.path / entry.name, text)


def file_name(model: bytes, tokens: IntArray) -> str:
    """Return the file name of a model's sequence."""
    ids = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=_IDS_BYTES)
    return f"{model.hex()}-{ids.hexdigest()}.keys"
