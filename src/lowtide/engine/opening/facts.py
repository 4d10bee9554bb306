"""Facts of an open model, in three records; no weight is read for them.

`ModelFacts` describes its files, `MemoryFacts` its contents in memory, `RunOptions` the way it is
run; `SpeedFacts` are those of the three that its speed depends on. A function takes the fields it
reads, or one record. Only planning (`planning/plan.py`) and loading (`running/wiring.py`) take
several records, and pass their fields on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from lowtide.config import ModelConfig, StateArray
from lowtide.core import CacheMode, MoEShape, Reuse, align_up
from lowtide.engine.opening import weight_formats
from lowtide.engine.opening.config import MAX_BLOCK_LENGTH, MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.device_choice import check_compute_dtype, resolve_device
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.layout import SlotLayout
from lowtide.experts.transfer import largest_read_bytes
from lowtide.families import families
from lowtide.formats import MatrixFormat
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.hardware.machine import Machine
from lowtide.hardware.measure import layer_dense_bytes
from lowtide.hardware.store import CostKey
from lowtide.kernels.operands import (
    AnyWeights,
    ClampedWeights,
    ExpertWeights,
    GeluWeights,
    SquaredWeights,
)
from lowtide.memory.kv_pages import GRANULE_TOKENS, KVShape
from lowtide.memory.states import StateLayout
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.plan import WeightFormats
from lowtide.policies.presets import recipe_in_use, substitutes
from lowtide.policies.recipe import Recipe
from lowtide.reading.dense_weights import DenseWeights
from lowtide.reading.fingerprint import fingerprint
from lowtide.schemas import WeightMap, model_schema
from lowtide.schemas.weights import ExpertTable

DEFAULT_CONTEXT = 4096

LEAST_STATE_SLOTS = 8
"""Slots of states, each for one sequence: two of each of two that run, and two snapshots of each,
without which their next turns would be computed from the beginning."""

MOST_STATE_SLOTS = 64

STATES_SHARE = 2
"""Between these, slots of states take one part in this many of the keys' and values' bytes."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its files describe it, however it is run.

    `folder` is the files' folder, or the first GGUF file. `checkpoint` is None for a folder with
    only a `config.json`, and for a model on the hub: it can be planned (`weight_map` has the
    tensors' places), but not loaded.
    """

    folder: Path
    config: ModelConfig
    weight_map: WeightMap
    checkpoint: Checkpoint | None = None
    tokenizer: Tokenizer | None = None

    def fingerprint(self) -> str:
        """Return the model's identity: a hash of a few hundred short pieces of its dense weights.

        Raises StorageError, and UsageError for a folder without weights.
        """
        if self.checkpoint is None:
            raise UsageError(f"{self.folder} has no weights that could be told from others.")
        return fingerprint(self.checkpoint, self.weight_map.dense)


class ContextFacts(NamedTuple):
    """Planned KV cache of `num_tokens`, the most of one sequence, and its limits."""

    num_tokens: int
    kv_shape: KVShape  # where none is kept, of the layers whose turn it is
    keeps_keys: bool  # from pass to pass; otherwise layers take turns in the workspace
    max_pass_rows: int
    max_sequence_tokens: int  # of one sequence in the KV cache
    states: tuple[tuple[StateArray, ...], ...] = ()  # of one sequence, by layer; () without any

    @classmethod
    def of(cls, config: ModelConfig, num_tokens: int, cache_mode: CacheMode) -> ContextFacts:
        # In exact mode nothing of a bidirectional pass holds for the next.
        keeps_keys = config.decoding.keeps_keys or cache_mode is not CacheMode.EXACT
        mixers = [layer.mixer for layer in config.layers]
        cached = [None if mixer is None else mixer.cache_shape for mixer in mixers]
        states = tuple(() if mixer is None else mixer.states for mixer in mixers)
        if not any(cached):
            raise UnsupportedError(
                "config.json: no layer has attention, which every model here has."
            )
        in_blocks = align_up(num_tokens, config.decoding.block_length)
        # Whoever writes in no order may see what comes after it, too.
        is_causal = keeps_keys and config.decoding.writes_in_order
        windows = [0 if mixer is None or not is_causal else mixer.window for mixer in mixers]
        num_all = align_up(in_blocks, GRANULE_TOKENS)
        kv_shape = KVShape.of(cached, num_all, windows, MAX_PASS_ROWS)
        if not keeps_keys:
            kv_shape = kv_shape.of_one_layer()
        max_pass_rows, max_sequence_tokens = MAX_PASS_ROWS, kv_shape.num_tokens
        if config.decoding.keeps_keys:
            longest = align_up(config.max_positions, MAX_BLOCK_LENGTH)
            max_sequence_tokens = min(kv_shape.num_tokens, longest)
        else:  # passes of whole sequences; under guidance two in a range
            max_pass_rows = kv_shape.num_tokens
        return cls(
            *(num_tokens, kv_shape, keeps_keys, max_pass_rows, max_sequence_tokens),
            states if config.has_states else (),
        )

    def state_layout(self, dtype: torch.dtype) -> StateLayout | None:
        """Return the layout of all sequences' states; None for a model without any."""
        if not self.states:
            return None
        layout = StateLayout(self.states, dtype, 1)
        kv_bytes = self.kv_shape.num_elements * dtype.itemsize
        num_slots = kv_bytes // STATES_SHARE // layout.slot_bytes
        return layout._replace(num_slots=min(max(num_slots, LEAST_STATE_SLOTS), MOST_STATE_SLOTS))


class ExpertFacts(NamedTuple):
    """A model's experts: their places in the files, and their layout in a slot."""

    shape: MoEShape
    table: ExpertTable
    layout: SlotLayout
    layer_bytes: int  # of the dense weights of a layer with experts, as costs are measured
    inputs: ExpertInputs | None = None  # of a named calibration, where experts are rounded as read

    def cost_key(
        self, machine: Machine, products: str, device: str, kernels: str, folder: Path | None = None
    ) -> CostKey:
        """Return the key under which these experts' costs are stored.

        products: names of the host's kernels. kernels: the option, if there is a device. folder:
        where experts are read from, if the costs include reads.
        """
        beside = "" if device == "cpu" else f"{device}, {kernels} kernels"
        return CostKey.of(
            machine, self.shape, self.layout, self.layer_bytes, beside, folder, products
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of gate and up for a tile, where the host computes experts beside a device."""
        num_pairs = MAX_PASS_ROWS * self.shape.num_experts_per_token
        return 2 * num_pairs * self.shape.expert_size * self.layout.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Shapes, formats and bytes of everything that a running model has in memory."""

    device: str  # `cpu`, `cuda`, or the name of a registered kind
    dtype: torch.dtype  # that it computes in
    context: ContextFacts
    dense: DenseWeights
    dense_formats: Mapping[str, MatrixFormat]  # by name, of those not in their type's own format
    experts: ExpertFacts | None
    formats: WeightFormats  # in force, by part
    rounded: frozenset[str]  # names of the formats whose products round rows to int8
    is_rounded_as_read: bool  # weights are made into q8 or q4 that are not stored so

    @classmethod
    def of(cls, config: ModelConfig, weight_map: WeightMap, asked: EngineConfig) -> MemoryFacts:
        """Derive the facts. Raise UnsupportedError for formats that are not possible."""
        device, schema = resolve_device(asked.device), model_schema(config)
        dtype_name = asked.dtype or config.dtype
        dtype = getattr(torch, dtype_name)
        check_compute_dtype(device, dtype_name)
        asked.formats.check(dtype_name, device)
        has_gpu = device == "cuda"
        dense_formats = weight_formats.dense_formats(asked.formats, schema, weight_map, has_gpu)
        of_experts: list[tuple[MatrixFormat | None, ...]] = []
        if config.experts is not None:
            of_experts = weight_formats.expert_formats(asked.formats, weight_map, has_gpu)
        rounded = weight_formats.rounded_formats(
            asked.activations, weight_formats.stored_formats(weight_map), dtype_name, device
        )
        parts = weight_formats.describe(config, schema, of_experts, dense_formats)
        activations = weight_formats.describe_activations(asked.activations, parts, rounded)
        return cls(
            device=device,
            dtype=dtype,
            context=ContextFacts.of(config, _context(config, asked.context), asked.cache_mode),
            dense=_dense(config, weight_map, dtype, dense_formats),
            dense_formats=dense_formats,
            experts=_experts(config, weight_map, dtype, of_experts),
            formats=replace(parts, activations=activations),
            rounded=rounded,
            is_rounded_as_read=weight_formats.rounds(asked.formats, dense_formats, weight_map),
        )

    def with_inputs(self, inputs: ExpertInputs | None) -> MemoryFacts:
        """Return the same facts with experts rounded for the least error on `inputs`."""
        if self.experts is None or inputs is None:
            return self
        formats = replace(self.formats, is_calibrated=True)
        return replace(self, experts=self.experts._replace(inputs=inputs), formats=formats)

    @property
    def kept_formats(self) -> list[MatrixFormat]:
        """The formats of weights that are not in their type's own format."""
        layers = [] if self.experts is None else self.experts.layout.layers
        of_experts = [each for layer in layers for each in layer.formats]
        return [*self.dense_formats.values(), *of_experts]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the keys and values kept from pass to pass."""
        context = self.context
        return context.kv_shape.num_elements * self.dtype.itemsize if context.keeps_keys else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of sequences' states and of their snapshots."""
        layout = self.context.state_layout(self.dtype)
        return 0 if layout is None else layout.num_bytes

    @property
    def largest_read_bytes(self) -> int:
        """Bytes of an expert's largest single read or, without experts, of a dense weight's."""
        if self.experts is None:
            return self.dense.largest_stored_bytes
        return max(largest_read_bytes(self.experts.table), self.dense.largest_row_bytes)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of running a model, limited to those that its kind has.

    recipe: the policy's; one without a name is known as long as something runs by it.
    """

    asked: EngineConfig
    reuse: Reuse
    recipe: Recipe | None

    @classmethod
    def of(cls, asked: EngineConfig, config: ModelConfig) -> RunOptions:
        # Nothing is taken over where passes see the whole sequence, or compute it each time.
        is_kept = bool(asked.kv_cache) and config.decoding.keeps_keys
        reuse = Reuse(asked.cache) if is_kept else Reuse.OFF
        return cls(asked, reuse, recipe_in_use(asked.policy))

    def with_policy(self, policy: str, policy_options: Mapping[str, str]) -> RunOptions:
        asked = replace(self.asked, policy=policy, policy_options=policy_options)
        return replace(self, asked=asked, recipe=recipe_in_use(policy))

    @property
    def changes_words(self) -> bool:
        """True if the policy may run other experts than the router chose."""
        return substitutes(self.asked.policy, self.asked.policy_options)

    @property
    def keys_folder(self) -> Path | None:
        """The folder to which kept KV caches are also written; None: memory only."""
        folder, is_kept = self.asked.cache_dir, self.reuse is not Reuse.OFF
        return Path(folder) if folder is not None and is_kept and not self.changes_words else None


class SpeedFacts(NamedTuple):
    """Facts from which a model's speed is predicted, and under which it is stored."""

    folder: Path
    config: ModelConfig
    memory: MemoryFacts
    kernels: str  # as they were asked for
    kv_cache: bool | str
    cache_mode: CacheMode


def _context(config: ModelConfig, asked: int | None) -> int:
    """Return the context in tokens, in whole blocks if the model writes by blocks.

    It may exceed the model's positions: the planned room is for all running sequences.
    """
    context = asked or min(config.max_positions, DEFAULT_CONTEXT)
    return align_up(context, config.decoding.block_length)


def _dense(
    config: ModelConfig,
    weight_map: WeightMap,
    dtype: torch.dtype,
    kept: Mapping[str, MatrixFormat],
) -> DenseWeights:
    is_float32 = families()[config.family].model().is_float32
    dtypes = {name: torch.float32 if is_float32(name) else dtype for name in weight_map.dense}
    return DenseWeights(weight_map.dense, dtypes, kept)


_WEIGHTS: Mapping[str, type[AnyWeights]] = {
    "silu": ExpertWeights,
    "gelu_tanh": GeluWeights,
    "relu2": SquaredWeights,
    "clamped": ClampedWeights,
}
"""Classes of experts by their activation."""


def _experts(
    config: ModelConfig,
    weight_map: WeightMap,
    dtype: torch.dtype,
    kept: list[tuple[MatrixFormat | None, ...]],
) -> ExpertFacts | None:
    if config.experts is None:
        return None
    weights = _WEIGHTS[config.moe.activation]
    return ExpertFacts(
        shape=config.moe_shape,
        table=weight_map.experts,
        layout=SlotLayout.of(config.moe_shape, dtype, weights, kept),
        layer_bytes=layer_dense_bytes(weight_map.dense, config.moe_layers[-1], dtype.itemsize),
    )
