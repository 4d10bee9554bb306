"""The experts' inputs that weights are rounded for: those of a calibration that was named.

One that merely lies in its default place serves policies alone: it changes no words.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.engine.weight_formats import QUANTISED
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.replay.calibration import Calibration
from lowtide.replay.trace import TraceShape

if TYPE_CHECKING:
    from lowtide.engine.opening import OpenModel


def inputs_to_round_for(opened: OpenModel) -> ExpertInputs | None:
    """None where no experts are rounded as they are read, or the calibration has no inputs.

    Raises UsageError for one that is damaged or of another model, StorageError.
    """
    options, config = opened.options, opened.config
    is_wanted = config.experts is not None and options.formats.experts in QUANTISED
    if options.calibration is None or not is_wanted or not opened.is_rounded_as_read:
        return None
    path = Path(options.calibration)
    calibration = Calibration.load(path)
    calibration.check(config.architecture, TraceShape(*config.moe_shape))
    if calibration.inputs is not None and opened.checkpoint is not None:
        calibration.inputs.check(opened.fingerprint, str(path))
    return calibration.inputs
