"""Arrays in a file, written whole or not at all and read without trust.

A numpy archive of plain arrays: no pickle, and every size is checked before data is read. Knows
nothing of what the arrays mean.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from lowtide.errors import StorageError, UsageError
from lowtide.files.regular_file import open_regular
from lowtide.files.whole_file import IsOwn, whole_file

Arrays = dict[str, NDArray[Any]]

_MAX_FACTS_BYTES = 1 << 16


class Contradiction(Exception):
    """Raised by a reader for impossible contents; becomes a UsageError with the file's name."""


class OtherKind(Contradiction):
    """Raised for a file that may be whole, and of another kind."""


_DAMAGE = (
    Contradiction,
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    KeyError,
    RuntimeError,  # an encrypted member
)


def save_arrays(path: Path, arrays: Mapping[str, Any], noun: str, is_own: IsOwn) -> None:
    """Write `arrays` to `path`; `noun` ("trace") names the file in a StorageError."""
    with whole_file(Path(path), noun, is_own) as file:
        np.savez_compressed(file, **arrays)


def holds_arrays(file: IO[bytes], *names: str) -> bool:
    """Return True if a file is an archive with arrays of these names."""
    try:
        with zipfile.ZipFile(file) as archive:
            return {f"{name}.npy" for name in names} <= set(archive.namelist())
    except _DAMAGE:
        return False


def facts_array(facts: Mapping[str, object]) -> NDArray[np.uint8]:
    """Encode texts and numbers as an array of their JSON."""
    return np.frombuffer(json.dumps(dict(facts)).encode(), np.uint8)


def read_facts(data: NDArray[Any], kinds: Mapping[str, type], whose: str) -> dict[str, Any]:
    """Decode an array of `facts_array` with exactly these names and kinds. Raises Contradiction."""
    if data.ndim != 1 or data.size > _MAX_FACTS_BYTES:
        raise Contradiction(f"{whose} facts have shape {data.shape}")
    try:
        facts: Any = json.loads(data.tobytes().decode())
    except (ValueError, RecursionError):
        raise Contradiction(f"{whose} facts are not JSON") from None
    is_whole = isinstance(facts, dict) and set(facts) == set(kinds)
    if not is_whole or not all(type(facts[name]) is kind for name, kind in kinds.items()):
        raise Contradiction(f"{whose} facts are not {', '.join(kinds)}")
    return dict(facts)


def check_values(
    array: NDArray[Any], what: str, shape: tuple[int, ...], low: float = 0, high: float = np.inf
) -> None:
    """Raise Contradiction for another shape, or values outside of `low` to `high`."""
    if array.shape != shape:
        raise Contradiction(f"the shape of its {what} is {array.shape}, not {shape}")
    if not (np.isfinite(array) & (array >= low) & (array <= high)).all():
        raise Contradiction(f"its {what}: there are values that cannot be")


def load_arrays(
    path: Path,
    dtypes: Mapping[str, str],
    max_bytes: int,
    noun: str,
    maker: str,
    versions: Mapping[str, int],
    optional: Sequence[Mapping[str, str]] = (),
    unread: Collection[str] = (),
) -> Arrays:
    """Load arrays: those named by `dtypes`, and all or none of each `optional`.

    Raises UsageError for a file that is none, has another version, or holds more than `max_bytes`;
    StorageError if it cannot be read.

    noun, maker: what such a file is called, and the command that makes one.
    versions: expected contents of version arrays.
    unread: names of arrays that stay in the file.
    """
    way_out = f"give the path of a {noun}, which {maker} makes"
    try:
        with (
            open_regular(Path(path), way_out=way_out) as (file, _),
            zipfile.ZipFile(file) as archive,
        ):
            wanted, names = dict(dtypes), set(archive.namelist())
            for some in optional:
                if any(f"{name}.npy" in names for name in some):
                    wanted.update(some)
            _check_members(archive, wanted, versions, max_bytes, noun)
            return _read(archive, {name: wanted[name] for name in wanted if name not in unread})
    except StorageError as reason:
        raise StorageError(f"{noun.capitalize()} {reason}") from reason
    except OSError as reason:
        text = f"{noun.capitalize()} {path} cannot be read: {reason.strerror}; {way_out}."
        raise StorageError(text) from reason
    except _DAMAGE as reason:
        told = f"{path} is not a lowtide {noun} that can be read: {str(reason).rstrip('.')}"
        way_out = made_again(maker)
        if isinstance(reason, OtherKind | zipfile.BadZipFile):  # then it is not to be removed
            way_out = f"name another file or, if it is a damaged {noun}, {way_out}"
        raise UsageError(f"{told}; {way_out}.") from None


def made_again(maker: str) -> str:
    """Return the way out of a damaged file, for the end of an error message."""
    return f"remove it, and make it again with {maker}"


def _check_members(
    archive: zipfile.ZipFile,
    dtypes: Mapping[str, str],
    versions: Mapping[str, int],
    max_bytes: int,
    noun: str,
) -> None:
    kinds = {info.compress_type for info in archive.infolist()}
    if not kinds <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise Contradiction("its members are compressed as none of ours is")
    total = sum(info.file_size for info in archive.infolist())
    if total > max_bytes:
        raise Contradiction(f"it holds {total} bytes; at most {max_bytes} are read")
    expected = {f"{name}.npy" for name in dtypes}
    names = archive.namelist()
    if expected <= set(names) or expected >= set(names):  # other versions have more, or fewer
        _check_versions(archive, {n: v for n, v in versions.items() if f"{n}.npy" in names})
    if set(names) != expected or len(names) != len(expected):
        raise OtherKind(f"it holds {len(names)} members that are not a {noun}'s")


def _check_versions(archive: zipfile.ZipFile, versions: Mapping[str, int]) -> None:
    for name, array in _read(archive, dict.fromkeys(versions, "<i8")).items():
        found = next(iter(array.flat), 0)
        if found != versions[name]:
            raise Contradiction(f"its {name} is {found}, and {versions[name]} is read")


def _read(archive: zipfile.ZipFile, dtypes: Mapping[str, str]) -> Arrays:
    arrays = {}
    for name, dtype in dtypes.items():
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as file:
            arrays[name] = _read_array(file, name, dtype, info.file_size)
    return arrays


def _read_array(file: IO[bytes], name: str, dtype: str, size: int) -> NDArray[Any]:
    """Read an array whose header agrees with its size; a header alone allocates nothing."""
    if npy.read_magic(file) != (1, 0):
        raise Contradiction(f"{name} has an unknown array format")
    shape, is_fortran, found = npy.read_array_header_1_0(file)
    if found != np.dtype(dtype) or is_fortran:
        raise Contradiction(f"{name} is {found}, not {np.dtype(dtype)} in C order")
    if any(extent < 0 for extent in shape):
        raise Contradiction(f"{name} has shape {shape}")
    num_bytes = found.itemsize
    for extent in shape:
        num_bytes *= extent
    if num_bytes > size:
        raise Contradiction(f"{name} claims {num_bytes} bytes of {size}")
    data = file.read(num_bytes + 1)
    if len(data) != num_bytes:
        raise Contradiction(f"{name} claims {num_bytes} bytes and has others")
    return np.frombuffer(data, found).reshape(shape)
