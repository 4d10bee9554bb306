"""File with the keys and values of one sequence, and snapshots of its states.

  head       facts | token ids | snapshots | firsts | MAC | zeros
  tokens     keys and values | MAC | zeros
  windows    keys and values | MAC | zeros
  snapshots  states | MAC | zeros

All are padded to BORDER_BYTES, where direct reads begin; so is each chunk. A chunk of tokens has
consecutive ones, [layers, arrays, kv_heads, tokens, width], as in memory, of one group of layers
after the other. Layers with a sliding window may have the last tokens alone, in chunks of their
own; the head lists the first one of each such group. A snapshot is all states after a number of
tokens, in chunks of its own; the head lists these numbers. MACs are made with a key that is not in
the file; a chunk's MAC includes its head's MAC and its number, so that chunks of other files or
positions are rejected. Every size is checked before it is used.
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
MAX_WINDOWS = 1 << 10

_MAGIC = b"lowtide keys 4\0\0"
# Magic, nonce, model, tokens, snapshots, firsts, name.
_FACTS = struct.Struct(f"<16s16s{MODEL_BYTES}sqqq128s")


class FileHead(NamedTuple):
    """The tokens [n] whose keys and values a file holds, and their model."""

    model: bytes  # a digest of `MODEL_BYTES`
    name: str  # of the model, to be shown
    tokens: IntArray
    snapshots: tuple[int, ...]  # numbers of tokens, ascending
    firsts: tuple[int, ...]  # of each group with windows, the first token that is there
    facts: bytes  # as stored
    mac: bytes

    @classmethod
    def of(
        cls,
        model: bytes,
        name: str,
        tokens: IntArray,
        snapshots: Sequence[int],
        key: bytes,
        firsts: Sequence[int] = (),
    ) -> FileHead:
        """Make the head of a new file, with a random nonce."""
        sizes = len(tokens), len(snapshots), len(firsts)
        facts = _FACTS.pack(_MAGIC, token_bytes(16), model, *sizes, name.encode()[:128])
        mac = _mac(key, b"head", facts, _numbers(tokens, snapshots, firsts))
        return cls(model, name, tokens, tuple(snapshots), tuple(firsts), facts, mac)

    @classmethod
    def read(cls, descriptor: int, key: bytes) -> FileHead:
        """Read a file's head. Raises Contradiction if it was not written with this key, OSError."""
        facts = _read(descriptor, 0, _FACTS.size)
        magic, _, model, num_tokens, num_snapshots, num_firsts, name = _FACTS.unpack(facts)
        if magic != _MAGIC:
            raise Contradiction("it has no keys and values, or another version's")
        if not 0 < num_tokens <= MAX_TOKENS:
            raise Contradiction(f"it claims {num_tokens} tokens")
        if not 0 <= num_snapshots <= MAX_SNAPSHOTS:
            raise Contradiction(f"it claims {num_snapshots} snapshots")
        if not 0 <= num_firsts <= MAX_WINDOWS:
            raise Contradiction(f"it claims {num_firsts} windows")
        num_numbers = num_tokens + num_snapshots + num_firsts
        if _head_bytes(num_numbers) > os.fstat(descriptor).st_size:
            raise Contradiction(f"it claims {num_tokens} tokens and ends before their ids")
        stored = _read(descriptor, len(facts), 4 * num_numbers + MAC_BYTES)
        numbers, mac = stored[:-MAC_BYTES], stored[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(key, b"head", facts, numbers)):
            raise Contradiction("its head is not what was written with this user's key")
        found = np.frombuffer(numbers, "<i4").astype(np.int64)
        tokens, others = found[:num_tokens], tuple(found[num_tokens:].tolist())
        snapshots, firsts = others[:num_snapshots], others[num_snapshots:]
        shown = name.rstrip(b"\0").decode(errors="replace")
        return cls(model, shown, tokens, snapshots, firsts, facts, mac)

    @property
    def num_bytes(self) -> int:
        """Bytes before the first chunk."""
        return _head_bytes(len(self.tokens) + len(self.snapshots) + len(self.firsts))

    @property
    def stored(self) -> bytes:
        """The head as it is stored."""
        content = self.facts + _numbers(self.tokens, self.snapshots, self.firsts) + self.mac
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
    group: int = 0  # of the layers whose keys and values they are; from 1 on: with a window

    @property
    def stored_bytes(self) -> int:
        return align_up(self.num_bytes + MAC_BYTES, BORDER_BYTES)


