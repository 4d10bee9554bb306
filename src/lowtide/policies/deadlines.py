"""Deadlines for `miss=late`, ours: finds absent experts that come too late for their layer.

An expert is late if, by the cost model, it is ready after the residents' computation has ended: the
layer's deadline. Experts queue for the disk, the link or the host's threads.
"""

from __future__ import annotations

import numpy as np

from lowtide.buddies import Waits
from lowtide.core import Facts, FloatArray
from lowtide.policies.assignment import Assign

_SLACK = 1 + 1e-9
"""Slack of a deadline, as a factor, for rounding: the same times are added in another order."""

DISK, LINK, THREADS = 1, 2, 3
"""Queues in `Waits.queue_of`."""


def waits_of(facts: Facts, assign: Assign) -> Waits:
    """Return the queues of absent experts, and the deadline.

    The host alone reads absent experts. Beside a device `assign` says where each expert would be
    computed; an expert that the host holds and computes in time is not late.
    """
    costs, demand = facts.costs, facts.demand
    if not facts.has_idle_link:  # no device
        deadline_s = _end_s(costs.device_s(demand.num_tokens[demand.is_resident])) * _SLACK
        return Waits(None, (0.0, 0.0), (costs.fetch_s, 0.0), None, deadline_s)
    assignment = assign(facts)
    tokens_of = np.zeros(len(facts.is_kept), np.int64)
    tokens_of[demand.experts] = demand.num_tokens
    deadline_s = _end_s(costs.device_s(tokens_of[assignment.resident])) * _SLACK
    queue_of = np.zeros(len(tokens_of), np.uint8)
    queue_of[assignment.fetch] = LINK
    queue_of[assignment.host] = THREADS
    if facts.is_at_host is not None:
        queue_of[~facts.is_at_host] = DISK
    each_s = costs.disk_read_s, costs.link_s
    return Waits(queue_of, (0.0, facts.link_s), each_s, costs.host_s(tokens_of), deadline_s)


def _end_s(seconds: FloatArray) -> float:
    """Return the sum, added in order."""
    return float(seconds.cumsum()[-1]) if len(seconds) else 0.0
