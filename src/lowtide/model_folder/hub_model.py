"""A model on the hub before its weights are fetched: file names, sizes and headers.

    model = HubModel.ask(HubReference("org/name"))  # one request
    model.config(), model.checkpoint()  # config.json; 8 bytes of each shard, then its header
    model.gguf  # in place of both, of a GGUF model: its headers

Everything is from one commit, that of the revision when the hub was asked.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from lowtide.config import ModelConfig
from lowtide.config.quantisation import MODELOPT_NAME, with_modelopt
from lowtide.errors import CheckpointError, ConfigError, HubError
from lowtide.families import read_config
from lowtide.files.json_file import parse_object, shown
from lowtide.files.regular_file import RegularFile
from lowtide.model_folder.chat_template import TOOL_TEMPLATE_NAME
from lowtide.model_folder.checkpoint import (
    INDEX_NAME,
    LENGTH_BYTES,
    Checkpoint,
    checked_weight_map,
    header_num_bytes,
    shard_names,
)
from lowtide.model_folder.gguf_file import choose_gguf, gguf_models, is_whole
from lowtide.model_folder.hub_cache import MAX_INDEX_BYTES, is_commit, snapshot_folder
from lowtide.model_folder.hub_reference import HubReference
from lowtide.model_folder.hub_requests import answer_to, asked, failure, file_part

if TYPE_CHECKING:
    from lowtide.model_folder.gguf_header import GgufHeader
    from lowtide.model_folder.gguf_model import GgufModel

_SMALL_ENDS = (".json", ".jinja", "merges.txt")
"""Endings of files fetched beside weights: configuration, tokenizer. Never code, nor pickles."""
NUM_CONNECTIONS = 8
MAX_CONFIG_BYTES = 16 << 20
MAX_LISTING_BYTES = 64 << 20  # of 160,000 files; the hub advises fewer than 100,000

_MAX_NAME_BYTES = 200
_OTHER = "choose another repository"
_LATER = "ask again later, or choose another repository"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNFIT = re.compile(r"(?:^|/)(?:\.|/|$)|\\")  # folders above, hidden ones, no name
_OTHER_FORMATS = {".bin": "PyTorch's pickled weights", ".pth": "pickled weights"}

Siblings = Mapping[str, Mapping[str, object]]
"""The hub's description of a repository's files, by name."""


class HubFile(NamedTuple):
    """A file as the hub lists it."""

    num_bytes: int
    sha256: str | None  # of its bytes, and its name in the cache; None for small files


@dataclass(frozen=True)
class HubModel:
    """The files of one commit of a model, and access to parts of them."""

    reference: HubReference  # as it was asked for
    commit: str
    files: Mapping[str, HubFile]  # weights, configuration, tokenizer; by name, in the hub's order
    gguf_files: tuple[str, ...] = ()  # of a GGUF model, in order; then there are no other files

    @classmethod
    def ask(cls, reference: HubReference) -> HubModel:
        """Ask the hub for a model.

        Raises HubError if the hub cannot be asked or has no such model, CheckpointError if several
        GGUF models match.
        """
        name = reference.name
        path = f"api/models/{reference.repo_id}/revision/{quote(reference.revision, safe='')}"
        try:
            data = asked(lambda: answer_to(f"{path}?blobs=true", MAX_LISTING_BYTES))
            listing = parse_object(data, "what the hub says", HubError, _LATER)
        # The hub's errors share no base class: HTTP, connection and validation errors.
        except Exception as error:
            raise failure(name, error) from error
        commit = str(listing.get("sha"))
        if not is_commit(commit):
            said = shown(listing.get("sha"))
            raise HubError(
                f"{name}: the hub says that it is {said}, which is not a commit; {_LATER}."
            )
        siblings = _siblings(listing.get("siblings"), name)
        gguf_files = _gguf_files(siblings, reference)
        files = {
            each: HubFile(_num_bytes(each, siblings, name), _sha256(each, siblings, name))
            for each in (gguf_files or sorted(filter(_is_fetched, siblings)))
        }
        model = cls(reference, commit, files, gguf_files)
        if not gguf_files:
            model._check_whole(list(siblings))
        return model

    @property
    def name(self) -> str:
        return self.reference.name

    @property
    def folder(self) -> Path:
        """Folder of the files once they are fetched."""
        return snapshot_folder(self.reference.repo_id, self.commit)

    @property
    def path(self) -> Path:
        """Path of the model once it is fetched: its folder, or its first GGUF file."""
        return self.folder / self.gguf_files[0] if self.gguf_files else self.folder

    @cached_property
    def gguf(self) -> GgufModel:
        """Headers of a GGUF model. Raises as `GgufModel.open` does, and HubError."""
        from lowtide.model_folder.gguf_model import GgufModel  # with every family

        return GgufModel.open(self.path, self.header, self.part)

    def model_config(self, overrides: Mapping[str, object]) -> ModelConfig:
        """Return the model's configuration; `overrides` replace values of `config.json`.

        Raises HubError, ConfigError, UnsupportedError.
        """
        if self.gguf_files:
            return self.gguf.config(overrides)
        way_out = f"Give another value as a config override, or {_OTHER}"
        return read_config(self.config(), overrides=overrides, way_out=way_out)

    def config(self) -> dict[str, Any]:
        """Return the contents of `config.json`. Raises HubError, ConfigError."""
        config = self._object("config.json", MAX_CONFIG_BYTES, ConfigError)
        if MODELOPT_NAME not in self.files:
            return config
        modelopt = self._object(MODELOPT_NAME, MAX_CONFIG_BYTES, ConfigError)
        return dict(with_modelopt(config, modelopt))

    def checkpoint(self) -> Checkpoint:
        """Return the tensors, from the shards' headers alone. Raises HubError, CheckpointError."""
        names = self.shards()
        with ThreadPoolExecutor(NUM_CONNECTIONS, "lowtide-hub") as pool:
            return Checkpoint.of_headers(list(pool.map(self._header, names)))

    def url(self, name: str) -> str:
        import huggingface_hub

        return huggingface_hub.hf_hub_url(self.reference.repo_id, name, revision=self.commit)

    def shards(self) -> tuple[str, ...]:
        """Return the weight files, known by their names or else by the index.

        Raises CheckpointError if some are missing, HubError.
        """
        if self.gguf_files:
            return self.gguf_files
        try:
            return shard_names(self.files, self.name)
        except CheckpointError:
            if INDEX_NAME not in self.files:
                raise
        index = self._object(INDEX_NAME, MAX_INDEX_BYTES, CheckpointError)
        shards = sorted(set(checked_weight_map(index, f"{self.name}: {INDEX_NAME}").values()))
        for shard in shards:
            if shard not in self.files:
                raise CheckpointError(
                    f"{self.name}: {INDEX_NAME} names {shard}, which is missing; {_OTHER}."
                )
        return tuple(shards)

    def header(self, path: Path) -> GgufHeader:
        """Read from the hub the header of the GGUF file that will be at `path`."""
        name = path.relative_to(self.folder).as_posix()
        if name not in self.files:
            problem = f"{name} belongs to it and is not on the hub"
            raise CheckpointError(f"{self.name}: {problem}; {_OTHER}.")
        file = RegularFile(path, self.files[name].num_bytes, (0, 0, 0, 0))
        from lowtide.model_folder.gguf_header import GgufHeader

        def read(offset: int, num_bytes: int) -> bytes:
            return self._read(name, offset, min(num_bytes, file.num_bytes - offset))

        return GgufHeader.parse(read, file)

    def part(self, file: RegularFile, offset: int, num_bytes: int) -> bytes:
        return self._read(file.path.relative_to(self.folder).as_posix(), offset, num_bytes)

    def _header(self, name: str) -> tuple[RegularFile, bytes]:
        num_bytes = self.files[name].num_bytes
        file = RegularFile(self.folder / name, num_bytes, (0, 0, 0, 0))
        start = self._read(name, 0, min(LENGTH_BYTES, num_bytes))
        length = header_num_bytes(start, num_bytes, Path(f"{self.name}/{name}"))
        return file, self._read(name, LENGTH_BYTES, length)

    def _object(self, name: str, max_bytes: int, error: type[CheckpointError]) -> dict[str, Any]:
        num_bytes = self.files[name].num_bytes
        if num_bytes > max_bytes:
            problem = f"has {num_bytes} bytes; at most {max_bytes} are read"
            raise error(f"{self.name}: {name} {problem}; {_OTHER}.")
        data = self._read(name, 0, num_bytes).removeprefix(codecs.BOM_UTF8)
        return parse_object(data, f"{self.name}: {name}", error, _OTHER)

    def _read(self, name: str, start: int, num_bytes: int) -> bytes:
        try:
            return b"".join(file_part(self.url(name), start, start + num_bytes))
        except Exception as error:
            raise failure(f"{self.name}: {name}", error) from error

    def _check_whole(self, all_names: list[str]) -> None:
        """Raise HubError if there is nothing that can be loaded."""
        missing = [] if "config.json" in self.files else ["config.json"]
        if not any(name.endswith(".safetensors") for name in self.files):
            missing.append("*.safetensors")
        if missing:
            ends = [end for end in _OTHER_FORMATS if any(name.endswith(end) for name in all_names)]
            others = {_OTHER_FORMATS[end] for end in ends}
            instead = f" It holds {' and '.join(sorted(others))} instead." if others else ""
            raise HubError(
                f"{self.name} is not a checkpoint that can be loaded: {' and '.join(missing)} "
                f"missing on the hub.{instead} Only safetensors and GGUF are fetched; choose the "
                "model's original repository."
            )


