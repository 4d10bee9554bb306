"""Checkpoints rounded by other tools: a matrix's tensors under the name that models use.

NAME.weight is `NAME.qweight`, `NAME.scales` and so on, or `NAME.weight` and its scales; only a
checkpoint's tensors tell which of its matrices are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.config.quantisation import OF_ROWS, Quantisation
from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.files.regular_file import FETCH_AGAIN
from lowtide.formats import awq, compressed_tensors, fp8, gptq
from lowtide.formats.arranged import Arranged, Shape, StoredTensor
from lowtide.formats.grouped_ints import group_in_memory
from lowtide.model_folder.checkpoint import Checkpoint, TensorEntry
from lowtide.schemas.packed import specs_of
from lowtide.schemas.schema import ModelSchema, TensorSpec

_WEIGHT = ".weight"

_MARK_AND_SCALE = {
    "gptq": (".qweight", ".scales"),
    "awq": (".qweight", ".scales"),
    "compressed-tensors": (".weight_packed", ".weight_scale"),
    "fp8": (".weight", ".weight_scale_inv"),
}
"""By method: endings of the tensor that marks a rounded matrix, and of its scales."""


def with_quantised(
    checkpoint: Checkpoint, schema: ModelSchema, quantisation: Quantisation | None
) -> Checkpoint:
    """Return the checkpoint with each rounded matrix as one entry of one format.

    Raises CheckpointError for a tensor that is missing or of a wrong type or shape,
    UnsupportedError for an unsupported type of scales.
    """
    if quantisation is None:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for spec in specs_of(schema):
        name = spec.name.removesuffix(_WEIGHT)
        if len(spec.shape) == 2 and name != spec.name and _is_rounded(name, quantisation, tensors):
            tensors[spec.name] = _entry(name, spec, quantisation, tensors)
    return Checkpoint(checkpoint.files, tensors)


def _is_rounded(name: str, quantisation: Quantisation, tensors: Mapping[str, TensorEntry]) -> bool:
    found = tensors.get(name + _MARK_AND_SCALE[quantisation.method][0])
    return found is not None and (quantisation.method != "fp8" or found.dtype == fp8.DTYPE)


def _entry(
    name: str, spec: TensorSpec, quantisation: Quantisation, tensors: dict[str, TensorEntry]
) -> TensorEntry:
    """Remove the matrix's tensors from `tensors` and make one entry of them."""
    scale_name = name + _MARK_AND_SCALE[quantisation.method][1]
    scales = tensors.get(scale_name)
    if scales is None:
        raise CheckpointError(
            f"The checkpoint has no {scale_name}, the scales of {spec.name}; {FETCH_AGAIN}."
        )
    form = _form(quantisation, scales.dtype, spec.shape[1])
    if form is None:
        raise UnsupportedError(
            f"Tensor {scale_name} is of type {scales.dtype}; not read as scales. Choose another "
            "repository."
        )
    parts = tuple(
        _checked(name + wanted.ending, wanted, form, tensors) for wanted in _wanted(form, spec)
    )
    _check_alone(name, spec, tensors)
    num_bytes = sum(part.num_bytes for part in parts)
    first = parts[0]
    return TensorEntry(first.file, first.offset, num_bytes, form.name, spec.shape, tensors=parts)


def _check_alone(name: str, spec: TensorSpec, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise UnsupportedError or CheckpointError if remaining tensors would change the matrix."""
    if (order := f"{name}.weight_g_idx") in tensors:
        raise UnsupportedError(
            f"The checkpoint has {order}: act-order, which is not read. Choose another repository."
        )
    if spec.name in tensors:
        raise CheckpointError(
            f"The checkpoint has {spec.name} both rounded and not; {FETCH_AGAIN}."
        )


def _form(asked: Quantisation, scale_dtype: str, width: int) -> Arranged | None:
    """Return the format of a rounded matrix; width: of its rows."""
    if asked.method == "fp8":
        return fp8.FORMATS.get(scale_dtype)
    is_of_rows = asked.group == OF_ROWS
    group = group_in_memory(width) if is_of_rows else asked.group
    if asked.method == "gptq":
        return gptq.FORMATS.get((asked.version, group, scale_dtype, is_of_rows))
    if asked.method == "awq":
        return awq.FORMATS.get((group, scale_dtype, is_of_rows))
    key = (asked.num_bits, group, scale_dtype, not asked.is_symmetric, is_of_rows)
    return compressed_tensors.FORMATS.get(key)


def _wanted(form: Arranged, spec: TensorSpec) -> tuple[StoredTensor, ...]:
    try:
        return form.tensors(spec.shape)
    except CheckpointError as reason:
        raise CheckpointError(
            f"{spec.name} cannot be in {form.name}: {reason}; {FETCH_AGAIN}."
        ) from None


def _checked(
    name: str, wanted: StoredTensor, form: Arranged, tensors: dict[str, TensorEntry]
) -> TensorEntry:
    entry = tensors.pop(name, None)
    if entry is None:
        raise CheckpointError(
            f"The checkpoint has no tensor {name} of shape {_listed(wanted.shape)}, of "
            f"{form.name}; {FETCH_AGAIN}."
        )
    if entry.dtype != wanted.dtype or entry.shape != wanted.shape:
        raise CheckpointError(
            f"Tensor {name} is of type {entry.dtype} and shape {_listed(entry.shape)}; "
            f"{form.name} makes it {wanted.dtype} {_listed(wanted.shape)}. "
            f"{FETCH_AGAIN.capitalize()}."
        )
    return entry


def _listed(shape: Shape) -> str:
    return str(list(shape))
