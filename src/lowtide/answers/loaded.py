"""Shared base of `LLM` and `AsyncLLM`: a loaded model, its facts, and prompts as requests.

`engine/` assembles the model's parts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import NoReturn, Unpack, cast

import torch
from torch import Tensor

from lowtide.answers.completion import Completion, completion_of
from lowtide.answers.keywords import AnswerKeywords, ModelKeywords
from lowtide.answers.opening import first_requests, intake_of, opened_model
from lowtide.answers.progress_line import LoadingLine, is_watched
from lowtide.config import ModelConfig, format_size
from lowtide.decode.prompts import Messages, Prompt, TokenIds, is_chat, listed, one_text_of_ids
from lowtide.decode.request import Finished, Request
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.planning.passes import PlannedPass, plan_steps
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.planning.planner import Planner
from lowtide.engine.running import probing
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.first_passes import with_prediction
from lowtide.engine.running.loop import EngineLoop
from lowtide.engine.running.wiring import load
from lowtide.engine.running.worker import Passes
from lowtide.errors import UsageError
from lowtide.layers.router import Router
from lowtide.memory.pass_planner import PassPlan
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.option import check_int
from lowtide.params import SamplingParams, listed_params, with_keywords
from lowtide.parsing.answer_pieces import with_stop_test
from lowtide.plan import MemoryPlan
from lowtide.progress import Progress


def _signature() -> inspect.Signature:
    """Return the signature that editors and `help` show of `LLM(...)`."""
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = inspect.signature(EngineConfig).parameters.values()
    mappings = {f.name for f in fields(EngineConfig) if f.default is MISSING}
    return inspect.Signature(
        [model, *(o.replace(default=None) if o.name in mappings else o for o in options)]
    )


class LoadedModel:
    """A model under a memory budget.

    Owns the engine's loop; `LLM` and `AsyncLLM` add ways to wait for answers.
    """

    __signature__ = _signature()

    def __init__(self, model: str | Path, **options: Unpack[ModelKeywords]) -> None:
        self._name = str(model)
        with _shown(options.get("progress")) as progress:
            opened = opened_model(model, {**options, "progress": progress})
            facts, asked = opened.facts, opened.options.asked
            self._intake = intake_of(facts, opened.memory.context.num_tokens, asked.seed)
            planner = Planner.of(facts.config, opened.memory, asked)
            engine = load(opened, make_plan(opened, planner), planner)
            ask = partial(first_requests, self._intake, facts.config)
            self._loop = EngineLoop(with_prediction(engine, opened.speed_facts, ask))

    @property
    def name(self) -> str:
        """The model as named by the caller: a folder, a file, a hub id or a demo."""
        return self._name

    @property
    def path(self) -> Path:
        """The folder, or (first) GGUF file, that weights are read from."""
        return self._engine.facts.folder

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan, decided before loading."""
        return self._engine.plan

    @property
    def config(self) -> ModelConfig:
        return self._engine.facts.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None without `tokenizer.json`: prompts are then token ids."""
        return self._engine.facts.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """True if `chat` is possible."""
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    @property
    def device(self) -> str:
        """One readable line on the GPU or emulated device; empty without one."""
        tier = self._engine.experts.device
        return "" if tier is None else tier.device.describe()

    @property
    def kernels(self) -> str:
        """The host's kernels: `torch`, or `compiled` and the processor's instructions in use."""
        return self._engine.kernels.name

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self._engine.kv_cache.dtype

    @property
    def fingerprint(self) -> str:
        """Identifier of the weights, independent of compute dtype; buddy profiles refer to it."""
        return self._engine.facts.fingerprint()

    @property
    def routers(self) -> list[Router]:
        """The routers of the MoE layers, in order."""
        return [self._engine.model.router(layer) for layer in self.config.moe_layers]

    def max_new_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the longest answer that fits after such a prompt in an empty context, or 0.

        Raises UsageError for an invalid count or invalid parameters.
        """
        num_prompt_tokens = check_int("num_prompt_tokens", num_prompt_tokens, 0)
        _check_params(params)
        return max(0, self._intake.max_new_tokens(num_prompt_tokens, params))

    def params_in_force(self, params: SamplingParams) -> SamplingParams:
        """Fill unset parameters with the model's own values.

        Raises UsageError or UnsupportedError for parameters that this model cannot have.
        """
        _check_params(params)
        return self._intake.in_force(params)

    @property
    def answer_fields(self) -> tuple[str, ...]:
        """Names of the parameters that this model's answers have."""
        return self._intake.answer_fields()

    @property
    def current_pass(self) -> PassPlan | None:
        """Plan of the current or latest pass, or None if no pass has a plan of its own."""
        plans = self._engine.pass_plans
        return None if plans is None else plans.current

    def planned_passes(
        self, num_tokens: int, params: SamplingParams | None = None
    ) -> list[PlannedPass]:
        """Return the division of a bidirectional model's passes over `num_tokens` tokens.

        There is one plan for each of several shares of masks; other models have none. Raises
        UsageError for an invalid count or invalid parameters.

        params: of the answer, whose new tokens are the masks; by default all tokens are masked at
        first.
        """
        num_tokens = check_int("num_tokens", num_tokens, 1)
        if params is not None:
            _check_params(params)
        if self.config.decoding.keeps_keys:
            return []
        max_masked, diffusion = num_tokens, None
        if params is not None:
            max_masked, diffusion = min(num_tokens, params.most_tokens), params.diffusion
        return plan_steps(self._engine.planner, self.plan, num_tokens, max_masked, diffusion)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: threads and memory belong to one process.

        Raises UsageError.
        """
        raise UsageError(
            "A loaded model can be neither pickled nor copied: make one in each process, and hand "
            "over prompts, parameters and completions, which can."
        )

    def __repr__(self) -> str:
        plan = self.plan
        placed = ""
        if plan.num_experts:
            placed = f", {sum(plan.residents_per_layer)} of {plan.num_experts} experts resident"
        return (
            f"{type(self).__name__}({self._name!r}: {self.config.architecture} on {plan.device}, "
            f"{format_size(plan.budget_bytes)}, policy {plan.policy}{placed})"
        )

    @property
    def _engine(self) -> Engine:
        return self._loop.engine

    def _completions(
        self, requests: Sequence[Request], finished: Mapping[int, Finished]
    ) -> list[Completion]:
        """Build completions; `finished` maps a request's place to its last event."""
        return [
            completion_of(request, finished[i], self.tokenizer, self.plan)
            for i, request in enumerate(requests)
        ]

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        given: AnswerKeywords,
        raw: bool,
    ) -> list[Request]:
        """Make a request for each prompt; `given` keywords override fields of `params`."""
        asked: SamplingParams | list[SamplingParams]
        if params is None or isinstance(params, SamplingParams):
            asked = with_keywords(params, given)
        else:
            asked = [with_keywords(one, given) for one in listed_params(params)]
        requests = self._intake.requests(prompts, asked, raw)
        return [with_stop_test(request, self.tokenizer) for request in requests]

    def _logits_work(self, token_ids: TokenIds) -> tuple[Passes[Tensor], int]:
        """Return the passes that compute `logits`, and the KV cache tokens needed.

        Raises like `logits`.
        """
        ids = self._text_ids(token_ids)
        asked = self._engine.options.asked.block_length
        block_length = asked or self.config.decoding.block_length
        self._intake.check_block_length(block_length)
        if not self.config.decoding.keeps_keys:
            block_length = len(ids)
        return partial(probing.logits, token_ids=ids, block_length=block_length), len(ids)

    def _text_ids(self, token_ids: TokenIds) -> list[int]:
        """Return the ids of one text that fits. Raises UsageError or PlanError."""
        ids = one_text_of_ids(token_ids)
        self._intake.check_ids(ids)
        self._intake.check_fits(len(ids), 0, 1)
        return ids

    def _chats(
        self,
        messages: Messages | Sequence[Messages],
        template_options: Mapping[str, object] | None,
    ) -> list[Prompt]:
        """Make prompts of conversations by the model's chat template."""
        return [self._intake.chat(each, template_options or {}) for each in conversations(messages)]


@contextmanager
def _shown(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """Yield the progress callback: the caller's, a line on standard error, or None.

    Without a choice the line is shown if standard error is a terminal or notebook.
    """
    if progress is None:
        progress = is_watched()
    if callable(progress):
        yield progress
    elif not isinstance(progress, bool):
        raise UsageError(f"progress must be true, false or a function, not {progress!r}.")
    elif not progress:
        yield None
    else:
        with LoadingLine(sys.stderr) as line:
            yield line


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise UsageError(f"params must be SamplingParams, not {params!r}.")


def conversations(messages: object) -> list[Messages]:
    """Return a list of conversations, from one or from a list of them.

    A string is a user's first message. Raises UsageError.
    """
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    if isinstance(messages, Mapping):
        raise UsageError("chat takes a list of messages: put this one in a list.")
    each = [cast(Messages, messages)] if is_chat(messages) else listed(messages)
    each = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in each]
    for one in each:
        if not is_chat(one):
            raise UsageError(
                "chat takes messages, each with a role and a content, not "
                f"{type(one).__name__}; for text and token ids there is generate."
            )
    return cast(list[Messages], each)
