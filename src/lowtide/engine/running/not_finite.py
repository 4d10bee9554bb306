"""Whose fault it is when a pass ends in an infinity or NaN: the weights', or the arithmetic's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lowtide.engine.opening.model import OpenModel
from lowtide.errors import CheckpointError, NumericError
from lowtide.formats.plain import plain_format
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.reading.finite_weights import check_finite

SEARCH_S = 60.0
"""Looked for a broken weight at most: some models take an hour to read."""

_WAY_OUT = {
    "float16": "Choose dtype bfloat16 or float32, whose range is wider",
    "bfloat16": "Choose dtype float32, which is more precise",
    "float32": "Choose kernels 'reference', and report it if that helps",
}


@contextmanager
def naming_faults(opened: OpenModel) -> Iterator[None]:
    """Around a pass and what is chosen from its logits.

    Where those are not finite, looks through the weights, once and for at most `SEARCH_S`, and
    raises CheckpointError naming the tensor and file at fault, or NumericError with a way out.
    """
    try:
        yield
    except NumericError as error:
        if opened.checkpoint is None:
            raise
        raise _exonerate(opened, opened.checkpoint, error) from error


def _exonerate(opened: OpenModel, checkpoint: Checkpoint, error: NumericError) -> NumericError:
    """The error of weights that are finite; raises CheckpointError if they are not."""
    if not opened.weights_searched:  # once: what else is asked waits meanwhile
        dtypes, report = _loaded_dtypes(opened, checkpoint), opened.options.report
        try:
            opened.weights_searched.append(check_finite(checkpoint, report, dtypes, SEARCH_S))
        except CheckpointError as fault:
            opened.weights_searched.append(str(fault))
    [share] = opened.weights_searched
    if isinstance(share, str):
        raise CheckpointError(share)
    dtype = str(opened.dtype).removeprefix("torch.")
    found = "all weights are finite"
    if share < 1:
        found = f"the {share:.0%} of weights that were read are finite (check_weights reads all)"
    return NumericError(f"{error} But {found}: {dtype} overflowed. {_WAY_OUT[dtype]}.")


def _loaded_dtypes(opened: OpenModel, checkpoint: Checkpoint) -> dict[str, str]:
    """What each tensor of the model is converted to; dense ones, which every pass uses, first.

    Others of the checkpoint, such as a head for training, are not used.
    """
    places = {(e.file, e.offset): name for name, e in checkpoint.tensors.items() if e.num_bytes}
    dense, table = opened.weight_map.dense, opened.weight_map.experts
    dtypes = {}
    for name, weight in opened.dense.meta().items():
        # A weight in another format is checked in the type that it is unpacked into.
        dtype = weight.dtype if isinstance(weight, Tensor) else opened.dtype
        dtypes[places[dense[name].file, dense[name].offset]] = plain_format(dtype).name
    starts = set(zip(table.files.ravel().tolist(), table.offsets.ravel().tolist(), strict=True))
    for place, name in places.items():
        if place in starts:
            dtypes.setdefault(name, plain_format(opened.dtype).name)
    return dtypes
