"""A loaded engine's reads ahead on the host alone, as inputs of a replay."""

from __future__ import annotations

from lowtide.engine.running.engine import Engine
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.transfer import DiskTransfer
from lowtide.kernels.cpu.reader import PIECE_BYTES
from lowtide.lab.simulation.foresight import measured_accuracy
from lowtide.lab.simulation.host_reads_ahead import AheadSlots
from lowtide.policies.prefetch import Gate
from lowtide.replay.calibration import Calibration


def ahead_slots(engine: Engine, calibration: Calibration) -> AheadSlots:
    """Return the facts by which the engine reads ahead of a layer, for a replay."""
    num_slots = engine.plan.num_staging
    if isinstance(engine.experts, NoExperts):
        return AheadSlots(num_slots)
    executor = engine.experts.executor
    if not isinstance(executor, HostExpertExecutor) or executor.batched is None:
        return AheadSlots(num_slots)
    transfer, accuracy = executor.host.transfer, None
    compiled = transfer.compiled if isinstance(transfer, DiskTransfer) else None
    if compiled is not None and compiled.is_direct and engine.model.runs_at_once:
        accuracy = measured_accuracy(calibration)[Gate.RAW]
    piece_share = min(1.0, PIECE_BYTES / executor.host.slots.layout.num_bytes)
    return AheadSlots(num_slots, executor.batched.max_rows, accuracy, piece_share)
