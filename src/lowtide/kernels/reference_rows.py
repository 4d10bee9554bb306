"""Norms and rotations of rows in plain torch, a few rows at a time.

The plan of every pass includes their scratch, though kernels that keep a row in registers never use
it; a few rows at a time keep it small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lowtide.kernels.operands import Rotation
from lowtide.memory.chunking import pieces
from lowtide.memory.workspace import Buffers

SCRATCH_ROWS = 32
"""Rows whose scratch exists at once.

Fewer than any pass that a template is fitted to has, so longer passes need the same.
"""


def rms_norm(x: Tensor, weight: Tensor, eps: float, workspace: Buffers, out: Tensor) -> None:
    """Compute `Kernels.rms_norm`."""
    _by_few(partial(_normalise, weight, eps, workspace), x, out)


def rotate(x: Tensor, rotation: Rotation, workspace: Buffers) -> None:
    """Compute `Kernels.rotate`."""
    half = rotation.cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    is_narrow = rotation.cos.dtype == x.dtype
    turn = partial(_rotate_parts if is_narrow else _rotate_parts_in_float32, workspace)
    _by_few(turn, first, second, *rotation)


def rotate_pairs(x: Tensor, rotation: Rotation, workspace: Buffers) -> None:
    """Compute `Kernels.rotate_pairs`."""
    _by_few(partial(_rotate_parts_in_float32, workspace), x[..., 0::2], x[..., 1::2], *rotation)


def silu_weigh(x: Tensor, gates: Tensor, workspace: Buffers) -> None:
    """Compute `x *= silu(gates)` in float32, rounded once."""
    _by_few(partial(_silu_weigh, workspace), x, gates)


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor, workspace: Buffers) -> None:
    """Compute `Kernels.multiply_heads`."""
    num_rows, num_heads, _ = x.shape
    with workspace.scope():
        heads_first = workspace.take("heads", (num_heads, num_rows, x.shape[2]), x.dtype)
        product = workspace.take("product", (num_heads, num_rows, out.shape[2]), x.dtype)
        # For some dtypes bmm makes a contiguous copy of the weight.
        workspace.library("weight copy", weight.numel() * weight.dtype.itemsize)
        heads_first.copy_(x.transpose(0, 1))
        torch.bmm(heads_first, weight, out=product)
        out.copy_(product.transpose(0, 1))


def _by_few(run: Callable[..., None], *rows: Tensor) -> None:
    """Call `run` for `SCRATCH_ROWS` at a time; no row's bits depend on the others."""
    num_rows = rows[0].shape[0]
    if num_rows <= SCRATCH_ROWS:
        run(*rows)
        return
    parts = pieces(num_rows, SCRATCH_ROWS)
    for part in parts[:1] if rows[0].is_meta else parts:  # the first has the most
        run(*(tensor[part] for tensor in rows))


def _normalise(weight: Tensor, eps: float, workspace: Buffers, x: Tensor, out: Tensor) -> None:
    shape = tuple(x.shape)
    with workspace.scope():
        x_fp32 = workspace.take("norm fp32", shape, torch.float32)
        squares = workspace.take("norm squares", shape, torch.float32)
        x_fp32.copy_(x)
        torch.mul(x_fp32, x_fp32, out=squares)
        workspace.library("norm variance", 4 * 4 * (x.numel() // shape[-1]))
        variance = squares.mean(-1, keepdim=True)
        x_fp32.mul_(torch.rsqrt(variance.add_(eps)))
        if weight.dtype == torch.float32:
            out.copy_(x_fp32.mul_(weight))
        else:
            out.copy_(x_fp32)
            out.mul_(weight)


def _silu_weigh(workspace: Buffers, x: Tensor, gates: Tensor) -> None:
    with workspace.scope():
        gates_fp32 = workspace.take("gates fp32", tuple(x.shape), torch.float32)
        product = workspace.take("gated fp32", tuple(x.shape), torch.float32)
        torch.nn.functional.silu(gates_fp32.copy_(gates), inplace=True)
        x.copy_(product.copy_(x).mul_(gates_fp32))


def _rotate_parts(
    workspace: Buffers, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate halves [rows, heads, rotary_dim / 2] in place, in their own dtype."""
    shape = tuple(first.shape)
    with workspace.scope():
        first_sin = workspace.take("rotary first", shape, first.dtype)
        second_sin = workspace.take("rotary second", shape, first.dtype)
        torch.mul(first, sin, out=first_sin)
        torch.mul(second, sin, out=second_sin)
        first.mul_(cos).sub_(second_sin)
        second.mul_(cos).add_(first_sin)


def _rotate_parts_in_float32(
    workspace: Buffers, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate pairs [rows, heads, rotary_dim / 2] in place; cos and sin are float32."""
    shape = tuple(first.shape)
    with workspace.scope():
        names = ("rotary first", "rotary second", "rotary first fp32", "rotary second fp32")
        turned_first, turned_second, first_fp32, second_fp32 = (
            workspace.take(name, shape, torch.float32) for name in names
        )
        first_fp32.copy_(first)
        second_fp32.copy_(second)
        torch.mul(first_fp32, cos, out=turned_first)
        torch.mul(second_fp32, cos, out=turned_second)
        first.copy_(turned_first.sub_(second_fp32.mul_(sin)))
        second.copy_(turned_second.add_(first_fp32.mul_(sin)))
