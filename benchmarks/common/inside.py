"""Ways into a loaded model, for measurements of its parts.

Benchmarks take these, so that what `LLM` calls its parts is known in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lowtide import LLM
from lowtide.engine.running.engine import Engine
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.states import StateStore

T = TypeVar("T")


def engine_of(llm: LLM) -> Engine:
    """Return the present engine, which the model's thread changes: look at it between requests."""
    return llm._engine


def run_between_passes(llm: LLM, work: Callable[[Engine], T]) -> T:
    """Run `work` on the model's thread and return its result."""
    return llm._loop.run(work)


def states_of(cache: KVCache) -> StateStore | None:
    """Return the owner of the slots with sequences' states; None if the model has none."""
    return cache._states
