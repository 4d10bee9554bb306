"""Shared parts of the benchmarks of substitution: the compared lanes, and calibrated models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.baselines import BASELINES
from common.record import Row, say
from common.texts import text_for, token_ids
from lowtide import LLM
from lowtide.lab.calibrate import calibrate
from lowtide.lab.quality_settings import QualitySetting
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.replay.calibration import Calibration

BUDDYMOE = "buddymoe"
PRIORS = ("0.5", "2")
"""Numbers that the `cache-prior` baseline adds to residents' logits."""


class Lane(NamedTuple):
    """One way with absent experts, and what it is called in results."""

    name: str
    policy: str
    options: Mapping[str, str] = {}

    @property
    def miss(self) -> str:
        """`exact` where nothing is substituted, and a baseline's name."""
        return self.policy if self.policy in BASELINES else self.options.get("miss", "exact")

    @property
    def rho(self) -> str:
        return self.options.get("rho", "")

    def setting(self, share: float) -> QualitySetting:
        """At a share of the experts that is resident."""
        return QualitySetting(self.policy, dict(self.options), residents=share)


class Scale(NamedTuple):
    """The paper's numbers (6 of 64 experts) for another router, by proportion."""

    k: int
    num_experts: int

    def rhos(self) -> tuple[str, str, str]:
        """For 3 and 4 of 6, and no bound."""
        return str(round(3 * self.k / 6)), str(round(4 * self.k / 6)), "none"

    def k_max(self, of_64: int) -> str:
        return str(max(1, round(of_64 * self.num_experts / 64)))


def lanes(scale: Scale, placement: str) -> list[Lane]:
    """Return the lanes: exact, the baselines, BuddyMoE with its gates off and on, and ours.

    The baselines stand over the placement that they were registered with; BuddyMoE without gates is
    that of the paper's tables. Only lanes that are about the bound of mass have one. Gates: the
    paper's 15th percentile of the entropy, bypassed where 9 of 10 experts are absent.
    """
    half, _, unbounded = rhos = scale.rhos()
    paper = {"alpha": "0.95", "k_max": scale.k_max(16), "tae": "off", "beta": "off"}

    def lossy(name: str, miss: str, **options: str) -> Lane:
        if miss in BASELINES:
            return Lane(name, miss, {"max_mass": "off", **options})
        unbounded = {"placement": placement, "miss": miss, "max_mass": "off"}
        return Lane(name, BUDDYMOE, {**unbounded, **options})

    def listed(alpha: str, of_64: int) -> Lane:
        own = {**paper, "alpha": alpha, "k_max": scale.k_max(of_64)}
        name = f"buddy alpha {alpha.removeprefix('0')}"
        return lossy(f"{name}, k_max {own['k_max']}", "buddy", rho=unbounded, **own)

    return [
        Lane("exact", placement),
        *(lossy(f"random rho {rho}", "random", rho=rho) for rho in rhos),
        lossy(f"drop rho {half}", "drop", rho=half),
        *(lossy(f"cache-prior {prior}", "cache-prior", prior=prior) for prior in PRIORS),
        *(lossy(f"buddy rho {rho}", "buddy", rho=rho, **paper) for rho in rhos),
        listed("0.75", 4),
        listed("0.99", 2),
        lossy("buddy with gates", "buddy", rho=half, **{**paper, "tae": "15", "beta": "0.9"}),
        lossy(f"ours rho {half}", "late", rho=half),
        lossy("ours rho 1", "late", rho="1"),
        lossy("ours max_mass .05", "late", max_mass="0.05"),
    ]


def calibrated(model: str, path: Path, num_pieces: int, **options: object) -> BuddyProfile:
    """Calibrates a model with buddies on a text that it is not scored on, in `path`.

    options: of `LLM`.
    """
    say(f"{model}: calibrating ...")
    with LLM(model, device="cpu", **options) as llm:
        ids = token_ids(llm, text_for(model))
        made = calibrate(llm, ids, model, num_pieces=num_pieces, buddies=True)
    made.save(path)
    if made.buddies is None:
        raise AssertionError("buddies were asked for")
    return made.buddies


def load_profile(path: Path) -> BuddyProfile | None:
    """The buddies of a calibration that is there already."""
    return Calibration.load(path).buddies if path.exists() else None


def redundancy(profile: BuddyProfile) -> Row:
    """Measure how much of each layer's routing falls on few peers, as buddies need."""
    return {
        "concentration": _rounded(profile.concentration()),
        "affinity_nats": _rounded(profile.affinity()),
        "mean_list_size": _rounded((profile.lists() >= 0).sum(axis=2).mean(axis=1)),
        "num_tokens": profile.num_tokens,
    }


def _rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    return [round(float(value), 3) for value in values]
