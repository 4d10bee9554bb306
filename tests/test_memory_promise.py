"""A budget is a promise: what a process really holds, measured from outside it.

A checkpoint of some 400 MB is run in processes of their own. The greatest resident size that the
kernel saw, less the overhead that the plan names, must stay within the budget.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from programs import python

from lowtide.families import SynthSize, families
from lowtide.lab.budgets import home_of_share
from lowtide.llm import plan_model
from lowtide.model_writing.synth import write_checkpoint

MIN_CHECKPOINT_BYTES = 300 << 20
CONTEXT = 1024
LONG_CONTEXT = 32768
EOS = 8000
SLACK_BYTES = 8 << 20

# Wide enough that what libraries do (packed weights, attention tiles) would show.
SIZE = SynthSize(
    {
        **families()["llada2"].sizes()["small"].config,
        "hidden_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rotary_dim": 32,
        "intermediate_size": 1280,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 8192,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "mask_token_id": EOS + 3,
    },
    eos_token_id=EOS,
    max_shard_bytes=256 << 20,
)

CHILD = """
import json, re, sys
from pathlib import Path
from lowtide import DiffusionParams, SamplingParams
from lowtide.llm import LLM

folder, works, options = json.loads(sys.argv[1])
with LLM(folder, **options) as llm:
    plan = llm.plan
    for work in works:
        if work == "logits":
            llm.logits([i * 37 % 8000 for i in range(plan.context)])
        else:
            prompts = [[i * 31 % 8000 for i in range(n)] for n in work]
            # Every step of a block takes the same memory.
            params = SamplingParams(max_tokens=16)
            if not llm.config.decoding.writes_in_order:
                params = SamplingParams(max_tokens=16, diffusion=DiffusionParams(steps=4))
            llm.generate(prompts, params)
    status = Path("/proc/self/status").read_text()
    peak_bytes = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
    print(json.dumps({
        "peak_bytes": peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "overhead_bytes": plan.overhead_bytes,
        "used_bytes": plan.host.used_bytes,
        # The array that `logits` hands out is the caller's.
        "caller_bytes": 4 * plan.context * llm.config.vocab_size * ("logits" in works),
        "policy": plan.policy,
        "prompt_chunks": plan.prompt_chunks,
        "num_misses": llm.stats()["num_misses"],
    }))
"""

LENDS_NOTHING = """
from lowtide.engine.planning import plan as planning
planning.max_cache_tokens = lambda planner, plan: 0
"""

WATCHED = """
import json, mmap, random, sys
from lowtide import DiffusionParams, SamplingParams
from lowtide.engine.running import worker
from lowtide.hardware.memory import peak_resident_bytes, reset_peak, resident_bytes
from lowtide.llm import LLM

peaks, running, held, run_pass = [], [], [], worker.run_pass

def watch(engine, decoder):
    if peaks:  # what came behind the last pass is its own, too
        peaks[-1] = max(peaks[-1], peak_resident_bytes())
    reset_peak()
    events = run_pass(engine, decoder)
    peaks.append(peak_resident_bytes())
    running.append(len(decoder.running))
    if engine.moving is not None:
        held.append(engine.moving.held_bytes())
    return events

worker.run_pass = watch
"""
"""What comes first in the children whose every pass is watched."""

STEPS_CHILD = """
folder, has_huge_pages, options = json.loads(sys.argv[1])

class SmallPages(mmap.mmap):
    def madvise(self, advice, *span):
        if advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE):
            raise OSError(22, "Invalid argument")
        super().madvise(advice, *span)

if not has_huge_pages:
    mmap.mmap = SmallPages
draw = random.Random(0)
llm = LLM(folder, **options)
for _ in range(5):
    lengths = [draw.choice([5, 90, 400, 900]) for _ in range(draw.choice([1, 2, 6]))]
    prompts = [[i * 31 % 8000 for i in range(n)] for n in lengths]
    llm.generate(prompts, SamplingParams(max_tokens=16, diffusion=DiffusionParams(steps=4)))
before_bytes = resident_bytes()
plan = llm.plan
llm.close()
print(json.dumps({
    "allowed_bytes": plan.budget_bytes + plan.overhead_bytes,
    "planned_kv_bytes": plan.host.kv_cache_bytes,
    "peaks": peaks, "running": running, "held": held,
    "fallen_bytes": before_bytes - resident_bytes(),
}))
"""


NEIGHBOUR = """
import mmap, sys

