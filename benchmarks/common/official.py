"""The published forwards of LLaDA, LLaDA-MoE and Dream, for a flat batch, in plain torch.

What a port to a serving engine has before its memory is planned: sequences of any lengths lie
behind each other without padding, every result is a new tensor of torch's own allocator, nothing
is computed in tiles, and logits of all rows exist in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lowtide.config import ModelConfig
from lowtide.families import families

Weights = dict[str, Tensor]
"""Tensors by their names in the checkpoint."""


def read_weights(folder: Path) -> Weights:
    """All tensors of a checkpoint, in memory of this process."""
    weights: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {name: tensor.clone() for name, tensor in load_file(path).items()}
    return weights


class Official(nn.Module):
    """The model. Knows one shape of each family: the published one."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        """config: of LLaDA, LLaDA-MoE or Dream; may have fewer layers than there are weights."""
        super().__init__()
        names = families()[config.family].model().names
        self.embedding = _parameter(weights[f"{names.embedding}.weight"])
        self.norm = RMSNorm(weights[f"{names.norm}.weight"], config.rms_norm_eps)
        self.head = _parameter(weights[f"{names.head}.weight"])
        self.layers = nn.ModuleList(_Layer(config, weights, i) for i in range(config.num_layers))
        rope = config.attention.rope
        self.head_dim, self.theta = config.attention.head_dim, rope.theta
        # LLaDA's `rope_full_precision`; the others have angles in the compute dtype.
        self.rotation_dtype = torch.float32 if config.family == "llada" else self.embedding.dtype

    def forward(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the logits [rows, vocab], in the compute dtype.

        token_ids: [rows] int64, sequences of `lengths` behind each other.
        """
        x = F.embedding(token_ids, self.embedding)
        cos, sin = self._rotation(lengths)
        for layer in self.layers:
            x = layer(x, cos, sin, lengths)
        return F.linear(self.norm(x), self.head)

    def _rotation(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[rows, 1, head_dim] each."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        positions = torch.cat([torch.arange(length, dtype=torch.float32) for length in lengths])
        angles = torch.outer(positions, 1.0 / self.theta**pairs)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(self.rotation_dtype), angles.sin().to(self.rotation_dtype)


class RMSNorm(nn.Module):
    """RMS norm in float32 that rounds before it multiplies by the weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = _parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class _Linear(nn.Module):
    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self.weight = _parameter(weights[f"{name}.weight"])
        bias = weights.get(f"{name}.bias")
        self.bias = None if bias is None else _parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], index: int) -> None:
        super().__init__()
        names, eps = families()[config.family].model().names, config.rms_norm_eps
        prefix = names.layer(index)
        self.attention_norm = RMSNorm(weights[f"{prefix}{names.attention_norm}.weight"], eps)
        self.attention = _Attention(config, weights, index)
        self.mlp_norm = RMSNorm(weights[f"{prefix}{names.mlp_norm}.weight"], eps)
        if config.experts is None:
            self.mlp: nn.Module = _MLP(weights, [prefix + name for name in names.mlp])
        else:
            self.mlp = _Experts(config, weights, f"{prefix}mlp.")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, lengths)
        return x + self.mlp(self.mlp_norm(x))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], index: int) -> None:
        super().__init__()
        spec, names = config.attention, families()[config.family].model().names
        prefix = names.layer(index)
        self.query, self.key, self.value = (_Linear(weights, prefix + name) for name in names.qkv)
        self.output = _Linear(weights, prefix + names.output)
        self.norms = None
        if spec.has_qk_norm:
            self.norms = nn.ModuleList(
                RMSNorm(weights[f"{prefix}self_attn.{part}_norm.weight"], config.rms_norm_eps)
                for part in "qk"
            )
        self.head_dim, self.group = spec.head_dim, spec.num_heads // spec.num_kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        query, key, value = (
            projection(x).view(x.shape[0], -1, self.head_dim)  # [rows, heads, head_dim]
            for projection in (self.query, self.key, self.value)
        )
        if self.norms is not None:
            query, key = self.norms[0](query), self.norms[1](key)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        if self.group > 1:
            key = key.repeat_interleave(self.group, dim=1)
            value = value.repeat_interleave(self.group, dim=1)
        parts = zip(*(rows.split(list(lengths)) for rows in (query, key, value)), strict=True)
        attended = [
            F.scaled_dot_product_attention(*(rows.transpose(0, 1)[None] for rows in part))[0]
            for part in parts
        ]
        whole = attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)
        return self.output(whole.transpose(0, 1).reshape(x.shape[0], -1))


class _MLP(nn.Module):
    def __init__(self, weights: Mapping[str, Tensor], names: Sequence[str]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (_Linear(weights, name) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Experts(nn.Module):
    """One after the other, each with its tokens gathered and its outputs added in place."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> None:
        super().__init__()
        self.top_k = config.moe.num_experts_per_token
        self.router = _Linear(weights, f"{prefix}gate")
        self.experts = nn.ModuleList(
            _MLP(weights, [f"{prefix}experts.{i}.{part}_proj" for part in ("gate", "up", "down")])
            for i in range(config.moe.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        shares, chosen = torch.topk(scores, self.top_k, dim=-1)  # not renormalised
        shares = shares.to(x.dtype)
        out = torch.zeros_like(x)
        is_chosen = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            rank, row = torch.where(is_chosen[i])
            out.index_add_(0, row, expert(x[row]) * shares[row, rank, None])
        return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [rows, heads, head_dim], pairs of a dimension and the one half a head on."""
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
