"""An independent model for tests: LLaDA2 checkpoints in transformers' `Glm4MoeForCausalLM`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common.glm4 import block_causal_mask, glm4_config, glm4_tensors
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Glm4MoeForCausalLM

from lowtide.layers.batch import Batch, KVRange, Segment

GOLDENS = Path(__file__).parent / "goldens"


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Glm4MoeForCausalLM:
    """The model of a LLaDA2 checkpoint folder with one `model.safetensors`."""
    config = json.loads((folder / "config.json").read_text())
    return make_oracle(config, load_file(folder / "model.safetensors"), dtype)


def make_oracle(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Glm4MoeForCausalLM:
    """The model of LLaDA2.0/2.1's `config.json` values and tensors by name."""
    model = Glm4MoeForCausalLM(glm4_config(config)).to(dtype)
    # The selection bias stays in float32, as the router's arithmetic.
    state = {name: tensor.float() for name, tensor in oracle_weights(config, weights).items()}
    model.load_state_dict(state)
    return model.eval()


def oracle_weights(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """LLaDA2's tensors under `Glm4Moe`'s names and in its shapes."""
    renamed: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if ".mlp.experts." in name:
            prefix, rest = name.split("experts.")
            expert, projection, _ = rest.split(".")
            experts.setdefault(f"{prefix}experts.{projection}", {})[int(expert)] = tensor
        else:
            renamed |= dict(glm4_tensors(name, tensor, config))
    stacked = {
        name: torch.stack([by_id[expert] for expert in sorted(by_id)])
        for name, by_id in experts.items()
    }
    for name in [name for name in stacked if name.endswith("gate_proj")]:
        up = stacked[name.replace("gate_proj", "up_proj")]
        joined = name.replace("gate_proj", "gate_up_proj")
        renamed[joined] = torch.cat([stacked[name], up], dim=1)  # [experts, 2 * width, hidden]
        down = name.replace("gate_proj", "down_proj")
        renamed[down] = stacked[down]
    return renamed


class OracleModel:
    """The oracle as the decoder's model, with a cache of its own for each KV range."""

    def __init__(self, oracle: Glm4MoeForCausalLM) -> None:
        self._oracle = oracle
        self._caches: dict[KVRange, DynamicCache] = {}

    def forward(self, batch: Batch) -> Tensor:
        return torch.cat([self._segment(batch, segment) for segment in batch.segments])

    def mixes_rows(self, hidden: Tensor) -> bool:
        return True

    def logits(self, hidden: Tensor) -> Tensor:
        return self._oracle.lm_head(hidden).float()

    def _segment(self, batch: Batch, segment: Segment) -> Tensor:
        """Final hidden states [rows, hidden] of one sequence's rows."""
        first, stop = segment.first_position, segment.end_position
        if first == 0:
            self._caches[segment.kv] = DynamicCache()
        cache = self._caches[segment.kv]
        if cache.get_seq_length() > first:
            cache.crop(first - cache.get_seq_length())  # negative: how many to remove
        rows = slice(segment.start, segment.stop)
        mask = block_causal_mask(first, stop, segment.block_length, self._oracle.dtype)
        return self._oracle.model(
            input_ids=batch.token_ids[None, rows],
            position_ids=batch.positions[None, rows],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0]
