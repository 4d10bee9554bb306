"""Statistics of logits that never exist: against float64, and the bits of whole rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from computing import on_this_thread, peak_bytes, randn
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from poison import PoisonedWorkspace
from torch import Tensor

from lowtide.decode.logits import LOGIT_ROWS
from lowtide.kernels.reference import REFERENCE
from lowtide.kernels.row_statistics import (
    TILE_COLUMNS,
    Form,
    Guidance,
    RowStatistics,
    Wanted,
)
from lowtide.kernels.tiled_head import NORM_ROWS
from lowtide.layers.head import LogitsHead
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Registrar, Workspace, tiles
from lowtide.threads.executor import Executor, HostExecutor

ALL = Wanted(second=True, entropy=True)
NUM_TOKENS = NORM_ROWS + 100
DTYPES = [torch.float32, torch.bfloat16]
VOCABS = [1, 31, 97, TILE_COLUMNS, TILE_COLUMNS + 1, 2 * TILE_COLUMNS + 100, 5000]


class Case:
    """Hidden states of some tokens, and a head whose float64 logits are near by."""

    def __init__(
        self, vocab: int, dtype: torch.dtype, hidden: int = 48, executor: Executor | None = None
    ) -> None:
        self.hidden = randn(NUM_TOKENS, hidden).to(dtype)
        norm, weight = 1 + 0.1 * randn(hidden, seed=1), 0.4 * randn(vocab, hidden, seed=2)
        self.workspace = PoisonedWorkspace(Arena(64 << 20).bytes)
        compute = on_this_thread(self.workspace, executor=executor)
        self.head = LogitsHead(norm.to(dtype), 1e-5, weight.to(dtype), compute)
        self.vocab = vocab

    def logits(self) -> Tensor:
        """Of all tokens, as a decoder of whole rows has them."""
        logits = torch.empty(NUM_TOKENS, self.vocab)
        for rows in tiles(NUM_TOKENS, LOGIT_ROWS):
            self.head.logits(self.hidden[rows], logits[rows])
        return logits

    def statistics(
        self,
        rows: Tensor,
        wanted: Wanted = ALL,
        guidance: Guidance | None = None,
        form: Form = Form.FUSED,
    ) -> RowStatistics:
        mark = self.workspace.state
        found = self.head.statistics(self.hidden, rows, wanted, guidance, form)
        own = RowStatistics(*(None if part is None else part.clone() for part in found))
        self.workspace.state = mark
        return own


def check(found: RowStatistics, logits: Tensor) -> None:
    """Against float64, of float32 logits [n, vocab]; where nothing is finite, all is NaN."""
    assert torch.equal(found.best, logits.argmax(1))
    greatest = logits.gather(1, logits.argmax(1, keepdim=True))[:, 0]
    torch.testing.assert_close(found.greatest, greatest, atol=0, rtol=0, equal_nan=True)
    is_finite = greatest.isfinite()
    probability = logits.double().softmax(1).where(is_finite[:, None], torch.nan)
    best = probability.sort(1, descending=True).values
    second = best[:, 1] if best.shape[1] > 1 else torch.zeros_like(best[:, 0])
    entropy = torch.special.entr(probability).sum(1)
    assert found.second is not None and found.entropy is not None
    for one, expected in (
        (found.probability, best[:, 0]),
        (found.second, second.where(is_finite, torch.nan)),
        (found.entropy, entropy),
    ):
        torch.testing.assert_close(one, expected, atol=2e-6, rtol=2e-6, equal_nan=True)


def is_same(one: RowStatistics, other: RowStatistics) -> bool:
    """To the bit; NaNs are equal."""
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.numpy().tobytes() == b.numpy().tobytes())
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def threads() -> Iterator[HostExecutor]:
    executor = HostExecutor(3, 3)
    with executor.in_charge():
        yield executor
    executor.close()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_those_of_the_models_logits(vocab: int, dtype: torch.dtype) -> None:
    """The arg-max and its logit to the bit, in any number and order of rows."""
    case = Case(vocab, dtype)
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(3))
    logits = case.logits()
    for num_rows in (1, 16, 33, NUM_TOKENS):
        rows = order[:num_rows]
        found = case.statistics(rows)
        check(found, logits[rows])
        assert is_same(case.statistics(rows, form=Form.MATERIALISED), found)
        least = case.statistics(rows, Wanted())
        assert least.second is None and least.entropy is None
        assert is_same(least, RowStatistics(*found[:3]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_no_neighbour_and_no_thread(
    dtype: torch.dtype, threads: HostExecutor
) -> None:
    alone, several = Case(5000, dtype), Case(5000, dtype, executor=threads)
    whole = alone.statistics(torch.arange(NUM_TOKENS))

    @examples(15)
    @given(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=100))
    def check_rows(rows: list[int]) -> None:
        expected = RowStatistics(*(None if part is None else part[rows] for part in whole))
        for case in (alone, several):
            assert is_same(case.statistics(torch.tensor(rows)), expected)

    check_rows()
    assert is_same(several.statistics(torch.arange(NUM_TOKENS)), whole)


def test_no_rows() -> None:
    found = Case(97, torch.float32).statistics(torch.arange(0))
    assert all(part is not None and part.shape == (0,) for part in found)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guidance_is_that_of_whole_rows(dtype: torch.dtype, form: Form) -> None:
    case = Case(3000, dtype)
    rows, others = torch.arange(NUM_TOKENS)[::7], torch.arange(NUM_TOKENS).flip(0)[::7]
    factors = 1 + 4 * torch.rand(len(rows), generator=torch.Generator().manual_seed(0))
    factors[::3] = 2.5
    logits = case.logits()
    guided = logits[others] + factors[:, None] * (logits[rows] - logits[others])
    check(case.statistics(rows, guidance=Guidance(others, factors), form=form), guided)
    unguided = case.statistics(rows, guidance=Guidance(rows, factors), form=form)
    assert is_same(unguided, case.statistics(rows))


def reduced(logits: Tensor) -> RowStatistics:
    """Of given logits, which no product of finite weights has."""

    class Given(type(REFERENCE)):
        def multiply(
            self, x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor, *_: int
        ) -> None:
            out.copy_(logits[x[:, 0].long()][:, weight_t[0].long()])

        def rms_norm(self, x: Tensor, *_: object) -> None:
            pass

    vocab, num_rows = logits.shape[1], len(logits)
    weight = torch.arange(float(vocab))[:, None]
    head = LogitsHead(torch.ones(1), 0.0, weight, on_this_thread(kernels=Given()))
    hidden = torch.arange(float(num_rows))[:, None]
    return head.statistics(hidden, torch.arange(num_rows), ALL, None, Form.FUSED)


@pytest.mark.parametrize("places", [(7, 9), (1023, 1024), (0, 2999), (1500, 2600), (31, 32)])
def test_the_lowest_id_wins_a_tie_and_the_second_is_as_likely(places: tuple[int, int]) -> None:
    logits = randn(5, 3000).clamp_(max=2)
    logits[:, places] = 3.0
    found = reduced(logits)
    assert found.best.tolist() == 5 * [places[0]] and found.second is not None
    assert torch.equal(found.second, found.probability)
    check(found, logits)


def test_rows_that_are_nearly_sure_are_told_from_each_other() -> None:
    logits = torch.full((4, 3000), -200.0)
    logits[:, 1100] = 10.0
    logits[:, [5, 1101, 2999]] = torch.tensor([-14.0, -13.0, -12.0, -11.0])[:, None]
    found = reduced(logits)
    left = 3 * torch.exp(torch.tensor([-24.0, -23.0, -22.0, -21.0], dtype=torch.float64))
    torch.testing.assert_close(1 / found.probability - 1, left, atol=0, rtol=1e-5)
    assert found.probability.unique().numel() == 4


def test_what_is_not_finite() -> None:
    """Columns of -inf count for nothing; other rows are no worse for one without a maximum."""
    logits = torch.stack([randn(3000, seed=seed) for seed in range(7)])
    logits[1, 5:2900] = -torch.inf  # a tile has nothing else
    logits[2] = -torch.inf
    logits[3, [40, 2000]] = torch.nan
    logits[4, [1500, 2500]] = torch.inf
    logits[5, 1:] = -torch.inf
    logits[6, [10, 2000]] = torch.tensor([torch.inf, torch.nan])
    check(reduced(logits), logits)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_registrar_counts_what_they_take(form: Form, dtype: torch.dtype, num_chunks: int) -> None:
    vocab, hidden, num_rows = 30_000, 64, NORM_ROWS + 100
    norm, weight, x = torch.ones(hidden), randn(vocab, hidden), randn(num_rows, hidden)
    norm, weight, x = (tensor.to(dtype) for tensor in (norm, weight, x))
    rows = torch.arange(num_rows)
    factors = torch.full((num_rows,), 2.0)

    def run(workspace: Registrar | Workspace, device: str) -> None:
        there = (tensor.to(device) for tensor in (norm, weight, x, rows, factors))
        norm_there, weight_there, x_there, rows_there, factors_there = there
        head = LogitsHead(norm_there, 1e-5, weight_there, on_this_thread(workspace))
        guidance = Guidance(rows_there, factors_there)
        head.statistics(x_there, rows_there, ALL, guidance, form)

    chunks = {"logits": num_chunks}
    registrar = Registrar(chunks)
    run(registrar, "meta")
    graph = registrar.graph
    placement = graph.placement
    workspace = PoisonedWorkspace(Arena(placement.arena_bytes).bytes)
    workspace.adopt(placement, chunks)
    run(workspace, "cpu")
    row_bytes = num_rows * vocab * dtype.itemsize
    most_bytes = row_bytes if num_chunks == 1 else NORM_ROWS * vocab * dtype.itemsize
    assert (peak_bytes(graph) > 2 * most_bytes) == (form is Form.MATERIALISED)
    if form is Form.FUSED:
        assert peak_bytes(graph) < row_bytes // 4
