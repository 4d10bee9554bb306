"""File with the keys and values of one sequence, authenticated chunk by chunk.

  head    facts | token ids | MAC | zeros      padded to BORDER_BYTES, where direct reads
  chunks  keys and values | MAC | zeros        begin; so is each chunk

A chunk has consecutive tokens, [layers, arrays, kv_heads, tokens, width], as in memory, of one
group of layers after the other. MACs are
made with a key that is not in the file; a chunk's MAC includes its head's MAC and its number, so
that chunks of other files or positions are rejected. Every size is checked before it is used.
"""

from __future__ import annotations

import hmac
import math
import os
import struct
from secrets import token_bytes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import IntArray, align_up
from lowtide.files.array_file import Contradiction

BORDER_BYTES = 4096
MAC_BYTES = 32
MODEL_BYTES = 16
CHUNK_BYTES = 1 << 20
"""Size of a chunk of keys and values, unless `LEAST_TOKENS` need more."""

LEAST_TOKENS = 16
MAX_TOKENS = 1 << 28

_MAGIC = b"lowtide keys 2\0\0"
_FACTS = struct.Struct(f"<16s16s{MODEL_BYTES}sq128s")  # magic, nonce, model, tokens, name


class FileHead(NamedTuple):
    """The tokens [n] whose keys and values a file holds, and their model."""

    model: bytes  # a digest of `MODEL_BYTES`
    name: str  # of the model, to be shown
    tokens: IntArray
    facts: bytes  # as stored
    mac: bytes

    @classmethod
    def of(cls, model: bytes, name: str, tokens: IntArray, key: bytes) -> FileHead:
        """Make the head of a new file, with a random nonce."""
        facts = _FACTS.pack(_MAGIC, token_bytes(16), model, len(tokens), name.encode()[:128])
        mac = _mac(key, b"head", facts, tokens.astype("<i4").tobytes())
        return cls(model, name, tokens, facts, mac)

    @classmethod
    def read(cls, descriptor: int, key: bytes) -> FileHead:
        """Read a file's head. Raises Contradiction if it was not written with this key, OSError."""
        facts = _read(descriptor, 0, _FACTS.size)
        magic, _, model, num_tokens, name = _FACTS.unpack(facts)
        if magic != _MAGIC:
            raise Contradiction("it has no keys and values, or another version's")
        if not 0 < num_tokens <= MAX_TOKENS:
            raise Contradiction(f"it claims {num_tokens} tokens")
        if _head_bytes(num_tokens) > os.fstat(descriptor).st_size:
            raise Contradiction(f"it claims {num_tokens} tokens and ends before their ids")
        stored = _read(descriptor, len(facts), 4 * num_tokens + MAC_BYTES)
        ids, mac = stored[:-MAC_BYTES], stored[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(key, b"head", facts, ids)):
            raise Contradiction("its head is not what was written with this user's key")
        tokens = np.frombuffer(ids, "<i4").astype(np.int64)
        return cls(model, name.rstrip(b"\0").decode(errors="replace"), tokens, facts, mac)

    @property
    def num_bytes(self) -> int:
        """Bytes before the first chunk."""
        return _head_bytes(len(self.tokens))

    @property
    def stored(self) -> bytes:
        """The head as it is stored."""
        content = self.facts + self.tokens.astype("<i4").tobytes() + self.mac
        return content.ljust(self.num_bytes, b"\0")

    def chunk_mac(self, key: bytes, index: int, content: NDArray[np.uint8]) -> bytes:
        """Compute the MAC of this file's chunk `index`."""
        return _mac(key, b"chunk", self.mac, index.to_bytes(8, "little"), content.data)


class KeyLayout(NamedTuple):
    """Shapes of a token's keys and values: [layers, arrays, kv_heads, width] of each group."""

    shapes: tuple[tuple[int, int, int, int], ...]
    itemsize: int

    @property
    def token_bytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * self.itemsize

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens of every chunk but a file's last."""
        return max(LEAST_TOKENS, CHUNK_BYTES // self.token_bytes)

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the size of a chunk in the file."""
        return align_up(num_tokens * self.token_bytes + MAC_BYTES, BORDER_BYTES)

    def file_bytes(self, num_tokens: int) -> int:
        """Return the size of a file with `num_tokens` tokens."""
        num_whole, num_left = divmod(num_tokens, self.chunk_tokens)
        last_bytes = self.stored_bytes(num_left) if num_left else 0
        whole_bytes = num_whole * self.stored_bytes(self.chunk_tokens)
        return _head_bytes(num_tokens) + whole_bytes + last_bytes

    def chunks(self, num_tokens: int) -> list[range]:
        """Return the range of tokens of each chunk of a file."""
        step = self.chunk_tokens
        return [range(at, min(at + step, num_tokens)) for at in range(0, num_tokens, step)]

    def content(self, stored: NDArray[np.uint8], num_tokens: int) -> list[NDArray[Any]]:
        """View the keys and values in a stored chunk, of each group of layers one array.

        They are integers of the same size, [layers, arrays, kv_heads, tokens, width].
        """
        numbers = stored[: num_tokens * self.token_bytes].view(f"i{self.itemsize}")
        ends = np.cumsum([num_tokens * math.prod(shape) for shape in self.shapes])
        return [
            part.reshape(layers, arrays, heads, num_tokens, width)
            for part, (layers, arrays, heads, width) in zip(
                np.split(numbers, ends[:-1]), self.shapes, strict=True
            )
        ]

    def seal(self, stored: NDArray[np.uint8], tokens: range, head: FileHead, key: bytes) -> None:
        """Write the MAC behind a chunk's content, and zeros behind it."""
        num_bytes = len(tokens) * self.token_bytes
        mac = head.chunk_mac(key, tokens.start // self.chunk_tokens, stored[:num_bytes])
        stored[num_bytes : num_bytes + MAC_BYTES] = np.frombuffer(mac, np.uint8)
        stored[num_bytes + MAC_BYTES :] = 0

    def check(self, stored: NDArray[np.uint8], tokens: range, head: FileHead, key: bytes) -> None:
        """Raise Contradiction for a stored chunk that `seal` did not write."""
        num_bytes, index = len(tokens) * self.token_bytes, tokens.start // self.chunk_tokens
        mac = stored[num_bytes : num_bytes + MAC_BYTES].tobytes()
        if not hmac.compare_digest(mac, head.chunk_mac(key, index, stored[:num_bytes])):
            raise Contradiction(f"its chunk {index} is not what was written")


def num_common(one: IntArray, other: IntArray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    is_different = one[:length] != other[:length]
    return int(is_different.argmax()) if is_different.any() else length


def _head_bytes(num_tokens: int) -> int:
    return align_up(_FACTS.size + 4 * num_tokens + MAC_BYTES, BORDER_BYTES)


def _mac(key: bytes, what: bytes, *parts: bytes | memoryview) -> bytes:
    # SHA-256 has instructions of its own on most processors, BLAKE2b has none.
    digest = hmac.new(key, what, "sha256")
    for part in parts:
        digest.update(part)
    return digest.digest()


def _read(descriptor: int, start: int, num_bytes: int) -> bytes:
    found = os.pread(descriptor, num_bytes, start)
    if len(found) < num_bytes:
        raise Contradiction(f"it ends before byte {start + num_bytes}")
    return found
