"""Triton kernels against their plain twins: in the interpreter here, on a GPU with `-m gpu`.

Half a minute: the interpreter takes 10 ms for a step of a program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from programs import python

pytest.importorskip("triton")

import torch
from torch import Tensor
from triton_places import places

from lowtide.core import MoEShape
from lowtide.devices.cuda import slot_image
from lowtide.experts.layout import Formats, SlotLayout
from lowtide.kernels import triton_experts, triton_routing
from lowtide.kernels.operands import ClampedWeights, ExpertWeights
from lowtide.kernels.reference import REFERENCE

# Of the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CUT_OFF = 2
"""Times the tolerance of bfloat16 in the interpreter, which cuts off where a GPU rounds."""


class Size(NamedTuple):
    num_tokens: int
    num_experts: int
    k: int
    hidden: int
    width: int


# At most 64 programs per launch.
SMALL = [
    Size(1, 1, 1, 16, 16),
    Size(1, 6, 3, 32, 16),
    Size(7, 8, 4, 48, 80),
    Size(40, 4, 2, 96, 64),
    Size(33, 16, 2, 72, 104),
    Size(150, 3, 1, 64, 32),
]
LARGE = [Size(1, 256, 8, 2048, 512), Size(32, 256, 8, 2048, 512), Size(517, 64, 6, 2048, 1408)]
LARGE += [Size(4096, 8, 2, 1024, 768), Size(63, 128, 8, 2048, 768), Size(16, 60, 4, 1000, 712)]


def routing(size: Size, device: str, seed: int = 0) -> Tensor:
    """Skewed: some experts have many tokens, some none."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(size.num_tokens, size.num_experts, generator=generator)
    rank += torch.rand(size.num_experts, generator=generator)
    return rank.topk(size.k).indices.sort().values.to(device)


