"""Steps of a model whose every pass asks for all experts: what each reads and takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.memory import drop_pages, peak_resident_bytes
from common.moving_trace import Arrival, requests_of
from common.run import loaded_engine
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.running.decoding import make_decoder
from lowtide.engine.running.engine import Engine

NUM_WARM = 2
"""Steps before those that count: residents settle, memory has been touched."""


class _Step(NamedTuple):
    seconds: float
    read_bytes: int
    num_asked: int  # experts, over all layers
    num_absent: int  # of those


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run steps of one sequence at each length: a task of `common.worker`.

    settings: model, budget_bytes, context, policy (and its policy_options), lengths (tokens of one
    sequence), num_steps of each length.
    """
    options = EngineConfig(
        host_memory=settings["budget_bytes"],
        context=settings["context"],
        policy=settings["policy"],
        policy_options=settings.get("policy_options", {}),
    )
    drop_pages([Path(settings["model"])])
    with loaded_engine(settings["model"], options) as engine:
        plan = engine.plan
        with engine.executor.in_charge():
            steps = {
                str(length): _row(_steps(engine, length, settings["num_steps"]))
                for length in settings["lengths"]
            }
        return {
            "steps": steps,
            "num_experts": plan.num_experts,
            "num_residents": sum(plan.residents_per_layer),
            "policy_in_force": plan.policy,
            "peak_resident_bytes": peak_resident_bytes(),
            "allowed_bytes": plan.budget_bytes + plan.overhead_bytes,
        }


def _steps(engine: Engine, num_tokens: int, num_steps: int) -> list[_Step]:
    """Run steps of one sequence of `num_tokens` tokens, all of which are computed in every step."""
    num_new = num_steps + NUM_WARM
    arrival = Arrival(0, num_tokens - num_new, num_new, num_new)
    decoder = make_decoder(engine)
    [request] = requests_of(engine.model.config, [arrival])
    decoder.add(request)
    steps = []
    while decoder.has_work:
        before, start_s = _counts(engine), time.perf_counter()
        decoder.step()
        seconds = time.perf_counter() - start_s
        grown = [now - then for now, then in zip(_counts(engine), before, strict=True)]
        steps.append(_Step(seconds, *grown))
    return steps[NUM_WARM:]


def _counts(engine: Engine) -> tuple[int, ...]:
    stats = engine.experts.as_dict()
    num_absent = stats["num_misses"]
    num_asked = stats["num_hits"] + num_absent
    return int(stats["read_bytes"]), int(num_asked), int(num_absent)


def _row(steps: list[_Step]) -> dict[str, Any]:
    """Make a row of the fields of all steps, in order."""
    return {name: [getattr(step, name) for step in steps] for name in _Step._fields}
