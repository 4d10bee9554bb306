"""A recipe: the complete description of a preset.

It has the preset's three policies and how to make them, its options, and facts about it: whether it
is compared, needs a slot for fetches, or may change a token.
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
    """Inputs from which the policies of a preset are made.

    capacity: residents per MoE layer; a preset may divide the total otherwise.
    options: values by name; a recipe uses its own options, with defaults for missing ones.
    frequency: [layers, experts], a calibration's activations; without one static presets keep the
        first experts by id.
    following: [layers - 1, experts, experts], from `count_following`; None without a calibration.
    hits: [passes, layers, experts], a calibration's tokens per expert: the load that
        `moe-lightning` plans for and by which `lowtide` divides its residents. Without one every
        expert counts one token, and layers keep `capacity`.
    on_tau_change: called when an interval that follows the drift changes.
    buddies: a calibration's buddy profile. twins: implementations of substitution, counting and
        balancing; by default the plain ones.
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
        """Number of MoE layers; others are not counted."""
        return len(self.capacity)

    def having(self, **options: object) -> PolicyInputs:
        """Return the same inputs with further options."""
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True, slots=True)
class PolicyOption(Generic[T_co]):
    """An option of a preset: a number in a range, or a word; docs/policies.md describes each.

    Numbers need not be whole if the default is a float or, for a default that is not a number, if
    an end of the range is a float. is_above_low: `low` itself is excluded. words: word -> value; a
    switch has `true` and `false` and no range.
    """

    name: str
    default: T_co
    low: float = 0
    high: float = -1  # below `low`: no number will do
    words: Mapping[str, T_co] = field(default_factory=dict)
    is_above_low: bool = False

    @property
    def is_whole(self) -> bool:
        """True if numbers must be whole."""
        kind = type(self.default)
        if kind in (int, float):
            return kind is int
        return float not in (type(self.low), type(self.high))

    def of(self, inputs: PolicyInputs) -> T_co:
        """Return the option's value."""
        return cast(T_co, inputs.options.get(self.name, self.default))

    def parse(self, text: str) -> T_co:
        """Parse a value. Raise UsageError unless it is in the range or one of the words."""
        if text in self.words:
            return self.words[text]
        number = _number(text, self.is_whole)
        is_above = number is not None and (number > self.low or not self.is_above_low)
        if number is not None and is_above and self.low <= number <= self.high:
            return cast(T_co, number)
        raise UsageError(f"{self.name} must be {self.choices}, not {text!r}.")

    @property
    def choices(self) -> str:
        """The accepted values, in words."""
        if self.high < self.low:
            return " or ".join(self.words)
        kind = "a whole number" if self.is_whole else "a number"
        start = "above" if self.is_above_low else "from"
        return ", or ".join([f"{kind} {start} {self.low:g} to {self.high:.15g}", *self.words])


def _number(text: str, is_whole: bool) -> float | None:
    """Parse a plain finite number, or return None."""
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
    """Make an option that is `true` or `false`, by default false."""
    return PolicyOption(name, False, words={"true": True, "false": False})


def _all_host(inputs: PolicyInputs) -> Assign:
    return AllHost()


def _no_prefetch(inputs: PolicyInputs) -> Prefetch:
    return NoPrefetch()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Recipe:
    """A preset: how its three policies are made from `PolicyInputs`, and facts about it.

    prefetch: used only beside a device; without one every preset reads ahead alike.
    borrowed: other presets' options that it also takes, looked up on demand.
    capacity: residents of each layer at the start.
    waits: True if a step waits for the experts it admits.
    fetches_all: fetches every absent expert, so it needs a staging slot.
    weighs_moves: its placement uses the cost of moves.
    is_lossless: changes no token.
    substitution: may run other experts than the router chose, if its options say so; not lossless.
    substitutes: True if these options do. max_mass: limit for each request.
    asks_scores: its substitution needs the router's scores in its facts, always or by its options.
    check_buddies: raises UsageError if options need a buddy profile and there is none.
    contradiction: returns an error message for contradictory options, or None.
    sizes: describes the numbers that options resolve to, for layers of this many experts, with a
    device or not.
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
    asks_scores: bool | Callable[[Mapping[str, object]], bool] = False
    check_buddies: Callable[[Mapping[str, object], BuddyProfile | None], None] = (
        lambda options, profile: None
    )
    contradiction: Callable[[Mapping[str, object]], str | None] = lambda options: None
    sizes: Callable[[Mapping[str, object], int, bool], str] = lambda options, num, has_device: ""

    def __post_init__(self) -> None:
        if not all(isinstance(option, PolicyOption) for option in self.options):
            raise UsageError(
                'Recipe.options: give a tuple of PolicyOption, such as (PolicyOption("decay", '
                f"0.9, 0.0, 1.0),), not {self.options!r:.80}."
            )

    @property
    def unused_without_device(self) -> tuple[str, ...]:
        """Names of its policies that the host alone does not use."""
        own = {
            "assignment": self.assignment is not _all_host,
            "prefetch": self.prefetch is not _no_prefetch,
        }
        return tuple(name for name, is_own in own.items() if is_own)

    def needs_scores(self, options: Mapping[str, object]) -> bool:
        """Return True if `asks_scores` is true, with these options."""
        return self.asks_scores(options) if callable(self.asks_scores) else self.asks_scores

    def policies(self, inputs: PolicyInputs) -> Policies:
        """Make the preset's policies for one model, budget and machine.

        Raises PlanError if it fetches everything and there is no slot to fetch into.
        """
        if self.fetches_all and not inputs.costs.num_staging:
            raise PlanError(
                "Fetching absent experts needs at least 1 staging slot and there is none; raise "
                "`gpu_memory` or choose a policy that computes them on the host, such as tide."
            )
        alone = self.policies_without_device(inputs)
        return replace(
            alone,
            assign=self.assignment(inputs),
            prefetch=self.prefetch(inputs),
            waits=self.waits(inputs),
        )

    def policies_without_device(self, inputs: PolicyInputs) -> Policies:
        """Make the recipe's placement for a host that runs every expert and reads absent ones."""
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
            asks_scores=substitution is not None and self.needs_scores(inputs.options),
        )