class Case:
    """Slots full of weights, pairs sorted by expert, and some experts in some slots."""

    def __init__(
        self,
        size: Size,
        dtype: torch.dtype,
        device: str,
        kept: Formats = (),
        is_clamped: bool = False,
        own: Sequence[int] | None = None,
    ) -> None:
        """own: the experts in slots, by default every other one."""
        generator = torch.Generator().manual_seed(1)
        num_tokens, num_experts, k, hidden, width = size
        weights = ClampedWeights if is_clamped else ExpertWeights
        shape = MoEShape(1, num_experts, k, hidden, width)
        self.layout = SlotLayout.of(shape, dtype, weights, [kept])
        chosen = torch.tensor(range(0, num_experts, 2) if own is None else own, dtype=torch.int64)
        self.num_slots = len(chosen) + 3
        self.device = device
        self.slots = self.filled()
        self.rows = REFERENCE.sort_pairs(routing(size, device), num_experts)
        self.num_experts = num_experts
        x = torch.randn(num_tokens, hidden, generator=generator)
        x *= 6 if is_clamped else 1  # so that something is
        x = x.to(device, dtype)
        self.inputs = x[self.rows.token_of]
        self.gate = torch.empty((num_tokens * k, width), dtype=dtype, device=device)
        self.slot_of = torch.full((num_experts,), -1, dtype=torch.int32)
        order = torch.randperm(self.num_slots, generator=generator)
        self.slot_of[chosen] = order[: len(chosen)].int()
        self.tables: list[Tensor] = []

    def filled(self) -> Tensor:
        """Slots full of random weights."""
        generator = torch.Generator(self.device).manual_seed(1)  # large cases have much to draw
        shape = (self.num_slots, self.layout.num_bytes // self.layout.dtype.itemsize)
        slots = torch.empty(shape, dtype=self.layout.dtype, device=self.device)
        for slot in slots:
            slot.copy_(torch.randn(len(slot), generator=generator, device=self.device))
        return slots.mul_(self.layout.largest.parts[0].shape[1] ** -0.5)

    def expected(self) -> Tensor:
        """Inputs, replaced by outputs for the experts in slots, one expert after the other."""
        parts, up = self.inputs.clone(), torch.empty_like(self.gate)
        stop = 0
        for count, slot in zip(self.rows.counts.tolist(), self.slot_of.tolist(), strict=True):
            start, stop = stop, stop + count
            if slot >= 0 and count:
                one, gate = parts[start:stop], self.gate[start:stop]
                REFERENCE.gated_mlp(one, self.weights(slot), gate, up[start:stop], one)
        return parts

    def weights(self, slot: int) -> ExpertWeights | ClampedWeights:
        return self.layout.largest.weights_in(self.slots[slot].view(torch.uint8))

    def run(self, parts: Tensor, slot_of: Tensor, tile_rows: int) -> None:
        image = slot_image(self.layout.largest, self.layout)
        tiles = triton_experts.Tiles.empty(len(parts), self.num_experts, parts.device)
        bound = triton_experts.max_tiles(len(parts), int((slot_of >= 0).sum()), tile_rows)
        table = slot_of.pin_memory() if parts.is_cuda else slot_of
        self.tables.append(table)  # a GPU reads it later; pinned memory that is let go comes again
        if bound:
            triton_experts.plan_tiles(self.rows.counts, table, tile_rows, tiles)
            triton_experts.gated_mlps(self.slots, image, tiles, bound, tile_rows, parts, self.gate)


def check_gated_mlps(case: Case) -> None:
    dtype, device = case.layout.dtype, case.device
    expected = case.expected()
    is_own = (case.slot_of >= 0).to(device).repeat_interleave(case.rows.counts)
    tolerance = TOLERANCE[dtype]
    if device == "cpu" and dtype == torch.bfloat16:
        tolerance *= CUT_OFF
    for tile_rows in (16, 64):
        parts = case.inputs.clone()
        case.run(parts, case.slot_of, tile_rows)
        assert largest(parts.float() - expected.float()) <= tolerance * largest(expected)
        assert torch.equal(parts[~is_own], case.inputs[~is_own])
    # One launch for all, or one for each: the same bits.
    together, apart = case.inputs.clone(), case.inputs.clone()
    case.run(together, case.slot_of, 16)
    for expert in case.slot_of.ge(0).nonzero()[:4].flatten().tolist():
        alone = torch.full_like(case.slot_of, -1)
        alone[expert] = case.slot_of[expert]
        case.run(apart, alone, 16)
        own = case.rows.counts.cumsum(0)[expert] - case.rows.counts[expert]
        pairs = slice(int(own), int(own + case.rows.counts[expert]))
        assert torch.equal(apart[pairs], together[pairs])


def largest(x: Tensor) -> float:
    """Of magnitudes; 0 without any."""
    return x.abs().max().item() if x.numel() else 0.0


@pytest.mark.parametrize(("device", "size"), places(SMALL, LARGE), ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_mlps_equal_the_plain_ones(device: str, size: Size, dtype: torch.dtype) -> None:
    check_gated_mlps(Case(size, dtype, device))


@pytest.mark.parametrize(("device", "size"), places(SMALL[1:4], LARGE[1:3]), ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_clamped_mlps_equal_the_plain_ones(device: str, size: Size, dtype: torch.dtype) -> None:
    check_gated_mlps(Case(size, dtype, device, is_clamped=True))


@pytest.mark.parametrize(("device", "size"), places(SMALL[:4], LARGE), ids=str)
def test_sorting_and_summing_have_the_bits_of_the_plain_ones(device: str, size: Size) -> None:
    experts = routing(size, device, seed=2)
    plain = REFERENCE.sort_pairs(experts, size.num_experts)
    for one, other in zip(triton_routing.sort_pairs(experts, size.num_experts), plain, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    generator = torch.Generator().manual_seed(3)
    for dtype in TOLERANCE:
        parts = torch.randn(experts.numel(), size.hidden, generator=generator).to(device, dtype)
        weights = torch.rand(experts.shape, generator=generator).to(device)
        sums = torch.empty((2, size.num_tokens, size.hidden), device=device)
        term = torch.empty((size.num_tokens, size.hidden), dtype=dtype, device=device)
        REFERENCE.combine(parts, plain.part_of, weights, term, term.float(), sums[0])
        triton_routing.combine(parts, plain.part_of, weights, sums[1])
        assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize(
    ("device", "size"), places([*SMALL[:5], Size(20, 64, 8, 16, 16)], LARGE), ids=str
)
def test_the_best_experts_are_chosen(device: str, size: Size) -> None:
    generator = torch.Generator().manual_seed(4)
    rank = torch.rand(size.num_tokens, size.num_experts, generator=generator).to(device)
    chosen = triton_routing.top_experts(rank, size.k)
    assert torch.equal(chosen, REFERENCE.top_experts(rank, size.k))
    # Ties, forbidden experts and broken numbers: any k of the best, each once, in order.
    rank[:, ::2] = 0.5
    rank[::3, 1:] = -torch.inf
    rank[1::3, 0] = torch.nan
    chosen = triton_routing.top_experts(rank, size.k)
    assert (chosen.diff(dim=1) > 0).all() and 0 <= chosen.min() and chosen.max() < rank.shape[1]
    ranks = rank.gather(1, chosen).nan_to_num(torch.inf).sort(descending=True).values
    assert torch.equal(ranks, rank.topk(size.k).values.nan_to_num(torch.inf))


@pytest.mark.parametrize(("device", "size"), places(SMALL, LARGE), ids=str)
def test_host_rows_land_where_they_belong(device: str, size: Size) -> None:
    case = Case(size, torch.float32, device)
    source, parts = torch.rand_like(case.inputs).cpu(), case.inputs.clone()
    is_own = (case.slot_of >= 0).repeat_interleave(case.rows.counts.cpu())
    own = is_own.nonzero().flatten().to(torch.int32)
    pairs = torch.nn.functional.pad(own, (0, -len(own) % triton_experts.PLACED_ROWS), value=-1)
    if parts.is_cuda:
        source, pairs = source.pin_memory(), pairs.pin_memory()
    triton_experts.place_rows(source, pairs, parts)
    expected = torch.where(is_own[:, None], source, case.inputs.cpu())
    assert torch.equal(parts.cpu(), expected)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_tiles_cover_every_pair_of_the_launch_once(tile_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts = 1 + 9 * seed
    counts = torch.randint(0, 200, (num_experts,), generator=generator)
    counts[torch.rand(num_experts, generator=generator) < 0.3] = 0
    slot_of = torch.randint(-1, 5, (num_experts,), generator=generator, dtype=torch.int32)
    tiles = triton_experts.Tiles.empty(int(counts.sum()), num_experts, torch.device("cpu"))
    triton_experts.plan_tiles(counts, slot_of, tile_rows, tiles)

    expected, start = [], 0
    for count, slot in zip(counts.tolist(), slot_of.tolist(), strict=True):
        stop = start + count
        if slot >= 0:
            firsts = range(start, stop, tile_rows)
            expected += [[slot, first, min(first + tile_rows, stop)] for first in firsts]
        start = stop
    assert torch.stack(tiles[:3], 1)[: int(tiles.num_tiles)].tolist() == expected
    bound = triton_experts.max_tiles(int(counts.sum()), int((slot_of >= 0).sum()), tile_rows)
    assert len(expected) <= bound <= len(tiles.slot)


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Needs none: Triton brings its own assembler."""
    script = Path(__file__).with_name("triton_compile.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = python(str(script), timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gate_up"]["mma.sync"] and found["down"]["mma.sync"]  # tensor cores
    assert found["gate_up"]["cp.async.cg"] and found["down"]["cp.async.cg"]  # loads ahead
    for form in ("q8", "q4", "MXFP4"):
        for name in ("_gate_up", "_down"):
            assert found[f"{form} {name} 16 on 80"]["mma.sync"]
        assert found[f"{form} _gate_up 64 on 90"]["wgmma.mma"]
    # Inputs are loaded ahead 16 bytes at a time; codes, too, and 8 where rows are aligned so.
    blocks_of_17 = found["MXFP4 _down 16 on 80"]
    assert found["q8 _down 16 on 80"]["cp.async.cg"] > blocks_of_17["cp.async.cg"]
    assert found["q4 _down 16 on 80"]["cp.async.ca"] > blocks_of_17["cp.async.ca"]
    assert found["combine"]["mul.rn.f32"] and found["combine"]["add.rn.f32"]
    assert not found["combine"]["fma."] and not found["rotate on 120"]["fma."]
    assert found["hopper"]["wgmma.mma"]
    assert found["bf16 _gate_up 64 on 89"]["mma.sync"] and found["bf16 _down 16 on 89"]["mma.sync"]
    for name in ("head bf16 on 100", "bf16 _gate_up 64 on 100"):  # by the tensor memory of a B200
        assert found[name]["tcgen05.mma"]
    for name in (
        "head bf16 on 80",
        "head bf16 on 89",
        "head bf16 guided on 86",
        "head bf16 guided on 120",
    ):
        assert found[name]["mma.sync"] and found[name]["cp.async.cg"]
    assert found["head bf16 on 90"]["wgmma.mma"] and found["head bf16 guided on 90"]["wgmma.mma"]
    # A block of consumer GPUs since Ampere may have 99 KiB (CUDA's table of compute capabilities).
    assert all(kernel["shared_bytes"] <= 99 << 10 for kernel in found.values())
