"""The preset `buddymoe`: another preset's placement, and a miss policy that changes words.

Declares its options, and makes the miss policy from them and a buddy profile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lowtide.buddies import BuddyTwins, LayerRules, PassAccount
from lowtide.core import Facts, FloatArray, IntArray, RoutedTokens, RowKind
from lowtide.errors import UsageError
from lowtide.files.json_file import meant
from lowtide.policies.assignment import Assign
from lowtide.policies.buddy_profile import DEFAULT_K_MAX, MAX_K_MAX, BuddyProfile
from lowtide.policies.deadlines import waits_of
from lowtide.policies.plain_buddies import PlainBuddies, hops_of
from lowtide.policies.recipe import PolicyInputs, PolicyOption, Recipe, switch
from lowtide.policies.substitution import CountedSubstitution, absent_experts

NAME = "buddymoe"
_UNBOUNDED = 1 << 30
"""Limit of a token's substitutions that is never reached."""


def _up_to(name: str, high: float, default: float | None = None) -> PolicyOption[float | None]:
    """Make an option that is a number from 0 to `high`, or `off`."""
    return PolicyOption(name, default, 0.0, high, {"off": None})


# What becomes of tokens whose experts are absent.
MISS = PolicyOption("miss", "buddy", words={name: name for name in ("buddy", "late", "wait")})
# The share of an expert's co-activations that its buddies cover; by default the profile's own.
ALPHA: PolicyOption[float | None] = PolicyOption("alpha", None, 0.0, 1.0, is_above_low=True)
K_MAX = PolicyOption("k_max", DEFAULT_K_MAX, 1, MAX_K_MAX)  # buddies of an expert, at most
# Substitutions of a token in a layer, at most.
RHO: PolicyOption[int | None] = PolicyOption(
    "rho", None, 0, MAX_K_MAX, {"half": None, "none": _UNBOUNDED}
)
# Gates; unless they are given, `buddy` has those of `PAPER_GATES` and `late` none.
BETA = _up_to("beta", 1)  # the share of absent experts from which a layer substitutes nothing
TAE = _up_to("tae", 100)  # tokens below this percentile of the calibration's entropies are spared
# Bytes of a pass that layers which `beta` leaves alone may bring: `beta` follows.
BETA_BYTES: PolicyOption[int | None] = PolicyOption("beta_bytes", None, 0, 10**15, {"off": None})
MARGIN = _up_to("margin", 1)  # tokens whose best expert leads by this much are spared
# The estimated KL of a token in nats, at most; bounds the mass by the profile's curve.
MAX_KL = _up_to("max_kl", 1000)
# The share of a request's router weight that may be replaced. By default what lost nothing that
# could be seen, of all that docs/buddymoe.md compares.
MAX_MASS = _up_to("max_mass", 1, 0.05)
# Psi (Eq. 3): the weight of a token's own logits, and what each partition between an expert and
# its buddy costs.
ETA = PolicyOption("eta", 0.0, 0, 1000)
KAPPA = PolicyOption("kappa", 0.0, 0, 1)
PARTITIONS = PolicyOption("partitions", 1, 1, 64)  # that a layer's experts lie on, in a replay
ONLY_DISK = switch("only_disk")  # experts in host memory are waited for
IN_PREFILL = switch("in_prefill")  # rows of prompts may be touched
IN_COMMIT = switch("in_commit")  # rows that cache final tokens of a block may be touched
_OWN: tuple[PolicyOption[object], ...] = (
    *(MISS, ALPHA, K_MAX, RHO, BETA, BETA_BYTES, TAE, MARGIN, MAX_KL, MAX_MASS),
    *(ETA, KAPPA, PARTITIONS, ONLY_DISK, IN_PREFILL, IN_COMMIT),
)
PAPER_GATES: Mapping[str, float] = {TAE.name: 15.0, BETA.name: 0.9}
"""Gates of `miss=buddy`: the middle of the percentiles that the paper advises, and a share of
absent experts, of which it gives none."""


