"""Norms, rotations and routers in Triton against the plain ones: here, or a GPU with `-m gpu`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from computing import randn

pytest.importorskip("triton")

import torch
from computing import on_this_thread
from torch import Tensor
from triton_places import places

from lowtide.kernels import triton_routing
from lowtide.kernels.operands import HeadNorms
from lowtide.kernels.reference import Kernels
from lowtide.kernels.triton_kernels import TritonKernels
from lowtide.layers.rotary import Rotary
from lowtide.layers.router import SigmoidRouter, SoftmaxRouter, TopSoftmaxRouter
from lowtide.memory.workspace import Workspace

# Of the largest output. The interpreter cuts off where a GPU rounds to bfloat16.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def workspace(device: str) -> Workspace:
    return Workspace(torch.empty(128 << 20, dtype=torch.uint8, device=device))


class OneOrder(Kernels):
    """Plain, with the one order of equal ranks that Triton has."""

    def top_experts(self, rank: Tensor, num_chosen: int) -> Tensor:
        return triton_routing.top_experts(rank, num_chosen)


PLAIN, TRITON = OneOrder(), TritonKernels()


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


# Norms: [rows, length] or [rows, heads, length]; at most 64 programs per launch

SMALL_ROWS = [(7, 48), (1, 1), (3, 2050), (5, 3, 16), (1, 2, 128)]
LARGE_ROWS = [(32, 2048), (4096, 2048), (33, 7168), (517, 20, 128)]


@pytest.mark.parametrize(("device", "shape"), places(SMALL_ROWS, LARGE_ROWS), ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norms_equal_the_plain_ones(
    device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    # Rows of a wider buffer, as queries and keys are.
    wide = randn(shape[0], *shape[1:-1], 3 * shape[-1], seed=0, device=device, dtype=dtype) * 3
    x = wide.view(shape[0], -1)[:, : wide[0].numel() // 3].view(shape)
    for weight_dtype in (dtype, torch.float32):
        weight = randn(shape[-1], seed=1, device=device, dtype=weight_dtype)

        def layer(kernels: Kernels, weight: Tensor = weight) -> Tensor:
            out = torch.empty_like(x)
            kernels.rms_norm(x, weight, 1e-5, workspace(device), out)
            return out

        plain, found = layer(PLAIN), layer(TRITON)
        assert is_close(found.float(), plain.float(), TOLERANCE[dtype])
        in_place = x.clone()
        TRITON.rms_norm(in_place, weight, 1e-5, workspace(device), in_place)
        assert torch.equal(in_place, found)


# Rotations


class Turn(NamedTuple):
    rows: int
    heads: int
    head_dim: int
    rotary_dim: int


SMALL_TURNS = [Turn(9, 3, 20, 12), Turn(1, 1, 2, 2), Turn(3, 8, 64, 64), Turn(8, 2, 16, 8)]
LARGE_TURNS = [Turn(32, 20, 128, 64), Turn(517, 36, 128, 128), Turn(33, 128, 192, 64)]


@pytest.mark.parametrize(("device", "turn"), places(SMALL_TURNS, LARGE_TURNS), ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotations_have_the_bits_of_the_plain_ones(
    device: str, turn: Turn, dtype: torch.dtype
) -> None:
    shape = (turn.rows, turn.heads, turn.head_dim)
    angles = Rotary(turn.rotary_dim, 1e4, torch.device(device))
    positions = 37 * torch.arange(turn.rows, device=device)

    def rotated(kernels: Kernels, is_interleaved: bool, angles_dtype: torch.dtype) -> Tensor:
        x = randn(*shape, seed=0, device=device, dtype=dtype)
        buffers = workspace(device)
        rotation = angles.rotation(positions, angles_dtype, buffers)
        if is_interleaved:
            # The last dimensions of each head, as a latent's are.
            kernels.rotate_pairs(x[..., -turn.rotary_dim :], rotation, buffers)
        else:
            kernels.rotate(x, rotation, buffers)
        return x

    for way in ((False, dtype), (False, torch.float32), (True, torch.float32)):
        plain, found = (rotated(kernels, *way) for kernels in (PLAIN, TRITON))
        if dtype == torch.bfloat16 and device == "cpu":
            assert is_close(found.float(), plain.float(), TOLERANCE[dtype])
        else:
            assert torch.equal(found, plain)


@pytest.mark.parametrize(("device", "turn"), places(SMALL_TURNS, LARGE_TURNS), ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_both_at_once_equal_one_after_the_other(
    device: str, turn: Turn, dtype: torch.dtype
) -> None:
    """Norm and rotation, queries' and keys' weights apart."""
    num_queries = 2 * turn.heads // 3
    norms = HeadNorms(
        *(randn(turn.head_dim, seed=seed, device=device, dtype=dtype) for seed in (1, 2))
    )
    angles, buffers = Rotary(turn.rotary_dim, 1e4, torch.device(device)), workspace(device)
    rotation = angles.rotation(37 * torch.arange(turn.rows, device=device), dtype, buffers)
    # Values lie beside them, and stay.
    qkv = randn(turn.rows, turn.heads + 1, turn.head_dim, seed=0, device=device, dtype=dtype)
    expected = qkv.clone()
    for kernels, x in ((PLAIN, expected), (TRITON, qkv)):
        kernels.normalise_and_rotate(x[:, :-1], num_queries, norms, 1e-5, rotation, buffers)
    assert is_close(qkv.float(), expected.float(), TOLERANCE[dtype])


# Routers


class Choices(NamedTuple):
    num_tokens: int
    num_experts: int
    k: int
    num_groups: int = 1
    num_kept: int = 1


SMALL_CHOICES = [
    Choices(6, 256, 8, 8, 4),  # LLaDA2's
    Choices(2, 160, 6, 8, 3),  # DeepSeek-V2's
    Choices(2, 128, 8),  # Qwen3's
    Choices(5, 8, 2, 8, 4),  # an expert for each group
    Choices(3, 18, 4, 3, 1),
    Choices(2, 7, 7),
    Choices(1, 1, 1),
]
LARGE_CHOICES = [Choices(4096, 256, 8, 8, 4), Choices(517, 160, 6, 8, 3), Choices(4096, 128, 8)]
HIDDEN = 16
AnyRouter = SigmoidRouter | SoftmaxRouter | TopSoftmaxRouter


def routers(choices: Choices, device: str, kernels: Kernels) -> list[tuple[AnyRouter, Tensor]]:
    """With inputs of the dtype that each is used with."""
    _, num_experts, k, num_groups, num_kept = choices
    compute = on_this_thread(workspace(device), kernels)
    weight = randn(num_experts, HIDDEN, seed=1, device=device)
    bias = 0.3 * randn(num_experts, seed=2, device=device)
    x = randn(choices.num_tokens, HIDDEN, seed=3, device=device)
    groups = (num_groups, num_kept)
    found: list[tuple[AnyRouter, Tensor]] = [
        (SigmoidRouter(compute, weight, bias, k, *groups, 0, 1, True, 2.5), x.half()),
        (SigmoidRouter(compute, weight, None, k, *groups, 0, 1, False, 1.0), x),
        (SoftmaxRouter(compute, weight, k, False, False, *groups, scaling_factor=16.0), x.half()),
    ]
    if num_groups == 1:  # equal logits are common in narrow types, and torch has any of them first
        found.append(
            (SoftmaxRouter(compute, weight.half(), k, True, rounds_weights=True), x.half())
        )
        found.append((TopSoftmaxRouter(compute, weight, bias, k), x))
    return found


@pytest.mark.parametrize(("device", "choices"), places(SMALL_CHOICES, LARGE_CHOICES), ids=str)
def test_routers_choose_as_the_plain_ones(device: str, choices: Choices) -> None:
    both = (routers(choices, device, kernels) for kernels in (PLAIN, TRITON))
    for (plain_one, x), (one, _) in zip(*both, strict=True):
        plain, found = plain_one.route(x, []), one.route(x, [])
        # Of thousands of tokens some have ranks that differ by less than their rounding.
        is_same = (found.experts == plain.experts).all(1)
        assert (~is_same).sum() <= choices.num_tokens // 200
        tolerance = 1e-3 if isinstance(one, SoftmaxRouter) and one.rounds_weights else 5e-6
        torch.testing.assert_close(
            found.weights[is_same], plain.weights[is_same], atol=0, rtol=tolerance
        )
        assert found.experts.dtype == torch.int64 and found.weights.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter's
@pytest.mark.parametrize(("device", "choices"), places(SMALL_CHOICES, LARGE_CHOICES), ids=str)
def test_of_equal_ranks_the_first_groups_first_experts_are_chosen(
    device: str, choices: Choices
) -> None:
    """Also of what is not a number."""
    first = torch.arange(choices.k, device=device).expand(choices.num_tokens, -1)
    for one, x in routers(choices, device, TRITON):
        if not isinstance(one, SoftmaxRouter) and one.bias is not None:
            continue
        for value in (0.0, torch.nan):
            found = one.route(torch.full_like(x, value), [])
            assert torch.equal(found.experts, first)
            assert bool(found.weights.isnan().all()) == (value != value)
