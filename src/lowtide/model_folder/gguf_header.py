"""Header of one GGUF file: its metadata and the places of its tensors.

Reads the header only, without trusting it: every length and count is checked against the file
first. Arrays stay bytes until their elements are asked for. Knows nothing of what keys and tensors
mean. The format is ggml's, versions 2 and 3, little-endian.

    header = GgufHeader.read(path)
    header.metadata["general.architecture"], header.tensors["token_embd.weight"].offset
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from lowtide.core import align_up
from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.files.json_file import shown
from lowtide.files.mistaken import HEAD_BYTES, mistaken_weights
from lowtide.files.regular_file import FETCH_AGAIN, RegularFile, open_regular, read_from
from lowtide.formats import MatrixFormat
from lowtide.formats.ggml import FORMATS as PACKED
from lowtide.formats.ggml import TYPE_NAMES
from lowtide.formats.plain import FORMATS as PLAIN
from lowtide.model_folder.gguf_file import MAGIC

MAX_HEADER_BYTES = 64 << 20
"""Limit of a header; vocabularies of a few hundred thousand tokens take some ten MB."""

MAX_ENTRIES = 1 << 20
"""Most keys, and most tensors, of one file."""

MAX_NAME_BYTES = 65535

_PIECE = re.compile(r"\.gguf[.-](?:part|split|chunk|[a-z]{2}$|[0-9]+)", re.IGNORECASE)
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32
_STEP_BYTES = 1 << 20
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
_SCALARS |= {11: "<q", 12: "<d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6

Value = int | float | bool | str

ReadAt = Callable[[int, int], bytes]
"""Reads up to n bytes of a file from an offset on, where the previous read ended."""


@dataclass(frozen=True, slots=True, repr=False)
class GgufArray:
    """An array of metadata, still as stored."""

    kind: int  # number of the element type
    num_elements: int
    data: bytes

    @property
    def is_text(self) -> bool:
        return self.kind == _STRING

    def strings(self) -> Iterator[str]:
        """Yield the texts, with invalid UTF-8 replaced. Raises CheckpointError for other kinds."""
        if self.kind != _STRING:
            raise CheckpointError(f"An array of {self.num_elements} values holds no texts.")
        start = 0
        for _ in range(self.num_elements):
            stop = start + 8 + int.from_bytes(self.data[start : start + 8], "little")
            yield self.data[start + 8 : stop].decode("utf-8", "replace")
            start = stop

    def numbers(self) -> list[int | float]:
        """Return the numbers. Raises CheckpointError for texts."""
        if self.kind == _STRING:
            raise CheckpointError(f"An array of {self.num_elements} texts holds no numbers.")
        dtype = np.dtype(_SCALARS[self.kind])
        return np.frombuffer(self.data, dtype, self.num_elements).tolist()  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"an array of {self.num_elements} values"


class GgufTensor(NamedTuple):
    """Place and type of one tensor."""

    format: MatrixFormat
    shape: tuple[int, ...]  # rows first, unlike in the file
    offset: int  # of its first byte, from the start of the file
    num_bytes: int


Metadata = Mapping[str, Value | GgufArray]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and tensors of one file. Keeps no file open."""

    file: RegularFile
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]
    num_bytes: int  # of the header and its tensors; a file may be longer

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read a file's header.

        Raises CheckpointError, naming the file and the numbers, for a file that is truncated,
        damaged or contradictory, UnsupportedError for an unsupported type of weights.
        """
        with open_regular(path, CheckpointError, FETCH_AGAIN) as (stream, file):
            return cls.parse(
                lambda offset, num_bytes: read_from(stream, num_bytes, path, CheckpointError), file
            )

    @classmethod
    def parse(cls, read: ReadAt, file: RegularFile) -> GgufHeader:
        """Parse the header of a file whose bytes `read` returns; raises as `GgufHeader.read`."""
        cursor = _Cursor(read, file)
        num_tensors, num_keys = _counts(cursor)
        values = [_key_and_value(cursor) for _ in range(num_keys)]
        entries = [_tensor(cursor) for _ in range(num_tensors)]
        metadata = dict(values)
        if len(metadata) != num_keys:
            cursor.fail(f"{num_keys - len(metadata)} of its {num_keys} keys are given twice")
        alignment = _alignment(cursor, metadata)
        tensors = _placed(entries, alignment, cursor)
        last = next(reversed(tensors.values()), None)
        end = cursor.position if last is None else last.offset + last.num_bytes
        return cls(file, metadata, tensors, align_up(end, alignment))


class _Entry(NamedTuple):
    """A tensor in the header; `offset` is from the start of the data."""

    name: str
    format: MatrixFormat
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Cursor:
    """Sequential reader of a header, which reads as much of the file as needed."""

    def __init__(self, read: ReadAt, file: RegularFile) -> None:
        self.buffer = bytearray()
        self.position = 0
        self.file = file
        self._read = read

    def fail(self, problem: str, way_out: str = "fetch it again") -> NoReturn:
        raise CheckpointError(f"{self.file.path}: {problem}; {way_out}.")

    def need(self, stop: int) -> None:
        """Read the file's bytes up to `stop` into the buffer."""
        if stop <= len(self.buffer):
            return
        if stop > self.file.num_bytes:
            self.fail(
                f"its header goes on to byte {stop} at least, the file has "
                f"{self.file.num_bytes}; it is truncated or damaged"
            )
        if stop > MAX_HEADER_BYTES:
            self.fail(
                f"its header goes on to byte {stop} at least; at most {MAX_HEADER_BYTES} are read"
            )
        wanted = max(stop, min(2 * len(self.buffer), MAX_HEADER_BYTES), _STEP_BYTES)
        self.buffer += self._read(len(self.buffer), wanted - len(self.buffer))
        if stop > len(self.buffer):
            self.fail(f"it ended after {len(self.buffer)} bytes, inside its header")

    def number(self, code: str) -> int:
        return int(self.scalar(code))

    def scalar(self, code: str) -> int | float | bool:
        size = struct.calcsize(code)
        self.need(self.position + size)
        [value] = struct.unpack_from(code, self.buffer, self.position)
        self.position += size
        return value  # type: ignore[no-any-return]

    def text(self, what: str, most_bytes: int) -> str:
        num_bytes = self.number("<Q")
        if num_bytes > most_bytes:
            self.fail(f"{what} of {num_bytes} bytes; at most {most_bytes} are accepted")
        self.need(self.position + num_bytes)
        raw = bytes(self.buffer[self.position : self.position + num_bytes])
        self.position += num_bytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} {shown(raw)} that is not UTF-8")

    def skip_texts(self, count: int) -> None:
        position, size = self.position, len(self.buffer)
        for _ in range(count):
            if position + 8 > size:
                self.need(position + 8)
                size = len(self.buffer)
            position += 8 + int.from_bytes(self.buffer[position : position + 8], "little")
        self.need(position)
        self.position = position


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Check the magic and version; return the numbers of tensors and metadata keys."""
    cursor.need(min(HEAD_BYTES, cursor.file.num_bytes))
    if cursor.buffer[: len(MAGIC)] != MAGIC:
        _fail_without_magic(cursor)
    if cursor.file.num_bytes < 24:
        cursor.fail(f"it has {cursor.file.num_bytes} bytes, too few for a GGUF file")
    cursor.position = 4
    version = cursor.number("<I")
    if version not in _VERSIONS:
        name = "of a big-endian machine" if version >> 16 else f"version {version}"
        raise UnsupportedError(
            f"{cursor.file.path} is a GGUF file {name}; little-endian ones of version "
            f"{' and '.join(map(str, _VERSIONS))} are read. Choose another file of the model."
        )
    counts = cursor.number("<Q"), cursor.number("<Q")
    for count, noun in zip(counts, ("tensors", "keys"), strict=True):
        # The shortest entry of either kind has more than 12 bytes.
        if count > min(MAX_ENTRIES, cursor.file.num_bytes // 12):
            cursor.fail(f"it announces {count} {noun} in {cursor.file.num_bytes} bytes")
    return counts


def _fail_without_magic(cursor: _Cursor) -> NoReturn:
    found = mistaken_weights(bytes(cursor.buffer[:HEAD_BYTES]))
    if found is not None:
        raise CheckpointError(f"{cursor.file.path}: it is {found}.")
    begins = bytes(cursor.buffer[:4])
    cursor.fail(
        f"it is not a GGUF file: it begins with {begins!r}, not with b'GGUF'",
        f"fetch it again, or give another file{_of_pieces(cursor.file.path)}",
    )


def _of_pieces(path: Path) -> str:
    """Return the end of a message about a file that may be one piece of a cut file."""
    if not _PIECE.search(path.name):
        return ""
    return "; its name is that of one piece of a file: join the pieces in order with cat"


def _key_and_value(cursor: _Cursor) -> tuple[str, Value | GgufArray]:
    key = cursor.text("a key", MAX_NAME_BYTES)
    kind = cursor.number("<I")
    if kind == _STRING:
        return key, cursor.text(f"{shown(key)}: a text", MAX_HEADER_BYTES)
    if kind == _ARRAY:
        return key, _array(cursor, key)
    if kind not in _SCALARS:
        cursor.fail(f"the key {shown(key)} has a value of the unknown kind {kind}")
    value = cursor.scalar(_SCALARS[kind])
    # The shortest decimal of the float32, as config.json would have it.
    return key, float(str(np.float32(value))) if kind == _FLOAT32 else value


def _array(cursor: _Cursor, key: str) -> GgufArray:
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind != _STRING and kind not in _SCALARS:
        noun = "arrays" if kind == _ARRAY else f"the unknown kind {kind}"
        cursor.fail(f"the key {shown(key)} has an array of {noun}")
    item_bytes = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
    least_bytes = count * item_bytes
    rest_bytes = min(cursor.file.num_bytes, MAX_HEADER_BYTES) - cursor.position
    if least_bytes > rest_bytes:
        cursor.fail(
            f"the key {shown(key)} has an array of {count} values, at least {least_bytes} bytes, "
            f"where at most {rest_bytes} follow"
        )
    start = cursor.position
    if kind == _STRING:
        cursor.skip_texts(count)
    else:
        cursor.need(start + least_bytes)
        cursor.position += least_bytes
    return GgufArray(kind, count, bytes(memoryview(cursor.buffer)[start : cursor.position]))


def _tensor(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor's name", MAX_NAME_BYTES)
    if not name.isprintable():
        cursor.fail(f"the tensor name {shown(name)} has unprintable characters")
    num_dimensions = cursor.number("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        cursor.fail(f"tensor {shown(name)} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(num_dimensions))[::-1]
    found = _format(cursor, name, cursor.number("<I"))
    num_elements = math.prod(shape)
    if not 0 < num_elements < 2**63:
        cursor.fail(f"tensor {shown(name)} has the shape {list(shape)}")
    if found.name != "F32" and (num_dimensions == 1 or not name.endswith(".weight")):
        # Types of as many bytes would pass for one another: a norm in bfloat16 for one in float16.
        cursor.fail(
            f"tensor {shown(name)} is of type {found.name}; llama.cpp's files have vectors and "
            "biases in F32. Its type is wrong, or another program wrote it",
            "fetch it again, or convert the model with llama.cpp",
        )
    if shape[-1] % found.block_size:
        cursor.fail(
            f"tensor {shown(name)} has rows of {shape[-1]} weights, which do not divide into "
            f"blocks of {found.block_size} ({found.name})"
        )
    return _Entry(name, found, shape, cursor.number("<Q"), found.num_bytes(num_elements))


def _format(cursor: _Cursor, tensor: str, number: int) -> MatrixFormat:
    """Return the format of a ggml type's number. Raises UnsupportedError naming the type."""
    name, supported = TYPE_NAMES.get(number, f"number {number}"), _supported()
    if name not in supported:
        raise UnsupportedError(
            f"{cursor.file.path}: tensor {shown(tensor)} is of type {name}, which is not read; "
            f"supported: {', '.join(supported)}. Choose another quantisation of the model."
        )
    return supported[name]


