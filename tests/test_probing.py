"""Logits of given tokens and experts of given rows: what is asked is checked before it is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from whole import Observed

from lowtide.core import Step, StepKind
from lowtide.errors import UsageError
from lowtide.experts.rows import Routing
from lowtide.llm import LLM
from lowtide.model_writing.synth import synth

STEP = Step(StepKind.DECODE, 0)


@pytest.fixture(scope="module", params=["cpu", "emulated"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("probing") / "model", seed=3)
    with LLM(folder, device=request.param, context=64) as llm:
        yield llm


def test_experts_give_what_an_observer_saw(llm: LLM) -> None:
    with llm.observed(seen := Observed()):
        llm.logits([5, 6, 7])
    for layer, _, x, routing, out in seen.layers:
        assert torch.equal(llm.run_experts(layer, x, routing, STEP), out)


class Wild(NamedTuple):
    """Difference from two good rows, and the message about it."""

    said: str
    given: dict[str, Any]


def ids(*values: int) -> torch.Tensor:
    """[2, k] int64."""
    return torch.tensor([values, values])


WILD = {
    "k of 100,000": Wild(
        r"experts must be \[2, \d\].*\[2, 100000\]",
        {"experts": torch.zeros(2, 100_000, dtype=torch.int64), "weights": torch.ones(2, 100_000)},
    ),
    "k of a million": Wild(
        r"\[2, 1000000\]",
        {"experts": torch.zeros(2, 10**6, dtype=torch.int64), "weights": torch.ones(2, 10**6)},
    ),
    "k of 4096": Wild(r"\[2, 4096\]", {"experts": ids(*range(4096))}),
    "wide rows": Wild(r"x must be \[rows, 64\].*\[2, 4096\]", {"x": torch.ones(2, 64 * 64)}),
    "one row, two routed": Wild(r"experts must be \[1, .*\[2, ", {"x": torch.ones(1, 64)}),
    "no rows": Wild("1 to 512 rows", {"x": torch.ones(0, 64)}),
    "too many rows": Wild("1 to 512 rows", {"x": torch.ones(513, 64)}),
    "flat rows": Wild(r"\[64\]", {"x": torch.ones(64)}),
    "a number": Wild("x must be .* not Tensor|x must be", {"x": torch.tensor(1.0)}),
    "no tensor": Wild("x must be a .* tensor .* not list", {"x": [[1.0] * 64] * 2}),
    "other dtype": Wild("x must be bfloat16, not torch.int64", {"x": torch.ones(2, 64).long()}),
    "few weights": Wild(r"weights must be .*\[1, ", {"weights": torch.ones(1, 8)}),
    "double weights": Wild("weights must be float32", {"weights": torch.ones(2, 8).double()}),
    "float ids": Wild("experts must be int64", {"experts": torch.ones(2, 8)}),
    "expert of a million": Wild("Expert 1000000 is not one of 0 to", {"last": 10**6}),
    "expert -1": Wild("Expert -1 is not one of 0 to", {"first": -1}),
    "an expert twice": Wild("ascend", {"last": 1}),
    "layer 99": Wild("layer 99 is not a MoE layer: they are 0 to", {"layer": 99}),
    "layer -1": Wild("layer -1 is not a MoE layer", {"layer": -1}),
    "layer true": Wild("layer True", {"layer": True}),
    "layer 1.0": Wild(r"layer 1\.0", {"layer": 1.0}),
    "a pair for a routing": Wild("routing must be a Routing, not tuple", {"routing": (1, 2)}),
    "no step": Wild("step must be a Step, not 3", {"step": 3}),
}


@pytest.mark.parametrize("name", WILD)
def test_wild_rows_are_refused_with_the_numbers(llm: LLM, name: str) -> None:
    said, given = WILD[name]
    num_chosen = llm.config.moe.num_experts_per_token
    experts = ids(*range(num_chosen))
    experts[0, 0] = given.get("first", 0)
    experts[0, -1] = given.get("last", num_chosen - 1)
    weights = torch.ones(2, num_chosen)
    if "weights" in given:
        weights = given["weights"][:, :num_chosen] if len(given) == 1 else given["weights"]
    x = given.get("x", torch.ones(2, llm.config.hidden_size))
    if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
        x = x.to(torch.bfloat16)
    routing = given.get("routing", Routing(given.get("experts", experts), weights))
    with pytest.raises(UsageError, match=said):
        llm.run_experts(given.get("layer", 0), x, routing, given.get("step", STEP))
