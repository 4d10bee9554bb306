"""Allocations of a piece of work through torch, with their times, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from common.cuda_allocator import Change


class Moment(NamedTuple):
    """Bytes that are alive from `start_s` to the next moment."""

    start_s: float
    live_bytes: int


class Trace(NamedTuple):
    """Allocations and frees in their order, and how many bytes were alive when."""

    changes: list[Change]
    moments: list[Moment]  # the first at the start with nothing, the last at the end


class Use(NamedTuple):
    """Live bytes over time."""

    peak_bytes: int
    byte_seconds: float
    seconds: float

    @property
    def average_bytes(self) -> float:
        return self.byte_seconds / self.seconds

    @property
    def peak_over_average(self) -> float:
        return self.peak_bytes / self.average_bytes


def trace(work: Callable[[], object]) -> Trace:
    """One run of `work`, which leaves nothing behind: its answer is dropped inside.

    What it frees that was there before is left out.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with torch.profiler.record_function(_MARK):
            work()
    results: Any = profiled.profiler
    events = list(_walk(results.kineto_results.experimental_event_tree()))
    [(start_ns, end_ns)] = [(e.start_time_ns, e.end_time_ns) for e in events if e.name == _MARK]
    changes, moments, held, live_bytes = [], [Moment(0.0, 0)], dict[int, int](), 0
    for event in sorted(_allocations(events), key=lambda event: event.start_time_ns):
        pointer, num_bytes = event.extra_fields.ptr, event.extra_fields.alloc_size
        if num_bytes > 0:
            held[pointer] = num_bytes
        elif held.pop(pointer, None) is None:
            continue
        live_bytes += num_bytes
        changes.append(Change(pointer, num_bytes))
        moments.append(Moment((event.start_time_ns - start_ns) / 1e9, live_bytes))
    moments.append(Moment((end_ns - start_ns) / 1e9, live_bytes))
    return Trace(changes, moments)


def use_of(moments: Sequence[Moment]) -> Use:
    """The last moment is the end."""
    byte_seconds = sum(
        now.live_bytes * (after.start_s - now.start_s)
        for now, after in zip(moments, moments[1:], strict=False)
    )
    peak_bytes = max(moment.live_bytes for moment in moments)
    return Use(peak_bytes, byte_seconds, moments[-1].start_s - moments[0].start_s)


_MARK = "traced work"


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    return (event for event in events if event.tag == _EventType.Allocation)
