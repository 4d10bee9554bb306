"""The curve that turns a bound of KL into one of router mass: measured, and kept with the buddies.

    path = curve_path(opened.facts, given)  # of the calibration that has the buddy profile
    keep_curve(path, measured_curve(report))

For other texts than the one that it was measured on it is an estimate.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from lowtide.engine.opening.facts import ModelFacts
from lowtide.engine.opening.model_calibration import find_calibration
from lowtide.errors import UsageError
from lowtide.files.whole_file import check_writable
from lowtide.lab.quality import QualityReport
from lowtide.policies.buddy_profile import QualityCurve
from lowtide.replay.calibration import Calibration, default_path, is_calibration
from lowtide.replay.trace import TraceShape


def measured_curve(report: QualityReport) -> QualityCurve:
    """Return replaced mass and KL of the rows with replacements.

    Of rows with the same mass the greatest KL counts. Raises UsageError if no row has replacements.
    """
    points: dict[float, float] = {}
    for row in report.rows:
        if row.comparison is None or not row.moved_share:
            continue
        points[row.moved_share] = max(points.get(row.moved_share, 0.0), row.comparison.kl.mean)
    if not points:
        raise UsageError(
            "No setting replaced an expert, so there is no curve: give fewer residents, or a "
            "--setting with policy=buddymoe."
        )
    mass = np.array(sorted(points))
    kl = np.array([points[share] for share in mass.tolist()])
    return QualityCurve(mass, kl.clip(min=0), report.text_sha256)


def curve_path(facts: ModelFacts, given: str | os.PathLike[str] | None) -> Path:
    """Return the calibration file that stores a model's curve: the given or the default one.

    Raises UsageError if there is none with buddies, StorageError if it cannot be written.
    """
    config = facts.config
    config.check_experts("A curve is of substituted experts")
    calibration = find_calibration(facts, given)
    shape = TraceShape(*config.moe_shape)
    path = Path(given or default_path(facts.folder, config.architecture, shape))
    if calibration is None or calibration.buddies is None:
        raise UsageError(
            f"There is no buddy profile in {path} to keep a curve with; run lowtide calibrate "
            "--buddies first."
        )
    check_writable(path, "calibration", is_calibration)
    return path


def keep_curve(path: Path, curve: QualityCurve) -> None:
    """Replace the curve of a calibration's buddies, if any.

    Raises the errors of reading and writing a calibration.
    """
    Calibration.load(path).with_curve(curve).save(path)
