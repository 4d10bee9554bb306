"""Division of a byte budget, decided before anything is loaded.

Pure arithmetic. Fixed parts (dense weights, KV cache, states, workspace, read ring) come first,
expert slots get the rest, and a budget that is too small is refused with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.config import format_size
from lowtide.errors import PlanError
from lowtide.plan import TierPlan

LARGE_SLOT_BYTES = 64 << 20

DEVICE_STAGING_SLOTS = 8
"""Half for experts that a step demands, half for prefetched ones."""


def host_staging_slots(slot_bytes: int, num_experts: int) -> int:
    """Return the host slots for experts in transit from disk; `num_experts` counts all layers."""
    # Four readers stay busy only while twice as many slots wait for their use (docs/log).
    return min(12 if slot_bytes <= LARGE_SLOT_BYTES else 2, num_experts)


def device_staging_slots(num_experts: int) -> int:
    """Return the device slots for experts fetched for a step or ahead of one."""
    return min(DEVICE_STAGING_SLOTS, num_experts)


@dataclass(frozen=True, slots=True)
class Needs:
    """Demands of a model on the tier that it computes with, in bytes and counts.

    A device needs no slot, since experts can be computed at home, unless it fetches every absent
    one.
    """

    dense_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int
    ring_bytes: int
    slot_bytes: int
    num_layers: int  # MoE layers
    num_experts: int  # routed experts per MoE layer
    unused_slot_bytes: int = 0  # see TierPlan
    whole_workspace_bytes: int = 0  # with no operator divided, if that is more
    is_device: bool = False
    fetches_all: bool = False  # the device fetches every absent expert
    state_bytes: int = 0  # of sequences' states

    @property
    def fixed_bytes(self) -> int:
        """Bytes that every budget must hold, expert slots aside."""
        of_sequences = self.kv_cache_bytes + self.state_bytes
        return self.dense_bytes + of_sequences + self.workspace_bytes + self.ring_bytes

    @property
    def whole_bytes(self) -> int:
        """The budget from which nothing streams and no operator is divided."""
        return self.full_bytes + max(0, self.whole_workspace_bytes - self.workspace_bytes)

    @property
    def num_staging_slots(self) -> int:
        """Number of slots through which absent experts stream: enough to read ahead."""
        num_experts = self.num_layers * self.num_experts
        if self.is_device:
            return device_staging_slots(num_experts)
        return host_staging_slots(self.slot_bytes, num_experts)

    @property
    def num_least_slots(self) -> int:
        """Number of slots without which nothing runs."""
        return int(self.fetches_all) if self.is_device else self.num_staging_slots

    @property
    def minimum_bytes(self) -> int:
        """The least budget that runs: no expert is resident, all stream."""
        return self.fixed_bytes + self.num_least_slots * self.slot_bytes

    @property
    def full_bytes(self) -> int:
        """The budget from which every expert is resident, so that nothing streams."""
        return self.fixed_bytes + self.num_layers * self.num_experts * self.slot_bytes


def spend(needs: Needs, budget_bytes: int, context: int) -> tuple[TierPlan, tuple[int, ...]]:
    """Divide `budget_bytes`; return the tier's plan and the residents of each MoE layer.

    Layers get equal shares, earlier ones the remainder. Bytes left once all experts are resident
    enlarge the workspace until no operator is divided. Raises PlanError below `minimum_bytes`.
    """
    if budget_bytes < needs.minimum_bytes:
        raise PlanError(_refusal(needs, budget_bytes, context))
    total = needs.num_layers * needs.num_experts
    if budget_bytes >= needs.full_bytes:
        num_slots, num_residents = total, total
    else:
        num_slots = (budget_bytes - needs.fixed_bytes) // needs.slot_bytes
        num_residents = max(0, num_slots - needs.num_staging_slots)
    share, remainder = divmod(num_residents, max(1, needs.num_layers))
    residents = tuple(share + (layer < remainder) for layer in range(needs.num_layers))
    tier = TierPlan(
        budget_bytes=budget_bytes,
        dense_bytes=needs.dense_bytes,
        kv_cache_bytes=needs.kv_cache_bytes,
        workspace_bytes=needs.workspace_bytes
        + max(0, min(budget_bytes, needs.whole_bytes) - needs.full_bytes),
        ring_bytes=needs.ring_bytes,
        slot_bytes=needs.slot_bytes,
        num_slots=num_slots,
        unused_slot_bytes=needs.unused_slot_bytes,
        state_bytes=needs.state_bytes,
    )
    return tier, residents


def _refusal(needs: Needs, budget_bytes: int, context: int) -> str:
    slots, count = "", needs.num_least_slots
    option = "gpu_memory" if needs.is_device else "host_memory"
    if count:
        noun = "slot" if count == 1 else "slots"
        slots = f" and {count} expert {noun} of {format_size(needs.slot_bytes)}"
    # The most that a shorter context can save; advice that cannot help is not given.
    left_bytes = needs.minimum_bytes - needs.kv_cache_bytes - needs.workspace_bytes
    shorter = " or lower `context`" if left_bytes < budget_bytes else ""
    # A model that keeps none has a layer's keys and values in the workspace.
    parts = f"workspace for a context of {context} tokens {format_size(needs.workspace_bytes)}"
    if needs.kv_cache_bytes:
        parts = f"KV cache of {context} tokens {format_size(needs.kv_cache_bytes)}, "
        if needs.state_bytes:
            parts += f"states {format_size(needs.state_bytes)}, "
        parts += f"workspace {format_size(needs.workspace_bytes)}"
    budget, least = format_size(budget_bytes), format_size(needs.minimum_bytes)
    if budget == least:  # they differ by less than a digit shows
        budget += f" ({budget_bytes} bytes)"
    return (
        f"A budget of {budget} is too small: at least "
        f"{least} ({needs.minimum_bytes} bytes) are needed, for dense "
        f"weights {format_size(needs.dense_bytes)}, {parts}, "
        f"read ring {format_size(needs.ring_bytes)}{slots}. Raise `{option}`{shorter}."
    )
