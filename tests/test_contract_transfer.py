"""What every transfer of experts promises, against the bytes in the files.

A transfer that is added gets a row in `TRANSFERS`.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from whole import LIMIT_S, no_more_threads

from lowtide.core import MoEShape
from lowtide.errors import StorageError, UnsupportedError
from lowtide.experts.layout import SlotLayout
from lowtide.experts.slots import ExpertSlots
from lowtide.experts.transfer import DiskTransfer, Transfer, largest_read_bytes
from lowtide.files.regular_file import RegularFile
from lowtide.formats import formats
from lowtide.formats.plain import ITEM_BYTES
from lowtide.kernels.cpu.library import load_kernels
from lowtide.memory.arena import Arena
from lowtide.reading.file_reader import FileReader
from lowtide.schemas.weights import ExpertTable, StoredLayer

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 2, 3, 4
SHAPE = MoEShape(NUM_LAYERS, NUM_EXPERTS, 1, hidden_size=24, expert_size=10)
NUM_ELEMENTS = 240  # of each of an expert's three matrices
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
GAPS = [(0, 0), (3, 4096), (5000, 1)]
"""Bytes before an expert's gate and before its up projection, which lie behind its down."""


def python(reader: FileReader, table: ExpertTable, slots: ExpertSlots) -> Transfer:
    return DiskTransfer(reader, table, slots)


def compiled(reader: FileReader, table: ExpertTable, slots: ExpertSlots) -> Transfer:
    """Where slots keep what is stored; else Python's, too."""
    try:
        return DiskTransfer(reader, table, slots, library=load_kernels())
    except UnsupportedError as error:
        pytest.skip(str(error))


TRANSFERS: Mapping[str, Callable[[FileReader, ExpertTable, ExpertSlots], Transfer]] = {
    "python": python,
    "compiled": compiled,
}


class Stored(NamedTuple):
    """A file for each layer, and what is in it."""

    paths: list[Path]
    table: ExpertTable
    weights: dict[tuple[int, int, int], Tensor]  # by layer, expert and matrix


def store(folder: Path, dtype: str, gaps: tuple[int, int]) -> Stored:
    """At unaligned places, with the last expert at the end of its file."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(10, 24), (10, 24), (24, 10)]
    offsets = np.zeros((NUM_LAYERS, NUM_EXPERTS, 3), np.int64)
    weights, paths = {}, []
    for layer in range(NUM_LAYERS):
        content = bytearray(b"\xff" * (13 + layer))
        for expert in range(NUM_EXPERTS):
            for matrix, gap in ((2, 0), (0, gaps[0]), (1, gaps[1])):
                weight = torch.randn(shapes[matrix], generator=generator).to(TORCH[dtype])
                content += b"\xff" * gap
                offsets[layer, expert, matrix] = len(content)
                content += weight.view(torch.uint8).numpy().tobytes()
                weights[layer, expert, matrix] = weight
        paths.append(folder / f"layer-{layer}.bin")
        paths[-1].write_bytes(content)
    files = np.broadcast_to(np.arange(NUM_LAYERS)[:, None, None], offsets.shape).copy()
    layer_of = StoredLayer((formats()[dtype],) * 3, (NUM_ELEMENTS * ITEM_BYTES[dtype],) * 3)
    return Stored(paths, ExpertTable((layer_of,) * NUM_LAYERS, files, offsets), weights)


class Opened(NamedTuple):
    transfer: Transfer
    slots: ExpertSlots

    def has(self, slot: int, stored: Stored, layer: int, expert: int) -> bool:
        """Whether a slot holds an expert, in the slots' type."""
        found = self.slots.weights(layer, slot)
        wanted = [stored.weights[layer, expert, matrix] for matrix in range(3)]
        pairs = zip(found[:3], wanted, strict=True)
        return all(torch.equal(part, weight.to(part.dtype)) for part, weight in pairs)


@contextmanager
def opened(name: str, stored: Stored, slot_dtype: str) -> Iterator[Opened]:
    layout = SlotLayout.of(SHAPE, TORCH[slot_dtype])
    slots = ExpertSlots(Arena(NUM_SLOTS * layout.num_bytes), layout)
    with warnings.catch_warnings(), no_more_threads():
        warnings.simplefilter("ignore")  # of a file system without direct reads
        files = [RegularFile.at(path) for path in stored.paths]
        with closing(FileReader(files, largest_read_bytes(stored.table))) as reader:
            with closing(TRANSFERS[name](reader, stored.table, slots)) as transfer:
                yield Opened(transfer, slots)


every_transfer = pytest.mark.parametrize("name", TRANSFERS)


@every_transfer
@pytest.mark.parametrize("stored_dtype", ITEM_BYTES)
@pytest.mark.parametrize("slot_dtype", ITEM_BYTES)
@pytest.mark.parametrize("gaps", GAPS)
def test_experts_arrive_in_their_slots_whatever_the_order(
    name: str, stored_dtype: str, slot_dtype: str, gaps: tuple[int, int], tmp_path: Path
) -> None:
    """All slots are filled at once, then each with another expert."""
    stored = store(tmp_path, stored_dtype, gaps)
    least_bytes = 3 * NUM_ELEMENTS * ITEM_BYTES[stored_dtype]
    experts = [(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]
    with opened(name, stored, slot_dtype) as own:
        for seed in range(3):
            chosen = random.Random(seed).sample(experts, NUM_SLOTS)
            tickets = [own.transfer.start(*each, slot) for slot, each in enumerate(chosen)]
            assert all(ticket.result(LIMIT_S) >= least_bytes for ticket in tickets)
            assert all(own.has(slot, stored, *each) for slot, each in enumerate(chosen))


@every_transfer
def test_nothing_is_filled_after_a_drain(name: str, tmp_path: Path) -> None:
    """A read that has not begun may be given up, which its ticket says."""
    stored = store(tmp_path, "F32", (3, 4096))
    with opened(name, stored, "F32") as own:
        tickets = [own.transfer.start(1, expert, expert) for expert in range(NUM_EXPERTS)]
        own.transfer.drain()
        assert all(ticket.done() for ticket in tickets)
        for expert, ticket in enumerate(tickets):
            try:
                ticket.result(0)
            except StorageError as error:
                assert "was given up" in str(error)
                assert own.transfer.start(1, expert, expert).result(LIMIT_S)  # it can be read again
            assert own.has(expert, stored, 1, expert)


@every_transfer
def test_what_cannot_be_read_fails_alone_and_is_named(name: str, tmp_path: Path) -> None:
    stored = store(tmp_path, "F16", (5000, 1))
    with opened(name, stored, "F16") as own:
        os.truncate(stored.paths[1], 100)
        tickets = [own.transfer.start(layer, layer, layer) for layer in range(NUM_LAYERS)]
        assert tickets[0].result(LIMIT_S) and own.has(0, stored, 0, 0)
        with pytest.raises(StorageError, match="layer-1.bin .*it was truncated"):
            tickets[1].result(LIMIT_S)
        assert own.transfer.start(0, 2, 1).result(LIMIT_S)  # the slot can be filled again
        assert own.has(1, stored, 0, 2)


@every_transfer
def test_a_transfer_says_what_it_reads(name: str, tmp_path: Path) -> None:
    stored = store(tmp_path, "F32", (0, 0))
    with opened(name, stored, "F32") as own:
        told = own.transfer.describe(1, 2)
    assert "expert 2 of MoE layer 1" in told and str(stored.paths[1]) in told
