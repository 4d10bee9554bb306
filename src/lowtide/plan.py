"""The plan's nouns: the purpose of every byte of a loaded model, its passes' sizes, and its text.

Plain data. Knows nothing of files, devices or models.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lowtide.config import format_size
from lowtide.core import CacheMode, Reuse
from lowtide.errors import UsageError

OWN_FORMAT = "own"
"""Weights in memory as they are stored, or in the compute dtype."""

INT8_ROWS = "int8"
"""Rows rounded to int8 before they are multiplied; see `kernels/int8_rows.py`."""

AUTO_FORMAT = "auto"
"""Chosen when a model is opened: formats by `engine/planning/format_plans.py`, activations by
`engine/opening/weight_formats.py`."""


NOTABLE = 1.2
"""A format is named as faster only if its speed is at least this multiple."""


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats in which weights are kept in memory, by part, and to which rows are rounded.

    Rows are rounded before they are multiplied with weights. Formats other than `own` may change
    outputs.
    """

    experts: str = OWN_FORMAT
    dense: str = OWN_FORMAT
    head: str = OWN_FORMAT  # and the embedding
    activations: str = OWN_FORMAT  # "auto (int8)" where that was left to lowtide
    is_calibrated: bool = False  # experts were rounded for the inputs that a calibration recorded

    @property
    def is_own(self) -> bool:
        """True if nothing is rounded."""
        return self == WeightFormats()

    @property
    def names(self) -> set[str]:
        """The names of the formats of all parts."""
        return {*self.experts.split(", "), *self.dense.split(", "), *self.head.split(", ")}

    @property
    def names_of_parts(self) -> str:
        """Names by part: `experts q4 · dense q4 · head q8`."""
        calibrated = " (calibrated)" if self.is_calibrated else ""
        return f"experts {self.experts}{calibrated} · dense {self.dense} · head {self.head}"

    def __str__(self) -> str:
        parts = self.names_of_parts
        if self.activations == OWN_FORMAT:
            return parts
        return f"{parts} · activations {self.activations}"


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier's share of the plan, in bytes. The parts sum to at most `budget_bytes`."""

    budget_bytes: int
    dense_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int
    ring_bytes: int
    slot_bytes: int  # of one slot
    num_slots: int  # resident and staging slots together
    unused_slot_bytes: int = 0  # of an average slot: all are as large as the largest layer's
    state_bytes: int = 0  # of sequences' states, and of snapshots to take them up again

    @property
    def used_bytes(self) -> int:
        """Bytes that the plan uses of this tier."""
        of_sequences = self.kv_cache_bytes + self.state_bytes
        fixed = self.dense_bytes + of_sequences + self.workspace_bytes + self.ring_bytes
        return fixed + self.slot_bytes * self.num_slots


class SpeedRange(NamedTuple):
    """Expected tokens per second, and the range that contains nine of ten runs."""

    least: float
    likely: float
    most: float


class PassTime(NamedTuple):
    """Expected seconds of a pass, and the range around them."""

    least_s: float
    likely_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted resource use of one pass of a loaded model, and the tokens it gives.

    Routing is assumed even; if some experts are demanded more than others, fewer are read.
    """

    num_rows: int  # of a pass
    tokens_per_pass: float  # committed, as in the model's last run or as published
    read_bytes: float  # of experts, from disk
    memory_bytes: float  # of weights, read from memory
    pass_time: PassTime | None  # None: the model was not loaded here yet
    asked_share: float  # share of all experts that a pass demands
    at_most: float | None = None  # tokens/s, by the rates of memory and disk

    @property
    def asks_for_all(self) -> bool:
        """True if a pass uses nearly every expert: then only the number of residents matters."""
        return self.asked_share >= 0.99

    @property
    def read_bytes_per_token(self) -> float:
        """Bytes read from disk for each token."""
        return self.read_bytes / self.tokens_per_pass

    @property
    def speed(self) -> SpeedRange | None:
        """Predicted speed; None for a model that was not loaded here yet."""
        if self.pass_time is None:
            return None
        num_tokens, (least_s, likely_s, most_s) = self.tokens_per_pass, self.pass_time
        return SpeedRange(num_tokens / most_s, num_tokens / likely_s, num_tokens / least_s)


def predicted(plan: MemoryPlan) -> dict[str, float]:
    """Return the plan's predicted speed for `LLM.stats()`; empty if it has none."""
    speed = None if plan.prediction is None else plan.prediction.speed
    if speed is None:
        return {}
    return {
        "predicted_tokens_per_s": speed.likely,
        "predicted_tokens_per_s_least": speed.least,
        "predicted_tokens_per_s_most": speed.most,
    }


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """The plan with all weights in one format, within the same budgets."""

    format: str
    weight_bytes: int  # of all weights in memory, experts and dense
    resident_share: float | None  # of experts, in the fast tier; None: not even the least fits
    speed: SpeedRange | None  # predicted; None: not loaded here in this format yet
    at_most: float | None = None  # tokens/s, by the rates of memory and disk


