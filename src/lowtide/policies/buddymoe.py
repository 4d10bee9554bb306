"""The preset `buddymoe`: any other preset's placement, and a miss policy that changes words.

Its options, what they stand for, and how the miss policy is made of them and of a buddy profile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.config import parse_size
from lowtide.errors import UsageError
from lowtide.policies.buddy_gates import Gates, Psi
from lowtide.policies.buddy_lists import MAX_K_MAX, BuddyLists
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.policies.buddy_search import UNBOUNDED
from lowtide.policies.late import Late
from lowtide.policies.miss import Buddy, CachePrior, Drop, RandomBuddy, Rho
from lowtide.policies.recipe import PolicyOption, Recipe, Setting, switch
from lowtide.policies.substitution import Substitution

NAME = "buddymoe"


@dataclass(frozen=True, slots=True)
class Fitted:
    """An alpha for each layer, so that its lists have so many buddies in the mean."""

    list_size: float


@dataclass(frozen=True, slots=True)
class StepBytes:
    """A `beta` from a transfer budget: bytes that a pass may read or fetch."""

    num_bytes: int


def _read_alpha(text: str) -> tuple[float, ...] | Fitted:
    """A value for each layer, or the size that lists are to have."""
    kind, colon, size = text.partition(":")
    if colon and kind == "fit":
        return Fitted(float(size))
    if "," not in text:
        raise ValueError(text)
    return tuple(float(value) for value in text.split(","))


def _read_beta(text: str) -> StepBytes:
    if not text.endswith("B"):
        raise ValueError(text)
    return StepBytes(parse_size(text, 0))


MISS = PolicyOption(
    "miss",
    "what becomes of tokens whose experts are absent",
    "wait",
    words={name: name for name in ("buddy", "late", "wait", "random", "drop", "cache-prior")},
)
ALPHA: PolicyOption[float | tuple[float, ...] | Fitted | None] = PolicyOption(
    "alpha",
    "share of an expert's co-activations that its buddies cover; as calibrated unless given",
    None,
    0,
    1,
    is_whole=False,
    is_above_low=True,
    reads=("one for each layer (0.9,0.95,...), fit:SIZE", _read_alpha),
)
K_MAX: PolicyOption[int | None] = PolicyOption(
    "k_max", "buddies of an expert, at most; as calibrated unless given", None, 1, MAX_K_MAX
)
RHO: PolicyOption[int | Rho] = PolicyOption(
    "rho",
    "substitutions of a token in a layer, at most",
    Rho(),
    0,
    MAX_K_MAX,
    {"half": Rho(), "none": Rho(UNBOUNDED)},
)
BETA: PolicyOption[float | StepBytes | None] = PolicyOption(
    "beta",
    "share of absent experts from which a layer's substitution is bypassed; or bytes of a pass",
    None,
    0,
    1,
    {"off": None},
    is_whole=False,
    reads=("bytes of a pass (64MiB)", _read_beta),
)
TAE: PolicyOption[float | None] = PolicyOption(
    "tae",
    "tokens below this percentile of the calibration's entropies keep their experts",
    None,
    0,
    100,
    {"off": None},
    is_whole=False,
)
TEMPERATURE = PolicyOption(
    "temperature", "of the entropy's probabilities", 1.0, 0, 100, is_whole=False, is_above_low=True
)
MARGIN: PolicyOption[float | None] = PolicyOption(
    "margin",
    "tokens whose best expert leads by this much keep their experts",
    None,
    0,
    1,
    {"off": None},
    is_whole=False,
)
SEARCH_RANK: PolicyOption[int | None] = PolicyOption(
    "search_rank", "how far down a list to look", None, 1, MAX_K_MAX, {"all": None}
)
ETA = PolicyOption("eta", "what a buddy's own router logit counts", 0.0, 0, 100, is_whole=False)
MAX_KL: PolicyOption[float | None] = PolicyOption(
    "max_kl",
    "estimated KL of a token in nats, at most; bounds the mass by the profile's curve",
    None,
    0,
    1000,
    {"off": None},
    is_whole=False,
)
MAX_MASS: PolicyOption[float | None] = PolicyOption(
    "max_mass",
    "share of a request's router weight that may be replaced",
    0.05,  # what lost nothing that could be seen, of all that docs/quality.md compares
    0,
    1,
    {"off": None},
    is_whole=False,
)
PRIOR = PolicyOption(
    "prior", "what cache-prior adds to residents' logits", 1.0, 0, 1e6, is_whole=False
)
IN_PREFILL = switch("in_prefill", "whether rows of prompts may be touched")
IN_COMMIT = switch("in_commit", "whether rows that cache final tokens of a block may be touched")
_OWN: tuple[PolicyOption[object], ...] = (
    *(MISS, ALPHA, K_MAX, RHO, BETA, TAE, TEMPERATURE, MARGIN, SEARCH_RANK, ETA),
    *(MAX_KL, MAX_MASS, PRIOR, IN_PREFILL, IN_COMMIT),
)

_LISTED = ("buddy", "late")
_READ_BY = {
    **{one.name: _LISTED for one in (ALPHA, K_MAX, SEARCH_RANK, ETA)},
    RHO.name: (*_LISTED, "random", "drop"),
    PRIOR.name: ("cache-prior",),
}
"""Options that not every way with absent experts looks at."""

_UNSAFE = ("random", "drop", "cache-prior")


def over(bases: Mapping[str, Recipe]) -> Recipe:
    """The preset, over any of `bases`, by the option `placement`."""
    names = {name: name for name in bases if name != "resident"}
    placement = PolicyOption(
        "placement", "the preset that places, assigns and prefetches", "lowtide", words=names
    )

    def base(setting: Setting) -> Recipe:
        return bases[placement.of(setting)]

    def contradiction(options: Mapping[str, object]) -> str | None:
        name = str(options.get(placement.name, placement.default))
        others = [option.name for option in bases[name].options]
        stray = _stray({placement.name, *others}, options, f"placement={name}", others)
        return stray or _unread(options)

    borrowed = {option.name: option for made in bases.values() for option in made.options}
    return Recipe(
        lambda s: base(s).placement(s),
        lambda s: base(s).assignment(s),
        lambda s: base(s).prefetch(s),
        summary="BuddyMoE: similar residents stand in for absent experts; changes words",
        options=(placement, *_OWN, *borrowed.values()),
        capacity=lambda s: base(s).capacity(s),
        waits=lambda s: base(s).waits(s),
        fetches_all=True,
        weighs_moves=True,
        is_lossless=False,
        substitution=lambda s: miss_policy(s, base(s)),
        substitutes=lambda options: options.get(MISS.name, MISS.default) != "wait",
        max_mass=max_mass,
        asks_scores=_asks_scores,
        unsafe=_unsafe,
        contradiction=contradiction,
    )


def miss_policy(setting: Setting, base: Recipe) -> Substitution | None:
    """What the option `miss` says, or nothing where nothing could be replaced.

    Raises UsageError for options that contradict the profile, or want one where there is none.
    """
    miss, rho = MISS.of(setting), _rho(setting)
    profile = setting.buddies
    if profile is not None:
        _check_profile(profile, setting)
    if miss == "wait" or rho.num_experts == 0:
        return None
    gates = _gates(setting)
    if miss == "random":
        return RandomBuddy(gates, rho, setting.seed)
    if miss == "drop":
        return Drop(gates, rho)
    if miss == "cache-prior":
        if setting.weighing is None:
            raise UsageError("miss=cache-prior needs a model: traces hold no router's logits.")
        return CachePrior(gates, PRIOR.of(setting), setting.weighing)
    lists = _lists(setting)
    rank = _search_rank(setting, lists)
    psi = Psi(ETA.of(setting))
    if miss == "late":
        return Late(lists, gates, psi, rho, base.assignment(setting), rank, setting.twins)
    beta = BETA.of(setting)
    step_bytes = beta.num_bytes if isinstance(beta, StepBytes) else None
    return Buddy(lists, gates, psi, rho, rank, step_bytes, setting.twins)


def max_mass(setting: Setting) -> float | None:
    """What the profile's curve estimates for `max_kl`, if that is given, and no more than
    `max_mass`, if that is; else the latter's default.

    Raises UsageError where there is no curve.
    """
    mass, max_kl = MAX_MASS.of(setting), MAX_KL.of(setting)
    if max_kl is None:
        return mass
    curve = None if setting.buddies is None else setting.buddies.curve
    if curve is None:
        raise UsageError(
            "max_kl is estimated from a curve that lowtide quality --save-curve measures, and this "
            "model's buddy profile has none: run that, or give max_mass."
        )
    estimated = curve.max_mass(max_kl)
    is_given = MAX_MASS.name in setting.options
    return min(mass, estimated) if is_given and mass is not None else estimated


def _gates(setting: Setting) -> Gates:
    tae, beta = TAE.of(setting), BETA.of(setting)
    entropies = None
    if tae is not None:
        profile = _profile(setting, "tae")
        entropies = profile.entropy_threshold(tae, TEMPERATURE.of(setting))
    return Gates(
        entropies,
        TEMPERATURE.of(setting),
        MARGIN.of(setting),
        None if isinstance(beta, StepBytes) else beta,
        IN_PREFILL.of(setting),
        IN_COMMIT.of(setting),
    )


def _lists(setting: Setting) -> BuddyLists:
    profile = _profile(setting, f"miss={MISS.of(setting)}")
    rule, alpha, k_max = profile.rule, ALPHA.of(setting), K_MAX.of(setting)
    if k_max is not None:
        rule = replace(rule, k_max=k_max)
    if isinstance(alpha, Fitted):
        rule = profile.fitted_to(alpha.list_size, rule)
    elif alpha is not None:
        rule = replace(rule, alpha=alpha)
    return profile.lists(rule)


def _search_rank(setting: Setting, lists: BuddyLists) -> int:
    rank, longest = SEARCH_RANK.of(setting), int(lists.lengths.max())
    if rank is None:
        return UNBOUNDED
    if rank > longest:
        raise UsageError(
            f"search_rank {rank} is beyond the lists, of which the longest has {longest} buddies; "
            "lower it, or raise alpha or k_max."
        )
    return rank


def _rho(setting: Setting) -> Rho:
    rho = RHO.of(setting)
    return rho if isinstance(rho, Rho) else Rho(rho)


def _profile(setting: Setting, what: str) -> BuddyProfile:
    if setting.buddies is None:
        raise UsageError(
            f"Policy {NAME!r} with {what} needs a buddy profile and there is none for this model: "
            "run lowtide calibrate --buddies first."
        )
    return setting.buddies


def _check_profile(profile: BuddyProfile, setting: Setting) -> None:
    shape = profile.num_layers, profile.num_experts
    if shape != (setting.num_layers, setting.num_experts):
        raise UsageError(
            f"The buddy profile is of another model: {shape[0]} MoE layers of {shape[1]} experts, "
            f"and this has {setting.num_layers} of {setting.num_experts}."
        )


def _stray(
    taken: Collection[str], options: Mapping[str, object], over: str, others: Sequence[str]
) -> str | None:
    """What to say of an option that is neither ours nor `taken`; others: of what this is over."""
    own = {option.name for option in _OWN}
    for option in options:
        if option not in own and option not in taken:
            return (
                f"buddymoe over {over} has no option {option!r}; that placement's own options: "
                f"{', '.join(others) or 'none'}."
            )
    return None


def _unread(options: Mapping[str, object]) -> str | None:
    """What to say of an option that this way with absent experts never looks at.

    `wait` looks at none, and takes all: it is what others are compared with.
    """
    miss = options.get(MISS.name, MISS.default)
    for option, ways in _READ_BY.items():
        if miss != MISS.default and option in options and miss not in ways:
            return (
                f"miss={miss} has no use for {option}, which is for "
                f"{' and '.join(f'miss={way}' for way in ways)}; leave it out."
            )
    if miss != MISS.default and TEMPERATURE.name in options and options.get(TAE.name) is None:
        return "temperature is that of tae's entropies; give tae a percentile, or leave it out."
    if miss not in (MISS.default, "buddy") and isinstance(options.get(BETA.name), StepBytes):
        return (
            f"beta in bytes of a pass is for miss=buddy alone; give miss={miss} a share from 0 to "
            "1, or leave it out."
        )
    return None


def _asks_scores(options: Mapping[str, object]) -> bool:
    return options.get(MISS.name) == "cache-prior" or bool(options.get(ETA.name, 0))


def _unsafe(options: Mapping[str, object]) -> str | None:
    miss = options.get(MISS.name)
    return f"miss={miss}" if miss in _UNSAFE else None