def _gguf_files(names: Collection[str], reference: HubReference) -> tuple[str, ...]:
    """Return the files of the requested GGUF model; none for a checkpoint without a tag.

    Raises HubError for a tag without GGUF models, CheckpointError for missing files.
    """
    if reference.tag is None and any(name.endswith(".safetensors") for name in names):
        return ()
    models = gguf_models(name for name in names if not name.startswith("."))
    if not models:
        if reference.tag is not None:
            raise HubError(
                f"{reference.name}: {reference.repo_id} holds no GGUF files that a tag could name; "
                f"give {reference.repo_id} alone."
            )
        return ()
    files = choose_gguf(models, reference.tag, reference.name)
    if not is_whole(files):
        raise CheckpointError(
            f"{reference.name}: of {files[0]} and its set, files are missing; give another tag, or "
            f"{_OTHER}."
        )
    return files


def _checked_name(file: object, model: str) -> str:
    """Check a file's name; raises HubError if it is not text, or will be fetched and is unsafe."""
    if isinstance(file, str) and not _is_fetched(file) and not file.endswith(".gguf"):
        return file
    if not isinstance(file, str) or not _is_fit(file):
        raise HubError(
            f"{model}: the hub lists a file {shown(file)}; names are printable text of at most "
            f"{_MAX_NAME_BYTES} bytes. {_OTHER.capitalize()}."
        )
    return file


