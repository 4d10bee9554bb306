"""Plans, usage and speed as tables, lines and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lowtide.config import format_size
from lowtide.core import CacheMode, MemoryPlan, TierPlan

if TYPE_CHECKING:
    from lowtide.llm import Completion, Usage


def plan_object(plan: MemoryPlan) -> dict[str, object]:
    """A plan for `--json`: its own fields, and the parts of each tier under `tiers`."""
    tiers = dict(_tiers(plan))
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    own = {name: value for name, value in fields.items() if name not in tiers}
    parts = {
        name: dataclasses.asdict(tier) | {"used_bytes": tier.used_bytes}
        for name, tier in tiers.items()
    }
    return {"budget_bytes": plan.budget_bytes, **own, "tiers": parts}


def plan_table(plan: MemoryPlan) -> Group:
    """A plan as a table: a row per part, a column per tier, and the reason below."""
    tiers = list(_tiers(plan))
    table = Table(title="memory plan", title_justify="left", title_style="bold")
    table.add_column("part")
    for name, _ in tiers:
        is_emulated = name == "gpu" and plan.device == "emulated"
        table.add_column("emulated gpu" if is_emulated else name, justify="right")
    for part in ("dense", "kv_cache", "workspace", "ring"):
        sizes = [getattr(tier, part + "_bytes") for _, tier in tiers]
        table.add_row(part.replace("_", " "), *map(format_size, sizes))
    if plan.num_experts:
        table.add_row("expert slots", *[_slots(tier) for _, tier in tiers])
    table.add_section()
    table.add_row("used", *[format_size(tier.used_bytes) for _, tier in tiers])
    table.add_row("budget", *[format_size(tier.budget_bytes) for _, tier in tiers])
    return Group(table, Text(_facts(plan)), Text(plan.reason))


def answer_object(
    completion: Completion, stats: Mapping[str, object], plan: MemoryPlan
) -> dict[str, object]:
    """The one object of `generate --json`; with `logprobs` where they were asked for."""
    answer: dict[str, object] = {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
        "stats": dict(stats),
        "plan": plan_object(plan),
    }
    if completion.logprobs is not None:
        answer["logprobs"] = [of_token._asdict() for of_token in completion.logprobs]
    return answer


def speed_line(usage: Usage, stats: Mapping[str, object], generation_s: float) -> str:
    """What the answer cost: committed answer tokens per second, forwards, hit rate."""
    num_tokens, num_forwards = usage.completion_tokens, usage.forwards
    parts = [
        f"{speed(num_tokens, generation_s):.1f} tokens/s",
        f"{num_tokens} tokens in {generation_s:.1f} s",
        f"{num_forwards} forwards",
    ]
    if num_forwards:
        parts[-1] += f" ({num_tokens / num_forwards:.1f} tokens each)"
    hit_rate = stats.get("hit_rate")
    if isinstance(hit_rate, int | float) and math.isfinite(hit_rate):
        parts.append(f"hit rate {hit_rate:.0%}")
    if usage.kv_cache != CacheMode.EXACT.value:
        parts.append(f"approximate: {usage.kv_cache} cache")
    if usage.receipt is not None:
        receipt = usage.receipt
        parts.append(
            f"lossy: {receipt.num_substituted} experts replaced, {receipt.moved_share:.1%} of the "
            "router's weight"
        )
    return " · ".join(parts)


def speed(num_tokens: int, generation_s: float) -> float:
    """Committed answer tokens per second."""
    return num_tokens / generation_s if generation_s > 0 else 0.0


def json_line(value: object) -> str:
    """`value` as strict JSON on one line: numpy's numbers as numbers, no NaN."""
    return json.dumps(_plain(value), allow_nan=False)


def _tiers(plan: MemoryPlan) -> Iterator[tuple[str, TierPlan]]:
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, TierPlan):
            yield field.name, value


def _slots(tier: TierPlan) -> str:
    size = format_size(tier.num_slots * tier.slot_bytes)
    unused = ""
    if tier.unused_slot_bytes:
        unused_bytes = tier.num_slots * tier.unused_slot_bytes
        unused = f"; {format_size(unused_bytes)} of them unused, as layers' formats differ"
    return f"{size} ({tier.num_slots} x {format_size(tier.slot_bytes)}{unused})"


def _facts(plan: MemoryPlan) -> str:
    placed = f"policy {plan.policy}"
    sizes = [f"least that runs {format_size(plan.minimum_bytes)}"]
    if plan.num_experts:
        residents = sum(plan.residents_per_layer)
        placed += f" · {residents} of {plan.num_experts} experts resident"
        sizes.append(f"everything resident {format_size(plan.full_bytes)}")
    sizes.append(f"process outside the budget {format_size(plan.overhead_bytes)}")
    context = f"context {plan.context} tokens"
    if plan.elastic_tokens:
        context += (
            f" · elastic: {plan.elastic_tokens} tokens over all sequences while slots give way, "
            f"{plan.num_staging} at least"
        )
    lines = [f"device {plan.device} · {placed} · {context}", " · ".join(sizes)]
    if plan.kv_cache != CacheMode.EXACT.value:
        lines.append(
            f"{plan.kv_cache} cache: an approximation, whose agreement lowtide verify reports"
        )
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
