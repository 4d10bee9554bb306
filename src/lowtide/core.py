"""Shared nouns: what the rooms of lowtide hand to each other.

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
"""A mapping that is empty and stays so, as a default."""

NO_EXPERTS: IntArray = np.empty(0, np.int64)
"""No expert."""

ALIGNMENT = 64
"""Bytes: every weight part and every workspace buffer starts on such a boundary."""


def align_up(size: int, alignment: int = ALIGNMENT) -> int:
    """The least multiple of `alignment` that is not below `size`."""
    return -(-size // alignment) * alignment


class StepKind(enum.Enum):
    """What a forward pass is for; policies are told, kernels are not."""

    PREFILL = "prefill"  # tokens that are final: only their keys and values are wanted
    DENOISE = "denoise"  # a diffusion block (and, folded in, tokens that became final)
    DECODE = "decode"  # one new token per sequence


class RowKind(enum.IntEnum):
    """What becomes of one row of a pass."""

    PROMPT = 0  # a token that was given: its keys and values are kept
    COMMIT = 1  # a token of a diffusion block that is final: they are kept, too
    DRAFT = 2  # a row of a block on its way: nothing of it outlasts the pass but what it writes
    DECODE = 3  # the newest token of an autoregressive answer: kept, and the next is chosen by it


class PassRows(NamedTuple):
    """Whose the rows of a pass are, and what for."""

    request: IntArray  # [rows] names as in events; -1: none
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
    block; in a batch it is one counter of the engine. A prefill pass carries the index of the
    pass that follows it and does not count. `rows`: of the pass, where they are known.
    `is_last`: no other is expected to follow.
    """

    kind: StepKind
    index: int
    rows: PassRows | None = field(default=None, compare=False, repr=False)
    is_last: bool = field(default=False, compare=False)

    def rows_of(self, num_rows: int) -> PassRows:
        """Those it was told, or what its kind says of so many."""
        if self.rows is not None:
            return self.rows
        kinds = np.full(num_rows, _ROW_KIND[self.kind], np.uint8)
        return PassRows(np.full(num_rows, -1), kinds)


class CacheMode(enum.Enum):
    """Which keys and values the steps of a block find as the block's first step left them.

    Where every position sees every other, all of them change with each token that is written: to
    keep some is an approximation (Fast-dLLM, section 3.2).
    """

    EXACT = "exact"  # none that would be others if they were computed again
    PREFIX = "prefix"  # those of everything before the block
    DUAL = "dual"  # those of everything before and behind it


class Reuse(enum.Enum):
    """What a request takes over of keys and values that an earlier one has computed."""

    ON = "on"  # all that begins as it does
    EXACT = "exact"  # only what gives the ids of a run that computes everything itself
    OFF = "off"


class Demand(NamedTuple):
    """What one MoE layer asks for in one step."""

    experts: IntArray  # ascending ids of the experts with at least one token
    num_tokens: IntArray  # tokens routed to each of them ("hits")
    is_resident: BoolArray  # whether its weights are in a slot already


def hit_rate(num_hits: float, num_activated: float) -> float:
    """The share of activated experts that was resident; NaN where none was activated."""
    return num_hits / num_activated if num_activated else math.nan


class RoutedTokens(NamedTuple):
    """Which experts each token goes to, and with what weights: a router's choice, or another."""

    experts: IntArray  # [tokens, k], ascending in each row
    weights: WeightArray  # [tokens, k]
    scores: WeightArray | None = None  # [tokens, num_experts], the router's logits


class Moves(NamedTuple):
    """A placement policy's answer for one layer: what to keep from now on, what to let go.

    `admit` are experts that are not resident and shall be after this step; `evict` are
    residents that shall not. An evicted expert that this step needs is evicted after its use.
    `later`: without a device, who shall be when the layer comes again; nothing waits for them yet.
    `is_owed`: experts that this step does not bring anyway come between it and the next one, which
    waits for it; else in idle link time, where a layer's next moves replace those not begun.
    """

    admit: IntArray
    evict: IntArray
    later: IntArray = NO_EXPERTS
    is_owed: bool = False
    num_left_out: int = 0  # asked for by the placement, but they cannot come: no link is idle

    @property
    def num_asked(self) -> int:
        """Experts that were to become resident."""
        return len(self.admit) + len(self.later) + self.num_left_out


NO_MOVES = Moves(NO_EXPERTS, NO_EXPERTS)


class MoEShape(NamedTuple):
    """What the expert runtime needs to know of a model."""

    num_layers: int  # MoE layers only, numbered from 0
    num_experts: int  # routed experts per MoE layer
    num_experts_per_token: int
    hidden_size: int
    expert_size: int  # width of an expert's gate and up projections


class Assignment(NamedTuple):
    """Who computes each activated expert of one layer's step, every one exactly once.

    Ids ascend. `resident` run on the device from the slots they are in, `fetch` on the device
    once their weights have arrived, `host` on the CPU where their bytes have their home (a
    resident expert may be among them).
    """

    resident: IntArray
    fetch: IntArray
    host: IntArray


