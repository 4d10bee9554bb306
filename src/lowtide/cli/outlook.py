"""Sentences about a plan: does it fit, how fast is it, which budget or format is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lowtide.config import ModelConfig, format_size
from lowtide.plan import FormatPlan, MemoryPlan, Prediction, SpeedRange, faster_format

SHORT_CONTEXT = 64


def outlook(plan: MemoryPlan) -> str:
    """Return the lines below a plan's table: bytes read, expected speed, advised budget."""
    lines = []
    if plan.prediction is not None:
        lines += [_bytes_line(plan, plan.prediction), *_no_cache_line(plan.prediction)]
        lines.append(_speed_line(plan.prediction))
    lines += [advice] if (advice := _advice(plan)) else []
    return "\n".join(lines)


def plan_line(plan: MemoryPlan) -> str:
    """Describe the plan in one line, as printed before an answer."""
    tier = plan.fast_tier
    parts = [f"{plan.device}: {format_size(tier.used_bytes)} of {format_size(tier.budget_bytes)}"]
    if plan.num_experts:
        residents = sum(plan.residents_per_layer)
        placed = f"{residents} of {plan.num_experts} experts in memory ({plan.policy_in_force})"
        parts.append("all experts in memory" if residents == plan.num_experts else placed)
    parts.append(f"context {plan.context}")
    prediction = plan.prediction
    if prediction is not None and prediction.speed is not None:
        parts.append(f"{speed_text(prediction.speed)} expected")
    elif prediction is not None and prediction.at_most is not None:
        parts.append(f"at most {per_second(prediction.at_most)} tokens/s")
    return " · ".join(parts)


def conversation_note(plan: MemoryPlan) -> str:
    """Return what a conversation takes of the memory that is planned for all of them.

    Empty where passes keep no keys.
    """
    num_bytes = plan.fast_tier.kv_cache_bytes
    if not num_bytes:
        return ""
    each = format_size(round(num_bytes / plan.context))
    told = (
        f"context {plan.context:,}: {format_size(num_bytes)} of memory, on average {each} for each "
        "token"
    )
    if not plan.snapshot_bytes:
        return f"{told} of a conversation"
    running, copied = format_size(2 * plan.snapshot_bytes), format_size(plan.snapshot_bytes)
    num_slots = plan.fast_tier.state_bytes // plan.snapshot_bytes
    return (
        f"{told} of a conversation, {running} while it runs, and {copied} for each snapshot from "
        f"which a later turn goes on: {num_slots // 2} run at once, or {num_slots} snapshots are "
        "kept"
    )


def context_note(plan: MemoryPlan, config: ModelConfig) -> str:
    """Return a note on a context that is too long or too short, or an empty string."""
    positions = config.max_positions
    if plan.context > positions and not config.decoding.keeps_keys:
        return (
            f"context {plan.context}: the model was made for texts of {positions} tokens; longer "
            "ones are computed as published, and may be answered badly"
        )
    if plan.context > positions:
        return (
            f"context {plan.context}: the model has {positions} positions and no text can be "
            f"longer; the memory of the rest stays unused (--context {positions})"
        )
    if plan.context < SHORT_CONTEXT:
        return f"context {plan.context}: too short for most prompts with their answers"
    return ""


def verdict(plan: MemoryPlan, by_format: Sequence[FormatPlan]) -> str:
    """Sum up the plan in a few sentences: fit, speed, and a faster format."""
    resident, num_experts = sum(plan.residents_per_layer), plan.num_experts
    parts = ["Fits."]
    if resident < num_experts:
        parts = [f"Runs, with {resident / num_experts:.0%} of the experts in memory."]
    prediction = plan.prediction
    if prediction is not None and prediction.speed is not None:
        parts.append(f"{speed_text(prediction.speed).capitalize()}.")
    elif prediction is not None and prediction.at_most is not None:
        parts.append(f"At most {per_second(prediction.at_most)} tokens/s.")
    faster = faster_format(by_format, plan.formats)
    if faster is not None:
        gives = f"{faster.resident_share:.0%} of the experts in memory"
        if faster.speed is not None:
            gives = f"about {per_second(faster.speed.likely)}"
        elif faster.at_most is not None:
            gives += f", at most {per_second(faster.at_most)} tokens/s"
        parts.append(f"With --format {faster.format} {gives}; it may change answers.")
    return " ".join(parts)


def speed_text(speed: SpeedRange) -> str:
    """Format a speed as `about 14 tokens/s (10 to 18)`."""
    least, likely, most = map(per_second, speed)
    return f"about {likely} tokens/s ({least} to {most})"


def per_second(number: float) -> str:
    """Format a number with two digits, or as an integer from 10 on."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def prediction_object(prediction: Prediction | None) -> dict[str, object] | None:
    """Return a prediction and its derived values for `--json`."""
    if prediction is None:
        return None
    told = dataclasses.asdict(prediction)
    del told["at_most"]
    return told | {
        "pass_time": prediction.pass_time and prediction.pass_time._asdict(),
        "tokens_per_s": prediction.speed and prediction.speed._asdict(),
        "at_most_tokens_per_s": prediction.at_most,
        "read_bytes_per_token": prediction.read_bytes_per_token,
        "asks_for_all": prediction.asks_for_all,
    }


def _bytes_line(plan: MemoryPlan, prediction: Prediction) -> str:
    memory = format_size(round(prediction.memory_bytes / prediction.tokens_per_pass))
    parts = [f"each token uses {memory} of weights"]
    if plan.num_experts:
        read = format_size(round(prediction.read_bytes_per_token))
        parts.append(f"{read} of them read from disk (with even routing)")
    return ", ".join(parts)


def _no_cache_line(prediction: Prediction) -> list[str]:
    """Return a note if every pass uses all experts, so that no choice of residents saves reads."""
    if not (prediction.asks_for_all and prediction.read_bytes):
        return []
    read = format_size(round(prediction.read_bytes))
    return [
        f"every pass asks for all experts: the {read} that are not in memory are read in each, "
        "whichever are kept; only a larger budget reads less"
    ]


def _speed_line(prediction: Prediction) -> str:
    if prediction.speed is None or prediction.pass_time is None:
        bound = ""
        if prediction.at_most is not None:
            bound = f"at most {per_second(prediction.at_most)} tokens/s, by bytes alone; "
        return f"{bound}the first load measures the model and predicts its speed"
    rows = f"{prediction.num_rows} row{'s' * (prediction.num_rows > 1)}"
    return (
        f"expected: {speed_text(prediction.speed)}, passes of {rows} in "
        f"{prediction.pass_time.likely_s:.3g} s with {prediction.tokens_per_pass:.3g} tokens each, "
        "as this model was measured here"
    )


def _advice(plan: MemoryPlan) -> str:
    """Return a line with the host budget to choose, or an empty string."""
    if not plan.advised_bytes:
        return ""
    advised, needed = format_size(plan.advised_bytes), plan.full_bytes
    if plan.gpu is not None:
        return f"advised: --host-memory {_flag(plan.advised_bytes)}"
    if plan.advised_bytes >= needed:
        return f"advised: --host-memory {_flag(plan.advised_bytes)}, which holds everything"
    return (
        f"advised: --host-memory auto, now {advised}: 90% of what is free here; everything takes "
        f"{format_size(needed)}"
    )


def _flag(num_bytes: int) -> str:
    """Format a size as a user would type it, rounded up."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if num_bytes >= 10 * unit:
            return f"{-(-num_bytes // unit)}{name}"
    return str(num_bytes)
