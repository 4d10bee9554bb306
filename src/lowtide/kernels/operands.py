"""Arguments and results of the kernels, common to all variants."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowtide.config import DeltaNetSpec
from lowtide.formats import StoredMatrix

Matrix = Tensor | StoredMatrix
"""Matrix [out, in], in the compute dtype or as its format stores it."""


def rows_of(matrix: Matrix, features: slice) -> Matrix:
    """Return some of a matrix's rows, as a view."""
    return matrix[features] if isinstance(matrix, Tensor) else matrix.rows(features)


class ExpertWeights(NamedTuple):
    """Matrices of one expert."""

    gate: Matrix  # [expert_size, hidden]
    up: Matrix  # [expert_size, hidden]
    down: Matrix  # [hidden, expert_size]


class ClampedWeights(NamedTuple):
    """Matrices of one gpt-oss expert: biased, and gated by `reference.clamped_swiglu`."""

    gate: Matrix  # [expert_size, hidden]
    up: Matrix  # [expert_size, hidden]
    down: Matrix  # [hidden, expert_size]
    gate_bias: Tensor  # [expert_size]
    up_bias: Tensor  # [expert_size]
    down_bias: Tensor  # [hidden]


class GeluWeights(NamedTuple):
    """Matrices of one expert whose gate is a GELU, in its form by tanh."""

    gate: Matrix  # [expert_size, hidden]
    up: Matrix  # [expert_size, hidden]
    down: Matrix  # [hidden, expert_size]


class SquaredWeights(NamedTuple):
    """Matrices of one expert without a gate: down(relu(up x) ** 2)."""

    up: Matrix  # [expert_size, hidden]
    down: Matrix  # [hidden, expert_size]


AnyWeights = ExpertWeights | ClampedWeights | GeluWeights | SquaredWeights
"""Matrices of one expert, whose class tells what is computed with them."""


class HeadNorms(NamedTuple):
    """Weights of the RMS norms of queries and keys before rotation.

    [head_dim] if each head is normalised by itself, or the width of all heads together.
    """

    query: Tensor
    key: Tensor


class Rotation(NamedTuple):
    """Cosines and sines of one batch's positions."""

    cos: Tensor  # [rows, 1, rotary_dim / 2]
    sin: Tensor  # [rows, 1, rotary_dim / 2]


class ExpertChoice(NamedTuple):
    """Rule by which experts are chosen by their logits, and weighted."""

    num_chosen: int
    is_sigmoid: bool  # scores by sigmoid, rounded to the logits' dtype, else by softmax
    normalise: bool
    of_chosen: bool = False  # logits rank; weights are a softmax of the chosen alone, rounded
    rounds_weights: bool = False  # to the logits' dtype
    num_groups: int = 1
    num_groups_kept: int = 1
    num_group_best: int = 1  # experts, 1 or 2, whose sum is their group's rank
    scaling_factor: float = 1.0
    sum_epsilon: float = 0.0  # added to the sum that normalised weights are divided by


class SortedPairs(NamedTuple):
    """(token, expert) pairs of a step, sorted by expert, tokens ascending within one."""

    token_of: Tensor  # [tokens * k] int64: the token of each sorted pair
    part_of: Tensor  # [tokens, k] int64: where a token's j-th pair went
    counts: Tensor  # [num_experts] int64: pairs of each expert


class SlotPlaces(NamedTuple):
    """Addresses of experts' weights: those of slot s are `s * slot_bytes` beyond these."""

    gate: int
    up: int
    down: int
    slot_bytes: int
    gate_bias: int | None = None  # of `ClampedWeights` all three
    up_bias: int | None = None
    down_bias: int | None = None


class DeltaWeights(NamedTuple):
    """Weights of a gated delta-net after its projections, in float32."""

    spec: DeltaNetSpec
    conv: Tensor  # [channels, .., kernel]: queries', keys' and values' channels, oldest row first
    decay: Tensor  # [value_heads], negative: -exp(A)
    time_bias: Tensor  # [value_heads]


class DeltaRows(NamedTuple):
    """Consecutive rows of a sequence, as a gated delta-net projects them."""

    mixed: Tensor  # [rows, channels]: all heads' queries, keys, values, before the convolution
    beta: Tensor  # [rows, value_heads]: strength, before its sigmoid
    time: Tensor  # [rows, value_heads]: how much decays, before its bias and softplus


class DeltaState(NamedTuple):
    """A gated delta-net's state of a sequence."""

    tail: Tensor  # [kernel - 1, channels]: `mixed` of the last rows
    matrices: Tensor  # [value_heads, key_width, value_width] float32
