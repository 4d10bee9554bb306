"""Format of each part of a model's weights in memory: options and rules.

    format   experts   other matrices   embedding and head
    own      as stored, or in the compute dtype
    q8       q8        q8               q8
    q4       q4        q4               q8

`expert_dtype` and `dense_dtype` set one part, with the same rule for the head. Routers, norms,
biases and other weights that are not multiplied in their stored form keep their own type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lowtide.config import ModelConfig
from lowtide.errors import UnsupportedError, UsageError
from lowtide.formats import MatrixFormat, format_of, formats, ggml
from lowtide.formats.plain import SAFETENSORS_NAME
from lowtide.plan import AUTO_FORMAT, INT8_ROWS, OWN_FORMAT, WeightFormats, check_is_named
from lowtide.schemas import ModelSchema, WeightMap
from lowtide.schemas.schema import TensorSpec

QUANTISED = ("q8", "q4")

_PACKED = tuple(each.name for each in ggml.FORMATS)

ROUNDABLE = frozenset((*QUANTISED, *_PACKED))
"""Formats whose products can round rows to int8."""

_OTHER_NAMES = {"int8": "q8", "int4": "q4"}
_OF_HEAD = {"q4": "q8"}  # others: as the rest


class FormatRequest(NamedTuple):
    """The requested format of each part.

    `own`; a format to which weights are converted; or a compute dtype, to which weights stored in
    another form are unpacked.
    """

    experts: str
    dense: str

    @classmethod
    def of(cls, all_parts: str | None, experts: str | None, dense: str | None) -> FormatRequest:
        """Combine the options `format`, `expert_dtype` and `dense_dtype`. Raise UsageError."""
        whole = _checked("format", all_parts or OWN_FORMAT, (OWN_FORMAT, *QUANTISED, AUTO_FORMAT))
        if whole == AUTO_FORMAT:
            if experts or dense:
                raise UsageError(
                    "`format` 'auto' chooses for all parts; leave `expert_dtype` and `dense_dtype` "
                    f"out, or name the format: {', '.join(QUANTISED)}."
                )
            whole = OWN_FORMAT
        known = (OWN_FORMAT, *QUANTISED, *SAFETENSORS_NAME)
        return cls(
            _checked("expert_dtype", experts or whole, known),
            _checked("dense_dtype", dense or whole, known),
        )

    def check(self, dtype: str, device: str) -> None:
        """Raise UnsupportedError for formats that cannot be used in products.

        These are a plain type other than `dtype`, and quantised dense weights on a GPU.
        """
        for option, asked in (("expert_dtype", self.experts), ("dense_dtype", self.dense)):
            if asked in SAFETENSORS_NAME and asked != dtype:
                raise UnsupportedError(
                    f"`{option}` {asked!r} is not supported: weights are kept as they are stored "
                    f"where they can be multiplied with, in {', '.join(QUANTISED)}, or in "
                    f"{dtype!r}, in which this model computes."
                )
        if device == "cuda" and self.dense in QUANTISED:
            raise UnsupportedError(
                f"Dense weights in {self.dense} have no kernels on a GPU yet, only experts have: "
                'choose `expert_dtype` alone, or `device="cpu"`.'
            )


def check_packed(all_parts: str | None, experts: str | None, dense: str | None) -> None:
    """Raise UsageError unless these options name q8 or q4 for a part, which is all that packs."""
    if all_parts not in (None, OWN_FORMAT):
        check_is_named(all_parts)
        _checked("format", str(all_parts), QUANTISED)
    if not {*FormatRequest.of(all_parts, experts, dense)} & {*QUANTISED}:
        raise UsageError(f"There is nothing to pack: give `format` {' or '.join(QUANTISED)}.")


def expert_formats(
    asked: FormatRequest, weight_map: WeightMap, has_gpu: bool
) -> list[tuple[MatrixFormat | None, ...]]:
    """Return the formats of an expert's parts, by layer; see `SlotLayout.of`.

    Raises UnsupportedError for weights that cannot be converted to the requested format.
    """
    table = weight_map.experts
    if asked.experts == OWN_FORMAT:
        return table.kept(has_gpu)
    if asked.experts not in QUANTISED:
        return []
    chosen = formats()[asked.experts]
    _check_stored(asked.experts, table.formats, "experts")
    if table.targets is not None:
        raise UnsupportedError(
            f"Experts in {asked.experts}: this model's matrices are not stored row by row, each by "
            "itself; choose `dense_dtype` for all else."
        )
    return [(chosen,) * 3] * len(table.layers)


def dense_formats(
    asked: FormatRequest, schema: ModelSchema, weight_map: WeightMap, has_gpu: bool
) -> dict[str, MatrixFormat]:
    """Return, by name, the formats of dense weights that are not in their type's own format.

    Raises UnsupportedError as `expert_formats` does.
    """
    kept = {}
    ends = {f"{name}.weight" for name in (schema.names.embedding, schema.names.head)}
    for spec in schema.dense:
        stored = format_of(weight_map.dense[spec.name].dtype)
        if asked.dense in QUANTISED and _is_matrix(spec):
            name = _OF_HEAD.get(asked.dense, asked.dense) if spec.name in ends else asked.dense
            _check_stored(name, [stored], spec.name)
            if weight_map.dense[spec.name].parts:
                raise UnsupportedError(
                    f"{spec.name} in {name}: its parts lie in other tensors of this file; choose "
                    "`expert_dtype` alone."
                )
            kept[spec.name] = formats()[name].for_rows(spec.shape[-1])
        elif asked.dense == OWN_FORMAT and _is_matrix(spec):
            is_unpacked = has_gpu or weight_map.dense[spec.name].parts
            as_kept = stored.for_rows(spec.shape[-1]).kept
            if as_kept is not None and not is_unpacked:
                kept[spec.name] = as_kept
    return kept


def rounds(asked: FormatRequest, dense: Mapping[str, MatrixFormat], weight_map: WeightMap) -> bool:
    """Return True if weights are rounded when they are read. dense: from `dense_formats`."""
    is_changed = any(weight_map.dense[name].dtype != each.name for name, each in dense.items())
    if asked.dense in QUANTISED and is_changed:
        return True
    stored = {each.name for each in weight_map.experts.formats}
    return asked.experts in QUANTISED and bool(stored - {asked.experts})


def describe(
    config: ModelConfig,
    schema: ModelSchema,
    experts: Iterable[tuple[MatrixFormat | None, ...]],
    dense: dict[str, MatrixFormat],
) -> WeightFormats:
    """Return the formats in force, part by part, from the two functions above."""
    head = schema.names.embedding if config.tie_word_embeddings else schema.names.head
    ends = {f"{name}.weight" for name in (schema.names.embedding, schema.names.head)}
    of_head = {each.name for name, each in dense.items() if name == f"{head}.weight"}
    return WeightFormats(
        experts=_joined(
            {own.name for parts in experts for each in parts if each for own in each.variants}
        ),
        dense=_joined({each.name for name, each in dense.items() if name not in ends}),
        head=_joined(of_head),
    )


ROUNDED_BY_DEFAULT = frozenset(
    ("Q4_0", "Q4_1", "Q4_K", "Q3_K", "Q2_K", "MXFP4", "IQ4_NL", "IQ4_XS")
    + ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")
)
"""GGML's types for which rounding rows adds almost nothing to the type's own rounding error."""


def stored_formats(weight_map: WeightMap) -> set[MatrixFormat]:
    """Return the formats of all matrices in the files."""
    return {
        format_of(each.dtype) for each in weight_map.dense.values()
    } | weight_map.experts.formats


def rounded_formats(
    activations: str, stored: Iterable[MatrixFormat], dtype: str, device: str
) -> frozenset[str]:
    """Return the names of the formats whose products round rows to int8.

    stored: formats in the files. device: `cpu`, `cuda` or `emulated`. With `auto` they are the GGUF
    types rounded by default where the host computes in bfloat16, as in llama.cpp.
    """
    if activations == INT8_ROWS:
        return ROUNDABLE
    if activations == OWN_FORMAT or device == "cuda" or dtype != "bfloat16":
        return frozenset()
    of_file = {each.name for each in stored if isinstance(each, ggml.GgmlFormat)}
    return ROUNDED_BY_DEFAULT & of_file


def describe_activations(asked: str, parts: WeightFormats, rounded: frozenset[str]) -> str:
    """Describe the activations in force, for weights in these formats."""
    found = parts.names.intersection(_PACKED)
    if asked != AUTO_FORMAT or not found:
        return OWN_FORMAT if asked == AUTO_FORMAT else asked
    names = sorted(found & rounded)
    if not names:
        return f"{AUTO_FORMAT} ({OWN_FORMAT})"
    return f"{AUTO_FORMAT} ({INT8_ROWS}{f' with {_joined({*names})}' * (len(names) < len(found))})"


def check_rounded_rows(formats: WeightFormats, device: str) -> None:
    """Raise UnsupportedError where rows cannot be rounded to int8.

    That is on a GPU, and where no format is multiplied with int8 rows.
    """
    if device == "cuda":
        raise UnsupportedError(
            "`activations` 'int8' has no kernels on a GPU; choose "
            '`device="cpu"`, or leave it out.'
        )
    if formats.names.isdisjoint(ROUNDABLE):
        raise UnsupportedError(
            "`activations` 'int8' is about products with weights in "
            f"{', '.join(QUANTISED)} or a packed type of GGUF files, and here are "
            f"{formats.names_of_parts}; choose `format` {' or '.join(QUANTISED)}, or leave it out."
        )


def _checked(option: str, given: str, known: tuple[str, ...]) -> str:
    name = _OTHER_NAMES.get(given, given)
    if name not in known:
        raise UsageError(f"`{option}` {given!r} is not known; choose {', '.join(known)}.")
    return name


def _check_stored(asked: str, stored: Iterable[MatrixFormat], what: str) -> None:
    for each in stored:
        if each.name != asked and each.unpacked != each.name:
            raise UnsupportedError(
                f"{what} cannot be made into {asked}: stored in {each.name}, which is rounded "
                'already. Choose `format="own"`, or the model that this one was made of.'
            )


def _is_matrix(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and not spec.keeps_type


def _joined(names: set[str]) -> str:
    return ", ".join(sorted(names)) or OWN_FORMAT
