"""The other sides of the benchmarks of long contexts, and the computing of their figures.

No speed is judged here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from common import allocation_trace, cuda_allocator, growth, masked_shapes, masked_sides, official
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_planned_benchmarks import tiny as tiny  # a fixture

from lowtide import LLM
from lowtide.errors import UsageError
from lowtide.families import read_config_in

MIB = 1 << 20
FAMILIES = ("llada", "llada_moe", "dream")


def _in_float32(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in official.read_weights(folder).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_sides_are_the_same_function(
    family: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is traced is compared; code made of the trace is torch's own matter, and takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    folder = tiny(family)
    config, weights = read_config_in(folder, {"torch_dtype": "float32"}), _in_float32(folder)
    token_ids = masked_sides.canvas(config, 40, 20)
    with torch.inference_mode():
        sides = masked_sides.open_sides(config, weights, ["ported", "transformers", "compiled"])
        answers = {name: side.step(token_ids) for name, side in sides.items()}
    with LLM(folder, dtype="float32", context=64) as llm:
        wanted = torch.softmax(llm.logits(token_ids.tolist()), dim=-1)
    probability, best = wanted.max(dim=-1)
    for own_best, own_probability in answers.values():
        assert torch.equal(own_best, best)
        torch.testing.assert_close(own_probability, probability, rtol=1e-3, atol=1e-4)


def test_sequences_of_a_flat_batch_do_not_see_each_other(tiny: Callable[[str], Path]) -> None:
    folder = tiny("dream")
    model = official.Official(read_config_in(folder), _in_float32(folder))
    ids = torch.arange(30)
    with torch.inference_mode():
        both = model(ids, [12, 18])
        torch.testing.assert_close(both[:12], model(ids[:12], [12]))
        torch.testing.assert_close(both[12:], model(ids[12:], [18]))


def test_growth_is_a_line_whose_distance_is_told() -> None:
    line = growth.Growth.through({n: 1000 + 7 * n for n in (100, 200, 400)})
    assert line.residual < 1e-9 and line.at(1000) == pytest.approx(8000)
    assert line.longest(8000.5) == 1000 and line.longest(500) == 0
    bent = growth.Growth.through({100: 100, 200: 200, 400: 500})
    assert bent.residual > 0.01
    with pytest.raises(UsageError, match="3 lengths"):
        growth.Growth.through({1: 1, 2: 2})
    with pytest.raises(UsageError, match="shrinks"):
        growth.Growth.through({1: 9, 2: 8, 3: 7}).longest(10)


def test_depth_is_continued_from_two_models() -> None:
    assert growth.at_full_depth({2: 10.0, 4: 14.0}, 32) == pytest.approx(70.0)


def test_weights_of_the_published_models() -> None:
    shapes = masked_shapes.masked_shapes(["LLaDA-8B", "Dream-7B", "LLaDA-MoE"])
    assert [shape.num_layers for shape in shapes] == [32, 28, 16]
    billions = [shape.weight_bytes / 2e9 for shape in shapes]
    assert billions == pytest.approx([8.016, 7.616, 7.357], abs=1e-3)
    assert shapes[0].cut_bytes(4) - shapes[0].cut_bytes(2) == pytest.approx(2 * 2 * 218e6, rel=0.01)


def test_what_an_allocator_is_asked_for_and_what_is_alive() -> None:
    def work() -> torch.Tensor:
        first = torch.ones(1000, 500)
        second = first + 1
        del first
        return second * 2

    traced = allocation_trace.trace(work)
    sizes = [change.num_bytes for change in traced.changes if change.num_bytes >= 2_000_000]
    assert sizes == [2_000_000] * 3
    use = allocation_trace.use_of(traced.moments)
    assert use.peak_bytes == pytest.approx(4_000_000, rel=0.01)
    assert traced.moments[-1].live_bytes == 0 and use.average_bytes <= use.peak_bytes


def test_small_requests_share_a_segment_and_large_ones_have_their_own() -> None:
    allocator = cuda_allocator.CachingAllocator()
    blocks = [allocator.allocate(num_bytes) for num_bytes in (1, 512, 513)]
    assert [block.num_bytes for block in blocks] == [512, 512, 1024]
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(MIB + 1)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(11 * MIB)  # of the 20 MiB segment's rest
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(11 * MIB + 1)
    assert allocator.reserved_bytes == 34 * MIB and allocator.num_segments == 3


def test_a_rest_is_split_off_where_it_is_worth_it_and_the_best_fit_is_taken() -> None:
    allocator = cuda_allocator.CachingAllocator()
    block = allocator.allocate(11 * MIB + MIB // 2)  # of 12 MiB, half of one is not split off
    assert block.num_bytes == 12 * MIB
    allocator.free(block)
    assert allocator.allocate(10 * MIB).num_bytes == 10 * MIB
    allocator = cuda_allocator.CachingAllocator()
    first, _, third = (allocator.allocate(4 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)  # joins the rest of 8 MiB of the segment
    assert allocator.allocate(2 * MIB).address == first.address


def test_segments_are_given_back_only_where_there_is_no_more() -> None:
    changes = [("a", 12), ("a", -12), ("b", 20), ("b", -20)]
    trace = [cuda_allocator.Change(key, size * MIB) for key, size in changes]
    assert cuda_allocator.replay(trace).reserved_bytes == 32 * MIB
    peaks = cuda_allocator.replay(trace, 30 * MIB)
    assert peaks == (20 * MIB, 20 * MIB, 20 * MIB) and peaks.inflation == 0
    with pytest.raises(cuda_allocator.OutOfMemory):
        cuda_allocator.replay(trace, 19 * MIB)


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40 * MIB)), max_size=60))
def test_blocks_in_use_never_overlap_and_all_bytes_return(
    requests: list[tuple[int, int]],
) -> None:
    allocator = cuda_allocator.CachingAllocator()
    held: dict[int, object] = {}
    for key, num_bytes in requests:
        if key in held:
            allocator.free(held.pop(key))
            continue
        block = held[key] = allocator.allocate(num_bytes)
        assert num_bytes <= block.num_bytes
        spans = sorted((each.address, each.address + each.num_bytes) for each in held.values())
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
        assert allocator.allocated_bytes == sum(stop - start for start, stop in spans)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for block in held.values():
        allocator.free(block)
    allocator.give_back()
    assert allocator.reserved_bytes == allocator.allocated_bytes == allocator.num_segments == 0
