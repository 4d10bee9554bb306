"""A model in one or several GGUF files: its `config.json` and its tensors, by our names.

model = GgufModel.open(path)  # the file, or the first of a split
config = model.config()
model.checkpoint(config).tensors["model.embed_tokens.weight"]
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.config import AttentionSpec, ModelConfig
from lowtide.core import NOTHING
from lowtide.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from lowtide.families import gguf_architecture, gguf_architectures, read_config
from lowtide.families.gguf import (
    FUSED_QKV,
    GgufArchitecture,
    GgufKeys,
    RearrangedTensor,
    layer_of,
    own_name,
)
from lowtide.families.unsupported import SOME_THAT_RUN
from lowtide.files.json_file import shown
from lowtide.files.regular_file import OTHER_DRIVE, RegularFile
from lowtide.model_folder.checkpoint import Checkpoint, StoredPart, TensorEntry
from lowtide.model_folder.extra_layers import warn_of_extra_layers
from lowtide.model_folder.gguf_eos import ending_ids
from lowtide.model_folder.gguf_file import MAGIC, SPLIT
from lowtide.model_folder.gguf_header import GgufArray, GgufHeader, GgufTensor, Metadata
from lowtide.model_folder.gguf_tokenizer import gguf_tokenizer
from lowtide.model_folder.tokenizer import Tokenizer

_MAX_FILES = 4096
_MAX_VECTOR_BYTES = 65536
_OTHER_FILE = "Fetch it again, or choose another file of the model"

ReadPart = Callable[[RegularFile, int, int], bytes]
"""Reads n bytes of a file from an offset on; fewer only at its end."""


def _local_part(file: RegularFile, offset: int, num_bytes: int) -> bytes:
    """Read part of a local file. Raises StorageError."""
    descriptor = file.open()
    try:
        return os.pread(descriptor, num_bytes, offset)
    except OSError as reason:
        problem = f"cannot be read: {reason.strerror}"
        raise StorageError(f"{file.path} {problem}. {OTHER_DRIVE}") from reason
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The headers of a model's files; the first one has its metadata."""

    headers: tuple[GgufHeader, ...]
    architecture: GgufArchitecture
    read_part: ReadPart

    @classmethod
    def open(
        cls,
        path: Path,
        read_header: Callable[[Path], GgufHeader] = GgufHeader.read,
        read_part: ReadPart = _local_part,
    ) -> GgufModel:
        """Open a model; read_header, read_part: for files elsewhere.

        Raises CheckpointError for files that are damaged, missing or contradictory,
        UnsupportedError for an unsupported architecture or type.
        """
        first = read_header(path)
        with _named(path, first.metadata):
            gguf_architectures(first.metadata)  # refused before the other files are read
        if first.file.num_bytes > first.num_bytes:
            _check_not_joined(first, read_part)
        headers = (first, *map(read_header, _others(path, first)))
        _check_split(headers)
        with _named(path, first.metadata):
            architecture = gguf_architecture(first.metadata, _keys(headers, read_part))
        return cls(headers, architecture, read_part)

    @property
    def path(self) -> Path:
        return self.headers[0].file.path

    @property
    def metadata(self) -> Metadata:
        return self.headers[0].metadata

    def config(self, overrides: Mapping[str, object] = NOTHING) -> ModelConfig:
        """Return the model's configuration; `overrides` and errors as in `read_config_in`."""
        try:
            return read_config(self._as_config(), overrides=overrides, way_out=_OTHER_FILE)
        except ConfigError as error:
            raise ConfigError(f"{self.path}, as a config.json: {error}") from None
        except UnsupportedError as error:
            name = own_name(self.metadata)
            raise UnsupportedError(
                f"{self.path}, as a config.json: {error}{name} {SOME_THAT_RUN}"
            ) from None

    def _as_config(self) -> dict[str, object]:
        """Return the metadata under the keys of a `config.json`."""
        keys = _keys(self.headers, self.read_part)
        try:
            return {**self.architecture.config(keys), **_token_ids(self.metadata)}
        except ConfigError as error:
            raise ConfigError(f"{error} {_OTHER_FILE}.") from None

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None without one. Raises CheckpointError or UnsupportedError."""
        tokens, embedding = self.metadata.get("tokenizer.ggml.tokens"), "token_embd.weight"
        rows = [h.tensors[embedding].shape[0] for h in self.headers if embedding in h.tensors]
        # Before anything is made of them: millions take a minute.
        if isinstance(tokens, GgufArray) and rows and tokens.num_elements > rows[0]:
            raise CheckpointError(
                f"{self.path}: its tokenizer has {tokens.num_elements} tokens, and {embedding} "
                f"{rows[0]} rows: they are of two models. Fetch the file again."
            )
        return gguf_tokenizer(self.metadata, self.path)

    def checkpoint(self, config: ModelConfig) -> Checkpoint:
        """Locate the tensors by the names of the family's schema.

        Raises CheckpointError for duplicate names or parts that do not fit their tensor, and
        UnsupportedError for an unknown tensor, without which answers would be wrong.
        """
        tensors: dict[str, TensorEntry] = {}
        arranged: list[_FoundTensor] = []
        names = (name for header in self.headers for name in header.tensors)
        warn_of_extra_layers(names, "blk.", config.num_layers)
        for file, header in enumerate(self.headers):
            for name, tensor in self._divided(header, config):
                found = _FoundTensor(name, tensor, file)
                if layer_of(name) >= config.num_layers:  # predicts further tokens; not loaded
                    tensors[name] = TensorEntry(*found.place, tensor.shape)
                    continue
                ours = self.architecture.name_of(name)
                if ours is None:
                    raise UnsupportedError(
                        f"{header.file.path}: tensor {shown(name)} is none that lowtide computes "
                        f"with in {self.architecture.name}. {SOME_THAT_RUN}"
                    )
                if isinstance(ours, RearrangedTensor):
                    arranged.append(found._replace(arranged=ours))
                elif ours in tensors:
                    raise CheckpointError(
                        f"{self.path}: tensor {shown(name)} is given twice. {_OTHER_FILE}."
                    )
                else:
                    tensors[ours] = TensorEntry(*found.place, tensor.shape)
        tensors |= _put_together(arranged, tensors, config)
        return Checkpoint(tuple(header.file for header in self.headers), tensors)

    def _divided(self, header: GgufHeader, config: ModelConfig) -> Iterator[tuple[str, GgufTensor]]:
        """Yield a file's tensors, dividing fused queries, keys and values if necessary."""
        for name, tensor in header.tensors.items():
            layer = layer_of(name)
            spec = config.layers[layer].mixer if 0 <= layer < config.num_layers else None
            is_fused = FUSED_QKV in name and self.architecture.name_of(name) is None
            if not is_fused or not isinstance(spec, AttentionSpec):
                yield name, tensor
                continue
            rows = {"q": spec.query_size, "k": spec.kv_size, "v": spec.kv_size}
            if tensor.shape[0] != sum(rows.values()):
                raise CheckpointError(
                    f"{header.file.path}: tensor {shown(name)} has {tensor.shape[0]} rows; the "
                    f"metadata makes it {sum(rows.values())}. {_OTHER_FILE}."
                )
            row_bytes, offset = tensor.num_bytes // tensor.shape[0], tensor.offset
            for part, count in rows.items():
                place = (tensor.format, (count, *tensor.shape[1:]), offset, count * row_bytes)
                yield name.replace(FUSED_QKV, f".attn_{part}."), GgufTensor(*place)
                offset += count * row_bytes


