"""Finds the calibration of a model that is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lowtide.engine.opening.facts import ModelFacts
from lowtide.errors import StorageError, UsageError
from lowtide.policies import presets
from lowtide.policies.presets import parse_options
from lowtide.policies.tau import SolvedTau
from lowtide.replay.calibration import Calibration, default_path
from lowtide.replay.trace import TraceShape


def find_calibration(facts: ModelFacts, given: str | os.PathLike[str] | None) -> Calibration | None:
    """Load the calibration `given`, or the one in the default place if there is one.

    Experts' inputs are not loaded; they are only for rounding weights (`named_inputs.py`). Raises
    UsageError for a calibration that is damaged or of another model.
    """
    config = facts.config
    if config.experts is None:
        return None
    shape = TraceShape(*config.moe_shape)
    path = Path(given) if given is not None else _kept(facts.folder, config.architecture, shape)
    if path is None:
        return None
    calibration = Calibration.load(path, has_inputs=False)
    calibration.check(config.architecture, shape)
    if calibration.buddies is not None and facts.checkpoint is not None:
        calibration.buddies.check(facts.fingerprint(), str(path))
    return calibration


def _kept(folder: Path, architecture: str, shape: TraceShape) -> Path | None:
    """Return the calibration's file in the default place, if it exists."""
    try:
        path = default_path(folder, architecture, shape)
    except StorageError:
        return None
    return path if os.path.exists(path) else None


def check_calibrated(
    calibration: Calibration | None, policy: str, policy_options: Mapping[str, str]
) -> None:
    """Raise UsageError if the policy needs a calibration and there is none."""
    tau = parse_options(policy, policy_options).get("tau")
    if calibration is None and tau is SolvedTau.PAPER:
        raise no_calibration()


def check_buddies(
    calibration: Calibration | None, policy: str, policy_options: Mapping[str, str]
) -> None:
    """Raise UsageError if the policy needs a buddy profile and there is none."""
    profile = None if calibration is None else calibration.buddies
    presets.check_buddies(policy, policy_options, profile)


def no_calibration() -> UsageError:
    return UsageError(
        "tau=paper is solved from a calibration and there is none for this model: run "
        "`lowtide calibrate` first, or choose a number or tau=auto."
    )
