"""Mosaic by its text: first fit and lazy chunking, in random cases.

The oracles are written from the paper: a place is searched byte group by byte group, and chunks
are added one by one to whatever is the peak.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from operator import le
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import scaled
from whole import planner_of

from lowtide.core import ALIGNMENT, align_up
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import PlanError
from lowtide.families import families
from lowtide.memory.chunking import OPERATOR_TILES, Counts, LogitNeeds, one_more
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.planner import Graph, Recording, first_fit
from lowtide.memory.template import bounds
from lowtide.memory.workspace import Registrar
from lowtide.model_writing.synth import synth
from lowtide.model_writing.synth_weights import tensors_of

NUM_CASES = 200


def draws() -> Iterator[np.random.Generator]:
    for seed in range(scaled(NUM_CASES)):
        yield np.random.default_rng(seed)


def random_graph(draw: np.random.Generator) -> Graph:
    """Of buffers that are taken and released in any order."""
    recording, alive = Recording(), list[tuple[tuple[str, ...], int]]()
    for number in range(int(draw.integers(2, 25))):
        while alive and draw.random() < 0.45:
            alive.pop(int(draw.integers(len(alive))))
        alive.append(((f"buffer {number}",), int(draw.integers(1, 900))))
        recording.note(alive, [])
    return recording.graph()


def test_each_buffer_gets_the_lowest_place_that_is_free_all_its_life() -> None:
    for draw in draws():
        graph = random_graph(draw)
        together = [set(moment.alive) for moment in graph.moments]
        groups: list[range] = []  # of `ALIGNMENT` bytes, of each buffer
        for i, transient in enumerate(graph.transients):
            num_groups = align_up(transient.num_bytes) // ALIGNMENT
            taken = {
                group
                for j, place in enumerate(groups)
                if any(i in alive and j in alive for alive in together)
                for group in place
            }
            start = next(
                start
                for start in range(10**6)
                if taken.isdisjoint(range(start, start + num_groups))
            )
            groups.append(range(start, start + num_groups))
        order = range(len(graph.transients))
        found = first_fit(graph, order)
        for transient, place in zip(graph.transients, groups, strict=True):
            assert found.places[transient.path].start == place.start * ALIGNMENT
        assert found.arena_bytes == max(place.stop for place in groups) * ALIGNMENT
        best = graph.placement.arena_bytes
        peak = max(graph.alive_bytes(moment) for moment in graph.moments)
        assert peak <= best <= found.arena_bytes, "more orders are tried, none worse"


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> PassPlanner:
    folder = synth("llada", "tiny", tmp_path_factory.mktemp("model") / "llada", seed=1)
    return planner_of(open_model(folder, EngineConfig(context=256))).plan_long_passes()


def one_by_one(planner: PassPlanner, counts: Counts, free_bytes: int) -> dict[str, int] | None:
    """Return the chunks of lazy chunking, None where the peak cannot be divided.

    All begin as one. While the plan exceeds what is free, the operator that is the peak gets the
    next number of chunks.
    """
    template = planner.template(counts)
    chunks = {op: 1 for op in OPERATOR_TILES if op not in planner.by_tile}
    limit_bytes = free_bytes - template.library_bytes(bounds(counts, chunks))
    while True:
        values = bounds(counts, chunks)
        peak_bytes, moment = template.peak(values)
        placed_bytes = template.at(values).placement.arena_bytes
        if max(peak_bytes, placed_bytes) <= limit_bytes:
            return chunks
        at_peak = [op for op in chunks if template.grows_with(moment, op)]
        divisible = [op for op in at_peak if one_more(counts, op, chunks)]
        if not divisible:
            return None
        chunks[divisible[0]] = one_more(counts, divisible[0], chunks) or 0


def test_chunks_are_added_where_the_peak_is(planner: PassPlanner) -> None:
    num_divided = 0
    for draw in draws():
        num_tokens = int(draw.integers(600, 6000))
        num_masked = int(draw.integers(1, num_tokens + 1))
        asked = (LogitNeeds(entropy=True),)
        counts = Counts(num_tokens, num_tokens, num_tokens, num_masked, asked)
        whole = bounds(counts, dict.fromkeys(OPERATOR_TILES, 1))
        least, most = planner.least_bytes(counts), planner.template(counts).at(whole).needed_bytes
        free_bytes = int(least + draw.uniform(-0.1, 1.1) * (most - least))
        wanted = one_by_one(planner, counts, free_bytes)
        if wanted is None:
            with pytest.raises(PlanError, match="are free"):
                planner.plan(counts, free_bytes)
            continue
        plan = planner.plan(counts, free_bytes)
        assert {op: plan.chunks[op] for op in wanted} == wanted, (counts, free_bytes)
        assert plan.needed_bytes <= free_bytes
        num_divided += max(wanted.values()) > 1
    assert num_divided > NUM_CASES // 10


def chunk_numbers(counts: Counts, operator: str) -> list[int]:
    """Return the numbers of chunks that an operator may have, in order."""
    numbers = [1]
    while more := one_more(counts, operator, {operator: numbers[-1]}):
        numbers.append(more)
    return numbers


def test_trying_all_numbers_of_chunks_finds_nothing_better(planner: PassPlanner) -> None:
    """The paper's Mosaic-BF: where any division fits one is found, and none with less chunks."""
    outcomes = set()
    for draw in islice(draws(), NUM_CASES // 5):
        num_tokens = int(draw.integers(600, 2000))
        num_masked = int(draw.integers(1, num_tokens + 1))
        counts = Counts(num_tokens, num_tokens, num_tokens, num_masked, (LogitNeeds(),))
        template, least_bytes = planner.template(counts), planner.least_bytes(counts)
        most_bytes = planner.whole_bytes(counts)
        free_bytes = int(least_bytes + draw.uniform(-0.3, 1.1) * (most_bytes - least_bytes))
        operators = [op for op in OPERATOR_TILES if op not in planner.by_tile]
        fitting = []
        for numbers in product(*(chunk_numbers(counts, op) for op in operators)):
            chunks = dict(zip(operators, numbers, strict=True))
            if template.at(bounds(counts, chunks)).needed_bytes <= free_bytes:
                fitting.append(numbers)
        outcomes.add(bool(fitting))
        if not fitting:
            with pytest.raises(PlanError, match="are free"):
                planner.plan(counts, free_bytes)
            continue
        plan = planner.plan(counts, free_bytes)
        found = tuple(plan.chunks[op] for op in operators)
        assert found in fitting
        better = [one for one in fitting if all(map(le, one, found)) and one != found]
        assert not better, (counts, free_bytes, found)
    assert outcomes == {True, False}


PUBLISHED = {"llada": ("n_layers", 32), "dream": ("num_hidden_layers", 28)}
"""Families of the paper's models: the key of their number of layers, and the published number."""


def headers_of(family: str, folder: Path) -> tuple[Path, int]:
    """Write a published model cut to two layers, weights left out, and return what fits beside.

    The bytes are those that 24 GB leave beside the weights of all layers.
    """
    size = families()[family].sizes()["full"]
    key, num_layers = PUBLISHED[family]
    whole = replace(size, config={**size.config, key: num_layers})
    cut = replace(size, config={**size.config, key: 2})
    header, stop = {}, 0
    for tensor in tensors_of(cut):
        start, stop = stop, stop + tensor.output.num_bytes
        about = {"dtype": tensor.output.dtype, "shape": list(tensor.output.shape)}
        header[tensor.output.name] = {**about, "data_offsets": [start, stop]}
    told = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        file.truncate(file.tell() + stop)
    (folder / "config.json").write_text(json.dumps(cut.config), encoding="utf-8")
    return folder, 24 * 10**9 - sum(tensor.output.num_bytes for tensor in tensors_of(whole))


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_head_that_gathers_as_it_multiplies_would_fit_no_longer_sequence(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's gather-GEMM spares a buffer of rows, which no plan has at its peak."""
    folder, free_bytes = headers_of(family, tmp_path)
    model = open_model(folder, EngineConfig(context=64, device="cpu"))
    take, spared = Registrar.take, 0

    def longest(is_divided: bool) -> int:
        planner = planner_of(model).plan_long_passes()

        def needed_bytes(num_tokens: int) -> int:
            asked = (LogitNeeds(),)
            counts = Counts(num_tokens, num_tokens, num_tokens, num_tokens // 2, asked)
            if is_divided:
                return planner.least_bytes(counts)
            values = bounds(counts, dict.fromkeys(OPERATOR_TILES, 1))
            return planner.template(counts).at(values).needed_bytes

        return bisect_right(range(1 << 22), free_bytes, lo=640, key=needed_bytes)

    def without_rows(
        self: Registrar, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        nonlocal spared
        if not name.startswith("head rows"):
            return take(self, name, shape, dtype)
        spared += 1
        return torch.empty(shape, dtype=dtype, device="meta")

    gathered = [longest(is_divided) for is_divided in (True, False)]
    monkeypatch.setattr(Registrar, "take", without_rows)
    as_loaded = [longest(is_divided) for is_divided in (True, False)]
    assert spared
    for before, after in zip(gathered, as_loaded, strict=True):
        assert before <= after < 1.01 * before
