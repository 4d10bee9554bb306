"""Attention and routing in bfloat16 on a GPU, against float32 on the CPU; needs torch alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from computing import attention
from torch import Tensor

from lowtide.compute import Compute
from lowtide.kernels.choice import choose_kernels
from lowtide.layers.batch import Segment
from lowtide.layers.router import SigmoidRouter, SoftmaxRouter
from lowtide.memory.cuda_streams import device_pass
from lowtide.memory.kv_cache import KVCache, storage_shape
from lowtide.memory.workspace import Workspace
from lowtide.threads.executor import InlineExecutor

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2
"""Of the largest value; bfloat16 rounds probabilities and outputs."""


class Case(NamedTuple):
    num_rows: int
    first_position: int
    block_length: int = 1
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    window: int = 0
    has_sinks: bool = False


CASES = [
    Case(32, 96, block_length=32),
    Case(64, 32, block_length=32),  # the block before, and a new one
    Case(1, 300),
    Case(150, 0),
    Case(150, 77),
    Case(40, 300, window=100, has_sinks=True),
    Case(1, 300, heads=64, kv_heads=8, head_dim=64, window=128, has_sinks=True),
    Case(20, 100, kv_heads=1, head_dim=576),  # latents
]


def computing_on(device: str) -> Compute:
    workspace = Workspace(torch.empty(32 << 20, dtype=torch.uint8, device=device))
    kernels = choose_kernels("auto", torch.float32, torch.device(device))
    return Compute(InlineExecutor(), kernels, workspace, torch.device(device))


def attended(case: Case, device: str, dtype: torch.dtype) -> Tensor:
    """Return the attention of one sequence's rows, with everything before them cached."""
    draw = torch.Generator().manual_seed(0)
    num_tokens = case.first_position + case.num_rows
    query = torch.randn(case.num_rows, case.heads, case.head_dim, generator=draw)
    keys, values = torch.randn(2, num_tokens, case.kv_heads, case.head_dim, generator=draw)
    sinks = torch.randn(case.heads, generator=draw).to(device) if case.has_sinks else None
    # The same numbers everywhere: those of bfloat16.
    query, keys, values = (x.bfloat16().to(device, dtype) for x in (query, keys, values))
    shape = storage_shape(1, case.kv_heads, case.head_dim, num_tokens)
    cache = KVCache(torch.zeros(shape, dtype=dtype, device=device))
    kv, first = cache.allocate(num_tokens), case.first_position
    cache.write(0, kv, 0, keys[:first], values[:first])
    segment = Segment(0, case.num_rows, first, case.block_length, kv)
    out = torch.empty_like(query)
    attention(
        0,
        query,
        keys[first:],
        values[first:],
        [segment],
        cache,
        computing_on(device),
        out,
        window=case.window,
        sinks=sinks,
    )
    return out.float().cpu()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    with device_pass(), torch.inference_mode():
        wanted, found = attended(case, "cpu", torch.float32), attended(case, "cuda", dtype)
    tolerance = TOLERANCE if dtype == torch.bfloat16 else 1e-4
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("num_rows", [1, 33])
@pytest.mark.parametrize("kind", ["groups", "windows", "softmax"])
def test_routers_choose_the_same_on_a_gpu(kind: str, num_rows: int) -> None:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 256, generator=draw) / 16
    x, bias = torch.randn(num_rows, 256, generator=draw), torch.rand(64, generator=draw)
    chosen = []
    for device in ("cpu", "cuda"):
        cache = KVCache(torch.zeros(storage_shape(1, 1, 1, num_rows), device=device))
        segment = Segment(0, num_rows, 0, 1, cache.allocate(num_rows))
        there, compute = weight.to(device), computing_on(device)
        router: SigmoidRouter | SoftmaxRouter = SoftmaxRouter(compute, there, 6, True, num_groups=1)
        if kind != "softmax":
            capacity, num_groups = (16, 1) if kind == "windows" else (0, 8)
            groups = (num_groups, 4, capacity, 8)
            router = SigmoidRouter(compute, there, bias.to(device), 6, *groups, True, 2.5)
        chosen.append(router.route(x.to(device), [segment]))
    on_cpu, on_gpu = chosen
    assert torch.equal(on_gpu.experts.cpu(), on_cpu.experts)
    torch.testing.assert_close(on_gpu.weights.cpu(), on_cpu.weights, atol=1e-5, rtol=1e-4)
