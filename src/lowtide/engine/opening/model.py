"""Opening a model: its options and its facts, or a refusal. Nothing of its weights is read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lowtide.config import ModelConfig
from lowtide.core import CacheMode, Reuse, align_up
from lowtide.engine.opening import weight_formats
from lowtide.engine.opening.config import MAX_BLOCK_LENGTH, MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.device_choice import resolve_device
from lowtide.engine.opening.named_inputs import named_inputs, rounds_experts
from lowtide.engine.opening.option_checks import (
    as_reference,
    check_exact_keys,
    check_without_experts,
)
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.layout import SlotLayout
from lowtide.experts.transfer import largest_read_bytes
from lowtide.families import families, read_config_in
from lowtide.formats import MatrixFormat
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.hardware.machine import Machine
from lowtide.hardware.measure import layer_dense_bytes
from lowtide.hardware.store import CostKey
from lowtide.kernels.choice import HOST, choose_kernels
from lowtide.kernels.operands import ClampedWeights, ExpertWeights
from lowtide.kernels.reference import Kernels
from lowtide.memory.kv_cache import storage_shape
from lowtide.memory.kv_pages import StorageShape
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.workspace import Registrar
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.gguf_file import is_gguf
from lowtide.model_folder.gguf_model import GgufModel
from lowtide.model_folder.hub import has_weights, locate_model, resolve_model
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.plan import INT8_ROWS, WeightFormats, check_is_named
from lowtide.policies.presets import substitutes
from lowtide.reading.by_expert import with_copy
from lowtide.reading.dense_weights import DenseWeights
from lowtide.reading.fingerprint import fingerprint
from lowtide.schemas import WeightMap, assume, bind, model_schema, stored_matrices
from lowtide.threads.cores import Cores, keep_to, look_at
from lowtide.threads.executor import set_cores_per_product

DEFAULT_CONTEXT = 4096


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
    inputs: ExpertInputs | None = None  # of a named calibration, where experts are rounded as read
    passes: dict[tuple[object, ...], Registrar] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Counted so far, by their rows and what the policy wants: see `registering.register`."""
    planners: dict[tuple[bool, bool], PassPlanner] = field(
        default_factory=dict, repr=False, compare=False
    )
    """By what the policy wants: see `registering.planner_of`."""
    weights_searched: list[float | str] = field(default_factory=list, repr=False, compare=False)
    """Their finite share, or what is wrong with one, once looked through: `not_finite`."""

    @property
    def device(self) -> str:
        """`cpu`, `cuda`, or the name of a registered kind."""
        return resolve_device(self.options.device)

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
        has_gpu = self.device == "cuda"
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
        activations = weight_formats.describe_activations(
            self.options.activations, parts, self.rounded
        )
        return replace(parts, activations=activations, is_calibrated=self.inputs is not None)

    @property
    def is_rounded_as_read(self) -> bool:
        """Whether weights are made into q8 or q4 as they are read: they are not stored so."""
        return weight_formats.rounds(self.options.formats, self.dense_formats, self.weight_map)

    @property
    def _expert_formats(self) -> list[tuple[MatrixFormat | None, ...]]:
        has_gpu = self.device == "cuda"
        return weight_formats.expert_formats(self.options.formats, self.weight_map, has_gpu)

    @property
    def _kept_formats(self) -> list[MatrixFormat]:
        """That weights are kept in which are in another format than their type's."""
        experts = [] if self.config.experts is None else self._expert_formats
        of_experts = [each for parts in experts for each in parts if each is not None]
        return [*self.dense_formats.values(), *of_experts]

    @property
    def fingerprint(self) -> str:
        """Identifies the model by its dense weights, with a few hundred short reads. Raises
        StorageError, and UsageError for a folder without weights.
        """
        if self.checkpoint is None:
            raise UsageError(f"{self.folder} has no weights that could be told from others.")
        return fingerprint(self.checkpoint, self.weight_map.dense)

    @property
    def slot_layout(self) -> SlotLayout:
        weights = ClampedWeights if self.config.moe.is_clamped else ExpertWeights
        return SlotLayout.of(self.config.moe_shape, self.dtype, weights, self._expert_formats)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the dense weights of a layer with experts, as costs are measured."""
        last = self.config.moe_layers[-1]
        return layer_dense_bytes(self.weight_map.dense, last, self.dtype.itemsize)

    def cost_key(self, machine: Machine, products: str, folder: Path | None = None) -> CostKey:
        """Under which its experts' costs are stored. products: the host's kernels, by name; folder:
        what experts are read from, if reads are a part of what they cost.
        """
        shape, layout, device = self.config.moe_shape, self.slot_layout, ""
        if self.device != "cpu":
            device = f"{self.device}, {self.options.kernels} kernels"
        return CostKey.of(machine, shape, layout, self.layer_bytes, device, folder, products)

    @property
    def host_scratch_bytes(self) -> int:
        """Bytes of gate and up of a tile's experts, where the host computes beside a device."""
        shape = self.config.moe_shape
        num_pairs = MAX_PASS_ROWS * shape.num_experts_per_token
        return 2 * num_pairs * shape.expert_size * self.dtype.itemsize

    @property
    def largest_read_bytes(self) -> int:
        """Bytes of the largest single read of an expert; without experts, of a dense weight."""
        if self.config.experts is None:
            return max(entry.num_bytes for entry in self.weight_map.dense.values())
        return max(largest_read_bytes(self.weight_map.experts), self.dense.largest_row_bytes)

    @property
    def max_pass_rows(self) -> int:
        """Rows of the largest forward pass; a bidirectional one has whole sequences."""
        return MAX_PASS_ROWS if self.config.decoding.keeps_keys else self.kv_shape.num_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of one sequence in the KV cache: its own bound, or the model's positions."""
        num_tokens = self.kv_shape.num_tokens
        if not self.config.decoding.keeps_keys:  # under guidance a range holds a sequence twice
            return num_tokens
        return min(num_tokens, align_up(self.config.max_positions, MAX_BLOCK_LENGTH))

    @property
    def cache_mode(self) -> CacheMode:
        asked = self.options.kv_cache
        return CacheMode(asked) if isinstance(asked, str) else CacheMode.EXACT

    @property
    def reuse(self) -> Reuse:
        """Nothing is taken over where passes see the whole sequence, or compute it each time."""
        is_kept = bool(self.options.kv_cache) and self.config.decoding.keeps_keys
        return Reuse(self.options.cache) if is_kept else Reuse.OFF

    @property
    def changes_words(self) -> bool:
        """Whether the policy may have other experts run than the router chose."""
        return substitutes(self.options.policy, self.options.policy_options)

    @property
    def stores_keys(self) -> bool:
        """Whether what is kept is written to `cache_dir`, too."""
        is_kept = self.reuse is not Reuse.OFF and not self.changes_words
        return is_kept and self.options.cache_dir is not None

    @property
    def kernels(self) -> Kernels:
        """The host's kernels. The first use in a process loads or compiles the parts that the
        weights' formats need.
        """
        return self.kernels_on(HOST)

    def kernels_on(self, device: torch.device) -> Kernels:
        formats = self._kept_formats if device == HOST else []
        return choose_kernels(
            self.options.kernels,
            self.dtype,
            device,
            self.rounded,
            formats,
            self.options.report,
        )

    @property
    def rounded(self) -> frozenset[str]:
        """The names of the formats whose products round rows to int8."""
        return weight_formats.rounded_formats(
            self.options.activations,
            weight_formats.stored_formats(self.weight_map),
            str(self.dtype).removeprefix("torch."),
            self.device,
        )

    @property
    def keeps_keys(self) -> bool:
        """Whether keys and values outlast a pass: in exact mode nothing of a bidirectional one is
        kept, and layers take turns in the workspace.
        """
        return self.config.decoding.keeps_keys or self.cache_mode is not CacheMode.EXACT

    @property
    def kv_shape(self) -> StorageShape:
        """For keys and values; where they are not kept, for the layer whose turn it is."""
        config = self.config
        num_layers = config.num_layers if self.keeps_keys else 1
        num_arrays, num_heads, width = config.attention.cache_shape
        num_tokens = align_up(self.context, config.decoding.block_length)
        return storage_shape(num_layers, num_heads, width, num_tokens, num_arrays)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the keys and values that are kept from pass to pass."""
        return math.prod(self.kv_shape) * self.dtype.itemsize if self.keeps_keys else 0


def open_model(reference: str | Path, options: EngineConfig) -> OpenModel:
    """Finds a model, fetched if need be, and checks all that can be without reading a weight."""
    _use_cores(options, keep_to)
    check_is_named(options.format)  # before anything is fetched
    path = resolve_model(
        str(as_reference(reference)),
        offline=options.offline,
        overrides=options.config_overrides,
        progress=options.report,
    )
    return _open_path(path, options)


def open_for_plan(reference: str | Path | HubModel, options: EngineConfig) -> OpenModel:
    """As `open_model`; of a model that is on the hub only its config and headers are fetched, and
    cores are counted on, not claimed.
    """
    _use_cores(options, look_at)
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


def _use_cores(options: EngineConfig, take: Callable[[Cores], None]) -> None:
    """Before anything is counted or compiled: plans and costs are of these cores."""
    if options.kept_cores is not None:
        take(options.kept_cores)
        set_cores_per_product(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))


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
    if config.decoding.keeps_keys:
        check_exact_keys(config, options)
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
    if options.activations == INT8_ROWS:
        weight_formats.check_rounded_rows(opened.formats, opened.device)
    return replace(opened, inputs=named_inputs(opened) if rounds_experts(opened) else None)


def _context(config: ModelConfig, options: EngineConfig) -> int:
    """May be more than the model's positions: it is shared by all running sequences. Whole
    blocks where a model writes by blocks.
    """
    context = options.context or min(config.max_positions, DEFAULT_CONTEXT)
    return align_up(context, config.decoding.block_length)