def check_is_named(format: object) -> None:
    """Raise UsageError for `auto` where plans of formats are compared."""
    if format == AUTO_FORMAT:
        raise UsageError(
            "`format` 'auto' is for plans and answers, and may differ from budget to budget; name "
            "the format here (lowtide plan MODEL --format auto says which it chooses)."
        )


def faster_format(rows: Sequence[FormatPlan], weights: WeightFormats) -> FormatPlan | None:
    """Return a faster format to mention beside a slow plan; None for other plans.

    weights: of the present plan. It is slow if some stored experts are not resident. Faster means
    `NOTABLE` times as fast by predicted speeds if both are known, else by their upper bounds, or,
    if neither is known, with more residents.
    """
    own = next((row for row in rows if row.format == OWN_FORMAT), None)
    if own is None:
        return None
    gains = [(_gain(row, own), row) for row in other_formats(rows, weights)]
    best, row = max(gains, key=lambda gain: gain[0], default=(0.0, None))
    return row if best >= NOTABLE else None


def other_formats(rows: Sequence[FormatPlan], weights: WeightFormats) -> list[FormatPlan]:
    """Return the formats that fit and that a slow plan could have instead; none for another."""
    own = next((row for row in rows if row.format == OWN_FORMAT), None)
    if own is None or own.resident_share == 1.0 or not weights.names.isdisjoint(("q8", "q4")):
        return []
    return [row for row in rows if row is not own and row.resident_share is not None]


def _gain(row: FormatPlan, own: FormatPlan) -> float:
    """Return the factor by which a row is faster."""
    if row.speed is not None and own.speed is not None:
        return row.speed.likely / own.speed.likely
    if row.at_most is not None and own.at_most is not None:
        return row.at_most / own.at_most
    share, own_share = row.resident_share or 0.0, own.resident_share or 0.0
    return NOTABLE + share if share > own_share else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPlan:
    """Every byte a model will use, decided before anything is loaded.

    `minimum_bytes` is the least budget of the fast tier (the GPU if there is one, else the host)
    that runs one sequence of `context` tokens; `full_bytes` the budget from which every expert is
    resident in it. `overhead_bytes` is the process' memory outside the budgets: interpreter,
    libraries and a stated allowance.
    """

    host: TierPlan
    context: int  # the most tokens of one sequence
    max_rows: int  # token rows of the largest pass, or of each chunk of a prompt
    minimum_bytes: int
    full_bytes: int
    overhead_bytes: int
    num_experts: int  # routed experts of the whole model
    residents_per_layer: tuple[int, ...]  # of the fast tier; a policy may divide as many otherwise
    policy: str
    reason: str
    device: str = "cpu"
    gpu: TierPlan | None = None
    host_residents_per_layer: tuple[int, ...] = ()  # with a GPU: who is in host memory
    max_cache_tokens: int = 0
    """The most tokens of all running sequences, each at most `context`, as expert slots give way to
    them; 0 where none does: running sequences have `context` together."""
    kv_cache: str = CacheMode.EXACT.value  # others are approximations, see `CacheMode`
    cache: str = Reuse.ON.value  # what a request takes over of those before it, see `Reuse`
    prediction: Prediction | None = None  # None: beside a paced device, whose speed is given
    advised_bytes: int = 0
    """The best host budget here: enough for everything, or all free memory."""
    formats: WeightFormats = field(default_factory=WeightFormats)
    grammars_bytes: int = 0
    """Of a served model with grammars: the most memory of the process that tries them; between
    requests about a twentieth."""
    texts_bytes: int = 0
    """Of a served model: the most additional memory while texts are tokenised."""
    snapshot_bytes: int = 0
    """A copy of one sequence's states, from which a later turn goes on; 0: tokens suffice."""
    policy_sizes: str = ""
    """Numbers that the policy derives from its options for this model, unless constant."""
    prompt_chunks: int = 1
    """Most chunks of `max_rows` tokens of a prompt for which absent experts are read once."""

    @property
    def budget_bytes(self) -> int:
        """The budget of the fast tier."""
        return self.fast_tier.budget_bytes

    @property
    def fast_tier(self) -> TierPlan:
        """The GPU's tier if there is one, else the host's."""
        return self.host if self.gpu is None else self.gpu

    @property
    def policy_in_force(self) -> str:
        """The policy's name, with its sizes if it has any."""
        return f"{self.policy}: {self.policy_sizes}" if self.policy_sizes else self.policy

    @property
    def everything_fits(self) -> bool:
        """True if every expert has a slot of its own in the fast tier."""
        return self.fast_tier.num_slots == self.num_experts

    @property
    def num_staging(self) -> int:
        """Number of slots of the fast tier that experts only pass through."""
        return self.fast_tier.num_slots - sum(self.residents_per_layer)

    def __repr__(self) -> str:
        """Return the table and the facts below it in plain characters."""
        rows = plan_rows(self)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, sizes, widths[1:])])
            for name, *sizes in rows
        ]
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join(["memory plan", *lines, plan_facts(self), self.reason])

    def _repr_html_(self) -> str:
        """Return the table and the facts as an HTML fragment, for notebooks."""
        header, *rows = plan_rows(self)
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        said = "<br>".join(html.escape(f"{plan_facts(self)}\n{self.reason}").splitlines())
        return f"<table><tr>{head}</tr>{body}</table><p>{said}</p>"


