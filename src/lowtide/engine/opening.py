"""Opening a model: its options and its facts, or a refusal. Nothing of its weights is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lowtide.config import ModelConfig
from lowtide.core import CacheMode, align_up
from lowtide.decode.row_reading import HeadForm
from lowtide.engine import weight_formats
from lowtide.engine.device import (
    check_device,
    check_elastic,
    resolve_device,
)
from lowtide.engine.named_inputs import inputs_to_round_for
from lowtide.engine.option_checks import (
    as_reference,
    check_activations,
    check_integer,
    check_kinds,
    check_not_bidirectional,
    check_without_experts,
)
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.layout import SlotLayout
from lowtide.experts.transfer import largest_read_bytes
from lowtide.families import families, read_config_in
from lowtide.formats import MatrixFormat
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.formats.plain import SAFETENSORS_NAME
from lowtide.kernels.choice import HOST, choose_kernels
from lowtide.kernels.int8_rows import INT8
from lowtide.kernels.operands import ClampedWeights, ExpertWeights
from lowtide.kernels.reference import Kernels
from lowtide.memory.kv_cache import storage_shape
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.workspace import Registrar
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.gguf_file import is_gguf
from lowtide.model_folder.gguf_model import GgufModel
from lowtide.model_folder.hub import has_weights, locate_model, resolve_model
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import take_numbers
from lowtide.plan import OWN_FORMAT, WeightFormats, check_is_named
from lowtide.policies.presets import check_policy, check_safe
from lowtide.reading.by_expert import with_copy
from lowtide.reading.dense_weights import DenseWeights, Progress, no_progress
from lowtide.reading.fingerprint import fingerprint
from lowtide.schemas import WeightMap, assume, bind, model_schema, stored_matrices

MAX_PASS_ROWS = 512
"""Rows of the largest forward pass. Never a function of the budget: how rows are divided into
passes must not depend on it."""


MAX_BLOCK_LENGTH = MAX_PASS_ROWS // 2
"""A block's first step also carries the block before it."""


DEFAULT_CONTEXT = 4096

