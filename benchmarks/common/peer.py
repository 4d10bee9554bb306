"""The peer: transformers with accelerate's disk offload, driven by lowtide's decoder.

It has no cache of finished blocks, so it recomputes everything.
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
from transformers import Glm4MoeForCausalLM
from transformers.utils import logging

from common.causal import offloaded_share
from common.glm4 import block_causal_mask, glm4_config, glm4_tensors
from common.memory import drop_pages, peak_resident_bytes, reset_peak, storage_read_bytes
from common.run import decode, make_decoder, make_request
from lowtide.families import read_config_in
from lowtide.layers.batch import Batch
from lowtide.memory.kv_cache import KVCache, storage_shape


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
    more = {"architectures": ["Glm4MoeForCausalLM"], "dtype": config["torch_dtype"]}
    glm4_config(config, **more).save_pretrained(target)
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
        mask = block_causal_mask(0, segment.stop, segment.block_length, self._model.dtype)
        body = self._model.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            attention_mask=mask,
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
    with safe_open(shard, framework="pt") as file:
        for name in file.keys():
            yield from glm4_tensors(name, file.get_tensor(name), config)
