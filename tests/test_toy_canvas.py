"""A kind of decoding is facts and a behaviour; this file makes one up that all of lowtide knows.

Its models have no mask token. An answer begins as random tokens; a step keeps the surest ones and
draws all others anew. Intake, plan and server hear of it by its facts and its `Kind`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from serving import serving
from torch import Tensor

from lowtide import LLM, AsyncLLM, SamplingParams
from lowtide.config import Canvas, DecodingDefaults, ModelConfig, Published
from lowtide.core import IntArray, PassRows, RowKind, StepKind
from lowtide.decode.forced import ForcedText, OnLogits
from lowtide.decode.kind import Blame, Kind, Schedule, Scheduled, UsualPass
from lowtide.decode.kinds import register_kind, unregister_kind
from lowtide.decode.logits import Model, tiled_logits
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Committed, Draft, Event, Finished, Request
from lowtide.errors import UnsupportedError
from lowtide.families import Family, SynthSize, families, register, unregister
from lowtide.llm import plan_in_full
from lowtide.memory.kv_cache import KVRange
from lowtide.model_writing.synth import synth
from lowtide.params import AUTOREGRESSIVE_ONLY, DiffusionParams

STEPS = 4
PROMPT = list(range(1, 30))


@dataclass(frozen=True, slots=True)
class Redrawn(Canvas):
    """A canvas without a mask token."""


class Kept(NamedTuple):
    positions: IntArray
    tokens: IntArray


class RedrawnSequence:
    """The tokens of one request: some stay, all others are drawn anew before each pass."""

    def __init__(self, request: Request, vocab_size: int, steps: int) -> None:
        self.request, self.kv = request, KVRange(0, 0)
        self.num_cached = self.num_exact = self.num_resumed = self.num_block_passes = 0
        self.has_begun = self.is_finished = False
        self.num_known = len(request.prompt)
        self.tokens = np.zeros(self.num_known + request.max_tokens, np.int64)
        self.tokens[: self.num_known] = request.prompt
        self.is_open = np.arange(len(self.tokens)) >= self.num_known
        self.steps, self._vocab_size = steps, vocab_size
        self._draw()

    @property
    def block_length(self) -> int:
        return len(self.tokens)

    @property
    def is_expected_to_end(self) -> bool:
        return self.num_block_passes + 1 == self.steps

    def _draw(self) -> None:
        random = np.random.default_rng((self.request.seed, self.num_block_passes))
        drawn = random.integers(0, self._vocab_size, len(self.tokens))
        self.tokens[self.is_open] = drawn[self.is_open]

    def kept(self, kept: Kept) -> list[Event]:
        self.tokens[kept.positions] = kept.tokens
        self.is_open[kept.positions] = False
        self.num_block_passes += 1
        self._draw()
        request, answer = self.request.id, tuple(self.tokens[self.num_known :].tolist())
        if self.is_open.any():
            is_open = tuple(self.is_open[self.num_known :].tolist())
            passes = self.num_block_passes
            return [Draft(request, self.num_known, answer, is_open, passes, len(answer))]
        self.is_finished = True
        return [
            Committed(request, answer),
            Finished(request, answer, "length", self.num_block_passes),
        ]


class Redrawing(Kind[Redrawn, RedrawnSequence, Kept]):
    absent_fields = frozenset(
        {*AUTOREGRESSIVE_ONLY, "temperature", *DiffusionParams.__dataclass_fields__} - {"steps"}
    )

    def resolved(self, asked: SamplingParams, config: ModelConfig) -> SamplingParams:
        for name in sorted(self.absent_fields & {*DiffusionParams.__dataclass_fields__}):
            if getattr(asked.diffusion, name) is not None:
                raise UnsupportedError(f"{name}: {config.architecture} draws anew what is open.")
        steps = asked.diffusion.steps or self.decoding.defaults.steps
        return replace(asked, diffusion=replace(asked.diffusion, steps=steps))

    def usual_pass(self, context: int) -> UsualPass:
        return UsualPass(context, context / self.decoding.defaults.steps)

    def room_tokens(self, request: Request, num_first: int) -> int:
        return self.num_tokens(request)

    def begin(self, request: Request) -> RedrawnSequence:
        steps = request.params.diffusion.steps or 1
        return RedrawnSequence(request, vocab_size=300, steps=steps)

    def schedule(
        self, running: Sequence[RedrawnSequence], max_rows: int, share: PromptShare
    ) -> Schedule[RedrawnSequence]:
        entries: list[Scheduled[RedrawnSequence]] = []
        start = 0
        for sequence in running:
            length = len(sequence.tokens)
            if start + length <= max_rows:
                entries.append(Scheduled(sequence, 0, length, start))
                start += length
        return Schedule(StepKind.DENOISE, entries)

    def end_tokens(self, entry: Scheduled[RedrawnSequence]) -> int:
        return entry.sequence.kv.capacity

    def pass_rows(self, entry: Scheduled[RedrawnSequence]) -> PassRows:
        ids = np.full(entry.length, entry.sequence.request.id)
        return PassRows(ids, np.full(entry.length, RowKind.DRAFT, np.uint8))

    def choose(
        self,
        model: Model,
        hidden: Tensor,
        entries: Sequence[Scheduled[RedrawnSequence]],
        blame: Blame,
    ) -> list[Kept | None]:
        return [self._surest(model, hidden, entry) for entry in entries]

    def _surest(self, model: Model, hidden: Tensor, entry: Scheduled[RedrawnSequence]) -> Kept:
        sequence = entry.sequence
        positions = np.flatnonzero(sequence.is_open)
        tokens, sure = np.zeros(len(positions), np.int64), np.zeros(len(positions))
        for part, logits in tiled_logits(
            model, hidden, entry.start + positions, np.ones(len(positions), np.bool_)
        ):
            assert isinstance(logits, Tensor)
            found = logits.softmax(-1).max(-1)
            tokens[part], sure[part] = found.indices.numpy(), found.values.numpy()
        num_left = sequence.steps - sequence.num_block_passes
        chosen = np.argsort(-sure, kind="stable")[: -(-len(positions) // num_left)]
        return Kept(positions[chosen], tokens[chosen])

    def written(self, entry: Scheduled[RedrawnSequence], choice: Kept | None) -> list[Event]:
        assert choice is not None
        return entry.sequence.kept(choice)

    def forced(self, text: ForcedText, on_logits: OnLogits) -> Redrawing:
        raise UnsupportedError("A canvas without masks hides nothing of a text.")


def _family() -> Family:
    """LLaDA-MoE's body, which decodes in another way."""
    body = families()["llada_moe"]
    tiny = body.sizes()["tiny"]
    config = {**tiny.config, "architectures": ["RedrawnLM"]}
    del config["mask_token_id"]
    return replace(
        body,
        name="redrawn",
        architectures=("RedrawnLM",),
        published=Published(
            (304,), Redrawn(defaults=DecodingDefaults(block_length=None, steps=STEPS))
        ),
        own_sizes={"tiny": SynthSize(config, 304, tiny.max_shard_bytes)},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    register(_family())
    register_kind(Redrawn, Redrawing)
    yield synth("redrawn", "tiny", tmp_path_factory.mktemp("redrawn") / "model")
    unregister_kind(Redrawn)
    unregister("redrawn")


def test_it_is_planned_loaded_and_answers_alike_under_every_budget(model: Path) -> None:
    plan = plan_in_full(model, context=128)
    assert plan.passes is not None and plan.passes.steps and plan.memory.prediction is not None
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=7)
    answers = []
    for budget in (plan.memory.minimum_bytes, plan.memory.full_bytes):
        with LLM(model, context=128, host_memory=budget, policy="lru") as llm:
            assert llm.config.decoding.mask_token_id is None
            alone = llm.generate(PROMPT, params)[0]
            others = [PROMPT[:7], PROMPT, PROMPT[::-1]]
            together = llm.generate(others, [params] * 3)
            answers += [alone.token_ids, together[1].token_ids]
    assert len(answers[0]) == 24 and all(answer == answers[0] for answer in answers)


