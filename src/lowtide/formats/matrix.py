"""What a format is: the bytes of one matrix, and what they are made into or multiplied with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]


class Products(Protocol):
    """Of matrices that are in the compute dtype: the kernels, as a format sees them."""

    def multiply_by(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """`out = x @ matrix.t()`."""
        ...


class StoredMatrix(Protocol):
    """A matrix [out, in] in memory as its format has it, not unpacked."""

    def multiply(self, kernels: Products, x: Tensor, out: Tensor) -> None:
        """`out = x @ matrix.t()` for x [n, in] and out [n, out] of the compute dtype.

        A row's bits must not depend on the others, as `Kernels.multiply`'s do not beyond the
        number of rows.
        """
        ...


class MatrixFormat(ABC):
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

    def num_bytes(self, num_weights: int, tensor: int = 0) -> int:
        """Of whole blocks, in one of the tensors."""
        return num_weights // self.block_size * self.block_bytes[tensor]

    @abstractmethod
    def unpack(self, *stored: Bytes) -> Bytes:
        """The weights of whole blocks, in their order, in the plain format `unpacked`.

        stored: the same blocks' bytes of each tensor, 1-D, at any address.
        """

    def matrix(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> StoredMatrix:
        """A matrix of a kept format over its bytes in memory, each of `tensors` 1-D uint8."""
        raise NotImplementedError(f"{self.name} is not kept.")

    @abstractmethod
    def has_tensor(self, name: str, dtype: str) -> bool:
        """Whether a checkpoint's tensor may hold something of this format that is not finite."""

    @abstractmethod
    def is_finite(self, stored: Bytes) -> bool:
        """Whether no weight is an infinity or NaN, by whole blocks of such a tensor."""
