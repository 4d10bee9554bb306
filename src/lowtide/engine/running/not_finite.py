"""Finds the cause of an infinity or NaN in a pass: a weight or the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowtide.errors import CheckpointError, NumericError
from lowtide.formats.plain import plain_format
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.progress import Progress
from lowtide.reading.dense_weights import DenseWeights
from lowtide.reading.finite_weights import check_finite
from lowtide.schemas import WeightMap

SEARCH_S = 60.0
"""Time limit of the search for a broken weight: some models take an hour to read."""

_WAY_OUT = {
    "float16": "Choose `dtype` bfloat16 or float32, whose range is wider",
    "bfloat16": "Choose `dtype` float32, which is more precise",
    "float32": "Choose `kernels` 'reference', and report it if that helps",
}


class FaultSearch:
    """Finds the cause of logits that are not finite, once per loaded model.

    dense: name of a dense weight -> type in which it is loaded. dtype: the compute type.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weight_map: WeightMap,
        dense: DenseWeights,
        dtype: torch.dtype,
        report: Progress,
    ) -> None:
        self._checkpoint = checkpoint
        self._weight_map = weight_map
        self._dense = dense
        self._dtype = dtype
        self._report = report
        self._found: float | str | None = None  # the finite share, or what is wrong with a weight

    @contextmanager
    def naming_faults(self) -> Iterator[None]:
        """Guard a pass and the choice from its logits.

        If they are not finite, search the weights, once and for at most `SEARCH_S`, and raise
        CheckpointError naming the tensor and file at fault, or NumericError with a way out.
        """
        try:
            yield
        except NumericError as error:
            raise self._exonerate(error) from error

    def _exonerate(self, error: NumericError) -> NumericError:
        """Return the error to raise if the weights are finite; raise CheckpointError if not."""
        if self._found is None:  # once: what else is asked waits meanwhile
            self._found = self._search()
        if isinstance(self._found, str):
            raise CheckpointError(self._found)
        dtype, found = str(self._dtype).removeprefix("torch."), "all weights are finite"
        if self._found < 1:
            found = (
                f"the {self._found:.0%} of weights that were read are finite "
                "(`check_weights` reads all)"
            )
        return NumericError(f"{error} But {found}: {dtype} overflowed. {_WAY_OUT[dtype]}.")

    def _search(self) -> float | str:
        try:
            return check_finite(self._checkpoint, self._report, self._loaded_dtypes(), SEARCH_S)
        except CheckpointError as fault:
            return str(fault)

    def _loaded_dtypes(self) -> dict[str, str]:
        """Map tensors to the types they are loaded in; dense ones, used by every pass, come first.

        Other tensors of the checkpoint, such as a head for training, are left out.
        """
        tensors = self._checkpoint.tensors
        places = {(e.file, e.offset): name for name, e in tensors.items() if e.num_bytes}
        dense, table = self._weight_map.dense, self._weight_map.experts
        dtypes = {}
        for name, weight in self._dense.meta().items():
            # A weight in another format is checked in the type that it is unpacked into.
            dtype = weight.dtype if isinstance(weight, Tensor) else self._dtype
            dtypes[places[dense[name].file, dense[name].offset]] = plain_format(dtype).name
        starts = set(zip(table.files.ravel().tolist(), table.offsets.ravel().tolist(), strict=True))
        for place, name in places.items():
            if place in starts:
                dtypes.setdefault(name, plain_format(self._dtype).name)
        return dtypes
