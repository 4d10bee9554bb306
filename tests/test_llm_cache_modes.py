"""The whole engine with prefix and dual caches.

Trajectories of an independent implementation, the plans for them, and the models that refuse them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cached_oracle import KeptKeys, cached_trajectory, kept_logits
from family_models import write_first_layer, write_model
from hash_model import is_all_free
from inside import engine_of
from masked_oracle import golden_cases, load_full
from oracle import GOLDENS
from typer.testing import CliRunner
from whole import planner_of, token_rows

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.cli.app import app
from lowtide.decode import masked_options
from lowtide.decode.forced import ForcedText
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import PlanError, UnsupportedError, UsageError
from lowtide.kernels.row_statistics import Form
from lowtide.llm import plan_model

NAMES = ["llada-a", "llada-moe-a", "dream-a"]
MODES = ["prefix", "dual"]

ASKED = [
    {"remasking": "low_confidence", "steps": 24, "block_length": 8},
    {"remasking": "low_confidence", "steps": 18, "block_length": 16, "cfg_scale": 0.7},
    {"remasking": "entropy", "steps": 15, "block_length": 16},
    {"remasking": "maskgit_plus", "steps": 24, "block_length": 48},
    {"remasking": "topk_margin", "steps": 36, "block_length": 12},
    {"remasking": "confidence_threshold", "threshold": 0.2, "block_length": 16},
    {"remasking": "factor", "factor": 1.2, "block_length": 24},
]
MAX_TOKENS = 48

NUM_LAYERS = 3  # of every golden
LONG = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(name: str, mode: str) -> Iterator[LLM]:
    with LLM(GOLDENS / name, kv_cache=mode) as llm:
        yield llm


def check_trajectories(llm: LLM, name: str, mode: str) -> None:
    """Rules of all kinds in one batch, of requests of different lengths."""
    prompts = [case["prompt"] for case in golden_cases(name)]
    prompts = [prompts[index % len(prompts)] for index in range(len(ASKED))]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, diffusion=DiffusionParams(**asked)) for asked in ASKED
    ]
    found = token_rows(llm, prompts, params)
    for prompt, asked, rows in zip(prompts, params, found, strict=True):
        resolved = masked_options.resolve(
            asked.diffusion, llm.config.decoding.defaults, MAX_TOKENS, llm.config.architecture
        )
        with torch.inference_mode():
            expected = cached_trajectory(
                load_full(name),
                prompt,
                MAX_TOKENS,
                resolved,
                llm.config.decoding.mask_token_id,
                mode,
                llm.config.decoding.logits_shift,
            )
        assert rows == expected


def test_trajectories_are_those_of_kept_keys_in_transformers(name, mode, llm) -> None:
    check_trajectories(llm, name, mode)


def test_exact_trajectories_are_those_of_transformers(name) -> None:
    """Of every family with guidance, of which one golden has any."""
    with LLM(GOLDENS / name) as llm:
        check_trajectories(llm, name, "exact")


def test_all_layers_are_planned(name, mode) -> None:
    folder, context = GOLDENS / name, 256
    exact, kept = (plan_model(folder, context=context, kv_cache=kv) for kv in (True, mode))
    opened = open_model(folder, EngineConfig(context=context))
    memory = opened.memory
    layer_bytes = memory.context.kv_shape.num_elements * memory.dtype.itemsize
    assert kept.host.kv_cache_bytes == NUM_LAYERS * layer_bytes
    assert exact.host.kv_cache_bytes == 0  # layers take turns in the workspace
    more_bytes = kept.minimum_bytes - exact.minimum_bytes
    assert more_bytes >= (NUM_LAYERS - 1) * layer_bytes
    assert kept.full_bytes - exact.full_bytes == more_bytes
    with pytest.raises(PlanError, match=f"{kept.minimum_bytes} bytes"):
        plan_model(folder, context=context, kv_cache=mode, host_memory=kept.minimum_bytes - 1)


def test_the_least_budget_and_a_lent_cache_write_the_same(mode) -> None:
    """Of a model whose experts come and go while the cache grows and shrinks."""
    folder, options = GOLDENS / "llada-moe-a", {"context": 256, "kv_cache": mode}
    params = SamplingParams(max_tokens=48, diffusion=DiffusionParams(block_length=16, steps=24))
    prompts = [list(range(1, n)) for n in (40, 90, 5, 60)]
    least_bytes = plan_model(folder, **options).minimum_bytes
    answers = []
    for others in ({}, {"host_memory": least_bytes}):
        with LLM(folder, **options, **others) as llm:
            completions = llm.generate(prompts, params)
            answers.append([completion.token_ids for completion in completions])
            assert is_all_free(engine_of(llm).kv_cache)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("num_prompt", [40, 784, 1040])
def test_partial_passes_stay_within_the_plan(num_prompt, mode, tmp_path) -> None:
    """Of lengths whose tiles are the longest there are."""
    folder = write_model("llada_moe", 3, tmp_path).folder
    max_tokens = 1567 - num_prompt
    asked = DiffusionParams(block_length=max_tokens, steps=3)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=asked)
    with LLM(folder, context=1600, kv_cache=mode, config_overrides=LONG) as llm:
        [completion] = llm.generate([[5] * num_prompt], params)
    assert len(completion.token_ids) == max_tokens


def test_one_layer_is_exact(name, mode, tmp_path) -> None:
    """Its keys and values are of tokens alone, and those outside a block do not change."""
    folder = write_first_layer(GOLDENS / name, tmp_path)
    diffusion = DiffusionParams(remasking="low_confidence", block_length=8, cfg_scale=0.5)
    params = SamplingParams(max_tokens=24, ignore_eos=True, diffusion=diffusion)
    answers = []
    for kv_cache in (True, mode):
        with LLM(folder, kv_cache=kv_cache, context=64) as llm:
            answers.append(llm.generate([[3, 4, 5, 6]], params)[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["llada2-a", "llada2-b-bf16"])
def test_models_with_an_exact_cache_refuse_approximations(name, mode) -> None:
    with pytest.raises(
        UnsupportedError, match=f"`kv_cache` '{mode}' .* bidirectional models .LLaDA"
    ):
        plan_model(GOLDENS / name, kv_cache=mode)


@pytest.mark.parametrize("value", ["exact", "none", 1, None, "Prefix"])
def test_unknown_modes_are_refused(value) -> None:
    with pytest.raises(UsageError, match="kv_cache must be true, false, prefix or dual"):
        plan_model(GOLDENS / "dream-a", kv_cache=value)


def test_the_papers_form_of_the_head_is_planned_for_ablations(name) -> None:
    """All logits of the rows that are read exist; both copies of guidance, in float32."""
    planner = planner_of(open_model(GOLDENS / name, EngineConfig(context=128)))
    fused, whole = (planner.registrar(128, form).graph.needed_bytes for form in Form)
    assert whole - fused > 128 * planner.config.vocab_size * 4


def test_the_command_line_names_the_mode_or_refuses_it(mode) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--kv-cache", mode])

    model, ids = str(GOLDENS / "dream-a"), ["--prompt-ids", "5 6 7", "--max-tokens", "8"]
    assert f"{mode} cache: an approximation" in " ".join(run("plan", model).stdout.split())
    assert json.loads(run("plan", model, "--json").stdout)["kv_cache"] == mode
    found = json.loads(run("generate", model, *ids, "--json").stdout)
    assert found["usage"]["kv_cache"] == found["plan"]["kv_cache"] == mode
    assert plan_model(model).kv_cache == "exact"
    refused = run("generate", str(GOLDENS / "llada2-a"), *ids)
    assert (
        refused.exit_code == 2
        and f"--kv-cache '{mode}' is for bidirectional models" in refused.stderr
    )


def test_a_text_is_read_with_kept_keys(name, mode, llm) -> None:
    """After its first mask the prompt's are those of the first pass, as `lowtide quality` asks."""
    ids, num_prompt = [(7 * i) % 300 for i in range(40)], 16
    masks = [np.arange(40) % stride == 1 for stride in (2, 3, 5)]
    masks = tuple(mask & (np.arange(40) >= num_prompt) for mask in masks)
    found: dict[int, list[torch.Tensor]] = {}

    def note(mask: int, positions: Any, logits: torch.Tensor) -> None:
        found.setdefault(mask, []).append(logits.clone())

    llm.read(ForcedText(ids, num_prompt, masks), note)
    kept, shift = KeptKeys(), llm.config.decoding.logits_shift
    for index, mask in enumerate(masks):
        row = torch.tensor(ids).where(~torch.from_numpy(mask), llm.config.decoding.mask_token_id)
        first = num_prompt - shift if index else 0
        with torch.inference_mode():
            logits = kept_logits(load_full(name), row, first, len(ids), kept)
        expected = logits[np.flatnonzero(mask) - shift - first]
        expected[:, llm.config.decoding.mask_token_id] = -torch.inf
        seen = torch.cat(found[index])
        seen[:, llm.config.decoding.mask_token_id] = -torch.inf
        torch.testing.assert_close(seen, expected, atol=2e-4, rtol=0)
