"""Shared nouns that the rooms of lowtide pass to each other.

Plain data, numpy at most. Knows nothing of files, devices or models.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
WeightArray = NDArray[np.float32]

NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""An immutable empty mapping, for defaults."""

NO_EXPERTS: IntArray = np.empty(0, np.int64)
ALIGNMENT = 64
"""Alignment in bytes of every weight part and every workspace buffer."""


def align_up(size: int, alignment: int = ALIGNMENT) -> int:
    """Round `size` up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


class StepKind(enum.Enum):
    """Purpose of a forward pass; policies see it, kernels do not."""

    PREFILL = "prefill"  # prompt tokens, of which only keys and values are needed
    DENOISE = "denoise"  # a diffusion block (and, folded in, tokens that became final)
    DECODE = "decode"  # one new token per sequence


class RowKind(enum.IntEnum):
    """Purpose of one row of a pass."""

    PROMPT = 0  # a given token: its keys and values are kept
    COMMIT = 1  # a final token of a diffusion block: its keys and values are kept
    DRAFT = 2  # a row of an unfinished block: only the tokens it writes outlast the pass
    DECODE = 3  # the newest token of an autoregressive answer: kept, and its logits choose the next


class PassRows(NamedTuple):
    """Owner and purpose of each row of a pass."""

    request: IntArray  # [rows] request ids as in events; -1: none
    kind: NDArray[np.uint8]  # [rows] of `RowKind`


_ROW_KIND = {
    StepKind.PREFILL: RowKind.PROMPT,
    StepKind.DENOISE: RowKind.DRAFT,
    StepKind.DECODE: RowKind.DECODE,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, as policies see it.

    `index` counts denoising (or decoding) passes. With one sequence it restarts at 0 in every
    block; in a batch it is one counter of the engine. A prefill pass carries the index of the pass
    that follows it and does not count.
    """

    kind: StepKind
    index: int
    rows: PassRows | None = field(default=None, compare=False, repr=False)
    is_last: bool = field(default=False, compare=False)

    def rows_of(self, num_rows: int) -> PassRows:
        """Return the given rows, or `num_rows` rows of the default kind of this step."""
        if self.rows is not None:
            return self.rows
        kinds = np.full(num_rows, _ROW_KIND[self.kind], np.uint8)
        return PassRows(np.full(num_rows, -1), kinds)


class CacheMode(enum.Enum):
    """Keys and values that the steps of a block reuse from the block's first step.

    In a bidirectional model all of them change with each written token, so reuse is an
    approximation (Fast-dLLM, section 3.2).
    """

    EXACT = "exact"  # only those that recomputing would reproduce exactly
    PREFIX = "prefix"  # those of everything before the block
    DUAL = "dual"  # those of everything before and after it


class Reuse(enum.Enum):
    """Keys and values of earlier requests that a new request may reuse."""

    ON = "on"  # those of any shared prefix
    EXACT = "exact"  # only where token ids equal those of a fresh run
    OFF = "off"


class Demand(NamedTuple):
    """Experts that one MoE layer uses in one step."""

    experts: IntArray  # ascending ids of the experts with at least one token
    num_tokens: IntArray  # tokens routed to each of them ("hits")
    is_resident: BoolArray  # whether its weights are in a slot already


def hit_rate(num_hits: float, num_activated: float) -> float:
    """Return the share of activated experts that was resident; NaN if none was activated."""
    return num_hits / num_activated if num_activated else math.nan


class RoutedTokens(NamedTuple):
    """Experts and weights of each token, from a router or a substitution."""

    experts: IntArray  # [tokens, k], ascending in each row
    weights: WeightArray  # [tokens, k]
    scores: WeightArray | None = None  # [tokens, num_experts], the router's logits


class Moves(NamedTuple):
    """A placement policy's decision for one layer: experts to admit and to evict.

    admit: experts that become resident after this step.
    evict: residents that leave; one that this step needs is evicted after its use.
    later: without a device, experts to become resident when the layer runs again; nothing waits for
      them yet.
    is_owed: True if admitted experts that this step does not fetch anyway arrive before the layer's
      next step, which waits for them; otherwise they use idle link time, and the layer's next moves
      replace those not begun.
    """

    admit: IntArray
    evict: IntArray
    later: IntArray = NO_EXPERTS
    is_owed: bool = False
    num_left_out: int = 0  # asked for by the placement but refused: the link is busy

    @property
    def num_asked(self) -> int:
        """Number of experts that were to become resident."""
        return len(self.admit) + len(self.later) + self.num_left_out


NO_MOVES = Moves(NO_EXPERTS, NO_EXPERTS)


class MoEShape(NamedTuple):
    """Shape of a model's MoE layers."""

    num_layers: int  # MoE layers only, numbered from 0
    num_experts: int  # routed experts per MoE layer
    num_experts_per_token: int
    hidden_size: int
    expert_size: int  # width of an expert's gate and up projections


class Assignment(NamedTuple):
    """The processor for each activated expert of one layer's step; each appears once.

    Ids ascend. `resident` experts run on the device from their slots, `fetch` on the device once
    their weights have arrived, `host` on the CPU from their home (a resident expert may be among
    them).
    """

    resident: IntArray
    fetch: IntArray
    host: IntArray


_FAR_TOKENS = 2.0**40  # beyond any step: end of a curve's last segment
NUM_KNOWN = 1025
"""Token counts below this are looked up in tables; larger ones are rare."""


