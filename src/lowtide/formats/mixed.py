"""Format of a layer's experts that are stored in several formats."""

from __future__ import annotations

import functools

from lowtide.formats.matrix import MatrixFormat


class Mixed(MatrixFormat):
    """One of several kept formats; a slot is as large as the largest of them.

    No tensor has this format: a matrix is unpacked and multiplied in its own one, noted by its
    slot.
    """

    dtypes = ()
    unpacked = "F32"
    block_bytes = (1,)
    is_kept = True
    is_of_host = True
    in_safetensors = False

    def __init__(self, variants: tuple[MatrixFormat, ...]) -> None:
        """variants: kept formats of one tensor each."""
        self._variants = variants
        self.name = " or ".join(each.name for each in variants)

    @property
    def variants(self) -> tuple[MatrixFormat, ...]:
        return self._variants

    def matrix_bytes(self, shape: tuple[int, ...]) -> int:
        return max(each.matrix_bytes(shape) for each in self._variants)


@functools.cache
def mixed(variants: tuple[MatrixFormat, ...]) -> Mixed:
    """Return the only instance for these variants."""
    return Mixed(variants)
