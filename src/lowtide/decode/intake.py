"""Turns prompts and parameters into requests that a decoder can run, or refuses them.

Prompts become token ids; parameters get the family's published defaults. No weight and no running
sequence is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np

from lowtide.config import ModelConfig
from lowtide.core import align_up
from lowtide.decode.kind import Kind
from lowtide.decode.prompts import Messages, Prompt, TokenIds, is_chat, one_text_of_ids
from lowtide.decode.request import Request
from lowtide.errors import PlanError, UsageError
from lowtide.model_folder.tokenizer import NO_TOKENIZER, Tokenizer
from lowtide.params import (
    MAX_SEED,
    DiffusionParams,
    SamplingParams,
    check_kind,
    field_names,
    listed_params,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Intake:
    """Makes requests for one model. seed: used where parameters have none."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    kind: Kind[Any, Any, Any]  # what the model's decoding does
    context: int  # tokens that room was asked for
    max_block_length: int
    seed: int = 0

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        is_raw: bool = False,
    ) -> list[Request]:
        """Make `n` requests for each prompt, prompt by prompt.

        is_raw: no chat template, and thoughts are not separated from answers. With one `params` for
        all, prompt i draws with `seed + i`, so that equal prompts differ; in a list each prompt has
        its own seed. A prompt's first answer uses its seed, the others seeds derived from it.
        Raises UsageError or PlanError for a request that cannot be fulfilled.
        """
        if isinstance(params, SamplingParams):
            first = self.seed if params.seed is None else params.seed
            seeds = [(first + index) % (MAX_SEED + 1) for index in range(len(prompts))]
            each = [replace(params, seed=seed) for seed in seeds]
        else:
            each = listed_params(params)
        if len(each) != len(prompts):
            raise UsageError(f"There are {len(prompts)} prompts and {len(each)} parameters.")
        return [
            request
            for prompt, asked in zip(prompts, each, strict=True)
            for request in self._samples(self.token_ids(prompt, is_raw), asked, is_raw)
        ]

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise UsageError for an empty list or an id out of range."""
        vocab_size = self.config.vocab_size
        if not len(token_ids):
            raise UsageError("The prompt is empty; give at least one token.")
        for token_id in token_ids:
            is_integer = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= token_id < vocab_size:
                raise UsageError(f"Prompt id {token_id!r} is not one of 0 to {vocab_size - 1}.")

    def check_fits(self, num_prompt: int, max_tokens: int, block_length: int) -> None:
        """Raise PlanError if prompt and new tokens exceed the context or the model's positions.

        The context is counted in whole blocks. Bidirectional models' published code accepts texts
        of any length, so exceeding their positions only causes a warning.
        """
        if (
            num_prompt + max_tokens > self.config.max_positions
            and not self.config.decoding.keeps_keys
        ):
            _warn_beyond(self.config.architecture, self.config.max_positions)
        elif num_prompt > self.config.max_positions:
            raise PlanError(
                f"A text of {num_prompt} tokens does not fit: this model has "
                f"{self.config.max_positions} positions. Shorten it."
            )
        elif num_prompt + max_tokens > self.config.max_positions:
            raise PlanError(
                f"{num_prompt} prompt tokens and {max_tokens} new ones are more than the "
                f"{self.config.max_positions} positions of this model. Lower `max_tokens`."
            )
        own_length = self.config.decoding.block_length
        canvas = align_up(num_prompt + max_tokens, block_length)
        # The KV cache holds whole blocks of the model's own length.
        if canvas > min(align_up(self.context, unit) for unit in (block_length, own_length)):
            if not max_tokens:
                raise PlanError(
                    f"A text of {num_prompt} tokens does not fit: the context is {self.context}. "
                    "Shorten it or raise `context`."
                )
            raise PlanError(
                f"{num_prompt} prompt tokens and {max_tokens} new ones need {canvas} tokens; the "
                f"context is {self.context}. Lower `max_tokens` or raise `context`."
            )

    def check_block_length(self, block_length: int) -> None:
        """Raise UsageError for a block length that a pass or the model's routing does not allow."""
        experts = self.config.experts
        window = experts.window_tokens if experts and experts.capacity else 1
        if block_length > self.max_block_length:
            raise UsageError(
                f"`block_length` {block_length} is above the most, {self.max_block_length}."
            )
        if block_length % window:
            raise UsageError(
                f"This model routes in windows of {window} tokens: `block_length` must be a "
                f"multiple of that, not {block_length}."
            )

    def _samples(self, token_ids: list[int], asked: SamplingParams, is_raw: bool) -> list[Request]:
        """Return the `n` requests of one prompt."""
        params = self._resolved(self._with_length(asked, len(token_ids)))
        self._check_room(len(token_ids), params)
        if params.stop_strings:
            self._needed_tokenizer()
        seed = self.seed if params.seed is None else params.seed
        return [
            Request(
                prompt=token_ids,
                params=params,
                eos_token_ids=self.config.eos_token_ids,
                seed=sample_seed(seed, sample),
                is_raw=is_raw,
            )
            for sample in range(params.n)
        ]

    def _with_length(self, asked: SamplingParams, num_prompt: int) -> SamplingParams:
        """Return `asked` with `max_tokens` set: by default all that the context leaves.

        A canvas is computed whole, so its default is the published length. Raises PlanError for a
        prompt that leaves no room.
        """
        if asked.max_tokens is not None:
            return asked
        room = self.max_new_tokens(num_prompt, asked)
        if room < 1:
            self._check_block_fits(num_prompt, asked)
            raise PlanError(
                f"{num_prompt} prompt tokens leave no room for an answer: the context is "
                f"{self.context} tokens. Shorten the prompt or raise `context`."
            )
        canvas = room if self.config.decoding.keeps_keys else asked.most_tokens
        return replace(asked, max_tokens=min(canvas, room))

    def _check_block_fits(self, num_prompt: int, asked: SamplingParams) -> None:
        """Raise PlanError if there is room for new tokens but not for a whole block."""
        unset = replace(asked.diffusion, block_length=None)
        free = self.max_new_tokens(num_prompt, replace(asked, diffusion=unset))
        if free > 0:
            raise PlanError(
                f"A block of {asked.diffusion.block_length} tokens is more than the {free} that "
                f"{num_prompt} prompt tokens leave: the context is {self.context}. Lower "
                "`block_length`, shorten the prompt or raise `context`."
            )

    def max_new_tokens(self, num_prompt: int, asked: SamplingParams) -> int:
        """Return the number of tokens that context and positions leave for an answer.

        It is 0 or less if the prompt itself is too long.
        """
        return self.kind.max_new_tokens(
            num_prompt, asked.diffusion, self.context, self.config.max_positions
        )

    def _check_room(self, num_prompt: int, params: SamplingParams) -> None:
        """Raise PlanError if an answer does not fit."""
        self.check_fits(num_prompt, params.most_tokens, self.kind.room_unit(params.diffusion))
        self.kind.check_room(num_prompt, params, self.context)

    def in_force(self, asked: SamplingParams) -> SamplingParams:
        """Return `asked` with the model's defaults for unset parameters, except the length.

        Raises UsageError or UnsupportedError for options that this model does not have.
        """
        seed = self.seed if asked.seed is None else asked.seed
        return replace(self._resolved(asked), seed=seed)

    def answer_fields(self) -> tuple[str, ...]:
        """Return the names of the parameters that this model has; some belong to one rule."""
        own = [name for name in field_names(SamplingParams) if name != "diffusion"]
        named = [*own, *field_names(DiffusionParams)]
        return tuple(name for name in named if name not in self.kind.absent_fields)

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the family's published defaults for unset parameters."""
        check_kind(params, self.config.architecture, self.config.decoding.writes_in_order)
        if params.ignore_eos and params.diffusion.eos_early_stop:
            raise UsageError(
                "`eos_early_stop` ends an answer at its end-of-text token and `ignore_eos` goes on "
                "after it: leave one of them out."
            )
        resolved = self.kind.resolved(params, self.config)
        block_length = resolved.diffusion.block_length
        if block_length is not None and self.config.decoding.keeps_keys:
            self.check_block_length(block_length)  # blocks that a pass is made of
        return resolved

    def token_ids(
        self,
        prompt: Prompt,
        is_raw: bool = False,
        template_options: Mapping[str, object] | None = None,
        adds_special: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Return a prompt's token ids.

        A text becomes a user message if the model has a chat template. With `is_raw` it is encoded
        as it is, after the tokens that the tokenizer adds. Raises UsageError for an empty prompt,
        for text without a tokenizer, and as soon as a text certainly exceeds `most` tokens.
        """
        if isinstance(prompt, str):
            tokenizer = self._needed_tokenizer()
            if prompt and not is_raw and tokenizer.has_chat_template:
                return self.chat(
                    [{"role": "user", "content": prompt}], template_options or {}, most
                )
            token_ids = tokenizer.encode(prompt, add_special=adds_special, most=most)
        elif is_chat(prompt):
            return self.chat(cast(Messages, prompt), template_options or {}, most)
        else:
            token_ids = one_text_of_ids(cast(TokenIds, prompt))
        self.check_ids(token_ids)
        return token_ids

    def chat(
        self, messages: Messages, template_options: Mapping[str, object], most: int | None = None
    ) -> list[int]:
        """Encode a conversation by the model's chat template. Raise UsageError, also without one.

        template_options: further variables of the template, such as `enable_thinking`.
        """
        tokenizer = self._needed_tokenizer()
        token_ids = tokenizer.encode_chat(messages, template_options, most)
        self.check_ids(token_ids)
        return token_ids

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(
                f"{NO_TOKENIZER}, so there is no text: give token ids as the prompt "
                '(on the command line --prompt-ids "5 17 3") and no stop strings, or fetch what '
                "has one."
            )
        return self.tokenizer


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of one of several answers to a prompt; the first uses `seed` itself."""
    if not sample:
        return seed
    [word] = np.random.SeedSequence((seed, sample)).generate_state(1, np.uint64)
    return int(word) >> 1


@cache  # once, however many texts are so long
def _warn_beyond(architecture: str, max_positions: int) -> None:
    _log.warning(
        "%s was made for texts of up to %d tokens; longer ones are computed as published, and may "
        "be answered badly.",
        architecture,
        max_positions,
    )
