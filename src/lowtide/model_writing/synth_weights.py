"""Random weights that resemble trained ones: the distribution and elements of each tensor.

Imports no torch. numpy draws a few million normals once, and tensors are stretches of them, so
writing is as fast as the disk and uses bounded memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.config import AttentionSpec, ModelConfig
from lowtide.families import SynthSize, read_config
from lowtide.formats import fp8, mxfp4
from lowtide.formats.plain import convert_plain
from lowtide.model_writing.safetensors_writer import OutputTensor
from lowtide.schemas import ModelSchema, TensorSpec, model_schema
from lowtide.schemas.names import Names

Bits = NDArray[np.uint16]
"""Elements of type bfloat16, as bits."""


@dataclass(frozen=True)
class Character:
    """Parameters that make random weights behave somewhat like trained ones.

    expert_bias: depth of the routing's skew. In every layer the experts get a random order, and
        rank r gets the selection bias `-expert_bias * log(r) / log(N)`: equal steps for every
        doubling of the rank, as in Zipf's law. So a few experts get most tokens, a long tail few.
    router_std: spread of the router's logits over experts.
    qk_gain: weight of the query and key norms. Above 1 attention picks fewer positions, which keeps
        the masked positions of a block, all of one embedding, from becoming alike.
    residual_gain: size of all layers' additions to the embedding's unit size.
    logit_std: spread of the output logits, in units of `sqrt(2 ln V)`. From about 1 on the
        likeliest of V tokens stands out, and its probability is spread widely between 0 and 1.
    router_skew: for routers without a selection bias. The logits of the expert of rank r have the
        spread `router_std * (1 + router_skew * (1 - 2 log(r) / log(N)))`, so first ranks are among
        the highest more often. Computed for independent logits: of 64 experts, top-8, the busiest
        tenth takes a quarter of the tokens, of 128 a third, and the last one hardly any.

    It is synthetic, and not any trained model's routing. Measured in float32 on `llada2 small`,
    seed 0, one block of 32 after a prompt of 64 tokens: 72 to 107 of 256 experts per layer are hit
    in the first step (all masked) and 108 to 124 in the last; the busiest tenth of the experts
    takes half of the tokens; about 70% of a layer's experts are hit again in the next step;
    threshold 0.95 commits 4 tokens per step (2 to 9 while many are masked).
    """

    expert_bias: float = 0.33
    router_std: float = 1.1
    router_skew: float = 0.75
    qk_gain: float = 3.0
    residual_gain: float = 7.5
    logit_std: float = 2.5


CHARACTER = Character()

_FP4_STD = math.sqrt(8.5625)  # the mean square of 0, 0.5, 1, 1.5, 2, 3, 4 and 6
_FP8_STD = 32.0  # the largest FP8 number is 14 times that

_QK_NORMS = ("query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm", "q_norm", "k_norm")

Shape = tuple[int, ...]

Fill = Callable[["Source", Shape], Iterator[Bits | NDArray[np.uint8]]]
"""Method of `Source` that yields the elements of a tensor of this shape."""


class SynthTensor(NamedTuple):
    """A tensor and its fill. All are bfloat16, except packed and rounded ones."""

    name: str
    shape: Shape
    fill: Fill
    dtype: str = "BF16"

    @property
    def output(self) -> OutputTensor:
        return OutputTensor(self.name, self.dtype, self.shape)


def tensors_of(size: SynthSize) -> Iterator[SynthTensor]:
    """Yield every tensor of the model, in the order of its layers, with its fill."""
    config = read_config(size.config)
    schema = model_schema(config)
    experts = [spec for layer in schema.moe_layers for spec in schema.expert_specs(layer)]
    # A stable sort: what the schema says of one layer keeps its order, experts last.
    for spec in sorted((*schema.dense, *experts), key=lambda spec: _layer_order(spec, schema)):
        if _is_rounded(spec, config, schema.names):
            yield from _rounded(spec, _std(spec, config, schema.names))
            continue
        dtype = mxfp4.TENSOR_DTYPE if spec.dtype == mxfp4.TENSOR_DTYPE else "BF16"
        fill = _fill(spec, size, config, schema.names)
        yield SynthTensor(spec.name, spec.shape, fill, dtype)


def _layer_order(spec: TensorSpec, schema: ModelSchema) -> float:
    layer = re.match(rf"{re.escape(schema.names.layers)}\.(\d+)\.", spec.name)
    if layer is None:
        return -1 if spec == schema.dense[0] else math.inf  # the embedding
    return int(layer[1])


def _fill(spec: TensorSpec, size: SynthSize, config: ModelConfig, names: Names) -> Fill:
    """Return a tensor's fill.

    The output head's rows of special tokens are zero: a text never ends by chance, and the mask is
    never the likeliest token. An embedding that is the head is filled as one: norms
    forgive its size.
    """
    name = spec.name.removesuffix(".weight")
    part = name.rpartition(".")[2]
    centre = 1.0 if spec.is_centred else 0.0
    if (fill := _named_fill(part, centre)) is not None:
        return fill
    if len(spec.shape) == 1:  # the other norms
        return partial(Source.constant, value=1.0 - centre)
    if spec.dtype == mxfp4.TENSOR_DTYPE:
        return _packed_fill(part, config)
    is_tied = config.tie_word_embeddings
    if name == names.embedding and not is_tied:
        return partial(Source.normal, std=1.0)
    num_rows, *_, width = spec.shape
    if name == (names.embedding if is_tied else names.head):
        std = CHARACTER.logit_std * math.sqrt(2 * math.log(num_rows))
        std /= math.sqrt(width)
        return partial(Source.normal, std=std, zero_from_row=size.eos_token_id)
    if part in ("gate", "router"):
        std = CHARACTER.router_std / math.sqrt(width)
        if not config.moe.has_bias:
            return partial(Source.router_rows, std=std)
        return partial(Source.normal, std=std)
    return partial(Source.normal, std=_std(spec, config, names))


def _std(spec: TensorSpec, config: ModelConfig, names: Names) -> float:
    """Return the standard deviation of a matrix's elements.

    It is one over the root of the input width, so that sizes stay near one from layer to layer.
    """
    name, width = spec.name.removesuffix(".weight"), spec.shape[-1]
    part = name.rpartition(".")[2]
    if part in ("dense", "o_proj", "out_proj", "down_proj", "w2") or name.endswith(
        (f".{names.output}", f".{names.mlp[2]}")
    ):
        # Two additions to the residual stream per layer, independent: their variances add up.
        return _residual_std(config) / math.sqrt(width)
    if part in ("q_proj", "q_b_proj") and not _has_qk_norm(config):
        # Where no norms do it, queries alone make attention pick fewer positions.
        return CHARACTER.qk_gain**2 / math.sqrt(width)
    return 1 / math.sqrt(width)


def _is_rounded(spec: TensorSpec, config: ModelConfig, names: Names) -> bool:
    """Return True for a matrix that models in FP8 by blocks are published with in FP8."""
    name = spec.name.removesuffix(".weight")
    is_of_fp8 = config.quantisation is not None and config.quantisation.method == "fp8"
    kept = name in (names.embedding, names.head) or name.endswith((".gate", ".router"))
    return is_of_fp8 and len(spec.shape) == 2 and not kept


def _rounded(spec: TensorSpec, std: float) -> Iterator[SynthTensor]:
    """Yield the tensors of a matrix in FP8 by blocks."""
    numbers, scales = fp8.FORMATS["F32"].tensors(spec.shape)
    name = spec.name.removesuffix(".weight")
    yield SynthTensor(name + numbers.ending, numbers.shape, Source.fp8_numbers, numbers.dtype)
    fill = partial(Source.fp8_scales, std=std)
    yield SynthTensor(name + scales.ending, scales.shape, fill, scales.dtype)


def _named_fill(part: str, centre: float) -> Fill | None:
    """Return the fill of a tensor that is determined by its name alone, or None.

    centre: what files take from the weight of a norm.
    """
    if part in _QK_NORMS:
        return partial(Source.constant, value=CHARACTER.qk_gain - centre)
    if part in ("expert_bias", "e_score_correction_bias"):
        return Source.router_bias
    if part == "bias" or part.endswith("_bias"):
        return partial(Source.normal, std=0.1)
    return partial(Source.normal, std=1.0) if part in ("sinks", "A_log") else None


def _packed_fill(part: str, config: ModelConfig) -> Fill:
    if part.endswith("_blocks"):
        return Source.packed_blocks
    if part.startswith("down"):
        std = _residual_std(config)
        return partial(Source.packed_scales, std=std / math.sqrt(config.moe.expert_size))
    return partial(Source.packed_scales, std=1 / math.sqrt(config.hidden_size))


def _has_qk_norm(config: ModelConfig) -> bool:
    mixers = (layer.mixer for layer in config.kinds)
    return any(isinstance(mixer, AttentionSpec) and mixer.has_qk_norm for mixer in mixers)


def _residual_std(config: ModelConfig) -> float:
    """Return the standard deviation of one addition to the residual stream, for unit inputs."""
    return CHARACTER.residual_gain / math.sqrt(2 * config.num_layers)


class Noise:
    """Normal elements in bfloat16, of any standard deviation, drawn from one pool.

    A tensor is a stretch of the pool, which repeats from its start. Every stretch begins elsewhere,
    and the pool's length is odd, so no two tensors, and no two rows of a tensor of even width, are
    equal.
    """

    _MAX_ELEMENTS = 1 << 22
    _MIN_ELEMENTS = 1 << 17

    def __init__(self, seed: int, num_elements: int) -> None:
        """num_elements: of all tensors together; a small checkpoint needs no large pool."""
        length = min(max(num_elements // 8, self._MIN_ELEMENTS), self._MAX_ELEMENTS) | 1
        self._pool = np.random.default_rng([seed, 0]).standard_normal(length, np.float32)
        self._scaled: dict[float, Bits] = {}  # one per standard deviation; a model has about ten
        self._rounded: NDArray[np.uint8] | None = None
        self._stride = _coprime_stride(length)
        self._num_stretches = 0

    def stretch(self, num_elements: int, std: float) -> Iterator[Bits]:
        """Yield views of the pool with `num_elements` elements together."""
        if std not in self._scaled:
            self._scaled[std] = to_bfloat16(self._pool * np.float32(std))
        for part in self._parts(num_elements):
            yield self._scaled[std][part]

    def rounded(self, num_elements: int) -> Iterator[NDArray[np.uint8]]:
        """Yield stretches in FP8, of the standard deviation `_FP8_STD`."""
        if self._rounded is None:
            self._rounded = fp8.nearest(self._pool * np.float32(_FP8_STD))
        for part in self._parts(num_elements):
            yield self._rounded[part]

    def row(self, num_elements: int, std: float) -> Bits:
        """Return a contiguous stretch, whose standard deviation is used only once."""
        parts = [self._pool[part] for part in self._parts(num_elements)]
        return to_bfloat16(np.concatenate(parts) * np.float32(std))

    def _parts(self, num_elements: int) -> Iterator[slice]:
        """Yield slices of the pool that together have the next `num_elements` random numbers."""
        length = len(self._pool)
        self._num_stretches += 1
        start = self._num_stretches * self._stride % length
        while num_elements:
            stop = min(start + num_elements, length)
            yield slice(start, stop)
            num_elements -= stop - start
            start = 0


def to_bfloat16(values: NDArray[np.float32]) -> Bits:
    """Round to the nearest bfloat16 numbers, as bits."""
    bits = np.empty(values.size, np.uint16)
    source = np.ascontiguousarray(values, np.float32).reshape(-1)
    convert_plain(source.view(np.uint8), "F32", bits.view(np.uint8), "BF16")
    return bits


def zipf_bias(num_experts: int, depth: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return one layer's selection biases, from 0 down to -depth in a random order of experts."""
    ranks = rng.permutation(num_experts) + 1
    bias = -depth * np.log(ranks) / math.log(max(num_experts, 2))
    return bias.astype(np.float32)


