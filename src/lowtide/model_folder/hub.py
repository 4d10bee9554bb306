"""Find models by reference: `resolve_model`, `pull`, `list_models`.

A reference is a folder, a GGUF file, `demo:NAME`, or on the hub `org/name[@revision][:TAG]` or the
address of its page; TAG names a GGUF file, such as Q4_K_M. Only weights and data files are fetched,
all from one commit, and none of a model that lowtide does not run. Imports no torch, and
huggingface-hub only when a reference needs it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lowtide.core import NOTHING
from lowtide.errors import CheckpointError, ConfigError, HubError, UsageError
from lowtide.files.json_file import listed, meant, shown
from lowtide.model_folder.demos import DEMO_FOLDER, DEMO_NAMES, OLD_DEMO_NAMES
from lowtide.model_folder.gguf_file import (
    choose_gguf,
    first_gguf,
    gguf_models,
    is_gguf,
    is_whole,
    tag_of,
)
from lowtide.model_folder.hub_cache import (
    OTHER_CACHE,
    cache_folder,
    cached_commit,
    cached_snapshots,
    hub_constants,
    is_commit,
    missing_files,
    remember_revision,
    snapshot_folder,
)
from lowtide.model_folder.hub_download import fetch
from lowtide.model_folder.hub_model import HubModel, is_small
from lowtide.model_folder.hub_reference import HubReference, parse
from lowtide.model_folder.hub_requests import brief
from lowtide.model_folder.missing_model import is_path, no_file_message, no_model_message
from lowtide.model_folder.ollama_names import ollama_message
from lowtide.progress import Progress, no_progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One local model. `revision` is a commit of the hub; demos have none."""

    name: str
    revision: str
    num_bytes: int
    path: Path
    is_complete: bool


def resolve_model(
    reference: str,
    *,
    offline: bool = False,
    overrides: Mapping[str, object] = NOTHING,
    progress: Progress = no_progress,
) -> Path:
    """Return a model's folder or GGUF file, fetching it from the hub if needed.

    Raises as `locate_model` and `fetch_model` do.
    """
    found = locate_model(reference, offline=offline)
    if isinstance(found, Path):
        return found
    return fetch_model(found, overrides=overrides, progress=progress)


def fetch_model(
    model: HubModel,
    *,
    overrides: Mapping[str, object] = NOTHING,
    progress: Progress = no_progress,
) -> Path:
    """Fetch a model's missing files.

    overrides: values that replace `config.json`'s.

    Raises ConfigError or UnsupportedError for a model that lowtide does not run and CheckpointError
    for missing shards, both before any weight is fetched, and HubError as `fetch` does.
    """
    model.model_config(overrides)
    return fetch(model, progress)


def locate_model(reference: str, *, offline: bool = False) -> Path | HubModel:
    """Return a complete local model, or the hub's description of it.

    reference: a folder; a GGUF file (the first of several), or a folder with only that;
      `demo:diffusion` or `demo:autoregressive`; `org/name[@revision][:TAG]`.
    offline: use only the hub's cache (also if HF_HUB_OFFLINE is set).

    If the hub cannot be asked, a complete model in the cache is used, with a notice. Raises
    HubError if there is no such model or the hub cannot be asked, UsageError for any other
    reference, CheckpointError for a folder with several GGUF models or one that this user cannot
    read.
    """
    if reference.startswith("demo:"):
        return _demo(reference.removeprefix("demo:"))
    folder = _path(reference)
    if folder.is_dir():
        gguf = None if has_weights(folder) else first_gguf(folder)
        if gguf is None and not os.path.lexists(folder / "config.json"):
            raise ConfigError(no_model_message(folder))
        return gguf or folder
    if folder.exists() and not is_gguf(folder):
        raise UsageError(
            f"{reference} is a file; a model is the folder with its config.json, or a GGUF file."
        )
    if folder.exists():
        return folder
    named = _parse_hub_id(reference, folder)
    try:
        return _locate_on_hub(named, offline=offline)
    except HubError as error:
        if reference != named.repo_id or not (is_path(reference) or folder.parent.is_dir()):
            raise
        raise HubError(f"{error} {no_file_message(folder)}") from error
    except OSError as error:
        raise HubError(
            f"The hub's cache cannot be read: {error.filename}: {error.strerror}. {OTHER_CACHE}"
        ) from error


def pull(reference: str, progress: Progress = no_progress) -> Path:
    """Fetch a model from the hub, or complete an interrupted fetch.

    Raises UsageError for a reference that is not on the hub, and as `resolve_model` does.
    """
    if reference.startswith("demo:") or _path(reference).exists():
        raise UsageError(
            f"{reference} is on this machine already; pull takes org/name[@revision][:TAG]."
        )
    return resolve_model(reference, progress=progress)


def list_models() -> list[LocalModel]:
    """List local models: demos, then the hub's cache by name.

    Raises HubError if the cache cannot be read.
    """
    demos = [DEMO_FOLDER / name for name in DEMO_NAMES if (DEMO_FOLDER / name).is_dir()]
    found = [_local_model(f"demo:{folder.name}", "", folder) for folder in demos]
    cached = [
        model for name, folder in cached_snapshots() for model in _cached_models(name, folder)
    ]
    return found + sorted(cached, key=lambda m: (m.name, m.revision))


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds weights or an index of them, complete or not."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def _path(reference: str) -> Path:
    """Return a reference as a path that can be tested for existence.

    Raises UsageError for an impossible path, CheckpointError for one that this user cannot read.
    """
    if not reference.strip():  # for example an unset "$MODEL"; it must not mean the current folder
        raise UsageError("The model has no name; give a folder, a GGUF file or org/name.")
    path = Path(reference)
    try:
        path = path.expanduser()
        path.stat()
        if path.is_dir():
            next(path.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (RuntimeError, ValueError) as error:  # an unknown user's home, an invalid character
        raise UsageError(f"There is no model {shown(reference)}: {error}.") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(
                f"There is no model {shown(reference)}: first comes the model, then the text."
            ) from error
        may_be_on_hub = parse(reference) is not None
        on_hub = " For the model of this name on the hub start in another folder."
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; give this user the right to."
            f"{on_hub if may_be_on_hub else ''}"
        ) from error
    return path


