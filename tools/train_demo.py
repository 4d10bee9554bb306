"""Train the two demo models of the package on Python source, on a CPU, in about two hours.

One Ling/LLaDA2 body (5.6M parameters, 32 experts) is trained twice over: first as a causal
language model (`autoregressive`), then, from those weights, as a block diffusion model
(`diffusion`).
Both are written as Hugging Face checkpoint folders that any loader of the real families reads.

    python tools/train_demo.py all --work /tmp/demo --ar-minutes 50 --diffusion-minutes 60
    python tools/train_demo.py evaluate --work /tmp/demo --model src/lowtide/demo/diffusion
    python tools/train_demo.py ar --work /tmp/many --tokenizer src/lowtide/demo/tokenizer.json \
        --experts 64 --expert-width 32 --experts-per-token 6

Nothing here is imported by the engine, and nothing of the engine is imported here: the model is
written a second time, for training, so the checkpoints also test the engine's own reading of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from lowtide.lab.demo_text import is_held_out

ENDOFTEXT, MASK, ROLE_END = 0, 1, 2
SPECIAL_TOKENS = ["<|endoftext|>", "<|mask|>", "<|role_end|>"]
MAX_SHARD_BYTES = 4_000_000
BLOCK = 32


# --- Corpus -------------------------------------------------------------------------------------

# Permissively licensed (BSD, MIT, Apache-2.0); the standard library is under the PSF licence.
PACKAGES = [
    *("rich", "typer", "click", "jinja2", "huggingface_hub", "numpy", "tokenizers", "safetensors"),
    *("fsspec", "packaging", "anyio", "filelock", "markdown_it", "networkx", "accelerate"),
    *("torch/nn", "torch/optim", "torch/utils"),
]
SKIPPED_FOLDERS = {"test", "tests", "testing", "_testing", "idlelib", "lib2to3", "site-packages"}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data", "_vendor", "ensurepip", "__pycache__", "_sources"}
MAX_FILE_BYTES = 250_000  # larger ones are tables


def source_files() -> Iterator[tuple[str, Path]]:
    """Each module's path relative to its import root, and where it lies."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    trees = [(stdlib, stdlib)] + [(packages, packages / name) for name in PACKAGES]
    for root, tree in trees:
        for path in sorted(tree.rglob("*.py")):
            relative = path.relative_to(root)
            is_test = path.name.startswith("test_") or path.name.endswith("_test.py")
            if not is_test and not SKIPPED_FOLDERS.intersection(relative.parts):
                yield relative.as_posix(), path


def read_corpus() -> dict[str, list[str]]:
    """Documents of the two splits; a text that occurs twice is kept once."""
    splits: dict[str, list[str]] = {"train": [], "held_out": []}
    seen: set[str] = set()
    for module, path in source_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if 100 < len(text) <= MAX_FILE_BYTES and text not in seen:
            seen.add(text)
            splits["held_out" if is_held_out(module) else "train"].append(text)
    return splits


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def prepare(work: Path, vocab_size: int, made: Path | None) -> dict[str, Tensor]:
    """The token streams {train, held_out}, made once and kept in the work folder.

    made: a tokenizer to use instead of one that is trained on the corpus.
    """
    stream_path = work / "tokens.safetensors"
    if stream_path.exists():
        return load_file(stream_path)
    splits = read_corpus()
    if made is None:
        tokenizer = train_tokenizer(splits["train"], vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(made))
    tokenizer.save(str(work / "tokenizer.json"))
    streams = {}
    for split, documents in splits.items():
        encoded = tokenizer.encode_batch(documents)
        ids = [token for document in encoded for token in [*document.ids, ENDOFTEXT]]
        streams[split] = torch.tensor(ids, dtype=torch.int32)
        num_bytes = sum(len(document.encode()) for document in documents)
        report(f"{split}: {len(documents)} files, {num_bytes:,} bytes, {len(ids):,} tokens")
    save_file(streams, stream_path)
    return streams


def sample_chunks(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, length] windows at random offsets."""
    starts = torch.randint(len(stream) - length, (count, 1), generator=generator)
    return stream[starts + torch.arange(length)].long()


# --- Model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    """Names of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    moe_intermediate_size: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


