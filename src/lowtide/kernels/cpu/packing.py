"""Compiled twin of `formats.convert.pack`, which rounds weights to 8 or 4 bits."""

from __future__ import annotations

import ctypes

import numpy as np

from lowtide.formats import MatrixFormat
from lowtide.formats.convert import pack
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES, convert_plain
from lowtide.formats.quantised import Floats, QuantisedRows
from lowtide.kernels.cpu.library import functions_of, load_part
from lowtide.kernels.cpu.sources import PACKING
from lowtide.kernels.cpu.variants import WITHOUT_DOTS

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_FUNCTIONS = {"quantised_pack": (None, _INT, _INT, _INT, _P, _P, _P, _LONG, _LONG)}


class CompiledPacking:
    """Compiled `Pack`, with the same bytes."""

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        """Bind the function; variant: index in `VARIANTS`, by default the best in float32."""
        best = min(library.lowtide_best_variant(), WITHOUT_DOTS)
        self._variant = best if variant is None else variant
        self._pack = functions_of(load_part(PACKING), _FUNCTIONS)["quantised_pack"]

    def __call__(
        self,
        to: MatrixFormat,
        source: Bytes,
        name: str,
        target: Bytes,
        importance: Floats | None = None,
    ) -> None:
        if not isinstance(to, QuantisedRows):
            pack(to, source, name, target, importance)
            return
        if name not in ("BF16", "F32"):
            wide = np.empty(4 * (len(source) // ITEM_BYTES[name]), np.uint8)
            convert_plain(source, name, wide, "F32")
            source, name = wide, "F32"
        # A file's bytes may be unaligned: numpy copies them if they are.
        weights = np.require(
            source.view(np.uint16 if name == "BF16" else np.float32), None, ("C", "A")
        )
        worth = None if importance is None else np.ascontiguousarray(importance, np.float32)
        out = np.ascontiguousarray(target)
        self._pack(
            self._variant,
            to.num_bits,
            name == "BF16",
            weights.ctypes.data,
            None if worth is None else worth.ctypes.data,
            out.ctypes.data,
            len(weights) // to.num_columns,
            to.num_columns,
        )
        if out is not target:
            target[:] = out
