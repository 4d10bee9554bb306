"""Makes checkpoints with random weights: `synth`.

The folder is in a family's exact Hugging Face format (names, shapes, element types, shards,
index, tokenizer), so that everything can be tried and measured without a download. The words
such a model writes mean nothing; its routing and its confidence are made to look like a trained
model's (see `Character`). Imports no torch: numpy draws a few million normals once, and tensors
are stretches of them, which writes as fast as the disk takes it and in bounded memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide import dtypes
from lowtide.config import ModelConfig
from lowtide.dtypes import PACKED_DTYPE
from lowtide.errors import StorageError, UsageError
from lowtide.lab.safetensors_writer import (
    OpenFile,
    OutputTensor,
    SafetensorsWriter,
    check_disk_space,
    open_for_writing,
    partial_path,
    write_text_file,
)
from lowtide.lab.synth_sizes import (
    FAMILIES,
    SIZES,
    Character,
    SynthSize,
    llada2_config,
)
from lowtide.lab.synth_tokenizer import tokenizer_config_json, tokenizer_json
from lowtide.schemas import TensorSpec, model_schema

__all__ = [
    "FAMILIES",
    "SIZES",
    "Character",
    "Noise",
    "SynthSize",
    "SynthTensor",
    "llada2_config",
    "plan_shards",
    "synth",
    "tensors_of",
    "to_bfloat16",
    "zipf_bias",
]

Progress = Callable[[int, int], None]
"""Called with the bytes of weights written so far and of all of them."""

Bits = NDArray[np.uint16]
"""Elements of type bfloat16, as bits."""


def synth(
    family: str,
    size: str,
    out: Path,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    open_file: OpenFile = open_for_writing,
) -> Path:
    """Writes a checkpoint with random weights into the folder `out`, which it returns.

    Equal arguments give equal bytes. `config.json` is written last, and on any failure, Ctrl-C
    too, every file and folder made here is removed: a folder with `config.json` is whole.

    family, size: see `SIZES`. seed: 0 or more. open_file: how files are made.
    Raises UsageError for an unknown family or size and for a folder that holds anything already,
    StorageError for a disk that is too small or fails.
    """
    chosen = _choose(family, size)
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to {2**63 - 1}, not {seed}.")
    made = _Made(out, set())
    try:
        _prepare_folder(out, made)
        _write_checkpoint(made, chosen, seed, progress or _no_progress, open_file)
    except BaseException:
        made.remove()
        raise
    return out


class Normal(NamedTuple):
    """Independent normal elements; rows from `zero_from_row` on are zero."""

    std: float
    zero_from_row: int | None = None


class Constant(NamedTuple):
    value: float


class SkewedBias(NamedTuple):
    """The selection bias of a router, see `Character.expert_bias`."""

    depth: float


class SkewedRows(NamedTuple):
    """A router's normal rows, some larger than others, see `Character.router_skew`."""

    std: float
    skew: float


class PackedBlocks(NamedTuple):
    """Any bytes: MXFP4 weights of the standard deviation `_FP4_STD`, times their scales."""


class PackedScales(NamedTuple):
    """The scale that gives uniform MXFP4 weights the power of two nearest to this deviation."""

    std: float

    @property
    def byte(self) -> int:
        return 127 + round(math.log2(self.std / _FP4_STD))


_FP4_STD = math.sqrt(8.5625)  # the mean square of 0, 0.5, 1, 1.5, 2, 3, 4 and 6

Fill = Normal | Constant | SkewedBias | SkewedRows | PackedBlocks | PackedScales


class SynthTensor(NamedTuple):
    """One tensor and what it is filled with. All are bfloat16, but packed ones."""

    name: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def output(self) -> OutputTensor:
        is_packed = isinstance(self.fill, PackedBlocks | PackedScales)
        return OutputTensor(self.name, PACKED_DTYPE if is_packed else "BF16", self.shape)


