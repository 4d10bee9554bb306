"""Operators over weights that stay packed on the CPU: few bfloat16 rows, and unpacking.

Each weight is unpacked to float32 with the bits of its format and rounded once to bfloat16, and
sums are those of `few_rows.py`: products have the bits of its own with the weights unpacked. Every
kind of formats has a library of its own, built when a model has such weights; threads are the team
of `few_rows.py`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeGuard, TypeVar

from torch import Tensor

from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.kernels.cpu.few_rows import VARIANTS, num_variants
from lowtide.kernels.cpu.library import load_borrowing
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls
from lowtide.kernels.operands import Matrix

OneMatrix = TypeVar("OneMatrix", bound=StoredMatrix)


class PackedOperators(ABC, Generic[OneMatrix]):
    """The compiled operators of one kind in one of their variants, the `VARIANTS` of few_rows.py.

    A type is the number by which they know a format.
    """

    kind: ClassVar[str]  # in its functions' names
    sources: ClassVar[tuple[Path, ...]]
    plain: ClassVar[int]  # the type of what is bfloat16 already

    rounds_rows = False  # to int8, before they are multiplied

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        """variant: of `VARIANTS` one that runs here, by default the last of them."""
        self.num_variants = num_variants(library)
        self.variant = self.num_variants - 1 if variant is None else variant
        self.name = VARIANTS[self.variant]
        self.max_rows: int = library.lowtide_max_rows(self.variant)
        self.calls = WeightCalls(library, self.kind, self.variant, self.max_rows)

    @classmethod
    def load(cls, variant: int | None = None) -> Self:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        return cls(load_borrowing(*cls.sources), variant)

    @abstractmethod
    def type_number(self, stored: MatrixFormat) -> int | None:
        """The number of a format that experts' matrices may be in, also of bfloat16; else None."""

    def is_packed(self, stored: MatrixFormat) -> bool:
        """Whether a format is of this kind."""
        return self.type_number(stored) not in (None, self.plain)

    @abstractmethod
    def has(self, matrix: Matrix) -> TypeGuard[OneMatrix]:
        """Whether a matrix is in a format of this kind."""

    @abstractmethod
    def matrix_call(self, matrix: OneMatrix) -> MatrixCall | None:
        """What multiplies with it; None where that takes a matrix's rows by themselves."""

    def experts(self, types: Sequence[int]) -> CompiledExperts | None:
        """The compiled experts of slots whose gate, up and down are of these types."""
        return CompiledExperts(self.calls, types)

    @abstractmethod
    def unpack(self, matrix: OneMatrix, out: Tensor) -> None:
        """See `StoredMatrix.unpack`, for a contiguous bfloat16 out [out, in]."""
