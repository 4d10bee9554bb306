"""`Completion`: one answer with its usage."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.core import CacheMode
from lowtide.decode.request import Finished, Request, TokenLogprobs
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.answer_pieces import pieces_of
from lowtide.parsing.pieces import Reasoning, Text, joined
from lowtide.plan import MemoryPlan, WeightFormats
from lowtide.policies.receipt import Receipt

_SHOWN_CHARS = 60
_SHOWN_IDS = 12


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, passes and approximations of a completion."""

    prompt_tokens: int
    completion_tokens: int
    forwards: int
    kv_cache: str = CacheMode.EXACT.value  # others are approximations, see `core.CacheMode`
    formats: WeightFormats = field(default_factory=WeightFormats)  # others than own may change it
    receipt: Receipt | None = None  # set under a policy that may change tokens
    cached_tokens: int = 0  # prompt tokens taken from an earlier request's KV cache


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One answer; `str()` returns its text.

    `text` is empty without a tokenizer. `reasoning` holds thoughts before the answer, which are not
    repeated in the next turn.
    """

    token_ids: list[int]
    text: str
    finish_reason: str  # "stop": an end-of-text token or a stop string; "length": max_tokens
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None  # one for each token, if asked for
    reasoning: str = ""  # of a model that marks its thoughts

    def __repr__(self) -> str:
        num_tokens = len(self.token_ids)
        return f"Completion({self._shown()}, {num_tokens} tokens, {self.finish_reason})"

    def __str__(self) -> str:
        return self.text

    def _shown(self) -> str:
        """Return the beginning of the text, or of the ids if there is none."""
        if self.text:
            cut = self.text[:_SHOWN_CHARS]
            return repr(cut) + ("..." if len(self.text) > len(cut) else "")
        ids = ", ".join(map(str, self.token_ids[:_SHOWN_IDS]))
        return f"[{ids}{', ...' if len(self.token_ids) > _SHOWN_IDS else ''}]"


def completion_of(
    request: Request, finished: Finished, tokenizer: Tokenizer | None, plan: MemoryPlan
) -> Completion:
    """Build the completion of a finished request."""
    token_ids, pieces = list(finished.token_ids), pieces_of(request, tokenizer)
    told = [*pieces.push(token_ids), *pieces.finish(finished.finish_reason == "length")]
    return Completion(
        token_ids=token_ids,
        text=joined(told, Text),
        finish_reason=finished.finish_reason,
        usage=Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=len(token_ids),
            forwards=finished.num_forwards,
            cached_tokens=finished.num_resumed,
            kv_cache=plan.kv_cache,
            formats=plan.formats,
            receipt=finished.receipt,
        ),
        logprobs=None if request.params.logprobs is None else list(finished.logprobs),
        reasoning=joined(told, Reasoning),
    )
