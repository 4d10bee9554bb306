"""The gated delta rule in plain torch: a single row, or a chunk of a prompt.

A value head has a state S [key_width, value_width]. With a row's query, key and value, its decay
e^g and its strength beta, all in float32:

  S = e^g S;  d = beta (v - S^T k);  S += k d^T;  out = S^T q

A chunk does the same in matrix products. Row i corrects what all rows before it have left: with G
the sum of g up to a row, the d of all rows solve a triangular system,

  (I + A) D = beta (V - e^G K S),  A_ij = beta_i e^(G_i - G_j) k_i k_j  for j < i
  out = e^G Q S + P D,             P_ij = e^(G_i - G_j) q_i k_j         for j <= i
  S = e^(G_last) S + (e^(G_last - G) K)^T D

and a single row is a chunk of one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.config import DeltaNetSpec
from lowtide.kernels.operands import DeltaRows, DeltaState, DeltaWeights
from lowtide.kernels.tiled_head import Run
from lowtide.memory.chunking import pieces
from lowtide.memory.workspace import Buffers

HEADS_TOGETHER = 8
"""Value heads in one product of a chunk. Fixed, because it may decide bits."""

_NORM_EPS = 1e-6  # of queries and keys, in every published model


class Heads(NamedTuple):
    """Operands of some value heads, in float32."""

    keys_queries: Tensor  # [heads, 2 * rows, key_width]: keys, then queries
    values: Tensor  # [heads, rows, value_width]; overwritten
    beta: Tensor  # [heads, rows]
    log_decay: Tensor  # [heads, rows]: the sum up to a row
    scores: Tensor  # [heads, 2 * rows, rows], scratch
    decay: Tensor  # [heads, rows, rows], scratch
    growth: Tensor  # [heads, rows], scratch
    rest: Tensor  # [heads, rows], scratch
    read: Tensor  # [heads, 2 * rows, value_width], scratch

    def part(self, heads: slice) -> Heads:
        return Heads(*(tensor[heads] for tensor in self))


class Prepare(Protocol):
    """Fill `keys_queries`, `values`, `beta` and `log_decay`, and the tail after the rows."""

    def __call__(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        before: Tensor,
        after: Tensor,
        heads: Heads,
        workspace: Buffers,
    ) -> None:
        """before, after: tails [kernel - 1, channels], of these rows and of the next ones."""
        ...


def prepare(
    rows: DeltaRows,
    weights: DeltaWeights,
    before: Tensor,
    after: Tensor,
    heads: Heads,
    workspace: Buffers,
) -> None:
    """Implement `Prepare` in torch."""
    with workspace.scope():
        mixed = _convolved(rows.mixed, weights, before, after, workspace)
        _fill_heads(heads, mixed, rows, weights, workspace)


def advance(
    rows: DeltaRows,
    weights: DeltaWeights,
    before: DeltaState,
    after: DeltaState,
    out: Tensor,
    workspace: Buffers,
    run: Run | None = None,
    prepare: Prepare = prepare,
) -> None:
    """Compute `Kernels.delta_chunk`, or without `run` one row of `Kernels.delta_steps`."""
    spec, num_rows = weights.spec, len(rows.mixed)
    with workspace.scope():
        heads = _take_heads(spec, num_rows, workspace)
        prepare(rows, weights, before.tail, after.tail, heads, workspace)
        parts = [slice(0, spec.value_heads)]
        if run is not None:
            parts = pieces(spec.value_heads, HEADS_TOGETHER)
        if num_rows > 1:  # torch solves in copies of the system and of its right side
            system = spec.value_heads * num_rows * (num_rows + spec.value_width)
            workspace.library("delta system", 2 * 4 * system)
        of_heads = out.transpose(0, 1)
        works = [
            partial(
                _advance_heads,
                heads.part(part),
                before.matrices[part],
                after.matrices[part],
                of_heads[part],
            )
            for part in parts
        ]
        if run is None:
            works[0]()
        else:
            run(works)


def _convolved(
    mixed: Tensor, weights: DeltaWeights, before: Tensor, after: Tensor, workspace: Buffers
) -> Tensor:
    """Compute silu of the causal convolution of mixed [rows, channels], in float32.

    before, after: the rows [kernel - 1, channels] that come before these, and before the next.
    """
    (num_rows, channels), kernel = mixed.shape, weights.spec.kernel
    window = workspace.take("delta window", (num_rows + kernel - 1, channels), torch.float32)
    window[: kernel - 1].copy_(before)
    window[kernel - 1 :].copy_(mixed)
    after.copy_(window[num_rows:])
    taps = workspace.take("delta taps", (kernel, channels), torch.float32)
    taps.copy_(weights.conv.view(channels, kernel).t())
    term, out = (
        workspace.take(name, (num_rows, channels), torch.float32)
        for name in ("delta term", "delta convolved")
    )
    torch.mul(window[:num_rows], taps[0], out=out)
    for tap in range(1, kernel):
        torch.mul(window[tap : tap + num_rows], taps[tap], out=term)
        out.add_(term)
    return F.silu(out, inplace=True)


def _take_heads(spec: DeltaNetSpec, num_rows: int, workspace: Buffers) -> Heads:
    num_heads = spec.value_heads

    def take(name: str, *shape: int) -> Tensor:
        return workspace.take(name, (num_heads, *shape), torch.float32)

    return Heads(
        take("delta keys", 2 * num_rows, spec.key_width),
        take("delta values", num_rows, spec.value_width),
        take("delta beta", num_rows),
        take("delta decays", num_rows),
        take("delta scores", 2 * num_rows, num_rows),
        take("delta pairs", num_rows, num_rows),
        take("delta growth", num_rows),
        take("delta rest", num_rows),
        take("delta read", 2 * num_rows, spec.value_width),
    )


def _fill_heads(
    heads: Heads, mixed: Tensor, rows: DeltaRows, weights: DeltaWeights, workspace: Buffers
) -> None:
    """Normalise queries and keys of mixed [rows, channels], and lay all out by value head."""
    spec, num_rows = weights.spec, len(mixed)
    num_heads, key_size = spec.value_heads, spec.key_size

    def take(name: str, *shape: int) -> Tensor:
        return workspace.take(name, shape, torch.float32)

    by_key_head = _by_key_head(heads.keys_queries, spec)
    query, key = (
        mixed[:, start : start + key_size].view(num_rows, spec.key_heads, spec.key_width)
        for start in (0, key_size)
    )
    for rows_of, x, scale in (
        (slice(0, num_rows), key, 1.0),
        (slice(num_rows, None), query, spec.key_width**-0.5),
    ):
        squares = take("delta squares", num_rows, spec.key_heads, spec.key_width)
        sums = take("delta sums", num_rows, spec.key_heads, 1)
        torch.mul(x, x, out=squares)
        torch.sum(squares, -1, keepdim=True, out=sums)
        x.mul_(sums.add_(_NORM_EPS).rsqrt_()).mul_(scale)
        by_key_head[:, :, rows_of].copy_(x.transpose(0, 1)[:, None])
        workspace.give_back(squares, sums)
    of_value = mixed[:, 2 * key_size :].view(num_rows, num_heads, spec.value_width)
    heads.values.copy_(of_value.transpose(0, 1))
    heads.beta.copy_(rows.beta.t()).sigmoid_()
    times = take("delta times", num_heads, num_rows)
    times.copy_(rows.time.t()).add_(weights.time_bias[:, None])
    torch.logaddexp(times, heads.log_decay.zero_(), out=times)  # softplus
    torch.cumsum(times.mul_(weights.decay[:, None]), 1, out=heads.log_decay)


def _by_key_head(x: Tensor, spec: DeltaNetSpec) -> Tensor:
    """View x [value_heads, ...] as [key_heads, value heads of each, ...]."""
    each = spec.value_heads // spec.key_heads
    if spec.is_tiled:
        return x.view(each, spec.key_heads, *x.shape[1:]).transpose(0, 1)
    return x.view(spec.key_heads, each, *x.shape[1:])


def _advance_heads(heads: Heads, before: Tensor, after: Tensor, out: Tensor) -> None:
    """Advance the states [heads, key_width, value_width]; out [heads, rows, value_width]."""
    keys_queries, values, beta, log_decay, scores, decay, growth, rest, read = heads
    num_rows = values.shape[1]
    keys = keys_queries[:, :num_rows]
    torch.bmm(keys_queries, before, out=read)
    torch.bmm(keys_queries, keys.transpose(1, 2), out=scores)
    torch.sub(log_decay[:, :, None], log_decay[:, None], out=decay)
    decay.exp_().tril_()  # above the diagonal the sums may be too large for an exponential
    system, seen = scores[:, :num_rows], scores[:, num_rows:]
    system.mul_(decay).mul_(beta[:, :, None])
    seen.mul_(decay)
    torch.exp(log_decay, out=growth)
    read[:, :num_rows].mul_(growth[:, :, None])
    read[:, num_rows:].mul_(growth[:, :, None])
    values.sub_(read[:, :num_rows]).mul_(beta[:, :, None])
    if num_rows > 1:
        torch.linalg.solve_triangular(
            system, values, upper=False, unitriangular=True, out=read[:, :num_rows]
        )
        values.copy_(read[:, :num_rows])
    attended = read[:, num_rows:]
    attended.baddbmm_(seen, values)
    out.copy_(attended)
    torch.sub(log_decay[:, -1:], log_decay, out=rest)
    values.mul_(rest.exp_()[:, :, None])
    torch.mul(before, growth[:, -1:, None], out=after)
    after.baddbmm_(keys.transpose(1, 2), values)
