"""A memory plan for people: its rows, what else there is to say of it, and both as text or HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator

from lowtide.config import format_size
from lowtide.core import CacheMode
from lowtide.plan import MemoryPlan, TierPlan


def plan_as_text(plan: MemoryPlan) -> str:
    """The table and what is said below it, in plain characters."""
    rows = plan_rows(plan)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join(["memory plan", *lines[:1], rule, *lines[1:], plan_facts(plan), plan.reason])


def plan_as_html(plan: MemoryPlan) -> str:
    """The same as an HTML fragment, for notebooks."""
    header, *rows = plan_rows(plan)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    said = "<br>".join(html.escape(f"{plan_facts(plan)}\n{plan.reason}").splitlines())
    return f"<table><tr>{head}</tr>{body}</table><p>{said}</p>"


def plan_rows(plan: MemoryPlan) -> list[list[str]]:
    """A row of names, then one for each part, of a column for each tier."""
    tiers = list(plan_tiers(plan))
    is_emulated = plan.device == "emulated"
    names = ["emulated gpu" if name == "gpu" and is_emulated else name for name, _ in tiers]
    rows = [["part", *names]]
    for part in ("dense", "kv_cache", "workspace", "ring"):
        sizes = [getattr(tier, part + "_bytes") for _, tier in tiers]
        rows.append([part.replace("_", " "), *map(format_size, sizes)])
    if plan.num_experts:
        rows.append(["expert slots", *[_slots(tier) for _, tier in tiers]])
    rows.append(["used", *[format_size(tier.used_bytes) for _, tier in tiers]])
    rows.append(["budget", *[format_size(tier.budget_bytes) for _, tier in tiers]])
    return rows


def plan_facts(plan: MemoryPlan) -> str:
    """What the table does not say: device, policy, context, the budgets between which it lies."""
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
    if not plan.formats.is_own:
        lines.append(f"formats: {plan.formats}; their cost is a row of lowtide quality")
    return "\n".join(lines)


def plan_tiers(plan: MemoryPlan) -> Iterator[tuple[str, TierPlan]]:
    """The tiers that there are, by name."""
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
