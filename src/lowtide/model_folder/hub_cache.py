"""The hub's cache on this machine: where a model's commits lie, and whether one is whole.

    hub/models--org--name/  blobs/ETAG   snapshots/COMMIT/NAME -> ../../blobs/ETAG   refs/main

The layout is huggingface-hub's, which other programs share. Asks no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lowtide.errors import CheckpointError, HubError, StorageError
from lowtide.files.json_file import read_object
from lowtide.files.regular_file import read_regular
from lowtide.model_folder.checkpoint import INDEX_NAME, SINGLE_NAME, shard_names
from lowtide.model_folder.hub_reference import HubReference

MAX_INDEX_BYTES = 64 << 20

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 1 << 10


def hub_constants() -> ModuleType:
    """huggingface-hub's, which it makes of the environment as it is imported. Raises HubError for a
    variable that cannot be.
    """
    try:
        from huggingface_hub import constants
    except ValueError as error:  # its two that are numbers
        raise HubError(
            "HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT must be whole seconds, where they are "
            f"set: {error}."
        ) from error
    return constants


def cache_folder() -> Path:
    """Where HF_HUB_CACHE or HF_HOME put it. Raises HubError where there is no such place."""
    folder = Path(hub_constants().HF_HUB_CACHE)
    try:
        return folder.expanduser()
    except RuntimeError as error:  # such as in a container, as a user that has no name there
        raise HubError(
            f"This user has no home, where models could be kept ({folder}): set HOME or HF_HOME."
        ) from error


def repo_folder(repo_id: str) -> Path:
    return cache_folder() / f"models--{repo_id.replace('/', '--')}"


def snapshot_folder(repo_id: str, commit: str) -> Path:
    """Where a commit's files are, or would be."""
    return repo_folder(repo_id) / "snapshots" / commit


def is_commit(revision: str) -> bool:
    """Whether this is a commit's full name: what it stands for never changes."""
    return _COMMIT.fullmatch(revision) is not None


def cached_commit(repo_id: str, revision: str) -> str | None:
    """The commit that a revision was when it was last fetched; None if it never was."""
    if is_commit(revision):
        return revision
    path = repo_folder(repo_id) / "refs" / revision
    try:
        commit = read_regular(path, _MAX_REF_BYTES).decode().strip()
    except (StorageError, UnicodeDecodeError):  # never fetched by this name
        return None
    return commit if is_commit(commit) else None


def remember_revision(reference: HubReference, commit: str) -> None:
    """Notes the name that a commit has: offline use looks that up. Raises HubError."""
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
            f"The hub's cache cannot be written: {path}: {error.strerror or error}."
        ) from error


def cached_snapshots() -> Iterator[tuple[str, Path]]:
    """Names and folders of all commits. Raises HubError if the cache cannot be read."""
    cache = cache_folder()
    try:
        for repo in cache.glob("models--*--*"):
            name = repo.name.removeprefix("models--").replace("--", "/", 1)
            for folder in (repo / "snapshots").glob("*"):
                yield name, folder
    except OSError as error:
        raise HubError(f"The hub's cache {cache} cannot be read: {error}.") from error


def missing_files(folder: Path) -> list[str]:
    """Names of the files that a whole checkpoint would have and this folder has not.

    An empty list says that all files are there, not that they are valid.
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


def listed(names: list[str]) -> str:
    """A few of the names, for a message."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _indexed_shards(index: Path) -> set[str]:
    try:
        weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    except CheckpointError as error:
        raise HubError(str(error)) from error
    if not isinstance(weight_map, dict):
        raise HubError(f"{index} has no weight_map, so its shards are not known.")
    return {str(shard) for shard in weight_map.values()}
