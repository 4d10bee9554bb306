"""`format="auto"`: what the first line of a plan would name, else the weights as they are stored.

Opt-in, since the words then depend on the budget and on what was measured of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.engine.format_plans import plan_by_format
from lowtide.engine.opening import EngineConfig, OpenModel
from lowtide.engine.weight_formats import AUTO
from lowtide.plan import OWN_FORMAT, faster_format


def opened_with_format(
    opens: Callable[[EngineConfig], OpenModel], options: EngineConfig
) -> OpenModel:
    """A model opened in the format that `options` name or leave to be chosen.

    opens: with a format that is named. Raises what it raises.
    """
    if options.format != AUTO:
        return opens(options)
    as_stored = opens(replace(options, format=OWN_FORMAT, activations=OWN_FORMAT))
    faster = faster_format(plan_by_format(as_stored), as_stored.formats)
    return opens(replace(options, format=OWN_FORMAT if faster is None else faster.format))
