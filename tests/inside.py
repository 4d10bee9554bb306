"""Ways into a loaded model, for tests that hold its passes, fail its parts or count what it holds.

Tests take these, so that what `LLM` calls its parts is known in one place.
"""

from __future__ import annotations

from lowtide import LLM, AsyncLLM
from lowtide.decode.intake import Intake
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.loop import EngineLoop
from lowtide.engine.running.worker import Worker
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.states import StateStore
from lowtide.memory.windows import Window


def loop_of(llm: LLM | AsyncLLM) -> EngineLoop:
    return llm._loop


def engine_of(llm: LLM | AsyncLLM) -> Engine:
    """The engine, which the loop's thread changes: settle first, or look by `EngineLoop.run`."""
    return llm._engine


def intake_of(llm: LLM | AsyncLLM) -> Intake:
    return llm._intake


def worker_of(llm: LLM | AsyncLLM) -> Worker:
    """The owner of the model's thread."""
    return llm._loop._worker


def states_of(cache: KVCache) -> StateStore:
    """The owner of the slots with sequences' states, of a cache that has any."""
    assert cache._states is not None
    return cache._states


def windows_of(cache: KVCache) -> list[list[Window]]:
    """The windows in each of a cache's stores, ascending by start."""
    return [list(store._taken) for store in cache._windows]
