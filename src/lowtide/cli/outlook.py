"""Whether a model will fit and how fast it will be: what a plan says beyond its bytes."""

from __future__ import annotations

import dataclasses
import shlex

from lowtide.config import format_size
from lowtide.plan import Basis, MemoryPlan, Prediction

_RESTS_ON = {
    Basis.EXPERTS: "by the times of its experts that lowtide doctor measured here",
    Basis.MACHINE: "by the memory, products and disk that lowtide doctor measured here",
}


def outlook(plan: MemoryPlan, model: str) -> str:
    """Lines below a plan's table: bytes read, the speed to expect, the budget to choose."""
    lines = []
    if plan.prediction is not None:
        lines += [_bytes_line(plan, plan.prediction), *_no_cache_line(plan.prediction)]
        lines.append(_speed_line(plan.prediction, model))
    lines += [advice] if (advice := _advice(plan)) else []
    return "\n".join(lines)


def plan_line(plan: MemoryPlan, model: str) -> str:
    """The plan in one line: what a run is told of it before its answer."""
    tier = plan.fast_tier
    parts = [f"{plan.device}: {format_size(tier.used_bytes)} of {format_size(tier.budget_bytes)}"]
    if plan.num_experts:
        residents = sum(plan.residents_per_layer)
        parts.append(f"{residents} of {plan.num_experts} experts resident ({plan.policy})")
    parts.append(f"context {plan.context}")
    prediction = plan.prediction
    if prediction is not None and prediction.tokens_per_s is None:
        parts.append(f"speed unknown until {doctor_command(model)} has run")
    elif prediction is not None:
        parts.append(f"{_at_least(prediction)} expected")
    return " · ".join(parts)


def doctor_command(model: str) -> str:
    """What measures a model here, as one would type it."""
    return f"`lowtide doctor {shlex.quote(model)}`"


def prediction_object(prediction: Prediction | None) -> dict[str, object] | None:
    """For `--json`, with what follows from it."""
    if prediction is None:
        return None
    return dataclasses.asdict(prediction) | {
        "rests_on": prediction.rests_on.value,
        "tokens_per_s": prediction.tokens_per_s,
        "read_bytes_per_token": prediction.read_bytes_per_token,
        "asks_for_all": prediction.asks_for_all,
    }


def compared(predicted: object, measured: float) -> str:
    """A predicted speed, for beside the measured one; nothing where there is none."""
    if not isinstance(predicted, float) or not measured:
        return ""
    return f"{predicted:.1f} predicted"


def _bytes_line(plan: MemoryPlan, prediction: Prediction) -> str:
    memory = format_size(round(prediction.memory_bytes / prediction.tokens_per_pass))
    parts = [f"per token {memory} of weights are gone through"]
    if plan.num_experts:
        read = format_size(round(prediction.read_bytes_per_token))
        parts.append(f"{read} of them read from disk, if all experts are asked for alike")
    return ", ".join(parts)


def _no_cache_line(prediction: Prediction) -> list[str]:
    """Where every pass wants everything: that no choice of residents saves a read."""
    if not (prediction.asks_for_all and prediction.read_bytes):
        return []
    read = format_size(round(prediction.read_bytes))
    return [
        f"every pass asks for all experts: the {read} that are not in memory are read in each, "
        "whichever are kept; only a larger budget reads less"
    ]


def _speed_line(prediction: Prediction, model: str) -> str:
    if prediction.tokens_per_s is None:
        return f"tokens/s: unknown until {doctor_command(model)} has measured this machine"
    rows = f"{prediction.num_rows} row{'s' * (prediction.num_rows > 1)}"
    return (
        f"expected: {_at_least(prediction)}, passes of {rows} in {prediction.pass_s:.3g} s, "
        f"{_RESTS_ON[prediction.rests_on]}"
    )


def _at_least(prediction: Prediction) -> str:
    """A diffusion model may write more tokens in a pass than it has to."""
    sign = "about" if prediction.num_rows == 1 else "at least"
    per_s = prediction.tokens_per_s or 0.0
    return f"{sign} {per_s:.0f} tokens/s" if per_s >= 10 else f"{sign} {per_s:.2g} tokens/s"


def _advice(plan: MemoryPlan) -> str:
    """The host budget to choose, in one line; nothing where none would do."""
    if not plan.advised_bytes:
        return ""
    advised, needed = format_size(plan.advised_bytes), plan.full_bytes
    if plan.gpu is not None:
        return f"advised: --host-memory {_flag(plan.advised_bytes)}"
    if plan.advised_bytes >= needed:
        return f"advised: --host-memory {_flag(plan.advised_bytes)}, which holds everything"
    return (
        f"advised: --host-memory auto, now {advised}: all that is free here but a tenth; "
        f"everything takes {format_size(needed)}"
    )


def _flag(num_bytes: int) -> str:
    """A size as one would type it, not below."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if num_bytes >= 10 * unit:
            return f"{-(-num_bytes // unit)}{name}"
    return str(num_bytes)
