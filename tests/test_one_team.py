"""One team of threads at a time: compiled work leaves torch's compute threads idle."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from inside import engine_of
from whole import wait_until

from lowtide import LLM, SamplingParams
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.threads.executor import HostExecutor

OPTIONS: dict[str, Any] = {"device": "cpu", "context": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("one-team") / "model")


def open_half(folder: Path, policy: str) -> LLM:
    plan = plan_model(folder, **OPTIONS)
    half = (plan.minimum_bytes + plan.full_bytes) // 2
    return compiled(LLM(folder, host_memory=half, policy=policy, **OPTIONS))


def compiled(llm: LLM) -> LLM:
    if not llm.kernels.startswith("compiled"):
        llm.close()
        pytest.skip("no compiled kernels here")
    return llm


def num_wakings() -> int:
    """How often compute threads have gone back to sleep, once all sleep."""
    wait_until(lambda: all(said["State"].startswith("S") for said in compute_threads()))
    return sum(int(said["voluntary_ctxt_switches"]) for said in compute_threads())


def compute_threads() -> list[dict[str, str]]:
    """What the system says of each."""
    threads = [each for each in threading.enumerate() if each.name.startswith("lowtide-compute")]
    said = [Path(f"/proc/self/task/{each.native_id}/status").read_text() for each in threads]
    assert said
    return [dict(line.split(":\t", 1) for line in each.splitlines()) for each in said]


@pytest.mark.parametrize("policy", ["lru", "lowtide"])
def test_a_compiled_pass_wakes_none_of_torch_s_threads(folder: Path, policy: str) -> None:
    with open_half(folder, policy) as llm:
        before = num_wakings()
        # A prompt of one token: each pass is one row.
        [found] = llm.generate([[5]], SamplingParams(max_tokens=12, ignore_eos=True))
        assert len(found.token_ids) == 12 and llm.stats()["num_misses"] > 0
        assert num_wakings() == before
        llm.generate([[3 + i * i % 60 for i in range(96)]], SamplingParams(max_tokens=1))
        assert num_wakings() > before, "long passes are theirs"


def test_experts_of_few_rows_are_computed_before_or_after_torch_s_and_never_beside_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt: those of few rows are one compiled call, the others torch's products."""
    executors: list[HostExpertExecutor] = []
    num_handed: list[int] = []
    run, submit = BatchedExperts.run, HostExecutor.submit

    def watched(self: BatchedExperts, *arguments: Any) -> None:
        assert not executors[0].is_busy(), "torch's threads are at work"
        run(self, *arguments)
        num_handed.append(0)

    def counted(self: HostExecutor, work: Any) -> Any:
        num_handed.append(1)
        return submit(self, work)

    # Everything is resident: an expert that waits for a slot has all go one by one.
    with compiled(LLM(folder, cache="off", **OPTIONS)) as llm:
        executor = engine_of(llm).experts.executor
        assert isinstance(executor, HostExpertExecutor)
        executors.append(executor)
        monkeypatch.setattr(BatchedExperts, "run", watched)
        monkeypatch.setattr(HostExecutor, "submit", counted)
        for num_tokens in (48, 96, 144, 192):
            prompt = [3 + i * i % 60 for i in range(num_tokens)]
            llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    assert 0 in num_handed and 1 in num_handed, "some of each"