APPROXIMATE_CACHES = (CacheMode.PREFIX.value, CacheMode.DUAL.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Sizes are bytes, `10GiB`, `80%` (of this machine) or `auto`.

    device: `auto` (a GPU if there is one), `cpu`, `cuda` or `emulated`, with `device_options` for
    the last. host_memory: the budget for weights, KV cache, workspace, read ring and expert slots,
    or with a device for the experts at home; gpu_memory: the device's budget for all but those.
    policy, policy_options: what stays resident (`policies/presets.py`).
    context: tokens that there is room for over all running sequences; by default the model's
    maximum, 4,096 at most. dtype: the compute type, by default the checkpoint's. block_length:
    the block of `logits`. calibration: what `lowtide calibrate` wrote; by default what it wrote
    to its default place for this model, if anything. config_overrides: values that replace
    `config.json`'s. kv_cache: False recomputes everything at every step (a reference); of
    bidirectional models `prefix` and `dual` keep while a block is filled what its first step
    computed of everything before it, or of all but it: faster, and an approximation (Fast-dLLM).
    format: `own` (as stored), `q8` or `q4`, with `expert_dtype` and `dense_dtype` by part: see
    `weight_formats.py`; all but `own` may change answers; or `auto` (`auto_format.py`).
    activations: `own`, or `int8`, to which rows are rounded that are multiplied with weights in q8,
    q4 and GGUF's packed types; see `kernels/int8_rows.py`.
    head_form: for ablations, see `decode.row_reading.HeadForm`.
    elastic: what sequences do not use of the KV cache's memory holds experts, which make room for
    as many sequences at once as there is memory for, none longer than `context` (not on a GPU).
    check_weights: read all weights once and refuse infinities and NaN. unsafe: policies' baselines
    that make answers worse are allowed. progress: called with
    (what, bytes done, bytes in all).
    """

    device: str = "auto"
    device_options: Mapping[str, str] = field(default_factory=dict)
    gpu_memory: str | int = "auto"
    host_memory: str | int = "auto"
    policy: str = "auto"
    policy_options: Mapping[str, str] = field(default_factory=dict)
    context: int | None = None
    format: str | None = None
    expert_dtype: str | None = None
    dense_dtype: str | None = None
    activations: str = OWN_FORMAT
    kernels: str = "auto"
    dtype: str | None = None
    block_length: int | None = None
    calibration: str | None = None
    config_overrides: Mapping[str, object] = field(default_factory=dict)
    offline: bool = False
    seed: int | None = None
    kv_cache: bool | str = True
    head_form: str = HeadForm.FUSED.value
    elastic: bool = False
    check_weights: bool = False
    unsafe: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        take_numbers(self, ("host_memory", "gpu_memory", "context", "block_length", "seed"))
        check_kinds(self)
        check_device(self.device, self.device_options)
        if resolve_device(self.device) == "cpu" and self.gpu_memory not in ("auto", 0, "0"):
            raise UsageError(
                f"gpu_memory {self.gpu_memory!r}: there is no GPU in use; leave it out."
            )
        if not isinstance(self.kv_cache, bool) and self.kv_cache not in APPROXIMATE_CACHES:
            raise UsageError(
                f"kv_cache must be true, false, {' or '.join(APPROXIMATE_CACHES)}, not "
                f"{self.kv_cache!r}."
            )
        if self.head_form not in (form.value for form in HeadForm):
            raise UsageError(f"head_form {self.head_form!r} unknown; choose fused, masked or all.")
        if self.kernels not in ("auto", "reference"):
            raise UnsupportedError(f"Kernels {self.kernels!r} unknown; choose auto or reference.")
        if self.dtype is not None and self.dtype not in SAFETENSORS_NAME:
            raise UnsupportedError(
                f"dtype {self.dtype!r} is not supported; choose one of the names "
                f"{', '.join(SAFETENSORS_NAME)}."
            )
        if self.elastic:
            check_elastic(self.device)
        weight_formats.FormatWishes.of(self.format, self.expert_dtype, self.dense_dtype)
        check_activations(self.activations, self.format)
        check_integer("context", self.context, 1, 2**28)
        check_integer("block_length", self.block_length, 1, MAX_BLOCK_LENGTH)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        check_policy(self.policy, self.policy_options)
        if not self.unsafe:
            check_safe(self.policy, self.policy_options)

    @property
    def formats(self) -> weight_formats.FormatWishes:
        return weight_formats.FormatWishes.of(self.format, self.expert_dtype, self.dense_dtype)


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's facts: nothing of its weights has been read.

    `folder` is where its files are, or would be, or the first GGUF file. `checkpoint` is None for a
    folder that has a `config.json` and no weights, and for a model that is on the hub only: it can
    be planned (`weight_map` says where they would lie), not loaded.
    """

    folder: Path
    options: EngineConfig
    config: ModelConfig
    checkpoint: Checkpoint | None
    weight_map: WeightMap
    tokenizer: Tokenizer | None
    dtype: torch.dtype  # compute type
    context: int
    inputs: ExpertInputs | None = (
        None  # of the calibration named, where experts are rounded as read
    )
    passes: dict[tuple[int, bool, bool], Registrar] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Counted so far, by their rows and what the policy wants: see `registering.register`."""
    planners: dict[tuple[bool, bool], PassPlanner] = field(
        default_factory=dict, repr=False, compare=False
    )
    """By what the policy wants: see `registering.planner_of`."""

    @property
    def dense(self) -> DenseWeights:
        is_float32 = families()[self.config.family].model().is_float32
        dtypes = {
            name: torch.float32 if is_float32(name) else self.dtype
            for name in self.weight_map.dense
        }
        return DenseWeights(self.weight_map.dense, dtypes, self.dense_formats)

    @property
    def dense_formats(self) -> dict[str, MatrixFormat]:
        """The formats, by name, of dense weights in another format than their type's."""
        has_gpu = resolve_device(self.options.device) == "cuda"
        return weight_formats.dense_formats(
            self.options.formats, model_schema(self.config), self.weight_map, has_gpu
        )

    @property
    def formats(self) -> WeightFormats:
        """In memory, by part."""
        experts = [] if self.config.experts is None else self._expert_formats
        parts = weight_formats.describe(
            self.config, model_schema(self.config), experts, self.dense_formats
        )
        is_calibrated = self.inputs is not None
        return replace(parts, activations=self.options.activations, is_calibrated=is_calibrated)

    @property
    def is_rounded_as_read(self) -> bool:
        """Whether weights are made into q8 or q4 as they are read: they are not stored so."""
        return weight_formats.rounds(self.options.formats, self.dense_formats, self.weight_map)

    @property
    def _expert_formats(self) -> list[tuple[MatrixFormat | None, ...]]:
        has_gpu = resolve_device(self.options.device) == "cuda"
        return weight_formats.expert_formats(self.options.formats, self.weight_map, has_gpu)

    @property
    def fingerprint(self) -> str:
        """Identifies the model by its dense weights, with a few hundred short reads. Raises
        StorageError, and UsageError for a folder without weights."""
        if self.checkpoint is None:
            raise UsageError(f"{self.folder} has no weights that could be told from others.")
        return fingerprint(self.checkpoint, self.weight_map.dense)

    @property
    def slot_layout(self) -> SlotLayout:
        weights = ClampedWeights if self.config.moe.is_clamped else ExpertWeights
        return SlotLayout.of(self.config.moe_shape, self.dtype, weights, self._expert_formats)

    @property
    def largest_read_bytes(self) -> int:
        """Bytes of the largest single read of an expert; without experts, of a dense weight."""
        if self.config.experts is None:
            return max(entry.num_bytes for entry in self.weight_map.dense.values())
        return max(largest_read_bytes(self.weight_map.experts), self.dense.largest_row_bytes)

    @property
    def max_pass_rows(self) -> int:
        """Rows of the largest forward pass; a bidirectional one has whole sequences."""
        return self.kv_shape[3] if self.config.is_bidirectional else MAX_PASS_ROWS

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of one sequence in the KV cache: its own bound, or the model's positions."""
        num_tokens = self.kv_shape[3]
        if self.config.is_bidirectional:  # under guidance a range holds a sequence twice
            return num_tokens
        return min(num_tokens, align_up(self.config.max_positions, MAX_BLOCK_LENGTH))

    @property
    def cache_mode(self) -> CacheMode:
        asked = self.options.kv_cache
        return CacheMode(asked) if isinstance(asked, str) else CacheMode.EXACT

    @property
    def kernels(self) -> Kernels:
        """The host's kernels; the first use of compiled ones in a process loads them."""
        return self.kernels_on(HOST)

    def kernels_on(self, device: torch.device) -> Kernels:
        used, rounds_rows = weight_formats.are_used(self.formats), self.rounds_rows
        return choose_kernels(self.options.kernels, self.dtype, device, *used, rounds_rows)

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded to int8 before they are multiplied with weights of few bits."""
        return self.options.activations == INT8

    @property
    def keeps_keys(self) -> bool:
        """Whether keys and values outlast a pass: in exact mode nothing of a bidirectional one is
        kept, and layers take turns in the workspace."""
        return not self.config.is_bidirectional or self.cache_mode is not CacheMode.EXACT

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, arrays, kv_heads, tokens, width] of keys and values; where they are not kept,
        of the layer whose turn it is."""
        config = self.config
        num_layers = config.num_layers if self.keeps_keys else 1
        num_arrays, num_heads, width = config.attention.cache_shape
        num_tokens = align_up(self.context, config.block_length)
        return storage_shape(num_layers, num_heads, width, num_tokens, num_arrays)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are kept from pass to pass."""
        return math.prod(self.kv_shape) * self.dtype.itemsize if self.keeps_keys else 0


def open_model(reference: str | Path, options: EngineConfig) -> OpenModel:
    """Finds a model, fetched if need be, and checks all that can be without reading a weight."""
    check_is_named(options.format)  # before anything is fetched
    path = resolve_model(
        str(as_reference(reference)),
        offline=options.offline,
        overrides=options.config_overrides,
        progress=options.progress or no_progress,
    )
    return _open_path(path, options)


def open_for_plan(reference: str | Path | HubModel, options: EngineConfig) -> OpenModel:
    """As `open_model`; of a model that is on the hub only its config and headers are fetched."""
    check_is_named(options.format)
    found = reference
    if not isinstance(found, HubModel):
        found = locate_model(str(as_reference(found)), offline=options.offline)
    if isinstance(found, Path):
        return _open_path(found, options)
    config = _checked(found.model_config(options.config_overrides), options)
    if found.gguf_files:
        checkpoint = found.gguf.checkpoint(config)
    else:
        checkpoint = stored_matrices(config, found.checkpoint())
    return _opened(found.path, options, config, bind(config, checkpoint))


def _open_path(path: Path, options: EngineConfig) -> OpenModel:
    if is_gguf(path):
        return _open_gguf(GgufModel.open(path), options)
    folder, config = path, _checked(read_config_in(path, options.config_overrides), options)
    checkpoint = None
    if has_weights(folder):
        checkpoint = stored_matrices(config, Checkpoint.open(folder))
    weight_map = assume(config) if checkpoint is None else bind(config, checkpoint)
    return _opened(folder, options, config, weight_map, checkpoint, Tokenizer.load(folder))


def _open_gguf(model: GgufModel, options: EngineConfig) -> OpenModel:
    config = _checked(model.config(options.config_overrides), options)
    checkpoint = model.checkpoint(config)
    checkpoint, weight_map = with_copy(model.path, checkpoint, bind(config, checkpoint))
    return _opened(model.path, options, config, weight_map, checkpoint, model.tokenizer())


def _checked(config: ModelConfig, options: EngineConfig) -> ModelConfig:
    if config.quantisation is not None and resolve_device(options.device) == "cuda":
        raise UnsupportedError(
            f"Weights in {config.quantisation.method} have no kernels on a GPU yet; choose "
            "--device cpu."
        )
    if config.experts is None:
        check_without_experts(config, options)
    if not config.is_bidirectional:
        check_not_bidirectional(config, options)
    return config


def _opened(
    folder: Path,
    options: EngineConfig,
    config: ModelConfig,
    weight_map: WeightMap,
    checkpoint: Checkpoint | None = None,
    tokenizer: Tokenizer | None = None,
) -> OpenModel:
    if tokenizer is not None:
        tokenizer.check_vocabulary(config.vocab_size)
    dtype = options.dtype or config.dtype
    options.formats.check(dtype, resolve_device(options.device))
    opened = OpenModel(
        folder=folder,
        options=options,
        config=config,
        checkpoint=checkpoint,
        weight_map=weight_map,
        tokenizer=tokenizer,
        dtype=getattr(torch, dtype),
        context=_context(config, options),
    )
    if opened.rounds_rows:
        weight_formats.check_rounded_rows(opened.formats, resolve_device(options.device))
    return replace(opened, inputs=inputs_to_round_for(opened))


def _context(config: ModelConfig, options: EngineConfig) -> int:
    """May be more than the model's positions: it is shared by all running sequences."""
    return options.context or min(config.max_positions, DEFAULT_CONTEXT)
