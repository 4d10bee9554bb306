"""File with the keys and values of one sequence, and snapshots of its states.

  head       facts | token ids | snapshots | MAC | zeros    padded to BORDER_BYTES, where direct
  tokens     keys and values | MAC | zeros                  reads begin; so is each chunk
  snapshots  states | MAC | zeros

A chunk of tokens has consecutive ones, [layers, arrays, kv_heads, tokens, width], as in memory, of
one group of layers after the other. A snapshot is all states behind so many tokens, in chunks of
its own; the head lists these numbers. MACs are made with a key that is not in the file; a chunk's
MAC includes its head's MAC and its number, so that chunks of other files or positions are rejected.
Every size is checked before it is used.
"""

from __future__ import annotations

import hmac
import math
import os
import struct
from collections.abc import Sequence
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
"""Size of a chunk, unless `LEAST_TOKENS` need more."""

LEAST_TOKENS = 16
MAX_TOKENS = 1 << 28
MAX_SNAPSHOTS = 1 << 16

_MAGIC = b"lowtide keys 3\0\0"
# Magic, nonce, model, tokens, snapshots, name.
_FACTS = struct.Struct(f"<16s16s{MODEL_BYTES}sqq128s")


class FileHead(NamedTuple):
    """The tokens [n] whose keys and values a file holds, and their model."""

    model: bytes  # a digest of `MODEL_BYTES`
    name: str  # of the model, to be shown
    tokens: IntArray
    snapshots: tuple[int, ...]  # numbers of tokens, ascending
    facts: bytes  # as stored
    mac: bytes

    @classmethod
    def of(
        cls, model: bytes, name: str, tokens: IntArray, snapshots: Sequence[int], key: bytes
    ) -> FileHead:
        """Make the head of a new file, with a random nonce."""
        sizes = len(tokens), len(snapshots)
        facts = _FACTS.pack(_MAGIC, token_bytes(16), model, *sizes, name.encode()[:128])
        mac = _mac(key, b"head", facts, _numbers(tokens, snapshots))
        return cls(model, name, tokens, tuple(snapshots), facts, mac)

    @classmethod
    def read(cls, descriptor: int, key: bytes) -> FileHead:
        """Read a file's head. Raises Contradiction if it was not written with this key, OSError."""
        facts = _read(descriptor, 0, _FACTS.size)
        magic, _, model, num_tokens, num_snapshots, name = _FACTS.unpack(facts)
        if magic != _MAGIC:
            raise Contradiction("it has no keys and values, or another version's")
        if not 0 < num_tokens <= MAX_TOKENS:
            raise Contradiction(f"it claims {num_tokens} tokens")
        if not 0 <= num_snapshots <= MAX_SNAPSHOTS:
            raise Contradiction(f"it claims {num_snapshots} snapshots")
        if _head_bytes(num_tokens, num_snapshots) > os.fstat(descriptor).st_size:
            raise Contradiction(f"it claims {num_tokens} tokens and ends before their ids")
        stored = _read(descriptor, len(facts), 4 * (num_tokens + num_snapshots) + MAC_BYTES)
        numbers, mac = stored[:-MAC_BYTES], stored[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(key, b"head", facts, numbers)):
            raise Contradiction("its head is not what was written with this user's key")
        found = np.frombuffer(numbers, "<i4").astype(np.int64)
        tokens, snapshots = found[:num_tokens], tuple(found[num_tokens:].tolist())
        shown = name.rstrip(b"\0").decode(errors="replace")
        return cls(model, shown, tokens, snapshots, facts, mac)

    @property
    def num_bytes(self) -> int:
        """Bytes before the first chunk."""
        return _head_bytes(len(self.tokens), len(self.snapshots))

    @property
    def stored(self) -> bytes:
        """The head as it is stored."""
        content = self.facts + _numbers(self.tokens, self.snapshots) + self.mac
        return content.ljust(self.num_bytes, b"\0")

    def chunk_mac(self, key: bytes, index: int, content: NDArray[np.uint8]) -> bytes:
        """Compute the MAC of this file's chunk `index`."""
        return _mac(key, b"chunk", self.mac, index.to_bytes(8, "little"), content.data)


