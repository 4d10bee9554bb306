"""Experts of one layer whose matrices are in several formats: which one, each slot says itself."""

from __future__ import annotations

import functools

from lowtide.formats.matrix import MatrixFormat


class Mixed(MatrixFormat):
    """One of several kept formats, in memory as large as the largest. No tensor is in it, and a
    matrix is unpacked and multiplied with as the one that it is in.
    """

    dtypes = ()
    unpacked = "F32"
    block_bytes = (1,)
    is_kept = True
    is_of_host = True
    in_safetensors = False

    def __init__(self, variants: tuple[MatrixFormat, ...]) -> None:
        """variants: kept, of one tensor each."""
        self._variants = variants
        self.name = " or ".join(each.name for each in variants)

    @property
    def variants(self) -> tuple[MatrixFormat, ...]:
        return self._variants

    def matrix_bytes(self, shape: tuple[int, ...]) -> int:
        return max(each.matrix_bytes(shape) for each in self._variants)


@functools.cache
def mixed(variants: tuple[MatrixFormat, ...]) -> Mixed:
    """The one of these variants."""
    return Mixed(variants)
