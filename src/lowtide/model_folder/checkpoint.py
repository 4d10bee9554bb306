"""Tensors in a model folder's safetensors files: names, shapes and byte ranges.

Reads headers only, without trusting them: every offset is checked against the file first. Knows
nothing of what tensors mean.

    checkpoint = Checkpoint.open(folder)
    checkpoint.tensors["lm_head.weight"]  # TensorEntry(file=0, offset=..., num_bytes=..., ...)
    checkpoint.files[0].open()  # the file that was checked, or a StorageError

Accepts the files that the safetensors library accepts (compared with 0.8.0): tensors fill the data
section without holes, overlaps or trailing bytes, in any order. Two things that the library accepts
are refused: duplicate names and unprintable names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from numpy.typing import NDArray

from lowtide.errors import CheckpointError, StorageError
from lowtide.files.json_file import listed, parse_object, read_object, shown
from lowtide.files.mistaken import HEAD_BYTES, mistaken_weights
from lowtide.files.regular_file import FETCH_AGAIN, RegularFile, open_regular, read_from

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format; also applied to index files."""

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

LENGTH_BYTES = 8
"""Bytes of the header's length, a little-endian integer at the start of the file."""

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits per element of every type in the format; not all of them are supported."""

_SHARD = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_MAX_NAME_CHARS = 255  # of a file, on all of Linux's file systems
_MAX_ELEMENTS = 2**63
_MAX_DIMENSIONS = 32  # of an array of numpy 1


class ArrayView(NamedTuple):
    """The part of a tensor that stored data fills, in the order of the file.

    It is the tensor in `shape`, from `start` to `stop` of its `axis`, with axes in this `order`.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    axis: int = 0
    start: int = 0
    stop: int | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the order of the file."""
        chosen = list(self.shape)
        chosen[self.axis] = len(range(*slice(self.start, self.stop).indices(chosen[self.axis])))
        return tuple(chosen[axis] for axis in self.order)

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """View the part of a contiguous array of the tensor's elements."""
        chosen = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        return array.reshape(self.shape)[chosen].transpose(self.order)


class StoredPart(NamedTuple):
    """A stored tensor that must be rearranged to become one of the model's, or part of one."""

    file: int
    offset: int
    num_bytes: int
    dtype: str
    view: ArrayView


class TensorEntry(NamedTuple):
    """Place and type of one tensor."""

    file: int  # index into Checkpoint.files
    offset: int  # of its first byte, from the start of the file; aligned to nothing
    num_bytes: int
    dtype: str  # the format's name: "BF16"
    shape: tuple[int, ...]
    parts: tuple[
        StoredPart, ...
    ] = ()  # parts that it is assembled from; its place is that of the first
    tensors: tuple[
        TensorEntry, ...
    ] = ()  # tensors of a multi-tensor format; its place is that of the first

    @property
    def places(self) -> Sequence[TensorEntry | StoredPart]:
        """Everything stored of the tensor."""
        return self.parts or self.tensors or (self,)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder, by name. Holds no file open and no weight."""

    files: tuple[RegularFile, ...]  # as their headers were checked
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the headers in `folder`: `model.safetensors`, or an index and its shards.

        Shards named `model-00001-of-00003.safetensors` need no index. Raises CheckpointError,
        naming the file and the numbers, for anything missing, damaged or contradictory.
        """
        names, weight_map = _find_files(folder)
        missing = [name for name in names if not os.path.lexists(folder / name)]
        if missing:
            told = f"{len(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            raise CheckpointError(
                f"{folder} is not whole: of the {len(names)} files that {INDEX_NAME} names "
                f"{told} ({listed(missing)}); {FETCH_AGAIN}."
            )
        headers = [read_header(folder / name) for name in names]
        checkpoint = cls.of_headers(headers)
        _check_index(weight_map, checkpoint.tensors, names, folder)
        return checkpoint

    @classmethod
    def of_headers(cls, headers: Sequence[tuple[RegularFile, bytes]]) -> Checkpoint:
        """Make a checkpoint of files (path and size) and the JSON of their headers.

        Raises CheckpointError as `open` does.
        """
        names = [file.path.name for file, _ in headers]
        tensors: dict[str, TensorEntry] = {}
        for index, (file, data) in enumerate(headers):
            entries = _entries(file, data, index)
            if shared := tensors.keys() & entries.keys():
                name = min(shared)
                first, second = names[tensors[name].file], names[index]
                raise CheckpointError(
                    f"Tensor {shown(name)} is both in {first} and in {second}; {FETCH_AGAIN}."
                )
            tensors.update(entries)
        return cls(tuple(file for file, _ in headers), tensors)


