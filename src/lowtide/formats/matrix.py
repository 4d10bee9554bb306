"""What a format is: the bytes of one matrix, and what they are made into or multiplied with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Bytes = NDArray[np.uint8]


class StoredMatrix(Protocol):
    """A matrix [out, in] in memory as its format has it, not unpacked.

    Kernels multiply with some of its rows at a time, which they unpack, unless they know better.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def rows(self, features: slice | Tensor) -> StoredMatrix:
        """Some of them: a range, as a view, or a copy of those whose numbers [n] are given."""
        ...

    def unpack(self, out: Tensor) -> None:
        """Writes all weights into out [out, in], each rounded once to its type, the compute dtype.

        No weight's bits depend on which others are unpacked with it.
        """
        ...


class MatrixFormat:
    """How one matrix lies in a file and, if it is kept, in memory. Has no state.

    A matrix is held by one tensor or several (weights, scales), each divided into blocks: so many
    neighbouring weights of a row, in so many bytes of every tensor.
    """

    name: str  # for people, options and stored costs
    dtypes: tuple[str, ...]  # safetensors types of the tensors that hold a matrix
    block_size: int = 1  # weights of a block
    block_bytes: tuple[int, ...]  # of a block in each of the tensors
    unpacked: str  # name of the plain format that `unpack` answers in
    is_kept: bool = False  # as it is stored, and multiplied with; else unpacked when it is read
    is_of_host: bool = False  # kept where the host computes; no GPU's kernels know it
    in_safetensors: bool = True  # whether `dtypes` are safetensors' names, not ours

    def num_bytes(self, num_weights: int, tensor: int = 0) -> int:
        """Bytes of so many weights, whole blocks, in one of the tensors."""
        return num_weights // self.block_size * self.block_bytes[tensor]

    def matrix_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a whole matrix in one tensor."""
        return self.num_bytes(math.prod(shape))

    def for_rows(self, num_columns: int) -> MatrixFormat:
        """Return the format for rows of this length; another one only if a block is a whole row."""
        return self

    @property
    def kept(self) -> MatrixFormat | None:
        """What it is multiplied with as: itself, or what it is arranged into as it is read. None:
        it is unpacked then.
        """
        return self if self.is_kept else None

    @property
    def variants(self) -> tuple[MatrixFormat, ...]:
        """The formats that a matrix may be in, of which there are several only where experts of
        one layer differ.
        """
        return (self,)

    def num_weights(self, num_items: int) -> int:
        """Weights in so many items of an array in memory: elements, or bytes of blocks."""
        is_plain = self.block_size == 1
        return num_items if is_plain else num_items // self.block_bytes[0] * self.block_size

    def arrange(self, stored: Sequence[Bytes], target: Bytes) -> None:
        """Writes whole blocks of `stored`, each of a tensor, as the format `kept` has them."""
        raise NotImplementedError(f"{self.name} is kept as it is stored, or not at all.")

    def unpack(self, *stored: Bytes) -> Bytes:
        """The weights of whole blocks, in their order, in the plain format `unpacked`.

        stored: the same blocks' bytes of each tensor, 1-D, at any address.
        """
        raise NotImplementedError(f"{self.name} is not unpacked by blocks.")

    def pack(
        self,
        weights: NDArray[np.float32],
        target: Bytes,
        importance: NDArray[np.float32] | None = None,
    ) -> None:
        """Writes whole blocks of weights [n] into `target` in this format, of one tensor.

        importance: of each input, what the square of an error at its weights counts.
        """
        raise NotImplementedError(f"Nothing is converted into {self.name}.")

    def matrix(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> StoredMatrix:
        """A matrix of a kept format over its bytes in memory, each of `tensors` 1-D uint8."""
        raise NotImplementedError(f"{self.name} is not kept.")

    def has_tensor(self, name: str, dtype: str) -> bool:
        """Whether a checkpoint's tensor may hold something of this format that is not finite."""
        return False

    def is_finite(self, stored: Bytes) -> bool:
        """Whether no weight is an infinity or NaN, by whole blocks of such a tensor."""
        return True
