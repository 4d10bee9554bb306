"""The peer: transformers with accelerate's disk offload, driven by lowtide's decoder.

transformers has no LLaDA2, but `Glm4MoeForCausalLM` is the same function once QKV is split and
the mask is block-causal. It has no cache of finished blocks either, so it recomputes everything.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.utils import logging

from common.causal import offloaded_share
from common.memory import drop_pages, peak_resident_bytes, reset_peak, storage_read_bytes
from common.run import decode, make_decoder, make_request
from lowtide.families import read_config_in
from lowtide.layers.batch import Batch
from lowtide.memory.kv_cache import KVCache, storage_shape

_RENAMED = (
    ("word_embeddings", "embed_tokens"),
    ("attention.dense", "self_attn.o_proj"),
    ("attention.query_layernorm", "self_attn.q_norm"),
    ("attention.key_layernorm", "self_attn.k_norm"),
    ("gate.expert_bias", "gate.e_score_correction_bias"),
)

_SAME_FIELDS = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps num_experts_per_tok n_group "
    "topk_group first_k_dense_replace norm_topk_prob routed_scaling_factor "
    "max_position_embeddings tie_word_embeddings"
).split()


def convert(source: Path, target: Path) -> Path:
    """Writes the LLaDA2 checkpoint in `source` as a Glm4Moe checkpoint, shard by shard, once.

    Returns `target`. `config.json` is written last: a folder that has one is whole and is kept.
    """
    if (target / "config.json").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    weight_map: dict[str, str] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors = dict(_converted(shard, config))
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    _peer_config(config).save_pretrained(target)
    return target


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the first pass of a generation `repeats` times, after once to warm up.

    settings: model (the LLaDA2 folder), peer_model, max_memory_bytes, num_prompt, num_new,
    repeats, drops_pages (whether the page cache is dropped before every pass).
    """
    peer_model = Path(settings["peer_model"])
    config = read_config_in(Path(settings["model"]))
    request = make_request(config, settings["num_prompt"], settings["num_new"], seed=0)
    with tempfile.TemporaryDirectory(dir=peer_model.parent) as offload_folder:
        folders = [peer_model, Path(offload_folder)]
        drop_pages(folders)
        start_s = time.perf_counter()
        model = load_peer(peer_model, settings["max_memory_bytes"], offload_folder)
        load_s = time.perf_counter() - start_s
        load_peak_bytes = peak_resident_bytes()
        reset_peak()
        adapter = PeerModel(model, folders if settings["drops_pages"] else [])
        kv_cache = KVCache(
            torch.empty(storage_shape(1, 1, 1, request.canvas_length), device="meta")
        )
        decoder = make_decoder(adapter, kv_cache, config, request.canvas_length, False)
        decode(decoder, request, 1)  # a warm-up
        start_bytes, each_s = storage_read_bytes(), []
        for _ in range(settings["repeats"]):
            adapter.drop_s = 0.0
            each_s.append(decode(decoder, request, 1).seconds - adapter.drop_s)
        read_bytes = storage_read_bytes() - start_bytes
    return {
        "load_s": load_s,
        "page_cache": "dropped before every pass" if settings["drops_pages"] else "kept",
        "s_per_forward": statistics.median(each_s),
        "each_s_per_forward": each_s,
        "storage_read_bytes_per_forward": read_bytes // len(each_s),
        "offloaded_share": offloaded_share(model),
        "resident_share": 1 - offloaded_share(model, ".experts."),
        "max_memory_bytes": settings["max_memory_bytes"],
        "load_peak_resident_bytes": load_peak_bytes,
        "peak_resident_bytes": peak_resident_bytes(),
    }


def load_peer(
    folder: Path, max_memory_bytes: int | None, offload_folder: str
) -> Glm4MoeForCausalLM:
    """The model with as many modules in memory as accelerate fits into `max_memory_bytes`.

    The others are on disk. `None` keeps all of it in memory.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {}
    if max_memory_bytes is not None:
        options = {
            "device_map": "auto",
            "max_memory": {"cpu": max_memory_bytes},
            "offload_folder": offload_folder,
        }
    model: Glm4MoeForCausalLM = Glm4MoeForCausalLM.from_pretrained(folder, dtype="auto", **options)
    model.eval()  # type: ignore[no-untyped-call]
    return model


class PeerModel:
    """`Glm4MoeForCausalLM` as lowtide's decoder sees a model: one sequence, no cache."""

    def __init__(self, model: Glm4MoeForCausalLM, folders: list[Path]) -> None:
        """The page cache of `folders` is dropped before every pass; `drop_s` adds up its time."""
        self._model = model
        self._folders = folders
        self.drop_s = 0.0

    def forward(self, batch: Batch) -> Tensor:
        start_s = time.perf_counter()
        drop_pages(self._folders)
        self.drop_s += time.perf_counter() - start_s
        [segment] = batch.segments
        body = self._model.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            attention_mask=_block_causal(segment.stop, segment.block_length, self._model.dtype),
            use_cache=False,
        )
        hidden: Tensor = body.last_hidden_state[0]
        return hidden

    def mixes_rows(self, hidden: Tensor) -> bool:
        return True

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.lm_head(hidden).float()
        return logits


def _converted(shard: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """One shard's tensors under the peer's names."""
    heads = [config["num_attention_heads"]] + 2 * [config["num_key_value_heads"]]
    sizes = [num_heads * config["head_dim"] for num_heads in heads]
    with safe_open(shard, framework="pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            prefix, fused, rest = name.partition("attention.query_key_value")
            if fused:
                for part, rows in zip("qkv", tensor.split(sizes), strict=True):
                    yield f"{prefix}self_attn.{part}_proj{rest}", rows.contiguous()
            else:
                for ours, theirs in _RENAMED:
                    name = name.replace(ours, theirs)
                # The selection bias is kept in float32 whatever the model's type.
                yield name, tensor.float() if name.endswith("_bias") else tensor


def _peer_config(config: Mapping[str, Any]) -> Glm4MoeConfig:
    return Glm4MoeConfig(
        **{name: config[name] for name in _SAME_FIELDS},
        architectures=["Glm4MoeForCausalLM"],
        dtype=config["torch_dtype"],
        n_routed_experts=config["num_experts"],
        n_shared_experts=config["num_shared_experts"],
        use_qk_norm=config.get("use_qk_norm", True),
        attention_bias=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(config["rope_theta"]),
            "partial_rotary_factor": config["partial_rotary_factor"],
        },
    )


def _block_causal(num_rows: int, block_length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, rows, rows]: a row sees its own and earlier blocks."""
    blocks = torch.arange(num_rows) // block_length
    mask = torch.zeros(num_rows, num_rows, dtype=dtype)
    mask.masked_fill_(blocks[None, :] > blocks[:, None], torch.finfo(dtype).min)
    return mask[None, None]
