"""`LLM`: prompts in, completions out.

    with LLM("demo:autoregressive", host_memory="16MiB") as llm:
        [completion] = llm.generate("Sort 93 21 57 40 12")

Code shared with `AsyncLLM` (`async_llm.py`) is in `answers/`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

from torch import Tensor

from lowtide.answers.completion import Completion
from lowtide.answers.keywords import AnswerKeywords, ModelKeywords
from lowtide.answers.loaded import LoadedModel
from lowtide.answers.opening import intake_of, opened_for_plan, opened_for_request
from lowtide.answers.progress_line import ProgressLine, is_watched
from lowtide.answers.reporter import Reporter
from lowtide.core import Step
from lowtide.decode.forced import ForcedText, OnLogits
from lowtide.decode.prompts import Messages, Prompt, TokenIds, as_prompts, one_prompt
from lowtide.decode.request import Event, Finished, Request
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.facts import ModelFacts
from lowtide.engine.opening.model_calibration import check_calibrated, find_calibration
from lowtide.engine.planning.format_plans import plan_by_format
from lowtide.engine.planning.passes import PlannedPasses, longest_context_of, plan_passes
from lowtide.engine.planning.plan import excess_of, make_plan, shortage_of
from lowtide.engine.planning.planner import Planner
from lowtide.engine.running import probing
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.forcing import ForcedRun, forced_params, read_forced
from lowtide.engine.running.policy_setting import adopt_policy
from lowtide.errors import PlanError, UnsupportedError
from lowtide.experts.rows import Routing
from lowtide.experts.runtime import ExpertObserver, Observer
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import SamplingParams
from lowtide.plan import FormatPlan, MemoryPlan
from lowtide.policies.recipe import Recipe


class LLM(LoadedModel):
    """A model under a memory budget.

    `model` is a folder, a GGUF file (the first of several), a hub id `org/name[@revision]` or a
    demo such as `demo:diffusion`; docs/python.md lists the options. Raises a `LowtideError`
    before any weight is read if the model, an option or the budget cannot be honoured.

    All methods may be called from several threads: one engine thread computes for all of them, and
    concurrent requests share passes. Ctrl-C, an error, or leaving a stream ends only the requests
    concerned. An `LLM` cannot be used in a fork of its process; load another one there.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_event: Callable[[Event], None] | None = None,
        *,
        raw: bool = False,
        progress: bool | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Completion]:
        """Answer one prompt or a list of them as one batch; return completions in order.

        A prompt is a string, a list or array of token ids, or a list of chat messages. A string
        goes through the model's chat template if there is one, unless `raw` is set.

        `params` apply to all prompts (prompt i then draws with seed + i), or are a list with one
        entry per prompt; keywords such as `max_tokens=64` override their fields. With `n`,
        completions are ordered prompt by prompt, n for each.

        `on_event` is called on this thread with every event; `event.request` is the answer's place.
        Generation does not wait for it and stops if it raises. `progress` shows a line on standard
        error, by default for several answers on a terminal.

        Requests wait for room in the KV cache. Raises UsageError or PlanError before the first step
        for a prompt that cannot be honoured.
        """
        requests = self._requests(as_prompts(prompts), params, keywords, raw)
        return self._answered(requests, on_event, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_event: Callable[[Event], None] | None = None,
        *,
        template_options: Mapping[str, object] | None = None,
        progress: bool | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Completion]:
        """Answer a conversation or a list of them through the model's chat template.

        A conversation is a list of messages, each with a `role` and a `content`, or a string;
        `template_options` are further variables of the template, such as `enable_thinking`.
        Otherwise as `generate`. Raises UsageError for a model without a chat template.
        """
        requests = self._requests(self._chats(messages, template_options), params, keywords, False)
        return self._answered(requests, on_event, progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **keywords: Unpack[AnswerKeywords],
    ) -> Generator[Event, None, None]:
        """Yield the events of one prompt as they happen; their `text`s add up to the answer.

        Events are drafts of a diffusion model's block, committed tokens, and the end. Generation
        begins with the first `next`, does not wait for the consumer, and stops when the generator
        is closed or dropped. Raises UsageError for a list of prompts.
        """
        return self._events(self._requests([one_prompt(prompt)], params, keywords, raw))

    def logits(self, token_ids: TokenIds) -> Tensor:
        """Return float32 logits [len, vocab] of every position's own token, on the CPU.

        Causal for autoregressive families, block-causal with the `block_length` option, over the
        whole sequence for bidirectional ones. Waits for room in the KV cache. Raises UsageError for
        ids out of range or a block length that the model's routing does not allow, PlanError beyond
        the context, CheckpointError or NumericError for logits that are not finite.
        """
        work, num_tokens = self._logits_work(token_ids)
        return self._loop.run_passes(work, num_tokens)

    def read(self, text: ForcedText, on_logits: OnLogits) -> ForcedRun:
        """Run the passes that would write a text, with its tokens given instead of chosen.

        `on_logits` is called on the engine's thread, during a pass, with the logits that each token
        would have been chosen from. Waits for room in the KV cache. Raises UsageError for a text
        that cannot be read so or ids out of range, PlanError beyond the context, and whatever
        `on_logits` raises.
        """
        text.check(self.config.decoding.writes_in_order)
        self._intake.check_ids(text.token_ids)
        prompt = list(text.token_ids[: text.num_context])
        params = forced_params(text, self.config.decoding.writes_in_order)
        [request] = self._intake.requests([prompt], params)
        work = partial(read_forced, request=request, text=text, on_logits=on_logits)
        return self._loop.run_passes(work, request.canvas_length)

    def run_experts(self, layer: int, x: Tensor, routing: Routing, step: Step) -> Tensor:
        """Compute the output of a MoE layer's experts for given rows, as an observer saw them.

        `layer` counts MoE layers; x [rows, hidden] compute dtype, 512 rows at most; routing [rows,
        experts per token], ids ascending. Returns float32 [rows, hidden] on the CPU. Raises
        UsageError for anything else.
        """
        x, routing = probing.checked_rows(self.config, self.dtype, layer, x, routing, step)
        work = partial(probing.run_experts, layer=layer, x=x, routing=routing, step=step)
        return self._loop.run(work)

    def expert_columns(self, layer: int, expert: int, num_columns: int) -> Tensor:
        """Return evenly spaced columns of an expert's gate, up and down matrices.

        1-D float32 on the CPU, read from the checkpoint, as used in products. `layer` counts MoE
        layers. Raises UsageError for an unknown expert, StorageError.
        """
        probing.check_expert(self.config, layer, expert, num_columns)
        work = partial(probing.expert_columns, layer=layer, expert=expert, num_columns=num_columns)
        return self._loop.run(work)

    @contextmanager
    def observed(self, observer: Observer, experts: ExpertObserver | None = None) -> Iterator[None]:
        """Attach observers for the duration of the context.

        `observer` sees every MoE layer's routing and output, of all callers; `experts` sees the
        inputs of experts' matrices. Both are called during a pass on the engine's thread: they may
        call `stats` but nothing that needs a pass. An exception ends the requests of that pass.
        Raises UnsupportedError for `experts` if a device computes some of them.
        """
        try:
            self._loop.run(partial(_set_observers, observer=observer, expert_observer=experts))
            yield
        finally:
            self._loop.look(partial(_set_observers, observer=None, expert_observer=None))

    def token_ids(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        template_options: Mapping[str, object] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return a prompt's token ids as `generate` would use them.

        `template_options` as in `chat`. Without `add_special_tokens` a text without a template gets
        no beginning-of-text token. Raises UsageError.
        """
        return self._intake.token_ids(prompt, raw, template_options, add_special_tokens)

    def adopt_policy(
        self, policy: str | Recipe, policy_options: Mapping[str, str] | None = None
    ) -> None:
        """Switch to another policy without loading again, from its own first residents.

        Running answers continue with the same tokens, and counters continue. Raises UsageError for
        an unknown policy or option, PlanError for a policy that needs more memory than the plan
        has; the current policy then stays.
        """
        change = partial(adopt_policy, policy=policy, policy_options=policy_options or {})
        self._loop.replace(change)

    def stats(self) -> dict[str, float]:
        """Return counters since loading: hits and misses of experts, bytes read, tokens, seconds.

        `predicted_tokens_per_s` is the plan's predicted speed, from measurements at loading.
        """
        return self._loop.stats()

    def close(self) -> None:
        """End all threads and close the checkpoint's files, after the current pass.

        Callers waiting for an answer get a UsageError.
        """
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answered(
        self,
        requests: Sequence[Request],
        on_event: Callable[[Event], None] | None,
        progress: bool | None,
    ) -> list[Completion]:
        finished: dict[int, Finished] = {}
        is_shown = len(requests) > 1 and is_watched() if progress is None else progress
        with ExitStack() as stack:
            events = stack.enter_context(closing(self._events(requests, on_event is not None)))
            told = [] if on_event is None else [on_event]
            if is_shown:
                told.insert(0, stack.enter_context(ProgressLine(len(requests), sys.stderr)))
            for event in events:
                for tell in told:
                    tell(event)
                if isinstance(event, Finished):
                    finished[event.request] = event
        return self._completions(requests, finished)

    def _events(
        self, requests: Sequence[Request], has_text: bool = True
    ) -> Generator[Event, None, None]:
        """Yield events of `requests`, numbered by their place."""
        reporter = Reporter(requests, self.tokenizer, has_text)
        with closing(self._loop.answers(requests)) as events:
            for event in events:
                yield reporter(event)


def check_request(
    model: str | Path,
    prompt_for: Callable[[Tokenizer | None], Prompt],
    params: SamplingParams,
    raw: bool = False,
    **options: Unpack[ModelKeywords],
) -> None:
    """Refuse what `LLM(model, **options).generate(prompt, params, raw=raw)` would refuse.

    No weight is read. `prompt_for` makes the prompt from the model's tokenizer.
    """
    opened = opened_for_request(model, options)
    facts, seed = opened.facts, opened.options.asked.seed
    intake = intake_of(facts, opened.memory.context.num_tokens, seed)
    intake.requests([prompt_for(facts.tokenizer)], params, raw)


def plan_model(model: str | Path | HubModel, **options: Unpack[ModelKeywords]) -> MemoryPlan:
    """Return the plan that `LLM(model, **options)` would load with.

    No weight is read or fetched. The plan's reason warns if the machine's free memory, or all of
    it, is less than the budget.
    """
    opened = opened_for_plan(model, options)
    return _checked(make_plan(opened), opened.facts, opened.options.asked)


class FullPlan(NamedTuple):
    """A memory plan with its passes and its alternatives by format."""

    memory: MemoryPlan
    passes: PlannedPasses | None  # of a bidirectional model: how they fit into the plan
    by_format: tuple[FormatPlan, ...]


def plan_in_full(model: str | Path | HubModel, **options: Unpack[ModelKeywords]) -> FullPlan:
    """Plan a model, the passes of a bidirectional one, and the other formats."""
    opened = opened_for_plan(model, options)
    facts, asked = opened.facts, opened.options.asked
    planner = Planner.of(facts.config, opened.memory, asked)
    try:
        plan = _checked(make_plan(opened, planner), facts, asked)
    except PlanError as error:
        longest = 0
        if not facts.config.decoding.keeps_keys:
            longest = longest_context_of(planner, asked.policy, asked.host_memory)
        if not longest:
            raise
        raise PlanError(f"{error} The longest context in it is {longest} tokens.") from error
    passes = None
    if not facts.config.decoding.keeps_keys:
        passes = plan_passes(planner, plan, asked.policy, asked.host_memory)
    return FullPlan(plan, passes, plan_by_format(facts, asked, planner))


def _checked(plan: MemoryPlan, facts: ModelFacts, asked: EngineConfig) -> MemoryPlan:
    """Add warnings about memory that this machine lacks to a plan.

    Raises UsageError for a policy that needs another calibration.
    """
    calibration = find_calibration(facts, asked.calibration)
    check_calibrated(calibration, asked.policy, asked.policy_options)
    warnings = (shortage_of(plan, asked.host_memory), excess_of(plan, asked.host_memory))
    return replace(plan, reason="\n".join([plan.reason, *filter(None, warnings)]))


def _set_observers(
    engine: Engine, observer: Observer | None, expert_observer: ExpertObserver | None
) -> None:
    if expert_observer is not None and engine.experts.device is not None:
        raise UnsupportedError(
            'Experts\' inputs are seen where the host computes all of them; choose `device="cpu"`.'
        )
    engine.experts.observer, engine.experts.expert_observer = observer, expert_observer
