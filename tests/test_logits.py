"""Transfers from a GPU to the host before tokens are chosen, on one that works late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from late_cuda import CUDA, CudaTensor, LateGpu, late_cuda
from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.decode.logits import LOGIT_ROWS, tiled_logits
from lowtide.decode.sampling import ArgMax, Sampling, choose_next, choose_tokens
from lowtide.devices import cuda
from lowtide.errors import NumericError
from lowtide.layers.batch import Batch
from lowtide.memory.pinned_copies import to_device

VOCAB = 30
ARG_MAX_BYTES = 24
SAMPLED = Sampling(0.8, top_p=0.9, seed=3)


class TableModel:
    """Hidden states are the logits already; all calls hand out the same buffer."""

    def __init__(self, device: torch.device) -> None:
        self._logits = torch.zeros(LOGIT_ROWS + 15, VOCAB, device=device)

    def forward(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def mixes_rows(self, hidden: Tensor) -> bool:
        return True

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)].copy_(hidden)


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def parts_of(
    hidden: Tensor, rows: IntArray, needs_logits: BoolArray
) -> Iterator[tuple[slice, Tensor | ArgMax]]:
    return tiled_logits(TableModel(hidden.device), hidden, rows, needs_logits)


def choices(
    hidden: Tensor, rows: IntArray, is_sampled: BoolArray
) -> tuple[list[int], list[float], list[type]]:
    """Token, confidence and what they were chosen from, for each row."""
    tokens, confidence, kinds = [], [], []
    for part, logits in parts_of(hidden, rows, is_sampled):
        for row in range(part.start, part.stop):
            one = logits[row - part.start : row - part.start + 1]
            sampling = SAMPLED if is_sampled[row] else Sampling()
            token, sure = choose_tokens(one, sampling, [row], 0)
            tokens.append(int(token[0]))
            confidence.append(float(sure[0]))
            kinds.append(type(logits))
    return tokens, confidence, kinds


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGpu]:
    with late_cuda(monkeypatch, haste=0.3) as gpu:
        yield gpu


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every wait for an event."""
    seen: list[None] = []
    wait = cuda.CudaEvent.wait

    def counted(self: cuda.CudaEvent) -> None:
        seen.append(None)
        wait(self)

    monkeypatch.setattr(cuda.CudaEvent, "wait", counted)
    return seen


def on_gpu(hidden: Tensor) -> Tensor:
    there = hidden.to(CUDA)
    assert isinstance(there, CudaTensor)
    return there


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), min_size=1, max_size=110), st.integers(0, 99))
def test_tokens_are_the_hosts_own(gpu: LateGpu, is_sampled: Sequence[bool], seed: int) -> None:
    """To the bit, draws included; and what is not drawn from does not cross."""
    hidden, sampled = random_logits(150, seed), np.array(is_sampled)
    rows = np.random.default_rng(seed).integers(0, 150, len(sampled))
    tokens, confidence, kinds = choices(hidden, rows, sampled)
    assert set(kinds) == {Tensor}
    there = on_gpu(hidden)
    gpu.num_waits = gpu.num_bytes_to_host = 0
    assert choices(there, rows, sampled)[:2] == (tokens, confidence)
    logit_bytes, best_bytes = 4 * VOCAB * int(sampled.sum()), ARG_MAX_BYTES * len(rows)
    num_copies = -(-len(rows) // LOGIT_ROWS)
    assert logit_bytes < gpu.num_bytes_to_host <= logit_bytes + num_copies * best_bytes
    assert gpu.num_waits == 0  # none that is hidden in a copy


@pytest.mark.parametrize("num_rows", [1, 32, 100])
def test_one_copy_and_one_wait_without_draws(
    gpu: LateGpu, waits: list[None], num_rows: int
) -> None:
    hidden = on_gpu(random_logits(num_rows))
    gpu.num_waits = 0
    parts = list(parts_of(hidden, np.arange(num_rows), np.zeros(num_rows, np.bool_)))
    assert all(isinstance(logits, ArgMax) for _, logits in parts)
    assert sum(part.stop - part.start for part, _ in parts) == num_rows
    assert gpu.num_bytes_to_host == ARG_MAX_BYTES * num_rows
    assert (len(waits), gpu.num_waits) == (1, 0)


def test_draws_of_one_tile_cost_no_wait_more(gpu: LateGpu, waits: list[None]) -> None:
    hidden = on_gpu(random_logits(5))
    gpu.num_waits = 0
    choices(hidden, np.arange(5), np.array([False, True, True, False, True]))
    assert (len(waits), gpu.num_waits) == (1, 0)


def test_no_rows_are_no_parts(gpu: LateGpu) -> None:
    nothing = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    assert not list(parts_of(on_gpu(random_logits(4)), *nothing))


def test_the_lowest_id_wins_a_tie_and_ids_are_exact(gpu: LateGpu) -> None:
    logits = torch.zeros(2, 1 << 18)
    logits[:, [7, 9]] = 2.0
    logits[1, -1] = 3.0

    class Wide(TableModel):
        def logits(self, hidden: Tensor) -> Tensor:
            return hidden.clone()

    there = on_gpu(logits)
    [(_, best)] = tiled_logits(Wide(CUDA), there, np.arange(2), np.zeros(2, np.bool_))
    assert choose_next(best, [Sampling()] * 2, [0, 1]).tolist() == [7, (1 << 18) - 1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(gpu: LateGpu, bad: float) -> None:
    hidden = random_logits(3)
    hidden[1, 5] = bad
    [(_, best)] = parts_of(on_gpu(hidden), np.arange(3), np.zeros(3, np.bool_))
    with pytest.raises(NumericError, match="position 71"):
        choose_tokens(best, Sampling(), [70, 71, 72], 0)
    with pytest.raises(NumericError, match="position 71"):
        choose_next(best, [Sampling()] * 3, [70, 71, 72])


def test_rows_go_to_a_device_in_one_copy_that_is_not_waited_for(gpu: LateGpu) -> None:
    rows = torch.arange(5), torch.arange(5, 10)
    before = gpu.num_waits
    there = to_device(CUDA, *rows)
    for row in rows:
        row.fill_(-1)  # the copy may not have begun
    assert gpu.num_waits == before
    assert [row.cpu().tolist() for row in there] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_rows_of_other_devices_stay_what_they_are() -> None:
    rows = torch.arange(5), torch.arange(5)
    here = to_device(torch.device("cpu"), *rows)
    assert here[0] is rows[0] and here[1] is rows[1]
