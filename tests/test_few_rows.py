"""Layers of a few rows in a call or two have the bits of their operators one by one.

This holds with and without a policy that Python is asked for in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import write_model
from gguf.constants import GGMLQuantizationType as Type
from inside import states_of
from poison import PoisonedWorkspace
from qwen_hybrid_files import random_model, write_hybrid
from rounded_files import write_rounded
from torch import Tensor
from whole import Observed, rows_asked

from lowtide.core import Curve, Facts, PassRows, RowKind, Step, StepKind
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.running import policy_setting
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.wiring import load
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.compiled_residents import CompiledResidents
from lowtide.families import families
from lowtide.kernels import choice
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.layer import CompiledLayer, CompiledLayers
from lowtide.layers.batch import Batch, Segment
from lowtide.layers.few_rows import ShortPass, WholeLayer, WholeModel
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth, write_checkpoint
from lowtide.models.decoder import Decoder
from lowtide.policies.decision import Decision, Policies
from lowtide.policies.reads_ahead import AheadTrial

AT_ONCE = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "bailing_moe_v2", "glm4_moe", "minimax_m2"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "lfm2_moe"),
    *("qwen3_5_moe", "qwen3_next"),
)
"""Families with experts whose passes of few rows are one call: all that write token by token."""

DENSE = ("lfm2", "qwen3_5")
"""Families without; their layers keep states, too."""

WITH_STATES = ("lfm2_moe", "qwen3_5_moe", "qwen3_next")

PROMPT = 20


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not isinstance(choice.choose_kernels("auto", torch.bfloat16), CompiledKernels):
        pytest.skip("nothing is compiled here")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: synth(name, "tiny", base / name, seed=3) for name in (*AT_ONCE, *DENSE)}


@contextmanager
def opened(path: Path, share: float = 1.0, **options: object) -> Iterator[Engine]:
    """share: of the way from the least budget to everything.

    The context has room for the states of three sequences.
    """
    chosen = {"context": 8192, "dtype": "bfloat16", **options}
    plan = plan_model(path, **chosen)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    config = EngineConfig(host_memory=budget, **chosen)
    model = open_model(path, config)
    engine = load(model, make_plan(model))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def one_by_one() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledKernels, "takes_rows", lambda self, x: False)
        yield


def decoded(
    engine: Engine, num_sequences: int, num_rows: int = 1, prompt: int = PROMPT
) -> list[Tensor]:
    """Return the hidden states of some passes of sequences that had a prompt.

    The first sequence feeds `num_rows` rows, the others one each.
    """
    cache, found = engine.kv_cache, []
    ranges = [cache.allocate(prompt + 3 * num_rows) for _ in range(num_sequences)]
    ends = [0] * num_sequences
    with torch.inference_mode():
        for index in range(4):
            lengths = [prompt if index == 0 else 1] * num_sequences
            if index:
                lengths[0] = num_rows
            found.append(engine.model.forward(_batch(ranges, ends, lengths, index)).clone())
            cache.end_pass(ranges)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for kv in ranges:
        cache.free(kv)
    return found


def _batch(
    ranges: Sequence[object], ends: Sequence[int], lengths: Sequence[int], index: int
) -> Batch:
    segments, row = [], 0
    for kv, end, length in zip(ranges, ends, lengths, strict=True):
        segments.append(Segment(row, row + length, end, 1, kv))
        row += length
    positions = np.concatenate(
        [np.arange(end, end + length) for end, length in zip(ends, lengths, strict=True)]
    )
    rows = PassRows(np.zeros(row, np.int64), np.full(row, RowKind.DECODE, np.uint8))
    step = Step(StepKind.DECODE if index else StepKind.PREFILL, index, rows)
    ids = torch.from_numpy((np.arange(row) * 7 + 13 * index) % 90)
    return Batch(ids, torch.from_numpy(positions), tuple(segments), step)


def are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("family", AT_ONCE)
def test_the_bits_of_one_by_one(folders: dict[str, Path], family: str) -> None:
    """One call where everything is resident, two where policies are asked.

    With one sequence, with several, and with one that feeds two rows.
    """
    found = []
    with opened(folders[family]) as engine:
        for shape in ((1, 1), (3, 1), (2, 2)):
            with one_by_one():
                found.append(decoded(engine, *shape))
            assert are_equal(decoded(engine, *shape), found[-1])
    with opened(folders[family], 0.3, policy="lru") as engine:
        assert are_equal(decoded(engine, 1), found[0])
        assert are_equal(decoded(engine, 3), found[1])
        assert engine.as_dict()["num_misses"] > 0


def test_latent_attention_whose_halves_rotate_has_the_bits_of_one_by_one(tmp_path: Path) -> None:
    size = families()["deepseek_v3"].sizes()["tiny"]
    halves = replace(size, config={**size.config, "rope_interleave": False})
    with opened(write_checkpoint(halves, tmp_path / "model", seed=3)) as engine:
        for shape in ((1, 1), (3, 1), (2, 2)):
            with one_by_one():
                expected = decoded(engine, *shape)
            assert are_equal(decoded(engine, *shape), expected)


@pytest.mark.parametrize("num_taps", [2, 5])
def test_convolutions_of_any_length_have_the_bits_of_one_by_one(
    tmp_path: Path, num_taps: int
) -> None:
    """With biases, in a model without experts, and over rows of more than the state holds."""
    size = families()["lfm2"].sizes()["tiny"]
    changes = {"conv_L_cache": num_taps, "conv_bias": True}
    odd = replace(size, config={**size.config, **changes})
    with opened(write_checkpoint(odd, tmp_path / "model", seed=3)) as engine:
        for shape in ((1, 1), (3, 1), (2, 2), (1, 7)):
            with one_by_one():
                expected = decoded(engine, *shape)
            assert are_equal(decoded(engine, *shape), expected)


@contextmanager
def calls_counted() -> Iterator[list[int]]:
    """By pass: compiled calls over layers, and over a layer's parts."""
    counts: list[int] = []
    forward, run = Decoder.forward, CompiledLayers.run
    parts = CompiledLayer.run_to_router, CompiledLayer.run_from_experts

    def passing(model: Decoder, batch: Batch) -> Tensor:
        counts.append(0)
        return forward(model, batch)

    def counting(function: Callable[..., None]) -> Callable[..., None]:
        def count(*given: object) -> None:
            counts[-1] += 1
            function(*given)

        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", passing)
        patch.setattr(CompiledLayers, "run", counting(run))
        for function in parts:
            patch.setattr(CompiledLayer, function.__name__, counting(function))
        yield counts


