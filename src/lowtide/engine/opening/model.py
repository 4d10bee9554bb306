"""Opens a model: its options and facts, or a refusal. Reads no weight."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from lowtide.config import ModelConfig
from lowtide.engine.opening import weight_formats
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.device_choice import resolve_device
from lowtide.engine.opening.facts import MemoryFacts, ModelFacts, RunOptions, SpeedFacts
from lowtide.engine.opening.named_inputs import named_inputs, rounds_experts
from lowtide.engine.opening.option_checks import (
    as_reference,
    check_exact_keys,
    check_without_experts,
)
from lowtide.errors import UnsupportedError
from lowtide.families import read_config_in
from lowtide.kernels.choice import HOST, choose_kernels
from lowtide.kernels.reference import Kernels
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.gguf_file import is_gguf
from lowtide.model_folder.gguf_model import GgufModel
from lowtide.model_folder.hub import has_weights, locate_model, resolve_model
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.plan import INT8_ROWS, check_is_named
from lowtide.reading.by_expert import with_copy
from lowtide.schemas import WeightMap, as_stored, assume, bind, stored_matrices
from lowtide.threads.cores import Cores, keep_to, look_at
from lowtide.threads.executor import set_cores_per_product


class OpenModel(NamedTuple):
    """The three records of an open model, which planning and loading take apart."""

    facts: ModelFacts
    memory: MemoryFacts
    options: RunOptions

    @property
    def speed_facts(self) -> SpeedFacts:
        asked = self.options.asked
        return SpeedFacts(
            self.facts.folder,
            self.facts.config,
            self.memory,
            asked.kernels,
            asked.kv_cache,
            asked.cache_mode,
        )

    def kernels(self, device: torch.device = HOST) -> Kernels:
        """Choose the kernels for computing on `device`.

        The first use in a process loads or compiles the parts that the weights' formats need.
        """
        memory, asked = self.memory, self.options.asked
        formats = memory.kept_formats if device == HOST else []
        return choose_kernels(
            asked.kernels,
            memory.dtype,
            device,
            memory.rounded,
            formats,
            asked.report,
            packs=memory.is_rounded_as_read and device == HOST,
        )


def open_model(reference: str | Path, options: EngineConfig) -> OpenModel:
    """Find a model, fetching it if needed, and check everything that needs no weight."""
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
    """Open a model, as `open_model` does, only to plan it.

    For a model on the hub only the config and headers are fetched. Cores are counted, not bound.
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
        checkpoint = found.checkpoint()
        config = as_stored(config, checkpoint)
        checkpoint = stored_matrices(config, checkpoint)
    return _opened(found.path, options, config, bind(config, checkpoint))


def _use_cores(options: EngineConfig, take: Callable[[Cores], None]) -> None:
    """Bind the cores before anything is measured or compiled: plans and costs depend on them."""
    if options.kept_cores is not None:
        take(options.kept_cores)
        set_cores_per_product(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))


def _open_path(path: Path, options: EngineConfig) -> OpenModel:
    if is_gguf(path):
        return _open_gguf(GgufModel.open(path), options)
    folder, config = path, _checked(read_config_in(path, options.config_overrides), options)
    checkpoint = None
    if has_weights(folder):
        checkpoint = Checkpoint.open(folder)
        config = as_stored(config, checkpoint)
        checkpoint = stored_matrices(config, checkpoint)
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
            '`device="cpu"`.'
        )
    activation = "silu" if config.experts is None else config.experts.activation
    if activation not in ("silu", "clamped") and resolve_device(options.device) == "cuda":
        raise UnsupportedError(
            f'Experts with {activation} have no kernels on a GPU yet; choose `device="cpu"`.'
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
    facts = ModelFacts(folder, config, weight_map, checkpoint, tokenizer)
    memory = MemoryFacts.of(config, weight_map, options)
    if options.activations == INT8_ROWS:
        weight_formats.check_rounded_rows(memory.formats, memory.device)
    if rounds_experts(options.formats, memory):
        memory = memory.with_inputs(named_inputs(facts, options.calibration))
    return OpenModel(facts, memory, RunOptions.of(options, config))
