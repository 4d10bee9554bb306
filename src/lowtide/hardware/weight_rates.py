"""How fast weights of each kind are multiplied with: those of one expert, by its tokens.

From these and the rates of the machine's parts every speed is predicted
(`engine/planning/prediction.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from lowtide.core import Curve, MoEShape
from lowtide.experts.layout import SlotLayout
from lowtide.formats import formats
from lowtide.formats.ggml import grid_types
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


PACKED = tuple(WeightKind("bfloat16", name) for name in ("q8", "q4", "Q3_K", "IQ2_XS", "IQ3_S"))
"""Those that are measured: another format is taken as the one of these with the nearest number of
bits, those whose weights come out of tables of points (IQ2, IQ3) among themselves."""

KINDS = (
    WeightKind("float32"),
    WeightKind("bfloat16"),
    *PACKED,
    *(kind._replace(rounds_rows=True) for kind in PACKED),
)

ROUNDING = {name: f"rounding bfloat16 to {name}, one core" for name in ("q8", "q4")}
"""The names of these rates, by format: bytes of bfloat16 per second."""


def kind_of(format: str, num_bits: float, dtype: torch.dtype, rounds_rows: bool) -> WeightKind:
    """The kind that weights of so many bits in a format are most like."""
    if num_bits > 12:
        is_short = dtype is torch.bfloat16 and num_bits < 24
        return WeightKind("bfloat16" if is_short else "float32")
    has_points = format in grid_types.TYPES
    itself = [kind for kind in PACKED if kind.format == format]
    alike = [kind for kind in PACKED if (kind.format in grid_types.TYPES) == has_points]
    nearest = min(itself or alike, key=lambda kind: abs(_num_bits(kind) - num_bits))
    return nearest._replace(rounds_rows=rounds_rows)


def measure_weight_rates() -> list[Rate]:
    """Bytes per second of all kinds, at each of `NUM_TOKENS`, and of rounding to formats that
    weights are made into as they are read. Raises PlanError without memory.
    """
    with closing(HostExecutor(EXPERT.num_experts_per_token)) as executor:
        with executor.in_charge(), torch.inference_mode():
            rates = [rate for kind in KINDS for rate in _rates(kind, executor)]
        return [*rates, *map(_rounding_rate, ROUNDING)]


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
    rounded = frozenset((kind.format,)) if kind.format and kind.rounds_rows else frozenset[str]()
    kernels = choose_kernels("auto", dtype, rounded=rounded)
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


def _num_bits(kind: WeightKind) -> float:
    """Bits of a packed weight, scales included."""
    known = formats()[str(kind.format)]
    return 8 * known.block_bytes[0] / known.block_size
