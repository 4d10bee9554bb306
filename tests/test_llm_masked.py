"""The whole engine on bidirectional models: streamed goldens, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from masked_oracle import golden_cases
from oracle import GOLDENS

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.config import format_size
from lowtide.decode.request import Committed, Draft, Finished
from lowtide.errors import PlanError, UnsupportedError, UsageError
from lowtide.llm import check_request, plan_model

NAMES = ["llada-a", "llada-moe-a", "dream-a"]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    with LLM(GOLDENS / name) as llm:
        yield llm


def params_of(case: dict) -> SamplingParams:
    given = case["params"]
    names = ("steps", "block_length", "cfg_scale", "threshold", "remasking", "eps")
    asked = {name: given[name] for name in names if name in given}
    if "alg" in given:
        asked["remasking"] = given["alg"]
    if asked.get("remasking") == "confidence_threshold":
        del asked["eps"]
    return SamplingParams(max_tokens=given["gen_length"], diffusion=DiffusionParams(**asked))


def test_goldens_streamed(name, llm) -> None:
    """Drafts are the published trajectory; committed tokens are the answer, in pieces."""
    for case in golden_cases(name):
        prompt, params = case["prompt"], params_of(case)
        row = [*prompt, *[case["params"]["mask_id"]] * params.max_tokens]
        rows, committed = [list(row)], []
        for event in llm.stream(prompt, params):
            if isinstance(event, Draft):
                row[event.block_start : event.block_start + len(event.tokens)] = event.tokens
                rows.append(list(row))
            if isinstance(event, Committed):
                committed += event.tokens
        assert (rows if name == "dream-a" else rows[:-1]) == case["trajectory"]
        assert isinstance(event, Finished) and list(event.token_ids) == committed == case["output"]
        assert event.finish_reason == "length" and event.num_forwards == len(rows) - 1


def test_an_answer_ends_at_its_end_token(name) -> None:
    """A token from the golden's middle is made the end: the answer is cut after its first."""
    case = golden_cases(name)[0]
    end = case["output"][len(case["output"]) // 2]
    expected = case["output"][: case["output"].index(end) + 1]
    with LLM(GOLDENS / name, config_overrides={"eos_token_id": end}) as llm:
        params = params_of(case)
        [late] = llm.generate([case["prompt"]], params)
        early_stop = replace(params.diffusion, eos_early_stop=True)
        [early] = llm.generate([case["prompt"]], replace(params, diffusion=early_stop))
        [whole] = llm.generate([case["prompt"]], replace(params, ignore_eos=True))
    assert late.token_ids == early.token_ids == expected
    assert late.finish_reason == early.finish_reason == "stop"
    assert early.usage.forwards <= late.usage.forwards
    assert whole.token_ids == case["output"] and whole.finish_reason == "length"


def test_contradictions_are_refused_before_loading(name) -> None:
    params = SamplingParams(max_tokens=32, diffusion=DiffusionParams(block_length=7))
    with pytest.raises(UsageError, match="`block_length` 7 does not divide `max_tokens` 32"):
        check_request(GOLDENS / name, lambda _: [1, 2], params)


def test_what_does_not_fit_is_refused_before_it_starts(name) -> None:
    folder: Path = GOLDENS / name
    with pytest.raises(PlanError, match="context is 64"):
        check_request(folder, lambda _: [1, 2], SamplingParams(max_tokens=100), context=64)
    guided = SamplingParams(max_tokens=40, diffusion=DiffusionParams(cfg_scale=1.0))
    with pytest.raises(PlanError, match="computed twice for guidance.* raise it to 96"):
        check_request(folder, lambda _: [1, 2], guided, context=64)
    with LLM(folder, context=96) as llm:
        [completion] = llm.generate([[1, 2]], guided)
        assert len(completion.token_ids) == 40


@pytest.mark.parametrize(
    "diffusion",
    [
        {"remasking": "entropy"},
        {"remasking": "random"},
        {"eps": 0.1},
        {"alg_temp": 0.1},
        {"factor": 1.0},
        {"cfg_scale": 1.0},
    ],
)
def test_block_diffusion_refuses_what_is_not_its_own(diffusion) -> None:
    params = SamplingParams(max_tokens=32, diffusion=DiffusionParams(**diffusion))
    [named] = diffusion
    with pytest.raises(UnsupportedError, match=named):
        check_request(GOLDENS / "llada2-a", lambda _: [1, 2], params)


# Beside other requests products have other numbers of rows and round elsewhere in bfloat16, whose
# values are 2^-8 apart: two such roundings. Alone a pass has the rows that `logits` has.
ALONE, IN_COMPANY = 1e-3, 2.0**-7


@pytest.mark.parametrize("golden", NAMES)
@pytest.mark.parametrize(
    ("indices", "margin"), [((0,), ALONE), ((1,), ALONE), ((0, 1), IN_COMPANY)]
)
def test_bfloat16_decides_by_its_own_logits(golden, indices, margin) -> None:
    """The written tokens are the surest arg-maxes of `logits`, but for ties."""
    cases = [golden_cases(golden)[index] for index in indices]
    asked, drafts = [params_of(case) for case in cases], [[] for _ in cases]
    with LLM(GOLDENS / golden, dtype="bfloat16") as llm:

        def note(event) -> None:
            if isinstance(event, Draft):
                drafts[event.request].append(event)

        llm.generate([case["prompt"] for case in cases], asked, on_event=note)
        for case, params, own in zip(cases, asked, drafts, strict=True):
            row = torch.tensor(case["trajectory"][0])
            for draft in own:
                block = slice(draft.block_start, draft.block_start + len(draft.tokens))
                is_masked = row[block] == case["params"]["mask_id"]
                probabilities = llm.logits(row.tolist())[block].double().softmax(-1)
                after = torch.tensor(draft.tokens)
                is_written = is_masked & ~torch.tensor(draft.is_masked)
                check_written(probabilities, after, is_written, is_masked, params.diffusion, margin)
                row[block] = after


def check_written(
    probabilities: torch.Tensor,
    after: torch.Tensor,
    is_written: torch.Tensor,
    is_masked: torch.Tensor,
    diffusion: DiffusionParams,
    margin: float,
) -> None:
    best = probabilities.max(-1).values
    own = probabilities.gather(-1, after[:, None])[:, 0]
    assert (own >= best - margin)[is_written].all()
    confidence = best
    if diffusion.remasking == "entropy":
        confidence = torch.special.entr(probabilities).sum(-1).neg()
    if is_written.any() and (is_masked & ~is_written).any():
        waiting = confidence[is_masked & ~is_written]
        assert confidence[is_written].min() >= waiting.max() - margin


def test_an_end_that_is_ignored_cannot_come_early(name) -> None:
    diffusion = DiffusionParams(eos_early_stop=True)
    params = SamplingParams(max_tokens=32, ignore_eos=True, diffusion=diffusion)
    for model in (GOLDENS / name, GOLDENS / "llada2-a"):
        with pytest.raises(
            UsageError, match="`eos_early_stop` .* `ignore_eos` .* leave one of them"
        ):
            check_request(model, lambda _: [1, 2], params)


def shorter(name: str, max_positions: int) -> dict[str, int]:
    key = "max_sequence_length" if name == "llada-a" else "max_position_embeddings"
    return {key: max_positions}


def test_texts_beyond_the_models_length_are_computed_as_published(
    name, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; the published code has no bound, and gives the same tokens."""
    case = golden_cases(name)[1]
    with LLM(GOLDENS / name, config_overrides=shorter(name, 50), context=96) as llm:
        for _ in range(2):
            [completion] = llm.generate([case["prompt"]], params_of(case))
            assert completion.token_ids == case["output"]
        architecture = llm.config.architecture
        [said] = [message for message in caplog.messages if "up to 50 tokens" in message]
        assert said.startswith(f"{architecture} was made for texts of up to 50 tokens")
        with pytest.raises(PlanError, match="the context is 96"):
            llm.generate([[1] * 90], SamplingParams(max_tokens=7))


def test_texts_beyond_the_positions_of_other_models_are_refused() -> None:
    overrides = shorter("llada2-a", 50)
    with pytest.raises(PlanError, match="40 prompt tokens and 11 new ones .* 50 positions"):
        check_request(
            GOLDENS / "llada2-a",
            lambda _: [1] * 40,
            SamplingParams(max_tokens=11),
            config_overrides=overrides,
            context=96,
        )


def test_a_budget_below_what_cannot_be_divided_is_refused_with_the_numbers(name) -> None:
    """The least budget is that of one whole context's pass, every operator a tile at a time."""
    folder, context = GOLDENS / name, 2048
    plan = plan_model(folder, context=context)
    with pytest.raises(PlanError) as refused:
        LLM(folder, context=context, host_memory=plan.minimum_bytes - 1)
    said = str(refused.value)
    assert f"{plan.minimum_bytes} bytes" in said and "lower `context`" in said
    least = plan_model(folder, context=context, host_memory=plan.minimum_bytes)
    workspace = format_size(least.host.workspace_bytes)
    assert f"workspace for a context of {context} tokens {workspace}" in said
    assert "KV cache" not in said  # there is none
    shorter = plan_model(folder, context=context // 4, host_memory=plan.minimum_bytes - 1)
    assert shorter.minimum_bytes < plan.minimum_bytes
