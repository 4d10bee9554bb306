"""Rotary position embedding on the first `rotary_dim` dimensions of each head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.config import Yarn
from lowtide.kernels.products import REFERENCE, Products
from lowtide.kernels.routing import is_for_triton
from lowtide.memory.workspace import Buffers


class Rotation(NamedTuple):
    """Cosines and sines of one batch's positions."""

    cos: Tensor  # [rows, 1, rotary_dim / 2]
    sin: Tensor  # [rows, 1, rotary_dim / 2]


class Rotary:
    """The angles of `rotary_dim / 2` pairs of dimensions, at any position.

    inv_freq_i = theta ** (-2 i / rotary_dim), perhaps stretched; angles are computed in float32.
    """

    def __init__(
        self, rotary_dim: int, theta: float, device: torch.device, yarn: Yarn | None = None
    ) -> None:
        self._half = rotary_dim // 2
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        self._inv_freq = 1.0 / (theta**exponents)  # [rotary_dim / 2]
        self._amplitude = 1.0
        if yarn is not None:
            self._inv_freq = _stretched(self._inv_freq, theta, yarn)
            self._amplitude = yarn.amplitude

    def rotation(self, positions: Tensor, dtype: torch.dtype, workspace: Buffers) -> Rotation:
        """For `positions` [rows] int64, in `dtype`; once per forward pass, shared by all layers."""
        workspace.library("rotation", 4 * 4 * positions.shape[0] * self._half)
        angles = positions[:, None, None].float() * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cos, sin = cos.mul_(self._amplitude), sin.mul_(self._amplitude)
        return Rotation(cos.to(dtype), sin.to(dtype))


def rotate(
    x: Tensor, rotation: Rotation, workspace: Buffers, products: Products = REFERENCE
) -> None:
    """Turns x [rows, heads, head_dim] in place: dimension i with dimension i + rotary_dim / 2.

    Computed in the compute dtype, as `rotation` has to be. Dimensions past rotary_dim pass through.
    """
    few_rows = products.few_rows
    if few_rows is not None and few_rows.takes(x):
        few_rows.rotate(x, rotation.cos, rotation.sin)
        return
    if is_for_triton(x):
        from lowtide.kernels import triton_rows

        triton_rows.rotate(x, rotation.cos, rotation.sin)
        return
    half = rotation.cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    shape = tuple(first.shape)
    with workspace.scope():
        first_sin = workspace.take("rotary first", shape, x.dtype)
        second_sin = workspace.take("rotary second", shape, x.dtype)
        torch.mul(first, rotation.sin, out=first_sin)
        torch.mul(second, rotation.sin, out=second_sin)
        first.mul_(rotation.cos).sub_(second_sin)
        second.mul_(rotation.cos).add_(first_sin)


def rotate_pairs(x: Tensor, rotation: Rotation, workspace: Buffers) -> None:
    """Turns x [rows, heads, rotary_dim] in place: dimension 2 i with dimension 2 i + 1.

    Computed in float32, as `rotation` has to be, and rounded once.
    """
    if is_for_triton(x):
        from lowtide.kernels import triton_rows

        triton_rows.rotate(x, rotation.cos, rotation.sin, is_interleaved=True)
        return
    even, odd = x[..., 0::2], x[..., 1::2]
    shape = tuple(even.shape)
    with workspace.scope():
        names = ("rotary even", "rotary odd", "rotary even fp32", "rotary odd fp32")
        turned_even, turned_odd, even_fp32, odd_fp32 = (
            workspace.take(name, shape, torch.float32) for name in names
        )
        even_fp32.copy_(even)
        odd_fp32.copy_(odd)
        torch.mul(even_fp32, rotation.cos, out=turned_even)
        torch.mul(odd_fp32, rotation.cos, out=turned_odd)
        even.copy_(turned_even.sub_(odd_fp32.mul_(rotation.sin)))
        odd.copy_(turned_odd.add_(even_fp32.mul_(rotation.sin)))


def _stretched(inv_freq: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """YaRN's frequencies: see `Yarn`. A ramp over the index of a pair joins the two ends."""
    half = inv_freq.shape[0]
    fast, slow = (_pair_of(beta, half, theta, yarn) for beta in (yarn.beta_fast, yarn.beta_slow))
    if yarn.is_rounded:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, 2 * half - 1)
    index = torch.arange(half, dtype=torch.float32, device=inv_freq.device)
    # 0: the frequency stays, 1: it is divided by the factor.
    ramp = ((index - first) / max(last - first, 1e-3)).clamp_(0, 1)
    return inv_freq / yarn.factor * ramp + inv_freq * (1 - ramp)


def _pair_of(num_turns: float, half: int, theta: float, yarn: Yarn) -> float:
    """The (fractional) pair that turns so often in the original positions."""
    turns_at_one = yarn.original_positions / (2 * math.pi * num_turns)
    return half * math.log(turns_at_one) / math.log(theta)