@contextmanager
def _named(path: Path, metadata: Metadata) -> Iterator[None]:
    """Name the file in errors about its architecture."""
    try:
        yield
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}{own_name(metadata)}") from None


def _keys(headers: Sequence[GgufHeader], read_part: ReadPart) -> GgufKeys:
    metadata = headers[0].metadata
    shapes = {name: tensor.shape for each in headers for name, tensor in each.tensors.items()}

    def vector(name: str) -> list[float]:
        header = next(each for each in headers if name in each.tensors)
        return _short_vector(header, name, read_part)

    return GgufKeys(str(metadata["general.architecture"]), metadata, shapes, vector)


def _short_vector(header: GgufHeader, name: str, read_part: ReadPart) -> list[float]:
    """Read the numbers of a short tensor.

    Raises CheckpointError for other tensors, StorageError if it cannot be read.
    """
    tensor = header.tensors[name]
    if tensor.format.name != "F32" or tensor.num_bytes > _MAX_VECTOR_BYTES:
        raise CheckpointError(
            f"{header.file.path}: tensor {shown(name)} is {tensor.format.name} of shape "
            f"{list(tensor.shape)}, not a short vector of float32. {_OTHER_FILE}."
        )
    data = read_part(header.file, tensor.offset, tensor.num_bytes)
    if len(data) < tensor.num_bytes:
        raise StorageError(f"{header.file.path} ends inside {shown(name)}; fetch it again.")
    numbers: list[float] = np.frombuffer(data, "<f4").tolist()
    return numbers


class _FoundTensor(NamedTuple):
    """A tensor in one of the files."""

    name: str
    tensor: GgufTensor
    file: int
    arranged: RearrangedTensor | None = None

    @property
    def place(self) -> tuple[int, int, int, str]:
        dtype = self.tensor.format.dtypes[0]
        return self.file, self.tensor.offset, self.tensor.num_bytes, dtype


