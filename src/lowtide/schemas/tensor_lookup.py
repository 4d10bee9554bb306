"""Look up a schema's tensors in a checkpoint and compare types and shapes."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.files.regular_file import FETCH_AGAIN
from lowtide.formats import can_load, format_of, loadable_dtypes
from lowtide.model_folder.checkpoint import Checkpoint, TensorEntry
from lowtide.schemas.schema import PartSource, TensorSpec

_BOTH = "Fetch config.json and the weights from one model."


class PartKind(NamedTuple):
    """Dtype and size of an expert's stored part."""

    dtype: str
    part_bytes: int


class FoundParts(NamedTuple):
    """Location of one stored part for every expert of a layer."""

    kinds: list[PartKind]
    files: list[int]
    offsets: list[int]


def find(spec: TensorSpec, checkpoint: Checkpoint) -> TensorEntry:
    """Return a tensor's entry.

    Raises CheckpointError if it is missing or has another shape, UnsupportedError for a type that
    weights cannot be loaded from.
    """
    entry = checkpoint.tensors.get(spec.name)
    if entry is None and spec.other_name is not None:
        entry = checkpoint.tensors.get(spec.other_name)
    if entry is None:
        if f"{spec.name.removesuffix('.weight')}.qweight" in checkpoint.tensors:
            raise UnsupportedError(
                f"{spec.name} is stored as GPTQ or AWQ (qweight), and config.json has no "
                f"quantization_config that says so; {FETCH_AGAIN}."
            )
        raise CheckpointError(
            f"The checkpoint has no tensor {spec.name} of shape {list(spec.shape)} among its "
            f"{len(checkpoint.tensors)}; config.json asks for it. {_BOTH}"
        )
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"Tensor {spec.name} has shape {list(entry.shape)}; config.json makes it "
            f"{list(spec.shape)}. {_BOTH}"
        )
    supported = loadable_dtypes() if spec.dtype is None else (spec.dtype,)
    if entry.dtype not in supported and not (spec.dtype is None and can_load(entry.dtype)):
        known_as = " (FP8)" if entry.dtype.startswith("F8_E") else ""
        raise UnsupportedError(
            f"Tensor {spec.name} is of type {entry.dtype}{known_as}; supported: "
            f"{', '.join(supported)}. Choose another repository of the model."
        )
    return entry


def find_parts(
    source: PartSource, layer: int, num_experts: int, checkpoint: Checkpoint
) -> FoundParts:
    """Locate a part of every expert of a layer.

    Raises as `find`, and UnsupportedError if experts differ in type where they may not.
    """
    first = find(source.spec(layer, 0), checkpoint)
    if first.tensors:
        raise UnsupportedError(
            f"{source.spec(layer, 0).name} is stored as {first.dtype}, but experts of the first "
            "such layer are not; experts must be rounded in all layers alike or in none. Choose "
            "another repository of the model."
        )
    found = FoundParts([], [], [])
    previous: TensorSpec | None = None
    for expert in range(num_experts):
        spec = source.spec(layer, expert)
        if spec != previous:  # a stacked tensor is looked up once
            entry, previous = find_expert(spec, first.dtype, checkpoint, may_differ=True), spec
            kind = PartKind(entry.dtype, entry.num_bytes // source.num_parts)
        found.kinds.append(kind)
        found.files.append(entry.file)
        found.offsets.append(entry.offset + source.place(expert) * kind.part_bytes)
    return found


def find_expert(
    spec: TensorSpec, dtype: str, checkpoint: Checkpoint, may_differ: bool = False
) -> TensorEntry:
    """Return an expert tensor's entry and check its dtype.

    dtype: that of the first expert, which all share; with `may_differ` either may be a type of GGUF
    files, some of which mix them.
    """
    entry = find(spec, checkpoint)
    if entry.dtype == dtype:
        return entry
    is_of_gguf = any(not format_of(each).in_safetensors for each in (entry.dtype, dtype))
    if entry.tensors or not (may_differ and is_of_gguf):
        raise UnsupportedError(
            f"Tensor {spec.name} is of type {entry.dtype}, but of another expert it is {dtype}; "
            "the experts of a layer, and of a rounded checkpoint all, must be of one type. Choose "
            "another file or repository of the model."
        )
    return entry
