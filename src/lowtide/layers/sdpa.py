"""torch's scaled dot product attention: log-sum-exps and allocated bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scores(NamedTuple):
    """Treatment of a layer's scores. Windows and sinks are for causal attention alone."""

    scale: float | None = None  # by default head_dim ** -0.5
    window: int = 0  # positions that a row sees, including its own; 0: all
    # [heads] float32: a score for each head that takes its share of the softmax and adds nothing.
    sinks: Tensor | None = None

    @property
    def are_plain(self) -> bool:
        return not self.window and self.sinks is None


PLAIN = Scores()


def by_head(x: Tensor, kv_heads: int) -> Tensor:
    """View x [rows, heads, head_dim] as [kv_heads, group, rows, head_dim]."""
    rows, heads, head_dim = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)


def flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    is_causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run SDPA and return every row's log-sum-exp in float32 [batch, heads, rows].

    The kernels are called by name because `scaled_dot_product_attention` does not return that
    number. Outputs of queries that are not finite are not finite either; for keys see
    `spread_not_finite`.
    """
    if query.is_cuda:
        if mask is not None:
            mask = _with_aligned_rows(mask).expand(*query.shape[:3], -1)
        output, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, mask, True, 0.0, is_causal, scale=scale
        )
        log_sum = log_sum[:, :, : query.shape[2]]  # the kernel pads its rows
    else:
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    spread_not_finite(query, output)
    return output, log_sum


def spread_not_finite(source: Tensor, target: Tensor) -> None:
    """Set each head of `target` [..., dim] to NaN where `source` [..., dim] is not finite.

    torch's CPU kernel returns zeros if all scores are NaN, with fewer than 16 keys, or -infinity.
    NaN in a key's value or a query's output reaches the logits, where it is an error.
    """
    # Per head, since the sum over heads could exceed float16. Adding -0.0 times it changes nothing.
    target.add_(source.sum(-1, keepdim=True), alpha=-0.0)


def _with_aligned_rows(mask: Tensor) -> Tensor:
    """Copy a mask [rows, tokens] with rows aligned to 16 bytes, as CUDA's kernel requires."""
    num_tokens = mask.shape[1]
    return F.pad(mask, (0, -num_tokens % 8))[:, :num_tokens]


def sdpa_bytes(query: Tensor, keys: Tensor) -> int:
    """Bound the bytes that SDPA allocates on a CPU, with a group's heads as rows of a key head.

    They are its output, a log-sum-exp per row, tiles of scores, and for narrow types sometimes
    packed copies of the keys [kv_heads, tokens, head_dim] and values.
    """
    output_bytes: int = query.numel() * query.dtype.itemsize
    packed_bytes: int = 2 * keys.numel() * keys.dtype.itemsize if keys.dtype.itemsize < 4 else 0
    sums_bytes = 4 * (query.numel() // keys.shape[2])
    return output_bytes + sums_bytes + scores_bytes(query, keys) + packed_bytes


def scores_bytes(query: Tensor, keys: Tensor) -> int:
    """Bound the bytes of one thread's tiles: scores in two types, and float32 outputs.

    The CPU kernel takes 32, 64 or 256 rows at a time, by their number, and 512 keys.
    """
    kv_heads, _, head_dim = keys.shape
    rows = query.numel() // (kv_heads * head_dim)
    tile_rows = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return tile_rows * ((4 + query.dtype.itemsize) * 512 + 4 * head_dim + 16)
