"""A device beside the host: whatever runs where, the words and the bits stay the same."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_faults import failing_copies, failing_reads, failing_runs, host_work_spoiled
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from inside import engine_of, intake_of
from torch import Tensor
from whole import LIMIT_S, answers, no_more_threads, settle

from lowtide.cli.outlook import plan_line
from lowtide.core import IntArray, Step
from lowtide.decode.request import Request
from lowtide.errors import DeviceError, PlanError, StorageError, UnsupportedError, UsageError
from lowtide.experts import device_tier, host_tier
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.host_tier import HostTier
from lowtide.experts.rows import Routing
from lowtide.experts.runtime import ExpertRuntime
from lowtide.lab.calibrate import calibrate
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.params import DiffusionParams, SamplingParams
from lowtide.plan import plan_facts
from lowtide.policies.presets import fetches_all, options_of, preset_names
from lowtide.record import recorded
from lowtide.replay.trace import Trace

FAST = {"link_GBps": "1000", "link_latency_us": "0", "host_slowdown": "1"}
OPTIONS: dict[str, Any] = {"device": "emulated", "device_options": FAST, "context": 256}
FAMILIES = ("llada2", "qwen3_moe", "deepseek_v2")
PARAMS = SamplingParams(
    max_tokens=16, diffusion=DiffusionParams(block_length=8, steps=4, threshold=0.5)
)
AUTOREGRESSIVE = SamplingParams(max_tokens=16)


class Case:
    """A model, what it answers with everything resident on the CPU, and its plan on a device."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = synth(family, "tiny", folder, seed=5)
        self.params = PARAMS if family == "llada2" else AUTOREGRESSIVE
        self.plan = plan_model(self.folder, **OPTIONS)
        self.prompt = [7, 3, 120, 9, 44, 3, 3, 80]
        with LLM(self.folder, device="cpu", context=256) as llm:
            self.expected = self.answer(llm)

    def answer(self, llm: LLM) -> tuple[list[int], list[list[int]] | None, torch.Tensor]:
        [request] = intake_of(llm).requests([self.prompt], self.params)
        [finished], trajectories = answers(llm, [request])
        ids = list(finished.token_ids)
        return ids, trajectories.get(request.id), llm.logits([*self.prompt, *ids])

    def open(self, policy: str, gpu_share: float, home_share: float = 1.0, **options: Any) -> LLM:
        plan, host = self.plan, self.plan.host
        assert plan.gpu is not None
        gpu = plan.minimum_bytes + int(gpu_share * (plan.full_bytes - plan.minimum_bytes))
        least = host.used_bytes - (host.num_slots - 12) * host.slot_bytes
        home = least + int(home_share * (host.used_bytes - least))
        given = {**OPTIONS, "gpu_memory": gpu, "host_memory": home, **options}
        return LLM(self.folder, policy=policy, **given)

    def check(self, llm: LLM) -> None:
        ids, trajectory, logits = self.answer(llm)
        assert (ids, trajectory) == self.expected[:2]
        assert torch.equal(logits, self.expected[2])
        check_idle(llm)


def runtime_of(llm: LLM) -> ExpertRuntime:
    return engine_of(llm).experts


def tier_of(llm: LLM) -> DeviceTier:
    tier = runtime_of(llm).device
    assert tier is not None
    return tier


def check_idle(llm: LLM) -> None:
    """No slot is lost, shared or leased between passes."""
    settle(llm)
    link, ledger = tier_of(llm).link, tier_of(llm).link.ledger
    assert ledger.num_free + ledger.num_resident + link.num_coming == ledger.num_slots
    link.abandon()
    ledger.check_integrity()


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("hybrid") / "model")


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llada2", tmp_path_factory.mktemp("hybrid") / "model")


presets = st.sampled_from(sorted(set(preset_names()) - {"resident"}))
shares = st.one_of(st.sampled_from([0.0, 0.02, 1.0]), st.floats(0, 1))


