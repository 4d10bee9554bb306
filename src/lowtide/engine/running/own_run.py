"""Averages of the model's last run, by which the next run is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from lowtide.engine.running.engine import Engine
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.runtime import ExpertRuntime
from lowtide.hardware.machine import DISTURBED
from lowtide.hardware.model_speeds import OwnRun, keep_speeds

MAX_PASSES = 4096
MIN_PASSES = 16
MIN_RUN_S = 0.03
"""A shorter run is not stored: its first passes are slower than later ones."""


class TimedPass(NamedTuple):
    """Measurements of one pass of answers."""

    num_rows: int
    num_tokens: int  # committed
    seconds: float
    wait_s: float  # of these, for experts
    num_missed: int  # experts that it asked for and memory did not have


def waits(experts: ExpertRuntime | NoExperts) -> tuple[float, int]:
    """Return the seconds waited for experts since loading, and the number missed."""
    if isinstance(experts, NoExperts):
        return 0.0, 0
    return experts.host.stats.wait_s, experts.stats.num_misses


def keep_run(engine: Engine, passes: Sequence[TimedPass]) -> None:
    """Store a run's averages unless it was too short or disturbed."""
    run = own_run(sum(engine.plan.residents_per_layer), passes)
    if run is not None and engine.speed_key is not None:
        keep_speeds(engine.speed_key, lambda speeds: speeds.having_run(run))


def own_run(num_residents: int, passes: Sequence[TimedPass]) -> OwnRun | None:
    """Return the averages of passes with about the usual number of rows; prompts are left out.

    None if there are few, or if half of them computed much longer than the quickest tenth.
    """
    if not passes:
        return None
    most_rows = 1.5 * median(each.num_rows for each in passes)
    own = [each for each in passes if 0 < each.num_rows <= most_rows]
    if len(own) < MIN_PASSES or sum(each.seconds for each in own) < MIN_RUN_S:
        return None
    computed_s = sorted(each.seconds - each.wait_s for each in own)
    if median(computed_s) > DISTURBED * computed_s[len(own) // 10]:
        return None
    num_tokens = fmean(each.num_tokens for each in own)
    if not num_tokens:
        return None
    return OwnRun(
        num_residents=num_residents,
        num_passes=len(own),
        num_rows=fmean(each.num_rows for each in own),
        num_tokens=num_tokens,
        compute_s=fmean(computed_s),
        wait_s=fmean(each.wait_s for each in own),
        num_missed=fmean(each.num_missed for each in own),
    )
