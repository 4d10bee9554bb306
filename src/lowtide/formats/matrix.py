"""Interface of a format: a matrix's bytes, and how they are unpacked and multiplied."""

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
    """A matrix [out, in] in memory in its own format.

    Kernels multiply a few rows at a time, unpacking them unless they have a product for the format.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The size as it is multiplied: [out, in], whatever is stored."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes as they are stored, scales included."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that the stored bytes are on."""
        ...

    def rows(self, features: slice | Tensor) -> StoredMatrix:
        """Select rows: a range as a view, or a copy of the rows numbered [n]."""
        ...

    def unpack(self, out: Tensor) -> None:
        """Write all weights into out [out, in], each rounded once to the compute dtype.

        No weight's bits depend on which others are unpacked with it.
        """
        ...


class MatrixFormat:
    """Format of one matrix in files and, if it is kept, in memory. Stateless.

    A matrix is held by one or several tensors (weights, scales), each divided into blocks. A block
    is `block_size` adjacent weights of a row, stored in `block_bytes[i]` bytes of tensor i.
    """

    name: str  # shown to users, used by options and stored costs
    dtypes: tuple[str, ...]  # safetensors types of the tensors that hold a matrix
    block_size: int = 1  # weights of a block
    block_bytes: tuple[int, ...]  # of a block in each of the tensors
    unpacked: str  # name of the plain format that `unpack` answers in
    is_kept: bool = False  # kept and multiplied as stored; else unpacked when read
    is_of_host: bool = False  # kept only where the host computes: GPU kernels lack it
    in_safetensors: bool = True  # `dtypes` are safetensors' names, not ours

    def num_bytes(self, num_weights: int, tensor: int = 0) -> int:
        """Return the number of bytes of `num_weights` weights, in whole blocks, in one tensor."""
        return num_weights // self.block_size * self.block_bytes[tensor]

    def matrix_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of a whole matrix in one tensor."""
        return self.num_bytes(math.prod(shape))

    def for_rows(self, num_columns: int) -> MatrixFormat:
        """Return the format for rows of this length; it differs only if a block is a whole row."""
        return self

    @property
    def kept(self) -> MatrixFormat | None:
        """The format used for products: itself, the rearranged one, or None if it is unpacked."""
        return self if self.is_kept else None

    @property
    def variants(self) -> tuple[MatrixFormat, ...]:
        """Formats that a matrix may have; several only where experts of one layer differ."""
        return (self,)

    def num_weights(self, num_items: int) -> int:
        """Return the number of weights in `num_items` array items: elements, or bytes of blocks."""
        is_plain = self.block_size == 1
        return num_items if is_plain else num_items // self.block_bytes[0] * self.block_size

    def arrange(self, stored: Sequence[Bytes], target: Bytes) -> None:
        """Write whole blocks, given as bytes of each tensor, in the format `kept`."""
        raise NotImplementedError(f"{self.name} is kept as it is stored, or not at all.")

    def unpack(self, *stored: Bytes) -> Bytes:
        """Return the weights of whole blocks, in order, in the plain format `unpacked`.

        stored: the same blocks' bytes of each tensor, 1-D, at any address.
        """
        raise NotImplementedError(f"{self.name} is not unpacked by blocks.")

    def pack(
        self,
        weights: NDArray[np.float32],
        target: Bytes,
        importance: NDArray[np.float32] | None = None,
    ) -> None:
        """Write whole blocks of weights [n] into `target` in this format of one tensor.

        importance: the weight of a squared error at each input.
        """
        raise NotImplementedError(f"Nothing is converted into {self.name}.")

    def matrix(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> StoredMatrix:
        """Wrap the bytes of a kept matrix, each of `tensors` 1-D uint8."""
        raise NotImplementedError(f"{self.name} is not kept.")

    def has_tensor(self, name: str, dtype: str) -> bool:
        """Return True if a tensor of this format may hold values that are not finite."""
        return False

    def is_finite(self, stored: Bytes) -> bool:
        """Return True if whole blocks of such a tensor hold no infinity or NaN."""
        return True
