"""What `LLM` and `AsyncLLM` share: a loaded model, its facts, and the way from prompts to requests.

How the engine behind it is put together is the business of `engine/`.
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
from lowtide.answers.opening import intake_of, opened_model
from lowtide.answers.progress_line import LoadingLine, is_watched
from lowtide.config import ModelConfig, format_size
from lowtide.decode.prompts import Messages, Prompt, TokenIds, is_chat, listed, one_text_of_ids
from lowtide.decode.request import Finished, Request
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.planning.passes import PlannedPass, plan_steps
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.running import probing
from lowtide.engine.running.engine import Engine
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
    """What editors and `help` show of `LLM(...)`: the options by name, with their defaults."""
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = inspect.signature(EngineConfig).parameters.values()
    mappings = {f.name for f in fields(EngineConfig) if f.default is MISSING}
    return inspect.Signature(
        [model, *(o.replace(default=None) if o.name in mappings else o for o in options)]
    )


class LoadedModel:
    """A model under a memory budget.

    Owns the engine's loop. How its answers are waited for is said by `LLM` and `AsyncLLM`.
    """

    __signature__ = _signature()

    def __init__(self, model: str | Path, **options: Unpack[ModelKeywords]) -> None:
        self._name = str(model)
        with _shown(options.get("progress")) as progress:
            opened = opened_model(model, {**options, "progress": progress})
            self._loop = EngineLoop(load(opened, make_plan(opened)))
        self._intake = intake_of(opened)

    @property
    def name(self) -> str:
        """The model as it was asked for: a folder, a file, a hub id or a demo."""
        return self._name

    @property
    def path(self) -> Path:
        """What its weights are read from: a folder, or a GGUF file, of several the first."""
        return self._engine.opened.folder

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._loop.is_closed

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
    def has_chat_template(self) -> bool:
        """Whether `chat` can be asked."""
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    @property
    def device(self) -> str:
        """One line on the device beside the host, for people; empty where there is none."""
        tier = self._engine.experts.device
        return "" if tier is None else tier.device.describe()

    @property
    def kernels(self) -> str:
        """Which of the host's kernels compute: `torch`, or `compiled` and the processor's
        instructions that they use.
        """
        return self._engine.opened.kernels.name

    @property
    def dtype(self) -> torch.dtype:
        """That it computes in."""
        return self._engine.opened.dtype

    @property
    def fingerprint(self) -> str:
        """Identifies the weights, in every compute dtype: a buddy profile belongs to it."""
        return self._engine.opened.fingerprint

    @property
    def routers(self) -> list[Router]:
        """Those of the MoE layers, in order."""
        return [self._engine.model.router(layer) for layer in self.config.moe_layers]

    def max_new_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The longest answer that an otherwise empty context has room for after such a prompt; 0
        where there is none. Raises UsageError for what is no count or no parameters.
        """
        num_prompt_tokens = check_int("num_prompt_tokens", num_prompt_tokens, 0)
        _check_params(params)
        return max(0, self._intake.max_new_tokens(num_prompt_tokens, params))

    def params_in_force(self, params: SamplingParams) -> SamplingParams:
        """`params` with the model's own values where nothing was asked. Raises UsageError or
        UnsupportedError for what an answer of this model cannot be asked.
        """
        _check_params(params)
        return self._intake.in_force(params)

    @property
    def answer_fields(self) -> tuple[str, ...]:
        """Names of the parameters that an answer of this model has."""
        return self._intake.answer_fields()

    @property
    def current_pass(self) -> PassPlan | None:
        """How the pass under way is planned, or the last one; None where all passes have one plan
        or none has begun.
        """
        plans = self._engine.pass_plans
        return None if plans is None else plans.current

    def planned_passes(
        self, num_tokens: int, params: SamplingParams | None = None
    ) -> list[PlannedPass]:
        """How passes of a bidirectional model over so many tokens divide their operators, at
        several shares of masks; of other models nothing. Raises UsageError for what is no count or
        no parameters.

        params: of an answer whose passes these are, with its new tokens as masks; by default all
        tokens are masked at first.
        """
        num_tokens = check_int("num_tokens", num_tokens, 1)
        if params is not None:
            _check_params(params)
        if not self.config.is_bidirectional:
            return []
        max_masked, diffusion = num_tokens, None
        if params is not None:
            max_masked, diffusion = min(num_tokens, params.most_tokens), params.diffusion
        return plan_steps(self._engine.opened, self.plan, num_tokens, max_masked, diffusion)

    def __reduce__(self) -> NoReturn:
        """Threads and memory are one process's: raises UsageError where pickle would fail."""
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
        """finished: the last event of each request, by its place."""
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
        """A request for each prompt, with `params` and the keywords that override them."""
        asked: SamplingParams | list[SamplingParams]
        if params is None or isinstance(params, SamplingParams):
            asked = with_keywords(params, given)
        else:
            asked = [with_keywords(one, given) for one in listed_params(params)]
        requests = self._intake.requests(prompts, asked, raw)
        return [with_stop_test(request, self.tokenizer) for request in requests]

    def _logits_work(self, token_ids: TokenIds) -> tuple[Passes[Tensor], int]:
        """What makes `logits`, and the tokens of KV cache that it takes. Raises as `logits`."""
        ids = self._text_ids(token_ids)
        block_length = self._engine.opened.options.block_length or self.config.block_length
        self._intake.check_block_length(block_length)
        if self.config.is_bidirectional:
            block_length = len(ids)
        return partial(probing.logits, token_ids=ids, block_length=block_length), len(ids)

    def _text_ids(self, token_ids: TokenIds) -> list[int]:
        """The ids of one text that fits. Raises UsageError or PlanError."""
        ids = one_text_of_ids(token_ids)
        self._intake.check_ids(ids)
        self._intake.check_fits(len(ids), 0, 1)
        return ids

    def _chats(
        self,
        messages: Messages | Sequence[Messages],
        template_options: Mapping[str, object] | None,
    ) -> list[Prompt]:
        """Conversations as prompts, by the model's chat template."""
        return [self._intake.chat(each, template_options or {}) for each in conversations(messages)]


@contextmanager
def _shown(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """What is told how far loading is: the callback given, or a line on standard error if that is
    wished or, where nothing is said, standard error is a terminal.
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
    """A list of conversations, from one or from a list of them; a text is what a user says first.
    Raises UsageError.
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
