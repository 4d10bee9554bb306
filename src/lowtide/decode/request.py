"""What a decoder is asked, `Request`, and what it reports, the events.

Plain data, the same for every kind of decoding; who fills what in when is the decoder's business.
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


class TokenMask(Protocol):
    """Which tokens an answer may go on with: one answer's own, asked on the thread that decodes.

    It raises nothing, for a pass has other answers, too: where it cannot go on it ends the answer.
    """

    @property
    def is_free(self) -> bool:
        """Whether any token may come next: it is not asked which, then."""
        ...

    def allowed(self) -> BoolArray:
        """Return bool [vocab], at least one of them true; end of text where the answer may end.

        Asked again before `take`, it returns the same.
        """
        ...

    def permits(self, token_id: int) -> bool:
        """Return True if the model's choice may come without `allowed` being asked.

        It may also come where `allowed` has another way to write the same text.
        """
        ...

    def take(self, token_id: int) -> None:
        """Note the token with which the answer has gone on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    id: names the request in its events; no other of this process has it. params: with the
    family's defaults filled in. eos_token_ids end the answer, which keeps the first of them.
    is_stopped: asked, with the new tokens so far, whether they are enough: after every token, or
    at each finished block. mask: of an autoregressive answer that is not free. is_raw: all of the
    answer is its text, thoughts included. caller: the same for requests that were asked together.
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
        """New tokens at most."""
        return self.params.most_tokens

    @property
    def block_length(self) -> int:
        """Tokens that are written together; 1 for an autoregressive model."""
        return self.params.diffusion.block_length or 1

    @property
    def steps(self) -> int:
        """Denoising steps per block; as published, no more than new tokens."""
        return min(self.params.diffusion.steps or 1, self.max_tokens)

    @property
    def threshold(self) -> float:
        """Confidence from which a token is written."""
        return self.params.diffusion.threshold or 0.0

    @property
    def edit_threshold(self) -> float | None:
        """`None` where written tokens are never replaced."""
        diffusion = self.params.diffusion
        return diffusion.edit_threshold if diffusion.can_edit else None

    @property
    def max_post_steps(self) -> int:
        """Passes that may edit a block without masks."""
        return self.params.diffusion.max_post_steps or 0

    @property
    def canvas_length(self) -> int:
        """Prompt and new tokens, in whole blocks: the KV cache that the request may need."""
        return align_up(len(self.prompt) + self.max_tokens, self.block_length)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities at one new token's place.

    Before temperature, penalties and filters. `top` are the likeliest (token id, logarithm)
    pairs, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Prefill(NamedTuple):
    """Progress before a request's next tokens: the number of final tokens cached, and their total.

    The first is told when the request begins, before its first pass, and counts the reused tokens.
    """

    request: int
    num_done: int
    num_total: int

    @property
    def text(self) -> str:
        """Empty: progress brings no text."""
        return ""


@dataclass(frozen=True, slots=True, repr=False)
class Draft:
    """The active block after a denoising pass. Masked positions hold the mask id.

    Its first `num_shown` positions are of the prompt and of the answer as it stands, which a
    written end token ends, or `max_tokens`.
    """

    request: int
    block_start: int  # absolute position; a first block may begin with the prompt's last tokens
    tokens: tuple[int, ...]
    is_masked: tuple[bool, ...]
    num_forwards: int  # denoising passes of this request so far
    num_shown: int

    @property
    def text(self) -> str:
        """None of it is final."""
        return ""

    def __repr__(self) -> str:
        masked = f"{sum(self.is_masked)} of {len(self.tokens)} masked"
        return f"Draft(request {self.request}, block at {self.block_start}, {masked})"


@dataclass(frozen=True, slots=True, repr=False)
class Committed:
    """New tokens of the answer that will not change any more; `logprobs` for each, if asked.

    `text` is what is certain with them: whole characters, and none with which a stop string may
    have begun; `reasoning` the same of the thoughts before it, where the model marks them. A
    decoder leaves both empty; `answers.reporter` fills them in.
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
    """A request's last event: the whole answer, and why it ends ("stop" or "length").

    `text` and `reasoning` are what was held back until now: those of all events, joined, are the
    answer's.
    """

    request: int
    token_ids: tuple[int, ...]
    finish_reason: str
    num_forwards: int  # passes that could write tokens; those that only filled the cache are not
    num_resumed: int = 0  # tokens of its prompt that were not computed: their keys were kept
    logprobs: tuple[TokenLogprobs, ...] = ()
    receipt: Receipt | None = None  # what a policy that may change words did to them
    text: str = ""
    reasoning: str = ""

    def __repr__(self) -> str:
        ends = f"{len(self.token_ids)} tokens, {self.finish_reason}"
        return f"Finished(request {self.request}, {ends}, {self.text!r})"


Event = Prefill | Draft | Committed | Finished


def named(event: Event, request: int) -> Event:
    """Return the event with another id of its request."""
    if isinstance(event, Prefill):
        return event._replace(request=request)
    return replace(event, request=request)
