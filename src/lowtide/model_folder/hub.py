"""From the name of a model to the folder it lies in: `resolve_model`, `pull`, `list_models`.

A reference is a folder, `demo:NAME`, or `org/name[@revision]` on the hub. Only weights and data
files are ever fetched, every file from one commit. Imports no torch, and huggingface-hub only
when a reference needs it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import CheckpointError, HubError, StorageError, UsageError
from lowtide.files.json_file import read_object
from lowtide.files.regular_file import read_regular

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
DEMO_NAMES = ("diffusion", "chat")

ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja")
"""What is fetched: weights, configuration and tokenizer. Never code, never pickled weights."""
IGNORED_FILES = ("*/*",)  # folders hold other formats of the same model

MAX_INDEX_BYTES = 64 << 20

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 1 << 10
_DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model that is on this machine. `revision` is a commit of the hub; demos have none."""

    name: str
    revision: str
    num_bytes: int
    path: Path
    is_complete: bool


def resolve_model(reference: str, *, offline: bool = False) -> Path:
    """The folder of a model, fetched from the hub if it is not here yet.

    reference: a folder; `demo:diffusion` or `demo:chat`; `org/name` or `org/name@revision`.
    offline: look into the hub's cache only (also when HF_HUB_OFFLINE is set).
    Raises HubError if there is no such model, it cannot be fetched or is incomplete, and
    UsageError for a reference that is none of the three.
    """
    if reference.startswith("demo:"):
        return _demo(reference.removeprefix("demo:"))
    folder = Path(reference).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UsageError(f"{reference} is a file; a model is the folder with its config.json.")
    repo_id, revision = _parse_hub_id(reference, folder)
    return _resolve_hub(repo_id, revision, offline=offline)


def pull(reference: str) -> Path:
    """Fetches a model of the hub, or completes what an interrupted fetch left.

    Raises UsageError for a reference that is not on the hub, HubError as `resolve_model` does.
    """
    if reference.startswith("demo:") or Path(reference).expanduser().exists():
        raise UsageError(f"{reference} is on this machine already; pull takes org/name[@revision].")
    return resolve_model(reference)


def list_models() -> list[LocalModel]:
    """Every model on this machine that a reference can name: demos, then the hub's cache by name.

    Raises HubError if the cache cannot be read.
    """
    demos = [DEMO_FOLDER / name for name in DEMO_NAMES if (DEMO_FOLDER / name).is_dir()]
    found = [_local_model(f"demo:{folder.name}", "", folder) for folder in demos]
    return found + sorted(_cached_models(), key=lambda m: (m.name, m.revision))


def missing_files(folder: Path) -> list[str]:
    """Names of the files that a whole checkpoint would have and this folder has not.

    An empty list says that all files are there, not that they are valid.
    """
    present = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    # A link into the cache whose target is gone is not a file.
    present = {name for name in present if (folder / name).exists()}
    missing = [] if "config.json" in present else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.name in present:
        return missing + sorted(_indexed_shards(index) - present)
    if not any(name.endswith(".safetensors") for name in present):
        missing.append("*.safetensors")
    return missing


def has_weights(folder: Path) -> bool:
    """Whether a folder holds any weights at all, or an index of them; whole or not."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def tokenizer_file(folder: Path) -> Path:
    """Where a model's `tokenizer.json` is, if it has one: the demos share the one beside them."""
    shared = DEMO_FOLDER / "tokenizer.json"
    is_demo = folder.resolve().parent == DEMO_FOLDER.resolve()
    return shared if is_demo else folder / shared.name


def _demo(name: str) -> Path:
    if name not in DEMO_NAMES:
        choices = ", ".join(f"demo:{n}" for n in DEMO_NAMES)
        raise HubError(f"There is no demo model {name!r}; choose {choices}.")
    folder = DEMO_FOLDER / name
    missing = missing_files(folder)
    if missing:
        raise HubError(
            f"The demo model demo:{name} is not whole: {_listed(missing)} missing in {folder}; "
            "reinstall lowtide, or train it with tools/train_demo.py."
        )
    return folder


def _parse_hub_id(reference: str, folder: Path) -> tuple[str, str]:
    repo_id, _, revision = reference.partition("@")
    is_path = reference.startswith((".", "/", "~")) or reference.count("/") > 1
    if _HUB_ID.fullmatch(repo_id) and not ("@" not in reference and is_path):
        revision = revision if "@" in reference else _DEFAULT_REVISION
        if not _REVISION.fullmatch(revision) or ".." in revision:
            raise UsageError(f"{revision!r} is not a revision; give a branch, a tag or a commit.")
        return repo_id, revision
    raise HubError(
        f"There is no model {reference!r}. Tried: the folder {folder.absolute()}, which does not "
        "exist; the hub, whose ids look like org/name or org/name@revision; the demo models, "
        f"{', '.join(f'demo:{name}' for name in DEMO_NAMES)}."
    )