@pytest.mark.parametrize("family", AT_ONCE)
def test_a_pass_is_one_call(folders: dict[str, Path], family: str) -> None:
    """Rows of different sequences, or 2 to 8 of one, whichever experts are resident."""
    for share in (1.0, 0.3):
        with opened(folders[family], share, policy="lru") as engine, calls_counted() as counts:
            for shape in ((1, 1), (3, 1), *((1, num_rows) for num_rows in range(2, 9)), (2, 4)):
                decoded(engine, *shape)
        assert {*counts[1::4], *counts[2::4], *counts[3::4]} == {1}


@pytest.mark.parametrize("family", DENSE)
def test_a_pass_without_experts_is_one_call(folders: dict[str, Path], family: str) -> None:
    with opened(folders[family]) as engine:
        for shape in ((1, 1), (3, 1), *((1, num_rows) for num_rows in range(2, 9)), (2, 4)):
            with one_by_one():
                expected = decoded(engine, *shape)
            with calls_counted() as counts:
                assert are_equal(decoded(engine, *shape), expected)
            assert counts[1:] == [1, 1, 1]


@pytest.mark.parametrize("family", [*AT_ONCE, *DENSE])
def test_rows_of_an_answer_have_the_bits_of_passes_of_their_own(
    folders: dict[str, Path], family: str
) -> None:
    with opened(folders[family]) as engine, torch.inference_mode():
        cache, ids = engine.kv_cache, torch.arange(26) * 5 % 90
        found = []
        for lengths in ((20, 6), (20, 1, 2, 3), (20, *[1] * 6)):
            kv, first, hidden = cache.allocate(26), 0, []
            for index, length in enumerate(lengths):
                batch = _batch([kv], [first], [length], index)
                batch = replace(batch, token_ids=ids[first : first + length])
                hidden.append(engine.model.forward(batch).clone())
                cache.end_pass([kv])
                first += length
            cache.free(kv)
            found.append(torch.cat(hidden[1:]))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("cuts", [(67,), (65, 67), (62, 63, 66)])
