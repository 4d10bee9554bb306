"""The preset `buddymoe` in a running engine: what stays exact, who is resident, the receipt."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buddy_cases import PLAIN, Seen, profiled, random_profile
from buddy_cases import account as any_account
from inside import engine_of, worker_of
from test_serve_service import hold_pass
from torch import Tensor
from whole import Observed, answer, residents, wait_until

from lowtide import LLM, SamplingParams
from lowtide.buddies import LayerRules, PassAccount
from lowtide.core import Costs, Facts, RoutedTokens, RowKind
from lowtide.decode.block_sequence import BlockSequence
from lowtide.errors import NumericError, UsageError
from lowtide.lab.simulation.host_alone import compare_alone
from lowtide.lab.simulation.simulator import simulate
from lowtide.llm import plan_model
from lowtide.policies.buddymoe import layer_rules
from lowtide.policies.presets import parse_options
from lowtide.policies.reads_ahead import NEARLY_ALL
from lowtide.policies.receipt import Receipt
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.substitution import replaced
from lowtide.record import Recorder

GOLDENS = Path(__file__).parent / "goldens"
MODEL = GOLDENS / "llada2-a"
PROMPT = [7, 3, 20, 9, 4]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


EVERY_ABSENT = {"alpha": "1", "k_max": "64", "rho": "none"}
"""Lists of all peers: whoever is absent is replaced while a resident is left."""


def open_half(device: str = "cpu", model: Path = MODEL, share: float = 0.5, **options: Any) -> LLM:
    """With a share of what there is between the least budget and everything."""
    options = {"max_mass": "off", "tae": "off", "beta": "off", **options}
    told: dict[str, Any] = {"device": device, "context": 128}
    told |= {"policy": "buddymoe", "policy_options": options}
    plan = plan_model(model, **told)
    budget = round(plan.minimum_bytes + share * (plan.full_bytes - plan.minimum_bytes))
    memory = "host_memory" if device == "cpu" else "gpu_memory"
    return LLM(model, **{memory: budget}, **told)


@pytest.fixture(scope="module")
def exact() -> tuple[list[int], Tensor]:
    with LLM(MODEL, device="cpu", context=128) as llm:
        return answer(llm, PROMPT, PARAMS)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize(
    "options",
    [
        {"miss": "wait"},
        {"rho": "0"},
        {"beta": "0"},
        {"max_mass": "0"},
        {"miss": "late", "rho": "0"},
        {"miss": "late", "beta": "0"},
        {"miss": "late", "max_mass": "0"},
    ],
)
def test_bit_for_bit_where_nothing_may_be_replaced(
    device: str, options: dict[str, str], exact: tuple[list[int], Tensor]
) -> None:
    with profiled(), open_half(device, **options) as llm:
        ids, logits = answer(llm, PROMPT, PARAMS)
        assert llm.stats()["num_misses"] > 0
    assert ids == exact[0] and torch.equal(logits, exact[1])


def test_without_a_profile_it_is_refused_with_the_command_that_makes_one() -> None:
    """Before a weight is read, also where everything fits; `miss=wait` replaces nothing."""
    given: dict[str, Any] = {"policy": "buddymoe", "context": 128}
    with pytest.raises(UsageError, match="lowtide calibrate --buddies MODEL --text FILE"):
        LLM(MODEL, device="cpu", **given)
    with LLM(MODEL, device="cpu", policy_options={"miss": "wait"}, **given) as llm:
        [completion] = llm.generate([PROMPT], PARAMS)
    assert completion.usage.receipt is None
    with profiled(), pytest.raises(UsageError, match="partitions=2 is for lowtide simulate"):
        open_half(partitions="2")


def test_named_by_itself_it_substitutes_within_its_bounds() -> None:
    """The paper's gates and the bound on mass; on one device no partition is crossed."""
    seen_all = []
    told: dict[str, Any] = {"device": "cpu", "context": 128, "policy": "buddymoe"}
    plan = plan_model(MODEL, **told)
    budget = (plan.minimum_bytes + plan.full_bytes) // 2
    with profiled() as seen, LLM(MODEL, host_memory=budget, **told) as llm:
        for first in range(3, 30, 3):
            params = replace(PARAMS, max_tokens=40)
            [completion] = llm.generate([[first, *PROMPT]], params)
            receipt = completion.usage.receipt
            assert receipt is not None and receipt.moved_share <= 0.05 and receipt.num_hops == 0
            seen_all.append(receipt.num_substituted)
    assert seen and sum(seen_all) > 0


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("eta", ["0.5", "50"])
def test_psi_weighs_the_routers_logits_of_the_run(device: str, eta: str) -> None:
    """What runs is what the plain twin answers to the same facts, logits included."""
    options = {"eta": eta, "rho": "none", "max_mass": "off", "tae": "off", "beta": "off"}
    num_replaced = num_by_list = 0
    rules: list[LayerRules] = []

    class Checked(Seen):
        def counted(self, facts: Facts, account: PassAccount) -> RoutedTokens | None:
            nonlocal num_replaced, num_by_list
            answered, asked = super().counted(facts, account), facts.routing
            assert asked is not None and asked.scores is not None
            rule, num_rows = rules[facts.layer], len(asked.weights)
            wanted = PLAIN.of_layer(rule)(facts, any_account(num_rows, len(rules)))
            assert (answered is None) == (wanted is None)
            if answered is not None and wanted is not None:
                assert np.array_equal(answered.experts, wanted.experts)
                by_list = rule._replace(eta=0.0, psi=None)
                other = PLAIN.of_layer(by_list)(facts, any_account(num_rows, len(rules)))
                num_replaced += 1
                num_by_list += other is not None and np.array_equal(other.experts, answered.experts)
            return answered

    with profiled(Checked), open_half(device, **options) as llm:
        shape = llm.config.moe_shape
        profile = random_profile(shape.num_layers, shape.num_experts, 2)
        inputs = PolicyInputs(
            [1] * shape.num_layers,
            shape.num_experts,
            Costs.unknown(1),
            options=parse_options("buddymoe", options),
            buddies=profile,
        )
        rules += layer_rules(inputs, profile)
        llm.generate([PROMPT], PARAMS)
    assert num_replaced > 0 and (eta != "50" or num_by_list < num_replaced)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("miss", ["buddy", "late"])
