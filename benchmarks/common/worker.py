"""Measurements that need a process of their own: `python -m common.worker TASK JSON`.

Prints one JSON object on standard output. Started by `in_process` and `measure_lowtide` only.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.ceilings import Disk
from common.memory import MemoryLimit, drop_pages, peak_resident_bytes, storage_read_bytes
from common.run import decode, engine_decoder, loaded_engine, make_request
from lowtide.engine.opening.config import EngineConfig
from lowtide.errors import InternalError
from lowtide.plan import OWN_FORMAT

Settings = Mapping[str, Any]

LIMIT_SLACK_BYTES = 1 << 30
"""Room of a memory limit above the budget: for the process itself and some page cache."""


def in_process(
    task: str,
    settings: Settings,
    limit: MemoryLimit,
    limit_bytes: int,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `task` in a fresh process under `limit` and return its answer.

    variables: of the process's environment, beside those of this one.

    Raises InternalError when the process fails; its own message is on standard error.
    """
    command = [sys.executable, "-m", "common.worker", task, json.dumps(dict(settings))]
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= variables or {}
    with limit.limited(command, limit_bytes) as limited:
        done = subprocess.run(limited, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise InternalError(f"Task {task} ended with status {done.returncode} (see above).")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure_lowtide(settings: Settings, limit: MemoryLimit, disk: Disk) -> dict[str, Any]:
    """`run_lowtide` in a process of its own, the read ceiling measured just before and after.

    Adds that ceiling, and whether the process stayed inside budget and overhead.
    """
    before = disk.measure()
    run = in_process("lowtide", settings, limit, settings["budget_bytes"] + LIMIT_SLACK_BYTES)
    after = disk.measure()
    allowed_bytes = run["budget_bytes"] + run["overhead_bytes"]
    return {
        **run,
        "random_read_before_GBps": before["random_read_GBps"],
        "random_read_after_GBps": after["random_read_GBps"],
        "allowed_bytes": allowed_bytes,
        "is_within_budget": run["peak_resident_bytes"] <= allowed_bytes,
    }


def run_lowtide(settings: Settings) -> dict[str, Any]:
    """Loads a model under a budget and answers `repeats` prompts, after a warm-up of one block."""
    options = EngineConfig(
        host_memory=settings["budget_bytes"],
        context=settings["context"],
        policy=settings["policy"],
        policy_options=settings["policy_options"],
        activations=settings.get("activations", OWN_FORMAT),
    )
    drop_pages([Path(settings["model"])])
    start_s = time.perf_counter()
    with loaded_engine(settings["model"], options) as engine:
        load_s = time.perf_counter() - start_s
        config, plan, experts = engine.model.config, engine.plan, engine.experts
        decoder = engine_decoder(engine)
        with engine.executor.in_charge():
            # One block first: residents settle, memory has been touched.
            warm_up = make_request(
                config, settings["num_prompt"], config.decoding.block_length, seed=1
            )
            warm = decode(decoder, warm_up)
            before = experts.as_dict()
            lengths = (settings["num_prompt"], settings["num_new"])
            answers = [
                decode(decoder, make_request(config, *lengths, seed=2 + turn))
                for turn in range(settings["repeats"])
            ]
        after = experts.as_dict()
    spent = {name: after[name] - before[name] for name in after}
    num_uses = spent["num_hits"] + spent["num_misses"]
    speeds = [one.tokens_per_s for one in answers]
    num_tokens, num_forwards = (
        sum(getattr(one, name) for one in answers) for name in ("num_tokens", "num_forwards")
    )
    return {
        "load_s": load_s,
        "is_direct": engine.reader.is_direct,
        "warm_up_tokens_per_s": warm.tokens_per_s,
        "tokens_per_s": statistics.median(speeds),
        "each_tokens_per_s": speeds,
        "num_tokens": num_tokens,
        "num_forwards": num_forwards,
        "s_per_forward": sum(one.seconds for one in answers) / num_forwards,
        "hit_rate": spent["num_hits"] / max(1, num_uses),
        "misses_per_forward": spent["num_misses"] / num_forwards,
        "read_bytes": spent["read_bytes"],
        "wait_s": spent["wait_s"],
        "policy_in_force": plan.policy,
        "resident_share": sum(plan.residents_per_layer) / plan.num_experts,
        "num_slots": plan.host.num_slots,
        "budget_bytes": plan.budget_bytes,
        "used_bytes": plan.host.used_bytes,
        "overhead_bytes": plan.overhead_bytes,
        "peak_resident_bytes": peak_resident_bytes(),
        "storage_read_bytes": storage_read_bytes(),
    }


def run_peer(settings: Settings) -> dict[str, Any]:
    """The peer's first pass over the same prompt, by turns."""
    from common.peer import measure  # imports transformers

    return measure(settings)


def run_causal(settings: Settings) -> dict[str, Any]:
    """One autoregressive lane under a budget."""
    from common.causal import measure

    return measure(settings)


def run_moving(settings: Settings) -> dict[str, Any]:
    """A trace of requests, memory moving or not."""
    from common.moving_trace import run_trace

    return run_trace(settings)


def run_masked_step(settings: Settings) -> dict[str, Any]:
    """One planned denoising step of a bidirectional model."""
    from common.masked_memory import measure

    return measure(settings)


def run_side_steps(settings: Settings) -> dict[str, Any]:
    """Such steps of several lengths, by another side."""
    from common.masked_memory import measure_side

    return measure_side(settings)


def run_masked_trace(settings: Settings) -> dict[str, Any]:
    """Trace the allocations of one such step."""
    from common.masked_trace import measure

    return measure(settings)


def run_every_expert(settings: Settings) -> dict[str, Any]:
    """Steps that ask for all experts."""
    from common.every_expert import measure

    return measure(settings)


TASKS: Mapping[str, Callable[[Settings], dict[str, Any]]] = {
    "lowtide": run_lowtide,
    "peer": run_peer,
    "causal": run_causal,
    "moving_memory": run_moving,
    "masked step": run_masked_step,
    "side steps": run_side_steps,
    "masked trace": run_masked_trace,
    "every expert": run_every_expert,
}


if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](json.loads(sys.argv[2]))))
