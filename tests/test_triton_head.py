"""Statistics of rows of logits in Triton against plain torch: here, or on a GPU with `-m gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest
from computing import randn

pytest.importorskip("triton")

import torch
from computing import on_this_thread
from poison import PoisonedWorkspace
from torch import Tensor
from triton_places import DEVICES, places

from lowtide.engine.planning.uncomputed import Uncomputed
from lowtide.kernels import triton_head
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.kernels.row_statistics import (
    TILE_COLUMNS,
    Form,
    Guidance,
    Partials,
    RowStatistics,
    Wanted,
)
from lowtide.kernels.tiled_head import HeadRows
from lowtide.kernels.triton_kernels import TritonKernels
from lowtide.layers.head import LogitsHead
from lowtide.memory.chunking import EACH_TILE
from lowtide.memory.workspace import Buffers, Registrar, Workspace

ALL = Wanted(second=True, entropy=True)
# Of logits, whose products are summed up in another order and then rounded to 8, 11 or 24 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
CUT_OFF = 2
"""Times the tolerance of bfloat16 in the interpreter, which cuts off where a GPU rounds."""


class Size(NamedTuple):
    num_tokens: int
    num_rows: int
    hidden: int
    vocab: int


# The interpreter takes 10 ms for a step of a program.
SMALL = [
    Size(1, 1, 16, 1),
    Size(9, 5, 40, 97),
    Size(4000, 3, 40, 97),  # all tokens are more than the plan has room for
    Size(70, 67, 72, 300),  # two blocks of rows
    Size(20, 17, 32, 2 * TILE_COLUMNS + 300),
]
LARGE = [Size(64, 1, 2048, 157_184), Size(100, 32, 4096, 126_464), Size(900, 611, 3584, 152_064)]


class Case:
    """Hidden states, of which some rows are asked for, and other ones to guide them away from."""

    def __init__(self, size: Size, dtype: torch.dtype, device: str) -> None:
        num_tokens, num_rows, hidden, vocab = size
        self.hidden = randn(num_tokens, hidden, seed=0, device=device).to(dtype)
        self.norm = (1 + 0.1 * randn(hidden, seed=1, device=device)).to(dtype)
        on_device = torch.Generator(device).manual_seed(2)
        weight = torch.randn(vocab, hidden, generator=on_device, device=device)
        self.weight = weight.mul_(3 * hidden**-0.5).to(dtype)
        draw = torch.Generator().manual_seed(3)
        self.rows = torch.randperm(num_tokens, generator=draw)[:num_rows].to(device)
        others = torch.randint(num_tokens, (num_rows,), generator=draw)
        factors = 1 + torch.rand(num_rows, generator=draw)
        self.guidance = Guidance(others.to(device), factors.to(device))
        self.device = device

    def statistics(
        self,
        kernels: Kernels,
        rows: Tensor,
        guidance: Guidance | None,
        wanted: Wanted = ALL,
        form: Form = Form.FUSED,
        chunks: Mapping[str, int] = EACH_TILE,
    ) -> RowStatistics:
        """In the workspace that is planned for the plain twin, NaN wherever nothing is alive."""
        registrar = Registrar(chunks)
        with Uncomputed():
            self._ask("meta", registrar, REFERENCE, rows, guidance, wanted, form)
        placement = registrar.graph.placement
        buffer = torch.empty(placement.arena_bytes, dtype=torch.uint8, device=self.device)
        planned = PoisonedWorkspace(buffer)
        planned.adopt(placement, chunks)
        found = self._ask(self.device, planned, kernels, rows, guidance, wanted, form)
        return RowStatistics(*(None if part is None else part.clone() for part in found))

    def _ask(
        self,
        device: str,
        buffers: Buffers,
        kernels: Kernels,
        rows: Tensor,
        guidance: Guidance | None,
        wanted: Wanted,
        form: Form,
    ) -> RowStatistics:
        compute = on_this_thread(buffers, kernels)
        head = LogitsHead(self.norm.to(device), 1e-5, self.weight.to(device), compute)
        if guidance is not None:
            guidance = Guidance(*(each.to(device) for each in guidance))
        return head.statistics(self.hidden.to(device), rows.to(device), wanted, guidance, form)

    def logits(self, rows: Tensor) -> Tensor:
        """In float64, of rows that are normalised as they are."""
        normed = torch.empty_like(self.hidden)
        REFERENCE.rms_norm(self.hidden, self.norm, 1e-5, workspace(self.device), normed)
        return normed[rows].double() @ self.weight.double().t()


@pytest.mark.parametrize(("device", "size"), places(SMALL, LARGE), ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_statistics_are_those_of_whole_rows(device: str, size: Size, dtype: torch.dtype) -> None:
    case = Case(size, dtype, device)
    tolerance = TOLERANCE[dtype] * (CUT_OFF if device == "cpu" else 1)
    for guidance in (None, case.guidance):
        found = case.statistics(TritonKernels(), case.rows, guidance)
        logits = case.logits(case.rows)
        if guidance is not None:
            others = case.logits(guidance.rows)
            logits = others + guidance.factors[:, None].double() * (logits - others)
        best = logits.gather(1, found.best[:, None])[:, 0]
        atol = tolerance * float(logits.abs().max()) * (1 if guidance is None else 4)
        # Of logits that rounding makes equal any may be the best; all of them are near the best.
        assert (logits.amax(1) - best).max() <= 2 * atol
        torch.testing.assert_close(found.greatest.double(), best, atol=atol, rtol=0)
        probability = logits.softmax(1)
        top = probability.topk(min(2, size.vocab), 1).values
        second = top[:, 1] if size.vocab > 1 else torch.zeros_like(top[:, 0])
        assert found.second is not None and found.entropy is not None
        torch.testing.assert_close(found.probability, top[:, 0], atol=0, rtol=3 * atol)
        torch.testing.assert_close(found.second, second, atol=0, rtol=3 * atol)
        entropy = torch.special.entr(probability).sum(1)
        torch.testing.assert_close(found.entropy, entropy, atol=10 * atol, rtol=0)


@pytest.mark.parametrize(
    ("device", "size"), places(SMALL[3:4], [*SMALL[1:3], *SMALL[4:], *LARGE[1:]]), ids=str
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bits_depend_on_no_neighbour(device: str, size: Size, dtype: torch.dtype) -> None:
    """They depend neither on which rows are asked for beside one, nor on what is asked."""
    case, kernels = Case(size, dtype, device), TritonKernels()
    for guidance in (None, case.guidance):
        whole = case.statistics(kernels, case.rows, guidance)
        few = slice(len(case.rows) // 2, len(case.rows) // 2 + 3)
        rest = None if guidance is None else guidance.part(few)
        found = case.statistics(kernels, case.rows[few], rest)
        for one, expected in zip(found, whole.part(few), strict=True):
            assert one is not None and expected is not None and torch.equal(one, expected)
        least = case.statistics(kernels, case.rows, guidance, Wanted())
        assert least.second is None and least.entropy is None
        for one, expected in zip(least[:3], whole[:3], strict=True):
            assert one is not None and expected is not None and torch.equal(one, expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter's
@pytest.mark.parametrize("device", DEVICES)
def test_where_products_are_exact_all_is_the_plain_twins(device: str) -> None:
    """Ties, and what is not finite."""
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(0))
    logits[0, [7, 9, 2000]] = 5.0
    logits[1, 5:2900] = -torch.inf  # a tile has nothing else
    logits[2] = -torch.inf
    logits[3, [40, 2000]] = torch.nan
    logits[4, [1500, 2500]] = torch.inf
    logits[5, 1:] = -torch.inf
    logits[6, [10, 2000]] = torch.tensor([torch.inf, torch.nan])
    logits = logits.to(device)
    num_tiles = triton_head.num_tiles(3000)
    tiles = [logits[:, first : first + TILE_COLUMNS] for first in range(0, 3000, TILE_COLUMNS)]
    partials = Partials.take(7, num_tiles, ALL, workspace(device))
    assert partials.second is not None and partials.moment is not None
    for place, tile in enumerate(tiles):
        best = tile.argmax(1, keepdim=True)
        below = tile - tile.gather(1, best).clamp(min=torch.finfo(torch.float32).min)
        partials.best[:, place] = best[:, 0] + place * TILE_COLUMNS
        partials.greatest[:, place] = tile.gather(1, best)[:, 0]
        partials.rest[:, place] = below.scatter(1, best, -torch.inf).exp().sum(1)
        partials.second[:, place] = tile.scatter(1, best, -torch.inf).amax(1)
        partials.moment[:, place] = (below.clamp(min=-1e4) * below.exp()).sum(1)
    plain, found = (RowStatistics.take(7, ALL, workspace(device)) for _ in range(2))
    partials.join(plain)
    triton_head.join_tiles(partials, found)
    assert torch.equal(found.best, logits.argmax(1))
    for one, expected in zip(found[1:], plain[1:], strict=True):
        assert one is not None and expected is not None
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-6, equal_nan=True)


def workspace(device: str) -> Workspace:
    return Workspace(torch.empty(4 << 20, dtype=torch.uint8, device=device))


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter's
@pytest.mark.parametrize("device", DEVICES)
def test_tiles_are_reduced(device: str) -> None:
    """Logits of chosen size: hidden states pick columns of the weight, so products are exact."""
    num_rows = 6
    logits = torch.randn(num_rows, 2500, generator=torch.Generator().manual_seed(0)).half().float()
    logits[0, [7, 9, 2000]] = 5.0
    logits[1, [1023, 1024]] = 5.0
    logits[2, [2040, 2200]] = 5.0
    logits[3] = 1.0
    logits[4] = -3e4
    logits[4, 2400] = 3e4
    normed, weight = torch.eye(16)[:num_rows], torch.zeros(2500, 16)
    weight[:, :num_rows] = logits.t()
    weight[30, 5], weight[2100, 5] = torch.nan, torch.nan
    logits[:, [30, 2100]] = torch.nan  # 0 times NaN: of every row
    for has_nan in (True, False):
        if not has_nan:
            weight[[30, 2100], 5] = 0.0
            logits[:, [30, 2100]] = weight[[30, 2100], :num_rows].t()
        found = RowStatistics.take(num_rows, ALL, workspace(device))
        partials = Partials.take(num_rows, triton_head.num_tiles(2500), ALL, workspace(device))
        triton_head.reduce_tiles(HeadRows(normed.to(device)), weight.to(device), partials)
        triton_head.join_tiles(partials, found)
        assert found.best.tolist() == logits.argmax(1).tolist()
        probability = logits.double().softmax(1)
        top = probability.sort(1, descending=True).values
        entropy = torch.special.entr(probability).sum(1)
        for one, expected in zip(found[2:], (top[:, 0], top[:, 1], entropy), strict=True):
            torch.testing.assert_close(one.cpu(), expected, atol=3e-6, rtol=3e-6, equal_nan=True)


def test_rows_go_in_the_chunks_of_the_plan() -> None:
    case = Case(Size(700, 600, 16, 97), torch.float32, "cpu")
    for guidance in (None, case.guidance):
        whole = case.statistics(TritonKernels(), case.rows, guidance, chunks={"logits": 1})
        found = case.statistics(TritonKernels(), case.rows, guidance)  # 512 and 88
        for one, expected in zip(found, whole, strict=True):
            assert one is not None and expected is not None and torch.equal(one, expected)


def test_materialised_logits_are_torchs() -> None:
    case = Case(SMALL[3], torch.float32, "cpu")
    found = case.statistics(TritonKernels(), case.rows, None, form=Form.MATERIALISED)
    plain = case.statistics(REFERENCE, case.rows, None, form=Form.MATERIALISED)
    assert torch.equal(found.best, plain.best)
