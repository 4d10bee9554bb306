"""`Kind`: what one kind of decoding does, where `config.Decoding` says what it is.

A kind is asked for the room and the parameters of an answer before a model is loaded, and by
`BatchDecoder` who takes part in a pass, with which rows, and what comes of its outcome. It owns no
sequence and no memory.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch import Tensor

from lowtide.config import Decoding, ModelConfig
from lowtide.core import CacheMode, IntArray, PassRows, StepKind, align_up
from lowtide.decode.kept_sequences import Running
from lowtide.decode.logits import Model
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Event, Request
from lowtide.errors import InternalError
from lowtide.layers.batch import Segment
from lowtide.memory.chunking import LogitNeeds
from lowtide.params import DiffusionParams, SamplingParams

if TYPE_CHECKING:
    from lowtide.decode.forced import ForcedText, OnLogits

ROOM_TOKENS = 256
"""New tokens that a request has room for when it begins, and that its room grows by."""

D = TypeVar("D", bound=Decoding)
S = TypeVar("S", bound=Running)
C = TypeVar("C")  # what a pass chose for one sequence

Blame = Callable[[Iterable[Running]], None]
"""Told, before NumericError is raised, for which sequences alone the pass has failed."""


class Scheduled(NamedTuple, Generic[S]):
    """A sequence's part in a pass: its positions `first` to `stop`, in the rows from `start` on.

    With guidance there is a second copy of the same positions behind the first.
    """

    sequence: S
    first: int
    stop: int
    start: int
    num_copies: int = 1

    @property
    def length(self) -> int:
        """Rows of a copy."""
        return self.stop - self.first

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.start + self.num_copies * self.length

    @property
    def starts(self) -> range:
        """The first row of each copy."""
        return range(self.start, self.end, self.length)

    @property
    def is_final(self) -> bool:
        """True where all of its tokens stay as they are."""
        return self.stop <= self.sequence.num_known


class Schedule(NamedTuple, Generic[S]):
    """The next pass. has_prompts: its time is taken from the share of prompts."""

    kind: StepKind
    turns: list[Scheduled[S]]
    has_prompts: bool = False


class UsualPass(NamedTuple):
    """A pass of a long answer by the published defaults, as its speed is foretold.

    num_tokens: written at least. may_write_more: all that are sure enough are written.
    """

    num_rows: int
    num_tokens: float
    may_write_more: bool = False


class Kind(abc.ABC, Generic[D, S, C]):
    """One kind of decoding, by the facts of a model and its way with keys and values.

    use_kv_cache: False computes everything again in every pass, a slow reference. cache_mode:
    which keys and values outlast a pass where, in exact mode, none do.
    """

    absent_fields: frozenset[str]
    """Parameters that an answer of this kind does not have."""

    def __init__(
        self,
        decoding: D,
        use_kv_cache: bool = True,
        cache_mode: CacheMode = CacheMode.EXACT,
    ) -> None:
        self.decoding = decoding
        self.use_kv_cache = use_kv_cache
        self.cache_mode = cache_mode

    @property
    def mask_token_id(self) -> int:
        """The model's mask token, for kinds that cannot do without one."""
        if self.decoding.mask_token_id is None:
            raise InternalError(f"{type(self).__name__} needs a mask token, and there is none.")
        return self.decoding.mask_token_id

    # What an answer may ask, and the room it takes.

    @abc.abstractmethod
    def resolved(self, asked: SamplingParams, config: ModelConfig) -> SamplingParams:
        """`asked` with the model's own values where nothing was asked.

        Raises UsageError or UnsupportedError for what this kind does not have.
        """

    def room_unit(self, diffusion: DiffusionParams) -> int:
        """Tokens that an answer's room is taken in whole multiples of."""
        return diffusion.block_length or self.decoding.block_length

    def max_new_tokens(
        self, num_prompt: int, diffusion: DiffusionParams, context: int, max_positions: int
    ) -> int:
        """The longest answer that the context, or the model's positions, leave; may be below 0."""
        return min(align_up(context, self.room_unit(diffusion)), max_positions) - num_prompt

    def check_room(self, num_prompt: int, params: SamplingParams, context: int) -> None:
        """Refuse an answer that takes more than its own tokens' room. Raises PlanError."""

    def logit_needs(self, diffusion: DiffusionParams) -> LogitNeeds:
        """What a pass asks of its rows beside their arg-max."""
        return LogitNeeds(False, False, False)

    @abc.abstractmethod
    def usual_pass(self, context: int) -> UsualPass:
        """The pass by which the speed of answers is foretold."""

    def num_tokens(self, request: Request) -> int:
        """Tokens of the KV cache that a request takes at most."""
        return request.canvas_length

    def room_tokens(self, request: Request, num_known: int) -> int:
        """The room that a request begins or goes on with when `num_known` tokens are known."""
        first = align_up(num_known + ROOM_TOKENS, request.block_length)
        return min(self.num_tokens(request), first)

    # Passes.

    @abc.abstractmethod
    def begin(self, request: Request) -> S:
        """The sequence of a request, which has no room yet."""

    @abc.abstractmethod
    def schedule(self, running: Sequence[S], max_rows: int, share: PromptShare) -> Schedule[S]:
        """The next pass of those that run, with at most `max_rows` rows; perhaps without any."""

    def end_tokens(self, turn: Scheduled[S]) -> int:
        """Tokens of its range whose keys and values a turn writes or sees."""
        return turn.stop

    @abc.abstractmethod
    def pass_rows(self, turn: Scheduled[S]) -> PassRows:
        """What becomes of a turn's rows, of all its copies."""

    def copies(self, turn: Scheduled[S]) -> list[tuple[IntArray, Segment]]:
        """The tokens of each copy of a turn, and how they see each other."""
        sequence, first, stop, start, _ = turn
        segment = Segment(start, turn.end, first, sequence.block_length, sequence.kv)
        return [(sequence.tokens[first:stop], segment)]

    def asked(self, turns: Sequence[Scheduled[S]]) -> tuple[int, tuple[LogitNeeds, ...]]:
        """The rows whose statistics are asked for after a pass, of each kind, and the kinds."""
        return 0, ()

    @abc.abstractmethod
    def choose(
        self, model: Model, hidden: Tensor, turns: Sequence[Scheduled[S]], blame: Blame
    ) -> list[C | None]:
        """What each turn's sequence goes on with; None where it only filled the cache.

        Raises NumericError for logits that are not finite, once `blame` is told whose.
        """

    @abc.abstractmethod
    def written(self, turn: Scheduled[S], choice: C | None) -> list[Event]:
        """Have a sequence go on by what was chosen, after its pass."""

    def paused(self, sequence: S) -> None:
        """Have a sequence forget what is gone with its keys and values."""

    # Texts that are there already.

    @abc.abstractmethod
    def forced(self, text: ForcedText, on_logits: OnLogits) -> Kind[D, S, C]:
        """The same kind, for one request whose tokens are given instead of chosen."""


def callers(sequences: Iterable[Running]) -> set[int]:
    return {sequence.request.caller for sequence in sequences}
