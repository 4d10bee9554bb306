"""Models without experts: a pass has its plan's memory, and none is held between requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from inside import loop_of
from test_paged_arena import physical_bytes

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.families import SynthSize, families
from lowtide.llm import plan_model
from lowtide.memory.host_pages import HostPages
from lowtide.model_writing.synth import synth, write_checkpoint

SLACK_BYTES = 32 << 20
LONGEST = 2048

# Rows so wide between two narrow products that a pass takes much memory and little time.
WIDE = SynthSize(
    {
        **families()["llada"].sizes()["tiny"].config,
        "max_sequence_length": LONGEST,
        "d_model": 32,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "mlp_hidden_size": 16384,
    },
    eos_token_id=304,
    max_shard_bytes=64 << 20,
)

CHILD = """
import json, random, sys
from lowtide import DiffusionParams, SamplingParams
from lowtide.engine.running import worker
from lowtide.hardware.memory import peak_resident_bytes, reset_peak, resident_bytes
from lowtide.llm import LLM

folder, longest, num_lengths, num_passes, options = json.loads(sys.argv[1])
passes, run_pass = [], worker.run_pass

def watch(engine, decoder):
    reset_peak()
    events = run_pass(engine, decoder)
    plan = engine.pass_plans.current
    passes.append({
        "planned_bytes": plan.needed_bytes,
        "arena_bytes": plan.placement.arena_bytes,
        "held_bytes": resident_bytes(),
        "peak_bytes": peak_resident_bytes(),
    })
    return events

def ask(num_tokens):
    params = SamplingParams(
        max_tokens=16, ignore_eos=True, diffusion=DiffusionParams(steps=1, block_length=16)
    )
    [answer] = llm.generate([[i * 31 % 300 for i in range(num_tokens - 16)]], params)
    return list(answer.token_ids)

def held_between_requests():
    llm.stats()  # when what a pass has left is given back
    return resident_bytes()

llm = LLM(folder, context=longest, cache="off", **options)
started_bytes = held_between_requests()
draw = random.Random(0)
lengths = [longest, 40, *(draw.randrange(32, longest + 1) for _ in range(num_lengths))]
ids = [ask(num_tokens) for num_tokens in lengths]  # libraries keep something of every length
rested_bytes = held_between_requests()
worker.run_pass = watch
for _ in range(num_passes):
    ask(draw.choice(lengths))
ask(longest)
ask(40)
found = {
    "ids": ids,
    "started_bytes": started_bytes,
    "rested_bytes": rested_bytes,
    "passes": passes,
    "at_last_bytes": held_between_requests(),
}
llm.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(WIDE, tmp_path_factory.mktemp("wide") / "model")


def measure(model: Path, num_lengths: int, num_passes: int) -> dict[str, Any]:
    arguments = [str(model), LONGEST, num_lengths, num_passes, {}]
    command = [sys.executable, "-c", CHILD, json.dumps(arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_every_pass_holds_what_its_plan_says(wide: Path) -> None:
    """Of lengths at random; after the longest request's end a short one holds its own memory."""
    found = measure(wide, 20, 100)
    rested_bytes, passes = found["rested_bytes"], found["passes"]
    assert len(passes) == 102
    for one in passes:
        slack_bytes = max(SLACK_BYTES, one["planned_bytes"] // 100)
        assert abs(one["held_bytes"] - rested_bytes - one["arena_bytes"]) <= slack_bytes
        assert one["peak_bytes"] - rested_bytes <= one["planned_bytes"] + slack_bytes
    *_, longest, short = passes
    assert longest["arena_bytes"] - short["arena_bytes"] > 2 * SLACK_BYTES
    assert found["at_last_bytes"] <= rested_bytes + SLACK_BYTES


@pytest.mark.parametrize("kv_cache", [True, "prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_words_are_the_same_and_no_page_is_held_between_requests(
    family: str, kv_cache: bool | str, tmp_path: Path
) -> None:
    model = synth(family, "tiny", tmp_path / "model")
    options: dict[str, Any] = {"context": 1024, "kv_cache": kv_cache, "cache": "off"}
    prompts = [list(range(1, num_tokens)) for num_tokens in (300, 20)]
    diffusion = DiffusionParams(steps=4, block_length=16)
    params = SamplingParams(max_tokens=32, ignore_eos=True, seed=0, diffusion=diffusion)
    with pytest.MonkeyPatch.context() as patch, LLM(model, **options) as llm:
        patch.setattr(HostPages, "release", lambda pages, start, stop: None)
        expected = [llm.generate([each * 3], params)[0].token_ids for each in prompts]
        logits = llm.logits(prompts[0] * 2)
    with LLM(model, **options) as llm:
        assert not llm.plan.max_cache_tokens
        found = [llm.generate([each * 3], params)[0].token_ids for each in prompts]
        assert found == expected and llm.logits(prompts[0] * 2).equal(logits)
        engine = loop_of(llm).look(lambda engine: engine)
        assert physical_bytes(engine.pass_plans.room.arena) == 0
        assert kv_cache is True or engine.kv_cache.pages.committed_bytes == 0


def test_the_least_budget_holds_a_whole_context(wide: Path) -> None:
    least_bytes = plan_model(wide, context=1024).minimum_bytes
    with LLM(wide, context=1024, host_memory=least_bytes) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        assert len(llm.generate([list(range(300)) * 3], params)[0].token_ids) == 8
