"""Presets: users' names of policies, and the facts behind a name.

All facts come from the catalogue, except for `auto`, which stands for one of the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.config import format_size
from lowtide.errors import UsageError
from lowtide.files.json_file import meant
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.policies.catalogue import CATALOGUE, TAU
from lowtide.policies.decision import Policies
from lowtide.policies.recipe import PolicyInputs, PolicyOption, Recipe
from lowtide.policies.trial import NUM_TRIED

AUTO = "auto"
TRIED = ("lowtide", "lru")
"""Presets that `auto` tries in turn beside a device; the first one if they cannot be compared."""

ORACLE = "oracle"
"""A ceiling that knows the future: only a replay can have it."""


def preset_names() -> tuple[str, ...]:
    """Return every name of a policy."""
    return (AUTO, *CATALOGUE)


def recipe(name: str) -> Recipe:
    """Return the preset called `name`; raise UsageError if there is none."""
    _refuse_oracle(name)
    if name not in CATALOGUE:
        raise UsageError(f"`policy` {name!r} is not known; choose one of {', '.join(CATALOGUE)}.")
    return CATALOGUE[name]


def register(name: str, made: Recipe) -> None:
    """Add a preset. Raise UsageError for a name that is taken."""
    if name in (AUTO, ORACLE):
        raise UsageError(f"There is a policy {name!r} already; choose another name.")
    CATALOGUE.register(name, made)


def name_of(policy: str | Recipe) -> str:
    """Return a policy's name; a recipe without one is `recipe-1` and so on while it is in use."""
    return policy if isinstance(policy, str) else CATALOGUE.name_of(policy)


def recipe_in_use(name: str) -> Recipe | None:
    """Return the recipe that a policy is made from; None for `auto`, which changes it."""
    return CATALOGUE.get(name)


def unregister(name: str) -> None:
    """Remove a preset. Raise UsageError if there is none."""
    recipe(name)
    del CATALOGUE[name]


def options_of(name: str) -> Mapping[str, PolicyOption[object]]:
    """Return a policy's options by name; none for an unknown policy."""
    if name == AUTO:
        return {TAU.name: TAU}
    if name not in CATALOGUE:
        return {}
    made = CATALOGUE[name]
    return {option.name: option for option in (*made.borrowed(), *made.options)}


def fetches_all(name: str) -> bool:
    """Return True if a policy fetches every absent expert and so needs a staging slot."""
    return name in CATALOGUE and CATALOGUE[name].fetches_all


def substitutes(name: str, options: Mapping[str, str]) -> bool:
    """Return True if a policy with these options may run other experts than the router chose."""
    if name not in CATALOGUE or CATALOGUE[name].substitution is None:
        return False
    return CATALOGUE[name].substitutes(parse_options(name, options))


def asks_scores(name: str, options: Mapping[str, str]) -> bool:
    """Return True if a policy with these options needs the router's scores in its facts."""
    if name not in CATALOGUE or not substitutes(name, options):
        return False
    return CATALOGUE[name].needs_scores(parse_options(name, options))


def check_buddies(name: str, options: Mapping[str, str], profile: BuddyProfile | None) -> None:
    """Raise UsageError if a policy needs a buddy profile and there is none."""
    if name in CATALOGUE:
        CATALOGUE[name].check_buddies(parse_options(name, options), profile)


def is_lossless(name: str) -> bool:
    """Return True if a policy changes no token; also for `auto` and unknown names."""
    return name not in CATALOGUE or CATALOGUE[name].is_lossless


def lossless_presets() -> tuple[str, ...]:
    """Return presets that change no token, without `resident`, with which they are compared."""
    return tuple(
        name for name, made in CATALOGUE.items() if made.is_lossless and name != "resident"
    )


def check_policy(name: str, options: Mapping[str, str]) -> None:
    """Raise UsageError for an unknown preset, option or value; needs no model."""
    _refuse_oracle(name)
    if name != AUTO and name not in CATALOGUE:
        raise UsageError(
            f"`policy` {name!r} is not known; choose one of {', '.join(preset_names())}. One of "
            "your own is registered first (register_policy, or --policy-file on the command line)."
            f"{meant(name, preset_names())}"
        )
    parse_options(name, options)


def _refuse_oracle(name: str) -> None:
    if name == ORACLE:
        raise UsageError(
            "Policy 'oracle' knows the future: only lowtide simulate has it, as a ceiling; choose "
            "another, such as lowtide."
        )


def parse_options(name: str, options: Mapping[str, str]) -> dict[str, object]:
    """Return values for `PolicyInputs.options`; a `SolvedTau` is left to the caller.

    Raises UsageError.
    """
    known = options_of(name)
    for option in options:
        if option not in known:
            names = ", ".join(known) or "none"
            near = meant(option, known)
            raise UsageError(
                f"Policy {name!r} has no option {option!r}; its options: {names}.{near}"
            )
    parsed = {option: known[option].parse(str(text)) for option, text in options.items()}
    contradiction = CATALOGUE[name].contradiction(parsed) if name in CATALOGUE else None
    if contradiction is not None:
        raise UsageError(contradiction)
    return parsed


def choose_preset(name: str, missing_bytes: int, *, has_device: bool = False) -> tuple[str, str]:
    """Return the preset that `name` stands for here, and the reason.

    missing_bytes: of memory for every expert; 0 or less if all fit. Raises UsageError.
    """
    if name == AUTO:
        if missing_bytes <= 0:
            return "resident", "all experts fit into the budget"
        if has_device:
            names = " and ".join(TRIED)
            return TRIED[0], f"not all experts fit: {names} are tried for {NUM_TRIED} passes each"
        return "lowtide", "not all experts fit: those most expensive to reload stay in memory"
    if name == "resident" and missing_bytes > 0:
        budget = "gpu_memory" if has_device else "host_memory"
        raise UsageError(
            "`policy` 'resident' keeps every expert in memory, for which the budget is "
            f"{format_size(missing_bytes)} ({missing_bytes} bytes) too small; raise `{budget}` "
            'by as much or choose `policy="tide"`.'
        )
    if not recipe(name).is_lossless:
        return name, "asked for; unless it waits for absent experts, it changes words"
    return name, "asked for"


def sizes_of(
    preset: str, policy: str, options: Mapping[str, str], num_experts: int, *, has_device: bool
) -> str:
    """Describe the sizes that a policy's options give layers of `num_experts`, for the plan's line.

    preset: the one that runs. Returns "" if all of its options are constants.
    """
    return recipe(preset).sizes(parse_options(policy, options), num_experts, has_device)


def make_policies(preset: str, inputs: PolicyInputs, *, everything_fits: bool) -> Policies:
    """Make a preset's policies; with room for every expert, those of `resident`."""
    return recipe("resident" if everything_fits else preset).policies(inputs)
