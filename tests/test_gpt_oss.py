"""Parts of gpt-oss alone: windows, sinks, clamped experts, its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from computing import attention, on_this_thread, plain_attention, randn
from examples import examples
from family_models import logits, random_ids, write_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from lowtide.errors import ConfigError, InternalError, UnsupportedError
from lowtide.families import families, read_config
from lowtide.kernels.operands import ClampedWeights
from lowtide.kernels.reference import REFERENCE
from lowtide.layers.batch import Segment
from lowtide.memory.arena import Arena
from lowtide.memory.kv_cache import KVCache, storage_shape
from lowtide.memory.workspace import Registrar, Workspace
from lowtide.threads.executor import Executor, HostExecutor

FULL = families()["gpt_oss"].sizes()["full"].config


# Attention


def windowed(
    query: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None
) -> Tensor:
    ago = torch.arange(len(query))[:, None] - torch.arange(len(keys))
    sees = (ago >= 0) & (ago < (window or len(keys)))
    return plain_attention(query, keys, values, sees, sinks=sinks)


def run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: list[int],
    sinks: Tensor | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> Tensor:
    """Of one sequence that comes in passes, each in exactly the workspace it registers."""
    storage = torch.full(storage_shape(1, key.shape[1], key.shape[2], len(key)), torch.nan)
    cache = KVCache(storage.to(key.dtype))
    meta_cache = KVCache(storage.to("meta", key.dtype))
    kv, out = cache.allocate(len(key)), torch.empty_like(query)
    for start, stop in zip(bounds, bounds[1:], strict=False):
        rows = slice(start, stop)
        segment = Segment(0, stop - start, start, 1, kv)
        tensors = (query[rows], key[rows], value[rows])
        registrar = Registrar()
        on_meta = [x.to("meta") for x in (*tensors, out[rows])]
        counted = {"sinks": None if sinks is None else sinks.to("meta"), **options}
        meta, out_on_meta = on_this_thread(registrar), on_meta[3]
        attention(0, *on_meta[:3], [segment], meta_cache, meta, out_on_meta, **counted)
        workspace = Workspace(Arena(registrar.arena_bytes).bytes)
        compute = on_this_thread(workspace, executor=executor)
        attention(0, *tensors, [segment], cache, compute, out[rows], sinks=sinks, **options)
    return out


@examples(40)
@given(
    bounds=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    window=st.sampled_from([0, 1, 2, 20, 127, 150, 1000]),
    has_sinks=st.booleans(),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2), (12, 1)]),
    seed=st.integers(0, 10**6),
)
def test_windows_and_sinks(
    bounds: list[int], window: int, has_sinks: bool, heads: tuple[int, int], seed: int
) -> None:
    num_rows = sum(bounds)
    query = 2 * randn(num_rows, heads[0], 8, seed=seed)
    key, value = (randn(num_rows, heads[1], 8, seed=seed + i) for i in (1, 2))
    sinks = 2 * randn(heads[0], seed=seed + 3) if has_sinks else None
    stops = [sum(bounds[:i]) for i in range(len(bounds) + 1)]
    out = run_attention(query, key, value, stops, window=window, sinks=sinks)
    expected = windowed(query, key, value, window, sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_windows_longer_than_the_kernels_own_tiles() -> None:
    """A row may see nothing of the first keys that the kernel takes together."""
    query, key, value = (randn(1500, 2, 8, seed=i) for i in range(3))
    sinks = randn(2, seed=3)
    out = run_attention(query, key, value, [0, 1100, 1101, 1500], window=600, sinks=sinks)
    expected = windowed(query, key, value, 600, sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 50])
def test_bfloat16_attention_with_sinks(window: int) -> None:
    """Tolerance: a few units in the last place of outputs below 2."""
    query, key, value = (randn(200, 4, 16, seed=i, dtype=torch.bfloat16) for i in range(3))
    sinks = randn(4, seed=3)
    out = run_attention(query, key, value, [0, 200], window=window, sinks=sinks)
    expected = windowed(query, key, value, window, sinks)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.invariant
def test_threads_change_no_bit() -> None:
    query, key, value = (randn(700, 8, 64, seed=i) for i in range(3))
    options: dict[str, Any] = {"window": 128, "sinks": randn(8, seed=3)}
    alone = run_attention(query, key, value, [0, 700], **options)
    executor = HostExecutor(2)
    try:
        shared = run_attention(query, key, value, [0, 700], executor=executor, **options)
    finally:
        executor.close()
    assert torch.equal(alone, shared)


def test_blocks_have_neither_windows_nor_sinks() -> None:
    query = randn(8, 2, 8, seed=0)
    cache = KVCache(torch.zeros(storage_shape(1, 2, 8, 16)))
    segment = Segment(0, 8, 0, 8, cache.allocate(8))
    options: dict[str, Any] = {"window": 4}
    with pytest.raises(InternalError, match="Only causal attention"):
        attention(
            0, query, query, query, [segment], cache, on_this_thread(Registrar()), query, **options
        )


# Experts


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_clamped_experts_are_those_of_transformers(dtype: torch.dtype, tolerance: float) -> None:
    hidden, width = 32, 48
    gate_up, bias = 2 * randn(2 * width, hidden, seed=0), 3 * randn(2 * width, seed=1)
    down, down_bias = randn(hidden, width, seed=2) / width**0.5, randn(hidden, seed=3)
    parts = (gate_up[0::2], gate_up[1::2], down, bias[0::2], bias[1::2], down_bias)
    weights = ClampedWeights(*(part.to(dtype).contiguous() for part in parts))
    x = randn(40, hidden, seed=4, dtype=dtype)
    gate, up, out = (torch.empty(40, n, dtype=dtype) for n in (width, width, hidden))
    REFERENCE.gated_mlp(x, weights, gate, up, out)
    config = FULL | {"hidden_size": hidden, "intermediate_size": width, "num_local_experts": 1}
    experts = GptOssExperts(_Namespace(config))
    with torch.no_grad():
        experts.gate_up_proj.copy_(gate_up.t()[None])
        experts.gate_up_proj_bias.copy_(bias[None])
        experts.down_proj.copy_(down.t()[None])
        experts.down_proj_bias.copy_(down_bias[None])
        chosen = torch.zeros(40, 1, dtype=torch.int64)
        expected = GptOssExperts.forward(experts.to(dtype), x, chosen, torch.ones(40, 1))
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


class _Namespace:
    """A config as transformers' modules ask it."""

    swiglu_alpha = 1.702
    _experts_implementation = "eager"

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