class Curve:
    """Seconds as a piecewise-linear function of a token count; no tokens take no time.

    Below the first point the time is that of the first point; beyond the last one the last segment
    continues.
    """

    __slots__ = ("_known_s", "_num_tokens", "_seconds")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """points: (tokens, seconds) with tokens ascending from at least 1, at least one point.

        Raises ValueError for other points.
        """
        tokens, seconds = [p[0] for p in points], [p[1] for p in points]
        is_ascending = all(a < b for a, b in zip(tokens, tokens[1:], strict=False))
        if not points or tokens[0] < 1 or not is_ascending or min(seconds) < 0:
            raise ValueError(f"a curve needs ascending tokens and times from 0, not {points}.")
        slope = 0.0
        if len(points) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]))
        far_s = seconds[-1] + slope * (_FAR_TOKENS - tokens[-1])
        self._num_tokens = np.array([0.0, 1.0, *tokens, _FAR_TOKENS])
        self._seconds = np.array([0.0, seconds[0], *seconds, far_s])
        self._known_s = self._interpolated(np.arange(NUM_KNOWN))

    def __call__(self, num_tokens: IntArray) -> FloatArray:
        """Return seconds for each count, in the shape of `num_tokens`."""
        try:
            return self._known_s[num_tokens]
        except IndexError:
            return self._interpolated(num_tokens)

    def scaled(self, factor: float) -> Curve:
        """Return the curve with every time multiplied by `factor`."""
        scaled = Curve([(1.0, 0.0)])
        scaled._num_tokens, scaled._seconds = self._num_tokens, factor * self._seconds
        scaled._known_s = factor * self._known_s
        return scaled

    def at(self, num_tokens: int) -> float:
        """Return seconds for one count."""
        if num_tokens < NUM_KNOWN:
            return float(self._known_s[num_tokens])
        return float(self._interpolated(np.array([num_tokens]))[0])

    def _interpolated(self, num_tokens: IntArray) -> FloatArray:
        seconds: FloatArray = np.interp(num_tokens, self._num_tokens, self._seconds)
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Costs of one expert on this machine, measured or from a data sheet.

    All policies take their constants from here. With `disk_read_s` above 0 the home of experts is
    the disk, and reads overlap with whatever they feed.
    """

    expert_bytes: int
    link_s: float  # one expert, host memory to a device slot
    host_s: Curve  # one expert on the CPU
    device_s: Curve  # one expert on the device, its weights present
    dense_s: Curve  # the rest of a layer on the device: attention, router, shared expert
    sync_s: float  # one device-to-host synchronisation
    disk_read_s: float = 0.0  # one expert, disk to host memory; 0 with a home in host memory
    num_staging: int = 2  # slots reserved for fetched experts, apart from prefetched ones
    num_ahead: int = 0  # further slots, while no prefetched expert occupies them

    @classmethod
    def unknown(cls, expert_bytes: int) -> Costs:
        """Return costs of zero, for policies that do not use them."""
        nothing = Curve([(1, 0.0)])
        return cls(expert_bytes, 0.0, nothing, nothing, nothing, 0.0)

    @property
    def fetch_s(self) -> float:
        """Seconds that each absent expert adds to a steady stream of fetches."""
        return max(self.link_s, self.disk_read_s)

    def at_home_s(self, num_tokens: IntArray) -> FloatArray:
        """Return seconds of each expert on the CPU, including its overlapped read from disk."""
        host_s = self.host_s(num_tokens)
        return np.maximum(host_s, self.disk_read_s) if self.disk_read_s else host_s


class Left(NamedTuple):
    """Router weight of each request that may still be replaced (BuddyMoE's budget)."""

    owner: IntArray  # [rows] index into `mass` of each row's request
    mass: FloatArray  # [requests of the pass]; infinite if unbounded


class Facts(NamedTuple):
    """Facts of a layer's step for its policies, made after its router ran.

    Made once per layer and step and never changed. A policy that derives a table or plan from the
    costs does so when it is constructed, from the same costs.
    """

    step: Step
    layer: int
    demand: Demand
    is_kept: BoolArray  # [num_experts]: residents and experts on their way to become one
    capacity: IntArray  # [num_layers]: residents that each layer may have now
    costs: Costs
    arriving_s: FloatArray | None = None
    """[len(demand.experts)]: seconds until an expert in flight or staged can be used.

    Infinite for experts not under way; None if none is.
    """
    link_s: float = 0.0  # seconds until the link is free for a fetch
    can_fetch: bool = True  # False without a free device slot for an absent expert
    has_idle_link: bool = True
    """True if experts that the step does not use may be fetched, too (only with a device)."""
    fetched: IntArray = NO_EXPERTS
    """Absent experts that the step fetches anyway, once decided: keeping one moves nothing."""
    routing: RoutedTokens | None = None  # the step's routing, for policies that ask for it
    is_here: BoolArray | None = None
    """[num_experts]: residents, used in this step or not; None: as `is_kept`."""
    is_at_host: BoolArray | None = None
    """[num_experts]: experts with their bytes in host memory, beside a device; None: all."""
    left: Left | None = None  # for substitutions, if their replaced mass is bounded

    @property
    def room(self) -> int:
        """Number of residents that the layer may have now."""
        return int(self.capacity[self.layer])
