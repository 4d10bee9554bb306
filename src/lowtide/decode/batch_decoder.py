"""The batch decoder: a queue of requests, running sequences, and their common KV cache.

Sequences join and leave between passes. The model's `Kind` chooses the rows of a pass and uses its
results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Generic

import numpy as np
import torch

from lowtide.core import PassRows, Reuse, Step, StepKind
from lowtide.decode.kept_sequences import KeptSequences, Running
from lowtide.decode.kind import C, Kind, S, Schedule, Scheduled
from lowtide.decode.logits import Model
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Event, Prefill, Request
from lowtide.decode.stored_sequences import StoredSequences
from lowtide.errors import PageError, PlanError, UnsupportedError
from lowtide.layers.batch import Batch
from lowtide.memory.kv_cache import KVCache

ROOM_TOKENS = 256
"""New tokens for which a sequence gets room at its start and whenever its room grows."""


class BatchDecoder(Generic[S, C]):
    """Decodes requests, one forward pass at a time, over one KV cache.

    Owns the sequences and their KV ranges; knows no kind of decoding.
    """

    def __init__(
        self,
        kind: Kind[Any, S, C],
        model: Model,
        kv_cache: KVCache,
        max_rows: int,
        reuse: Reuse = Reuse.OFF,
        tail_tokens: int = 0,
        max_chunks: Callable[[], int] = lambda: 1,
    ) -> None:
        """Begin with an empty queue.

        max_rows: rows of the largest pass. It must not depend on any budget, because it decides how
            rows are divided, and so their bits.
        reuse: how much of earlier requests' KV cache a new request may use.
        tail_tokens: see `KeptSequences`.
        max_chunks: returns the chunks of a prompt that a pass may have.
        """
        self._kind = kind
        self._model = model
        self._kv_cache = kv_cache
        self._kept = KeptSequences(kv_cache, reuse, max_rows, tail_tokens)
        self.prompt_share = PromptShare()
        self.on_begin: Callable[[Sequence[Event]], None] = lambda _: None  # before a first pass
        self.on_progress: Callable[[Sequence[Event]], None] = lambda _: None  # in a long pass
        self.heed: Callable[[], None] = nothing_to_heed
        """Called after each layer of a pass over several chunks, which it may end by raising."""
        self._max_rows = max_rows
        self._max_chunks = max_chunks
        self._waiting: deque[Request] = deque()
        self._paused: list[S] = []  # without room; the one that came first in front
        self._running: list[S] = []
        self._taking_part: list[Request] = []
        self._num_passes = 0  # that could write tokens, since there was last nothing to do

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._paused or self._running)

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._waiting) + len(self._paused) + len(self._running)

    @property
    def is_full(self) -> bool:
        """True if a request waits for room."""
        if self._paused:
            return True
        wanted = [self._first_tokens(request) for request in self._waiting]
        is_beyond = sum(wanted) > self._num_free_tokens
        return bool(wanted) and (is_beyond or not self._has_room(wanted[0]))

    @property
    def running(self) -> Sequence[S]:
        """The sequences with room in the KV cache."""
        return tuple(self._running)

    @property
    def taking_part(self) -> Sequence[Request]:
        """The requests of the last `step`. If it failed, only they failed."""
        return self._taking_part

    def add(self, request: Request) -> None:
        """Queue a request.

        It starts once the KV cache has room for its prompt and the beginning of its answer. If room
        runs out later, the newest requests are paused.

        Raises UnsupportedError for a token mask on a model that does not write in order, and
        PlanError for a request that does not fit into an empty KV cache.
        """
        if request.mask is not None and not self._kind.decoding.writes_in_order:
            raise UnsupportedError(
                f"Request {request.id} has a mask, and only autoregressive decoding follows one."
            )
        num_tokens = self._kind.num_tokens(request)
        if num_tokens > self._kv_cache.max_range_tokens:
            raise PlanError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} new ones "
                f"take {num_tokens} tokens of context, and it holds "
                f"{self._kv_cache.max_range_tokens} for a sequence; raise `context` or "
                "lower `max_tokens`."
            )
        if not self.has_work:
            self._num_passes = 0
        self._waiting.append(request)

    def step(self) -> list[Event]:
        """Run one forward pass and return the progress of every sequence in it.

        If the model raises, only this pass is lost; `cancel` and `close` still work.
        """
        self._admit()
        schedule = self._schedule()
        if not schedule.entries:
            return []
        for number, entry in enumerate(schedule.entries):
            if entry.length > 1:
                cuts = self._kept.expect_copies(entry.sequence, entry.chunk_ends or (entry.stop,))
                schedule.entries[number] = entry._replace(cuts=cuts)
        with torch.inference_mode():  # also of the copies of states that follow a pass
            with self.prompt_share.measured(schedule.has_prompts):
                hidden = self._model.forward(self._batch(schedule))
                choices = self._kind.choose(self._model, hidden, schedule.entries, self._blame)
                self._kv_cache.end_pass(entry.sequence.kv for entry in schedule.entries)
            self._num_passes += schedule.kind is not StepKind.PREFILL
            return self._settle(schedule.entries, choices)

    def cancel(self, request_id: int, is_sound: bool = True) -> bool:
        """Drop a request between passes and free its room; return False if it is unknown.

        is_sound: its KV cache is correct and may be kept for later requests.
        """
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return True
        for sequence in self._paused:
            if sequence.request.id == request_id:
                self._paused.remove(sequence)
                return True
        for sequence in self._running:
            if sequence.request.id == request_id:
                self._running.remove(sequence)
                if is_sound:
                    self._kept.end(sequence)
                else:
                    self._kv_cache.free(sequence.kv)
                return True
        return False

    def store_in(self, stored: StoredSequences | None) -> None:
        """Also store kept sequences in files and restore them from there; None: in memory only."""
        self._kept.stored = stored

    def forget(self, is_mixed: bool = False) -> None:
        """Drop everything kept of finished requests.

        is_mixed: do not keep running requests either once they finish, because they began under a
            policy that changes words and continue under another.
        """
        self._kept.clear()
        for sequence in self._running:
            sequence.kv.is_mixed |= is_mixed

    def close(self) -> None:
        """Drop every request; write kept sequences to their files, then drop them too."""
        for request in [*self._waiting, *(s.request for s in [*self._paused, *self._running])]:
            self.cancel(request.id)
        if self._kept.stored is not None:
            self._kept.stored.drain()
        self.forget()

    def _schedule(self) -> Schedule[S]:
        """Return the next pass that fits in memory, pausing the newest sequences if needed."""
        while True:
            schedule = self._kind.schedule(self._running, self._max_rows, self.prompt_share)
            entries = schedule.entries
            # Then nobody waits for a token, and who came later waits for this prompt anyway.
            if schedule.kind is StepKind.PREFILL and len(entries) == 1:
                entries[0] = self._kind.lengthened(
                    entries[0], self._max_rows, self._max_chunks(), is_alone=len(self._running) == 1
                )
            if self._see_to_memory(
                (entry.sequence, self._kind.end_tokens(entry)) for entry in entries
            ):
                return schedule

    def _batch(self, schedule: Schedule[S]) -> Batch:
        """Concatenate the rows of a pass, entry by entry."""
        kind, entries, _ = schedule
        copies = [copy for entry in entries for copy in self._kind.copies(entry)]
        positions = [np.arange(entry.first, entry.stop) for entry in entries for _ in entry.starts]
        logit_rows, asked = self._kind.asked(entries)
        own = entries[0].sequence.num_block_passes if len(self._running) == 1 else None
        return Batch(
            token_ids=torch.from_numpy(np.concatenate([tokens for tokens, _ in copies])),
            positions=torch.from_numpy(np.concatenate(positions)),
            segments=tuple(segment for _, segment in copies),
            step=Step(
                kind,
                index=self._num_passes if own is None else own,
                rows=joined([self._kind.pass_rows(entry) for entry in entries]),
                is_last=kind is not StepKind.PREFILL and self._is_last(entries),
            ),
            logit_rows=logit_rows,
            asked=asked,
            chunk_ends=tuple(end - entries[0].first for end in entries[0].chunk_ends),
            on_layer=partial(self._report_layer, entries[0]),
        )

    def _report_layer(self, entry: Scheduled[S], share: float) -> None:
        """Report the share of its layers that a pass over several chunks has been through."""
        self.heed()
        request, num_done = entry.sequence.request, int(share * entry.length)
        if 0 < num_done < entry.length:
            progress = Prefill(request.id, entry.first + num_done, entry.sequence.num_known)
            self.on_progress([progress])

    def _is_last(self, entries: Sequence[Scheduled[S]]) -> bool:
        """Return True if every sequence takes part and is expected to end with this pass."""
        if self._waiting or self._paused or len(entries) < len(self._running):
            return False
        return all(entry.sequence.is_expected_to_end for entry in entries)

    def _admit(self) -> None:
        """Resume paused requests, then start waiting ones, in order, until room runs out.

        A request whose beginning is being computed by another request waits for it.
        """
        while self._paused:
            sequence = self._paused[0]
            request = sequence.request
            num_tokens = self._kind.room_tokens(request, sequence.num_known + ROOM_TOKENS)
            if not self._has_room(num_tokens):
                return
            known = sequence.tokens[: sequence.num_known].tolist()
            self._start(sequence, replace(request, prompt=known), num_tokens)
            del self._paused[0]
        for request in list(self._waiting):
            self._taking_part = [request]  # nothing but it fails where there is no memory for it
            num_tokens = self._first_tokens(request)
            if not self._has_room(num_tokens):
                return
            if not self._kept.is_being_computed(request, self._running):
                sequence = self._kind.begin(request)
                self._start(sequence, request, num_tokens)
                sequence.num_resumed = sequence.num_cached
                self._waiting.remove(request)

    def _first_tokens(self, request: Request) -> int:
        """Return the number of tokens of KV cache that a request begins with."""
        return self._kind.room_tokens(request, len(request.prompt) + ROOM_TOKENS)

    def _start(self, sequence: S, known: Request, num_tokens: int) -> None:
        """Give a sequence its room, reusing the kept KV cache of its known tokens."""
        self._taking_part = [sequence.request]
        sequence.kv, num_resumed = self._kept.begin(known, num_tokens, self._running)
        sequence.num_cached = sequence.num_exact = num_resumed
        self._kept.choose_cuts(known, sequence)
        self._running.append(sequence)

    def _has_room(self, num_tokens: int) -> bool:
        """Return True if tokens fit beside the running sequences and their next growth."""
        if not self._running and self._kv_cache.is_unused:
            return True  # there is nothing to wait for: let `allocate` say so
        return num_tokens <= self._num_free_tokens and self._kv_cache.can_allocate(num_tokens)

    @property
    def _num_free_tokens(self) -> int:
        """Free tokens left after the running sequences' coming growth."""
        num_growing = sum(
            min(ROOM_TOKENS, self._kind.num_tokens(sequence.request) - sequence.kv.capacity)
            for sequence in self._running
            if self._kind.num_tokens(sequence.request) > sequence.kv.capacity
        )
        return self._kv_cache.num_free_tokens - num_growing

    def _see_to_memory(self, ends: Iterable[tuple[S, int]]) -> bool:
        """Provide KV cache memory for a pass, up to each sequence's end.

        Returns False if the newest sequence had to be paused; the pass must then be scheduled
        again. Raises PageError for a sequence that runs alone.
        """
        taking_part: list[S] = []
        for sequence, stop in ends:
            self._taking_part = [sequence.request]
            if not self._has_memory(sequence, stop):
                self._pause(max(self._running, key=lambda running: running.request.id))
                return False
            taking_part.append(sequence)
        self._taking_part = [sequence.request for sequence in taking_part]
        self._report_begun(taking_part)
        return True

    def _report_begun(self, sequences: Iterable[S]) -> None:
        """Report sequences that are in their first pass."""
        begun: list[Event] = []
        for sequence in sequences:
            if not sequence.has_begun:
                sequence.has_begun = True
                request = sequence.request
                begun.append(Prefill(request.id, sequence.num_resumed, len(request.prompt)))
        if begun:
            self.on_begin(begun)

    def _has_memory(self, sequence: S, stop: int) -> bool:
        """Grow a sequence's room and back it with memory; return False if none is left.

        Raises PageError for a sequence that runs alone.
        """
        most = self._kind.num_tokens(sequence.request)
        wanted = (min(most, stop + ROOM_TOKENS), stop)  # and for what follows, if there is as much
        try:
            if stop > sequence.kv.capacity and not any(
                self._kv_cache.grow(sequence.kv, num_tokens) for num_tokens in wanted
            ):
                return False
            self._kv_cache.prepare(sequence.kv, stop)
        except PageError:
            if len(self._running) == 1:
                raise
            return False
        return True

    def _pause(self, sequence: S) -> None:
        """Take a sequence's room until there is room again.

        Its KV cache is kept until the memory is needed, else computed again.
        """
        self._running.remove(sequence)
        self._kept.end(sequence)
        sequence.num_cached = sequence.num_exact = 0
        self._kind.paused(sequence)
        self._paused.append(sequence)
        self._paused.sort(key=lambda paused: paused.request.id)

    def _blame(self, sequences: Iterable[Running]) -> None:
        """Record that the current pass failed for these sequences only."""
        self._taking_part = [sequence.request for sequence in sequences]

    def _settle(self, entries: Sequence[Scheduled[S]], choices: Sequence[C | None]) -> list[Event]:
        """Advance the sequences of a pass and free the finished ones.

        A sequence that wrote moves to the end. A prompt in progress keeps its place, so that
        prompts finish one after another.
        """
        if len(entries) == 1 and entries[0].is_final:
            [entry] = entries
            for first, stop in pairwise((entry.first, *(entry.chunk_ends or (entry.stop,)))):
                self._kept.note_pass(entry.sequence, first, stop)
        events: list[Event] = []
        for entry, choice in zip(entries, choices, strict=True):
            events += self._kind.written(entry, choice)
            self._kept.copy_states(entry.sequence)
        for entry, choice in zip(entries, choices, strict=True):
            if choice is None:
                continue
            sequence = entry.sequence
            self._running.remove(sequence)
            if sequence.is_finished:
                self._kept.end(sequence)
            else:
                self._running.append(sequence)
        return events


def nothing_to_heed() -> None:
    """Do nothing: the default `BatchDecoder.heed`, where nothing can end a pass."""


def joined(parts: Sequence[PassRows]) -> PassRows:
    """Concatenate the row kinds of a pass."""
    if len(parts) == 1:
        return parts[0]
    return PassRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