_FAR_TOKENS = 2.0**40  # beyond any step: the last segment of a curve is drawn on to here
_NUM_KNOWN = 1025  # counts whose time is looked up: those of nearly every expert in every step


class Curve:
    """Seconds as a piecewise-linear function of a token count; no tokens take no time.

    Before the first point the time is that of the first point, after the last one the last
    segment goes on.
    """

    __slots__ = ("_known_s", "_num_tokens", "_seconds")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """`points`: (tokens, seconds), tokens ascending from at least 1, at least one point.

        Raises ValueError when they are not.
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
        self._known_s = self._interpolated(np.arange(_NUM_KNOWN))

    def __call__(self, num_tokens: IntArray) -> FloatArray:
        """Seconds for each count; the shape of `num_tokens`."""
        try:
            return self._known_s[num_tokens]
        except IndexError:
            return self._interpolated(num_tokens)

    def scaled(self, factor: float) -> Curve:
        """`factor` times as long at every count."""
        scaled = Curve([(1.0, 0.0)])
        scaled._num_tokens, scaled._seconds = self._num_tokens, factor * self._seconds
        scaled._known_s = factor * self._known_s
        return scaled

    def at(self, num_tokens: int) -> float:
        """Seconds for one count."""
        if num_tokens < _NUM_KNOWN:
            return float(self._known_s[num_tokens])
        return float(self._interpolated(np.array([num_tokens]))[0])

    def _interpolated(self, num_tokens: IntArray) -> FloatArray:
        seconds: FloatArray = np.interp(num_tokens, self._num_tokens, self._seconds)
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """What one expert costs on this machine: measured or from a data sheet, never guessed here.

    Every policy's constants come from here. With `disk_read_s` above 0 the home of experts is
    the disk, and a read runs beside whatever it feeds.
    """

    expert_bytes: int
    link_s: float  # one expert, host memory to a device slot
    host_s: Curve  # one expert on the CPU
    device_s: Curve  # one expert on the device, its weights present
    dense_s: Curve  # the rest of a layer on the device: attention, router, shared expert
    sync_s: float  # one device-to-host synchronisation
    disk_read_s: float = 0.0  # one expert, disk to host memory; 0 with a home in host memory
    num_staging: int = 2  # slots through which fetched experts pass, whatever is prefetched
    num_ahead: int = 0  # more of them, as far as no prefetched expert is in them

    @classmethod
    def unknown(cls, expert_bytes: int) -> Costs:
        """Every time is 0: for policies that do not ask."""
        nothing = Curve([(1, 0.0)])
        return cls(expert_bytes, 0.0, nothing, nothing, nothing, 0.0)

    @property
    def fetch_s(self) -> float:
        """Seconds that each absent expert adds to a steady stream of fetches."""
        return max(self.link_s, self.disk_read_s)

    def at_home_s(self, num_tokens: IntArray) -> FloatArray:
        """Seconds of each expert on the CPU, read beside it where its home is the disk."""
        host_s = self.host_s(num_tokens)
        return np.maximum(host_s, self.disk_read_s) if self.disk_read_s else host_s


class Left(NamedTuple):
    """What each request of a pass may still have replaced of its router's weight."""

    owner: IntArray  # [rows] whose each row is, as an index of `mass`
    mass: FloatArray  # [requests of the pass]; infinite where nothing bounds it


class Facts(NamedTuple):
    """What a layer's policies are told in one step, once its router has spoken.

    Made once per layer and step and never changed: a policy reads it and keeps what it wants to
    remember elsewhere. Costs come with it; a policy that makes a table or a plan of them does so
    when it is made, of the same ones.
    """

    step: Step
    layer: int
    demand: Demand
    is_kept: BoolArray  # [num_experts]: residents, and those on their way to be
    capacity: IntArray  # [num_layers]: residents that each layer may have now
    costs: Costs
    arriving_s: FloatArray | None = None
    """[len(demand.experts)]: seconds until an expert that is on its way, or staged, can be used;
    infinite where nothing is under way, None where nothing at all is."""
    link_s: float = 0.0  # seconds until the link is free for a fetch
    can_fetch: bool = True  # whether there is a slot for an absent expert on the device
    has_idle_link: bool = True
    """Whether experts that the step does not ask for can be brought, too; without a device the
    layer's reads are all there is."""
    fetched: IntArray = NO_EXPERTS
    """Absent experts that the step brings anyway, once decided: keeping one moves nothing."""
    routing: RoutedTokens | None = None  # of the step, for policies that ask for it
    is_here: BoolArray | None = None
    """[num_experts]: residents, whether the step asks for them or not; None: as `is_kept`."""
    is_at_host: BoolArray | None = None
    """[num_experts]: whose bytes are in host memory, beside a device; None: all of them."""
    left: Left | None = None  # told to a substitution, where something bounds it

    @property
    def room(self) -> int:
        """Residents that the layer may have now."""
        return int(self.capacity[self.layer])
