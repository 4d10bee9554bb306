"""A recipe: everything that a preset is, in one place.

Its three policies and how they are made, the options that a user may give, and what others ask
about it: who compares it, who must make room for its fetches, whether it changes a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

import numpy as np

from lowtide.buddies import BuddyTwins
from lowtide.core import Costs, FloatArray, IntArray
from lowtide.errors import PlanError, UsageError
from lowtide.policies.assignment import AllHost, Assign, HostAlone
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.policies.decision import Policies
from lowtide.policies.online_tau import TauChange
from lowtide.policies.placement import Placement
from lowtide.policies.prefetch import NoPrefetch, Prefetch
from lowtide.policies.readmission import Readmission
from lowtide.policies.receipt import Receipts
from lowtide.policies.substitution import CountedSubstitution, Substitution

T_co = TypeVar("T_co", covariant=True)

MAX_WHOLE = 999_999


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """What the policies of a preset are made from.

    capacity: residents per MoE layer; a preset may divide as many in all otherwise.
    options: values by name; each recipe takes those of its own, defaults for the others.
    frequency: [layers, experts], a calibration's activations; without one static presets keep the
        first experts by id.
    following: [layers - 1, experts, experts], from `count_following`; without one no statistics.
    hits: [passes, layers, experts], a calibration's tokens per expert, the load that
        `moe-lightning` plans for and `lowtide` divides its residents for; without one every
        expert is given one token, and all layers what `capacity` says.
    on_tau_change: is told of an interval that follows the drift.
    buddies: which experts may stand in for which, from a calibration; twins: what substitutes,
        counts and balances beside that, the plain ones by default.
    """

    capacity: Sequence[int]
    num_experts: int
    costs: Costs
    frequency: FloatArray | None = None
    following: FloatArray | None = None
    hits: IntArray | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    on_tau_change: Callable[[TauChange], None] = lambda change: None
    seed: int = 0
    buddies: BuddyProfile | None = None
    twins: BuddyTwins | None = None

    @property
    def num_layers(self) -> int:
        return len(self.capacity)

    def having(self, **options: object) -> PolicyInputs:
        """The same with these options, too."""
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True, slots=True)
class PolicyOption(Generic[T_co]):
    """An option of a preset: a number in a range, or a word; docs/policies.md describes each.

    default: where it is a float, or none of a number and an end of the range is one, numbers need
    not be whole, and may be told to be above `low`. words: the value of each; a switch has `true`
    and `false` and no range.
    """

    name: str
    default: T_co
    low: float = 0
    high: float = -1  # below `low`: no number will do
    words: Mapping[str, T_co] = field(default_factory=dict)
    is_above_low: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers will do."""
        kind = type(self.default)
        if kind in (int, float):
            return kind is int
        return float not in (type(self.low), type(self.high))

    def of(self, inputs: PolicyInputs) -> T_co:
        """The value in force."""
        return cast(T_co, inputs.options.get(self.name, self.default))

    def parse(self, text: str) -> T_co:
        """Raises UsageError for what is neither a number in the range nor one of the words."""
        if text in self.words:
            return self.words[text]
        number = _number(text, self.is_whole)
        is_above = number is not None and (number > self.low or not self.is_above_low)
        if number is not None and is_above and self.low <= number <= self.high:
            return cast(T_co, number)
        raise UsageError(f"{self.name} must be {self.choices}, not {text!r}.")

    @property
    def choices(self) -> str:
        """What may be said, in words."""
        if self.high < self.low:
            return " or ".join(self.words)
        kind = "a whole number" if self.is_whole else "a number"
        start = "above" if self.is_above_low else "from"
        return ", or ".join([f"{kind} {start} {self.low:g} to {self.high:.15g}", *self.words])


def _number(text: str, is_whole: bool) -> float | None:
    """None for what is not a plain finite number."""
    if not text.isascii() or len(text) > 24:
        return None
    if is_whole:
        return int(text) if text.isdecimal() and len(text) <= 16 else None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in text else None


