"""A decoder's input, `Request`, and its output, the events.

Plain data, the same for every kind of decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from lowtide.core import BoolArray, align_up
from lowtide.params import SamplingParams
from lowtide.policies.receipt import Receipt

_ids = itertools.count()
_callers = itertools.count(1)


def new_caller() -> int:
    """Return a `Request.caller` that no other requests have."""
    return next(_callers)


class TokenMask(Protocol):
    """The tokens with which one answer may continue; called on the decoding thread.

    It never raises, because other answers share the pass: an answer that cannot continue ends.
    """

    @property
    def is_free(self) -> bool:
        """True if any token may come next; `allowed` is then not called."""
        ...

    def allowed(self) -> BoolArray:
        """Return bool [vocab] with at least one true; an end token where the answer may end.

        Called again before `take`, it returns the same.
        """
        ...

    def permits(self, token_id: int) -> bool:
        """Return True if the model's choice may be taken without calling `allowed`.

        It may be true of a token that `allowed` would write in another way.
        """
        ...

    def take(self, token_id: int) -> None:
        """Record the token with which the answer has continued."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    id: unique in this process; names the request in its events.
    params: with the family's defaults filled in.
    eos_token_ids: end the answer, which keeps the first of them.
    is_stopped: called with the new tokens, after each token or finished block; True ends the
    answer.
    mask: constrains an autoregressive answer.
    is_raw: thoughts are part of the answer's text.
    caller: requests of one delay only each other; 0: those of the same call.
    """

    prompt: Sequence[int]
    params: SamplingParams
    id: int = field(default_factory=lambda: next(_ids))
    eos_token_ids: Collection[int] = ()
    seed: int = 0
    is_stopped: Callable[[Sequence[int]], bool] | None = None
    mask: TokenMask | None = None
    is_raw: bool = False
    caller: int = 0

    @property
    def max_tokens(self) -> int:
        """The most new tokens."""
        return self.params.most_tokens

    @property
    def block_length(self) -> int:
        """Number of tokens written together; 1 for an autoregressive model."""
        return self.params.diffusion.block_length or 1

    @property
    def steps(self) -> int:
        """Denoising steps per block; as published, at most the number of new tokens."""
        return min(self.params.diffusion.steps or 1, self.max_tokens)

    @property
    def threshold(self) -> float:
        """Confidence above which a token is written."""
        return self.params.diffusion.threshold or 0.0

    @property
    def edit_threshold(self) -> float | None:
        """Confidence above which a written token is replaced; None: never."""
        diffusion = self.params.diffusion
        return diffusion.edit_threshold if diffusion.can_edit else None

    @property
    def max_post_steps(self) -> int:
        """Most passes that may edit a block without masks."""
        return self.params.diffusion.max_post_steps or 0

    @property
    def canvas_length(self) -> int:
        """Prompt and new tokens in whole blocks: the most of the KV cache that it needs."""
        return align_up(len(self.prompt) + self.max_tokens, self.block_length)


class TokenLogprobs(NamedTuple):
    """The model's log-probabilities at one new token's position.

    Natural logarithms, before temperature, penalties and filters. `top` are the likeliest (token
    id, logarithm) pairs, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Prefill(NamedTuple):
    """Progress with a prompt: the number of final tokens in the KV cache, and their total.

    The first one comes when the request begins, before its first pass, and counts reused tokens.
    Within a pass over several chunks of a prompt it has the share of them that is computed.
    """

    request: int
    num_done: int
    num_total: int

    @property
    def text(self) -> str:
        """Always empty: progress has no text."""
        return ""


@dataclass(frozen=True, slots=True, repr=False)
class Draft:
    """The active block after a denoising pass. Masked positions hold the mask id.

    Its first `num_shown` positions belong to the prompt and to the answer as written so far, which
    ends at an end token or after `max_tokens`. The last three fields are empty for a kind that does
    not tell them.
    """

    request: int
    block_start: int  # absolute position; a first block may begin with the prompt's last tokens
    tokens: tuple[int, ...]
    is_masked: tuple[bool, ...]
    num_forwards: int  # denoising passes of this request so far
    num_shown: int
    steps: tuple[int, ...] = ()  # the pass that wrote each token, counted from 1; 0: none has
    candidates: tuple[int, ...] = ()  # the tokens; where masked the latest pass's choice, if any
    confidence: tuple[float, ...] = ()  # the probability of each candidate as it was chosen

    @property
    def text(self) -> str:
        """Always empty: no text of a draft is final."""
        return ""

    def __repr__(self) -> str:
        masked = f"{sum(self.is_masked)} of {len(self.tokens)} masked"
        return f"Draft(request {self.request}, block at {self.block_start}, {masked})"


@dataclass(frozen=True, slots=True, repr=False)
class Committed:
    """New final tokens of the answer, with `logprobs` for each if requested.

    `text` is the text that is certain with them: whole characters, and nothing that may be the
    beginning of a stop string. `reasoning` is the same of the thoughts before the answer, if the
    model marks them. A decoder leaves both empty; `answers.reporter` fills them in.
    """

    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    text: str = ""
    reasoning: str = ""

    def __repr__(self) -> str:
        return f"Committed(request {self.request}, {len(self.tokens)} tokens, {self.text!r})"


@dataclass(frozen=True, slots=True, repr=False)
class Finished:
    """A request's last event: the whole answer, and why it ended ("stop" or "length").

    `text` and `reasoning` are the parts held back so far; joined over all events they are complete.
    """

    request: int
    token_ids: tuple[int, ...]
    finish_reason: str
    num_forwards: int  # passes that could write tokens; those that only filled the cache are not
    num_resumed: int = 0  # tokens of its prompt reused from the KV cache
    logprobs: tuple[TokenLogprobs, ...] = ()
    receipt: Receipt | None = None  # from a policy that may change words
    text: str = ""
    reasoning: str = ""

    def __repr__(self) -> str:
        ends = f"{len(self.token_ids)} tokens, {self.finish_reason}"
        return f"Finished(request {self.request}, {ends}, {self.text!r})"


Event = Prefill | Draft | Committed | Finished


def named(event: Event, request: int) -> Event:
    """Return the event with another request id."""
    if isinstance(event, Prefill):
        return event._replace(request=request)
    return replace(event, request=request)
