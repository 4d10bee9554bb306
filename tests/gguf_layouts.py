"""GGUF files taken apart and put together in other ways, by the format itself.

The writer of the `gguf` package knows one order and one alignment.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gguf

_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


class Field(NamedTuple):
    kind: str  # "count", "number", "value", "text" or "items"
    start: int
    stop: int


class Parts(NamedTuple):
    """Of a header: all its fields, and where each key and each tensor's entry begin and end."""

    fields: list[Field]
    keys: list[tuple[int, int]]
    tensors: list[tuple[int, int]]


def parts_of(data: bytes) -> Parts:
    found = Parts([], [], [])
    num_tensors, num_keys = struct.unpack_from("<QQ", data, 8)
    at = 24

    def take(kind: str, num_bytes: int) -> int:
        nonlocal at
        found.fields.append(Field(kind, at, at + num_bytes))
        at += num_bytes
        return int.from_bytes(data[at - num_bytes : at], "little")

    for _ in range(num_keys):
        start = at
        take("text", take("count", 8))
        kind = take("number", 4)
        if kind == _STRING:
            take("text", take("count", 8))
        elif kind == _ARRAY:
            of, count = take("number", 4), take("count", 8)
            if of == _STRING:
                for _ in range(count):
                    take("text", take("count", 8))
            else:
                take("items", count * _ITEM_BYTES[of])
        else:
            take("value", _ITEM_BYTES[kind])
        found.keys.append((start, at))
    for _ in range(num_tensors):
        start = at
        take("text", take("count", 8))
        for _ in range(take("number", 4)):
            take("count", 8)
        take("number", 4)
        take("count", 8)
        found.tensors.append((start, at))
    return found


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(key: bytes, kind: int, count: int, items: bytes) -> bytes:
    return text(key) + struct.pack("<IIQ", _ARRAY, kind, count) + items


def rewritten(
    path: Path,
    target: Path,
    rng: random.Random,
    alignment: int = 32,
    version: int = 3,
    more_keys: Sequence[bytes] = (),
) -> Path:
    """The same model: keys and tensors in orders of their own."""
    data = path.read_bytes()
    keys = [data[start:stop] for start, stop in parts_of(data).keys] + list(more_keys)
    if alignment != 32:
        keys.append(text(b"general.alignment") + struct.pack("<II", 4, alignment))
    rng.shuffle(keys)
    tensors = list(gguf.GGUFReader(path).tensors)
    rng.shuffle(tensors)
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys)
    body = bytearray()
    for tensor in tensors:
        body += bytes(-len(body) % alignment)
        shape = [int(length) for length in tensor.shape]
        header += text(tensor.name.encode()) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", tensor.tensor_type, len(body))
        body += tensor.data.tobytes()
    target.write_bytes(header + bytes(-len(header) % alignment) + body)
    return target


_LIES = (0, 1, 2, 3, 7, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)


def mutated(data: bytes, parts: Parts, rng: random.Random) -> bytes:
    """Return a file that is damaged in one place.

    A field lies; an entry is missing, there twice or in another place; bytes differ; or the header
    is longer, shorter or cut off.
    """
    changed = bytearray(data)
    what = rng.choice(("lie", "lie", "entry", "swap", "bytes", "shift", "cut"))
    entries, count_at = rng.choice(((parts.keys, 16), (parts.tensors, 8)))
    if what == "lie":
        numbers = [each for each in parts.fields if each.kind in ("count", "number", "value")]
        _, start, stop = rng.choice(numbers)
        value = int.from_bytes(data[start:stop], "little") + rng.choice((-32, -1, 1, 32))
        value = rng.choice((value, *_LIES)) % 256 ** (stop - start)
        changed[start:stop] = value.to_bytes(stop - start, "little")
    elif what == "entry":
        start, stop = rng.choice(entries)
        times = rng.choice((0, 2))
        changed[start:stop] = data[start:stop] * times
        [count] = struct.unpack_from("<Q", data, count_at)
        struct.pack_into("<Q", changed, count_at, count + times - 1)
    elif what == "swap":
        (start, middle), (other, stop) = sorted(rng.sample(entries, 2))
        changed[start:stop] = data[other:stop] + data[middle:other] + data[start:middle]
    elif what == "bytes":
        some = [each for each in parts.fields if each.kind in ("text", "items")]
        _, start, stop = rng.choice([each for each in some if each.stop > each.start])
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(start, stop)] = rng.choice(
                (0, 0x2E, 0x30, 0xFF, rng.randrange(256))
            )
    elif what == "shift":
        at = rng.randrange(24, parts.tensors[-1][1])
        changed[at : at + rng.choice((0, 1, 8, 100))] = rng.randbytes(rng.choice((0, 1, 8, 100)))
    else:
        del changed[rng.choice(parts.fields).start + rng.randrange(2) :]
    return bytes(changed)
