"""Kept sequences in the files of one folder: which there are, and which go when others come.

A file's name is a digest of the model and one of the token ids. Other names are left alone, and a
file that cannot be believed is told once and passed over.
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
    """A file, and what it begins with; without a head it cannot be believed."""

    entry: FolderEntry
    head: FileHead | None


class StoredFiles:
    """Owns the folder, and knows the heads of its files. Any thread may ask."""

    def __init__(self, folder: OwnFolder, key: bytes, most_bytes: int) -> None:
        """key: of all MACs. most_bytes: of all files together."""
        self.folder, self.key, self.most_bytes = folder, key, most_bytes
        self._heads: dict[FolderEntry, FileHead | None] = {}
        self._gate = threading.Lock()

    @classmethod
    def open(cls, path: Path, limit: str | int, is_made: bool = True) -> StoredFiles:
        """Those of a folder, under a key that lies with this user's state. limit: a size, or a
        share of the disk. Raises UsageError and StorageError as `OwnFolder` and `own_secret`.
        """
        with closing(OwnFolder(state_folder() / "keys")) as secrets:
            key = own_secret(secrets, "kept-sequences")
        folder = OwnFolder(path, is_made)
        return cls(folder, key, parse_size(limit, shutil.disk_usage(path).total))

    def close(self) -> None:
        """Nothing may be asked any more."""
        self.folder.close()

    def listed(self) -> list[StoredFile]:
        """All of them, also what was left unfinished. Raises OSError."""
        with self._gate:
            entries = self._entries()
            self._heads = {
                e: self._heads[e] if e in self._heads else self._head(e) for e in entries
            }
            return [StoredFile(*item) for item in self._heads.items()]

    def of_model(self, model: bytes) -> list[tuple[FolderEntry, FileHead]]:
        """Whole ones with sequences of this model. Raises OSError."""
        return [(e, head) for e, head in self.listed() if head is not None and head.model == model]

    def distrust(self, entry: FolderEntry, reason: object) -> None:
        """Says what is wrong with a file, which is not asked about again until it is another."""
        with self._gate:
            self._heads[entry] = None
        self._tell(entry, reason)

    def make_room(self, num_bytes: int, first: Collection[str] = ()) -> None:
        """Removes files, those named `first` and then the longest unused, until so many bytes more
        are within the limit. Raises OSError.
        """
        entries = sorted(self._entries(), key=lambda e: (e.name not in first, e.used_ns))
        left_bytes = self.most_bytes - num_bytes - sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if left_bytes >= 0:
                return
            self.folder.remove(entry.name)
            left_bytes += entry.num_bytes

    def clear(self) -> list[FolderEntry]:
        """Removes all of them, and says which. Raises OSError."""
        entries = self._entries()
        for entry in entries:
            self.folder.remove(entry.name)
        return entries

    def _entries(self) -> list[FolderEntry]:
        return [entry for entry in self.folder.entries() if _NAME.fullmatch(entry.name)]

    def _head(self, entry: FolderEntry) -> FileHead | None:
        if not entry.name.endswith(".keys"):  # it is being written, or that was interrupted
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
            self._tell(entry, error)
            return None

    def _tell(self, entry: FolderEntry, reason: object) -> None:
        text = reason.strerror if isinstance(reason, OSError) else str(reason).rstrip(".")
        _log.warning("%s is ignored: %s.", self.folder.path / entry.name, text)


def file_name(model: bytes, tokens: IntArray) -> str:
    """Name of the file that has this sequence of a model."""
    ids = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=_IDS_BYTES)
    return f"{model.hex()}-{ids.hexdigest()}.keys"
