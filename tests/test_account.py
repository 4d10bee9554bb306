"""Counts of experts as sums: in words, in JSON, in metrics, and after failures and cancels.

`whole.check_account` holds every run of the invariance suites to the sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from whole import check_account, check_idle

from lowtide import LLM, SamplingParams
from lowtide.cli.app import app
from lowtide.errors import LowtideError, StorageError
from lowtide.experts.account import account_of, account_rows
from lowtide.experts.transfer import DiskTransfer
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model
from lowtide.record import Recorder

MODEL = Path(__file__).parent / "goldens" / "llada2-a"
PROMPT = [7, 3, 20, 9, 4]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def open_half(device: str = "cpu", **options: Any) -> LLM:
    given: dict[str, Any] = {"device": device, "context": 128, **options}
    plan = plan_model(MODEL, **given)
    memory = "host_memory" if device == "cpu" else "gpu_memory"
    return LLM(MODEL, **{memory: budget_of_share(plan, 0.4)}, **given)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("policy", ["lowtide", "dali", "tide", "lru", "hybrimoe"])
def test_rows_are_those_that_the_routers_chose(device: str, policy: str) -> None:
    """Counted by an observer, layer by layer, and by compiled passes alone."""
    with open_half(device, policy=policy) as llm:
        recorder = Recorder(llm, "m")
        with llm.observed(recorder):
            llm.generate([PROMPT, PROMPT[::-1]], PARAMS)
        recorder.finish()
        chosen = sum(ids.size for ids in recorder.writer.trace().iter_ids())
        seen = account_of(llm.stats())
        assert seen["rows"]["asked"] == chosen and seen["rows"]["substituted"] == 0
        assert (seen["rows"]["device"] > 0) == (device == "emulated")
        assert device == "emulated" or seen["rows"]["disk"] > 0
        check_idle(llm)
        shape, before = llm.config.moe_shape, llm.stats()
        llm.generate([PROMPT], PARAMS)
        check_idle(llm)
        after = llm.stats()
        num_rows = after["num_rows"] - before["num_rows"]
        pairs = num_rows * shape.num_layers * shape.num_experts_per_token
        assert after["num_expert_rows"] - before["num_expert_rows"] == pairs
        if device == "emulated":
            assert account_of(after)["link"]["experts"] > 0 or policy == "tide"


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_sums_hold_after_failures_and_other_policies(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads fail at any place of a pass; policies take turns; requests are given up."""
    options: dict[str, Any] = {"policy": "lru"}
    if device == "emulated":
        given: dict[str, Any] = {"device": device, "context": 128}
        host = plan_model(MODEL, **given).host
        options["host_memory"] = host.used_bytes - (host.num_slots - 12) * host.slot_bytes
    start, num_left = DiskTransfer.start, [10**9]

    def failing(transfer: DiskTransfer, layer: int, expert: int, slot: int) -> Any:
        num_left[0] -= 1
        if num_left[0] < 0:
            raise StorageError("The disk is gone.")
        return start(transfer, layer, expert, slot)

    monkeypatch.setattr(DiskTransfer, "start", failing)
    with open_half(device, kernels="reference", **options) as llm:
        for policy in ("lru", "lowtide", "tide", "dali"):
            llm.adopt_policy(policy)
            for num_reads in (3, 17, 40):
                num_left[0] = num_reads
                try:
                    llm.generate([PROMPT], PARAMS)
                except LowtideError:
                    pass
                check_account(llm)
                num_left[0] = 10**9
                stream = llm.stream(PROMPT, PARAMS)
                next(stream)
                stream.close()
                check_account(llm)
        assert llm.generate([PROMPT], PARAMS)[0].token_ids
        check_account(llm)


def test_the_table_in_words() -> None:
    stats = {"num_expert_rows": 1234, "num_host_rows": 1200, "num_disk_rows": 34}
    stats |= {"num_moves_asked": 5, "num_moves_done": 3, "num_moves_dropped": 2}
    stats |= {"num_read": 4, "read_bytes": 4 << 20 | 1 << 10, "given_up_bytes": 1 << 10}
    rows = {name: rest for name, *rest in account_rows(stats)}
    assert rows["rows"] == ["1,234", "0 device + 1,200 host + 34 disk + 0 substituted"]
    assert rows["moves"] == ["5", "3 done + 2 dropped + 0 waiting"]
    assert rows["prefetched"] == ["0", "0 used + 0 dropped + 0 waiting"]
    assert rows["over the link"][1] == "0 experts x 0 B"
    assert rows["over the disk"][1] == "4 experts x 1.0 MiB + 1.0 KiB of reads given up"


def test_generate_shows_it() -> None:
    given = ["generate", str(MODEL), "--prompt-ids", "7 3 20", "--max-tokens", "4"]
    told = CliRunner().invoke(app, [*given, "--json"])
    assert told.exit_code == 0, told.stderr
    stats = json.loads(told.stdout)["stats"]
    assert stats["account"] == json.loads(json.dumps(account_of(stats)))
    assert stats["account"]["rows"]["asked"] > 0
    shown = CliRunner().invoke(app, [*given, "-v"])
    assert "experts since loading" in shown.stderr and " substituted" in shown.stderr


def test_metrics_have_the_sums() -> None:
    from types import SimpleNamespace

    from lowtide.serve.metrics import Metrics

    with open_half(policy="lowtide") as llm:
        llm.generate([PROMPT], PARAMS)
        stats = llm.stats()
    admission = SimpleNamespace(num_running=0, num_waiting=0, num_waiting_tokens=0, num_refused=0)
    service: Any = SimpleNamespace(admission=admission, model_name="m", on_served=[])
    page = Metrics(service).page(stats).decode()
    counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")

    def count(name: str, kind: str = "_total") -> float:
        return float(counts[f'lowtide:{name}{kind}{{model_name="m"}}'])

    places = ("device", "host", "disk", "substituted")
    assert count("expert_rows") == sum(count(f"expert_rows_{place}") for place in places) > 0
    moves = [count(f"expert_moves_{name}") for name in ("done", "dropped")]
    assert count("expert_moves_asked") == sum(moves) + count("expert_moves_waiting", "")
