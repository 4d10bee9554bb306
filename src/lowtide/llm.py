"""`LLM`: prompts in, completions out.

    with LLM("demo:diffusion", host_memory="16MiB") as llm:
        [completion] = llm.generate("def fib(n):", SamplingParams(max_tokens=64))

Turns what a user asks into requests for a decoder and its events into answers; how the engine
behind it is put together is the business of `engine/`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from lowtide.config import ModelConfig
from lowtide.core import CacheMode, MemoryPlan, Step
from lowtide.decode.forced import ForcedText, OnLogits
from lowtide.decode.intake import Intake, Prompt, as_prompts
from lowtide.decode.request import Event, Finished, Request, TokenLogprobs, named
from lowtide.engine import probing
from lowtide.engine.engine import Engine
from lowtide.engine.forcing import ForcedRun, forced_params, read_forced
from lowtide.engine.loop import EngineLoop
from lowtide.engine.opening import (
    MAX_BLOCK_LENGTH,
    EngineConfig,
    OpenModel,
    check_calibration,
    open_for_plan,
    open_model,
)
from lowtide.engine.planning import excess_of, make_plan, shortage_of
from lowtide.engine.policy_setting import adopt_policy
from lowtide.engine.wiring import load
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.rows import Routing
from lowtide.experts.runtime import Observer
from lowtide.layers.router import Router
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.tokenizer import Tokenizer, cut_at_stop
from lowtide.params import SamplingParams
from lowtide.policies.receipt import Receipt


@dataclass(frozen=True, slots=True)
class Usage:
    """What a completion took."""

    prompt_tokens: int
    completion_tokens: int
    forwards: int
    kv_cache: str = CacheMode.EXACT.value  # others are approximations, see `core.CacheMode`
    receipt: Receipt | None = None  # under a policy that may change words: what it did


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
    when the model, an option or the budget cannot be honoured.

    Everything here may be called from several threads at once: one thread of the engine computes
    for all of them, and what is asked at the same time shares its passes. Ctrl-C, an error and a
    stream that is left end their own requests only. Not for use in a forked process.
    """

    def __init__(self, model: str | Path, **options: object) -> None:
        opened = _open(model, options)
        self._loop = EngineLoop(load(opened, make_plan(opened)))
        self._intake = _intake(opened)

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
    def dtype(self) -> torch.dtype:
        """That it computes in."""
        return self._engine.opened.dtype

    @property
    def fingerprint(self) -> str:
        """Of the weights, whatever they are computed in: what a buddy profile belongs to."""
        return self._engine.opened.fingerprint

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
        all of them (prompt i then draws with seed + i), or a list, one for each. `on_event` sees,
        on this thread, every event of every sequence; an event's `request` is its prompt's index;
        the answers do not wait for it, and end if it raises. What the KV cache has no room for yet
        waits. Raises UsageError or PlanError for a prompt that cannot be honoured, before the
        first step.
        """
        requests = self._intake.requests(
            as_prompts(prompts), SamplingParams() if params is None else params
        )
        finished: dict[int, Finished] = {}
        with closing(self._events(requests)) as events:
            for event in events:
                if on_event is not None:
                    on_event(event)
                if isinstance(event, Finished):
                    finished[event.request] = event
        return [self._completion(request, finished[i]) for i, request in enumerate(requests)]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Event, None, None]:
        """Events of one prompt as they happen: drafts of a diffusion model's block, committed
        tokens, the end. The answer begins with the first `next`, does not wait for the others, and
        ends when this is closed or dropped."""
        return self._events(self._intake.requests([prompt], params or SamplingParams()))

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Float32 logits [len, vocab] of every position's own token, on the CPU.

        Block-causal with the `block_length` option, causal for autoregressive families, of the
        whole sequence at once for bidirectional ones. Waits for room in the KV cache. Raises
        UsageError for ids out of range or a block length that the model's routing does not allow,
        PlanError beyond the context.
        """
        self._intake.check_ids(token_ids)
        self._intake.check_fits(len(token_ids), 0, 1)
        block_length = self._engine.opened.options.block_length or self.config.block_length
        self._intake.check_block_length(block_length)
        if self.config.is_bidirectional:
            block_length = len(token_ids)
        work = partial(probing.logits, token_ids=list(token_ids), block_length=block_length)
        return self._loop.run_passes(work, num_tokens=len(token_ids))

    def read(self, text: ForcedText, on_logits: OnLogits) -> ForcedRun:
        """Reads a text in the passes that would write it, its tokens given instead of chosen.

        `on_logits` is called on the engine's thread, in the midst of a pass, with what each token
        would have been chosen from. Waits for room in the KV cache. Raises UsageError for a text
        that cannot be read so or ids out of range, PlanError beyond the context, and what
        `on_logits` raises.
        """
        text.check(self.config.is_diffusion)
        self._intake.check_ids(text.token_ids)
        prompt = list(text.token_ids[: text.num_context])
        params = forced_params(text, self.config.is_diffusion)
        [request] = self._intake.requests([prompt], params)
        work = partial(read_forced, request=request, text=text, on_logits=on_logits)
        return self._loop.run_passes(work, request.canvas_length)

    def run_experts(self, layer: int, x: Tensor, routing: Routing, step: Step) -> Tensor:
        """What a MoE layer's experts make of given rows, as an observer saw them.

        `layer` counts MoE layers; x [rows, hidden] compute dtype, 512 rows at most; routing
        [rows, experts per token], ids ascending. Returns float32 [rows, hidden] on the CPU.
        Raises UsageError for anything else.
        """
        x, routing = probing.checked_rows(
            self.config, self._engine.opened.dtype, layer, x, routing, step
        )
        work = partial(probing.run_experts, layer=layer, x=x, routing=routing, step=step)
        return self._loop.run(work)

    def expert_columns(self, layer: int, expert: int, num_columns: int) -> Tensor:
        """Evenly spread columns of an expert's gate, up and down matrices, as they are multiplied
        with: 1-D float32 on the CPU. Read from the checkpoint, whoever is resident.

        `layer` counts MoE layers. Raises UsageError for an expert that there is not, StorageError.
        """
        probing.check_expert(self.config, layer, expert, num_columns)
        work = partial(probing.expert_columns, layer=layer, expert=expert, num_columns=num_columns)
        return self._loop.run(work)

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Meanwhile `observer` sees every MoE layer's routing and output, whoever asks.

        It is called in the midst of a pass, on the engine's thread: it can ask for `stats`, not
        for anything that takes a pass. What it raises ends the requests of that pass.
        """
        try:
            self._loop.run(partial(_set_observer, observer=observer))
            yield
        finally:
            self._loop.look(partial(_set_observer, observer=None))

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt's ids, as `generate` would take them. Raises UsageError."""
        return self._intake.token_ids(prompt)

    def adopt_policy(self, policy: str, policy_options: Mapping[str, str] | None = None) -> None:
        """Goes on under another policy without loading again, from its own first residents.

        Answers under way go on under it, with the same tokens; so do counters. Raises UsageError
        for a policy or an option that there is not, PlanError for a policy that needs more than
        the plan has: the one in force then stays.
        """
        change = partial(adopt_policy, policy=policy, policy_options=policy_options or {})
        self._loop.replace(change)

    def stats(self) -> dict[str, float]:
        """Counters since loading: expert hits and misses, bytes read, tokens and seconds."""
        return self._loop.look(lambda engine: {**engine.as_dict(), **self._loop.speed.as_dict()})

    def close(self) -> None:
        """Ends all threads and closes the checkpoint's files; nothing can be asked then.

        Who waits for an answer gets a UsageError. The pass under way is waited for.
        """
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _engine(self) -> Engine:
        return self._loop.engine

    def _events(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """What happens to `requests`, each called by its place among them."""
        places = {request.id: place for place, request in enumerate(requests)}
        with closing(self._loop.answers(requests)) as events:
            for event in events:
                yield named(event, places[event.request])

    def _completion(self, request: Request, finished: Finished) -> Completion:
        token_ids = list(finished.token_ids)
        text = self.tokenizer.decode(token_ids) if self.tokenizer is not None else ""
        return Completion(
            token_ids=token_ids,
            text=cut_at_stop(text, request.params.stop),
            finish_reason=finished.finish_reason,
            usage=Usage(
                prompt_tokens=len(request.prompt),
                completion_tokens=len(token_ids),
                forwards=finished.num_forwards,
                kv_cache=self.plan.kv_cache,
                receipt=finished.receipt,
            ),
            logprobs=None if request.params.logprobs is None else list(finished.logprobs),
        )


def check_request(
    model: str | Path, prompt: Prompt, params: SamplingParams, **options: object
) -> None:
    """Refuses what `LLM(model, **options).generate(prompt, params)` would; reads no weight."""
    _intake(_open(model, options)).requests([prompt], params)


def plan_model(model: str | Path | HubModel, **options: object) -> MemoryPlan:
    """The plan that `LLM(model, **options)` would load with; no weight is read, nor fetched.

    Its reason says so where this machine has too little memory free to load it, or less in all
    than the budget.
    """
    opened = _checked(open_for_plan(model, _engine_config(options)))
    check_calibration(opened)
    plan = make_plan(opened)
    warnings = (shortage_of(plan, opened.options), excess_of(opened.options))
    return replace(plan, reason="\n".join([plan.reason, *filter(None, warnings)]))


def _set_observer(engine: Engine, observer: Observer | None) -> None:
    engine.experts.observer = observer


def _open(model: str | Path, options: Mapping[str, object]) -> OpenModel:
    return _checked(open_model(model, _engine_config(options)))


def _checked(opened: OpenModel) -> OpenModel:
    """Raises UnsupportedError for options that this kind of model does not have."""
    block_length = opened.options.block_length
    config = opened.config
    if block_length not in (None, 1) and not config.is_diffusion:
        raise UnsupportedError(
            f"block_length {block_length}: {config.architecture} is autoregressive, its "
            "logits are causal; leave block_length out."
        )
    if block_length is not None and config.is_bidirectional:
        raise UnsupportedError(
            f"block_length {block_length}: {config.architecture} is bidirectional, its logits "
            "are of whole sequences; leave block_length out."
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
