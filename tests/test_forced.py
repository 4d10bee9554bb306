"""A text that is read goes through the passes that would have written it, against oracles."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from common.glm4 import block_causal_mask
from family_models import CAUSAL, MASKED, write_model
from oracle import GOLDENS, load_oracle
from torch import Tensor
from whole import Observed

from lowtide import LLM, SamplingParams
from lowtide.core import StepKind
from lowtide.decode.forced import ForcedText
from lowtide.engine.running import forcing
from lowtide.errors import PlanError, UsageError
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth

BLOCKS = GOLDENS / "llada2-a"
TOLERANCE = 2e-4


class Kept:
    """Keeps the logits that were handed out, by mask and position."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Tensor] = {}

    def __call__(self, mask: int, positions: Any, logits: Tensor) -> None:
        for position, row in zip(positions.tolist(), logits, strict=True):
            assert (mask, position) not in self.rows
            self.rows[mask, position] = row.clone()


def read(llm: LLM, text: ForcedText) -> Kept:
    kept = Kept()
    llm.read(text, kept)
    return kept


def near(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


def some_ids(num_tokens: int, vocab: int = 96) -> list[int]:
    return np.random.default_rng(1).integers(3, vocab, num_tokens).tolist()


def masks(num_tokens: int, num_context: int, *shares: float) -> tuple[Any, ...]:
    order = np.random.default_rng(2).permutation(num_tokens)
    made = []
    for share in shares:
        mask = order < share * num_tokens
        mask[:num_context] = False
        made.append(mask)
    return tuple(made)


@pytest.mark.parametrize("family", CAUSAL)
def test_the_logits_of_an_autoregressive_text_are_those_of_transformers(
    tmp_path: Path, family: str
) -> None:
    model = write_model(family, 3, tmp_path / "model")
    ids = some_ids(40)
    wanted = model.oracle(ids)
    with LLM(model.folder, context=64) as llm:
        kept = read(llm, ForcedText(ids, 10))
    assert sorted(kept.rows) == [(0, position) for position in range(11, 40)]
    for (_, position), row in kept.rows.items():
        assert near(row, wanted[position - 1])


def test_a_text_takes_the_very_passes_that_wrote_it(tmp_path: Path) -> None:
    folder = synth("qwen3_moe", "tiny", tmp_path / "model")
    prompt = some_ids(30)
    least = plan_model(folder, context=128).minimum_bytes
    with LLM(folder, context=128, host_memory=least, policy="tide") as llm:
        with llm.observed(written := Observed()):
            [answer] = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
        llm.adopt_policy("tide")
        with llm.observed(forced := Observed()):
            kept = read(llm, ForcedText([*prompt, *answer.token_ids], 30))
    assert len(written.layers) == len(forced.layers)
    for one, other in zip(written.layers, forced.layers, strict=True):
        assert one[:2] == other[:2]
        assert torch.equal(one.routing.experts, other.routing.experts)
        assert torch.equal(one.out, other.out)
    kinds = {seen.step.kind for seen in forced.layers}
    assert kinds == {StepKind.PREFILL, StepKind.DECODE}
    for (_, position), row in kept.rows.items():
        assert int(row.argmax()) == answer.token_ids[position - 30]


def test_a_block_is_read_over_its_prefix_with_fewer_and_fewer_masks() -> None:
    oracle, mask_id = load_oracle(BLOCKS), 383
    ids = some_ids(75, vocab=380)
    text = ForcedText(ids, 20, masks(75, 20, 1.0, 0.5, 0.1))
    with LLM(BLOCKS, context=128) as llm:
        length = llm.config.decoding.block_length
        with llm.observed(passes := Observed()):
            kept = read(llm, text)
    hidden = [(m, p) for m, mask in enumerate(text.masks) for p in np.flatnonzero(mask)]
    assert sorted(kept.rows) == sorted(hidden)
    for start in range(20 // length * length, 75, length):
        for index, mask in enumerate(text.masks):
            row = torch.full((start + length,), mask_id)
            row[: len(ids[: start + length])] = torch.tensor(ids[: start + length])
            for position in np.flatnonzero(mask[: start + length]):
                if position >= start:
                    row[position] = mask_id
            hidden_rows = block_causal_mask(0, start + length, length, torch.float32)
            with torch.inference_mode():
                wanted = oracle(row[None], attention_mask=hidden_rows).logits[0]
            for position in range(start, min(start + length, 75)):
                if mask[position]:
                    assert near(kept.rows[index, position], wanted[position])
    steps = [step for layer, step, *_ in passes.layers if layer == 0]
    assert {step.kind for step in steps} == {StepKind.DENOISE}
    num_blocks = -(-75 // length) - 20 // length
    assert [step.index for step in steps] == [0, 1, 2] * num_blocks
    assert [step.is_last for step in steps].index(True) == len(steps) - 1


@pytest.mark.parametrize("family", MASKED)
def test_a_bidirectional_text_is_read_whole(tmp_path: Path, family: str) -> None:
    model = write_model(family, 1, tmp_path / "model")
    ids = some_ids(24, vocab=80)
    text = ForcedText(ids, 6, masks(24, 6, 1.0, 0.3))
    with LLM(model.folder, context=64) as llm:
        kept, mask_id = read(llm, text), llm.config.decoding.mask_token_id
    for index, mask in enumerate(text.masks):
        wanted = model.oracle(np.where(mask, mask_id, ids).tolist())
        for position in np.flatnonzero(mask):
            assert near(kept.rows[index, position], wanted[position])
    assert len(kept.rows) == sum(mask.sum() for mask in text.masks)


def test_what_cannot_be_read_is_refused_and_the_model_goes_on(tmp_path: Path) -> None:
    ids = some_ids(40)
    with LLM(BLOCKS, context=64) as llm:
        for text, said in (
            (ForcedText(ids, 20), "Masks"),
            (ForcedText(ids, 0, masks(40, 0, 1.0)), "at least 1"),
            (ForcedText(ids, 40, masks(40, 40, 1.0)), "at least 1"),
            (ForcedText(ids, 20, masks(40, 10, 1.0)), "first 20"),
            (ForcedText([*ids[:-1], 384], 20, masks(40, 20, 1.0)), "384"),
        ):
            with pytest.raises(UsageError, match=said):
                read(llm, text)
        with pytest.raises(PlanError, match="context"):
            read(llm, ForcedText(some_ids(80), 20, masks(80, 20, 1.0)))

        def fail(mask: int, positions: Any, logits: Tensor) -> None:
            raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            llm.read(ForcedText(ids, 20, masks(40, 20, 1.0)), fail)
        [answer] = llm.generate([ids[:20]], SamplingParams(max_tokens=32, ignore_eos=True))
        assert len(answer.token_ids) == 32
    with LLM(synth("qwen3_moe", "tiny", tmp_path / "model"), context=64) as llm:
        for text, said in (
            (ForcedText(ids, 20, masks(40, 20, 1.0)), "Masks"),
            (ForcedText(ids, 39), "and 2 after"),
        ):
            with pytest.raises(UsageError, match=said):
                read(llm, text)


def test_what_looks_at_logits_is_not_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    day_s, away_s = 86_400.0, 0.0

    def look(mask: int, positions: Any, logits: Tensor) -> None:
        nonlocal away_s
        away_s += day_s

    monkeypatch.setattr(forcing, "perf_counter", lambda: away_s + perf_counter())
    text = ForcedText(some_ids(64), 32, masks(64, 32, 0.5))
    with LLM(BLOCKS, context=64) as llm:
        run = llm.read(text, look)
    assert run.num_passes == 1 and away_s >= day_s > run.seconds > 0