def tensors_of(size: SynthSize) -> Iterator[SynthTensor]:
    """Every tensor of the model, in the order of its layers, and what it is filled with."""
    config = ModelConfig.from_dict(size.config)
    schema = model_schema(config)
    experts = [spec for layer in schema.moe_layers for spec in schema.expert_specs(layer)]
    # A stable sort: what the schema says of one layer keeps its order, experts last.
    for spec in sorted((*schema.dense, *experts), key=lambda spec: _layer_order(spec.name)):
        yield SynthTensor(spec.name, spec.shape, _fill(spec, size, config))


def _layer_order(name: str) -> float:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None:
        return -1 if name.startswith(("model.word_emb", "model.embed")) else math.inf
    return int(layer[1])


def _fill(spec: TensorSpec, size: SynthSize, config: ModelConfig) -> Fill:
    """What a tensor holds.

    A standard deviation is one over the root of the input width, so that sizes stay near one
    from layer to layer. The rows of the output head for the special tokens are zero: a text
    never ends by chance, and the mask is never the likeliest token.
    """
    character = size.character
    part = spec.name.removesuffix(".weight").rpartition(".")[2]
    if part in ("query_layernorm", "key_layernorm", "q_norm", "k_norm"):
        return Constant(character.qk_gain)
    if part == "expert_bias":
        return SkewedBias(character.expert_bias)
    if part == "bias" or part.endswith("_bias"):
        return Normal(0.1)
    if part == "sinks":
        return Normal(1.0)
    if len(spec.shape) == 1:  # the other norms
        return Constant(1.0)
    if spec.dtype == PACKED_DTYPE:
        return _packed_fill(part, size, config)
    if part in ("word_embeddings", "embed_tokens"):
        return Normal(1.0)
    num_rows, width = spec.shape
    if part == "lm_head":
        std = character.logit_std * math.sqrt(2 * math.log(num_rows))
        return Normal(std / math.sqrt(width), zero_from_row=size.eos_token_id)
    if part in ("gate", "router"):
        std = character.router_std / math.sqrt(width)
        return Normal(std) if config.has_expert_bias else SkewedRows(std, character.router_skew)
    if part in ("dense", "o_proj", "down_proj", "w2"):
        # Two additions to the residual stream per layer, independent: their variances add up.
        return Normal(_residual_std(character, config) / math.sqrt(width))
    if part in ("q_proj", "q_b_proj") and not config.has_qk_norm:
        # Where no norms do it, queries alone make attention pick fewer positions.
        return Normal(character.qk_gain**2 / math.sqrt(width))
    return Normal(1 / math.sqrt(width))


def _packed_fill(part: str, size: SynthSize, config: ModelConfig) -> Fill:
    if part.endswith("_blocks"):
        return PackedBlocks()
    if part.startswith("down"):
        std = _residual_std(size.character, config)
        return PackedScales(std / math.sqrt(config.expert_intermediate_size))
    return PackedScales(1 / math.sqrt(config.hidden_size))


def _residual_std(character: Character, config: ModelConfig) -> float:
    """Of one addition to the residual stream, for inputs of unit size."""
    return character.residual_gain / math.sqrt(2 * config.num_layers)


