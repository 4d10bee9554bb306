"""A model's files from the hub into its cache: told before, resumed after a break, checked.

Weights are written to `blobs/SHA256.lowtide`, which the next attempt continues, and take their
place in the cache once their bytes have that digest. huggingface-hub's own download, which begins
a broken file anew, fetches the small files and links all of them into the snapshot.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO

from lowtide.config import format_size
from lowtide.errors import HubError
from lowtide.model_folder.hub_cache import cache_folder, remember_revision, repo_folder
from lowtide.model_folder.hub_model import (
    IGNORED_FILES,
    NUM_CONNECTIONS,
    SMALL_FILES,
    HubModel,
    is_small,
)
from lowtide.model_folder.hub_requests import NotWhole, Stopped, failure, file_part

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all)."""

_READ_BYTES = 8 << 20

_log = logging.getLogger(__name__)


def no_progress(what: str, done_bytes: int, total_bytes: int) -> None:
    """Of a download that nobody watches."""


def fetch(model: HubModel, progress: Progress = no_progress) -> Path:
    """The folder of a model, with all its files fetched that were not here.

    Says what is fetched, where to, and what is free there. Raises CheckpointError if not all
    shards are on the hub, HubError if it does not fit, and for what breaks it off; what has come
    by then is kept.
    """
    shards = model.shards()
    download = _Download(model, shards, progress)
    download.announce()
    try:
        # First what is small: a snapshot that has all its weights is then whole.
        _snapshot(model, list(SMALL_FILES))
        download.weights()
        folder = _snapshot(model, [*SMALL_FILES, *shards])
    except HubError:
        raise
    # The hub's errors share no base class: HTTP, connection, validation and disk errors.
    except Exception as error:
        raise failure(model.name, error) from error
    remember_revision(model.repo_id, model.revision, model.commit)
    return folder


class _Download:
    """The files that are not in the cache yet."""

    def __init__(self, model: HubModel, shards: Sequence[str], progress: Progress) -> None:
        self._model = model
        self._blobs = repo_folder(model.repo_id) / "blobs"
        self._progress = progress
        self._lock = Lock()
        self._stopped = Event()
        wanted = [name for name in model.files if is_small(name) or name in shards]
        self._names = [name for name in wanted if not self._is_here(name)]
        self._total_bytes = sum(model.files[name].num_bytes for name in self._names)
        self._done_bytes = 0

    def announce(self) -> None:
        """One line, where there is anything to fetch. Raises HubError if it does not fit."""
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

    def weights(self) -> None:
        """Fetches them, several files at once. Raises what the first failure was."""
        names = [name for name in self._names if self._model.files[name].sha256 is not None]
        if not names:
            return
        self._blobs.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(NUM_CONNECTIONS, "lowtide-hub") as pool:
            try:
                futures = [pool.submit(self._fetch, name) for name in names]
                failures = [future.exception() for future in futures]
            finally:
                self._stopped.set()  # on Ctrl-C the others end with their next piece
        for error in failures:
            if error is not None and not isinstance(error, Stopped):
                raise error

    def _fetch(self, name: str) -> None:
        try:
            self._fetch_blob(name)
        except BaseException:
            self._stopped.set()
            raise

    def _fetch_blob(self, name: str) -> None:
        blob, partial = self._blob(name), self._partial(name)
        if self._stopped.is_set():
            raise Stopped
        with open(partial, "a+b") as file:
            self._lock_alone(file, name)
            if blob.exists():  # somebody else's has just become whole
                return
            digest = self._append(file, name)
            if digest != self._model.files[name].sha256:
                partial.unlink()
                raise NotWhole(
                    f"{name} has other bytes than the hub says (SHA-256 {digest}); it was removed"
                )
            os.fsync(file.fileno())
            partial.replace(blob)

    def _append(self, file: BinaryIO, name: str) -> str:
        """Fetches what a file lacks; returns the digest of all of it."""
        num_bytes, digest = self._model.files[name].num_bytes, hashlib.sha256()
        file.seek(0)
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            self._advance(len(piece))
        for piece in file_part(self._model.url(name), file.tell(), num_bytes, self._stopped):
            file.write(piece)
            digest.update(piece)
            self._advance(len(piece))
        file.flush()
        return digest.hexdigest()

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
        return (self._model.folder / name).exists() or self._blob(name).exists()

    def _kept_bytes(self, name: str) -> int:
        partial = self._partial(name)
        return partial.stat().st_size if partial.exists() else 0

    def _blob(self, name: str) -> Path:
        return self._blobs / (self._model.files[name].sha256 or f"{name}.none")

    def _partial(self, name: str) -> Path:
        blob = self._blob(name)
        return blob.with_name(f"{blob.name}.lowtide")


def _snapshot(model: HubModel, patterns: list[str]) -> Path:
    """huggingface-hub's own download and links, without its bars."""
    import huggingface_hub
    from huggingface_hub.utils import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return Path(
        huggingface_hub.snapshot_download(
            model.repo_id,
            revision=model.commit,
            allow_patterns=patterns,
            ignore_patterns=list(IGNORED_FILES),
            tqdm_class=NoBar,
        )
    )


def _free_bytes(folder: Path) -> int:
    """Of the disk that a folder is on, or would be. Raises HubError if it cannot be asked."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise HubError(f"The hub's cache cannot be written: {folder}: {error.strerror}.") from error
