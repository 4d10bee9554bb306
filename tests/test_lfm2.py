"""LFM2's own parts: the short convolution, `config.json`, and GGUF files beside transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from computing import on_this_thread, randn
from examples import examples, scaled
from family_models import FAMILIES, logits, random_ids, randomise
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_gguf
from gguf_oracle import random_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from lowtide.config import ShortConvSpec
from lowtide.errors import UnsupportedError
from lowtide.families import families, gguf_architecture, read_config
from lowtide.families.gguf import GgufKeys
from lowtide.layers.batch import KVRange, Segment
from lowtide.layers.short_conv import ShortConv
from lowtide.memory.states import States
from lowtide.model_folder.gguf_header import GgufArray

FULL = families()["lfm2_moe"].sizes()["full"].config
DENSE = families()["lfm2"].sizes()["full"].config
HIDDEN = 40


# The convolution


class Columns:
    """Stands for a product: each output copies one input, whatever other rows there are."""

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns

    def forward(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x[:, self.columns])


class TwoHalves:
    """Stands for a cache: states of sequences, which change places behind their passes."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._halves: dict[int, list[Tensor]] = {}

    def states(self, layer: int, kv_range: KVRange) -> States:
        fresh = [torch.full(self._shape, value, dtype=self._dtype) for value in (0.0, torch.nan)]
        before, after = self._halves.setdefault(kv_range.start, fresh)
        return States((before,), (after,))

    def end_pass(self, kv_range: KVRange) -> None:
        self._halves[kv_range.start].reverse()


def convolved(
    sequences: Sequence[Tensor],
    passes: Sequence[Sequence[int]],
    kernel: Tensor,
    bias: Tensor | None,
) -> list[Tensor]:
    """What a layer makes of sequences [rows, hidden]; passes: how many rows of each they take."""
    dtype, num_taps, compute = kernel.dtype, kernel.shape[2], on_this_thread()
    config: Any = SimpleNamespace(multipliers=SimpleNamespace(residual=1))
    inward: Any = Columns(torch.arange(3 * HIDDEN) * 7 % HIDDEN)
    outward: Any = Columns(torch.arange(HIDDEN))
    cache: Any = TwoHalves((num_taps - 1, HIDDEN), dtype)
    layer = ShortConv(0, config, inward, kernel, bias, outward, cache, compute)
    norm: Any = SimpleNamespace(of=torch.abs)  # of each number by itself
    outs = [x.clone() for x in sequences]
    ends = [0] * len(sequences)
    for lengths in passes:
        segments, parts = [], []
        for index, length in enumerate(lengths):
            if length:
                start = sum(map(len, parts))
                kv = KVRange(index, len(outs[index]))
                segments.append(Segment(start, start + length, ends[index], 1, kv))
                parts.append(outs[index][ends[index] : ends[index] + length])
                ends[index] += length
        x, batch = torch.cat(parts), SimpleNamespace(segments=tuple(segments))
        compute.workspace.reset()
        layer.forward(x, norm, batch, None)  # type: ignore[arg-type]
        for segment in segments:
            cache.end_pass(segment.kv)
        for part, rows in zip(parts, x.split([len(part) for part in parts]), strict=True):
            part.copy_(rows)
    return outs


def plainly(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """The same of one sequence, by torch's convolution in float64."""
    wide = x.double()
    normed = wide.abs()[:, torch.arange(3 * HIDDEN) * 7 % HIDDEN]
    gate, output_gate, inputs = normed.t().chunk(3)
    own = None if bias is None else bias.double()
    padded = F.pad(gate * inputs, (kernel.shape[2] - 1, 0))
    return wide + (output_gate * F.conv1d(padded[None], kernel.double(), own, groups=HIDDEN)[0]).t()


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    num_taps=st.integers(2, 5),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_a_row_s_bits_depend_on_no_division_into_passes(
    lengths: list[int], num_taps: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    """Rows of several sequences, however many come in a pass and whatever is in the state."""
    sequences = [randn(n, HIDDEN, seed=seed + i, dtype=dtype) for i, n in enumerate(lengths)]
    kernel = randn(HIDDEN, 1, num_taps, seed=seed + 7, dtype=dtype)
    bias = randn(HIDDEN, seed=seed + 8, dtype=dtype) if has_bias else None
    rng, left, passes = random.Random(seed), list(lengths), []
    while any(left):
        taken = [rng.randint(0, each) for each in left]
        if any(taken):
            passes.append(taken)
            left = [each - own for each, own in zip(left, taken, strict=True)]
    found = convolved(sequences, passes, kernel, bias)
    for x, own in zip(sequences, found, strict=True):
        [whole] = convolved([x], [[len(x)]], kernel, bias)
        assert torch.equal(own, whole)
        if dtype is torch.float32:
            exact = plainly(x, kernel, bias)
            torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5)


# The whole model


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
def test_logits_are_as_near_as_the_oracle_s_own_cached_ones(family: str, tmp_path: Path) -> None:
    """Tolerance: three times what its prompt and single steps differ from the whole."""
    row, ours, theirs = FAMILIES[family], 0.0, 0.0
    for seed in range(scaled(6)):
        models: list[torch.nn.Module] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "family_models.randomise", lambda m, kept=models: (kept.append(m), randomise(m))
            )
            torch.manual_seed(seed)
            row.write(random.Random(seed), seed, tmp_path / str(seed), torch.float32, {})
        [model], ids = models, random_ids(seed, 37)
        with torch.inference_mode():
            whole = model(torch.tensor([ids])).logits[0]
            step = model(torch.tensor([ids[:20]]), use_cache=True)
            parts = [step.logits[0]]
            for token in ids[20:]:
                kept = step.past_key_values
                step = model(torch.tensor([[token]]), past_key_values=kept, use_cache=True)
                parts.append(step.logits[0])
        found = logits(tmp_path / str(seed), ids, context=64)
        ours = max(ours, float((found - whole).abs().max()))
        theirs = max(theirs, float((torch.cat(parts) - whole).abs().max()))
    assert 0 < ours <= 3 * theirs