# Whole models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_and_unpacked_experts_give_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    packed = write_model("gpt_oss", 0, tmp_path / "packed", dtype).folder
    weights = load_file(packed / "model.safetensors")
    for name in [name for name in weights if name.endswith("_blocks")]:
        blocks, scales = (weights.pop(name.replace("blocks", x)) for x in ("blocks", "scales"))
        unpacked = convert_moe_packed_tensors(blocks, scales).to(dtype)
        weights[name.removesuffix("_blocks")] = unpacked
    (tmp_path / "unpacked").mkdir()
    save_file(weights, tmp_path / "unpacked" / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "unpacked" / "config.json").write_text(json.dumps(config))
    token_ids = random_ids(0, 60)
    assert torch.equal(logits(packed, token_ids), logits(tmp_path / "unpacked", token_ids))


def test_norms_and_sinks_are_kept_in_float32() -> None:
    is_float32 = families()["gpt_oss"].model().is_float32
    names = ("norm", "layers.0.input_layernorm", "layers.1.post_attention_layernorm")
    assert all(is_float32(f"model.{name}.weight") for name in names)
    assert is_float32("model.layers.0.self_attn.sinks")
    assert not is_float32("model.layers.0.mlp.router.weight")


# config.json


def test_the_published_numbers() -> None:
    config = read_config(FULL)
    assert [layer.mixer.window for layer in config.layers] == [128, 0] * 12
    assert config.num_leading_layers == 2
    assert config.moe.is_mxfp4 and config.moe.is_clamped
    yarn = config.attention.rope.yarn
    assert yarn is not None and not yarn.is_rounded
    assert yarn.amplitude == pytest.approx(1.346574)
    without = {name: FULL[name] for name in FULL if name not in ("layer_types", "sliding_window")}
    assert read_config(without).layers == config.layers


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "quant_method 'fp8'"),
        ({"quantization_config": "mxfp4"}, ConfigError, "'mxfp4' must be an object"),
        ({"intermediate_size": 2896}, ConfigError, "2880 by 2896 weights do not divide"),
        ({"layer_types": ["full_attention"]}, ConfigError, "must be a list of 24 kinds"),
        ({"layer_types": ["chunked"] * 24}, UnsupportedError, "layer_types has 'chunked'"),
        ({"sliding_window": 0}, ConfigError, "sliding_window 0 must be an integer from 1"),
    ],
)
def test_what_is_not_gpt_oss_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_config({**FULL, **changes})