class Chunk(NamedTuple):
    """A part of a file with a MAC of its own: keys and values of tokens, or bytes of a snapshot."""

    number: int
    start: int  # in the file
    num_bytes: int  # of its content
    tokens: range = range(0)
    snapshot: int = 0  # its number of tokens; 0: these are keys and values
    offset: int = 0  # of the bytes in the snapshot

    @property
    def stored_bytes(self) -> int:
        return align_up(self.num_bytes + MAC_BYTES, BORDER_BYTES)


class KeyLayout(NamedTuple):
    """Shapes of a token's keys and values: [layers, arrays, kv_heads, width] of each group."""

    shapes: tuple[tuple[int, int, int, int], ...]
    itemsize: int
    state_bytes: int = 0  # of a snapshot; 0: a sequence has no states

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

    @property
    def most_stored_bytes(self) -> int:
        """Size of the largest chunk in a file."""
        of_states = Chunk(0, 0, min(self.state_bytes, self._piece_bytes)).stored_bytes
        return max(self.stored_bytes(self.chunk_tokens), of_states)

    def file_bytes(self, num_tokens: int, num_snapshots: int = 0) -> int:
        """Return the size of a file with `num_tokens` tokens."""
        num_whole, num_left = divmod(num_tokens, self.chunk_tokens)
        last_bytes = self.stored_bytes(num_left) if num_left else 0
        whole_bytes = num_whole * self.stored_bytes(self.chunk_tokens)
        snapshot_bytes = sum(chunk.stored_bytes for chunk in self._of_snapshot(0, 0, 0))
        head_bytes = _head_bytes(num_tokens, num_snapshots)
        return head_bytes + whole_bytes + last_bytes + num_snapshots * snapshot_bytes

    def cut(self, head: FileHead, num_tokens: int, unit: int) -> int:
        """Return the most tokens, at most `num_tokens`, that a sequence can begin with.

        They are a multiple of `unit`.
        """
        if not self.state_bytes:
            return num_tokens // unit * unit
        return max((n for n in head.snapshots if n <= num_tokens and not n % unit), default=0)

    def all_chunks(self, head: FileHead) -> list[Chunk]:
        """Return the chunks of a file, in order."""
        found, start = list[Chunk](), head.num_bytes
        for tokens in self.chunks(len(head.tokens)):
            found.append(Chunk(len(found), start, len(tokens) * self.token_bytes, tokens))
            start += found[-1].stored_bytes
        for snapshot in head.snapshots:
            found += self._of_snapshot(len(found), start, snapshot)
            start = found[-1].start + found[-1].stored_bytes
        return found

    @property
    def _piece_bytes(self) -> int:
        return max(CHUNK_BYTES, BORDER_BYTES)

    def _of_snapshot(self, number: int, start: int, snapshot: int) -> list[Chunk]:
        found = []
        for offset in range(0, self.state_bytes, self._piece_bytes):
            num_bytes = min(self._piece_bytes, self.state_bytes - offset)
            found.append(Chunk(number, start, num_bytes, range(0), snapshot, offset))
            number, start = number + 1, start + found[-1].stored_bytes
        return found

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


def seal(stored: NDArray[np.uint8], chunk: Chunk, head: FileHead, key: bytes) -> None:
    """Write the MAC behind a chunk's content, and zeros behind it."""
    mac = head.chunk_mac(key, chunk.number, stored[: chunk.num_bytes])
    stored[chunk.num_bytes : chunk.num_bytes + MAC_BYTES] = np.frombuffer(mac, np.uint8)
    stored[chunk.num_bytes + MAC_BYTES :] = 0


def check(stored: NDArray[np.uint8], chunk: Chunk, head: FileHead, key: bytes) -> None:
    """Raise Contradiction for a stored chunk that `seal` did not write."""
    mac = stored[chunk.num_bytes : chunk.num_bytes + MAC_BYTES].tobytes()
    if not hmac.compare_digest(mac, head.chunk_mac(key, chunk.number, stored[: chunk.num_bytes])):
        raise Contradiction(f"its chunk {chunk.number} is not what was written")


def num_common(one: IntArray, other: IntArray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    is_different = one[:length] != other[:length]
    return int(is_different.argmax()) if is_different.any() else length


def _head_bytes(num_tokens: int, num_snapshots: int) -> int:
    num_numbers = num_tokens + num_snapshots
    return align_up(_FACTS.size + 4 * num_numbers + MAC_BYTES, BORDER_BYTES)


def _numbers(tokens: IntArray, snapshots: Sequence[int]) -> bytes:
    return tokens.astype("<i4").tobytes() + np.array(snapshots, "<i4").tobytes()


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