def test_bit_for_bit_where_every_expert_is_resident(
    device: str, miss: str, exact: tuple[list[int], Tensor]
) -> None:
    with profiled() as seen, open_half(device, share=1.0, miss=miss) as llm:
        ids, logits = answer(llm, PROMPT, PARAMS)
    assert ids == exact[0] and torch.equal(logits, exact[1])
    assert not any(answered for one in seen for _, answered in one.asked)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize(
    ("miss", "placement"),
    [("buddy", "lru"), ("late", "lru"), ("late", "lowtide")],
)
def test_a_receipt_equals_what_was_seen(device: str, miss: str, placement: str) -> None:
    watched = Observed()
    options = {"miss": miss, "placement": placement, "rho": "none"}
    with profiled() as seen, open_half(device, **options) as llm:
        with llm.observed(watched):
            completions = llm.generate([PROMPT, PROMPT[::-1]], PARAMS)
    [one] = seen
    requests = sorted({request for request, _ in routed_masses(watched)})
    for request, completion in zip(requests, completions, strict=True):
        receipt = completion.usage.receipt
        assert receipt is not None and receipt.num_substituted > 0
        masses = [mass for of, mass in routed_masses(watched) if of == request]
        assert receipt.routed_mass == pytest.approx(sum(masses))
        check_moved(receipt, request, one)


def routed_masses(watched: Observed) -> Iterator[tuple[int, float]]:
    """Of every row of every layer."""
    for _, step, _, routing, _ in watched.layers:
        assert step.rows is not None
        yield from zip(step.rows.request.tolist(), routing.weights.sum(1).tolist(), strict=True)


