"""The calibration that a model is opened with."""

from __future__ import annotations

import os
from pathlib import Path

from lowtide.engine.opening.model import OpenModel
from lowtide.errors import StorageError, UsageError
from lowtide.policies.presets import parse_options
from lowtide.policies.tau import SolvedTau
from lowtide.replay.calibration import Calibration, default_path
from lowtide.replay.trace import TraceShape


def find_calibration(opened: OpenModel) -> Calibration | None:
    """The calibration that was asked for, or the one in the default place, if there is one.

    Without experts' inputs, which are weights' alone (`named_inputs.py`). Raises UsageError for
    one that is damaged or of another model.
    """
    config, given = opened.config, opened.options.calibration
    if config.experts is None:
        return None
    shape = TraceShape(*config.moe_shape)
    path = _kept(opened, shape) if given is None else Path(given)
    if path is None:
        return None
    calibration = Calibration.load(path, has_inputs=False)
    calibration.check(config.architecture, shape)
    if calibration.buddies is not None and opened.checkpoint is not None:
        calibration.buddies.check(opened.fingerprint, str(path))
    return calibration


def _kept(opened: OpenModel, shape: TraceShape) -> Path | None:
    """The file in the default place, if this user has such a place and there is one."""
    try:
        path = default_path(opened.folder, opened.config.architecture, shape)
    except StorageError:
        return None
    return path if os.path.exists(path) else None


def check_calibration(opened: OpenModel) -> None:
    """Raises UsageError where loading would, for what the options say of a calibration."""
    calibration, options = find_calibration(opened), opened.options
    tau = parse_options(options.policy, options.policy_options).get("tau")
    if calibration is None and tau is SolvedTau.PAPER:
        raise no_calibration()


def no_calibration() -> UsageError:
    return UsageError(
        "tau=paper is solved from a calibration and there is none for this model: run "
        "`lowtide calibrate` first, or choose a number or tau=auto."
    )
