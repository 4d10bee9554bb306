"""Room that shrinks and grows while a model runs beside a device: layers give experts up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from inside import engine_of
from whole import settle

from lowtide import LLM, SamplingParams
from lowtide.experts.capacity import Capacity

MODEL = Path(__file__).parent / "goldens" / "llada2-a"
PROMPT = [7, 3, 20, 9, 4]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def answer(llm: LLM) -> tuple[list[int], torch.Tensor]:
    [completion] = llm.generate([PROMPT], PARAMS)
    found = completion.token_ids, llm.logits([*PROMPT, *completion.token_ids])
    settle(llm)
    return found


def num_residents(llm: LLM) -> list[int]:
    device = engine_of(llm).experts.device
    device.link.bind_arrived()
    ledger = device.link.ledger
    return [int(ledger.is_resident(layer).sum()) for layer in range(ledger.num_layers)]


def test_layers_that_have_all_their_experts_give_some_up_and_get_them_back() -> None:
    with LLM(MODEL, device="emulated", context=128) as llm:
        experts, config = engine_of(llm).experts, llm.config
        everybody = [config.moe.num_experts] * len(config.moe_layers)
        ids, logits = answer(llm)
        assert num_residents(llm) == everybody and llm.stats()["num_misses"] == 0
        for capacity in ([3] * len(everybody), [everybody[0], *[0] * (len(everybody) - 1)]):
            experts.capacity.change(np.array(capacity))
            found = answer(llm)
            assert found[0] == ids and torch.equal(found[1], logits)
            assert all(n <= room for n, room in zip(num_residents(llm), capacity, strict=True))
            assert llm.stats()["num_misses"] > 0
        experts.capacity.change(np.array(everybody))
        for _ in range(20):
            found = answer(llm)
            assert found[0] == ids and torch.equal(found[1], logits)
            if num_residents(llm) == everybody:
                break
        num_misses = llm.stats()["num_misses"]
        answer(llm)
        assert num_residents(llm) == everybody and llm.stats()["num_misses"] == num_misses


def test_a_layer_is_short_of_what_it_once_had_or_where_there_are_too_many_in_all() -> None:
    capacity = Capacity(np.array([4, 4]))
    # A policy gave the first layer all of them: nobody has to go.
    assert not capacity.is_short(0, 8) and not capacity.is_short(1, 8)
    capacity.change(np.array([4, 2]))
    assert capacity.is_short(0, 8) and not capacity.is_short(0, 6) and capacity.is_short(1, 6)
    capacity.change(np.array([8, 4]))
    assert not capacity.is_short(0, 8) and not capacity.is_short(1, 8)
    capacity.change(np.array([6, 4]))
    assert capacity.is_short(0, 8) and not capacity.is_short(1, 8)