def rank_stds(
    num_experts: int, std: float, skew: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw the spread of each expert's router logits.

    It falls from `std * (1 + skew)` for the first of a random order to `std * (1 - skew)`.
    """
    ranks = rng.permutation(num_experts) + 1
    return std * (1 + skew * (1 - 2 * np.log(ranks) / math.log(max(num_experts, 2))))


class Source:
    """The elements of one checkpoint's tensors, in order and in pieces."""

    _MAX_BYTES = 1 << 22  # of packed weights at a time

    def __init__(self, seed: int, num_elements: int) -> None:
        self._noise = Noise(seed, num_elements)
        self._rng = np.random.default_rng([seed, 1])

    def normal(self, shape: Shape, std: float, zero_from_row: int | None = None) -> Iterator[Bits]:
        """Yield independent normal elements; rows from `zero_from_row` on are zero."""
        num_filled = shape[0] if zero_from_row is None else zero_from_row
        row_size = math.prod(shape[1:])
        yield from self._noise.stretch(num_filled * row_size, std)
        if num_filled < shape[0]:
            yield np.zeros((shape[0] - num_filled) * row_size, np.uint16)

    def constant(self, shape: Shape, value: float) -> Iterator[Bits]:
        yield to_bfloat16(np.full(shape, value, np.float32))

    def router_bias(self, shape: Shape) -> Iterator[Bits]:
        """Yield a router's selection bias; see `Character.expert_bias`."""
        yield to_bfloat16(zipf_bias(shape[0], CHARACTER.expert_bias, self._rng))

    def router_rows(self, shape: Shape, std: float) -> Iterator[Bits]:
        """Yield normal rows, some larger than others; see `Character.router_skew`."""
        for of_row in rank_stds(shape[0], std, CHARACTER.router_skew, self._rng).tolist():
            yield self._noise.row(shape[1], of_row)

    def fp8_numbers(self, shape: Shape) -> Iterator[NDArray[np.uint8]]:
        yield from self._noise.rounded(math.prod(shape))

    def fp8_scales(self, shape: Shape, std: float) -> Iterator[NDArray[np.uint8]]:
        """Yield the scale that gives FP8 numbers this standard deviation."""
        yield np.full(math.prod(shape), std / _FP8_STD, np.float32).view(np.uint8)

    def packed_blocks(self, shape: Shape) -> Iterator[NDArray[np.uint8]]:
        """Yield random bytes: MXFP4 weights of deviation `_FP4_STD`, times their scales."""
        num_bytes = math.prod(shape)
        for start in range(0, num_bytes, self._MAX_BYTES):
            yield self._rng.integers(0, 256, min(self._MAX_BYTES, num_bytes - start), np.uint8)

    def packed_scales(self, shape: Shape, std: float) -> Iterator[NDArray[np.uint8]]:
        """Yield the scale that brings uniform MXFP4 weights closest to this deviation."""
        scale = 127 + round(math.log2(std / _FP4_STD))
        yield np.full(math.prod(shape), scale, np.uint8)


def _coprime_stride(length: int) -> int:
    """Return a step that visits every element of a ring, far from its last positions."""
    stride = int(length * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride
