"""Behaviour of one kind of decoding; its facts are `config.Decoding`.

`Intake` asks a `Kind` for an answer's parameters and room before a model is loaded. `BatchDecoder`
asks it for the rows of a pass and passes it the results. It owns no sequence and no memory.
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

D = TypeVar("D", bound=Decoding)
S = TypeVar("S", bound=Running)
C = TypeVar("C")  # what a pass chose for one sequence

Blame = Callable[[Iterable[Running]], None]
"""Called before NumericError is raised, with the only sequences for which the pass failed."""


class Scheduled(NamedTuple, Generic[S]):
    """Entry of a pass, one sequence's part: positions `first` to `stop`, in rows from `start` on.

    With guidance, a second copy of the same positions follows the first. chunk_ends: of a prompt in
    several chunks, the position after each. cuts: see `Segment`.
    """

    sequence: S
    first: int
    stop: int
    start: int
    num_copies: int = 1
    chunk_ends: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Number of rows of one copy."""
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
        """True if all of its tokens are final."""
        return self.stop <= self.sequence.num_known


class Schedule(NamedTuple, Generic[S]):
    """The next pass. has_prompts: its time counts as time for prompts (`PromptShare`)."""

    kind: StepKind
    entries: list[Scheduled[S]]
    has_prompts: bool = False


class UsualPass(NamedTuple):
    """A typical pass of a long answer with published defaults, used to predict speed.

    num_tokens: tokens written at least. may_write_more: it writes all confident tokens.
    """

    num_rows: int
    num_tokens: float
    may_write_more: bool = False


class Kind(abc.ABC, Generic[D, S, C]):
    """One kind of decoding, for a model's facts and its use of the KV cache.

    use_kv_cache: False computes everything in every pass, as a slow reference.
    cache_mode: which keys and values outlast a pass of a kind that keeps none in exact mode.
    """

    absent_fields: frozenset[str]
    """Parameters that this kind does not have."""

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
        """The model's mask token, for kinds that need one."""
        if self.decoding.mask_token_id is None:
            raise InternalError(f"{type(self).__name__} needs a mask token, and there is none.")
        return self.decoding.mask_token_id

    # An answer's parameters and room.

    @abc.abstractmethod
    def resolved(self, asked: SamplingParams, config: ModelConfig) -> SamplingParams:
        """Return the parameters with the model's values for unset ones.

        Raises UsageError or UnsupportedError for parameters that this kind does not have.
        """

    def room_unit(self, diffusion: DiffusionParams) -> int:
        """Return the unit, in tokens, in which an answer takes room."""
        return diffusion.block_length or self.decoding.block_length

    def max_new_tokens(
        self, num_prompt: int, diffusion: DiffusionParams, context: int, max_positions: int
    ) -> int:
        """Return the longest answer that context and positions allow; negative if none."""
        unit = self.room_unit(diffusion)
        held = align_up(context, self.decoding.block_length)  # by the KV cache
        room = min(align_up(context, unit), held - held % unit)
        return min(room, max_positions) - num_prompt

    def check_room(self, num_prompt: int, params: SamplingParams, context: int) -> None:
        """Raise PlanError if there is no room for what an answer needs besides its own tokens."""

    def logit_needs(self, diffusion: DiffusionParams) -> LogitNeeds:
        """Return the statistics of logits that a pass needs besides the arg-max."""
        return LogitNeeds(False, False, False)

    @abc.abstractmethod
    def usual_pass(self, context: int) -> UsualPass:
        """Return the pass by which the speed of answers is predicted."""

    def num_tokens(self, request: Request) -> int:
        """Return the largest number of KV cache tokens that a request can take."""
        return request.canvas_length

    def room_tokens(self, request: Request, num_first: int) -> int:
        """Return the number of tokens that a request occupies at once for its first `num_first`."""
        return min(self.num_tokens(request), align_up(num_first, request.block_length))

    # Passes.

    @abc.abstractmethod
    def begin(self, request: Request) -> S:
        """Make a request's sequence, without room in the KV cache yet."""

    @abc.abstractmethod
    def schedule(self, running: Sequence[S], max_rows: int, share: PromptShare) -> Schedule[S]:
        """Choose the sequences of the next pass, with at most `max_rows` rows."""

    def lengthened(
        self, entry: Scheduled[S], max_rows: int, max_chunks: int, is_alone: bool
    ) -> Scheduled[S]:
        """Extend a prompt's entry by the chunks of its next passes, to at most `max_chunks`.

        Each chunk computes what it would in its own pass. is_alone: no other sequence would have
        rows in those passes.
        """
        return entry

    def end_tokens(self, entry: Scheduled[S]) -> int:
        """Return the number of tokens whose keys and values an entry writes or reads."""
        return entry.stop

    @abc.abstractmethod
    def pass_rows(self, entry: Scheduled[S]) -> PassRows:
        """Return the kind of each row of an entry, for all its copies."""

    def copies(self, entry: Scheduled[S]) -> list[tuple[IntArray, Segment]]:
        """Return each copy's tokens, with the segment that says which tokens they attend to."""
        sequence, first, stop, start, *_ = entry
        segment = Segment(
            start, entry.end, first, sequence.block_length, sequence.kv, cuts=entry.cuts
        )
        return [(sequence.tokens[first:stop], segment)]

    def asked(self, entries: Sequence[Scheduled[S]]) -> tuple[int, tuple[LogitNeeds, ...]]:
        """Return the most rows whose statistics are needed at once, and the kinds of statistics."""
        return 0, ()

    @abc.abstractmethod
    def choose(
        self, model: Model, hidden: Tensor, entries: Sequence[Scheduled[S]], blame: Blame
    ) -> list[C | None]:
        """Choose what each entry's sequence writes; None if the entry only filled the cache.

        Raises NumericError for logits that are not finite, after calling `blame`.
        """

    @abc.abstractmethod
    def written(self, entry: Scheduled[S], choice: C | None) -> list[Event]:
        """Advance an entry's sequence by its choice after the pass."""

    def paused(self, sequence: S) -> None:
        """Reset what a sequence derived from keys and values that it has lost."""

    # Texts that are there already.

    @abc.abstractmethod
    def forced(self, text: ForcedText, on_logits: OnLogits) -> Kind[D, S, C]:
        """Return this kind for one request whose tokens are given instead of chosen."""


def callers(sequences: Iterable[Running]) -> set[int]:
    return {sequence.request.caller for sequence in sequences}
