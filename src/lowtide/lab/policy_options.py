"""Distribute options among several policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.errors import UsageError
from lowtide.files.json_file import meant
from lowtide.policies.presets import check_policy, options_of


def options_by_policy(
    names: Sequence[str], options: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Map each policy's name to the options that it has.

    Raises UsageError for an unknown policy or value, and for an option that none of them has.
    """
    policies: dict[str, dict[str, str]] = {}
    for name in names:
        known = options_of(name)
        policies[name] = {option: value for option, value in options.items() if option in known}
        check_policy(name, policies[name])
    for option in options:
        if not any(option in own for own in policies.values()):
            near = meant(option, (known for name in names for known in options_of(name)))
            raise UsageError(
                f"None of the policies {', '.join(names)} has an option {option!r}.{near}"
            )
    return policies
