"""The preset `buddymoe`: another preset's placement, and a miss policy that changes words.

Declares its options, and makes the miss policy from them and a buddy profile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from lowtide.buddies import BuddyTwins, LayerRules, PassAccount
from lowtide.core import Facts, RoutedTokens, RowKind
from lowtide.errors import UsageError
from lowtide.files.json_file import meant
from lowtide.policies.assignment import Assign
from lowtide.policies.buddy_profile import (
    DEFAULT_ALPHA,
    DEFAULT_K_MAX,
    MAX_K_MAX,
    BuddyProfile,
)
from lowtide.policies.deadlines import waits_of
from lowtide.policies.plain_buddies import PlainBuddies
from lowtide.policies.recipe import PolicyInputs, PolicyOption, Recipe, switch
from lowtide.policies.substitution import CountedSubstitution

NAME = "buddymoe"
_UNBOUNDED = 1 << 30
"""Limit of a token's substitutions that is never reached."""


def _up_to(name: str, high: float, default: float | None = None) -> PolicyOption[float | None]:
    """Make an option that is a number from 0 to `high`, or `off`."""
    return PolicyOption(name, default, 0.0, high, {"off": None})


# What becomes of tokens whose experts are absent.
MISS = PolicyOption("miss", "wait", words={name: name for name in ("buddy", "late", "wait")})
# The share of an expert's co-activations that its buddies cover.
ALPHA = PolicyOption("alpha", DEFAULT_ALPHA, 0, 1, is_above_low=True)
K_MAX = PolicyOption("k_max", DEFAULT_K_MAX, 1, MAX_K_MAX)  # buddies of an expert, at most
# Substitutions of a token in a layer, at most.
RHO: PolicyOption[int | None] = PolicyOption(
    "rho", None, 0, MAX_K_MAX, {"half": None, "none": _UNBOUNDED}
)
BETA = _up_to("beta", 1)  # the share of absent experts from which a layer substitutes nothing
TAE = _up_to("tae", 100)  # tokens below this percentile of the calibration's entropies are spared
MARGIN = _up_to("margin", 1)  # tokens whose best expert leads by this much are spared
# The estimated KL of a token in nats, at most; bounds the mass by the profile's curve.
MAX_KL = _up_to("max_kl", 1000)
# The share of a request's router weight that may be replaced. By default what lost nothing that
# could be seen, of all that docs/buddymoe.md compares.
MAX_MASS = _up_to("max_mass", 1, 0.05)
IN_PREFILL = switch("in_prefill")  # rows of prompts may be touched
IN_COMMIT = switch("in_commit")  # rows that cache final tokens of a block may be touched
_OWN: tuple[PolicyOption[object], ...] = (
    *(MISS, ALPHA, K_MAX, RHO, BETA, TAE, MARGIN, MAX_KL, MAX_MASS, IN_PREFILL, IN_COMMIT),
)


class Buddies(CountedSubstitution):
    """BuddyMoE: an absent expert is replaced by its first buddy that is here, with its weight.

    rules: of each layer. assign: if given, only experts that arrive too late are replaced
    (`policies/deadlines.py`); it says where each expert would be computed without replacements.
    """

    def __init__(
        self, rules: Sequence[LayerRules], twins: BuddyTwins, assign: Assign | None = None
    ) -> None:
        self._layers = [twins.of_layer(one) for one in rules]
        self._assign = assign

    def counted(self, facts: Facts, account: PassAccount) -> RoutedTokens | None:
        waits = None
        if self._assign is not None and not facts.demand.is_resident.all():
            waits = waits_of(facts, self._assign)
        return self._layers[facts.layer](facts, account, waits)


class _Names(Mapping[str, str]):
    """Names of the presets whose placement this one can use; imports none of them."""

    def __init__(self, bases: Mapping[str, Recipe]) -> None:
        self._bases = bases

    def __getitem__(self, name: str) -> str:
        if name in (NAME, "resident") or name not in self._bases:
            raise KeyError(name)
        return name

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._bases if name not in (NAME, "resident"))

    def __len__(self) -> int:
        return len(list(iter(self)))