def test_what_is_open_is_drawn_anew_in_every_step(model: Path) -> None:
    with LLM(model, context=128) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        events = list(llm.stream(PROMPT, params))
        [last] = [event for event in events if isinstance(event, Finished)]
    drafts = [event for event in events if isinstance(event, Draft)]
    assert [sum(draft.is_masked) for draft in drafts] == [18, 12, 6]
    assert last.num_forwards == STEPS
    for before, after in zip(drafts, drafts[1:], strict=False):
        pairs = zip(before.is_masked, before.tokens, after.tokens, strict=True)
        redrawn = [(old, new) for is_open, old, new in pairs if is_open]
        assert sum(old != new for old, new in redrawn) > len(redrawn) / 2
        pairs = zip(before.is_masked, before.tokens, last.token_ids, strict=True)
        assert all(old == new for is_open, old, new in pairs if not is_open)


def test_what_it_does_not_have_is_refused_by_name(model: Path) -> None:
    with LLM(model, context=128) as llm:
        assert "steps" in llm.answer_fields and "threshold" not in llm.answer_fields
        with pytest.raises(
            UnsupportedError, match="`logprobs` is for autoregressive models; RedrawnLM is"
        ):
            llm.generate(PROMPT, logprobs=2)
        with pytest.raises(UnsupportedError, match="threshold: RedrawnLM draws anew"):
            llm.generate(PROMPT, threshold=0.5)


def test_it_is_served(model: Path) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    body["diffusion"] = {"steps": 2}
    llm = AsyncLLM(model, context=128)
    try:
        with serving(llm) as running, running.client() as client:
            body["model"] = client.get("/v1/models").json()["data"][0]["id"]
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
            refused = client.post("/v1/completions", json={**body, "logprobs": 1})
            assert refused.status_code == 400 and "logprobs" in json.dumps(refused.json())
    finally:
        asyncio.run(llm.close())