class Noise:
    """Normal elements in bfloat16, of any standard deviation, drawn from one pool.

    A tensor is a stretch of the pool, which begins again at its end. Every stretch begins
    elsewhere, and the pool's length is odd, so no two tensors and no two rows of a tensor whose
    width is even are equal.
    """

    _MAX_ELEMENTS = 1 << 22
    _MIN_ELEMENTS = 1 << 17

    def __init__(self, seed: int, num_elements: int) -> None:
        """num_elements: of all tensors together; a small checkpoint needs no large pool."""
        length = min(max(num_elements // 8, self._MIN_ELEMENTS), self._MAX_ELEMENTS) | 1
        self._pool = np.random.default_rng([seed, 0]).standard_normal(length, np.float32)
        self._scaled: dict[float, Bits] = {}  # one per standard deviation; a model has about ten
        self._stride = _coprime_stride(length)
        self._num_stretches = 0

    def stretch(self, num_elements: int, std: float) -> Iterator[Bits]:
        """Views of the pool that together have this many elements."""
        if std not in self._scaled:
            self._scaled[std] = to_bfloat16(self._pool * np.float32(std))
        for part in self._parts(num_elements):
            yield self._scaled[std][part]

    def row(self, num_elements: int, std: float) -> Bits:
        """A stretch in one piece, whose standard deviation is not met again."""
        parts = [self._pool[part] for part in self._parts(num_elements)]
        return to_bfloat16(np.concatenate(parts) * np.float32(std))

    def _parts(self, num_elements: int) -> Iterator[slice]:
        """Where in the pool the next stretch of this many elements lies."""
        length = len(self._pool)
        self._num_stretches += 1
        start = self._num_stretches * self._stride % length
        while num_elements:
            stop = min(start + num_elements, length)
            yield slice(start, stop)
            num_elements -= stop - start
            start = 0


def to_bfloat16(values: NDArray[np.float32]) -> Bits:
    """The nearest bfloat16 numbers, as bits."""
    bits = np.empty(values.size, np.uint16)
    source = np.ascontiguousarray(values, np.float32).reshape(-1)
    dtypes.convert(source.view(np.uint8), "F32", bits.view(np.uint8), "BF16")
    return bits


def zipf_bias(num_experts: int, depth: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """One layer's selection biases: 0 for the first expert of a random order, down to -depth."""
    ranks = rng.permutation(num_experts) + 1
    bias = -depth * np.log(ranks) / math.log(max(num_experts, 2))
    return bias.astype(np.float32)


def rank_stds(
    num_experts: int, std: float, skew: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The spread of each expert's router logits: `std * (1 + skew)` for the first of a random
    order, down to `std * (1 - skew)`."""
    ranks = rng.permutation(num_experts) + 1
    return std * (1 + skew * (1 - 2 * np.log(ranks) / math.log(max(num_experts, 2))))


def plan_shards(tensors: list[SynthTensor], max_shard_bytes: int) -> list[list[SynthTensor]]:
    """Tensors as published files have them: filled in layer order, sorted by name within a file.

    So an expert's matrices lie in the order down, gate, up, except where a file ended between.
    """
    shards: list[list[SynthTensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        num_bytes = tensor.output.num_bytes
        if shards[-1] and size_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += num_bytes
    return [sorted(shard) for shard in shards]


@dataclass
class _Made:
    """What this run made, to be taken away again if it fails."""

    out: Path
    files: set[Path]
    folders: tuple[Path, ...] = ()  # innermost first

    def remove(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)
            partial_path(file).unlink(missing_ok=True)
        for folder in self.folders:
            try:
                folder.rmdir()
            except OSError:  # never made, or somebody put a file there meanwhile
                return


def _write_checkpoint(
    made: _Made, size: SynthSize, seed: int, progress: Progress, open_file: OpenFile
) -> None:
    out = made.out
    tensors = list(tensors_of(size))
    shards = plan_shards(tensors, size.max_shard_bytes)
    names = [_shard_name(i, len(shards)) for i in range(len(shards))]
    total_bytes = sum(t.output.num_bytes for t in tensors)
    texts = _texts(size, shards, names, total_bytes)
    check_disk_space(out, total_bytes + sum(len(t) for t in texts.values()))
    source = _Source(seed, sum(math.prod(t.shape) for t in tensors))
    made.files |= {out / name for name in (*names, *texts)}

    done_bytes = 0
    for name, shard in zip(names, shards, strict=True):
        outputs = [t.output for t in shard]
        with SafetensorsWriter(
            out / name, outputs, metadata={"format": "pt"}, open_file=open_file
        ) as writer:
            for tensor in shard:
                for bits in source.elements(tensor):
                    writer.write(bits.data)
                done_bytes += tensor.output.num_bytes
                progress(done_bytes, total_bytes)
    for name, text in texts.items():
        write_text_file(out / name, text, open_file=open_file)


class _Source:
    """The elements of one checkpoint's tensors, in the order they are asked for."""

    _MAX_BYTES = 1 << 22  # of packed weights at a time

    def __init__(self, seed: int, num_elements: int) -> None:
        self._noise = Noise(seed, num_elements)
        self._rng = np.random.default_rng([seed, 1])

    def elements(self, tensor: SynthTensor) -> Iterator[Bits | NDArray[np.uint8]]:
        fill, num_elements = tensor.fill, math.prod(tensor.shape)
        if isinstance(fill, PackedBlocks):
            for start in range(0, num_elements, self._MAX_BYTES):
                num_bytes = min(self._MAX_BYTES, num_elements - start)
                yield self._rng.integers(0, 256, num_bytes, np.uint8)
        elif isinstance(fill, PackedScales):
            yield np.full(num_elements, fill.byte, np.uint8)
        elif isinstance(fill, Constant):
            yield to_bfloat16(np.full(num_elements, fill.value, np.float32))
        elif isinstance(fill, SkewedBias):
            yield to_bfloat16(zipf_bias(num_elements, fill.depth, self._rng))
        elif isinstance(fill, SkewedRows):
            num_experts, width = tensor.shape
            for std in rank_stds(num_experts, fill.std, fill.skew, self._rng).tolist():
                yield self._noise.row(width, std)
        else:
            num_rows = tensor.shape[0]
            num_filled = num_rows if fill.zero_from_row is None else fill.zero_from_row
            row_size = num_elements // num_rows
            yield from self._noise.stretch(num_filled * row_size, fill.std)
            if num_filled < num_rows:
                yield np.zeros((num_rows - num_filled) * row_size, np.uint16)


def _texts(
    size: SynthSize, shards: list[list[SynthTensor]], names: list[str], total_bytes: int
) -> dict[str, str]:
    """The folder's text files in the order they are written: `config.json` says it is whole."""
    weight_map = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    texts = {
        "tokenizer.json": tokenizer_json(size.eos_token_id),
        "tokenizer_config.json": tokenizer_config_json(),
        "model.safetensors.index.json": json.dumps(index, indent=2, sort_keys=True),
        "config.json": json.dumps(size.config, indent=2, sort_keys=True),
    }
    if len(shards) == 1:  # one file is `model.safetensors`, and nothing needs an index
        del texts["model.safetensors.index.json"]
    return texts


def _shard_name(index: int, num_shards: int) -> str:
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{index + 1:05}-of-{num_shards:05}.safetensors"


def _choose(family: str, size: str) -> SynthSize:
    if family not in FAMILIES:
        raise UsageError(f"There is no family {family!r} to make; choose {', '.join(FAMILIES)}.")
    sizes = FAMILIES[family]
    if size not in sizes:
        raise UsageError(f"{family} has no size {size!r}; choose {', '.join(sizes)}.")
    return sizes[size]


def _prepare_folder(out: Path, made: _Made) -> None:
    """Makes the folder, or checks that an existing one holds at most an earlier run's leavings."""
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    made.folders = tuple(missing)
    try:
        out.mkdir(parents=True, exist_ok=True)
        present = sorted(out.iterdir())
    except OSError as error:
        raise StorageError(
            f"The folder {out} cannot be made: {error.strerror or error}; choose another."
        ) from error
    leavings = [path for path in present if _is_leaving(path)]
    if len(leavings) < len(present):
        other = next(path for path in present if path not in leavings)
        raise UsageError(
            f"{out} is not empty (it holds {len(present)} files, {other.name} among them); "
            "choose a new folder, or empty this one first."
        )
    for path in leavings:
        path.unlink(missing_ok=True)


def _is_leaving(path: Path) -> bool:
    """Whether this is a file that an earlier run was killed over while writing it."""
    name = path.name.removesuffix(".partial")
    is_ours = name.startswith("model") or name in ("config.json", *_TOKENIZER_FILES)
    return name != path.name and is_ours and path.is_file() and not path.is_symlink()


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def _coprime_stride(length: int) -> int:
    """A step that visits every element of a ring, far from where it has just been."""
    stride = int(length * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    pass