@pytest.mark.invariant
@examples(12)
@given(policy=presets, gpu_share=shares, home_share=shares, prefetch=st.sampled_from([None, 0, 3]))
def test_no_preset_budget_or_prefetch_changes_a_bit(
    case: Case, policy: str, gpu_share: float, home_share: float, prefetch: int | None
) -> None:
    options = {"miss": "wait"} if policy == "buddymoe" else {}
    if prefetch is not None and "num_prefetch" in options_of(policy):
        options["num_prefetch"] = str(prefetch)
    try:
        llm = case.open(policy, gpu_share, home_share, policy_options=options)
    except PlanError as error:
        assert fetches_all(policy) and "1 expert slot" in str(error)
        return
    with llm:
        case.check(llm)
        case.check(llm)  # warm: what the policy has moved by now makes no difference either


def test_everything_resident_needs_nothing_of_the_host(diffusion: Case) -> None:
    with diffusion.open("resident", 1.0) as llm:
        diffusion.check(llm)
        stats = llm.stats()
    assert stats["hit_rate"] == 1.0
    assert stats["num_on_host"] == stats["num_fetched"] == 0


def test_hits_of_layers_that_are_whole_are_counted(
    diffusion: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are kept to be added up together."""
    monkeypatch.setattr(device_tier, "MAX_COUNTS", 5)
    num_hits = 0

    class Counter:
        def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, _: Tensor) -> None:
            nonlocal num_hits
            num_hits += len(routing.experts.unique())

    with diffusion.open("tide", 1.0) as llm, llm.observed(Counter()):
        for _ in range(2):
            diffusion.answer(llm)
            stats = llm.stats()
            assert stats["num_hits"] == num_hits and stats["num_misses"] == 0


def test_the_plan_has_both_tiers_and_says_emulated(diffusion: Case) -> None:
    with diffusion.open("lowtide", 0.5) as llm:
        plan = llm.plan
        assert plan.device == "emulated" and plan.gpu is not None
        assert plan.gpu.used_bytes <= plan.gpu.budget_bytes == plan.budget_bytes
        assert plan.host.used_bytes <= plan.host.budget_bytes
        assert plan.host.dense_bytes == 0 < plan.gpu.dense_bytes
        assert 0 < sum(plan.residents_per_layer) < plan.num_experts
    least = diffusion.plan.minimum_bytes
    with pytest.raises(PlanError, match=f"{least} bytes.*`gpu_memory`"):
        LLM(diffusion.folder, gpu_memory=least - 1, **OPTIONS)
    with pytest.raises(PlanError, match="`host_memory`"):
        LLM(diffusion.folder, host_memory=1000, **OPTIONS)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("tide", {"tau": "paper"}), ("tide", {"tau": "auto"}), ("dali", {}), ("edgemoe", {})],
)
def test_what_a_calibration_knows(
    diffusion: Case, calibration: Path, policy: str, options: dict[str, str]
) -> None:
    opened = diffusion.open(
        policy, 0.4, policy_options=options, calibration=str(calibration), seed=1
    )
    with opened as llm:
        diffusion.check(llm)
        gate = tier_of(llm).early_gate
        assert gate is not None and ((gate.residual is not None) == (policy == "dali"))
        sizes = {"dali": "8 swapped every 4 passes, 4 prefetched", "tide": r"tau \d+ by the paper"}
        is_told = policy in sizes and options != {"tau": "auto"}
        told = f"{policy}: {sizes[policy]}" if is_told else policy
        assert re.search(rf"experts in memory \({told}\)", plan_line(llm.plan))
        assert re.search(f"policy {told} ", plan_facts(llm.plan))
        if is_told:
            llm.adopt_policy("lru")
            assert llm.plan.policy_sizes == ""
            llm.adopt_policy(policy, options)
            assert re.fullmatch(sizes[policy], llm.plan.policy_sizes)


@pytest.fixture(scope="module")
def calibration(diffusion: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "text.lowtide"
    with LLM(diffusion.folder, context=256) as llm:
        calibrate(llm, [3 + i * i % 200 for i in range(200)], "tiny", num_pieces=4).save(path)
    return path


def test_auto_tries_two_policies_keeps_the_faster_and_says_so(
    diffusion: Case, calibration: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a calibration, which tells each of the two what it tells it otherwise."""
    with caplog.at_level(logging.INFO, "lowtide"):
        for options in ({}, {"calibration": str(calibration)}):
            caplog.clear()
            with diffusion.open("auto", 0.4, **options) as llm:
                assert llm.plan.policy == "lowtide" and "tried for 20 passes" in llm.plan.reason
                seen = set()
                while "ms a pass" not in llm.plan.reason:
                    diffusion.check(llm)
                    seen.add(llm.plan.policy)
                    assert llm.stats()["forwards"] < 100
                assert llm.plan.policy in ("lowtide", "lru") and seen == {"lowtide", "lru"}
                assert f"auto: {llm.plan.policy} took" in caplog.text
                llm.adopt_policy("tide")
                diffusion.check(llm)
                assert llm.plan.policy == "tide" and llm.plan.reason == "asked for"


def test_tau_of_the_paper_needs_a_calibration(diffusion: Case) -> None:
    with pytest.raises(UsageError, match="lowtide calibrate"):
        diffusion.open("tide", 0.4, policy_options={"tau": "paper"})


def test_wrong_devices_are_refused_by_name(diffusion: Case) -> None:
    folder = diffusion.folder
    with pytest.raises(UsageError, match="'tpu' is not known"):
        LLM(folder, device="tpu")
    with pytest.raises(UsageError, match="`device` emulated"):
        LLM(folder, device="cpu", device_options=FAST)
    with pytest.raises(UsageError, match="link_GBps"):
        LLM(folder, device="emulated", device_options={"link": "2"})
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="sees no GPU"):
            LLM(folder, device="cuda")


