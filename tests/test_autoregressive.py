"""The autoregressive decoder and engine, against hashes and against transformers.

The decoder runs over a model of hashes (exact, so everything is compared exactly); the whole engine
is compared with transformers' own generation on small checkpoints of the Ling body.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from examples import scaled
from hash_model import EOS, VOCAB, HashModel, is_all_free, make_kv_cache
from hypothesis import given
from hypothesis import strategies as st
from kind_decoders import causal_decoder
from oracle import GOLDENS
from stop_strings import cut_at_stop
from test_llm_oracle import open_oracle, random_config, random_weights, write_model
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor
from whole import SETTINGS, Setting, check_idle, decoded, make_request, own_events

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.cli.text import TextWriter
from lowtide.core import StepKind
from lowtide.decode.penalties import penalise
from lowtide.decode.request import Committed, Event, Finished, Prefill, Request
from lowtide.errors import (
    PlanError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from lowtide.llm import plan_model
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.model_writing.synth_tokenizer import tokenizer_json
from lowtide.parsing.answer_pieces import AnswerPieces, CompletionTest, PlainText
from lowtide.parsing.pieces import Text, joined

# The decoder, over hashes


class Run:
    """A finished run over a `HashModel`."""

    def __init__(
        self,
        requests: Iterable[Request],
        num_tokens: int = 512,
        max_rows: int = 64,
        use_kv_cache: bool = True,
    ) -> None:
        self.kv_cache = make_kv_cache(num_tokens)
        self.model = HashModel(self.kv_cache, max_rows)
        decoder = causal_decoder(self.model, self.kv_cache, max_rows, use_kv_cache)
        self.events = decoded(decoder, requests)
        self.finished = {e.request: e for e in self.events if isinstance(e, Finished)}

    def of(self, index: int) -> list[Event]:
        return own_events(self.events, index)


@st.composite
def requests(draw: st.DrawFn, index: int = 0) -> Request:
    return make_request(
        index,
        draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70)),
        eos_token_ids=draw(st.sampled_from([(), (EOS,), (EOS, 5)])),
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, 20)),
        ignore_eos=draw(st.booleans()),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 2.0])),
        top_k=draw(st.none() | st.integers(1, VOCAB)),
        top_p=draw(st.none() | st.floats(0.1, 1)),
        min_p=draw(st.none() | st.floats(0, 1)),
        repetition_penalty=draw(st.none() | st.floats(0.5, 2)),
        presence_penalty=draw(st.none() | st.floats(-2, 2)),
        frequency_penalty=draw(st.none() | st.floats(-2, 2)),
        logprobs=draw(st.sampled_from([None, None, 0, 3, 20])),
    )


batches = st.integers(1, 5).flatmap(lambda n: st.tuples(*(requests(i) for i in range(n))))


@given(batches, st.sampled_from([16, 33, 256]))
def test_recomputing_and_other_chunks_give_the_same(batch, max_rows) -> None:
    reference = Run(batch, max_rows=512)
    for use_kv_cache in (True, False):
        other = Run(batch, max_rows=max_rows, use_kv_cache=use_kv_cache)
        for request in batch:
            assert other.of(request.id) == reference.of(request.id)


@given(requests())
def test_every_pass_writes_a_token_with_its_log_probabilities(request) -> None:
    run = Run([request])
    finished = run.finished[0]
    committed = [e for e in run.events if isinstance(e, Committed)]
    assert [len(event.tokens) for event in committed] == [1] * finished.num_forwards
    logprobs = tuple(row for event in committed for row in event.logprobs)
    assert logprobs == finished.logprobs
    if request.params.logprobs is None:
        assert not logprobs
    else:
        assert tuple(row.token_id for row in logprobs) == finished.token_ids
        for row in logprobs:
            values = [value for _, value in row.top]
            assert len(values) == min(request.params.logprobs, VOCAB)
            assert values == sorted(values, reverse=True) and max([row.logprob, *values]) <= 0


def test_a_pass_feeds_one_token_per_sequence_and_counts_decoding_only() -> None:
    run = Run([make_request(index, range(10), max_tokens=4) for index in range(3)])
    assert run.model.rows == [30, 3, 3, 3]
    kinds = [StepKind.PREFILL] + 3 * [StepKind.DECODE]
    assert [step.kind for step in run.model.steps] == kinds
    assert [step.index for step in run.model.steps] == [0, 0, 1, 2]


def test_a_long_prompt_is_fed_in_chunks() -> None:
    run = Run([make_request(prompt=np.arange(150) % VOCAB, max_tokens=3)], max_rows=70)
    assert run.model.rows == [64, 64, 22, 1, 1]
    prefills = [event for event in run.events if isinstance(event, Prefill)]
    assert prefills == [Prefill(0, 64, 150), Prefill(0, 128, 150)]
    assert [step.index for step in run.model.steps] == [0, 0, 0, 0, 1]


def test_a_long_prompt_starves_no_answer_and_prompts_end_one_by_one() -> None:
    kv_cache = make_kv_cache(1024)
    model = HashModel(kv_cache, 64)
    decoder = causal_decoder(model, kv_cache, 64)
    decoder.add(make_request(0, max_tokens=30))
    events = decoder.step()
    for index in (1, 2):
        decoder.add(make_request(index, np.arange(200) % VOCAB, max_tokens=5))
    for _ in range(8):
        events += decoder.step()
    of_first = [e for e in events if isinstance(e, Committed) and e.request == 0]
    assert len(of_first) == 9
    assert all(step.kind is StepKind.DECODE for step in model.steps[1:])
    assert model.rows[1:6] == [49, 49, 49, 57, 50]
    assert [e.request for e in events if isinstance(e, Prefill)] == [1, 1, 1, 2, 2, 2]
    decoder.close()
    assert is_all_free(kv_cache)


def test_free_tokens_in_pieces_are_room_too() -> None:
    lengths = [5, 40, 5, 29]  # new tokens; the last needs the room that the first and third had
    requests = [make_request(index, max_tokens=length) for index, length in enumerate(lengths)]
    run = Run(requests, num_tokens=80)
    joined = next(i for i, event in enumerate(run.events) if event.request == 3)
    assert joined < run.events.index(run.finished[1])
    for request in requests:
        assert run.of(request.id) == Run([request]).of(request.id)


def test_a_stop_is_asked_for_after_every_token() -> None:
    asked = []

    def is_stopped(tokens: Sequence[int]) -> bool:
        asked.append(list(tokens))
        return len(tokens) >= 5

    run = Run([make_request(max_tokens=30, is_stopped=is_stopped)])
    assert [len(tokens) for tokens in asked] == [1, 2, 3, 4, 5]
    assert run.finished[0].finish_reason == "stop"
    assert list(run.finished[0].token_ids) == asked[-1]


# Penalties and log-probabilities


@given(st.integers(0, 100), st.floats(0.1, 3), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties(seed, repetition, presence, frequency) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(VOCAB, generator=generator)
    tokens = torch.randint(VOCAB, (15,), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(repetition)(tokens[None], logits[None].clone())[0]
    for token in range(VOCAB):
        num_uses = tokens[6:].tolist().count(token)
        expected[token] -= presence * (num_uses > 0) + frequency * num_uses
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    penalise(logits, tokens.numpy(), 6, params)
    torch.testing.assert_close(logits, expected)


def test_logprobs_are_the_models_own() -> None:
    """Neither temperature nor penalties nor filters change them."""
    plain = make_request(max_tokens=1, logprobs=20)
    changed = make_request(
        max_tokens=1, logprobs=20, temperature=5.0, repetition_penalty=3.0, min_p=0.5, top_k=3
    )
    [row], [other] = (Run([request]).finished[0].logprobs for request in (plain, changed))
    assert row.top == other.top and row.token_id == row.top[0][0]
    assert dict(other.top)[other.token_id] == other.logprob
    np.testing.assert_allclose(sum(np.exp(value) for _, value in row.top), 1, rtol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"presence_penalty": -3.0},
        {"frequency_penalty": "1"},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
    ],
)
def test_parameters_out_of_range_are_refused(wrong) -> None:
    [name] = wrong
    with pytest.raises(UsageError, match=name):
        SamplingParams(**wrong)


# Text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_json(1000)), {}, None)


TEXTS = st.text(st.sampled_from("ab \nédef日本🦊()"), max_size=30)


@given(TEXTS, st.lists(st.text("ab\né日🦊", min_size=1, max_size=4), min_size=1, max_size=2))
def test_stop_strings_are_found_across_token_borders(tokenizer, text, stop) -> None:
    token_ids = tokenizer.encode(text)
    is_stopped = CompletionTest(AnswerPieces(PlainText(tokenizer), stop))
    found = [is_stopped(token_ids[: n + 1]) for n in range(len(token_ids))]
    expected = [
        any(string in tokenizer.decode(token_ids[: n + 1]) for string in stop)
        for n in range(len(token_ids))
    ]
    if True in expected:  # a decoder goes no further
        assert found.index(True) == expected.index(True)
    else:
        assert True not in found


@given(TEXTS, st.lists(st.text("ab\né日🦊", min_size=1, max_size=4), max_size=2))
def test_streamed_text_is_whole_characters_up_to_the_stop(tokenizer, text, stop) -> None:
    token_ids = tokenizer.encode(text)
    expected = cut_at_stop(tokenizer.decode(token_ids), stop)
    out = io.StringIO()
    writer = TextWriter(out, True, is_terminal=False)
    pieces = AnswerPieces(PlainText(tokenizer), stop)
    for token in token_ids:
        writer.commit([token], joined(pieces.push([token]), Text))
        assert expected.startswith(out.getvalue())
    writer.finish(expected)
    assert out.getvalue() == expected + "\n"


# The whole engine


def ling_model(folder: Path, seed: int, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    config = random_config(seed) | {"architectures": ["BailingMoeV2ForCausalLM"]} | changes
    config.pop("mask_token_id")
    weights = random_weights(config, seed)
    write_model(folder, config, weights, "published")
    return config, weights


def random_prompt(pick: random.Random, config: dict[str, Any], max_length: int) -> list[int]:
    return [pick.randrange(config["vocab_size"]) for _ in range(pick.randint(1, max_length))]


@pytest.mark.parametrize("seed", range(scaled(10)))
def test_greedy_ids_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    config, weights = ling_model(tmp_path, seed)
    prompts = [random_prompt(pick, config, 30) for _ in range(2)]
    oracle = open_oracle(config, weights)
    generation = GenerationConfig(max_new_tokens=64, eos_token_id=48, pad_token_id=0)
    with Setting("tide", 0.3).open(tmp_path) as llm:
        completions = llm.generate(prompts, SamplingParams(max_tokens=64))
        check_idle(llm)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        expected = oracle.generate(
            ids, generation_config=generation, attention_mask=torch.ones_like(ids)
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        is_stop = completion.token_ids[-1] == 48
        assert completion.finish_reason == ("stop" if is_stop else "length")
        assert completion.usage.completion_tokens == completion.usage.forwards


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ling")
    ling_model(folder, 5, max_position_embeddings=1200, first_k_dense_replace=1, num_experts=8,
               n_group=2, topk_group=1, num_experts_per_tok=2)  # fmt: skip
    return folder


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of many kinds; one prompt is longer than a pass."""
    pick = random.Random(1)
    prompts = [[pick.randrange(48) for _ in range(n)] for n in (1, 7, 520, 40, 3)]
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, top_p=0.9, min_p=0.05),
        SamplingParams(max_tokens=6, ignore_eos=True),
        SamplingParams(max_tokens=25, temperature=0.7, seed=4, repetition_penalty=1.3),
        SamplingParams(max_tokens=17, frequency_penalty=0.5, presence_penalty=0.2, logprobs=2),
    ]
    return prompts, params


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Each request alone, everything resident."""
    prompts, params = asked()
    with LLM(model, policy="resident") as llm:
        return [
            llm.generate([prompt], [each])[0].token_ids
            for prompt, each in zip(prompts, params, strict=True)
        ]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_ids_are_the_same_at_any_budget_and_in_a_batch(model, expected, setting) -> None:
    with setting.open(model) as llm:
        for _ in range(2):
            answers = [completion.token_ids for completion in llm.generate(*asked())]
            assert answers == expected
            check_idle(llm)


def test_recomputing_everything_gives_the_same(model, expected) -> None:
    with LLM(model, kv_cache=False) as llm:
        assert [completion.token_ids for completion in llm.generate(*asked())] == expected


def test_requests_share_the_context_or_wait(model, expected) -> None:
    with LLM(model, context=544) as llm:
        assert [completion.token_ids for completion in llm.generate(*asked())] == expected
        check_idle(llm)


def test_logprobs_belong_to_the_completion(model) -> None:
    params = SamplingParams(max_tokens=4, logprobs=3, ignore_eos=True)
    with LLM(model) as llm:
        [completion] = llm.generate([[5, 6, 7]], params)
        logits = llm.logits([5, 6, 7, *completion.token_ids])
        [without] = llm.generate([[5, 6, 7]], max_tokens=4)
    assert without.logprobs is None and completion.logprobs is not None
    expected = logits.log_softmax(-1)[2:6]
    for row, logprobs in zip(expected, completion.logprobs, strict=True):
        assert [token for token, _ in logprobs.top] == row.topk(3).indices.tolist()
        assert logprobs.logprob == pytest.approx(float(row.max()), abs=1e-4)


def test_what_the_model_cannot_honour_is_refused_by_name(model) -> None:
    blocks = DiffusionParams(steps=4, eos_early_stop=False)
    with LLM(model, context=100) as llm:
        with pytest.raises(
            UnsupportedError,
            match="`steps`, `eos_early_stop` are for diffusion models; BailingMoeV2",
        ):
            llm.generate([[1]], SamplingParams(diffusion=blocks))
        with pytest.raises(PlanError, match="60 prompt tokens and 41 new .* need 101 .* is 100"):
            llm.generate([[1] * 60], SamplingParams(max_tokens=41))
        with pytest.raises(PlanError, match="the context is 100"):
            llm.logits([1] * 101)
        with pytest.raises(UsageError, match="no tokenizer"):
            llm.generate([[1]], SamplingParams(max_tokens=5, stop=["x"]))
        with pytest.raises(UsageError, match="2 prompts and 1 parameters"):
            llm.generate([[1], [2]], [SamplingParams(max_tokens=5)])
        check_idle(llm)
    with pytest.raises(UnsupportedError, match="`block_length` 4"):
        LLM(model, block_length=4)


def test_a_model_that_this_machine_cannot_hold_now_is_planned_not_loaded(
    model, monkeypatch
) -> None:
    monkeypatch.setattr("lowtide.engine.planning.plan.available_memory_bytes", lambda: 1 << 16)
    plan = plan_model(model)
    least_bytes = plan.minimum_bytes
    assert "MiB of memory are needed, and 64.0 KiB" in plan.reason
    with pytest.raises(PlanError, match=r"MiB of memory are needed, and 64.0 KiB .*`context`"):
        LLM(model)
    with LLM(model, host_memory=least_bytes) as llm:  # the user's own word
        assert llm.plan.host.budget_bytes == least_bytes


def test_a_plan_refuses_a_calibration_as_loading_does(model, tmp_path) -> None:
    with pytest.raises(StorageError, match="Calibration .*absent is missing"):
        plan_model(model, calibration=str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="lowtide calibrate"):
        plan_model(model, policy="tide", policy_options={"tau": "paper"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", None),
        ("device_options", [1]),
        ("policy_options", "tau=4"),
        ("config_overrides", 3),
        ("calibration", 3),
        ("dtype", ["float32"]),
        ("check_weights", "yes"),
        ("offline", "no"),
        ("progress", 5),
    ],
)
def test_options_of_another_kind_are_refused_by_name(model, name, value) -> None:
    with pytest.raises(UsageError, match=f"{name} must be"):
        LLM(model, **{name: value})


@pytest.mark.parametrize("named", [None, 5])
def test_what_names_no_model_is_refused(named) -> None:
    with pytest.raises(UsageError, match="A model is a folder"):
        LLM(named)


def test_diffusion_models_refuse_what_needs_tokens_one_by_one() -> None:
    params = SamplingParams(max_tokens=8, presence_penalty=1.0, logprobs=0)
    with LLM(GOLDENS / "llada2-a") as llm:
        with pytest.raises(
            UnsupportedError,
            match="`presence_penalty`, `logprobs` are for autoregressive models; LLaDA2",
        ):
            llm.generate([[1]], params)


def test_the_demo_model_stops_at_a_string() -> None:
    with LLM("demo:chat", context=256) as llm:
        [whole] = llm.generate("Sort 93 21 57 40 12", SamplingParams())
        stop = whole.text[5:8]
        [cut] = llm.generate("Sort 93 21 57 40 12", SamplingParams(stop=[stop]))
        check_idle(llm)
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.find(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids) - 1
