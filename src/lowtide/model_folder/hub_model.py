"""A model on the hub, known without its weights: which files, how large, what their headers say.

    model = HubModel.ask("org/name", "main")  # one request
    model.config(), model.checkpoint()  # config.json; 8 bytes of each shard, then its header

Everything is of one commit, the one that the revision stood for when the hub was asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.errors import CheckpointError, ConfigError, HubError
from lowtide.files.json_file import parse_object, shown
from lowtide.files.regular_file import RegularFile
from lowtide.model_folder.checkpoint import (
    INDEX_NAME,
    LENGTH_BYTES,
    Checkpoint,
    checked_weight_map,
    header_num_bytes,
    shard_names,
)
from lowtide.model_folder.hub_cache import MAX_INDEX_BYTES, is_commit, snapshot_folder
from lowtide.model_folder.hub_requests import asked, failure, read_part
from lowtide.model_folder.way_out import gguf_way_out

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

SMALL_FILES = ("*.json", "*.jinja")
"""What is fetched beside weights: configuration and tokenizer. Never code or pickled weights."""
IGNORED_FILES = ("*/*",)
"""Folders hold other formats of the same model."""
NUM_CONNECTIONS = 8
MAX_CONFIG_BYTES = 16 << 20

_MAX_NAME_BYTES = 200
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OTHER_FORMATS = {".gguf": "GGUF", ".bin": "PyTorch's pickled weights", ".pth": "pickled weights"}


class HubFile(NamedTuple):
    """A file as the hub lists it."""

    num_bytes: int
    sha256: str | None  # of its bytes, and its name in the cache; None for small files


@dataclass(frozen=True, slots=True)
class HubModel:
    """The files of one commit of a model, and how to read of them."""

    repo_id: str
    revision: str  # as it was asked for
    commit: str
    files: Mapping[str, HubFile]  # weights, configuration, tokenizer; by name, in its order

    @classmethod
    def ask(cls, repo_id: str, revision: str) -> HubModel:
        """Raises HubError where the hub cannot be asked, or has no such model to be read."""
        import huggingface_hub
        from huggingface_hub import constants

        timeout_s = constants.HF_HUB_ETAG_TIMEOUT
        name = f"{repo_id}@{revision}"
        try:
            info = asked(
                lambda: huggingface_hub.HfApi().model_info(
                    repo_id, revision=revision, timeout=timeout_s, files_metadata=True
                )
            )
        # The hub's errors share no base class: HTTP, connection and validation errors.
        except Exception as error:
            raise failure(name, error) from error
        if not is_commit(str(info.sha)):
            raise HubError(
                f"{name}: the hub says that it is {shown(info.sha)}, which is no commit."
            )
        siblings = {_checked_name(file.rfilename, name): file for file in info.siblings or ()}
        files = {
            each: HubFile(_num_bytes(siblings[each], name), _sha256(siblings[each], name))
            for each in sorted(siblings)
            if _is_fetched(each)
        }
        model = cls(repo_id, revision, str(info.sha), files)
        model._check_whole(list(siblings))
        return model

    @property
    def name(self) -> str:
        return f"{self.repo_id}@{self.revision}"

    @property
    def folder(self) -> Path:
        """Where its files are once they are fetched."""
        return snapshot_folder(self.repo_id, self.commit)

    def config(self) -> dict[str, Any]:
        """What `config.json` holds. Raises HubError, ConfigError."""
        return self._object("config.json", MAX_CONFIG_BYTES, ConfigError)

    def checkpoint(self) -> Checkpoint:
        """Its tensors, from the headers of its shards alone. Raises HubError, CheckpointError."""
        names = self.shards()
        with ThreadPoolExecutor(NUM_CONNECTIONS, "lowtide-hub") as pool:
            return Checkpoint.of_headers(list(pool.map(self._header, names)))

    def url(self, name: str) -> str:
        import huggingface_hub

        return huggingface_hub.hf_hub_url(self.repo_id, name, revision=self.commit)

    def shards(self) -> tuple[str, ...]:
        """The weight files, told by their names; by the index where those do not tell.

        Raises CheckpointError where not all are there, HubError.
        """
        try:
            return shard_names(self.files, self.name)
        except CheckpointError:
            if INDEX_NAME not in self.files:
                raise
        index = self._object(INDEX_NAME, MAX_INDEX_BYTES, CheckpointError)
        shards = sorted(set(checked_weight_map(index, f"{self.name}: {INDEX_NAME}").values()))
        for shard in shards:
            if shard not in self.files:
                raise CheckpointError(f"{self.name}: {INDEX_NAME} names {shard}, which is missing.")
        return tuple(shards)

    def _header(self, name: str) -> tuple[RegularFile, bytes]:
        num_bytes = self.files[name].num_bytes
        file = RegularFile(self.folder / name, num_bytes, (0, 0, 0))
        start = self._read(name, 0, min(LENGTH_BYTES, num_bytes))
        length = header_num_bytes(start, num_bytes, Path(f"{self.name}/{name}"))
        return file, self._read(name, LENGTH_BYTES, length)

    def _object(self, name: str, max_bytes: int, error: type[CheckpointError]) -> dict[str, Any]:
        num_bytes = self.files[name].num_bytes
        if num_bytes > max_bytes:
            raise error(f"{self.name}: {name} has {num_bytes} bytes; at most {max_bytes} are read.")
        return parse_object(self._read(name, 0, num_bytes), f"{self.name}: {name}", error)

    def _read(self, name: str, start: int, num_bytes: int) -> bytes:
        try:
            return read_part(self.url(name), start, num_bytes)
        except Exception as error:
            raise failure(f"{self.name}: {name}", error) from error

    def _check_whole(self, all_names: list[str]) -> None:
        """Raises HubError where there is nothing that could be loaded."""
        missing = [] if "config.json" in self.files else ["config.json"]
        if not any(name.endswith(".safetensors") for name in self.files):
            missing.append("*.safetensors")
        if missing:
            others = {told for end, told in _OTHER_FORMATS.items() if _any_end(all_names, end)}
            instead = f" It holds {' and '.join(sorted(others))} instead." if others else ""
            way = f" {gguf_way_out(self.repo_id)}" if _any_end(all_names, ".gguf") else ""
            raise HubError(
                f"{self.name} is not a checkpoint that can be loaded: {' and '.join(missing)} "
                f"missing on the hub.{instead} Only safetensors checkpoints are fetched; choose "
                f"the model's original repository.{way}"
            )


def _checked_name(file: object, model: str) -> str:
    """Raises HubError for what is no text, or fetched and unfit for a name of a file."""
    if isinstance(file, str) and not _is_fetched(file):
        return file
    if not isinstance(file, str) or not file.isprintable() or len(file.encode()) > _MAX_NAME_BYTES:
        raise HubError(
            f"{model}: the hub lists a file {shown(file)}; names are printable text of at most "
            f"{_MAX_NAME_BYTES} bytes."
        )
    return file


def _num_bytes(file: RepoSibling, model: str) -> int:
    """Raises HubError for what is no size."""
    size: object = file.size or 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise HubError(f"{model}: the hub says {shown(size)} bytes of {shown(file.rfilename)}.")
    return size


def _sha256(file: RepoSibling, model: str) -> str | None:
    """A large file's SHA-256, its name in the cache. Raises HubError for what is no SHA-256."""
    if file.lfs is None:
        return None
    said = file.lfs.sha256
    if not _SHA256.fullmatch(str(said)):
        raise HubError(
            f"{model}: the hub says {shown(said)}, which is no SHA-256 of {shown(file.rfilename)}."
        )
    return said


def is_small(name: str) -> bool:
    """Whether this is a file beside the weights that is fetched."""
    return _is_one_of(name, SMALL_FILES)


def _is_fetched(name: str) -> bool:
    return is_small(name) or _is_one_of(name, ("*.safetensors",))


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    is_allowed = any(fnmatch(name, pattern) for pattern in patterns)
    return is_allowed and not any(fnmatch(name, pattern) for pattern in IGNORED_FILES)


def _any_end(names: list[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)