def read_header(path: Path) -> tuple[RegularFile, bytes]:
    """Read a safetensors file's header as JSON. Raises CheckpointError."""
    with open_regular(path, CheckpointError, FETCH_AGAIN) as (stream, file):
        start = read_from(stream, HEAD_BYTES, path, CheckpointError)
        header_bytes = header_num_bytes(start, file.num_bytes, path)
        data = start[LENGTH_BYTES:][:header_bytes]
        if len(data) < header_bytes:
            data += read_from(stream, header_bytes - len(data), path, CheckpointError)
    if len(data) != header_bytes:
        raise CheckpointError(
            f"{path} ended after {len(data)} of {header_bytes} header bytes; fetch it again."
        )
    return file, data


def header_num_bytes(start: bytes, file_bytes: int, path: Path) -> int:
    """Return the size of a header from the file's first `LENGTH_BYTES` or more.

    Raises CheckpointError.
    """
    if start[LENGTH_BYTES : LENGTH_BYTES + 1] not in (b"", b"{"):
        found = mistaken_weights(start)
        if found is not None:
            raise CheckpointError(f"{path} is {found}.")
    if len(start) < LENGTH_BYTES:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, too few for a safetensors file; fetch it again."
        )
    num_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
    if num_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} announces a header of {num_bytes} bytes; the format allows "
            f"{MAX_HEADER_BYTES}. Fetch it again."
        )
    if num_bytes > file_bytes - LENGTH_BYTES:
        raise CheckpointError(
            f"{path} announces a header of {num_bytes} bytes but has {file_bytes} bytes in all; it "
            "is truncated or not a safetensors file. Fetch it again."
        )
    return num_bytes


def shard_names(names: Collection[str], where: str) -> tuple[str, ...]:
    """Return a folder's weight files, in order, if their names need no index.

    Raises CheckpointError, naming `where`, if there are none, or not all of them.
    """
    if SINGLE_NAME in names:
        return (SINGLE_NAME,)
    found = sorted(name for name in names if name.endswith(".safetensors"))
    matches = [match for name in found if (match := _SHARD.fullmatch(name))]
    if not matches:
        told = f"found only {', '.join(found[:4])}" if found else "no *.safetensors was found"
        raise CheckpointError(
            f"{where} holds neither {SINGLE_NAME} nor {INDEX_NAME}; {told}. Choose a model in "
            "safetensors or GGUF."
        )
    totals = sorted({int(match[2]) for match in matches})
    if len(totals) > 1:
        raise CheckpointError(
            f"{where} mixes shards of {' and '.join(map(str, totals))} without {INDEX_NAME}; "
            "remove the set that does not belong."
        )
    present = {int(match[1]) for match in matches}
    missing = [i for i in range(1, totals[0] + 1) if i not in present]
    if missing or len(matches) != totals[0]:
        raise CheckpointError(
            f"{where} holds {len(matches)} of {totals[0]} shards"
            + (f"; number {missing[0]} is missing. " if missing else ". ")
            + f"{FETCH_AGAIN.capitalize()}."
        )
    return tuple(match[0] for match in matches)


