"""An engine's share of a Ray node: memory and cores, for Ray's resources and lowtide's options.

Ray only counts resources; the memory budget and the option `cores` enforce them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from lowtide.config import parse_size
from lowtide.errors import PlanError, UsageError
from lowtide.llm import plan_model
from lowtide.threads.cores import keep_to

_log = logging.getLogger(__name__)

RAY_BYTES = 160 << 20
"""Memory of Ray's own code in an engine's process, beside `MemoryPlan.overhead_bytes`: 150 MiB
measured (docs/scale.md)."""


class Share(NamedTuple):
    """The share of a node that one engine takes."""

    options: dict[str, Any]  # of `LLM`, with budget and cores
    num_cpus: int
    memory_bytes: int

    def num_on(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """Return the number of engines that fit on nodes with these resources."""
        return sum(
            min(
                int(node.get("CPU", 0)) // self.num_cpus,
                int(node.get("memory", 0)) // self.memory_bytes,
            )
            for node in nodes
        )


def node_resources() -> list[Mapping[str, float]]:
    """Return the resources of Ray's living compute nodes. Raise UsageError if there are none."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found = [node for node in nodes if node.get("CPU", 0) >= 1]
    if not found:
        raise UsageError("No node of the Ray cluster has a CPU for tasks (--num-cpus).")
    return found


def with_own_cores(options: Mapping[str, Any]) -> dict[str, Any]:
    """Bind this process to its share's cores, which no other engine here uses.

    If Ray was told of more CPUs than are free, it computes on all cores and warns. Returns the
    remaining options.
    """
    left = {name: each for name, each in options.items() if name != "cores"}
    try:
        keep_to(options["cores"])
    except UsageError as error:
        _log.warning("This engine shares cores with others: %s", error)
    return left


def share_of(
    model: str,
    options: Mapping[str, Any],
    cores: int | None = None,
    memory: str | int | None = None,
) -> Share:
    """Plan one engine's share of each node in the connected cluster.

    cores: by default all of the smallest node.
    memory: the whole process's, as Ray counts it; by default what the budget in `options` needs or,
    without a budget, all of the smallest node's.

    Raises PlanError if the model does not fit.
    """
    nodes = node_resources()
    if options.get("cores") is not None:
        raise UsageError(
            "`cores`: under Ray each engine has those that Ray gives it; ask Ray for them."
        )
    least_cpus = int(min(node["CPU"] for node in nodes))
    num_cpus = least_cpus if cores is None else cores
    plan = plan_model(model, **options)
    beside_bytes = plan.overhead_bytes + RAY_BYTES
    given = options.get("host_memory", "auto")
    if given != "auto" and memory is None:
        budget_bytes = plan.budget_bytes
    else:
        node_bytes = int(min(node.get("memory", 0) for node in nodes))
        room = node_bytes if memory is None else int(parse_size(memory, node_bytes))
        budget_bytes = min(room - beside_bytes, plan.full_bytes)
        if given != "auto":
            budget_bytes = min(budget_bytes, plan.budget_bytes)
        if budget_bytes < plan.minimum_bytes:
            raise PlanError(
                f"An engine of {room} bytes has {max(0, budget_bytes)} for the model, and at least "
                f"{plan.minimum_bytes} are needed: its process takes {beside_bytes} beside. Give "
                "it more memory (ray start --memory), or lower `context`."
            )
    named = {**options, "host_memory": budget_bytes, "cores": num_cpus}
    return Share(named, num_cpus, budget_bytes + beside_bytes)