def _resolve_hub(repo_id: str, revision: str, *, offline: bool) -> Path:
    from huggingface_hub import constants

    is_offline = offline or constants.HF_HUB_OFFLINE
    # A commit never changes: if it is here whole, the network has nothing to add.
    if is_offline or _COMMIT.fullmatch(revision):
        commit = _cached_commit(repo_id, revision)
        folder = _snapshot_folder(repo_id, commit) if commit else None
        missing = missing_files(folder) if folder else ["everything"]
        if folder and not missing:
            return folder
        if is_offline:
            raise HubError(
                f"Offline, and {repo_id}@{revision} is not whole in the hub's cache "
                f"{constants.HF_HUB_CACHE}: {_listed(missing)} missing. Fetch it with network "
                f"access: lowtide pull {repo_id}@{revision}."
            )
    folder = _fetch(repo_id, revision)
    missing = missing_files(folder)
    if missing:
        raise HubError(
            f"{repo_id}@{revision} is not a checkpoint that can be loaded: {_listed(missing)} "
            f"missing in {folder}. Only safetensors checkpoints are read."
        )
    return folder


def _fetch(repo_id: str, revision: str) -> Path:
    """Downloads what is not in the cache yet, every file from one commit."""
    import huggingface_hub

    name = f"{repo_id}@{revision}"
    try:
        commit = revision
        if not _COMMIT.fullmatch(revision):
            commit = str(huggingface_hub.HfApi().model_info(repo_id, revision=revision).sha)
        folder = Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=commit,
                allow_patterns=list(ALLOWED_FILES),
                ignore_patterns=list(IGNORED_FILES),
            )
        )
    # The hub's errors share no base class: HTTP, connection, validation and disk errors.
    except Exception as error:
        raise HubError(f"{name} could not be fetched: {_reason(error, name)}") from error
    if commit != revision:
        _remember_revision(folder, revision, commit)
    return folder


def _reason(error: Exception, name: str) -> str:
    """What went wrong and the way out, for an error of the hub's library."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "its owner gives access on request; ask for it on the hub, then set HF_TOKEN."
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has the model but not this revision."
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private (then set HF_TOKEN)."
    detail = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return (
        f"{detail} Check the network and try again (what was fetched so far is kept); with "
        f"--offline a whole copy of {name} in the cache is used; or give a folder."
    )


def _remember_revision(snapshot: Path, revision: str, commit: str) -> None:
    # Fetching by commit leaves no note of the name it had, and offline use looks that up.
    path = snapshot.parent.parent / "refs" / revision
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(commit, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise HubError(
            f"The hub's cache cannot be written: {path}: {error.strerror or error}."
        ) from error


def _cached_commit(repo_id: str, revision: str) -> str | None:
    if _COMMIT.fullmatch(revision):
        return revision
    path = _repo_folder(repo_id) / "refs" / revision
    try:
        commit = read_regular(path, _MAX_REF_BYTES).decode().strip()
    except (StorageError, UnicodeDecodeError):  # never fetched by this name
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _snapshot_folder(repo_id: str, commit: str) -> Path | None:
    folder = _repo_folder(repo_id) / "snapshots" / commit
    return folder if folder.is_dir() else None


def _repo_folder(repo_id: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo_id.replace('/', '--')}"


def _cached_models() -> list[LocalModel]:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser()
    models = []
    try:
        for repo in cache.glob("models--*--*"):
            name = repo.name.removeprefix("models--").replace("--", "/", 1)
            snapshots = [p for p in (repo / "snapshots").glob("*") if (p / "config.json").exists()]
            models += [_local_model(name, p.name, p) for p in snapshots]
    except OSError as error:
        raise HubError(f"The hub's cache {cache} cannot be read: {error}.") from error
    return models


def _local_model(name: str, revision: str, folder: Path) -> LocalModel:
    try:
        is_complete = not missing_files(folder)
    except HubError:  # a damaged index: listed, and refused when it is used
        is_complete = False
    num_bytes = sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    return LocalModel(name, revision, num_bytes, folder, is_complete)


def _indexed_shards(index: Path) -> set[str]:
    try:
        weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    except CheckpointError as error:
        raise HubError(str(error)) from error
    if not isinstance(weight_map, dict):
        raise HubError(f"{index} has no weight_map, so its shards are not known.")
    return {str(shard) for shard in weight_map.values()}


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