def switch(name: str) -> PolicyOption[bool]:
    """An option that is `true` or `false`, false unless it is given."""
    return PolicyOption(name, False, words={"true": True, "false": False})


def _all_host(inputs: PolicyInputs) -> Assign:
    return AllHost()


def _no_prefetch(inputs: PolicyInputs) -> Prefetch:
    return NoPrefetch()


@dataclass(frozen=True, slots=True)
class Recipe:
    """A preset: how each of its three policies is made from `PolicyInputs`, with its properties.

    prefetch: beside a device alone; where there is none the next layer's experts are read ahead
    under every preset.
    borrowed: further options, other presets', looked up when they are asked for.
    capacity: residents of each layer at the start, which the placement gets.
    waits: whether a step waits for the experts it admits.
    fetches_all: every absent expert is fetched, so that it cannot be without a staging slot.
    weighs_moves: the placement asks what a move costs.
    is_lossless: no token depends on what it decides.
    substitution: what may have other experts run than the router chose, if its inputs says so;
    not lossless then. substitutes: whether these options do; max_mass: what bounds it, for each
    request.
    asks_scores: its substitution wants the router's scores in its facts, too.
    contradiction: what of these options contradicts another, as a sentence.
    """

    placement: Callable[[PolicyInputs], Placement]
    assignment: Callable[[PolicyInputs], Assign] = _all_host
    prefetch: Callable[[PolicyInputs], Prefetch] = _no_prefetch
    options: tuple[PolicyOption[object], ...] = ()
    borrowed: Callable[[], Iterable[PolicyOption[object]]] = tuple
    capacity: Callable[[PolicyInputs], Sequence[int]] = lambda inputs: inputs.capacity
    waits: Callable[[PolicyInputs], bool] = lambda inputs: False
    fetches_all: bool = False
    weighs_moves: bool = False
    is_lossless: bool = True
    substitution: Callable[[PolicyInputs], Substitution | CountedSubstitution | None] | None = None
    substitutes: Callable[[Mapping[str, object]], bool] = lambda options: True
    max_mass: Callable[[PolicyInputs], float | None] = lambda inputs: None
    asks_scores: bool = False
    contradiction: Callable[[Mapping[str, object]], str | None] = lambda options: None

    @property
    def unused_without_device(self) -> tuple[str, ...]:
        """What of it the host alone does not use."""
        own = {
            "assignment": self.assignment is not _all_host,
            "prefetch": self.prefetch is not _no_prefetch,
        }
        return tuple(name for name, is_own in own.items() if is_own)

    def policies(self, inputs: PolicyInputs) -> Policies:
        """The preset at work, for one model, budget and machine.

        Raises PlanError where it fetches everything and there is no slot to fetch into.
        """
        if self.fetches_all and not inputs.costs.num_staging:
            raise PlanError(
                "Fetching absent experts needs at least 1 staging slot and there is none; raise "
                "--gpu-memory or choose a policy that computes them on the host, such as tide."
            )
        alone = self.policies_without_device(inputs)
        return replace(
            alone,
            assign=self.assignment(inputs),
            prefetch=self.prefetch(inputs),
            waits=self.waits(inputs),
        )

    def policies_without_device(self, inputs: PolicyInputs) -> Policies:
        """Its placement, where the host runs every expert and reads each that is absent."""
        divided = replace(inputs, capacity=self.capacity(inputs))
        substitution = None if self.substitution is None else self.substitution(inputs)
        receipts, readmission = None, None
        if substitution is not None:
            receipts = Receipts(inputs.num_layers, self.max_mass(inputs), inputs.twins)
            readmission = Readmission(inputs.num_layers)
        return Policies(
            self.placement(divided),
            HostAlone(),
            NoPrefetch(),
            np.array(divided.capacity, np.int64),
            inputs.costs,
            substitution=substitution,
            receipts=receipts,
            readmission=readmission,
            asks_routing=substitution is not None,
            asks_scores=self.asks_scores and substitution is not None,
        )
