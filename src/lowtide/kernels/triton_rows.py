"""Norms and rotations of rows in Triton, one launch each, or one for both.

torch takes six or eight. They round where their plain twins in `reference.py` do; the sum of a norm
has another order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WARP_ELEMENTS = 512  # 16 for each thread
_MAX_WARPS = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Compute `Kernels.rms_norm`; the elements of a row and its heads are adjacent."""
    length = weight.shape[0]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(length)
    _rms_norm[(x.shape[0], num_heads)](
        x,
        x.stride(0),
        weight,
        eps,
        out,
        out.stride(0),
        length,
        BLOCK=block,
        num_warps=min(_MAX_WARPS, triton.cdiv(block, _WARP_ELEMENTS)),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
    """Compute `Kernels.rotate`, or `rotate_pairs` if `is_interleaved`, bit for bit.

    x [rows, heads, at least rotary_dim], the elements of a head adjacent; cos, sin [rows, 1,
    rotary_dim / 2] contiguous.
    """
    half = cos.shape[-1]
    pair_step, partner = (2, 1) if is_interleaved else (1, half)
    # Each product is rounded before it is added: a fused one would differ in the last bit.
    _rotate[x.shape[:2]](
        x,
        x.stride(0),
        x.stride(1),
        cos,
        sin,
        half,
        pair_step,
        partner,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
        enable_fp_fusion=False,
    )


def normalise_and_rotate(
    x: Tensor,
    num_queries: int,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Apply `rms_norm` to every head, then `rotate`, in place.

    The first `num_queries` heads are normalised by `query_weight`, the others by `key_weight`. x
    [rows, heads, head_dim], heads adjacent; query_weight, key_weight [head_dim]; cos, sin [rows, 1,
    rotary_dim / 2] contiguous.
    """
    num_rows, num_heads, head_dim = x.shape
    half = cos.shape[-1]
    _normalise_and_rotate[(num_rows, num_heads)](
        x,
        x.stride(0),
        num_queries,
        query_weight,
        key_weight,
        eps,
        cos,
        sin,
        half,
        head_dim,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        num_warps=1,
        enable_fp_fusion=False,
    )


@triton.jit
def _rms_norm(x, x_stride, weight, eps, out, out_stride, length, BLOCK: tl.constexpr):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * length
    columns = tl.arange(0, BLOCK)
    is_column = columns < length
    value = tl.load(x + row * x_stride + start + columns, mask=is_column, other=0.0)
    value = value.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / length + eps)
    factor = tl.load(weight + columns, mask=is_column, other=0.0)
    scaled = _scaled(value, factor, out.dtype.element_ty)
    target = out + row * out_stride + start + columns
    tl.store(target, scaled.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _rotate(x, row_stride, head_stride, cos, sin, half, pair_step, partner, BLOCK: tl.constexpr):
    """Rotate element `i * pair_step` with the one `partner` later; each step in cos's dtype."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    is_pair = i < half
    dtype = cos.dtype.element_ty
    firsts = x + row * row_stride + tl.program_id(1) * head_stride + i * pair_step
    first = tl.load(firsts, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(firsts + partner, mask=is_pair, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * half + i, mask=is_pair, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * half + i, mask=is_pair, other=0.0).to(tl.float32)
    _store_turned(firsts, firsts + partner, first, second, cosine, sine, is_pair, dtype)


@triton.jit
def _normalise_and_rotate(
    x,
    row_stride,
    num_queries,
    query_weight,
    key_weight,
    eps,
    cos,
    sin,
    half,
    head_dim,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Normalise and rotate one head: its two rotated halves, and the rest of it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, BLOCK_HALF), 2 * half + tl.arange(0, BLOCK_REST)
    is_pair, is_rest = i < half, j < head_dim
    dtype = x.dtype.element_ty
    start = x + row * row_stride + head * head_dim
    first = tl.load(start + i, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(start + half + i, mask=is_pair, other=0.0).to(tl.float32)
    rest = tl.load(start + j, mask=is_rest, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, 0) + tl.sum(second * second, 0) + tl.sum(rest * rest, 0)
    inverse = tl.rsqrt(squares / head_dim + eps)
    weight = query_weight
    if head >= num_queries:
        weight = key_weight
    first = _scaled(first * inverse, tl.load(weight + i, mask=is_pair, other=0.0), dtype)
    second = _scaled(second * inverse, tl.load(weight + half + i, mask=is_pair, other=0.0), dtype)
    rest = _scaled(rest * inverse, tl.load(weight + j, mask=is_rest, other=0.0), dtype)
    cosine = tl.load(cos + row * half + i, mask=is_pair, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * half + i, mask=is_pair, other=0.0).to(tl.float32)
    _store_turned(start + i, start + half + i, first, second, cosine, sine, is_pair, dtype)
    tl.store(start + j, rest.to(dtype), mask=is_rest)


@triton.jit
def _scaled(value, weight, dtype: tl.constexpr):
    # Rounded to the weight's type first: to the compute dtype, or, with a float32 weight, not yet.
    product = value.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    return product.to(dtype).to(tl.float32)


@triton.jit
def _store_turned(firsts, seconds, first, second, cosine, sine, mask, dtype: tl.constexpr):
    first_cosine = (first * cosine).to(dtype).to(tl.float32)
    second_cosine = (second * cosine).to(dtype).to(tl.float32)
    first_sine = (first * sine).to(dtype).to(tl.float32)
    second_sine = (second * sine).to(dtype).to(tl.float32)
    tl.store(firsts, (first_cosine - second_sine).to(firsts.dtype.element_ty), mask=mask)
    tl.store(seconds, (second_cosine + first_sine).to(firsts.dtype.element_ty), mask=mask)