held, page_bytes = [], mmap.PAGESIZE
for line in sys.stdin:
    wanted = int(line)
    while len(held) > wanted:
        held.pop().close()
    while len(held) < wanted:
        held.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        held[-1].write(b"n" * (1 << 20))
    with open("/proc/self/statm") as statm:
        resident, shared = map(int, statm.read().split()[1:3])
    print((resident - shared) * page_bytes, flush=True)
"""

BESIDE_CHILD = """
import json, random, subprocess, sys
from lowtide import DiffusionParams, SamplingParams
from lowtide.hardware import memory
from lowtide.hardware.memory import peak_resident_bytes, reset_peak, resident_bytes

folder, program, options = json.loads(sys.argv[1])
process = subprocess.Popen(
    [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)

def hold(num_mib):
    global neighbour_mib, neighbour_bytes
    neighbour_mib = num_mib
    print(num_mib, file=process.stdin, flush=True)
    neighbour_bytes = int(process.stdout.readline())

real, machine_bytes = memory.available_memory_bytes, None

def available():  # of a machine that has the two alone
    if machine_bytes is None:
        return real()
    return machine_bytes - resident_bytes() - neighbour_bytes

memory.available_memory_bytes = available
from lowtide.engine.running import moving_slots as module, worker
from lowtide.llm import LLM

module.LOOK_S = 0.0
spare_mib = module.SYSTEM_BYTES >> 20
draw, steps, run_pass, most_mib = random.Random(0), [], worker.run_pass, 0

def watch(engine, decoder):
    if most_mib:  # less between two passes than is left to others
        more = draw.randint(-spare_mib // 8, spare_mib // 2)
        hold(max(0, min(neighbour_mib + more, most_mib)))
    reset_peak()
    events, counts = run_pass(engine, decoder), engine.as_dict()
    num_live = counts["num_slots"] + counts.get("num_host_slots", 0)
    steps.append((peak_resident_bytes(), resident_bytes(), neighbour_bytes, num_live))
    return events

worker.run_pass = watch
hold(0)
llm = LLM(folder, **options)
plan = llm.plan
tiers = [tier for tier in (plan.host, plan.gpu) if tier is not None]
allowed_bytes = plan.overhead_bytes + sum(tier.budget_bytes for tier in tiers)
lendable_bytes = (plan.fast_tier.num_slots - plan.num_staging) * plan.fast_tier.slot_bytes
if plan.gpu is not None:
    lendable_bytes += sum(plan.host_residents_per_layer) * plan.host.slot_bytes

def ask(num_rounds):
    for _ in range(num_rounds):
        lengths = [draw.choice([5, 90, 400, 900]) for _ in range(draw.choice([1, 2, 6]))]
        prompts = [[i * 31 % 8000 for i in range(n)] for n in lengths]
        llm.generate(prompts, SamplingParams(max_tokens=16, diffusion=DiffusionParams(steps=4)))
    return len(steps)

alone = ask(2)
own_bytes = max(peak_bytes for peak_bytes, *_ in steps)
machine_bytes = own_bytes + (64 << 20) + 2 * module.SYSTEM_BYTES + neighbour_bytes
most_mib = (machine_bytes - module.SYSTEM_BYTES - own_bytes + lendable_bytes * 3 // 4) >> 20
beside = ask(4)
most_mib = 0
hold(0)
ask(2)
llm.close()
process.stdin.close()
process.wait()
print(json.dumps({
    "allowed_bytes": allowed_bytes,
    "machine_bytes": machine_bytes,
    "spare_bytes": module.SYSTEM_BYTES,
    "alone": steps[:alone], "beside": steps[alone:beside], "after": steps[beside:],
}))
"""


DELTA_NETS = {
    "num_hidden_layers": 4,
    "num_experts": 24,
    **{f"linear_num_{part}_heads": count for part, count in (("key", 8), ("value", 16))},
    **{f"linear_{part}_head_dim": 128 for part in ("key", "value")},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": DELTA_NETS,
    "qwen3_next": DELTA_NETS,
    "lfm2_moe": {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "conv", "full_attention"] + ["conv"] * 2,
    },
}
"""Families whose layers keep states, with what differs from their small size.

Heads of delta-nets are as published, half as many.
"""

TALKS_CHILD = """
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

folder, seed, options = json.loads(sys.argv[1])
draw, talks = random.Random(seed), []

def prompt():
    text = draw.choice(talks[-3:]) if talks and draw.random() < 0.7 else []
    text = text[: len(text) - draw.choice([0, 0, 0, 5, 60])]
    added = [draw.randrange(8000) for _ in range(draw.choice([3, 20, 40, 90, 300, 700]))]
    return (text + added)[-900:] if len(text) < 60 else (text + added)[:900]

def params():
    return SamplingParams(max_tokens=draw.randint(1, 12), ignore_eos=True)

def cancelled(llm, tokens, asked, num_events):
    with closing(llm.stream(tokens, asked)) as events:
        for number, _ in enumerate(events):
            if number == num_events:
                return

num_resumed = num_cancelled = 0
with LLM(folder, **options) as llm, ThreadPoolExecutor(1) as threads:
    while len(peaks) < 100:
        prompts = [prompt() for _ in range(draw.choice([1, 1, 1, 2, 8]))]
        other = None
        if draw.random() < 0.5:
            other = threads.submit(cancelled, llm, prompt(), params(), draw.randrange(4))
            num_cancelled += 1
        for tokens, answer in zip(prompts, llm.generate(prompts, params()), strict=True):
            num_resumed += answer.usage.cached_tokens > 0
            talks.append([*tokens, *answer.token_ids])
        if other is not None:
            other.result()
    plan = llm.plan
print(json.dumps({
    "allowed_bytes": plan.budget_bytes + plan.overhead_bytes,
    "state_bytes": plan.host.state_bytes,
    "peaks": peaks, "running": running, "held": held,
    "num_resumed": num_resumed, "num_cancelled": num_cancelled,
}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(SIZE, tmp_path_factory.mktemp("promise") / "model")
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert num_bytes >= MIN_CHECKPOINT_BYTES
    return folder


def measure(model: Path, works: list[Any], **options: object) -> dict[str, Any]:
    return run_child(CHILD, str(model), works, {"context": CONTEXT, **options})


def run_child(code: str, *arguments: object) -> dict[str, Any]:
    result = python("-c", code, json.dumps(arguments), timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def check_promise(measured: dict[str, Any]) -> None:
    assert measured["used_bytes"] <= measured["budget_bytes"]
    outside_bytes = measured["overhead_bytes"] + measured["caller_bytes"]
    inside_bytes = measured["peak_bytes"] - outside_bytes
    assert inside_bytes <= measured["budget_bytes"], (
        f"the process held {measured['peak_bytes']} bytes: {inside_bytes} above its overhead, "
        f"with a budget of {measured['budget_bytes']}"
    )


GENERATE_ONE = [[40]]
GENERATE_MANY = [[3, 700, 90, 150]]  # prompts of these lengths, as one batch
LOGITS = ["logits"]


@pytest.mark.parametrize(
    ("share", "policy", "works"),
    [
        (0.0, "tide", [*LOGITS, *GENERATE_MANY]),
        (0.5, "lru", [*GENERATE_ONE, *LOGITS, *GENERATE_MANY]),
        (1.0, "resident", [*GENERATE_MANY, *LOGITS]),
    ],
)
def test_the_process_stays_within_the_budget(
    model: Path, share: float, policy: str, works: list[Any]
) -> None:
    plan = plan_model(model, context=CONTEXT)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    measured = measure(model, works, host_memory=budget, policy=policy)
    assert measured["budget_bytes"] == budget
    assert (measured["num_misses"] == 0) == (share == 1.0), "the budget decides what streams"
    check_promise(measured)


def test_memory_that_is_lent_is_within_the_budget(model: Path) -> None:
    """A long context's memory holds experts, and keys and values when they come."""
    plan = plan_model(model, context=LONG_CONTEXT)
    assert plan.host.kv_cache_bytes > 10 * plan.host.slot_bytes
    works = [*GENERATE_MANY, *GENERATE_ONE]
    options: dict[str, Any] = {"context": LONG_CONTEXT, "host_memory": plan.minimum_bytes}
    kept, lent = (
        run_child(code, str(model), works, {"policy": "lru", **options})
        for code in (LENDS_NOTHING + CHILD, CHILD)
    )
    check_promise(lent)
    assert lent["num_misses"] < kept["num_misses"]
    # What was lent was there: the budget is used, not exceeded.
    assert lent["peak_bytes"] > kept["peak_bytes"] + plan.host.kv_cache_bytes // 4


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_every_step_is_within_the_budget_while_memory_moves(
    model: Path, has_huge_pages: bool
) -> None:
    """More sequences at once than the context has room for; and what was held is given back."""
    plan = plan_model(model, context=CONTEXT)
    host_memory = plan.minimum_bytes + (plan.full_bytes - plan.minimum_bytes) // 4
    options = {"context": CONTEXT, "host_memory": host_memory, "policy": "lru"}
    measured = run_child(WATCHED + STEPS_CHILD, str(model), has_huge_pages, options)
    assert max(measured["peaks"]) <= measured["allowed_bytes"]
    assert max(measured["running"]) > 1 and min(measured["running"]) <= 1
    cache = [parts["kv_cache"] for parts in measured["held"]]
    assert max(cache) > measured["planned_kv_bytes"] > min(cache)
    held = [sum(parts.values()) for parts in measured["held"]]
    assert max(held) <= host_memory
    assert measured["fallen_bytes"] >= 0.95 * held[-1] > 0.4 * max(held)


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulated", marks=pytest.mark.slow)])
def test_every_step_is_within_the_budget_and_the_machine_beside_a_neighbour(
    model: Path, device: str
) -> None:
    """Another program takes memory between passes, most of what experts have, and leaves."""
    options: dict[str, Any] = {"context": CONTEXT, "device": device}
    if device == "emulated":
        options["device_options"] = {"link_GBps": "1000", "host_slowdown": "1"}
    plan = plan_model(model, **options)
    budget = plan.minimum_bytes + (plan.full_bytes - plan.minimum_bytes) * 3 // 4
    if plan.gpu is None:
        options["host_memory"] = budget
    else:
        options |= {"host_memory": home_of_share(plan, 0.75), "gpu_memory": budget}
    options |= {"policy": "lru", "cache": "off"}
    measured = run_child(BESIDE_CHILD, str(model), NEIGHBOUR, options)
    alone, beside, after = (measured[name] for name in ("alone", "beside", "after"))
    for peak_bytes, *_ in (*alone, *beside, *after):
        assert peak_bytes <= measured["allowed_bytes"]
    for peak_bytes, rested_bytes, neighbour_bytes, _ in (*beside, *after):
        assert peak_bytes + neighbour_bytes <= measured["machine_bytes"]
        left_bytes = measured["machine_bytes"] - rested_bytes - neighbour_bytes
        assert left_bytes >= measured["spare_bytes"] - SLACK_BYTES
    num_slots = [[num_live for *_, num_live in steps] for steps in (alone, beside, after)]
    assert min(num_slots[1]) < max(num_slots[0]) // 2
    assert max(num_slots[2]) > 0.9 * max(num_slots[0])


def test_several_chunks_of_a_prompt_are_within_the_budget(tmp_path: Path) -> None:
    config = families()["qwen3_moe"].sizes()["small"].config
    config = {**config, "num_hidden_layers": 4, "num_experts": 64, "vocab_size": 8192}
    size = replace(SIZE, config={**config, "eos_token_id": EOS, "pad_token_id": EOS})
    folder = write_checkpoint(size, tmp_path / "model")
    plan = plan_model(folder, context=4 * CONTEXT)
    budget = (plan.minimum_bytes + plan.full_bytes) // 2
    measured = measure(folder, [[3 * CONTEXT]], host_memory=budget, context=4 * CONTEXT)
    assert measured["prompt_chunks"] > 1
    check_promise(measured)


@pytest.mark.parametrize(
    ("family", "share"),
    [
        ("qwen3_5_moe", 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("qwen3_5_moe", 1.0), ("qwen3_next", 0.4), ("lfm2_moe", 0.2))
        ),
    ],
)
def test_a_hundred_passes_of_a_hybrid_are_within_the_plan(
    family: str, share: float, tmp_path: Path
) -> None:
    """Batches, next turns, edited and cancelled ones as they are drawn; and nothing adds up."""
    size, rng = families()[family].sizes()["small"], Random(f"{family} {share}")
    config = {**size.config, **HYBRIDS[family], "vocab_size": 8192}
    config |= {"eos_token_id": EOS, "pad_token_id": EOS}
    folder = write_checkpoint(replace(size, config=config, eos_token_id=EOS), tmp_path / family)
    plan = plan_model(folder, context=2 * CONTEXT)
    share *= 1 if share == 1 else rng.uniform(0.8, 1.2)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    options = {"context": 2 * CONTEXT, "host_memory": budget}
    measured = run_child(WATCHED + TALKS_CHILD, str(folder), rng.randrange(100), options)
    peaks, held = measured["peaks"], [sum(parts.values()) for parts in measured["held"]]
    assert max(peaks) <= measured["allowed_bytes"] and max(held, default=0) <= budget
    half = len(peaks) // 2
    assert max(peaks[half:]) <= max(peaks[:half]) + 2 * SLACK_BYTES
    assert len(peaks) >= 100 and bool(held) == (share < 1) and measured["state_bytes"]
    assert max(measured["running"]) > 2
    assert measured["num_resumed"] and measured["num_cancelled"]


def test_in_float32_too(model: Path) -> None:
    """Converted while read, so that nothing holds the weights twice."""
    budget = plan_model(model, context=CONTEXT, dtype="float32").minimum_bytes
    check_promise(measure(model, LOGITS, host_memory=budget, dtype="float32"))