class Buddies(CountedSubstitution):
    """BuddyMoE: an absent expert is replaced by its best buddy that is here, with its weight.

    rules: of each layer. assign: if given, only experts that arrive too late are replaced
    (`policies/deadlines.py`); it says where each expert would be computed without replacements.
    only_disk: experts in host memory are not absent. step_bytes: a budget that `beta` follows.
    """

    def __init__(
        self,
        rules: Sequence[LayerRules],
        twins: BuddyTwins,
        assign: Assign | None = None,
        *,
        only_disk: bool = False,
        step_bytes: int | None = None,
    ) -> None:
        self._layers = [twins.of_layer(one) for one in rules]
        self._assign = assign
        self._only_disk = only_disk
        self._meters: list[BandwidthMeter] = []
        if step_bytes is not None:
            self._meters = [BandwidthMeter(step_bytes / len(rules)) for _ in rules]

    def counted(self, facts: Facts, account: PassAccount) -> RoutedTokens | None:
        waits = None
        if self._assign is not None and not facts.demand.is_resident.all():
            waits = waits_of(facts, self._assign)
        if self._only_disk:
            facts = _with_hosts_on_their_way(facts)
        if self._meters and facts.routing is not None and self._is_bypassed(facts):
            account.route(facts.routing.weights)
            return None
        return self._layers[facts.layer](facts, account, waits)

    def _is_bypassed(self, facts: Facts) -> bool:
        num_absent = int(np.count_nonzero(absent_experts(facts)))
        share = num_absent / max(1, len(facts.demand.experts))
        return share >= self._meters[facts.layer].beta(share, num_absent * facts.costs.expert_bytes)


class BandwidthMeter:
    """Chooses `beta` from a budget of bytes, by the last passes of one layer.

    A layer whose share of absent experts is at least `beta` is left alone, so all of them are
    brought. The paper (3.1) asks for a `beta` at which that stays within a budget, and proposes a
    running meter. Ours is the least `beta` at which the last passes would have stayed within it in
    the mean, the present one included.
    """

    def __init__(self, pass_bytes: float) -> None:
        self._pass_bytes = pass_bytes
        self._passes: deque[tuple[float, int]] = deque(maxlen=METER_PASSES)

    def beta(self, absent_share: float, absent_bytes: int) -> float:
        """Return the threshold for a pass; infinite if no layer may be left alone."""
        self._passes.append((absent_share, absent_bytes))
        left_bytes, beta = self._pass_bytes * len(self._passes), np.inf
        for share in sorted({share for share, _ in self._passes}, reverse=True):
            left_bytes -= sum(size for of_pass, size in self._passes if of_pass == share)
            if left_bytes < 0:
                break
            beta = share
        return beta


METER_PASSES = 32


def _with_hosts_on_their_way(facts: Facts) -> Facts:
    """Return the facts with experts in host memory as good as arrived, which are not absent.

    Without a device every absent expert is on disk.
    """
    if not facts.has_idle_link:
        return facts
    experts = facts.demand.experts
    due_s = np.full(len(experts), np.inf) if facts.arriving_s is None else facts.arriving_s
    is_at_host = True if facts.is_at_host is None else facts.is_at_host[experts]
    return facts._replace(arriving_s=np.where(is_at_host, 0.0, due_s))


class _PresetNames(Mapping[str, str]):
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
    placement = PolicyOption("placement", "lowtide", words=_PresetNames(bases))

    def base(inputs: PolicyInputs) -> Recipe:
        return bases[placement.of(inputs)]

    def contradiction(options: Mapping[str, object]) -> str | None:
        name = str(options.get(placement.name, placement.default))
        others = [option.name for option in bases[name].options]
        if options.get(BETA_BYTES.name) is not None and options.get(BETA.name) is not None:
            return "beta is a share and beta_bytes a budget that it would follow: give one of them."
        return _stray({placement.name, *others}, options, f"placement={name}", others)

    def sizes(options: Mapping[str, object], num_experts: int, has_device: bool) -> str:
        name = str(options.get(placement.name, placement.default))
        return bases[name].sizes(options, num_experts, has_device)

    def borrowed() -> list[PolicyOption[object]]:
        return [option for name in _PresetNames(bases) for option in bases[name].options]

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
        asks_scores=lambda options: bool(options.get(ETA.name, ETA.default)),
        check_buddies=check_buddies,
        contradiction=contradiction,
        sizes=sizes,
    )


