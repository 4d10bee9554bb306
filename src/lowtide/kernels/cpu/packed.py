"""CPU operators over packed weights: few bfloat16 rows, rows rounded to int8, and unpacking.

Each weight is unpacked to float32 as its format says, and rounded once to bfloat16. Or rows are
rounded to int8 (`kernels/int8_rows.py`), any number of them. A row's bits depend only on the row,
the matrix and the variant; those of rounded rows not even on the variant.

A type number is the library's number of a format: that of block_types.hpp; or `SECTIONS` plus, from
the lowest bit on, 2 bits of form (bfloat16, 4-bit integers, 8-bit integers, FP8), 2 of the scales'
type, 1 for zeros, then the logarithm of the group size.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from lowtide.errors import InternalError
from lowtide.formats import MatrixFormat, StoredMatrix, ggml, quantised
from lowtide.formats.arranged import SCALE_DTYPES, SectionedMatrix
from lowtide.formats.fp8 import BLOCK, Fp8Blocks
from lowtide.formats.ggml import GgmlFormat, PackedMatrix
from lowtide.formats.grouped_ints import GroupedInts
from lowtide.formats.quantised import Quantised
from lowtide.formats.quantised_matrix import QuantisedMatrix
from lowtide.kernels.cpu.library import (
    fields_of,
    functions_of,
    load_part,
    load_parts,
)
from lowtide.kernels.cpu.sources import PACKED, ROUNDED, block_types
from lowtide.kernels.cpu.variants import INT8_VARIANTS, VARIANTS, num_variants
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls

SECTIONS = 1 << 16
PLAIN = SECTIONS
"""Type number of bfloat16 weights."""

_OF_4_BITS, _OF_8_BITS, _FP8 = 1, 2, 3

MAX_FEW_ROWS = 32
"""Most rows per expert in a call over several experts; enough for a diffusion block."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_FUNCTIONS = {"packed_unpack": (None, _INT, _INT, _P, _LONG, _LONG, _P, _LONG, _LONG, _P)}


class PackedOperators:
    """Compiled operators in one variant, over every packed format."""

    def __init__(
        self, library: ctypes.CDLL, variant: int | None = None, rounds_rows: bool = False
    ) -> None:
        """Bind the operators; variant: index in `VARIANTS`, or for int8 rows in `INT8_VARIANTS`.

        By default the best of this processor.
        """
        self.rounds_rows, self._library = rounds_rows, library
        self._kind = ROUNDED if rounds_rows else PACKED
        best = library.lowtide_best_int8() if rounds_rows else num_variants(library) - 1
        self.num_variants = best + 1
        self.variant = best if variant is None else variant
        self.name = (INT8_VARIANTS if rounds_rows else VARIANTS)[self.variant]
        self._most_unpacking = min(num_variants(library) - 1, 2)
        best_own: int = library.lowtide_best_own()
        self._own_variant = best_own if variant is None else min(variant, best_own)
        numbers = block_numbers(library)
        self._names = {number: name for name, number in numbers.items()}
        self._own_types = {numbers[own.name] for own in quantised.FORMATS}
        self._ready: set[tuple[str, int]] = set()  # loaded parts, by kind and type

    @functools.cached_property
    def calls(self) -> WeightCalls:
        """Return the operators of all types but q8 and q4; their part is loaded first."""
        most = sys.maxsize if self.rounds_rows else self._library.lowtide_max_rows(self.variant)
        return WeightCalls(load_part(self._kind), self._kind, self.variant, most)

    @functools.cached_property
    def _own_calls(self) -> WeightCalls:
        if self.rounds_rows:
            return self.calls
        most: int = self._library.lowtide_max_own_rows(self._own_variant)
        return WeightCalls(load_part(PACKED), PACKED, self._own_variant, most)

    @functools.cached_property
    def _unpack(self) -> ctypes._NamedFuncPointer:
        return functions_of(load_part(PACKED), _FUNCTIONS)["packed_unpack"]

    def has(self, matrix: object) -> bool:
        """Return True if `unpack` supports a matrix."""
        return self._place_of(matrix) is not None

    def matrix_call(self, matrix: StoredMatrix) -> MatrixCall | None:
        """Return the call that multiplies with a matrix; None if no compiled one can.

        Views of some of a matrix's rows have none: their sections lie apart.
        """
        place = self._place_of(matrix)
        if place is None or (self.rounds_rows and place.type >= SECTIONS):
            return None
        if isinstance(matrix, SectionedMatrix) and matrix.numbers != range(matrix.whole_shape[0]):
            return None
        self._need(self._kind, place.type)
        return MatrixCall(self._calls_of(place.type), place.type, place.address)

    def experts(self, types: Sequence[int]) -> CompiledExperts | None:
        """Return the compiled experts of slots with gate, up and down of these types, or None."""
        if self.rounds_rows and max(types) >= SECTIONS:
            return None
        are_own = {each in self._own_types for each in types}
        if len(are_own) > 1 and self._own_calls.variant != self.calls.variant:
            return None
        for each in types:
            self._need(self._kind, each)
        calls = self._own_calls if are_own == {True} else self.calls
        return CompiledExperts(calls, types, min(MAX_FEW_ROWS, calls.max_rows))

    def unpack(self, matrix: StoredMatrix, out: Tensor) -> None:
        """Compute `StoredMatrix.unpack` for a matrix that it `has`.

        out: contiguous bfloat16 [out, in]. All variants have the same bits.
        """
        place = self._place_of(matrix)
        assert place is not None, f"{type(matrix).__name__} is in no packed format"
        numbers: Tensor | None = None
        first, num_rows = 0, matrix.shape[0]
        if isinstance(matrix, SectionedMatrix):
            if isinstance(matrix.numbers, range):
                first = matrix.numbers.start
            else:
                numbers = matrix.numbers.contiguous()
            num_rows = matrix.whole_shape[0]
        calls = self._calls_of(place.type)
        self._need(PACKED, place.type)
        self._unpack(
            min(calls.variant, self._most_unpacking) if self.rounds_rows else calls.variant,
            place.type,
            place.address,
            num_rows,
            matrix.shape[1],
            None if numbers is None else numbers.data_ptr(),
            first,
            matrix.shape[0],
            out.data_ptr(),
        )

    def _calls_of(self, number: int) -> WeightCalls:
        return self._own_calls if number in self._own_types else self.calls

    def _need(self, kind: str, number: int) -> None:
        """Load the part of a type, if it has one; opening a model has loaded its own already."""
        if (kind, number) in self._ready:
            return
        if number in self._names:
            load_parts([f"{kind}/{self._names[number]}"])
        self._ready.add((kind, number))

    def _place_of(self, matrix: object) -> _Place | None:
        """Return the address and type of a packed matrix in host memory, or None."""
        if isinstance(matrix, PackedMatrix):
            number, bytes_of = type_number(self._library, matrix.format), matrix.stored
        elif isinstance(matrix, SectionedMatrix):
            number, bytes_of = type_number(self._library, matrix.format), matrix.content
        elif isinstance(matrix, QuantisedMatrix):
            number, bytes_of = block_numbers(self._library)[f"q{matrix.num_bits}"], matrix.data
        else:
            return None
        return None if number is None else _Place(number, bytes_of.data_ptr())