def over(bases: Mapping[str, Recipe]) -> Recipe:
    """Make the preset for the placements of `bases`, chosen by `placement`; they may grow later."""
    placement = PolicyOption("placement", "lowtide", words=_Names(bases))

    def base(inputs: PolicyInputs) -> Recipe:
        return bases[placement.of(inputs)]

    def contradiction(options: Mapping[str, object]) -> str | None:
        name = str(options.get(placement.name, placement.default))
        others = [option.name for option in bases[name].options]
        return _stray({placement.name, *others}, options, f"placement={name}", others)

    def sizes(options: Mapping[str, object], num_experts: int, has_device: bool) -> str:
        name = str(options.get(placement.name, placement.default))
        return bases[name].sizes(options, num_experts, has_device)

    def borrowed() -> list[PolicyOption[object]]:
        return [option for name in _Names(bases) for option in bases[name].options]

    return Recipe(
        lambda s: base(s).placement(s),
        lambda s: base(s).assignment(s),
        lambda s: base(s).prefetch(s),
        options=(placement, *_OWN),
        borrowed=borrowed,
        capacity=lambda s: base(s).capacity(s),
        waits=lambda s: base(s).waits(s),
        fetches_all=True,
        weighs_moves=True,
        is_lossless=False,
        substitution=lambda s: miss_policy(s, base(s)),
        substitutes=lambda options: options.get(MISS.name, MISS.default) != "wait",
        max_mass=max_mass,
        contradiction=contradiction,
        sizes=sizes,
    )


def miss_policy(inputs: PolicyInputs, base: Recipe) -> Buddies | None:
    """Make the policy named by `miss`; None if nothing can be replaced.

    Raises UsageError for options that need a profile if there is none or it is another model's.
    """
    miss, profile = MISS.of(inputs), inputs.buddies
    if profile is not None:
        _check_profile(profile, inputs)
    if miss == "wait" or RHO.of(inputs) == 0:
        return None
    if profile is None:
        raise UsageError(
            f"Policy {NAME!r} with miss={miss} needs a buddy profile and there is none for this "
            "model: run lowtide calibrate --buddies first."
        )
    assign = base.assignment(inputs) if miss == "late" else None
    return Buddies(layer_rules(inputs, profile), inputs.twins or PlainBuddies(), assign)


def layer_rules(inputs: PolicyInputs, profile: BuddyProfile) -> list[LayerRules]:
    """Return the options for each layer."""
    tae, margin, beta = TAE.of(inputs), MARGIN.of(inputs), BETA.of(inputs)
    entropies = np.full(inputs.num_layers, -1.0) if tae is None else profile.entropy_threshold(tae)
    rho = RHO.of(inputs)
    is_exact = {
        RowKind.PROMPT: not IN_PREFILL.of(inputs),
        RowKind.COMMIT: not IN_COMMIT.of(inputs),
    }
    return [
        LayerRules(
            layer,
            lists,
            max(1, profile.num_experts_per_token // 2) if rho is None else rho,
            sum(1 << kind for kind, is_so in is_exact.items() if is_so),
            float(entropies[layer]),
            np.inf if margin is None else margin,
            np.inf if beta is None else beta,
        )
        for layer, lists in enumerate(profile.lists(ALPHA.of(inputs), K_MAX.of(inputs)))
    ]


def max_mass(inputs: PolicyInputs) -> float | None:
    """Return the router mass that may be replaced, from the profile's curve if `max_kl` is given.

    `max_mass` limits it if given; without `max_kl` its default applies. Raises UsageError if the
    profile has no curve.
    """
    mass, max_kl = MAX_MASS.of(inputs), MAX_KL.of(inputs)
    if max_kl is None:
        return mass
    curve = None if inputs.buddies is None else inputs.buddies.curve
    if curve is None:
        raise UsageError(
            "max_kl is estimated from a curve that lowtide quality --save-curve measures, and this "
            "model's buddy profile has none: run that, or give max_mass."
        )
    estimated = curve.max_mass(max_kl)
    is_given = MAX_MASS.name in inputs.options
    return min(mass, estimated) if is_given and mass is not None else estimated


def _check_profile(profile: BuddyProfile, inputs: PolicyInputs) -> None:
    shape = profile.num_layers, profile.num_experts
    if shape != (inputs.num_layers, inputs.num_experts):
        raise UsageError(
            f"The buddy profile is of another model: {shape[0]} MoE layers of {shape[1]} experts, "
            f"and this has {inputs.num_layers} of {inputs.num_experts}."
        )


def _stray(
    taken: Collection[str], options: Mapping[str, object], over: str, others: Sequence[str]
) -> str | None:
    """Explain an option that neither this preset nor `taken` has; others: options of `over`."""
    own = {option.name for option in _OWN}
    for option in options:
        if option not in own and option not in taken:
            return (
                f"buddymoe over {over} has no option {option!r}; that placement's own options: "
                f"{', '.join(others) or 'none'}.{meant(option, [*own, *taken])}"
            )
    return None
