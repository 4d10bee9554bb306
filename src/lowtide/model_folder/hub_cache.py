"""The hub's cache on this machine: folders of commits, and their completeness.

  hub/models--org--name/  blobs/ETAG   snapshots/COMMIT/NAME -> ../../blobs/ETAG   refs/main

The layout is huggingface-hub's, shared with other programs. Uses no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lowtide.errors import CheckpointError, HubError, StorageError
from lowtide.files.json_file import read_object
from lowtide.files.regular_file import FETCH_AGAIN, read_regular
from lowtide.model_folder.checkpoint import INDEX_NAME, SINGLE_NAME, shard_names
from lowtide.model_folder.hub_reference import HubReference

MAX_INDEX_BYTES = 64 << 20

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 1 << 10

OTHER_CACHE = "HF_HOME names another folder."
"""Way out of a cache that cannot be used: the end of an error message."""


def hub_constants() -> ModuleType:
    """Return huggingface-hub's constants, read from the environment when imported.

    Raises HubError for an invalid variable.
    """
    try:
        from huggingface_hub import constants
    except ValueError as error:  # from its two numeric variables
        raise HubError(
            "HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT must be whole seconds, where they are "
            f"set: {error}."
        ) from error
    return constants


def cache_folder() -> Path:
    """Return the folder of HF_HUB_CACHE or HF_HOME. Raises HubError if there is none."""
    folder = Path(hub_constants().HF_HUB_CACHE)
    try:
        return folder.expanduser()
    except RuntimeError as error:  # for example in a container, as a user without a name
        raise HubError(
            f"This user has no home, where models could be kept ({folder}): set HOME or HF_HOME."
        ) from error


def repo_folder(repo_id: str) -> Path:
    return cache_folder() / f"models--{repo_id.replace('/', '--')}"


def snapshot_folder(repo_id: str, commit: str) -> Path:
    """Return the folder of a commit's files, whether it exists or not."""
    return repo_folder(repo_id) / "snapshots" / commit


def is_commit(revision: str) -> bool:
    """Return True for a full commit id, whose contents never change."""
    return _COMMIT.fullmatch(revision) is not None


def cached_commit(repo_id: str, revision: str) -> str | None:
    """Return the commit of a revision when it was last fetched; None if it never was."""
    if is_commit(revision):
        return revision
    path = repo_folder(repo_id) / "refs" / revision
    try:
        commit = read_regular(path, _MAX_REF_BYTES).decode().strip()
    except (StorageError, UnicodeDecodeError):  # never fetched by this name
        return None
    return commit if is_commit(commit) else None


def remember_revision(reference: HubReference, commit: str) -> None:
    """Record a commit's revision for offline use. Raises HubError."""
    repo_id, revision, _ = reference
    if revision == cached_commit(repo_id, revision) or commit == cached_commit(repo_id, revision):
        return
    path = repo_folder(repo_id) / "refs" / revision
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(commit, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise HubError(
            f"The hub's cache cannot be written: {path}: {error.strerror or error}. {OTHER_CACHE}"
        ) from error


def cached_snapshots() -> Iterator[tuple[str, Path]]:
    """Yield names and folders of all commits. Raises HubError if the cache cannot be read."""
    cache = cache_folder()
    try:
        for repo in cache.glob("models--*--*"):
            name = repo.name.removeprefix("models--").replace("--", "/", 1)
            for folder in (repo / "snapshots").glob("*"):
                yield name, folder
    except OSError as error:
        raise HubError(f"The hub's cache {cache} cannot be read: {error}. {OTHER_CACHE}") from error


def missing_files(folder: Path) -> list[str]:
    """List the files that a complete checkpoint needs and this folder lacks.

    An empty list means that all files exist, not that they are valid.
    """
    present = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    # A link into the cache whose target is gone is not a file.
    present = {name for name in present if (folder / name).exists()}
    missing = [] if "config.json" in present else ["config.json"]
    if SINGLE_NAME not in present and INDEX_NAME in present:
        return missing + sorted(_indexed_shards(folder / INDEX_NAME) - present)
    try:
        shard_names(present, str(folder))
    except CheckpointError:
        missing.append("*.safetensors")
    return missing


def _indexed_shards(index: Path) -> set[str]:
    try:
        weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    except CheckpointError as error:
        raise HubError(str(error)) from error
    if not isinstance(weight_map, dict):
        raise HubError(
            f"{index} has no weight_map, so its shards are not known; remove it, and {FETCH_AGAIN}."
        )
    return {str(shard) for shard in weight_map.values()}