def plan_rows(plan: MemoryPlan) -> list[list[str]]:
    """Return a row of names, then one for each part, with a column for each tier."""
    tiers = list(plan_tiers(plan))
    is_registered = plan.gpu is not None and plan.device != "cuda"
    names = [f"{plan.device} gpu" if name == "gpu" and is_registered else name for name, _ in tiers]
    rows = [["part", *names]]
    for part in ("dense", "kv_cache", "state", "workspace", "ring"):
        sizes = [getattr(tier, part + "_bytes") for _, tier in tiers]
        if part != "state":
            rows.append([part.replace("_", " "), *map(format_size, sizes)])
        elif any(sizes):
            rows.append(["states", *map(format_size, sizes)])
    if plan.num_experts:
        rows.append(["expert slots", *[_slots(tier) for _, tier in tiers]])
    rows.append(["used", *[format_size(tier.used_bytes) for _, tier in tiers]])
    rows.append(["budget", *[format_size(tier.budget_bytes) for _, tier in tiers]])
    return rows


def plan_facts(plan: MemoryPlan) -> str:
    """Describe device, policy, context and the budgets between which the plan lies."""
    placed = f"policy {plan.policy_in_force}"
    sizes = [f"least that runs {format_size(plan.minimum_bytes)}"]
    if plan.num_experts:
        residents = sum(plan.residents_per_layer)
        placed += f" · {residents} of {plan.num_experts} experts resident"
        if residents < plan.num_experts:
            placed += f", {plan.num_staging} slots to read others into"
        sizes.append(f"everything resident {format_size(plan.full_bytes)}")
    sizes.append(f"process outside the budget {format_size(plan.overhead_bytes)}")
    if plan.grammars_bytes:
        sizes.append(f"another that tries grammars at most {format_size(plan.grammars_bytes)}")
    if plan.texts_bytes:
        sizes.append(f"the longest texts at most {format_size(plan.texts_bytes)} as they are read")
    context = f"context {plan.context} tokens"
    if plan.max_cache_tokens > plan.context:
        context += f" a sequence, {plan.max_cache_tokens} in all as experts give way"
    lines = [f"device {plan.device} · {placed} · {context}", " · ".join(sizes)]
    if plan.kv_cache != CacheMode.EXACT.value:
        lines.append(
            f"{plan.kv_cache} cache: an approximation, whose agreement lowtide verify reports"
        )
    if plan.cache == Reuse.OFF.value:
        lines.append("no keys are kept for a next turn, which computes the whole conversation")
    if not plan.formats.is_own:
        lines.append(f"formats: {plan.formats}; their cost is a row of lowtide quality")
    return "\n".join(lines)


def plan_tiers(plan: MemoryPlan) -> Iterator[tuple[str, TierPlan]]:
    """Yield the tiers by name."""
    yield "host", plan.host
    if plan.gpu is not None:
        yield "gpu", plan.gpu


def _slots(tier: TierPlan) -> str:
    size = format_size(tier.num_slots * tier.slot_bytes)
    unused = ""
    if tier.unused_slot_bytes:
        unused_bytes = tier.num_slots * tier.unused_slot_bytes
        unused = f"; {format_size(unused_bytes)} of them unused, as layers' formats differ"
    return f"{size} ({tier.num_slots} x {format_size(tier.slot_bytes)}{unused})"
