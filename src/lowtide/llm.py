"""`LLM`: prompts in, completions out.

    with LLM("demo:diffusion", host_memory="16MiB") as llm:
        [completion] = llm.generate("def fib(n):", SamplingParams(max_tokens=64))

Turns what a user asks into requests for a decoder and its events into answers; how the engine
behind it is put together is the business of `engine/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from lowtide.config import ModelConfig
from lowtide.core import MemoryPlan, Step, StepKind
from lowtide.decode.autoregressive import Autoregressive
from lowtide.decode.batch_decoder import LOGIT_ROWS
from lowtide.decode.block_diffusion import BlockDiffusion
from lowtide.decode.intake import Intake, Prompt, as_prompts, cut_at_stop
from lowtide.decode.request import Committed, Event, Finished, Request, TokenLogprobs
from lowtide.engine.opening import (
    MAX_BLOCK_LENGTH,
    MAX_PASS_ROWS,
    EngineConfig,
    OpenModel,
    check_calibration,
    open_model,
)
from lowtide.engine.planning import make_plan, shortage_of
from lowtide.engine.policy_setting import adopt_policy
from lowtide.engine.wiring import load
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.rows import Routing
from lowtide.experts.runtime import Observer
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.layers.router import Router
from lowtide.memory.cuda_streams import device_pass
from lowtide.memory.workspace import tiles
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Usage:
    """What a completion took."""

    prompt_tokens: int
    completion_tokens: int
    forwards: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `text` is empty when the model has no tokenizer."""

    token_ids: list[int]
    text: str
    finish_reason: str  # "stop": an end-of-text token or a stop string; "length": max_tokens
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None  # one for each token, if asked for