@functools.cache
def _supported() -> Mapping[str, MatrixFormat]:
    """Map ggml's names to supported formats."""
    packed = {each.ggml_name: each for each in PACKED}
    return {**packed, **{each.name: each for each in PLAIN}}


def _alignment(cursor: _Cursor, metadata: Metadata) -> int:
    value = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
        cursor.fail(f"general.alignment {shown(value)} is not a power of two from 8 to 2**20")
    return value


def _placed(entries: list[_Entry], alignment: int, cursor: _Cursor) -> dict[str, GgufTensor]:
    """Place tensors by name.

    ggml requires each to begin where the previous one ends, so a type of another size is detected
    by the next offset or the file's end.
    """
    start, end, last = align_up(cursor.position, alignment), 0, ""
    tensors: dict[str, GgufTensor] = {}
    for name, found, shape, offset, num_bytes in entries:
        if name in tensors:
            cursor.fail(f"tensor {shown(name)} is given twice")
        if offset != end:
            after = f" where {shown(last)} ends" if last else ""
            cursor.fail(
                f"tensor {shown(name)} begins at byte {offset} of the data, not at byte {end}"
                f"{after}; the header does not fit its file"
            )
        if start + offset + num_bytes > cursor.file.num_bytes:
            cursor.fail(
                f"tensor {shown(name)} ends at byte {start + offset + num_bytes} of "
                f"{cursor.file.num_bytes}; the file is truncated or its header is wrong",
                f"fetch it again{_of_pieces(cursor.file.path)}",
            )
        tensors[name] = GgufTensor(found, shape, start + offset, num_bytes)
        end, last = align_up(offset + num_bytes, alignment), name
    return tensors