@pytest.mark.parametrize("family", [*WITH_STATES, *DENSE])
def test_rows_behind_a_copy_of_states_have_the_bits_of_a_pass_of_their_own(
    folders: dict[str, Path], family: str, cuts: tuple[int, ...], has_room: bool
) -> None:
    """So have the copies, in a short pass of a prompt, if there is room for any."""
    with opened(folders[family]) as engine, torch.inference_mode():
        cache, ids, found = engine.kv_cache, torch.arange(68) * 5 % 90, []
        for is_one_pass in (True, False):
            kv, first, hidden = cache.allocate(68), 0, []
            for stop in (60, 68) if is_one_pass else (60, *cuts, 68):
                batch = _batch([kv], [first], [stop - first], 0)
                [segment] = batch.segments
                inner = tuple(place for place in cuts if first < place < stop)
                kinds = np.full(stop - first, RowKind.PROMPT, np.uint8)
                rows = PassRows(np.zeros(stop - first, np.int64), kinds)
                kv.copies_due = dict.fromkeys(inner if has_room else (), False)
                batch = replace(
                    batch,
                    token_ids=ids[first:stop],
                    segments=(replace(segment, cuts=inner),),
                    step=replace(batch.step, rows=rows),
                )
                hidden.append(engine.model.forward(batch).clone())
                cache.end_pass([kv])
                if stop in cuts and has_room:
                    cache.snapshot(kv, may_drop=False)
                first = stop
            slots = kv.states.snapshots.values()
            copies = [states_of(cache).content(slot).clone() for slot in slots]
            assert [*kv.states.snapshots] == ([*cuts] if has_room else [])
            found.append([torch.cat(hidden), *copies])
            cache.free(kv)
        assert are_equal(*found)