def check_moved(receipt: Receipt, own: int, seen: Seen) -> None:
    moved, pairs, affected = 0.0, np.zeros_like(receipt.substitutions), set()
    for facts, answered in seen.asked:
        rows, routing = facts.step.rows, facts.routing
        if answered is None or rows is None or routing is None:
            continue
        is_moved = replaced(routing, answered) & (rows.request == own)[:, None]
        moved += float(routing.weights[is_moved].sum(dtype=np.float64))
        pairs[facts.layer] += is_moved.sum()
        affected |= {(id(rows), row) for row in is_moved.any(axis=1).nonzero()[0].tolist()}
    assert receipt.moved_mass == pytest.approx(moved)
    assert pairs.tolist() == list(receipt.substitutions)
    assert len(affected) == receipt.num_affected <= receipt.num_tokens
    assert receipt.num_in_vain <= receipt.num_substituted


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_no_request_has_more_moved_than_it_allowed(device: str) -> None:
    with profiled(), open_half(device, max_mass="0.02", rho="none") as llm:
        completions = llm.generate([PROMPT, PROMPT[::-1], PROMPT[1:]], PARAMS)
    shares = [completion.usage.receipt.moved_share for completion in completions]  # type: ignore[union-attr]
    assert max(shares) <= 0.02 and min(shares) > 0


