"""Times reading one expert against reading and rounding it, before a format is chosen."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

from lowtide.engine.opening.facts import ExpertFacts, MemoryFacts, SpeedFacts
from lowtide.engine.planning.prediction import known_speeds, speed_key
from lowtide.experts.slots import ExpertSlots
from lowtide.experts.transfer import DiskTransfer, ticket_result
from lowtide.formats.convert import pack
from lowtide.hardware.model_speeds import ModelSpeeds, keep_speeds
from lowtide.kernels.choice import choose_pack, possible_names
from lowtide.memory.arena import Arena
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.reading.file_reader import FileReader

NUM_EXPERTS = 3
"""Experts read one after another; their median counts."""


def keep_rounding(checkpoint: Checkpoint | None, own: MemoryFacts, rounded: SpeedFacts) -> None:
    """Measure the time that rounding adds to an expert's read, once per model and format.

    own: the model's memory as stored. rounded: the same model in a format to which experts are
    rounded when read. Raises StorageError if an expert cannot be read.
    """
    memory = rounded.memory
    if checkpoint is None or not memory.is_rounded_as_read:
        return
    if known_speeds(rounded).rounding_s is not None:
        return
    if own.experts is None or memory.experts is None:
        return
    read_s, rounded_s = (
        _expert_s(each, experts, checkpoint, rounded.kernels)
        for each, experts in ((own, own.experts), (memory, memory.experts))
    )
    added = partial(_having, rounding_s=max(1e-9, rounded_s - read_s))
    best = possible_names(rounded.kernels, memory.dtype, memory.rounded)[0]
    keep_speeds(speed_key(rounded, best), added)


def _having(speeds: ModelSpeeds, rounding_s: float) -> ModelSpeeds:
    return replace(speeds, rounding_s=rounding_s)


def _expert_s(
    memory: MemoryFacts, experts: ExpertFacts, checkpoint: Checkpoint, kernels: str
) -> float:
    """Return the seconds until an expert is in a slot, with no other read in progress."""
    layout = experts.layout
    packs = choose_pack(kernels) if memory.is_rounded_as_read else pack
    slots = ExpertSlots(Arena(layout.num_bytes), layout)
    times = []
    with closing(FileReader(checkpoint.files, memory.largest_read_bytes, packs)) as reader:
        transfer = DiskTransfer(reader, experts.table, slots, experts.inputs)
        for expert in range(min(NUM_EXPERTS, experts.shape.num_experts)):
            start_s = perf_counter()
            ticket_result(transfer.start(0, expert, 0))
            times.append(perf_counter() - start_s)
    return median(times)