def check_buddies(options: Mapping[str, object], profile: BuddyProfile | None) -> None:
    """Raise UsageError if experts may be replaced and there is no profile to choose by."""
    miss = options.get(MISS.name, MISS.default)
    if profile is None and miss != "wait" and options.get(RHO.name) != 0:
        raise UsageError(
            f"Policy {NAME!r} with miss={miss} needs a buddy profile and there is none for this "
            "model: run lowtide calibrate --buddies MODEL --text FILE first, or give miss=wait, "
            "which replaces nothing."
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
    check_buddies(inputs.options, profile)
    assign = base.assignment(inputs) if miss == "late" else None
    return Buddies(
        layer_rules(inputs, cast(BuddyProfile, profile)),
        inputs.twins or PlainBuddies(),
        assign,
        only_disk=ONLY_DISK.of(inputs),
        step_bytes=BETA_BYTES.of(inputs),
    )


def layer_rules(inputs: PolicyInputs, profile: BuddyProfile) -> list[LayerRules]:
    """Return the options for each layer."""
    tae, margin, beta = _gate(inputs, TAE), MARGIN.of(inputs), _gate(inputs, BETA)
    entropies = np.full(inputs.num_layers, -1.0) if tae is None else profile.entropy_threshold(tae)
    rho, order = RHO.of(inputs), _order_by_psi(inputs, profile)
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
            profile.temperature,
            ETA.of(inputs),
            order.psi[layer] if ETA.of(inputs) else None,
            order.partition,
        )
        for layer, lists in enumerate(order.lists)
    ]


def _gate(inputs: PolicyInputs, option: PolicyOption[float | None]) -> float | None:
    """Return a gate as given, or the paper's for `miss=buddy`, unless a budget is `beta`'s."""
    is_metered = option is BETA and BETA_BYTES.of(inputs) is not None
    if option.name in inputs.options or is_metered or MISS.of(inputs) != "buddy":
        return option.of(inputs)
    return PAPER_GATES[option.name]


class _PsiOrder(NamedTuple):
    """Lists of buddies in the order of what Psi (Eq. 3) has for all tokens alike."""

    lists: NDArray[np.int32]  # [layers, experts, length]
    psi: FloatArray  # [layers, experts, length] q * (1 - kappa * hop)
    partition: IntArray | None  # [experts] each one's device, where there are several


def _order_by_psi(inputs: PolicyInputs, profile: BuddyProfile) -> _PsiOrder:
    """Return the profile's lists, sorted again where `kappa` counts.

    Experts of a layer lie on partitions in equal ranges of ids. The paper gives `hop` of a buddy
    alone; ours are those between the absent expert's partition and its buddy's.
    """
    lists = profile.lists(ALPHA.of(inputs), K_MAX.of(inputs))
    psi = np.take_along_axis(profile.q(), lists.clip(min=0), axis=2)
    num_partitions, num_experts, partition = PARTITIONS.of(inputs), inputs.num_experts, None
    if num_partitions > 1:
        partition = np.arange(num_experts) * num_partitions // num_experts
        hops = np.broadcast_to(hops_of(partition), (len(lists), num_experts, num_experts))
        psi *= 1.0 - KAPPA.of(inputs) * np.take_along_axis(hops, lists.clip(min=0), axis=2)
    psi = np.where(lists >= 0, psi, -np.inf)
    order = np.argsort(-psi, axis=2, kind="stable")
    sorted_lists = np.take_along_axis(lists, order, axis=2)
    return _PsiOrder(sorted_lists, np.take_along_axis(psi, order, axis=2), partition)


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