def test_a_pass_that_another_request_made_fail_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is replaced, so that alone and in company there are as many passes."""
    choose, other = BlockSequence.choose, PROMPT[::-1]

    def failing(self: BlockSequence, *told: Any) -> None:
        if list(self.request.prompt) == other:
            raise NumericError("These logits are no numbers.")
        choose(self, *told)

    with profiled(), open_half(beta="0") as llm, ThreadPoolExecutor(1) as pool:
        llm.generate([PROMPT], PARAMS)
        [alone] = llm.generate([PROMPT], PARAMS)  # with the keys that the first one left
        monkeypatch.setattr(BlockSequence, "choose", failing)
        hold_pass(llm, monkeypatch, 2)
        running = pool.submit(llm.generate, [PROMPT], PARAMS)
        wait_until(lambda: worker_of(llm).num_running == 1)
        with pytest.raises(NumericError):
            llm.generate([other], PARAMS)
        [again] = running.result()
    told, once = again.usage.receipt, alone.usage.receipt
    assert told is not None and once is not None
    assert again.token_ids == alone.token_ids and told.num_tokens == once.num_tokens
    assert told.routed_mass == pytest.approx(once.routed_mass)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_residents_keep_adapting(device: str) -> None:
    """Though every absent expert of every draft is replaced: no prompt row brings anybody."""
    options = {**EVERY_ABSENT, "in_prefill": "true", "in_commit": "true", "placement": "lru"}
    with profiled() as seen, open_half(device, **options) as llm:
        llm.generate([PROMPT], PARAMS)
        first = residents(llm)
        num_asked = len(seen[0].asked)
        # A link is idle as long as the machine has time for it: one answer may be over before.
        for _ in range(20):
            llm.generate([PROMPT[::-1]], PARAMS)
            engine_of(llm).experts.host.pause()
            if (last := residents(llm)) != first:
                break
        assert last != first
        engine_of(llm).experts.host.ledger.check_integrity()
    for facts, answered in seen[0].asked[num_asked:]:
        assert answered is not None or facts.demand.is_resident.all()


@pytest.mark.parametrize("share", [0.4, 0.95])
@pytest.mark.parametrize("placement", ["lru", "lowtide"])
def test_nothing_is_read_ahead_that_is_replaced(placement: str, share: float) -> None:
    """A block asks for nearly every expert and runs residents alone, layer after layer.

    These may be nearly all of them, too.
    """
    options = {**EVERY_ABSENT, "in_prefill": "true", "in_commit": "true", "placement": placement}
    with profiled() as seen, open_half(share=share, **options) as llm:
        llm.generate([list(range(1, 21))], replace(PARAMS, max_tokens=64))
        counts = llm.stats()
        num_experts = llm.config.moe.num_experts
    most = max(len(facts.demand.experts) for facts, _ in seen[0].asked)
    assert most >= NEARLY_ALL * num_experts, "else the next layer is not expected to ask for all"
    assert counts["num_wasted"] == counts["num_ahead"] == 0


def test_rows_that_are_kept_run_what_their_router_chose() -> None:
    """Prompts and blocks that are committed, in a diffusion model."""
    with profiled() as seen, open_half("cpu", **EVERY_ABSENT) as llm:
        llm.generate([PROMPT * 5], replace(PARAMS, max_tokens=40))
    kinds = set()
    for facts, answered in seen[0].asked:
        rows, routing = facts.step.rows, facts.routing
        assert rows is not None and routing is not None
        kinds |= set(rows.kind.tolist())
        if answered is not None:
            is_moved = replaced(routing, answered).any(axis=1)
            assert (rows.kind[is_moved] == RowKind.DRAFT).all()
    assert kinds == {RowKind.PROMPT, RowKind.COMMIT, RowKind.DRAFT}


@pytest.mark.parametrize(
    ("device", "placement"),
    [
        ("cpu", {"placement": "lru"}),
        ("cpu", {"placement": "lowtide"}),
        # Beside a device a replaced expert comes when the link has time; here nobody moves.
        ("emulated", {"placement": "static"}),
        ("emulated", {"placement": "fiddler", "by_threshold": "true"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("miss", ["buddy", "late"])
def test_a_replay_decides_as_the_runtime_did(
    miss: str, device: str, placement: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same trace, capacity and costs: the same residents, answers and receipts.

    A replay has the planned slots, none that sequences lend.
    """
    monkeypatch.setattr("lowtide.engine.planning.plan.max_cache_tokens", lambda planner, plan: 0)
    options = {"miss": miss, "rho": "none", "max_mass": "0.3", "tae": "off", "beta": "off"}
    options |= placement
    with profiled() as seen, open_half(device, **options) as llm:
        recorder = Recorder(llm, "m")
        with llm.observed(recorder):
            completions = llm.generate([PROMPT, PROMPT[::-1]], PARAMS)
        recorder.finish()
        policies, capacity = engine_of(llm).experts.policies, llm.plan.residents_per_layer
        setting = PolicyInputs(
            capacity,
            llm.config.moe.num_experts,
            policies.costs,
            options=parse_options("buddymoe", options),
        )
        trace = recorder.writer.trace()
        if device == "cpu":
            [report] = compare_alone(trace, ["buddymoe"], setting)
        else:
            report = simulate(trace, "buddymoe", setting)
    runtime, replay = seen
    check_the_same(runtime, replay)
    for request, completion in enumerate(completions):
        assert completion.usage.receipt is not None
        check_moved(completion.usage.receipt, request, replay)
    receipts = [completion.usage.receipt for completion in completions]
    assert report.num_substituted == sum(r.num_substituted for r in receipts)  # type: ignore[union-attr]
    moved, routed = (sum(getattr(r, n) for r in receipts) for n in ("moved_mass", "routed_mass"))
    assert moved and report.moved_share == pytest.approx(moved / routed)


def check_the_same(runtime: Seen, replay: Seen) -> None:
    """Assert that runtime and replay were asked the same and gave the same answers."""
    assert len(runtime.asked) == len(replay.asked) > 0
    for (asked, answered), (again, replayed) in zip(runtime.asked, replay.asked, strict=True):
        assert asked.layer == again.layer and np.array_equal(asked.is_kept, again.is_kept)
        assert (answered is None) == (replayed is None)
        if answered is not None and replayed is not None:
            assert np.array_equal(answered.experts, replayed.experts)
            assert np.array_equal(answered.weights, replayed.weights)


def test_what_is_missing_is_refused() -> None:
    with pytest.raises(UsageError, match="lowtide calibrate --buddies"):
        open_half("cpu")
