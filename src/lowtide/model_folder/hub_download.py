"""Download a model's files to the hub's cache: announced first, resumable, verified.

Weights are written to `blobs/SHA256.lowtide`, which the next attempt continues, and are renamed
once their digest matches. Small files start again. The snapshot's links are also made here:
huggingface-hub's own download derives paths from what a server says.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from threading import Event, Lock
from typing import BinaryIO

from lowtide.config import format_size
from lowtide.errors import HubError
from lowtide.files.json_file import shown
from lowtide.model_folder.checkpoint import INDEX_NAME, SINGLE_NAME
from lowtide.model_folder.hub_cache import (
    OTHER_CACHE,
    cache_folder,
    missing_files,
    remember_revision,
    repo_folder,
)
from lowtide.model_folder.hub_model import NUM_CONNECTIONS, HubModel, is_small
from lowtide.model_folder.hub_requests import NotWhole, Stopped, failure, file_part
from lowtide.progress import Progress, no_progress

_READ_BYTES = 8 << 20

_log = logging.getLogger(__name__)


def fetch(model: HubModel, progress: Progress = no_progress) -> Path:
    """Fetch a model's missing files; return its folder or GGUF file.

    Announces the size, target and free space. Raises CheckpointError if shards are missing on the
    hub, HubError if the model does not fit or a transfer fails; received bytes are kept.
    """
    shards = model.shards()
    try:
        download = _Download(model, shards, progress)
        download.announce()
        download.run()
    except HubError:
        raise
    # The hub's errors share no base class: HTTP, connection, validation and disk errors.
    except Exception as error:
        raise failure(model.name, error) from error
    remember_revision(model.reference, model.commit)
    return model.path


class _Download:
    """Download of the files that are not in the cache."""

    def __init__(self, model: HubModel, shards: Sequence[str], progress: Progress) -> None:
        self._model = model
        self._blobs = repo_folder(model.reference.repo_id) / "blobs"
        self._progress = progress
        self._lock = Lock()
        self._stopped = Event()
        self._wanted = [name for name in model.files if is_small(name) or name in shards]
        self._names = [name for name in self._wanted if not self._is_here(name)]
        self._total_bytes = sum(model.files[name].num_bytes for name in self._names)
        self._done_bytes = 0

    def announce(self) -> None:
        """Announce the download in one line, if any. Raises HubError if it does not fit."""
        kept_bytes = sum(self._kept_bytes(name) for name in self._names)
        needed_bytes, cache = self._total_bytes - kept_bytes, cache_folder()
        if needed_bytes <= 0:
            return
        free_bytes = _free_bytes(cache)
        kept = f" ({format_size(kept_bytes)} more are here already)" if kept_bytes else ""
        what = f"{format_size(needed_bytes)} in {len(self._names)} files"
        if needed_bytes > free_bytes:
            raise HubError(
                f"{self._model.name} does not fit: {what} are to be fetched{kept} to {cache}, "
                f"where {format_size(free_bytes)} are free. Make room, or set HF_HOME to a folder "
                "on a larger disk."
            )
        free = format_size(free_bytes)
        _log.warning(
            "%s: fetching %s%s to %s, where %s are free.", self._model.name, what, kept, cache, free
        )

    def run(self) -> None:
        """Fetch and link the files.

        Raises the first failure, and, before weights are fetched, HubError for an index that names
        files missing on the hub.
        """
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._model.folder.mkdir(parents=True, exist_ok=True)
        # Small files first: a snapshot with all its weights is then complete.
        self._fetch_all([name for name in self._wanted if is_small(name)])
        more = [name for name in self._indexed() if name not in self._wanted]
        self._total_bytes += sum(self._model.files[name].num_bytes for name in more)
        self._fetch_all([*(name for name in self._wanted if not is_small(name)), *more])

    def _indexed(self) -> list[str]:
        """List missing files that the index names, if no single file has all weights.

        Raises HubError for one that is not on the hub.
        """
        if INDEX_NAME not in self._model.files or SINGLE_NAME in self._model.files:
            return []
        named = missing_files(self._model.folder)
        absent = [name for name in named if name not in self._model.files]
        if absent:
            raise HubError(
                f"{self._model.name} is not whole on the hub: {INDEX_NAME} names "
                f"{shown(absent[0])}, which is not one of its files; choose another repository."
            )
        return named

    def _fetch_all(self, names: Sequence[str]) -> None:
        """Fetch several files concurrently."""
        with ThreadPoolExecutor(NUM_CONNECTIONS, "lowtide-hub") as pool:
            try:
                futures = [pool.submit(self._fetch, name) for name in names]
                failures = [future.exception() for future in futures]
            except BaseException:
                self._stopped.set()  # on Ctrl-C the others end with their next piece
                raise
        for error in failures:
            if error is not None and not isinstance(error, Stopped):
                raise error

    def _fetch(self, name: str) -> None:
        place = self._model.folder / name
        try:
            if place.exists():
                return
            if self._stopped.is_set():
                raise Stopped
            fetch = self._fetch_small if self._sha256(name) is None else self._fetch_large
            _link(place, fetch(name))
        except BaseException:
            self._stopped.set()
            raise

    def _fetch_large(self, name: str) -> Path:
        """Fetch a large file, resuming an earlier run; return its place in the cache."""
        blob, partial = self._blob(name), self._partial(name)
        if blob.exists():
            return blob
        with open(partial, "a+b") as file:
            self._lock_alone(file, name)
            if blob.exists():  # another process has just completed it
                return blob
            digest = self._read_again(file)
            self._append(file, name, digest)
            if digest.hexdigest() != self._sha256(name):
                partial.unlink()
                raise NotWhole(
                    f"{name} has other bytes than the hub says (SHA-256 {digest.hexdigest()}); "
                    "it was removed"
                )
            partial.replace(blob)
        return blob

    def _fetch_small(self, name: str) -> Path:
        """Fetch a small file to the cache, named by its git hash like the hub's ETags."""
        num_bytes = self._model.files[name].num_bytes
        digest = hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)
        partial = self._blobs / f"{token_hex(8)}.lowtide"
        try:
            with open(partial, "xb") as file:
                self._append(file, name, digest)
            return partial.replace(self._blobs / digest.hexdigest())
        finally:
            partial.unlink(missing_ok=True)

    def _read_again(self, file: BinaryIO) -> hashlib._Hash:
        """Compute the digest of a file's bytes so far, leaving it at its end."""
        digest = hashlib.sha256()
        file.seek(0)
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            self._advance(len(piece))
        return digest

    def _append(self, file: BinaryIO, name: str, digest: hashlib._Hash) -> None:
        """Fetch the rest of a file, updating its digest."""
        num_bytes = self._model.files[name].num_bytes
        for piece in file_part(self._model.url(name), file.tell(), num_bytes, self._stopped):
            file.write(piece)
            digest.update(piece)
            self._advance(len(piece))
        file.flush()
        os.fsync(file.fileno())

    def _lock_alone(self, file: BinaryIO, name: str) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(
                f"{self._model.name}: another program is fetching {name}; wait until it is done."
            ) from None

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            self._progress("fetching", min(self._done_bytes, self._total_bytes), self._total_bytes)

    def _is_here(self, name: str) -> bool:
        has_blob = self._sha256(name) is not None and self._blob(name).exists()
        return has_blob or (self._model.folder / name).exists()

    def _kept_bytes(self, name: str) -> int:
        if self._sha256(name) is None or not self._partial(name).exists():
            return 0
        return self._partial(name).stat().st_size

    def _sha256(self, name: str) -> str | None:
        return self._model.files[name].sha256

    def _blob(self, name: str) -> Path:
        """Return the cache's path of a large file, by its SHA-256."""
        return self._blobs / str(self._sha256(name))

    def _partial(self, name: str) -> Path:
        return self._blobs / f"{self._sha256(name)}.lowtide"


def _link(place: Path, blob: Path) -> None:
    """Link `place` to `blob`, replacing any link; without links the file itself is moved."""
    place.parent.mkdir(parents=True, exist_ok=True)
    link = place.with_name(f".{token_hex(8)}.lowtide")
    try:
        os.symlink(os.path.relpath(blob, place.parent), link)
    except OSError:
        blob.replace(place)
    else:
        link.replace(place)


def _free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk. Raises HubError if they are unknown."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise HubError(
            f"The hub's cache cannot be written: {folder}: {error.strerror}. {OTHER_CACHE}"
        ) from error
