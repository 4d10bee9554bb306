"""A layer's sum, of experts whose outputs are drawn: the same bits in tiles as one by one."""

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_runtime import EXECUTORS, SMALL_TILE, tile_of
from torch import Tensor

from lowtide.core import MoEShape, Step, StepKind
from lowtide.experts.registrar import ExpertRegistrar
from lowtide.experts.rows import LayerCall, Routing
from lowtide.experts.work import Work
from lowtide.kernels.reference import REFERENCE
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Registrar, Workspace
from lowtide.threads.executor import Executor

NUM_EXPERTS = 6


@pytest.mark.invariant
@examples(40)
@given(
    num_tokens=st.integers(1, 100),
    k=st.integers(1, NUM_EXPERTS),
    seed=st.integers(0, 10**6),
    executor=st.sampled_from(EXECUTORS),
)
def test_outputs_are_added_in_ascending_order_of_experts(
    num_tokens: int, k: int, seed: int, executor: Executor
) -> None:
    """One multiply and one add in float32 for each, whatever the tiles of a pass."""
    draw = torch.Generator().manual_seed(seed)
    # Over many magnitudes, so that another order has other bits.
    outputs = torch.randn(NUM_EXPERTS, num_tokens, 32, generator=draw)
    outputs *= 10 ** (6 * torch.rand(outputs.shape, generator=draw) - 3)
    rank = torch.rand(num_tokens, NUM_EXPERTS, generator=draw)
    experts = rank.topk(k).indices.sort().values
    routing = Routing(experts, torch.rand(experts.shape, generator=draw))
    assert torch.equal(summed(outputs, routing, executor), one_by_one(outputs, routing))


def summed(outputs: Tensor, routing: Routing, executor: Executor) -> Tensor:
    """Sum the experts' outputs [experts, tokens, hidden] as a layer does."""
    shape = MoEShape(1, NUM_EXPERTS, routing.experts.shape[1], outputs.shape[2], 16)
    x, out = torch.zeros(outputs.shape[1:]), torch.full(outputs.shape[1:], torch.nan)
    step, registrar = Step(StepKind.DENOISE, 0), Registrar()
    with tile_of(SMALL_TILE):
        ExpertRegistrar(shape).forward(LayerCall(0, x, routing, step, registrar, out))
        workspace = Workspace(Arena(registrar.arena_bytes).bytes)
        work = Work(LayerCall(0, x, routing, step, workspace, out), shape, REFERENCE)
        for tile in work.tiles():
            for expert in tile.rows.demanded:
                pairs = tile.rows.pairs(expert)
                work.buffers.parts[pairs] = outputs[expert, tile.rows.token_of[pairs]]
            work.add(tile, executor)
    return out


def one_by_one(outputs: Tensor, routing: Routing) -> Tensor:
    out = torch.zeros(outputs.shape[1:])
    for token, (experts, weights) in enumerate(zip(*routing, strict=True)):
        for expert, weight in sorted(zip(experts.tolist(), weights, strict=True)):
            out[token] = out[token] + outputs[expert, token] * weight
    return out