@functools.cache
def block_numbers(library: ctypes.CDLL) -> Mapping[str, int]:
    """Return the library's block types by their formats' names.

    Raises InternalError where a format has another layout here.
    """
    formats = {each.name: each for each in (*ggml.FORMATS, *quantised.FORMATS)}
    found = [(each.name, each.start, each.num_bytes) for each in fields_of(library, "BlockType")]
    known = [formats[name] for name, *_ in found if name in formats]
    own = [(each.name, each.block_size, each.block_bytes[0]) for each in known]
    for ours, theirs in zip_longest(own, found):
        if ours != theirs:
            raise InternalError(
                f"BlockType has {ours} here and {theirs} in the compiled library: a name, and a "
                "block's weights and bytes."
            )
    return {name: number for number, (name, *_) in enumerate(found)}


@functools.cache
def type_number(library: ctypes.CDLL, stored: MatrixFormat) -> int | None:
    """Return the type number of a format; None if no compiled operator knows it."""
    if stored.name == "BF16":
        return PLAIN
    if isinstance(stored, GgmlFormat | Quantised):
        return block_numbers(library).get(stored.name)
    if isinstance(stored, GroupedInts):
        form = _OF_4_BITS if stored.num_bits == 4 else _OF_8_BITS
        group, has_zeros = stored.group, stored.has_zeros
    elif isinstance(stored, Fp8Blocks):
        form, group, has_zeros = _FP8, BLOCK, False
    else:
        return None
    scale = SCALE_DTYPES.index(stored.scale_dtype)
    return SECTIONS | form | scale << 2 | has_zeros << 4 | (group.bit_length() - 1) << 5


def parts_of(formats: Iterable[MatrixFormat], rounded: Collection[str]) -> tuple[str, ...]:
    """List the parts of the kernels that weights in these formats need.

    rounded: names of the formats whose products round rows to int8. Such rows are multiplied with
    weights as stored; an embedding's rows are unpacked in any case.
    """
    compiled = block_types()
    found = dict[str, None]()
    for each in (variant for stored in formats for variant in stored.variants):
        if isinstance(each, GgmlFormat | Quantised) and each.name in compiled:
            kinds = (PACKED, ROUNDED) if each.name in rounded else (PACKED,)
            found.update((f"{kind}/{each.name}", None) for kind in kinds)
        elif isinstance(each, GroupedInts | Fp8Blocks):
            found[PACKED] = None
    return tuple(found)


class _Place(NamedTuple):
    type: int
    address: int
