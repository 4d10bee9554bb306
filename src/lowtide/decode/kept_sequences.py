"""Reuse of finished sequences' KV cache by new requests.

A conversation's next turn begins with the whole previous turn and takes over its range in place. A
request that shares only a beginning, such as a system prompt, gets a copy, so that both remain
usable. `KVCache` drops ranges, least recently used first.

A sequence with states can be taken up only where they were copied, at places that are chosen here
(`Running.cuts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lowtide.core import IntArray, Reuse
from lowtide.decode.request import Request
from lowtide.decode.stored_sequences import StoredSequences
from lowtide.errors import PageError
from lowtide.files.kept_file import num_common
from lowtide.memory.kv_cache import KVCache, KVRange

MIN_SHARED_TOKENS = 16
"""Shorter common beginnings are computed again: a copy would not pay."""

MIN_AWAITED_TOKENS = 64
"""A request waits if another one is computing at least this many common tokens."""

TEMPLATE_TOKENS = 8
"""Tokens at a prompt's end that a chat template may drop once an answer follows."""

MAX_TAIL_TOKENS = 64
"""More than these are not dropped by a template: the prompts differ."""

SNAPSHOT_TOKENS = 2048
"""Distance of the places at which states are copied while there is room."""


class Running(Protocol):
    """A sequence whose first `num_cached` tokens have keys and values.

    num_exact: tokens computed as for a request alone, in whole passes of the most rows.
    num_resumed: tokens reused at its start. has_begun: set by its first pass. cuts: places at
    which states are copied.
    """

    kv: KVRange
    tokens: IntArray
    num_cached: int
    num_exact: int
    num_resumed: int
    has_begun: bool
    cuts: set[int]

    @property
    def request(self) -> Request: ...

    @property
    def num_known(self) -> int:
        """Number of leading tokens that are final."""
        ...

    @property
    def block_length(self) -> int: ...

    @property
    def is_finished(self) -> bool: ...

    @property
    def is_expected_to_end(self) -> bool: ...

    @property
    def num_block_passes(self) -> int | None:
        """Number of passes over the active block so far; None if the kind has no blocks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KeptSequence:
    """Tokens [n] of a finished sequence; their keys and values are in `kv`."""

    tokens: IntArray
    num_prompt: int
    block_length: int
    kv: KVRange


class _Beginning(NamedTuple):
    """A reusable beginning: `num_tokens` of a range. kept: its finished owner, if any."""

    num_tokens: int
    kv: KVRange
    kept: KeptSequence | None

    @property
    def is_same_conversation(self) -> bool:
        """True if reuse in place would lose nothing but the kept sequence's last answer."""
        if self.kept is None:
            return False
        num_own = min(self.kept.num_prompt, len(self.kept.tokens))
        whole = num_own - TEMPLATE_TOKENS - self.kept.block_length + 1
        return self.num_tokens >= min(whole, len(self.kept.tokens))


