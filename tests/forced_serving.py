"""Service with scripted answers through the real engine, and a tiny model of long context for it.

The answers are forced token by token, and the context is long enough for coding agents. The
template, the ids, the kept keys, the grammar, the parser and the stream are those of any model;
only the choice of each token is given.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from agent_requests import words
from tokenizers import decoders, models, pre_tokenizers, trainers

from lowtide import AsyncLLM
from lowtide.core import BoolArray
from lowtide.decode.request import Event, Request, TokenMask
from lowtide.families import SynthSize, families
from lowtide.model_writing.synth import write_checkpoint
from lowtide.parsing.pieces import Done, Piece
from lowtide.serve.service import Ask, Service

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
"""Texts that the tokenizer is trained on, as agents write English and JSON; with `words`."""

NUM_MERGED = 4096  # of its tokens, bytes among them
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

TEMPLATE = """\
{% if tools %}
<|im_start|>system
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools><|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}
<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{ message.content }}{% for call in message.tool_calls or [] %}
{{ '' if loop.first and not message.content else '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
"""In Qwen's form; thoughts are kept, so that a turn begins with all of the turn before."""


TWO_LAYERS = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
}


def agent_model(
    folder: Path, context: int, family: str = "qwen3_moe", template: str = TEMPLATE
) -> Path:
    """A random model of so many positions with Qwen's marks."""
    backend = _tokenizer()
    eos_token_id = backend.get_vocab_size()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    backend.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in MARKS])
    tiny = families()[family].sizes()["tiny"]
    own = {
        "num_hidden_layers": 2,
        **TWO_LAYERS.get(family, {}),
        "vocab_size": backend.get_vocab_size(),
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
        "max_position_embeddings": context,
    }
    write_checkpoint(SynthSize({**tiny.config, **own}, eos_token_id, tiny.max_shard_bytes), folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Answered(NamedTuple):
    """A request that was answered to its end."""

    ask: Ask
    done: Done


class ForcedService(Service):
    """Service that answers conversations with tools by a script, and others with `aside`.

    Each turn has a text of its own; turns behind the script's end repeat its last one. answered:
    requests and their ends, in order.
    """

    def __init__(self, llm: AsyncLLM, script: Sequence[str], aside: str = "A repair.") -> None:
        super().__init__(llm)
        self.llm: Any = _Forcing(llm, self)
        self._script, self._aside = script, aside
        self._asked: ContextVar[Ask] = ContextVar("asked")  # of each client's task
        self._forced: list[ForcedTokens] = []
        self.answered: list[Answered] = []

    @property
    def num_refused(self) -> int:
        """Answers that their request's own grammar does not allow."""
        return sum(tokens.is_refused for tokens in self._forced)

    async def answer(self, ask: Ask, *, is_whole: bool = False) -> AsyncGenerator[Piece, None]:
        self._asked.set(ask)
        async with aclosing(super().answer(ask, is_whole=is_whole)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Done):
                    self.answered.append(Answered(ask, piece))
                yield piece

    def forced(self, request: Request) -> Request:
        """Return the request whose tokens are those of its turn."""
        tokenizer = self.llm.tokenizer
        ids = [*tokenizer.encode(self._text(self._asked.get())), *tokenizer.eos_token_ids]
        forced = ForcedTokens(ids, self.llm.config.vocab_size, request.mask)
        self._forced.append(forced)
        return replace(request, mask=forced)

    def _text(self, ask: Ask) -> str:
        if not ask.tools or ask.conversation is None:
            return self._aside
        num_turns = sum(turn.role == "assistant" for turn in ask.conversation.turns)
        return self._script[min(num_turns, len(self._script) - 1)]


class _Forcing:
    """A model to which a service's requests come with forced tokens."""

    def __init__(self, llm: AsyncLLM, service: ForcedService) -> None:
        self._llm, self._service = llm, service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def events(
        self, requests: Sequence[Request], *, is_whole: bool = False
    ) -> AsyncGenerator[Event, None]:
        forced = [self._service.forced(request) for request in requests]
        return self._llm.events(forced, is_whole=is_whole)


class ForcedTokens:
    """`TokenMask` that forces one answer, over the mask that the request has by itself.

    is_refused: the request's own mask did not allow one of the tokens.
    """

    def __init__(self, token_ids: Sequence[int], vocab_size: int, own: TokenMask | None) -> None:
        self.is_refused = False
        self._left, self._vocab_size, self._own = list(token_ids), vocab_size, own

    @property
    def is_free(self) -> bool:
        return False

    def allowed(self) -> BoolArray:
        token_id = self._left[0]
        if self._own is not None and not self._own.allowed()[token_id]:
            self.is_refused = True
        only = np.zeros(self._vocab_size, np.bool_)
        only[token_id] = True
        return only

    def permits(self, token_id: int) -> bool:
        return False

    def take(self, token_id: int) -> None:
        assert token_id == self._left.pop(0)
        if self._own is not None:
            self._own.take(token_id)


def _tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_MERGED, initial_alphabet=alphabet, show_progress=False
    )
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    made.train_from_iterator([*texts, words(100_000)], trainer)
    return made