@pytest.mark.parametrize("family", AT_ONCE)
def test_no_policy_is_asked_where_everything_is_resident(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was activated is counted all the same."""
    with opened(folders[family]) as engine:
        with one_by_one():
            before = engine.as_dict()["num_hits"]
            decoded(engine, 2)
            num_hits = engine.as_dict()["num_hits"] - before
        asked = rows_asked(monkeypatch)
        before = engine.as_dict()["num_hits"]
        decoded(engine, 2)
        assert set(asked) == {2 * PROMPT}  # prompts, not single rows
        assert engine.as_dict()["num_hits"] - before == num_hits


def test_an_observer_sees_what_it_would_one_by_one(folders: dict[str, Path]) -> None:
    with opened(folders["qwen2_moe"]) as engine:
        first, second = Observed(), Observed()
        engine.experts.observer = first
        decoded(engine, 2)
        engine.experts.observer = second
        with one_by_one():
            decoded(engine, 2)
        assert first.layers
        assert [each.layer for each in first.layers] == [each.layer for each in second.layers]
        for one, other in zip(first.layers, second.layers, strict=True):
            assert are_equal([one.x, *one.routing, one.out], [other.x, *other.routing, other.out])


@pytest.mark.parametrize("family", ["qwen2_moe", "bailing_moe_v2"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_nothing_is_read_that_is_not_alive(
    folders: dict[str, Path], family: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_poisoned(folders[family], share, monkeypatch)


def check_poisoned(
    path: Path, share: float, monkeypatch: pytest.MonkeyPatch, **options: object
) -> None:
    with opened(path, share, **options) as engine:
        expected = decoded(engine, 2)
    monkeypatch.setattr("lowtide.engine.running.pass_room.Workspace", PoisonedWorkspace)
    with opened(path, share, **options) as engine:
        assert isinstance(engine.model.compute.workspace, PoisonedWorkspace)
        assert are_equal(decoded(engine, 2), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe_lite"])
def test_reads_ahead_change_no_bit_and_evict_nobody(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With and without a shared expert, and behind a dense layer."""
    found, counts = [], []
    for is_on in (False, True):
        both = property(lambda self, is_on=is_on: is_on, lambda self, value: None)
        monkeypatch.setattr(AheadTrial, "is_on", both, raising=False)
        with opened(folders[family], 0.3, policy="lru") as engine:
            if not engine.experts.host.transfer.compiled.is_direct:
                pytest.skip("this disk has no direct reads")
            found.append([row for _ in range(6) for row in decoded(engine, 1)])
            counts.append(engine.as_dict())
    assert are_equal(*found)
    off, on = counts
    assert off["num_ahead"] == off["num_late"] == off["num_wasted"] == 0
    assert on["num_ahead"] > 0 and on["num_late"] <= on["num_ahead"]
    for name in ("num_hits", "num_misses", "num_admitted", "num_evicted"):
        assert on[name] == off[name], name
    if not on["num_wasted"]:
        assert on["read_bytes"] == off["read_bytes"]


def test_all_layers_are_one_call_where_no_policy_is_asked(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of as many rows compute in the memory that the first of them drew.

    Layer by layer has the same bits, and counts the same experts.
    """
    with opened(folders["qwen2_moe"]) as engine:
        expected, before = decoded(engine, 2), engine.as_dict()["num_hits"]
        forward, asked = WholeLayer.forward, []
        begin, begun = ShortPass.begin, list[ShortPass]()

        def noting(layer: WholeLayer, few: ShortPass, batch: Batch) -> None:
            asked.append(few)
            forward(layer, few, batch)

        def noted(few: ShortPass, *given: Any) -> None:
            begun.append(few)
            begin(few, *given)

        monkeypatch.setattr(WholeLayer, "forward", noting)
        monkeypatch.setattr(ShortPass, "begin", noted)
        assert are_equal(decoded(engine, 2), expected)
        assert not asked and len(begun) == 3 and len({*map(id, begun)}) == 1
        num_hits = engine.as_dict()["num_hits"] - before
        monkeypatch.setattr(WholeModel, "run", lambda self, short: False)
        assert are_equal(decoded(engine, 2), expected)
        assert asked
        assert engine.as_dict()["num_hits"] - before == 2 * num_hits


def test_logits_of_few_rows_are_of_no_more(folders: dict[str, Path]) -> None:
    """Where products are compiled, one row's logits are those that it has beside others."""
    with opened(folders["qwen3_moe"]) as engine, torch.inference_mode():
        hidden = decoded(engine, 3)[-1]
        assert not engine.model.mixes_rows(hidden)
        together = engine.model.logits(hidden).clone()
        for row in range(3):
            assert torch.equal(engine.model.logits(hidden[row : row + 1])[0], together[row])
        assert engine.model.mixes_rows(hidden.float())


# Experts whose rows were routed elsewhere


def gpt_oss(folder: Path, is_packed: bool, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Tiny; its experts in MXFP4 or in `dtype`."""
    seed, changes = 0 if is_packed else 1, {"num_local_experts": 16, "num_hidden_layers": 3}
    return write_model("gpt_oss", seed, folder, dtype, **changes).folder


@contextmanager
def decided_in_python() -> Iterator[None]:
    """Policies are asked of each layer, and each expert is run for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledResidents, "takes", lambda self, call: False)
        patch.setattr(BatchedExperts, "takes_experts", lambda self, num_tokens: num_tokens < 0)
        yield


@pytest.mark.parametrize("policy", ["lru", "lowtide", "static"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["MXFP4", "bfloat16"])
def test_experts_behind_torchs_router(
    tmp_path: Path, is_packed: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absent experts change no bit.

    Nor does a compiled call change the hits and their consequences, by the same costs: `lowtide`
    measures them.
    """
    # A clock by which reads always take as long.
    monkeypatch.setattr(policy_setting, "perf_counter", count(0, 8e-3).__next__)
    monkeypatch.setattr(policy_setting, "measure_device_s", lambda *_: Curve([(1, 1e-4)]))
    folder, found, counts = gpt_oss(tmp_path / "model", is_packed), [], []
    for share in (1.0, 0.3):
        for is_compiled in (False, True):
            with nullcontext() if is_compiled else decided_in_python():
                with opened(folder, share, policy=policy) as engine:
                    found.append([*decoded(engine, 1), *decoded(engine, 3)])
                    counts.append(engine.as_dict())
    assert all(are_equal(each, found[0]) for each in found)
    names = ("num_hits", "num_misses", "num_admitted", "num_evicted", "read_bytes")
    for in_python, compiled in (counts[:2], counts[2:]):
        assert [in_python[name] for name in names] == [compiled[name] for name in names]
    assert counts[0]["num_misses"] < counts[2]["num_misses"]


def test_experts_behind_torchs_router_are_compiled_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    decide = Policies.decide

    def noting(policies: Policies, facts: Facts, run: Facts | None = None) -> Decision:
        asked.append(int(facts.demand.num_tokens.sum()))
        return decide(policies, facts, run)

    monkeypatch.setattr(Policies, "decide", noting)
    with opened(gpt_oss(tmp_path / "model", True), 0.3, policy="lru") as engine:
        num_chosen = engine.model.config.moe_shape.num_experts_per_token
        decoded(engine, 2, prompt=PROMPT)
        assert set(asked) == {2 * PROMPT * num_chosen}  # prompts, not single rows
        asked.clear()
        engine.experts.observer = Observed()
        decoded(engine, 2, prompt=PROMPT)
        assert set(asked) == {2 * PROMPT * num_chosen, 2 * num_chosen}


def test_an_interrupt_while_experts_behind_torchs_router_are_read(tmp_path: Path) -> None:
    """Experts that are stored in another type are read by Python, which compiled calls ask."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(gpt_oss(tmp_path / "model", False, torch.float16), 0.3, policy="lru") as engine:
        expected = decoded(engine, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.experts.host.transfer, "start", interrupt)
            with pytest.raises(KeyboardInterrupt):
                decoded(engine, 1)
        ledger = engine.experts.host.ledger
        assert ledger.num_free + ledger.num_resident == ledger.num_slots
        assert are_equal(decoded(engine, 1), expected)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_delta_nets_of_gguf_files_have_the_bits_of_one_by_one(tmp_path: Path, family: str) -> None:
    """Value heads are tiled, or strengths and decays alone are one product; weights are packed."""
    path = tmp_path / "model.gguf"

    def choose(name: str, shape: tuple[int, ...]) -> Type:
        return Type.Q8_0 if shape[-1] % 32 == 0 and "gate_inp" not in name else Type.F32

    write_hybrid(path, family, random_model(family, 1), choose)
    with opened(path) as engine:
        for shape in ((1, 1), (3, 1), (2, 5)):
            with one_by_one():
                expected = decoded(engine, *shape)
            with calls_counted() as counts:
                assert are_equal(decoded(engine, *shape), expected)
            assert counts[1:] == [1, 1, 1]


# Formats


def test_absent_experts_in_fp8_are_read_in_the_call_over_all_layers(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = write_rounded(folders["qwen3_moe"], tmp_path, "fp8")
    with opened(folder) as engine, one_by_one():
        expected = decoded(engine, 3)
    run, were_run = WholeModel.run, []

    def noting(layers: WholeModel, few: ShortPass) -> bool:
        were_run.append(run(layers, few))
        return were_run[-1]

    monkeypatch.setattr(WholeModel, "run", noting)
    with opened(folder, 0.3, policy="lru") as engine:
        assert are_equal(decoded(engine, 3), expected)
        assert engine.as_dict()["num_misses"] > 0
    assert were_run == [True] * 3
