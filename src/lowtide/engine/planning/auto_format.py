"""`format="auto"`: what the first line of a plan would name, else the weights as they are stored.

Opt-in, since the words then depend on the budget and on what was measured of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.planning.format_plans import plan_by_format
from lowtide.plan import AUTO_FORMAT, OWN_FORMAT, faster_format


def opened_with_format(
    opens: Callable[[EngineConfig], OpenModel], options: EngineConfig
) -> OpenModel:
    """A model opened in the format that `options` name or leave to be chosen.

    opens: with a format that is named. Raises what it raises.
    """
    opened = opens(as_stored(options))
    if options.format != AUTO_FORMAT:
        return opened
    faster = faster_format(plan_by_format(opened), opened.formats)
    return opened if faster is None else opens(replace(options, format=faster.format))


def as_stored(options: EngineConfig) -> EngineConfig:
    """`options`, or what is known of a model before its format is chosen."""
    return replace(options, format=OWN_FORMAT) if options.format == AUTO_FORMAT else options