KeyArray = tuple[int, int, int, int]
"""Shape of a token's keys and values in a group of layers: [layers, arrays, kv_heads, width]."""


class KeyLayout(NamedTuple):
    """Shapes of a token's keys and values, and bytes of its states."""

    shapes: tuple[KeyArray, ...]  # of the groups that have all tokens
    itemsize: int
    state_bytes: int = 0  # of a snapshot; 0: a sequence has no states
    windows: tuple[tuple[KeyArray, int], ...] = ()  # with the positions that a row sees

    def of_group(self, group: int) -> KeyLayout:
        """Return the layout of the tokens of a `Chunk.group` alone."""
        shapes = (self.windows[group - 1][0],) if group else self.shapes
        return KeyLayout(shapes, self.itemsize)

    @property
    def token_bytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * self.itemsize

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens of every chunk but a file's last."""
        return max(LEAST_TOKENS, CHUNK_BYTES // max(1, self.token_bytes))

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the size of a chunk in the file."""
        return align_up(num_tokens * self.token_bytes + MAC_BYTES, BORDER_BYTES)

    @property
    def most_stored_bytes(self) -> int:
        """Size of the largest chunk in a file."""
        of_states = Chunk(0, 0, min(self.state_bytes, self._piece_bytes)).stored_bytes
        groups = map(self.of_group, range(1 + len(self.windows)))
        return max(of_states, *(each.stored_bytes(each.chunk_tokens) for each in groups))

    def file_bytes(
        self, num_tokens: int, num_snapshots: int = 0, firsts: Sequence[int] = ()
    ) -> int:
        """Return the size of a file with `num_tokens` tokens."""
        num_bytes = _head_bytes(num_tokens + num_snapshots + len(firsts))
        for group, first in enumerate((0, *firsts)):
            num_bytes += self.of_group(group)._tokens_bytes(num_tokens - first)
        snapshot_bytes = sum(chunk.stored_bytes for chunk in self._of_snapshot(0, 0, 0))
        return num_bytes + num_snapshots * snapshot_bytes

    def _tokens_bytes(self, num_tokens: int) -> int:
        """Return the size of the chunks of `num_tokens` tokens."""
        if not self.shapes:
            return 0
        num_whole, num_left = divmod(num_tokens, self.chunk_tokens)
        last_bytes = self.stored_bytes(num_left) if num_left else 0
        return num_whole * self.stored_bytes(self.chunk_tokens) + last_bytes

    def largest_cut(self, head: FileHead, num_tokens: int, unit: int) -> int:
        """Return the largest number of tokens, at most `num_tokens`, to take over from a file.

        It is a multiple of `unit`.
        """
        most = num_tokens // unit * unit
        if self.state_bytes:
            most = max((n for n in head.snapshots if n <= num_tokens and not n % unit), default=0)
        pairs = zip(head.firsts, self.windows, strict=True)
        return most if all(first <= max(0, most + 1 - w) for first, (_, w) in pairs) else 0

    def all_chunks(self, head: FileHead) -> list[Chunk]:
        """Return the chunks of a file, in order."""
        found, start = list[Chunk](), head.num_bytes
        for group, first in enumerate((0, *head.firsts)):
            layout = self.of_group(group)
            for tokens in layout.chunks(len(head.tokens) - first):
                num_bytes = len(tokens) * layout.token_bytes
                here = range(first + tokens.start, first + tokens.stop)
                found.append(Chunk(len(found), start, num_bytes, here, group=group))
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
        if not self.shapes:
            return []
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
    """Write the MAC after a chunk's content, and zeros after it."""
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


def _head_bytes(num_numbers: int) -> int:
    return align_up(_FACTS.size + 4 * num_numbers + MAC_BYTES, BORDER_BYTES)


def _numbers(tokens: IntArray, snapshots: Sequence[int], firsts: Sequence[int]) -> bytes:
    return tokens.astype("<i4").tobytes() + np.array([*snapshots, *firsts], "<i4").tobytes()


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
