"""Experts' inputs for rounding weights, from a calibration that the user named.

A calibration merely found in its default place serves only policies: it must not change words.
"""

from __future__ import annotations

import os
from pathlib import Path

from lowtide.engine.opening.facts import MemoryFacts, ModelFacts
from lowtide.engine.opening.weight_formats import QUANTISED, FormatRequest
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.replay.calibration import load_inputs
from lowtide.replay.trace import TraceShape


def rounds_experts(asked: FormatRequest, memory: MemoryFacts) -> bool:
    """Return True if experts are rounded to q8 or q4 when they are read."""
    is_wanted = memory.experts is not None and asked.experts in QUANTISED
    return is_wanted and memory.is_rounded_as_read


def named_inputs(
    facts: ModelFacts, calibration: str | os.PathLike[str] | None
) -> ExpertInputs | None:
    """Read the experts' inputs of the named calibration, if it has any.

    Raises UsageError for a calibration that is damaged or of another model, StorageError.
    """
    if calibration is None:
        return None
    path, config = Path(calibration), facts.config
    inputs = load_inputs(path, config.architecture, TraceShape(*config.moe_shape))
    if inputs is not None and facts.checkpoint is not None:
        inputs.check(facts.fingerprint(), str(path))
    return inputs