# Faults: a typed error, and the engine goes on as if nothing had been


class Broken(Exception):
    pass


def refuse(*_: object, **__: object) -> None:
    raise Broken("on purpose")


def check_fails_once(case: Case, llm: LLM, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.answer(llm)


@pytest.mark.parametrize("policy", ["lru", "lowtide", "dali"])
def test_a_failing_copy(diffusion: Case, policy: str) -> None:
    with diffusion.open(policy, 0.3) as llm:
        with failing_copies(llm):
            check_fails_once(diffusion, llm, DeviceError, "must match the size")
        diffusion.check(llm)


@pytest.mark.parametrize("policy", ["all-host", "lru"])
def test_a_failing_expert(diffusion: Case, policy: str) -> None:
    with host_work_spoiled() as host, diffusion.open(policy, 0.3) as llm:
        host.before = refuse
        with failing_runs(llm), pytest.raises((Broken, DeviceError), match="on purpose"):
            diffusion.answer(llm)
        host.before = None
        diffusion.check(llm)


@pytest.mark.parametrize("home_share", [0.3, 1.0])
def test_a_failing_call_over_several_experts(
    diffusion: Case, home_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = BatchedExperts.run

    def run_and_fail(batched: BatchedExperts, groups: IntArray, *scratch: torch.Tensor) -> None:
        run(batched, groups, *scratch)
        sizes.append(len(groups))
        if len(sizes) == 7:
            raise Broken("on purpose")

    with diffusion.open("all-host", 0.3, home_share) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(BatchedExperts, "run", run_and_fail)
            check_fails_once(diffusion, llm, Broken, "on purpose")
        diffusion.check(llm)
    assert len(sizes) == 7 and max(sizes) > 1


def test_an_interrupt_while_a_call_over_several_experts_is_under_way(
    diffusion: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads its slots for a while yet."""
    is_interrupted = threading.Event()
    run = BatchedExperts.run

    def run_late(batched: BatchedExperts, *arguments: Any) -> None:
        is_interrupted.wait(LIMIT_S)
        run(batched, *arguments)

    def interrupt(*_: Any) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    with diffusion.open("all-host", 0.3, 0.3) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(BatchedExperts, "run", run_late)
            patch.setattr(HostTier, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                diffusion.answer(llm)
        diffusion.check(llm)


def test_a_failing_read(diffusion: Case) -> None:
    with diffusion.open("lowtide", 0.3, 0.2) as llm:
        with failing_reads(llm):
            check_fails_once(diffusion, llm, StorageError, "no such sector")
        diffusion.check(llm)


def test_a_host_thread_that_hangs_is_an_error(
    diffusion: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    with host_work_spoiled() as host, diffusion.open("all-host", 0.0) as llm:
        threads = engine_of(llm).executor
        drain = threads.drain

        def release_and_drain() -> None:
            """Once the error is on its way up."""
            release.set()
            drain()

        with monkeypatch.context() as patch:
            patch.setattr(host_tier, "WAIT_LIMIT_S", 0.05)
            patch.setattr(threads, "drain", release_and_drain)
            host.before = partial(release.wait, LIMIT_S)
            check_fails_once(diffusion, llm, DeviceError, "has not been computed within 0.05 s")
        diffusion.check(llm)


def test_a_device_that_was_closed_is_an_error(diffusion: Case) -> None:
    with diffusion.open("lowtide", 0.3) as llm:
        tier_of(llm).device.close()
        check_fails_once(diffusion, llm, DeviceError, "load the model again|closed")


def test_memory_that_the_device_does_not_get(
    diffusion: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(num_bytes: int) -> None:
        raise PlanError(f"The system refuses to reserve {num_bytes} bytes.")

    monkeypatch.setattr("lowtide.memory.arena.Arena", no_memory)  # as the device's own room
    with no_more_threads(), pytest.raises(PlanError, match="refuses to reserve"):
        diffusion.open("lowtide", 0.3)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ctrl-C at the n-th slot that is in use by the host; the list holds the countdown."""
    countdown = [0]
    lease = HostTier.lease

    def leased_or_stop(tier: HostTier, layer: int, expert: int) -> int:
        countdown[0] -= 1
        if countdown[0] == 0:
            countdown[0] = -1
            raise KeyboardInterrupt
        return lease(tier, layer, expert)

    monkeypatch.setattr(HostTier, "lease", leased_or_stop)
    yield countdown


@pytest.mark.parametrize("at", [1, 2, 7, 20])
def test_an_interrupt_leaves_a_usable_engine(
    diffusion: Case, interrupted: list[int], at: int
) -> None:
    with diffusion.open("tide", 0.3, 0.3) as llm:
        interrupted[0] = at
        with pytest.raises(KeyboardInterrupt):
            diffusion.answer(llm)
        diffusion.check(llm)


def test_a_batch_of_requests_shares_a_pass(diffusion: Case) -> None:
    with diffusion.open("lowtide", 0.4) as llm:
        requests: list[Request] = intake_of(llm).requests([[5, 6, 7], [9, 9], [1] * 20], PARAMS)
        finished, _ = answers(llm, requests)
        alone = [answers(llm, [request])[0][0] for request in requests]
    assert [f.token_ids for f in finished] == [f.token_ids for f in alone]


@pytest.mark.parametrize("home_share", [1.0, 0.3])
def test_what_dali_asks_is_done(diffusion: Case, tmp_path: Path, home_share: float) -> None:
    options = {"w_size": "1"}
    with diffusion.open("dali", 0.4, home_share, policy_options=options) as llm:
        with recorded(llm, tmp_path / "trace.npz", "m"):
            diffusion.check(llm)
        stats = llm.stats()
    assert stats["num_moves_asked"] == stats["num_moves_done"] > 0
    passes = Trace.load(tmp_path / "trace.npz").passes
    assert [p.num_moves_asked for p in passes] == [p.num_moves_done for p in passes]
    assert sum(p.num_moves_done for p in passes) == stats["num_moves_done"]


MANY = SamplingParams(
    max_tokens=48,
    ignore_eos=True,
    diffusion=DiffusionParams(block_length=8, steps=8, threshold=1.0),
)


def moves_of(case: Case, home_share: float, tau: str) -> tuple[int, int, int, int]:
    """Moves asked, done and waiting, and hits, of an answer of many passes under `tide`."""
    options = {"tau": tau}
    with case.open("tide", 0.4, home_share, policy_options=options) as llm:
        [request] = intake_of(llm).requests([case.prompt], MANY)
        answers(llm, [request])
        stats = llm.stats()
        check_idle(llm)
    names = ("num_moves_asked", "num_moves_done", "num_moves_waiting", "num_hits")
    asked, done, num_waiting, num_hits = (int(stats[name]) for name in names)
    return asked, done, num_waiting, num_hits


@pytest.mark.parametrize("tau", ["2", "4", "8"])
@pytest.mark.parametrize("home_share", [0.0, 0.3])
def test_moves_of_experts_on_disk_are_done(diffusion: Case, home_share: float, tau: str) -> None:
    """A move that has to wait for its expert's bytes survives the loss of their host slot.

    The next read of the expert does it.
    """
    _, _, _, hits_at_home = moves_of(diffusion, 1.0, tau)
    asked, done, num_waiting, hits = moves_of(diffusion, home_share, tau)
    assert done >= 0.4 * asked > 0 and num_waiting < asked
    assert hits >= 0.6 * hits_at_home