# config.json


def test_layers_with_attention_may_be_numbered() -> None:
    kinds = read_config(FULL)
    numbers = [n for n, kind in enumerate(FULL["layer_types"]) if kind == "full_attention"]
    numbered = read_config({**FULL, "layer_types": None, "full_attn_idxs": numbers})
    assert numbered == kinds
    convolutions = [isinstance(layer.mixer, ShortConvSpec) for layer in kinds.layers]
    assert convolutions.count(True) == 18 and kinds.moe_layers == tuple(range(2, 24))
    assert (kinds.layers[0].dense is not None) and kinds.layers[1] is kinds.layers[0]


@pytest.mark.parametrize(
    ("said", "is_tied"),
    [({}, True), ({"tie_embedding": False}, False), ({"tie_word_embeddings": False}, False)],
    ids=str,
)
def test_the_embedding_is_the_head_unless_the_file_denies_it(
    said: dict[str, Any], is_tied: bool
) -> None:
    config = {name: value for name, value in FULL.items() if name != "tie_embedding"}
    assert read_config({**config, **said}).tie_word_embeddings is is_tied


@pytest.mark.parametrize(
    ("said", "width"),
    [
        ({}, 8192),
        ({"block_ff_dim": None, "intermediate_size": 6656}, 4608),
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 100}, 12300),
        ({"block_ffn_dim_multiplier": None}, 8192),
    ],
    ids=str,
)
def test_the_width_of_mlps_is_shrunk_and_rounded_up(said: dict[str, Any], width: int) -> None:
    assert read_config({**DENSE, **said}).dense_size == width


def test_an_mlp_beside_experts_has_the_width_that_is_stated() -> None:
    config = read_config({**FULL, "intermediate_size": 7000, "block_auto_adjust_ff_dim": True})
    assert config.dense_size == 7000


# GGUF files


def test_a_file_tells_layers_without_attention_by_their_key_heads(tmp_path: Path) -> None:
    heads = GgufArray(4, 3, b"".join(n.to_bytes(4, "little") for n in (0, 2, 0)))
    metadata: dict[str, object] = {
        "general.architecture": "lfm2moe",
        "lfm2moe.block_count": 3,
        "lfm2moe.vocab_size": 97,
        "lfm2moe.embedding_length": 64,
        "lfm2moe.context_length": 128,
        "lfm2moe.feed_forward_length": 96,
        "lfm2moe.expert_feed_forward_length": 32,
        "lfm2moe.expert_count": 8,
        "lfm2moe.expert_used_count": 2,
        "lfm2moe.expert_gating_func": 2,
        "lfm2moe.leading_dense_block_count": 1,
        "lfm2moe.attention.head_count": 4,
        "lfm2moe.attention.head_count_kv": heads,
        "lfm2moe.attention.layer_norm_rms_epsilon": 1e-5,
        "lfm2moe.shortconv.l_cache": 3,
    }
    shapes: dict[str, tuple[int, ...]] = {"blk.1.exp_probs_b.bias": (8,)}
    keys = GgufKeys("lfm2moe", metadata, shapes)
    found = read_config(gguf_architecture(metadata, keys).config(keys))
    assert [isinstance(layer.mixer, ShortConvSpec) for layer in found.layers] == [True, False, True]
    assert found.attention.num_kv_heads == 2 and found.moe_layers == (1, 2)
    assert found.moe.has_bias and found.moe.norm_topk_prob and found.tie_word_embeddings
    uneven = GgufArray(4, 3, b"".join(n.to_bytes(4, "little") for n in (0, 2, 4)))
    keys = GgufKeys("lfm2moe", {**metadata, "lfm2moe.attention.head_count_kv": uneven}, shapes)
    with pytest.raises(UnsupportedError, match="head_count_kv differs between layers"):
        gguf_architecture(metadata, keys).config(keys)


def test_transformers_reads_the_same_from_a_file(tmp_path: Path) -> None:
    """Its own reader of `lfm2` files has names, shapes and config of its own."""
    model = random_model("lfm2", 3, tie_word_embeddings=True, rope_parameters=None)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("lfm2")
        writer.add_token_merges(["a b"])
        writer.add_token_list(["a", "b", "ab", *(f"t{number}" for number in range(94))])

    write_gguf(tmp_path / "model.gguf", "lfm2", model, lambda name, shape: Type.F32, add)
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    ids = random_ids(0, 40)
    with torch.inference_mode():
        theirs = other(torch.tensor([ids])).logits[0]
    ours = logits(tmp_path / "model.gguf", ids, dtype="float32", context=64)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
