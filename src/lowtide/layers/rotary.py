"""Rotary position embedding on the first `rotary_dim` dimensions of each head."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lowtide.config import Rope, Yarn
from lowtide.kernels.operands import Rotation
from lowtide.memory.workspace import TILE_ROWS, Buffers


class Rotary:
    """Angles of `rotary_dim / 2` pairs of dimensions at any position.

    inv_freq_i = theta ** (-2 i / rotary_dim), perhaps stretched; angles are computed in float32.
    """

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        device: torch.device,
        yarn: Yarn | None = None,
        divisors: tuple[float, ...] = (),
    ) -> None:
        """divisors: of the frequencies, one for all or one per pair."""
        self._half = rotary_dim // 2
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        self._inv_freq = 1.0 / (theta**exponents)  # [rotary_dim / 2]
        self._amplitude = 1.0
        if divisors:
            self._inv_freq /= torch.tensor(divisors, dtype=torch.float32, device=device)
        if yarn is not None:
            self._inv_freq = _stretched(self._inv_freq, theta, yarn)
            self._amplitude = yarn.amplitude

    def rotation(self, positions: Tensor, dtype: torch.dtype, workspace: Buffers) -> Rotation:
        """Return the rotation of `positions` [rows] int64, in `dtype`."""
        workspace.library("rotation", 4 * 4 * positions.shape[0] * self._half)
        angles = positions[:, None, None].float() * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cos, sin = cos.mul_(self._amplitude), sin.mul_(self._amplitude)
        return Rotation(cos.to(dtype), sin.to(dtype))


class Rotations:
    """Rotations of one pass's rows, by rotary embedding, computed once and shared by all layers.

    In a long pass they are recomputed per tile and layer, the cheapest part of a layer.
    """

    def __init__(
        self,
        rotaries: Mapping[Rope, Rotary],
        positions: Tensor,
        dtype: torch.dtype,
        workspace: Buffers,
    ) -> None:
        """rotaries: of all rotary embeddings that layers have; positions: [rows] int64."""
        self._rotaries = rotaries
        self._positions = positions
        self._dtype = dtype
        self._workspace = workspace
        self._shared: dict[Rope, Rotation] = {}
        if len(positions) <= TILE_ROWS:
            for rope, rotary in rotaries.items():
                self._shared[rope] = rotary.rotation(positions, dtype, workspace)

    def whole(self, rope: Rope) -> Rotation:
        """Return the rotation of all rows."""
        return self.of(rope, slice(0, self._positions.shape[0]))

    def of(self, rope: Rope, rows: slice) -> Rotation:
        """Return the rotation of a tile's rows.

        A short pass is one tile; in a long one the result lives until the enclosing scope ends.
        """
        if rope in self._shared:
            return self._shared[rope]
        rotary = self._rotaries[rope]
        return rotary.rotation(self._positions[rows], self._dtype, self._workspace)


def _stretched(inv_freq: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """Compute YaRN's frequencies (see `Yarn`), with a ramp over pairs between its two ends."""
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
    """Return the (fractional) pair that makes `num_turns` turns in the original positions."""
    turns_at_one = yarn.original_positions / (2 * math.pi * num_turns)
    return half * math.log(turns_at_one) / math.log(theta)