def _demo(name: str) -> Path:
    name = OLD_DEMO_NAMES.get(name, name)
    if name not in DEMO_NAMES:
        choices = ", ".join(f"demo:{n}" for n in DEMO_NAMES)
        near = meant(name, DEMO_NAMES)
        raise HubError(f"There is no demo model {name!r}; choose {choices}.{near}")
    folder = DEMO_FOLDER / name
    missing = missing_files(folder)
    if missing:
        raise HubError(
            f"The demo model demo:{name} is not whole: {listed(missing)} missing in {folder}; "
            "reinstall lowtide, or train it with tools/train_demo.py."
        )
    return folder


def _parse_hub_id(reference: str, folder: Path) -> HubReference:
    found = parse(reference)
    may_be_on_hub = found is not None and (
        reference != found.repo_id or not is_path(reference) or not folder.parent.is_dir()
    )
    if is_path(reference) and "://" not in reference and not may_be_on_hub:
        raise HubError(no_file_message(folder))
    if found is not None:
        return found
    message = ollama_message(reference)
    if message is not None:
        raise HubError(f"There is no model {reference!r}. {message}")
    raise HubError(
        f"There is no model {reference!r}. Tried: the folder {folder.absolute()}, which does not "
        "exist; the hub, whose ids look like org/name, org/name@revision or, with one of its GGUF "
        "files, org/name:Q4_K_M; the demo models, "
        f"{', '.join(f'demo:{name}' for name in DEMO_NAMES)}."
    )


def _locate_on_hub(reference: HubReference, *, offline: bool) -> Path | HubModel:
    here, missing = _kept_copy(reference)
    # A commit never changes: if it is here whole, the network has nothing to add.
    is_offline = offline or hub_constants().HF_HUB_OFFLINE
    if here is not None and (is_offline or is_commit(reference.revision)):
        return here
    if is_offline:
        raise HubError(
            f"Offline, and {reference.name} is not whole in the hub's cache {cache_folder()}: "
            f"{listed(missing)} missing. Fetch it with network access: lowtide pull "
            f"{reference.name}."
        )
    try:
        return _newest(HubModel.ask(reference))
    except HubError as error:
        if here is None:
            raise
        reason = brief(error.__cause__ or error)
        _log.warning(
            "%s: the hub cannot be asked (%s); the whole copy that is here is used: %s",
            *(reference.name, reason, here),
        )
        return here


def _kept_copy(reference: HubReference) -> tuple[Path | None, list[str]]:
    """Return a complete model in the cache, as last fetched, or the names of missing files."""
    commit = cached_commit(reference.repo_id, reference.revision)
    folder = None if commit is None else snapshot_folder(reference.repo_id, commit)
    if folder is None or not folder.is_dir():
        return None, ["everything"]
    missing = missing_files(folder)
    if reference.tag is None and not missing:
        return folder, []
    models = {s: files for s, files in _gguf_models(folder).items() if is_whole(files)}
    if not models:
        return None, missing if reference.tag is None else [reference.tag]
    try:
        return folder / choose_gguf(models, reference.tag, reference.name)[0], []
    except CheckpointError:
        return None, [reference.tag or "a tag that says which GGUF file"]


def _gguf_models(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the GGUF models of a snapshot, ignoring links whose target is gone."""
    files = [path for path in folder.glob("**/*.gguf") if path.exists()]
    return gguf_models(path.relative_to(folder).as_posix() for path in files)


def _newest(model: HubModel) -> Path | HubModel:
    """Return the hub's current model, as a path if all of it is in the cache."""
    folder = model.folder
    needed = [name for name in model.files if model.gguf_files or is_small(name)]
    is_here = all((folder / name).exists() for name in needed)
    if not is_here or (not model.gguf_files and missing_files(folder)):
        return model
    with contextlib.suppress(HubError):  # a read-only cache is enough
        remember_revision(model.reference, model.commit)
    return model.path


def _cached_models(name: str, folder: Path) -> Iterator[LocalModel]:
    """Yield the models of one commit: a checkpoint, and each GGUF model with its tag.

    A folder that this user cannot read, or that disappears, is skipped with a notice.
    """
    try:
        if (folder / "config.json").exists():
            yield _local_model(name, folder.name, folder)
        for stem, files in _gguf_models(folder).items():
            num_bytes = sum((folder / file).stat().st_size for file in files)
            path, tag = folder / files[0], tag_of(stem)
            yield LocalModel(f"{name}:{tag}", folder.name, num_bytes, path, is_whole(files))
    except OSError as error:
        _log.warning("%s is left out: %s.", error.filename or folder, error.strerror)


def _local_model(name: str, revision: str, folder: Path) -> LocalModel:
    try:
        is_complete = not missing_files(folder)
    except HubError:  # a damaged index: listed, and refused when it is used
        is_complete = False
    num_bytes = sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    return LocalModel(name, revision, num_bytes, folder, is_complete)
