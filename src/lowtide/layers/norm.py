"""RMS normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.kernels.products import REFERENCE, Products
from lowtide.kernels.routing import is_for_triton
from lowtide.memory.workspace import Buffers


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    workspace: Buffers,
    out: Tensor,
    products: Products = REFERENCE,
) -> None:
    """`out = weight * (x / rms(x))` over the last dimension; `out` may be `x`.

    x, out [rows, length] or [rows, heads, length].

    Normalises in float32, rounds to the compute dtype, then multiplies by `weight` (the order of
    Llama and of most families here), so bfloat16 results round where the original's do. A float32
    weight multiplies before that (gpt-oss).
    """
    few_rows = products.few_rows
    if few_rows is not None and weight.dtype == x.dtype and few_rows.takes(x):
        few_rows.rms_norm(x, weight, eps, out)
        return
    if is_for_triton(x):
        from lowtide.kernels import triton_rows

        triton_rows.rms_norm(x, weight, eps, out)
        return
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
