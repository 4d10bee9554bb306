"""A loaded model and its parts."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.decode.stored_sequences import StoredSequences
from lowtide.engine.opening.facts import ModelFacts, RunOptions
from lowtide.engine.planning.planner import Planner
from lowtide.engine.running.home_memory import HomeMemory
from lowtide.engine.running.moving_memory import MovingMemory
from lowtide.engine.running.not_finite import FaultSearch
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.runtime import ExpertRuntime
from lowtide.hardware.model_speeds import SpeedKey
from lowtide.kernels.reference import Kernels
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.pass_plans import PassPlans
from lowtide.models.decoder import Decoder
from lowtide.plan import MemoryPlan
from lowtide.policies.trial import PolicyTrial
from lowtide.reading.file_reader import FileReader
from lowtide.threads.executor import HostExecutor


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and everything it runs on."""

    plan: MemoryPlan
    facts: ModelFacts
    options: RunOptions
    planner: Planner
    faults: FaultSearch
    kernels: Kernels  # the host's
    model: Decoder
    experts: ExpertRuntime | NoExperts
    kv_cache: KVCache
    reader: FileReader
    executor: HostExecutor
    pass_plans: PassPlans | None = None  # None: all passes have the plan of the largest
    moving: MovingMemory | None = None  # None: every expert has a slot, or they are a GPU's
    home: HomeMemory | None = None  # None: there is no device, or host memory holds every expert
    stored: StoredSequences | None = None  # None: kept sequences are in memory alone
    trial: PolicyTrial | None = None  # None: the policy stays
    speed_key: SpeedKey | None = None  # that its run is kept under; None: it is not kept

    def as_dict(self) -> dict[str, float]:
        """Return counters since loading, in counts, bytes and seconds.

        kv_cache_usage: the share of the KV cache used by running requests.
        """
        moved = {} if self.moving is None else self.moving.as_dict()
        moved |= {} if self.home is None else self.home.as_dict()
        usage = 1 - self.kv_cache.num_free_tokens / self.kv_cache.num_tokens
        return {**self.experts.as_dict(), **moved, "kv_cache_usage": usage}

    def release_memory(self) -> None:
        """Return memory between passes if the system runs short of it."""
        if self.home is not None:
            self.home.follow_free_memory()
        if self.moving is not None:
            self.moving.follow_free_memory()

    def rest(self) -> None:
        """Free the passes' memory while the engine is idle, unless experts can use it."""
        if self.pass_plans is not None:
            self.pass_plans.rest()

    def stop_waiting(self) -> None:
        """Make a pass that waits for reads fail soon. May be called on any thread."""
        self.experts.stop_waiting()
        if self.stored is not None:
            self.stored.stop_waiting()

    def close(self) -> None:
        """End all threads and close the checkpoint's files."""
        self.executor.close()
        self.experts.close()
        self.reader.close()
        if self.stored is not None:
            self.stored.close()
        for memory in (self.moving, self.home):
            if memory is not None:
                memory.close()
