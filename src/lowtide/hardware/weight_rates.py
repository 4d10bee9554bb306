"""How fast weights of each kind are multiplied with: those of one expert, by its tokens.

From these and the rates of the machine's parts every speed is predicted
(`engine/planning/prediction.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from lowtide.core import Curve, MoEShape
from lowtide.experts.layout import SlotLayout
from lowtide.formats import formats
from lowtide.hardware.cold_weights import ColdWeights, cold_bytes
from lowtide.hardware.machine import Rate, rate_of, rates_of
from lowtide.hardware.streams import HostStream
from lowtide.kernels.choice import choose_kernels, choose_pack
from lowtide.threads.executor import HostExecutor

EXPERT = MoEShape(1, 8, 8, hidden_size=2048, expert_size=768)
"""The expert that is measured, of Qwen3-30B-A3B's shape."""

NUM_TOKENS = (1, 8, 64)
"""An expert's tokens; between them and beyond time is taken as linear in the tokens."""


class WeightKind(NamedTuple):
    """Weights that take alike long per byte."""

    dtype: str  # that is computed in
    format: str | None = None  # in memory; None: the compute type
    rounds_rows: bool = False  # to int8, before they are multiplied

    @property
    def name(self) -> str:
        """As it is kept."""
        return f"{self.format or self.dtype}{' by int8 rows' * self.rounds_rows}"

    def rate_name(self, num_tokens: int) -> str:
        """The name of the rate for an expert of so many tokens."""
        return f"weights in {self.name}, {num_tokens} token{'s' * (num_tokens > 1)}"


BY_BITS: Mapping[float, WeightKind] = MappingProxyType(
    {
        32.0: WeightKind("float32"),
        16.0: WeightKind("bfloat16"),
        8.5: WeightKind("bfloat16", "q8"),
        4.5: WeightKind("bfloat16", "q4"),
    }
)
"""By bits of a weight; a format that is not measured is taken as the nearest."""

KINDS = (*BY_BITS.values(), *(WeightKind("bfloat16", name, True) for name in ("q8", "q4")))


ROUNDING = {name: f"rounding bfloat16 to {name}, one core" for name in ("q8", "q4")}
"""The names of these rates, by format: bytes of bfloat16 per second."""


def kind_of(bits: float, dtype: torch.dtype, rounds_rows: bool) -> WeightKind:
    """The kind that weights of so many bits are most like."""
    if dtype is not torch.bfloat16 and bits > 12:
        return BY_BITS[32.0]
    kind = BY_BITS[min(BY_BITS, key=lambda known: abs(known - bits))]
    return kind._replace(rounds_rows=rounds_rows and kind.format is not None)


def measure_weight_rates() -> list[Rate]:
    """Bytes per second of all kinds, at each of `NUM_TOKENS`, and of rounding to formats that
    weights are made into as they are read. Raises PlanError without memory."""
    executor = HostExecutor(EXPERT.num_experts_per_token)
    try:
        with executor.in_charge(), torch.inference_mode():
            rates = [rate for kind in KINDS for rate in _rates(kind, executor)]
        return [*rates, *map(_rounding_rate, ROUNDING)]
    finally:
        executor.close()


def seconds_per_byte(rates: Sequence[Rate]) -> dict[str, Curve]:
    """By a kind's name, from an expert's tokens; nothing where not all were measured."""
    per_s = {rate.name: rate.per_s for rate in rates}
    if any(kind.rate_name(count) not in per_s for kind in KINDS for count in NUM_TOKENS):
        return {}
    return {
        kind.name: Curve([(count, 1 / per_s[kind.rate_name(count)]) for count in NUM_TOKENS])
        for kind in KINDS
    }


def rounding_rate(rates: Sequence[Rate], format: str) -> float | None:
    """Bytes per second that one core rounds to a format; None where that was not measured."""
    return next((each.per_s for each in rates if each.name == ROUNDING.get(format)), None)


def _rates(kind: WeightKind, executor: HostExecutor) -> Iterator[Rate]:
    dtype: torch.dtype = getattr(torch, kind.dtype)
    kept = [] if kind.format is None else [(formats()[kind.format],) * 3]
    layout = SlotLayout.of(EXPERT, dtype, kept=kept)
    kernels = choose_kernels("auto", dtype, rounds_rows=kind.rounds_rows)
    weights = ColdWeights(layout, executor, cold_bytes())
    stream = HostStream(EXPERT, weights, executor, None, kernels)
    samples = {kind.rate_name(count): partial(stream.sample, count) for count in NUM_TOKENS}
    return rates_of(samples, "B", layout.num_bytes)


def _rounding_rate(name: str) -> Rate:
    num_rows, num_columns = 512, EXPERT.hidden_size
    format, pack = formats()[name].for_rows(num_columns), choose_pack("auto")
    weights = torch.randn((num_rows, num_columns)).bfloat16().view(torch.uint8).numpy().reshape(-1)
    target = np.empty(format.matrix_bytes((num_rows, num_columns)), np.uint8)

    def sample() -> float:
        start_s = perf_counter()
        pack(format, weights, "BF16", target, None)
        return perf_counter() - start_s

    return rate_of(ROUNDING[name], "B", weights.nbytes, sample)
