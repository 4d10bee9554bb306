"""Settings of `lowtide quality`: policies and model options that differ between rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide.errors import UsageError
from lowtide.plan import check_is_named
from lowtide.policies.presets import AUTO, asks_scores, check_policy, substitutes

RESIDENTS = "residents"
"""Name of the share of experts that are resident, instead of a budget."""

BUDDYMOE = "buddymoe"
MASSES = ("0.01", "0.02", "0.05", "0.1", "0.2", "0.4", "1")
"""Limits of the replaced router mass at which a curve is measured."""


@dataclass(frozen=True, slots=True)
class QualitySetting:
    """A policy with its options, and model options that differ from the others'.

    options: `LLM`'s, beyond those that all settings share. residents: the share of experts that are
    resident, instead of a budget.
    """

    policy: str = AUTO
    policy_options: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    residents: float | None = None

    def __post_init__(self) -> None:
        check_policy(self.policy, self.policy_options)
        for name in ("policy", "policy_options", "context"):
            if name in self.options:
                raise UsageError(f"{name} is not an option of the model that settings differ in.")
        check_is_named(self.options.get("format"))
        if self.residents is None:
            return
        if not 0 <= self.residents <= 1:
            raise UsageError(f"{RESIDENTS} is a share from 0 to 1, not {self.residents}.")
        if {"host_memory", "gpu_memory"} & set(self.options):
            raise UsageError(f"{RESIDENTS} and a budget say the same thing: give one of them.")

    @property
    def is_lossless(self) -> bool:
        """True if its policy changes no token; its format may."""
        return not substitutes(self.policy, self.policy_options)

    @property
    def of_model(self) -> tuple[tuple[str, str], ...]:
        """The part that settings of one loaded model have in common."""
        options = {**self.options, RESIDENTS: self.residents}
        return tuple(sorted((name, str(value)) for name, value in options.items()))

    @property
    def label(self) -> str:
        """Name for people: `buddymoe rho=3, residents=0.5`."""
        policy = " ".join([self.policy, *(f"{n}={v}" for n, v in self.policy_options.items())])
        shown = dict(self.options)
        if self.residents is not None:
            shown[RESIDENTS] = f"{self.residents:g}"
        return ", ".join([policy, *(f"{name}={value}" for name, value in shown.items())])

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "policy_options": dict(self.policy_options),
            "options": dict(self.options),
            RESIDENTS: self.residents,
        }


def grouped(settings: Sequence[QualitySetting]) -> Iterator[list[QualitySetting]]:
    """Group settings by loaded model, in the order of their first appearance.

    A lossless setting is added in front of a group that has none.
    """
    groups: dict[tuple[tuple[str, str], ...], list[QualitySetting]] = {}
    for setting in settings:
        groups.setdefault(setting.of_model, []).append(setting)
    for group in groups.values():
        lossless = [setting for setting in group if setting.is_lossless]
        lossless = lossless or [replace(group[0], policy=AUTO, policy_options={})]
        yield lossless + [setting for setting in group if not setting.is_lossless]


def curve_settings(policy_options: Mapping[str, str]) -> list[QualitySetting]:
    """Return settings that replace from little to all of the replaceable router mass."""
    options = {"miss": "buddy", "tae": "off", "beta": "off", **policy_options}
    return [QualitySetting(BUDDYMOE, {**options, "max_mass": mass}) for mass in MASSES]


def opening_options(
    model: str | Path, group: Sequence[QualitySetting], shared: Mapping[str, object]
) -> dict[str, Any]:
    """Return options of the one `LLM` on which a group's settings take turns.

    Its policy is the one with the largest workspace, so that all of them fit. Raises as
    `plan_model` does.
    """
    from lowtide.lab.budgets import budget_of_share
    from lowtide.llm import plan_model

    told = max(
        group,
        key=lambda setting: (
            substitutes(setting.policy, setting.policy_options),
            asks_scores(setting.policy, setting.policy_options),
        ),
    )
    options: dict[str, Any] = {**shared, **group[0].options}
    if told.policy != "resident":  # which not every budget here may have room for
        options |= {"policy": told.policy, "policy_options": dict(told.policy_options)}
    share = group[0].residents
    if share is None:
        return options
    options = {n: v for n, v in options.items() if n not in ("host_memory", "gpu_memory")}
    plan = plan_model(model, **options)
    budget = "host_memory" if plan.gpu is None else "gpu_memory"
    return {**options, budget: budget_of_share(plan, share)}
