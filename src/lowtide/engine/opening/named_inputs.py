"""The experts' inputs that weights are rounded for: those of a calibration that was named.

One that merely lies in its default place serves policies alone: it changes no words.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.engine.opening.weight_formats import QUANTISED
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.replay.calibration import load_inputs
from lowtide.replay.trace import TraceShape

if TYPE_CHECKING:
    from lowtide.engine.opening.model import OpenModel


def rounds_experts(opened: OpenModel) -> bool:
    """Whether experts are made into q8 or q4 as they are read."""
    has_experts = opened.config.experts is not None
    is_wanted = has_experts and opened.options.formats.experts in QUANTISED
    return is_wanted and opened.is_rounded_as_read


def named_inputs(opened: OpenModel) -> ExpertInputs | None:
    """None where no calibration is named, or it has no inputs.

    Raises UsageError for one that is damaged or of another model, StorageError.
    """
    options, config = opened.options, opened.config
    if options.calibration is None:
        return None
    path = Path(options.calibration)
    inputs = load_inputs(path, config.architecture, TraceShape(*config.moe_shape))
    if inputs is not None and opened.checkpoint is not None:
        inputs.check(opened.fingerprint, str(path))
    return inputs
