"""The workspace, and that a registrar counts exactly what it will take."""

from __future__ import annotations

import pytest
import torch
from computing import peak_bytes
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import ALIGNMENT
from lowtide.errors import InternalError
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Buffers, Registrar, Workspace, tiles

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]

takes = st.tuples(st.just("take"), st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES))
libraries = st.tuples(st.just("library"), st.integers(0, 5000))
programs = st.recursive(
    st.lists(st.one_of(takes, libraries), max_size=4),
    lambda inner: st.lists(
        st.one_of(takes, libraries, st.tuples(st.just("scope"), inner)), max_size=5
    ),
    max_leaves=25,
)


def run(program: list, buffers: Buffers, alive: list) -> None:
    """A made-up forward pass. Every tensor taken is filled and must stay as it was filled."""
    for kind, *arguments in program:
        if kind == "take":
            shape, dtype = arguments
            tensor = buffers.take("t", tuple(shape), dtype)
            assert tuple(tensor.shape) == tuple(shape)
            assert tensor.dtype == dtype
            tensor.fill_(len(alive) % 100)
            alive.append((tensor, len(alive) % 100))
        elif kind == "library":
            buffers.library("l", *arguments)
        else:
            depth = len(alive)
            [inner] = arguments
            with buffers.scope():
                run(inner, buffers, alive)
                for tensor, value in alive:
                    assert tensor.is_meta or bool((tensor == value).all())
            del alive[depth:]


class Watched(Workspace):
    """Remembers how far it was filled."""

    highest = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().take(name, shape, dtype)
        self.highest = max(self.highest, self.state.top)
        return tensor

    def take_all(self, *wanted: tuple[str, tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [self.take(*each) for each in wanted]


@given(programs)
def test_the_registrar_counts_exactly_what_the_workspace_takes(program: list) -> None:
    registrar = Registrar()
    run(program, registrar, [])
    workspace = Watched(Arena(registrar.arena_bytes).bytes)
    run(program, workspace, [])
    assert workspace.highest == registrar.arena_bytes
    assert workspace.state.top == registrar.state.top


def test_buffers_are_aligned_and_inside_a_scope_only() -> None:
    workspace = Workspace(Arena(4096).bytes)
    first = workspace.take("first", (3,), torch.uint8)
    with workspace.scope():
        second = workspace.take("second", (5, 7), torch.float32)
        assert second.data_ptr() == first.data_ptr() + ALIGNMENT
        assert second.data_ptr() % ALIGNMENT == 0
    third = workspace.take("third", (1,), torch.float32)
    assert third.data_ptr() == second.data_ptr()


def test_an_overflow_names_the_buffer_and_the_numbers() -> None:
    workspace = Workspace(torch.zeros(128, dtype=torch.uint8))
    workspace.take("fits", (16,), torch.float32)
    with pytest.raises(InternalError, match=r"logits \[3, 11\] ends at 196 .* planned 128"):
        workspace.take("logits", (3, 11), torch.float32)
    workspace.take("fits too", (16,), torch.float32)


@pytest.mark.parametrize("make", [Registrar, lambda: Workspace(Arena(4096).bytes)])
def test_marks_and_scopes_give_back_even_after_a_failure(make) -> None:
    buffers = make()
    buffers.take("kept", (10,), torch.float32)
    mark = buffers.state
    top = buffers.state.top
    with pytest.raises(KeyError), buffers.scope():
        buffers.take("lost", (10,), torch.float32)
        buffers.library("lost", 100)
        raise KeyError
    assert buffers.state == mark
    buffers.take("lost", (10,), torch.float32)
    buffers.state = mark
    assert buffers.state.top == top
    buffers.reset()
    assert buffers.state.top == 0


def test_several_buffers_are_taken_as_one_after_the_other() -> None:
    together, single = Workspace(Arena(4096).bytes), Workspace(Arena(4096).bytes)
    wanted = [("a", (3, 5), torch.float32), ("b", (7,), torch.int64), ("a", (2,), torch.uint8)]
    for _ in range(2):  # found again, the second time
        found = together.take_all(*wanted)
        for one, other in zip(found, [single.take(*each) for each in wanted], strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
        places = [[each.place for each in own.state.alive] for own in (together, single)]
        assert places[0] == places[1] and together.state.path == single.state.path
        together.reset()
        single.reset()


def test_the_peak_names_what_was_alive() -> None:
    registrar = Registrar()
    registrar.take("hidden", (16,), torch.float32)
    with registrar.scope():
        registrar.take("query", (32,), torch.float32)
        registrar.library("attention", 1000)
    with registrar.scope():
        registrar.take("mlp", (64,), torch.float32)
    graph = registrar.graph
    assert graph.needed_parts == (("hidden", 64), ("mlp", 256), ("attention", 1000))
    assert registrar.arena_bytes == graph.least_bytes == 64 + 256
    assert peak_bytes(graph) == 64 + 128 + 1000


@given(st.integers(0, 500), st.integers(1, 8).map(lambda n: 16 * n))
def test_tiles_cover_all_rows_and_are_safe_for_bits(num_rows: int, tile_rows: int) -> None:
    covered = list(tiles(num_rows, tile_rows))
    assert [row for tile in covered for row in range(tile.start, tile.stop)] == list(
        range(num_rows)
    )
    for tile in covered[:-1]:
        assert tile.stop - tile.start == tile_rows
    for tile in covered:
        assert tile.stop - tile.start <= tile_rows + 15
        assert tile.start % 16 == 0
    if len(covered) > 1:
        assert covered[-1].stop - covered[-1].start >= 16