# Queries, keys, values [batch, seq, heads, head_dim] -> the attended values, likewise.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def masked_by(mask: Tensor) -> Attend:
    """True where a query [rows] sees a key [columns]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


class BiasedAttention(torch.autograd.Function):
    """Attention over [n, rows, dim] with an additive bias; on a CPU, SDPA trains half as fast."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        weights = torch.baddbmm(bias, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, weights = ctx.saved_tensors
        grad_weights = grad @ v.mT
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, q.dtype)
        grad_scores *= q.shape[-1] ** -0.5
        return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x [batch, seq, heads, head_dim]; trailing dims pass."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rope_tables(args: Args, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotary_dim = int(args.head_dim * args.partial_rotary_factor)
    exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
    angles = positions.float()[:, None] * args.rope_theta**-exponents  # [seq, rotary_dim / 2]
    return angles.cos().bfloat16()[:, None], angles.sin().bfloat16()[:, None]


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Matrix(nn.Module):
    """A weight without bias, kept in fp32 and applied in the dtype of its input."""

    def __init__(self, out_dim: int, in_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_dim, in_dim) * in_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.heads = (args.num_attention_heads, args.num_key_value_heads, args.num_key_value_heads)
        self.head_dim = args.head_dim
        self.query_key_value = Matrix(sum(self.heads) * args.head_dim, args.hidden_size)
        self.dense = Matrix(args.hidden_size, args.num_attention_heads * args.head_dim)
        self.query_layernorm = Norm(args.head_dim, args.rms_norm_eps)
        self.key_layernorm = Norm(args.head_dim, args.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, seq, _ = x.shape
        fused = self.query_key_value(x).view(batch, seq, sum(self.heads), self.head_dim)
        q, k, v = fused.split(self.heads, dim=2)
        q = rotate(self.query_layernorm(q), cos, sin)
        k = rotate(self.key_layernorm(k), cos, sin)
        group = self.heads[0] // self.heads[1]
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        out: Tensor = self.dense(attend(q, k, v).reshape(batch, seq, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Matrix(inner, hidden)
        self.up_proj = Matrix(inner, hidden)
        self.down_proj = Matrix(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class Dispatch(torch.autograd.Function):
    """Token rows -> expert slots.  A gather both ways: a slot has one token, a pair one slot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_pair)
        return x.index_select(0, token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot_of_pair,) = ctx.saved_tensors
        rows = grad.index_select(0, slot_of_pair.flatten())
        return rows.view(*slot_of_pair.shape, -1).sum(1), None, None


class Combine(torch.autograd.Function):
    """Expert slots -> sum over each token's pairs; the transpose of Dispatch."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token_of_slot: Tensor, slot_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_slot)
        rows = y.index_select(0, slot_of_pair.flatten())
        return rows.view(*slot_of_pair.shape, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # An empty slot receives token 0's gradient; its weight is 0, so nothing comes of it.
        (token_of_slot,) = ctx.saved_tensors
        return grad.index_select(0, token_of_slot), None, None


class Gate(nn.Module):
    """Sigmoid router with grouped top-k; the bias chooses experts and never weighs them."""

    expert_bias: Tensor
    hits: Tensor

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.weight = nn.Parameter(torch.randn(args.num_experts, args.hidden_size) * 0.02)
        self.register_buffer("expert_bias", torch.zeros(args.num_experts))
        self.register_buffer("hits", torch.zeros(args.num_experts), persistent=False)
        self.chosen: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        args = self.args
        scores = F.linear(x.float(), self.weight).sigmoid()  # [tokens, experts]
        with torch.no_grad():
            ranked = (scores + self.expert_bias).view(len(x), args.n_group, -1)
            groups = ranked.topk(2, dim=-1).values.sum(-1).topk(args.topk_group, dim=-1).indices
            kept = torch.zeros(len(x), args.n_group, dtype=torch.bool).scatter_(1, groups, True)
            ranked = ranked.masked_fill(~kept[..., None], -math.inf).flatten(1)
            chosen = ranked.topk(args.num_experts_per_tok, dim=-1).indices
            self.hits += torch.bincount(chosen.flatten(), minlength=args.num_experts)
            self.chosen = chosen
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * args.routed_scaling_factor
        return chosen, weights  # [tokens, k] twice

    def balance(self, rate: float) -> float:
        """Lower the bias of experts chosen too often since the last call, raise the others'.

        Returns the busiest expert's share over the mean share.
        """
        imbalance = float(self.hits.max() / self.hits.mean())
        self.expert_bias += rate * torch.sign(self.hits.mean() - self.hits)
        self.hits.zero_()
        return imbalance


class SparseMlp(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        hidden, inner, count = args.hidden_size, args.moe_intermediate_size, args.num_experts
        self.gate = Gate(args)
        self.shared_experts = Mlp(hidden, inner * args.num_shared_experts)
        self.gate_proj = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        self.up_proj = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, inner) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [tokens, hidden]
        chosen, weights = self.gate(tokens)
        out: Tensor = self.experts(tokens, chosen, weights) + self.shared_experts(tokens)
        return out.view_as(x)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Each expert's tokens laid in its own padded rows, so all experts are three products."""
        count = self.gate_proj.shape[0]
        token_of_slot, slot_of_pair = expert_slots(chosen, count)
        rows = Dispatch.apply(x, token_of_slot, slot_of_pair)  # type: ignore[no-untyped-call]
        rows = rows.view(count, -1, x.shape[-1])
        slot_weights = torch.zeros(len(token_of_slot))
        slot_weights = slot_weights.scatter(0, slot_of_pair.flatten(), weights.flatten())
        gate = torch.bmm(rows, self.gate_proj.to(x.dtype).mT)
        up = torch.bmm(rows, self.up_proj.to(x.dtype).mT)
        # Weighing the narrow inner rows equals weighing the outputs: down_proj is linear.
        inner = swiglu(gate, up) * slot_weights.to(x.dtype).view(count, -1, 1)
        rows = torch.bmm(inner, self.down_proj.to(x.dtype).mT).flatten(0, 1)
        out: Tensor = Combine.apply(rows, token_of_slot, slot_of_pair)  # type: ignore[no-untyped-call]
        return out


def expert_slots(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Where each (token, expert) pair lies among num_experts x capacity slots, and back."""
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    capacity = math.ceil(int(counts.max()) / 128) * 128  # few distinct shapes: kernels are cached
    order = flat.argsort(stable=True)
    first = counts.cumsum(0) - counts
    experts = flat[order]
    slots = experts * capacity + torch.arange(len(flat)) - first[experts]
    slot_of_pair = torch.empty_like(flat).scatter_(0, order, slots)
    token_of_slot = torch.zeros(num_experts * capacity, dtype=torch.long)
    token_of_slot.scatter_(0, slots, order // chosen.shape[1])
    return token_of_slot, slot_of_pair.view_as(chosen)


class Layer(nn.Module):
    def __init__(self, args: Args, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = Norm(args.hidden_size, args.rms_norm_eps)
        self.attention = Attention(args)
        is_dense = index < args.first_k_dense_replace
        self.mlp = Mlp(args.hidden_size, args.intermediate_size) if is_dense else SparseMlp(args)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Model(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.word_embeddings = nn.Parameter(torch.randn(args.vocab_size, args.hidden_size) * 0.1)
        self.layers = nn.ModuleList(Layer(args, i) for i in range(args.num_hidden_layers))
        self.norm = Norm(args.hidden_size, args.rms_norm_eps)
        self.lm_head = nn.Parameter(torch.randn(args.vocab_size, args.hidden_size) * 0.02)
        for name, weight in self.named_parameters():
            if name.endswith(("down_proj", "down_proj.weight", "dense.weight")):
                weight.data *= (2 * args.num_hidden_layers) ** -0.5

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [batch, seq, hidden]."""
        cos, sin = rope_tables(self.args, positions)
        x = F.embedding(tokens, self.word_embeddings).bfloat16()
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.lm_head).float()

    def gates(self) -> list[Gate]:
        return [module for module in self.modules() if isinstance(module, Gate)]


class HeadLoss(torch.autograd.Function):
    """Weighted cross entropy of lm_head by row chunks: the whole logit matrix never exists."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        narrow = head.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head)
        total = torch.zeros(())
        for rows in torch.arange(len(hidden)).split(1024):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = F.linear(hidden[part], narrow).float()
            picked = target[part, None]
            norm = logits.logsumexp(-1, keepdim=True)
            losses = (norm - logits.gather(1, picked)).squeeze(1)
            total += (losses * weight[part]).sum()
            logits.sub_(norm).exp_()
            logits.scatter_add_(1, picked, torch.full(picked.shape, -1.0))
            grad = logits.mul_(weight[part, None]).to(hidden.dtype)
            grad_hidden[part] = grad @ narrow
            grad_head += grad.mT @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_head * grad, None, None


def head_loss(hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    loss: Tensor = HeadLoss.apply(hidden, head, target, weight)  # type: ignore[no-untyped-call]
    return loss


# --- Objectives ---------------------------------------------------------------------------------


def ar_loss(model: Model, tokens: Tensor) -> Tensor:
    """Next-token loss.  tokens [batch, length + 1]."""
    inputs, target = tokens[:, :-1], tokens[:, 1:].flatten()
    hidden = model(inputs, torch.arange(inputs.shape[1]), causal).flatten(0, 1)
    weight = torch.full((len(target),), 1 / len(target))
    return head_loss(hidden, model.lm_head, target, weight)


def block_causal_mask(length: int, block: int) -> Tensor:
    blocks = torch.arange(length) // block
    return blocks[:, None] >= blocks[None, :]


def noisy_clean_mask(length: int, block: int, num_noisy: int) -> Tensor:
    """Attention over [noisy copies | clean]: a noisy block sees itself and earlier clean blocks."""
    blocks = torch.arange(length) // block
    earlier = blocks[:, None] > blocks[None, :]
    same = blocks[:, None] == blocks[None, :]
    size = (num_noisy + 1) * length
    mask = torch.zeros(num_noisy + 1, length, num_noisy + 1, length, dtype=torch.bool)
    for copy in range(num_noisy):
        mask[copy, :, copy] = same
        mask[copy, :, num_noisy] = earlier
    mask[num_noisy, :, num_noisy] = same | earlier
    return mask.view(size, size)


def noisy_clean_by_spans(block: int, num_noisy: int, span: int = BLOCK) -> Attend:
    """What noisy_clean_mask means, without the products it would discard.

    The queries of one span of all copies see that span of all copies, under the mask, and all of
    the earlier clean spans.
    """
    inside = noisy_clean_mask(span, block, num_noisy)

    def spans_of(x: Tensor) -> tuple[Tensor, ...]:  # each [batch * heads, copies, span, head_dim]
        x = x.transpose(1, 2).flatten(0, 1)
        return x.view(len(x), num_noisy + 1, -1, span, x.shape[-1]).unbind(2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        keys, values = spans_of(k), spans_of(v)
        for index, queries in enumerate(spans_of(q)):
            seen_k = [keys[index].flatten(1, 2), *(earlier[:, -1] for earlier in keys[:index])]
            seen_v = [values[index].flatten(1, 2), *(earlier[:, -1] for earlier in values[:index])]
            bias = torch.zeros(len(inside), len(inside) + index * span, dtype=q.dtype)
            bias[:, : len(inside)].masked_fill_(~inside, -1e4)
            out = BiasedAttention.apply(  # type: ignore[no-untyped-call]
                queries.flatten(1, 2), torch.cat(seen_k, dim=1), torch.cat(seen_v, dim=1), bias
            )
            outs.append(out.unflatten(1, (num_noisy + 1, span)))
        merged = torch.stack(outs, dim=2).flatten(1, 3)  # [batch * heads, seq, head_dim]
        return merged.view(len(q), -1, *merged.shape[1:]).transpose(1, 2)

    return attend


def draw_noise(batch: int, length: int, block: int, generator: torch.Generator) -> Tensor:
    """Which positions are masked [batch, length]: a uniform ratio per block.

    A quarter of the blocks are masked from some position on, as when decoding starts in a prompt.
    """
    shape = (batch, length // block, block)
    ratio = torch.rand(*shape[:2], 1, generator=generator)
    scattered = torch.rand(shape, generator=generator) < ratio
    suffix = torch.arange(block) >= (1 - ratio) * block
    is_suffix = torch.rand(*shape[:2], 1, generator=generator) < 0.25
    return torch.where(is_suffix, suffix, scattered).view(batch, length)


def diffusion_loss(
    model: Model, clean: Tensor, block: int, generator: torch.Generator, max_weight: float = 3.0
) -> Tensor:
    """Same-position loss at the masked rows of a noisy copy and of its complement.

    The two copies share one clean copy, and every token is a target exactly once.
    """
    batch, length = clean.shape
    masked = draw_noise(batch, length, block, generator)
    masked = torch.stack([masked, ~masked], dim=1)  # [batch, 2, length]
    noisy = torch.where(masked, MASK, clean[:, None])
    tokens = torch.cat([noisy.flatten(1), clean], dim=1)
    positions = torch.arange(length).repeat(3)
    hidden = model(tokens, positions, noisy_clean_by_spans(block, 2))[:, : 2 * length]
    rows = masked.flatten()
    per_block = masked.view(batch, 2, -1, block).float()
    weight = 1 / per_block.mean(-1, keepdim=True).clamp(min=1 / max_weight)
    weight = weight.expand_as(per_block).flatten()[rows]
    target = clean[:, None].expand(-1, 2, -1).flatten()[rows]
    hidden = hidden.flatten(0, 1)[rows]
    return head_loss(hidden, model.lm_head, target, weight / weight.sum())


def block_length(progress: float) -> int:
    """Blocks grow from the causal order of the first stage to the decoding block."""
    return 1 if progress < 0.06 else 4 if progress < 0.2 else BLOCK


# --- Optimiser ----------------------------------------------------------------------------------


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz towards the nearest semi-orthogonal matrices.  [n, rows <= cols]."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    return torch.Tensor.float(x)


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the rest; owns their moments, no schedule.

    Muon's steps are scaled to AdamW's usual size, so that one learning rate serves both.
    """

    def __init__(self, model: Model, weight_decay: float = 0.1) -> None:
        self.weights = dict(model.named_parameters())
        self.weight_decay = weight_decay
        self.moments = {n: torch.zeros_like(w.data) for n, w in self.weights.items()}
        self.by_shape: dict[tuple[int, int], list[str]] = {}
        self.adam: list[str] = []
        for name, weight in self.weights.items():
            if "layers" in name and weight.ndim > 1 and "gate.weight" not in name:
                rows, cols = sorted(weight.shape[-2:])
                self.by_shape.setdefault((rows, cols), []).append(name)
            else:
                self.adam.append(name)
        self.squares = {n: torch.zeros_like(self.weights[n].data) for n in self.adam}

    @torch.no_grad()
    def step(self, lr: float, count: int) -> None:
        """count is the number of this step, from 1."""
        grads = {n: w.grad for n, w in self.weights.items() if w.grad is not None}
        norms = torch.stack([g.norm() for g in grads.values()])
        scale = 1 / norms.norm().clamp(min=1.0)
        for grad in grads.values():
            grad.mul_(scale)
        for weight in self.weights.values():
            if weight.ndim > 1:
                weight.mul_(1 - lr * self.weight_decay)
        for shape, names in self.by_shape.items():
            self.muon_step(shape, names, grads, lr)
        for name in self.adam:
            self.adam_step(name, grads[name], lr, count)
        for weight in self.weights.values():
            weight.grad = None

    def muon_step(
        self, shape: tuple[int, int], names: list[str], grads: dict[str, Tensor], lr: float
    ) -> None:
        directions = []
        for name in names:
            moment = self.moments[name].lerp_(grads[name], 0.05)
            direction = grads[name].lerp(moment, 0.95)  # Nesterov
            is_wide = direction.shape[-1] == shape[1]
            directions.append((direction if is_wide else direction.mT).reshape(-1, *shape))
        updates = orthogonalise(torch.cat(directions)).split([len(d) for d in directions])
        for name, update in zip(names, updates, strict=True):
            weight = self.weights[name]
            update = update if weight.shape[-1] == shape[1] else update.mT
            weight.sub_(update.reshape(weight.shape), alpha=lr * 0.2 * math.sqrt(shape[1]))

    def adam_step(self, name: str, grad: Tensor, lr: float, count: int) -> None:
        moment = self.moments[name].lerp_(grad, 0.1)
        square = self.squares[name].lerp_(grad.square(), 0.05)
        spread = (square / (1 - 0.95**count)).sqrt_().add_(1e-8)
        self.weights[name].addcdiv_(moment, spread, value=-lr / (1 - 0.9**count))

    def state(self) -> dict[str, Tensor]:
        moments = {f"moments.{n}": t for n, t in self.moments.items()}
        return moments | {f"squares.{n}": t for n, t in self.squares.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


# --- Training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Steps and minutes of one stage; whichever is spent first ends it. 0 minutes is no limit."""

    steps: int
    minutes: float

    def progress(self, step: int, elapsed_s: float) -> float:
        timed = elapsed_s / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(step / self.steps, timed))


@dataclass(frozen=True)
class Recipe:
    seed: int
    lr: float
    context: int
    sequences: int  # in one step
    micro: int  # sequences in one pass
    warmup_steps: int = 50
    balance_rate: float = 2.0  # of the learning rate: the bias moves as fast as what it balances
    save_every_s: float = 300.0


class Stage:
    """One training stage: owns its state file and clock, knows no checkpoint format."""

    def __init__(self, kind: str, model: Model, recipe: Recipe, budget: Budget, work: Path) -> None:
        self.kind, self.model, self.recipe, self.budget = kind, model, recipe, budget
        self.optimizer = Optimizer(model)
        self.tensors_path = work / f"{kind}.state.safetensors"
        self.facts_path = work / f"{kind}.state.json"
        self.step, self.elapsed_s, self.imbalance = 0, 0.0, 1.0

    def resume(self) -> None:
        if not self.facts_path.exists():
            return
        facts = json.loads(self.facts_path.read_text())
        self.step, self.elapsed_s = facts["step"], facts["elapsed_s"]
        state = load_file(self.tensors_path)
        self.model.load_state_dict({n: state[f"model.{n}"] for n in self.model.state_dict()})
        self.optimizer.load(state)
        report(f"{self.kind}: resumed at step {self.step}")

    def save(self) -> None:
        state = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        partial = self.tensors_path.with_suffix(".partial")
        save_file(state | self.optimizer.state(), partial)
        partial.replace(self.tensors_path)
        facts = {"step": self.step, "elapsed_s": self.elapsed_s}
        self.facts_path.write_text(json.dumps(facts | {"recipe": asdict(self.recipe)}))

    def progress(self) -> float:
        return self.budget.progress(self.step, self.elapsed_s)

    def train(self, stream: Tensor) -> Iterator[None]:
        """Run to the end of the budget, yielding whenever the state was saved."""
        self.resume()
        saved_s, reported_s, reported_step, mean = self.elapsed_s, self.elapsed_s, self.step, 0.0
        while self.progress() < 1.0:
            start = time.monotonic()
            loss = self.train_step(stream)
            self.elapsed_s += time.monotonic() - start
            self.step += 1
            assert math.isfinite(loss), f"{self.kind} loss is {loss} at step {self.step}"
            mean += loss
            if self.elapsed_s - reported_s > 10:
                num_steps = self.step - reported_step
                self.report_progress(mean / num_steps, num_steps, self.elapsed_s - reported_s)
                reported_s, reported_step, mean = self.elapsed_s, self.step, 0.0
            if self.elapsed_s - saved_s > self.recipe.save_every_s:
                saved_s = self.elapsed_s
                self.save()
                yield
        self.save()
        yield

    def report_progress(self, loss: float, num_steps: int, spent_s: float) -> None:
        speed = num_steps * self.recipe.sequences * self.recipe.context / spent_s
        report(
            f"{self.kind} step {self.step} {self.progress():.1%} {self.elapsed_s / 60:.1f} min "
            f"loss {loss:.4f} imbalance {self.imbalance:.2f} {speed:,.0f} tokens/s"
        )

    def train_step(self, stream: Tensor) -> float:
        """One update.  Data and noise follow from seed and step, so a resume repeats them."""
        recipe, progress = self.recipe, self.progress()
        key = f"{recipe.seed}/{self.kind}/{self.step}"
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        length = recipe.context + (self.kind == "ar")
        chunks = sample_chunks(stream, recipe.sequences, length, generator)
        passes = chunks.split(recipe.micro)
        total = 0.0
        for tokens in passes:
            if self.kind == "ar":
                loss = ar_loss(self.model, tokens)
            else:
                loss = diffusion_loss(self.model, tokens, block_length(progress), generator)
            (loss / len(passes)).backward()
            total += loss.item() / len(passes)
        lr = recipe.lr * min(1.0, (self.step + 1) / recipe.warmup_steps) * (1 - progress)
        self.optimizer.step(lr, self.step + 1)
        gates = self.model.gates()
        self.imbalance = sum(gate.balance(recipe.balance_rate * lr) for gate in gates) / len(gates)
        return total


# --- Checkpoints --------------------------------------------------------------------------------


def checkpoint_config(args: Args, kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["BailingMoeV2ForCausalLM" if kind == "ar" else "LLaDA2MoeModelLM"],
        "model_type": "bailing_moe_v2" if kind == "ar" else "llada2_moe",
        **asdict(args),
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "eos_token_id": ENDOFTEXT,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": args.moe_intermediate_size,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "pad_token_id": ENDOFTEXT,
        "rope_scaling": None,
        "rotary_dim": int(args.head_dim * args.partial_rotary_factor),
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
    }
    if kind == "diffusion":
        config |= {"mask_token_id": MASK, "block_length": BLOCK}
    return dict(sorted(config.items()))


def published_tensors(model: Model) -> dict[str, Tensor]:
    """The names of the released checkpoints: one tensor per expert, bf16 but for the bias."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer, _, part = name.rpartition(".mlp.")
        if name == "lm_head":
            tensors["lm_head.weight"] = tensor.bfloat16()
        elif name == "word_embeddings":
            tensors["model.word_embeddings.weight"] = tensor.bfloat16()
        elif part in ("gate_proj", "up_proj", "down_proj"):
            for expert, weight in enumerate(tensor.bfloat16()):
                tensors[f"model.{layer}.mlp.experts.{expert}.{part}.weight"] = weight.clone()
        else:
            is_bias = name.endswith("expert_bias")
            tensors[f"model.{name}"] = tensor.clone() if is_bias else tensor.bfloat16()
    return tensors


def read_checkpoint(folder: Path) -> tuple[Model, str]:
    """The model of a folder that write_checkpoint wrote, and its kind."""
    config = json.loads((folder / "config.json").read_text())
    args = Args(**{name: config[name] for name in asdict(Args())})
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    model = Model(args)
    for name, tensor in model.state_dict().items():
        layer, _, part = name.rpartition(".mlp.")
        if name in ("lm_head", "word_embeddings"):
            source = tensors[f"model.{name}.weight".replace("model.lm_head", "lm_head")]
        elif part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.{layer}.mlp.experts"
            experts = range(args.num_experts)
            source = torch.stack([tensors[f"{prefix}.{e}.{part}.weight"] for e in experts])
        else:
            source = tensors[f"model.{name}"]
        tensor.copy_(source)
    return model, "diffusion" if config["model_type"] == "llada2_moe" else "ar"


def split_shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    header_bytes = 150_000
    shards: list[dict[str, Tensor]] = [{}]
    room = MAX_SHARD_BYTES - header_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room:
            shards.append({})
            room = MAX_SHARD_BYTES - header_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_checkpoint(model: Model, kind: str, tokenizer: Path, folder: Path) -> None:
    """A complete folder, moved into place only when all of it is written."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = published_tensors(model)
    shards = split_shards(tensors)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        shard_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, partial / shard_name, metadata={"format": "pt"})
        (partial / shard_name).chmod(0o644)  # save_file makes it private
        assert (partial / shard_name).stat().st_size <= MAX_SHARD_BYTES, shard_name
        weight_map |= dict.fromkeys(shard, shard_name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index_content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(partial / "model.safetensors.index.json", index_content)
    write_json(partial / "config.json", checkpoint_config(model.args, kind))
    ids = {"eos_token_id": ENDOFTEXT, "pad_token_id": ENDOFTEXT}
    write_json(partial / "generation_config.json", ids | {"do_sample": False})
    shutil.copy(tokenizer, partial / "tokenizer.json")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[ENDOFTEXT],
        "pad_token": SPECIAL_TOKENS[ENDOFTEXT],
        "mask_token": SPECIAL_TOKENS[MASK],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    write_json(partial / "tokenizer_config.json", tokenizer_config)
    replace_folder(partial, folder)


def replace_folder(new: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# --- Evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def next_token_metrics(model: Model, chunks: Tensor) -> dict[str, float]:
    correct, loss, count = 0, 0.0, 0
    for tokens in chunks.split(16):
        inputs, target = tokens[:, :-1], tokens[:, 1:]
        logits = model.logits(model(inputs, torch.arange(inputs.shape[1]), causal))
        correct += int((logits.argmax(-1) == target).sum())
        loss += float(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"))
        count += target.numel()
    return {"next_token_accuracy": correct / count, "next_token_loss": loss / count}


@torch.no_grad()
def masked_token_metrics(model: Model, chunks: Tensor) -> dict[str, float]:
    """Accuracy at the masked rows, each block seeing itself and the true earlier blocks."""
    length = chunks.shape[1]
    positions, attend = torch.arange(length).repeat(2), noisy_clean_by_spans(BLOCK, 1)
    metrics = {}
    for ratio in (0.15, 0.5, 0.9):
        generator = torch.Generator().manual_seed(0)
        correct, count = 0, 0
        for clean in chunks.split(16):
            masked = torch.rand(clean.shape, generator=generator) < ratio
            noisy = torch.where(masked, MASK, clean)
            hidden = model(torch.cat([noisy, clean], dim=1), positions, attend)[:, :length]
            correct += int((model.logits(hidden[masked]).argmax(-1) == clean[masked]).sum())
            count += int(masked.sum())
        metrics[f"masked_accuracy_{ratio}"] = correct / count
    return metrics


@torch.no_grad()
def decoding_metrics(
    model: Model, prompts: Tensor, num_blocks: int, threshold: float
) -> dict[str, float]:
    """Decode by the threshold rule; how alike is the routing of neighbouring steps of a block?"""
    cosines: list[Tensor] = []
    steps, tokens = 0, 0
    for prompt in prompts:
        canvas = prompt
        for _ in range(num_blocks):
            canvas = torch.cat([canvas, torch.full((BLOCK,), MASK)])
            attend = masked_by(block_causal_mask(len(canvas), BLOCK))
            hits: list[Tensor] = []
            while bool((canvas == MASK).any()):
                hidden = model(canvas[None], torch.arange(len(canvas)), attend)[0, -BLOCK:]
                hits.append(routing_counts(model))
                commit(canvas[-BLOCK:], model.logits(hidden), threshold)
            for before, after in zip(hits, hits[1:], strict=False):
                cosines.append(F.cosine_similarity(before, after, dim=-1))  # [sparse layers]
            steps += len(hits)
            tokens += BLOCK
    similarity = float(torch.stack(cosines).mean())
    return {"routing_step_cosine": similarity, "tokens_per_forward": tokens / steps}


def routing_counts(model: Model) -> Tensor:
    """Hits of the last block in the last forward [sparse layers, experts]."""
    counts = []
    for gate in model.gates():
        assert gate.chosen is not None
        chosen = gate.chosen[-BLOCK:].flatten()
        counts.append(torch.bincount(chosen, minlength=model.args.num_experts).float())
    return torch.stack(counts)


def commit(block: Tensor, logits: Tensor, threshold: float) -> None:
    """Write the masked positions surer than the threshold, at least the surest, into `block`."""
    logits[:, MASK] = -math.inf
    confidence, token = logits.softmax(-1).max(-1)
    confidence = confidence.masked_fill(block != MASK, -1.0)
    sure = confidence > threshold
    sure[confidence.argmax()] = True
    block[sure] = token[sure]


def evaluate(folder: Path, held_out: Tensor, context: int, num_chunks: int = 128) -> dict[str, Any]:
    """Print the metrics of a checkpoint folder as one JSON line and keep them beside the model."""
    model, kind = read_checkpoint(folder)
    generator = torch.Generator().manual_seed(0)
    metrics: dict[str, Any] = {"kind": kind, "held_out_tokens": num_chunks * context}
    if kind == "ar":
        chunks = sample_chunks(held_out, num_chunks, context + 1, generator)
        metrics |= next_token_metrics(model, chunks)
    else:
        chunks = sample_chunks(held_out, num_chunks, context, generator)
        metrics |= masked_token_metrics(model, chunks)
        metrics |= decoding_metrics(model, chunks[:16, : 3 * BLOCK], num_blocks=2, threshold=0.95)
    metrics = {n: round(v, 4) if isinstance(v, float) else v for n, v in metrics.items()}
    write_json(folder / "metrics.json", metrics)
    print(json.dumps(metrics), flush=True)
    return metrics


# --- Command line -------------------------------------------------------------------------------


def report(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def run_stage(options: argparse.Namespace, kind: str) -> None:
    args = Args(
        num_experts=options.experts,
        moe_intermediate_size=options.expert_width,
        num_experts_per_tok=options.experts_per_token,
    )
    streams = prepare(options.work, args.vocab_size, options.tokenizer)
    torch.manual_seed(options.seed)
    out: Path = options.work / "out"
    if kind == "ar":
        model, name = Model(args), "autoregressive"
        budget = Budget(options.ar_steps, options.ar_minutes)
    else:
        model, name = Model(args), "diffusion"
        state = load_file(options.work / "ar.state.safetensors")
        model.load_state_dict({n: state[f"model.{n}"] for n in model.state_dict()})
        budget = Budget(options.diffusion_steps, options.diffusion_minutes)
    num_weights = sum(weight.numel() for weight in model.parameters())
    report(f"{kind}: {num_weights:,} parameters, {budget}")
    recipe = Recipe(
        seed=options.seed,
        lr=options.lr if kind == "ar" else options.lr * options.diffusion_lr_scale,
        context=options.context,
        sequences=options.sequences,
        micro=options.micro,
    )
    stage = Stage(kind, model, recipe, budget, options.work)
    for _ in stage.train(streams["train"]):
        write_checkpoint(model, kind, options.work / "tokenizer.json", out / name)
    evaluate(out / name, streams["held_out"], options.context)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=["corpus", "ar", "diffusion", "evaluate", "all"])
    parser.add_argument("--work", type=Path, required=True, help="corpus, state and out/ lie here")
    parser.add_argument("--model", type=Path, help="what to evaluate; default both of out/")
    parser.add_argument("--tokenizer", type=Path, help="default: one is trained on the corpus")
    parser.add_argument("--experts", type=int, default=Args.num_experts, help="of a layer")
    parser.add_argument("--expert-width", type=int, default=Args.moe_intermediate_size)
    parser.add_argument("--experts-per-token", type=int, default=Args.num_experts_per_tok)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ar-steps", type=int, default=4000)
    parser.add_argument("--ar-minutes", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--diffusion-steps", type=int, default=4000)
    parser.add_argument("--diffusion-minutes", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--diffusion-lr-scale", type=float, default=0.75)
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--sequences", type=int, default=32, help="in one step")
    parser.add_argument("--micro", type=int, default=16, help="sequences in one pass")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    streams = prepare(options.work, Args().vocab_size, options.tokenizer)
    if options.command in ("ar", "all"):
        run_stage(options, "ar")
    if options.command in ("diffusion", "all"):
        run_stage(options, "diffusion")
    if options.command == "evaluate":
        out = options.work / "out"
        for folder in (
            [options.model] if options.model else [out / "autoregressive", out / "diffusion"]
        ):
            evaluate(folder, streams["held_out"], options.context)


if __name__ == "__main__":
    main()