def _put_together(
    found: Sequence[_FoundTensor], whole: Collection[str], config: ModelConfig
) -> dict[str, TensorEntry]:
    """Assemble the tensors stored in parts or rearranged; names in `whole` need none of it.

    Raises CheckpointError for parts that do not fill their tensor.
    """
    parts: dict[str, list[StoredPart]] = {}
    for each in found:
        if each.arranged is not None and each.arranged.name not in whole:
            view = each.arranged.view(config)
            stored, wanted = each.tensor.shape, view.stored_shape
            width = (
                1 if len(stored) == 1 and wanted[-1] == 1 else stored[-1]
            )  # a vector has rows of 1
            if math.prod(stored) != math.prod(wanted) or width != wanted[-1]:
                raise CheckpointError(
                    f"Tensor {shown(each.name)} has shape {list(stored)}; the metadata makes it "
                    f"{list(wanted)}. {_OTHER_FILE}."
                )
            parts.setdefault(each.arranged.name, []).append(StoredPart(*each.place, view))
    return {name: _entry(name, of_it) for name, of_it in parts.items()}


def _entry(name: str, parts: Sequence[StoredPart]) -> TensorEntry:
    shape = parts[0].view.shape
    num_elements = sum(math.prod(part.view.stored_shape) for part in parts)
    if num_elements != math.prod(shape):
        raise CheckpointError(
            f"{num_elements} of the {math.prod(shape)} weights of {shown(name)} are in the file. "
            f"{_OTHER_FILE}."
        )
    first = parts[0]
    place = (first.file, first.offset, first.num_bytes, first.dtype)
    if len(parts) == 1 and first.view.order == tuple(range(len(shape))):  # another shape alone
        return TensorEntry(*place, shape)
    rows = math.prod(shape[:-1])
    tensor_shape = (rows,) if shape[-1] == 1 else (rows, shape[-1])
    return TensorEntry(*place, tensor_shape, tuple(parts))


def _check_not_joined(header: GgufHeader, read_part: ReadPart) -> None:
    if read_part(header.file, header.num_bytes, len(MAGIC)) == MAGIC:
        raise CheckpointError(
            f"{header.file.path}: another GGUF file begins at byte {header.num_bytes}: parts that "
            "were joined, as cat does, are not one file. Keep them apart, named "
            "NAME-00001-of-0000N.gguf and so on, and give the first; or let `llama-gguf-split "
            "--merge` join them."
        )


def _others(path: Path, first: GgufHeader) -> list[Path]:
    """Return the other files of a split, in order. Raises CheckpointError for a wrong name."""
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= _MAX_FILES:
        raise CheckpointError(
            f"{path}: split.count is {shown(count)}, not a number from 0 to {_MAX_FILES}. "
            f"{_OTHER_FILE}."
        )
    if count <= 1:
        return []
    match = SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} files, which are named NAME-00001-of-{count:05d}.gguf and "
            "so on; give it its name back."
        )
    if int(match[2]) != 1:
        first_name = f"{match[1]}-00001-of-{match[3]}.gguf"
        raise CheckpointError(f"{path} is not the first of {count} files; give {first_name}.")
    names = [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(2, count + 1)]
    return [path.with_name(name) for name in names]


def _check_split(headers: Sequence[GgufHeader]) -> None:
    for number, header in enumerate(headers):
        said = header.metadata.get("split.no", number)
        if said != number:
            raise CheckpointError(
                f"{header.file.path} says that it is file {shown(said)} of its set (from 0), not "
                f"{number}; give it its name back, or fetch it again."
            )
        count = header.metadata.get("split.count", len(headers))
        if len(headers) > 1 and count != len(headers):
            raise CheckpointError(
                f"{header.file.path} says that it is one of {shown(count)} files, and the first of "
                f"its set that they are {len(headers)}; they do not belong together. Fetch all "
                "from one repository."
            )
    found = sum(len(header.tensors) for header in headers)
    wanted = headers[0].metadata.get("split.tensors.count", found)
    if len(headers) > 1 and wanted != found:
        raise CheckpointError(
            f"{headers[0].file.path} and the files after it have {found} tensors, not "
            f"{shown(wanted)}; they do not belong together. Fetch all from one repository."
        )


def _token_ids(metadata: Metadata) -> dict[str, object]:
    """Return the special token ids as `config.json` has them."""
    ends = ending_ids(metadata)
    ids: dict[str, object] = {"eos_token_id": ends} if ends else {}
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    return ids if pad is None else {**ids, "pad_token_id": pad}