class KeptSequences:
    """Owns the finished sequences that one decoder keeps. Used between passes only.

    stored: also keeps them in files; None: in memory only.
    """

    stored: StoredSequences | None = None

    def __init__(
        self, kv_cache: KVCache, reuse: Reuse, max_rows: int, tail_tokens: int = 0
    ) -> None:
        """tail_tokens: tokens at a prompt's end that the next turn will not have; 0: not known.

        The turns that come tell it better.
        """
        self._tail_tokens = tail_tokens
        self._has_tail = 0 < tail_tokens <= MIN_SHARED_TOKENS
        self._kv_cache = kv_cache
        self._reuse = reuse
        self._max_rows = max_rows
        self._kept: list[KeptSequence] = []

    def begin(
        self, request: Request, num_tokens: int, running: Sequence[Running]
    ) -> tuple[KVRange, int]:
        """Return a range for at least `num_tokens` tokens and the number already computed.

        Raises as `KVCache.allocate`.
        """
        with suppress(PageError):  # where ranges can move no more, the beginning is computed
            if restored := self._restored(request, num_tokens, running):
                return restored
            source = self._best_source(request, running)
            if source and (kv := self._taken_over(source, num_tokens)):
                return kv, source.num_tokens
        return self._kv_cache.allocate(num_tokens), 0

    def is_being_computed(self, request: Request, running: Sequence[Running]) -> bool:
        """Return True if a running request will soon have more of this request's beginning.

        So of several answers to one prompt, all but the first wait.
        """
        if self._reuse is Reuse.OFF:
            return False
        if self._kv_cache.has_states:
            return self._waits_for_states(request, running)
        least = max(MIN_AWAITED_TOKENS, request.block_length)
        prompts = [
            (sequence, sequence.tokens[: len(sequence.request.prompt)])
            for sequence in running
            if sequence.request.block_length == request.block_length
        ]
        unread = [
            (sequence, tokens)
            for sequence, tokens in prompts
            if len(tokens) >= sequence.num_cached + least
        ]
        if not unread:  # as in most passes: nothing is converted then
            return False
        prompt, (beginning, unit) = np.asarray(request.prompt, np.int64), self._beginning(request)
        for sequence, tokens in unread:
            num_shared = num_common(tokens, prompt)
            if num_shared >= sequence.num_cached + least:
                sequence.kv.marks.add(min(num_shared, len(beginning)) // unit * unit)
                return True
        return False

    def end(self, sequence: Running) -> None:
        """Keep a finished sequence if it may be useful, replacing sequences it contains."""
        num_tokens = self._kv_cache.largest_cut(sequence.kv, self._num_reusable(sequence))
        tokens = sequence.tokens[:num_tokens].copy()
        if self._reuse is Reuse.OFF or len(tokens) < MIN_SHARED_TOKENS:
            self._kv_cache.free(sequence.kv)
            return
        block_length = sequence.request.block_length
        for kept in self._living():
            is_alike = kept.block_length == block_length
            if is_alike and num_common(kept.tokens, tokens) == len(kept.tokens):
                self._kv_cache.inherit(kept.kv, sequence.kv)
                if self._kv_cache.largest_cut(sequence.kv, len(kept.tokens)) == len(kept.tokens):
                    self._kv_cache.free(kept.kv)
        self._kv_cache.keep(sequence.kv, len(tokens))
        num_prompt = len(sequence.request.prompt)
        self._kept = [
            *self._living(),
            KeptSequence(tokens, num_prompt, block_length, sequence.kv),
        ]
        if self.stored is not None:
            self.stored.offer(tokens, block_length, sequence.kv)

    def clear(self) -> None:
        """Free everything kept."""
        for kept in self._living():
            self._kv_cache.free(kept.kv)
        self._kept.clear()

    def note_pass(self, sequence: Running, first: int, stop: int) -> None:
        """Record a pass of this sequence alone over final tokens from `first` to `stop`."""
        if first == sequence.num_exact and stop - first == self._whole_rows(sequence.request):
            sequence.num_exact = stop

    def choose_cuts(self, known: Request, sequence: Running) -> None:
        """Choose where to copy states and windows of a sequence that starts with known tokens.

        A next turn begins before what its template adds for an answer, and another answer there or,
        where that was not known or is long, before the prompt's last token. Where the prompt leaves
        an earlier one, a third may leave both, as after a shared system prompt.
        """
        if self._reuse is Reuse.OFF or self._kv_cache.cuts_anywhere:
            return
        prompt, unit = self._beginning(known)
        shared = 0
        for kept in self._living():
            num_tokens = num_common(kept.tokens, prompt)
            num_dropped = kept.num_prompt - num_tokens
            if 0 < num_dropped <= MAX_TAIL_TOKENS:
                self._tail_tokens = num_dropped
            if num_tokens >= sequence.num_cached + MIN_AWAITED_TOKENS:
                shared = max(shared, num_tokens)
        places = {min(len(prompt), len(known.prompt) - self._tail_tokens), shared}
        if not self._has_tail:  # so few tokens are computed again rather than copied twice
            places.add(len(prompt))
        least = max(sequence.num_cached + 1, MIN_SHARED_TOKENS)
        chosen = {place for place in (each // unit * unit for each in places) if place >= least}
        self._kv_cache.mark(sequence.kv, chosen)
        sequence.cuts.clear()
        if self._kv_cache.has_states:
            sequence.cuts.update(chosen)

    def copy_states(self, sequence: Running) -> None:
        """Copy a sequence's states after a pass that ended where they may be wanted."""
        place = sequence.num_cached
        if self._is_copied_at(sequence, place) and place <= self._num_reusable(sequence):
            self._kv_cache.snapshot(sequence.kv, may_drop=place in sequence.cuts)

    def expect_copies(self, sequence: Running, ends: Sequence[int]) -> tuple[int, ...]:
        """Have the next pass copy a sequence's states where they may be wanted in its midst.

        ends: the positions after each chunk of the pass. Returns the places, ascending, whether
        there is room for copies or not: what a pass computes does not depend on that.
        """
        if self._reuse is Reuse.OFF or not self._kv_cache.has_states or sequence.kv.is_mixed:
            return ()
        first, stop = sequence.num_cached, ends[-1]
        if self._reuse is Reuse.EXACT:
            found = self._exact_ends(sequence, ends[:-1])
        else:
            found = [place for place in sequence.cuts if first < place < stop]
            periodic = first // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS + SNAPSHOT_TOKENS
            found += range(periodic, stop, SNAPSHOT_TOKENS)
        places = sorted({place for place in found if self._is_copied_at(sequence, place)})
        # No part of a pass ends within a block, whose rows see each other.
        places = [place for place in places if not place % sequence.request.block_length]
        sequence.kv.copies_due = {place: place in sequence.cuts for place in places}
        return tuple(places)

    def _exact_ends(self, sequence: Running, ends: Sequence[int]) -> list[int]:
        """Return the ends of a pass's chunks up to which tokens will be exact (`num_exact`)."""
        whole, first = self._whole_rows(sequence.request), sequence.num_exact
        if first != sequence.num_cached:
            return []
        return [end for number, end in enumerate(ends, 1) if end == first + number * whole]

    def _is_copied_at(self, sequence: Running, place: int) -> bool:
        if self._reuse is Reuse.OFF or not self._kv_cache.has_states:
            return False
        return place in sequence.cuts or not place % SNAPSHOT_TOKENS

    def _waits_for_states(self, request: Request, running: Sequence[Running]) -> bool:
        """Return `is_being_computed` with states, which are copied where this request leaves."""
        prompt, unit = self._beginning(request)
        best = self._best_source(request, running)
        least = MIN_AWAITED_TOKENS + (0 if best is None else best.num_tokens)
        for sequence in running:
            tokens = sequence.tokens[: len(sequence.request.prompt)]
            place = num_common(tokens, prompt) // unit * unit
            is_exact = self._reuse is Reuse.EXACT
            if is_exact and sequence.num_exact < sequence.num_cached:
                continue
            if place >= least and place > sequence.num_cached and not sequence.kv.is_mixed:
                sequence.cuts.add(place)
                return True
        return False

    def _taken_over(self, source: _Beginning, num_tokens: int) -> KVRange | None:
        """Return a range of at least `num_tokens` tokens that begins like `source`.

        None if there is no room for a second range.
        """
        cache, shared, kv, kept = self._kv_cache, *source
        can_branch = cache.can_branch(kv, num_tokens)
        if kept is not None and (source.is_same_conversation or not can_branch):
            cache.resume(kv, shared, num_tokens)
            self._kept.remove(kept)
            return kv
        return cache.branch(kv, shared, num_tokens) if can_branch else None

    def _best_source(self, request: Request, running: Sequence[Running]) -> _Beginning | None:
        """Return the longest reusable beginning; of equals, the last used."""
        if self._reuse is Reuse.OFF:
            return None
        prompt, unit = self._beginning(request)
        best = None
        for tokens, kv, kept in self._candidates(request.block_length, running):
            num_tokens = self._kv_cache.largest_cut(kv, num_common(tokens, prompt), unit)
            if num_tokens >= MIN_SHARED_TOKENS and (best is None or num_tokens >= best.num_tokens):
                best = _Beginning(num_tokens, kv, kept)
        return best

    def _restored(
        self, request: Request, num_tokens: int, running: Sequence[Running]
    ) -> tuple[KVRange, int] | None:
        """Return what `begin` does from a file that has more of the beginning than memory."""
        if self.stored is None or self._reuse is Reuse.OFF:
            return None
        here = self._best_source(request, running)
        least = MIN_SHARED_TOKENS + (0 if here is None else here.num_tokens)
        prompt, unit = self._beginning(request)
        while found := self.stored.find(prompt, request.block_length, unit):
            if found.num_tokens < least:
                break
            kv = self._kv_cache.allocate(num_tokens)
            try:
                self._kv_cache.begin_at(kv, found.num_tokens)
                self._kv_cache.prepare(kv, found.num_tokens)
                if self.stored.restore(found, kv):
                    return kv, found.num_tokens
            except BaseException:
                self._kv_cache.free(kv)
                raise
            self._kv_cache.free(kv)
        return None

    def _beginning(self, request: Request) -> tuple[IntArray, int]:
        """Return the reusable part of a prompt, and the unit in which it may be cut."""
        prompt = np.asarray(request.prompt, np.int64)
        # A causal model's last token is fed in any case: the next one is chosen by it.
        prompt = prompt[: len(prompt) - (request.block_length == 1)]
        is_exact = self._reuse is Reuse.EXACT
        return prompt, self._whole_rows(request) if is_exact else request.block_length

    def _candidates(
        self, block_length: int, running: Sequence[Running]
    ) -> Iterator[tuple[IntArray, KVRange, KeptSequence | None]]:
        """Yield the tokens and ranges whose blocks have that length."""
        for sequence in running:
            if sequence.request.block_length == block_length:
                yield sequence.tokens[: self._num_reusable(sequence)], sequence.kv, None
        for kept in self._living():
            if kept.block_length == block_length:
                yield kept.tokens, kept.kv, kept

    def _living(self) -> list[KeptSequence]:
        """Return the kept sequences whose ranges still exist, oldest first."""
        self._kept = [kept for kept in self._kept if self._kv_cache.is_kept(kept.kv)]
        return self._kept

    def _num_reusable(self, sequence: Running) -> int:
        if sequence.kv.is_mixed:
            return 0
        is_exact = self._reuse is Reuse.EXACT
        return sequence.num_exact if is_exact else sequence.num_cached

    def _whole_rows(self, request: Request) -> int:
        """Return the number of rows of such a request's longest pass alone, in whole blocks."""
        return self._max_rows // request.block_length * request.block_length
