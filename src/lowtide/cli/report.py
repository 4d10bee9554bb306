"""Plans, usage and speed as tables, lines and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lowtide.cli.options import FLAGS
from lowtide.cli.outlook import prediction_object, speed_text
from lowtide.cli.screen import number_table
from lowtide.core import CacheMode
from lowtide.experts.account import account_of, account_rows
from lowtide.files.json_file import as_json
from lowtide.option import in_words
from lowtide.plan import MemoryPlan, SpeedRange, plan_facts, plan_rows, plan_tiers

if TYPE_CHECKING:
    from lowtide.answers.completion import Completion
    from lowtide.cli.answer import Answer


def plan_object(plan: MemoryPlan) -> dict[str, object]:
    """Return a plan for `--json`: its own fields, and the parts of each tier under `tiers`."""
    tiers = dict(plan_tiers(plan))
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    own = {name: value for name, value in fields.items() if name not in tiers}
    parts = {
        name: dataclasses.asdict(tier) | {"used_bytes": tier.used_bytes}
        for name, tier in tiers.items()
    }
    own["reason"] = in_words(plan.reason, FLAGS)
    own["prediction"] = prediction_object(plan.prediction)
    own["formats"] = dataclasses.asdict(plan.formats)
    return {"budget_bytes": plan.budget_bytes, **own, "tiers": parts}


def plan_table(plan: MemoryPlan) -> Group:
    """Make a table of a plan: a row per part, a column per tier, and the reason below."""
    columns, *rows = plan_rows(plan)
    table = number_table("memory plan", columns, left=columns[:1])
    for row in rows:
        if row[0] == "used":
            table.add_section()
        table.add_row(*row)
    return Group(table, Text(plan_facts(plan)), Text(in_words(plan.reason, FLAGS)))


def answer_object(
    completions: Sequence[Completion], stats: Mapping[str, float], plan: MemoryPlan
) -> dict[str, object]:
    """Return the object of `generate --json`.

    It is the first answer; several are also listed under `answers`. It has `reasoning` for a model
    that thinks, and `logprobs` if requested. `stats` has the counters of experts also as sums,
    under `account`.
    """
    answers = [_completion_object(completion) for completion in completions]
    several = {"answers": answers} if len(answers) > 1 else {}
    account = {"account": account_of(stats)} if plan.num_experts else {}
    told = {"stats": {**stats, **account}, "plan": plan_object(plan)}
    return {**answers[0], **told, **several}


def account_table(stats: Mapping[str, float]) -> Table:
    """Tabulate how experts were used since the model was loaded, a sum in each row."""
    table = number_table("experts since loading", ["", "", "of these"], left=["", "of these"])
    for row in account_rows(stats):
        table.add_row(*row)
    return table


def speed_line(
    answer: Answer,
    stats: Mapping[str, object] | None = None,
    expected: SpeedRange | None = None,
) -> str:
    """Describe an answer's tokens and speed, and any approximation.

    With `stats` also the expected speed, the time to the first token, passes, and the hit rate if
    there are experts.
    """
    usage = answer.usage
    ending = "" if usage.completion_tokens == 1 else "s"
    parts = [f"{usage.completion_tokens} token{ending}", f"{answer.tokens_per_s:.1f} tokens/s"]
    if stats is not None:
        parts += _costs(answer, stats, expected)
    if usage.kv_cache != CacheMode.EXACT.value:
        parts.append(f"approximate: {usage.kv_cache} cache")
    if usage.receipt is not None:
        receipt = usage.receipt
        parts.append(
            f"lossy: {receipt.num_substituted} experts replaced, {receipt.moved_share:.1%} of the "
            "router's weight"
        )
    return " · ".join(parts)


def _costs(
    answer: Answer, stats: Mapping[str, object], expected: SpeedRange | None
) -> Iterator[str]:
    if expected is not None:
        yield f"{speed_text(expected)} expected"
    usage = answer.usage
    if usage.completion_tokens:
        yield f"first after {answer.first_s:.1f} s"
    num_passes = usage.forwards
    each = f" ({usage.completion_tokens / num_passes:.1f} tokens each)" if num_passes else ""
    yield f"{num_passes} passes in {answer.generation_s:.1f} s{each}"
    hit_rate = stats.get("hit_rate")
    if isinstance(hit_rate, int | float) and math.isfinite(hit_rate):
        yield f"hit rate {hit_rate:.0%}"
    if ahead := reads_ahead_text(stats):
        yield ahead
    if not usage.formats.is_own:
        yield f"formats: {usage.formats}"


def reads_ahead_text(stats: Mapping[str, Any]) -> str:
    """Describe the experts that the host read before a layer asked; empty if there were none."""
    num_used, num_dropped = stats.get("num_ahead", 0), stats.get("num_wasted", 0)
    if not num_used + num_dropped:
        return ""
    return (
        f"{num_used + num_dropped:,} experts read ahead: {num_used:,} used "
        f"({stats.get('num_late', 0):,} of them late), {num_dropped:,} dropped"
    )


def json_line(value: object) -> str:
    """Return strict JSON on one line: numpy's numbers as numbers, no NaN."""
    return json.dumps(as_json(value), allow_nan=False)


def _completion_object(completion: Completion) -> dict[str, object]:
    answer: dict[str, object] = {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
    }
    if completion.reasoning:
        answer["reasoning"] = completion.reasoning
    if completion.logprobs is not None:
        answer["logprobs"] = [of_token._asdict() for of_token in completion.logprobs]
    return answer
