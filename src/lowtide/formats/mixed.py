"""Experts of one layer whose matrices are in several formats: which one, each slot says itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.formats.matrix import Bytes, MatrixFormat

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.formats.matrix import StoredMatrix


class Mixed(MatrixFormat):
    """One of several kept formats, in memory as large as the largest. No tensor is in it."""

    dtypes = ()
    unpacked = "F32"
    block_bytes = (1,)
    is_kept = True
    is_of_host = True
    in_safetensors = False

    def __init__(self, variants: Sequence[MatrixFormat]) -> None:
        """variants: kept, of one tensor each."""
        self._variants = tuple(variants)
        self.name = " or ".join(each.name for each in variants)

    @property
    def variants(self) -> tuple[MatrixFormat, ...]:
        return self._variants

    def matrix_bytes(self, shape: tuple[int, ...]) -> int:
        return max(each.matrix_bytes(shape) for each in self._variants)

    def unpack(self, *stored: Bytes) -> Bytes:
        raise NotImplementedError(f"{self.name} is unpacked as the one that a matrix is in.")

    def matrix(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> StoredMatrix:
        raise NotImplementedError(f"{self.name} is multiplied with as the one a matrix is in.")

    def has_tensor(self, name: str, dtype: str) -> bool:
        return False

    def is_finite(self, stored: Bytes) -> bool:
        return True


@functools.cache
def mixed(variants: tuple[MatrixFormat, ...]) -> Mixed:
    """The one of these variants."""
    return Mixed(variants)