def checked_weight_map(index: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return an index's map from tensor to file name. Raises CheckpointError naming `source`."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{source} has no weight_map, or an empty one; {FETCH_AGAIN}.")
    for tensor, name in weight_map.items():
        if not _is_plain_file_name(name):
            raise CheckpointError(
                f"{source} says that tensor {shown(tensor)} is in {shown(name)}, which is not the "
                f"plain name of a *.safetensors file beside it; {FETCH_AGAIN}."
            )
    return weight_map


def _find_files(folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return file names in order, and the index's map from tensor to file (or an empty one)."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder; give the one that has the model's files.")
    if os.path.lexists(folder / SINGLE_NAME):
        return (SINGLE_NAME,), {}
    if os.path.lexists(folder / INDEX_NAME):
        index = read_object(folder / INDEX_NAME, MAX_HEADER_BYTES)
        weight_map = checked_weight_map(index, str(folder / INDEX_NAME))
        return tuple(sorted(set(weight_map.values()))), weight_map
    return shard_names({path.name for path in folder.glob("*.safetensors")}, str(folder)), {}


def _is_plain_file_name(name: object) -> bool:
    # The file itself may be a link: the hub's cache is made of links to blobs.
    if not isinstance(name, str) or len(name) > _MAX_NAME_CHARS:
        return False
    is_name = name.endswith(".safetensors") and name.isprintable()
    return is_name and not any(c in name for c in "/\\:") and not name.startswith(".")


def _check_index(
    weight_map: Mapping[str, str],
    tensors: Mapping[str, TensorEntry],
    names: tuple[str, ...],
    folder: Path,
) -> None:
    for tensor, name in weight_map.items():
        entry = tensors.get(tensor)
        if entry is None or names[entry.file] != name:
            where = "in no shard" if entry is None else f"in {names[entry.file]}"
            raise CheckpointError(
                f"{folder / INDEX_NAME} says that tensor {shown(tensor)} is in {name}, but it is "
                f"{where}; {FETCH_AGAIN}."
            )


def _entries(file: RegularFile, data: bytes, index: int) -> dict[str, TensorEntry]:
    """Read a file's tensors by name from its header."""
    path, size = file.path, file.num_bytes
    header = parse_object(data, f"The header of {path}")
    metadata = header.pop("__metadata__", None)
    are_texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if metadata is not None and not are_texts:
        raise CheckpointError(f"{path}: __metadata__ must map names to texts; fetch it again.")
    start = LENGTH_BYTES + len(data)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # thousands of equal ones are held once
    try:
        entries = {
            name: _entry(name, item, index, start, size, shapes) for name, item in header.items()
        }
        end = _end_of(entries.values(), start)
    except ValueError as reason:
        raise CheckpointError(f"{path}: {reason}; fetch it again.") from None
    if end != size and _begins_another(file, end):
        raise CheckpointError(
            f"{path}: another safetensors file begins at byte {end}: parts that were joined, as "
            "cat does, are not one file; fetch them apart, or cut it there."
        )
    if end != size:
        raise CheckpointError(
            f"{path}: {size - end} bytes after the last tensor belong to no tensor; fetch it again."
        )
    return entries


def _entry(
    name: str,
    item: object,
    file: int,
    start: int,
    size: int,
    shapes: dict[tuple[int, ...], tuple[int, ...]],
) -> TensorEntry:
    """Check one entry; raises ValueError with the reason."""
    if not name.isprintable():
        raise ValueError(f"tensor name {shown(name)} has unprintable characters")
    if not isinstance(item, dict):
        raise ValueError(f"the entry of tensor {shown(name)} is not an object")
    dtype, shape, span = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"tensor {shown(name)} has the unknown type {shown(dtype)}")
    if not _are_sizes(shape):
        raise ValueError(f"tensor {shown(name)} has the shape {_listed(shape)}")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(
            f"tensor {shown(name)} has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are read"
        )
    if not _are_sizes(span) or len(span) != 2:
        raise ValueError(f"tensor {shown(name)} has the data_offsets {_listed(span)}")
    begin, end = span
    if begin > end:
        raise ValueError(f"tensor {shown(name)} begins at {begin} and ends before, at {end}")
    if end > size - start:
        raise ValueError(
            f"tensor {shown(name)} ends at byte {end} of {size - start} data bytes; the file of "
            f"{size} bytes is truncated or its header is wrong"
        )
    bits = _num_elements(name, shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        raise ValueError(
            f"tensor {shown(name)} has {end - begin} bytes, but shape {_listed(shape)} in {dtype} "
            f"takes {bits / 8:.12g}"
        )
    key = tuple(shape)
    return TensorEntry(file, start + begin, end - begin, dtype, shapes.setdefault(key, key))


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(v) is int and 0 <= v < _MAX_ELEMENTS for v in values
    )


def _num_elements(name: str, shape: Iterable[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
        if product >= _MAX_ELEMENTS:
            raise ValueError(f"tensor {shown(name)} has more than 2**63 elements")
    return product


def _end_of(entries: Iterable[TensorEntry], start: int) -> int:
    """Return the end of the last tensor; raises ValueError for holes and overlaps before it."""
    end = start
    for _, offset, num_bytes, *_ in sorted(entries, key=lambda e: (e.offset, e.num_bytes)):
        if offset < end:
            raise ValueError(f"two tensors overlap at data byte {offset - start}")
        if offset > end:
            raise ValueError(f"data bytes {end - start} to {offset - start} belong to no tensor")
        end = offset + num_bytes
    return end


def _begins_another(file: RegularFile, offset: int) -> bool:
    """Return True if another header begins there; False for a hub file that is not here."""
    try:
        with open_regular(file.path) as (stream, _):
            stream.seek(offset)
            start = read_from(stream, LENGTH_BYTES + 1, file.path)
    except StorageError:
        return False
    is_length = 2 <= int.from_bytes(start[:LENGTH_BYTES], "little") <= file.num_bytes - offset
    return is_length and start.endswith(b"{")


def _listed(values: object) -> str:
    if isinstance(values, list) and len(values) <= 8:
        return "[" + ", ".join(shown(v) for v in values) + "]"
    return shown(values)