def _is_fit(path: str) -> bool:
    return path.isprintable() and len(path.encode()) <= _MAX_NAME_BYTES and not _UNFIT.search(path)


def _siblings(listed: object, model: str) -> Siblings:
    """Map names to the hub's description of files. Raises HubError for anything else."""
    files: list[Any] = listed if isinstance(listed, list) else [listed]
    if not all(isinstance(file, dict) for file in files):
        raise HubError(f"{model}: the hub lists {shown(listed)}, which are not files; {_LATER}.")
    return {_checked_name(file.get("rfilename"), model): file for file in files}


def _num_bytes(name: str, siblings: Siblings, model: str) -> int:
    """Return a file's size. Raises HubError for an invalid one."""
    size = siblings[name].get("size") or 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise HubError(f"{model}: the hub says {shown(size)} bytes of {shown(name)}; {_LATER}.")
    return size


def _sha256(name: str, siblings: Siblings, model: str) -> str | None:
    """Return a large file's SHA-256, its name in the cache. Raises HubError for an invalid one."""
    lfs = siblings[name].get("lfs")
    if lfs is None:
        return None
    said = lfs.get("sha256") if isinstance(lfs, dict) else lfs
    if not _SHA256.fullmatch(str(said)):
        told = f"{shown(said)}, which is not a SHA-256 of {shown(name)}"
        raise HubError(f"{model}: the hub says {told}; {_LATER}.")
    return str(said)


def is_small(name: str) -> bool:
    """Return True for a fetched file beside the weights."""
    return _is_fetched(name) and name.endswith(_SMALL_ENDS)


def _is_fetched(name: str) -> bool:
    """Return True for a fetched file; subfolders, except one, hold other formats of the model."""
    is_own = "/" not in name or name == TOOL_TEMPLATE_NAME
    return is_own and name.endswith((*_SMALL_ENDS, ".safetensors"))