class LLM:
    """A model under a memory budget.

    `model` is a folder, a hub id `org/name[@revision]`, `demo:diffusion` or `demo:chat`; options
    are the fields of `engine.EngineConfig`. Raises a `LowtideError` before any weight is read
    when the model, an option or the budget cannot be honoured. Not safe for use from several
    threads.
    """

    def __init__(self, model: str | Path, **options: object) -> None:
        opened = _open(model, options)
        self._engine = load(opened, make_plan(opened))
        self._intake = _intake(opened)
        self._speed = _Speed()
        self._is_closed = False

    @property
    def plan(self) -> MemoryPlan:
        """Every byte in use, decided before loading."""
        return self._engine.plan

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self._engine.opened.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None when the folder has no `tokenizer.json`: prompts are token ids then."""
        return self._engine.opened.tokenizer

    @property
    def device(self) -> str:
        """One line on the device beside the host, for people; empty where there is none."""
        tier = self._engine.experts.device
        return "" if tier is None else tier.device.describe()

    @property
    def routers(self) -> list[Router]:
        """Those of the MoE layers, in order."""
        return [self._engine.model.router(layer) for layer in self.config.moe_layers]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[Completion]:
        """Answers one prompt or a list of them, as one flat batch; completions in their order.

        A prompt is a string, a list of token ids, or a list of chat messages; `params` are for
        all of them (prompt i then draws with seed + i), or a list, one for each. `on_event` sees
        every event of every sequence; an event's `request` is its prompt's index. What the KV
        cache has no room for yet waits. Raises UsageError or PlanError for a prompt that cannot
        be honoured, before the first step.
        """
        requests = self._intake.requests(
            as_prompts(prompts), SamplingParams() if params is None else params
        )
        finished: dict[int, Finished] = {}
        for event in self._run(requests):
            if on_event is not None:
                on_event(event)
            if isinstance(event, Finished):
                finished[event.request] = event
        return [self._completion(request, finished[request.index]) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Event, None, None]:
        """Events of one prompt as they happen: drafts of a diffusion model's block, committed
        tokens, the end. Closing it ends the answer."""
        return self._run(self._intake.requests([prompt], params or SamplingParams()))

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Float32 logits [len, vocab] of every position, on the CPU.

        Block-causal with the `block_length` option, causal for autoregressive families. Raises
        UsageError for ids out of range or a block length that the model's routing does not allow,
        PlanError beyond the context.
        """
        self._check_open()
        self._intake.check_ids(token_ids)
        self._intake.check_fits(len(token_ids), 0, 1)
        block_length = self._engine.opened.options.block_length or self.config.block_length
        self._intake.check_block_length(block_length)
        kv_cache = self._engine.kv_cache
        kv_range = kv_cache.allocate(len(token_ids))
        result = torch.empty(len(token_ids), self.config.vocab_size)
        pass_rows = MAX_PASS_ROWS // block_length * block_length
        try:
            with device_pass(), self._engine.executor.in_charge(), torch.inference_mode():
                for start in range(0, len(token_ids), pass_rows):
                    stop = min(len(token_ids), start + pass_rows)
                    self._logits_pass(token_ids[start:stop], start, block_length, kv_range, result)
        finally:
            kv_cache.free(kv_range)
        return result

    def run_experts(self, layer: int, x: Tensor, routing: Routing, step: Step) -> Tensor:
        """What a MoE layer's experts make of given rows, as an observer saw them.

        `layer` counts MoE layers; x [rows, hidden] compute dtype, 512 rows at most. Returns
        float32 [rows, hidden] on the CPU.
        """
        self._check_open()
        engine, device = self._engine, self._engine.model.device
        experts = routing.experts.to(device, torch.int64).contiguous()
        weights = routing.weights.to(device, torch.float32).contiguous()
        x = x.to(device).contiguous()
        with device_pass(), engine.executor.in_charge(), torch.inference_mode():
            out = engine.model.run_experts(layer, x, Routing(experts, weights), step)
            return out.to("cpu", copy=True)

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Meanwhile `observer` sees every MoE layer's routing and output."""
        self._engine.experts.observer = observer
        try:
            yield
        finally:
            self._engine.experts.observer = None

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt's ids, as `generate` would take them. Raises UsageError."""
        return self._intake.token_ids(prompt)

    def adopt_policy(self, policy: str, policy_options: Mapping[str, str] | None = None) -> None:
        """Goes on under another policy without loading again, from its own first residents.

        Between answers only; counters go on. Raises UsageError for a policy or an option that
        there is not, PlanError for a policy that needs more than the plan has: the one in force
        then stays.
        """
        self._engine = adopt_policy(self._engine, policy, policy_options or {})

    def stats(self) -> dict[str, float]:
        """Counters since loading: expert hits and misses, bytes read, tokens and seconds."""
        return {**self._engine.experts.as_dict(), **self._speed.as_dict()}

    def close(self) -> None:
        """Ends the reader threads and closes the checkpoint's files; nothing can be asked then."""
        self._is_closed = True
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Drives the decoder; however this ends, every sequence gives back its room."""
        self._check_open()
        decoder = self._decoder()
        try:
            for request in requests:
                decoder.add(request)
            while decoder.has_work:
                self._check_open()  # it may have been closed while this stream was not looked at
                measured, in_charge = self._speed.measured(), self._engine.executor.in_charge()
                with device_pass(), measured, in_charge:
                    events = decoder.step()
                self._speed.count(events)
                yield from events
        finally:
            decoder.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("This LLM is closed; make another one.")

    def _decoder(self) -> BlockDiffusion | Autoregressive:
        engine, use_kv_cache = self._engine, self._engine.opened.options.kv_cache
        if self.config.mask_token_id is None:
            return Autoregressive(engine.model, engine.kv_cache, MAX_PASS_ROWS, use_kv_cache)
        return BlockDiffusion(
            engine.model,
            engine.kv_cache,
            mask_token_id=self.config.mask_token_id,
            max_rows=MAX_PASS_ROWS,
            use_kv_cache=use_kv_cache,
        )

    def _logits_pass(
        self, token_ids: Sequence[int], start: int, block_length: int, kv: KVRange, result: Tensor
    ) -> None:
        stop = start + len(token_ids)
        batch = Batch(
            token_ids=torch.tensor(token_ids),
            positions=torch.arange(start, stop),
            segments=(Segment(0, len(token_ids), start, block_length, kv),),
            step=Step(StepKind.PREFILL, 0),
        )
        hidden = self._engine.model.forward(batch)
        for rows in tiles(len(token_ids), LOGIT_ROWS):
            result[start:stop][rows] = self._engine.model.logits(hidden[rows])

    def _completion(self, request: Request, finished: Finished) -> Completion:
        token_ids = list(finished.token_ids)
        text = self.tokenizer.decode(token_ids) if self.tokenizer is not None else ""
        return Completion(
            token_ids=token_ids,
            text=cut_at_stop(text, request.params.stop),
            finish_reason=finished.finish_reason,
            usage=Usage(len(request.prompt), len(token_ids), finished.num_forwards),
            logprobs=None if request.params.logprobs is None else list(finished.logprobs),
        )


def check_request(
    model: str | Path, prompt: Prompt, params: SamplingParams, **options: object
) -> None:
    """Refuses what `LLM(model, **options).generate(prompt, params)` would; reads no weight."""
    _intake(_open(model, options)).requests([prompt], params)


def plan_model(model: str | Path, **options: object) -> MemoryPlan:
    """The plan that `LLM(model, **options)` would load with; no weight is read.

    Its reason says so where this machine has too little memory free to load it.
    """
    opened = _open(model, options)
    check_calibration(opened)
    plan = make_plan(opened)
    shortage = shortage_of(plan, opened.options)
    return replace(plan, reason=f"{plan.reason}\n{shortage}") if shortage else plan


class _Speed:
    """Committed answer tokens and the seconds and passes they took."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_forwards = 0
        self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around one forward pass and the decisions that follow it."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
        self._num_forwards += 1

    def count(self, events: Sequence[Event]) -> None:
        self._num_tokens += sum(len(e.tokens) for e in events if isinstance(e, Committed))

    def as_dict(self) -> dict[str, float]:
        return {
            "committed_tokens": self._num_tokens,
            "forwards": self._num_forwards,
            "generation_s": self._seconds,
            "tokens_per_s": self._num_tokens / self._seconds if self._seconds else 0.0,
        }


def _open(model: str | Path, options: Mapping[str, object]) -> OpenModel:
    opened = open_model(model, _engine_config(options))
    block_length = opened.options.block_length
    if block_length not in (None, 1) and not opened.config.is_diffusion:
        raise UnsupportedError(
            f"block_length {block_length}: {opened.config.architecture} is autoregressive, its "
            "logits are causal; leave block_length out."
        )
    return opened


def _intake(opened: OpenModel) -> Intake:
    return Intake(
        config=opened.config,
        tokenizer=opened.tokenizer,
        context=opened.context,
        max_block_length=MAX_BLOCK_LENGTH,
        seed=opened.options.seed or 0,
    )


def _engine_config(options: Mapping[str, object]) -> EngineConfig:
    try:
        return EngineConfig(**options)  # type: ignore[arg-type]
    except TypeError as error:
        known = ", ".join(EngineConfig.__dataclass_fields__)
        raise UsageError(f"{error}; known options: {known}.") from error
