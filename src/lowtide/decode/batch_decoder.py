"""What every decoder is: a queue of requests, running sequences, and one KV cache for them all.

Sequences join and leave between passes. What a pass consists of, and what its outcome means, is
the business of the model's `Kind`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic

import numpy as np
import torch

from lowtide.core import PassRows, Reuse, Step, StepKind
from lowtide.decode.kept_sequences import KeptSequences, Running
from lowtide.decode.kind import ROOM_TOKENS, C, Kind, S, Schedule, Scheduled
from lowtide.decode.logits import Model
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Event, Prefill, Request
from lowtide.decode.stored_sequences import StoredSequences
from lowtide.errors import PageError, PlanError, UnsupportedError
from lowtide.layers.batch import Batch
from lowtide.memory.kv_cache import KVCache


class BatchDecoder(Generic[S, C]):
    """Decodes requests, one forward pass at a time, over one KV cache.

    Owns the sequences and their KV ranges. `max_rows` is the largest pass; it must not depend on
    any budget, because it decides how rows are divided.
    """

    def __init__(
        self,
        kind: Kind[Any, S, C],
        model: Model,
        kv_cache: KVCache,
        max_rows: int,
        reuse: Reuse = Reuse.OFF,
    ) -> None:
        """reuse: what requests take over of keys and values of those before them."""
        self._kind = kind
        self._model = model
        self._kv_cache = kv_cache
        self._kept = KeptSequences(kv_cache, reuse, max_rows)
        self.prompt_share = PromptShare()
        self.on_begin: Callable[[Event], None] = lambda event: None  # told before its first pass
        self._max_rows = max_rows
        self._waiting: deque[Request] = deque()
        self._paused: list[S] = []  # without room; the one that came first in front
        self._running: list[S] = []
        self._taking_part: list[Request] = []
        self._num_passes = 0  # that could write tokens, since there was last nothing to do

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._paused or self._running)

    @property
    def num_running(self) -> int:
        """Sequences that have their room in the KV cache."""
        return len(self._running)

    @property
    def taking_part(self) -> Sequence[Request]:
        """Which requests the last `step` was for: if it failed, it failed for them."""
        return self._taking_part

    def add(self, request: Request) -> None:
        """Queues a request; it starts when the KV cache has room for its prompt and the answer's
        beginning. Where room runs out later, those that came last pause.

        Raises UnsupportedError for a mask of an answer that is not written in order, PlanError for
        what no range of the KV cache could hold.
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
                f"{self._kv_cache.max_range_tokens} for a sequence; raise context or lower "
                "max_tokens."
            )
        if not self.has_work:
            self._num_passes = 0
        self._waiting.append(request)

    def step(self) -> list[Event]:
        """One forward pass: progress of every sequence that took part in it.

        If the model raises, nothing but the pass is lost, and `cancel` and `close` work.
        """
        self._admit()
        schedule = self._schedule()
        if not schedule.turns:
            return []
        with self.prompt_share.measured(schedule.has_prompts), torch.inference_mode():
            hidden = self._model.forward(self._batch(schedule))
            choices = self._kind.choose(self._model, hidden, schedule.turns, self._blame)
        self._num_passes += schedule.kind is not StepKind.PREFILL
        return self._settle(schedule.turns, choices)

    def cancel(self, request_id: int, is_sound: bool = True) -> bool:
        """Drops a request, between passes, and gives back its room. Whether there was one.

        is_sound: its keys and values are as good as those of a request that finished.
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
        """From now on what is kept is written there, too, and looked for; None: in memory alone."""
        self._kept.stored = stored

    def forget(self, is_mixed: bool = False) -> None:
        """Keeps nothing of finished requests any longer. is_mixed: nor, when they finish, of those
        that run now under a policy that changes words and go on under another one.
        """
        self._kept.clear()
        for sequence in self._running:
            sequence.kv.is_mixed |= is_mixed

    def close(self) -> None:
        """Drops every request, and what is kept once it is written."""
        for request in [*self._waiting, *(s.request for s in [*self._paused, *self._running])]:
            self.cancel(request.id)
        if self._kept.stored is not None:
            self._kept.stored.drain()
        self.forget()

    def _schedule(self) -> Schedule[S]:
        """The next pass that there is memory for; while there is not, who came last pauses."""
        while True:
            schedule = self._kind.schedule(self._running, self._max_rows, self.prompt_share)
            turns = schedule.turns
            if self._see_to_memory((turn.sequence, self._kind.end_tokens(turn)) for turn in turns):
                return schedule

    def _batch(self, schedule: Schedule[S]) -> Batch:
        """The rows of a pass, turn after turn."""
        kind, turns, _ = schedule
        copies = [copy for turn in turns for copy in self._kind.copies(turn)]
        positions = [np.arange(turn.first, turn.stop) for turn in turns for _ in turn.starts]
        logit_rows, asked = self._kind.asked(turns)
        own = turns[0].sequence.num_block_passes if len(self._running) == 1 else None
        return Batch(
            token_ids=torch.from_numpy(np.concatenate([tokens for tokens, _ in copies])),
            positions=torch.from_numpy(np.concatenate(positions)),
            segments=tuple(segment for _, segment in copies),
            step=Step(
                kind,
                index=self._num_passes if own is None else own,
                rows=joined([self._kind.pass_rows(turn) for turn in turns]),
                is_last=kind is not StepKind.PREFILL and self._is_last(turns),
            ),
            logit_rows=logit_rows,
            asked=asked,
        )

    def _is_last(self, turns: Sequence[Scheduled[S]]) -> bool:
        """Whether no pass is expected to follow: all sequences take part, and none goes on."""
        if self._waiting or self._paused or len(turns) < len(self._running):
            return False
        return all(turn.sequence.is_expected_to_end for turn in turns)

    def _admit(self) -> None:
        """Goes on with paused requests and starts waiting ones, each in order, as far as the KV
        cache has room. Those whose beginning another one is computing are passed over until it is
        there.
        """
        while self._paused:
            sequence = self._paused[0]
            request = sequence.request
            num_tokens = self._kind.room_tokens(request, sequence.num_known)
            if not self._has_room(num_tokens):
                return
            known = sequence.tokens[: sequence.num_known].tolist()
            self._start(sequence, replace(request, prompt=known), num_tokens)
            del self._paused[0]
        for request in list(self._waiting):
            self._taking_part = [request]  # nothing but it fails where there is no memory for it
            num_tokens = self._kind.room_tokens(request, len(request.prompt))
            if not self._has_room(num_tokens):
                return
            if not self._kept.is_being_computed(request, self._running):
                sequence = self._kind.begin(request)
                self._start(sequence, request, num_tokens)
                sequence.num_resumed = sequence.num_cached
                self._waiting.remove(request)

    def _start(self, sequence: S, known: Request, num_tokens: int) -> None:
        """Gives a sequence its room, and what is kept of its known tokens' keys and values."""
        self._taking_part = [sequence.request]
        sequence.kv, num_resumed = self._kept.begin(known, num_tokens, self._running)
        sequence.num_cached = sequence.num_exact = num_resumed
        self._running.append(sequence)

    def _has_room(self, num_tokens: int) -> bool:
        """Whether there is, beside what running sequences will soon grow by."""
        if not self._running and self._kv_cache.is_unused:
            return True  # there is nothing to wait for: let `allocate` say so
        num_growing = sum(
            min(ROOM_TOKENS, self._kind.num_tokens(sequence.request) - sequence.kv.capacity)
            for sequence in self._running
            if self._kind.num_tokens(sequence.request) > sequence.kv.capacity
        )
        is_free = num_tokens + num_growing <= self._kv_cache.num_free_tokens
        return is_free and self._kv_cache.can_allocate(num_tokens)

    def _see_to_memory(self, ends: Iterable[tuple[S, int]]) -> bool:
        """Before a pass: room and memory for the keys and values of those who take part, up to
        where each ends. False where there was not as much, and the sequence that came last was
        paused: then the pass is another. What runs alone fails.
        """
        taking_part: list[S] = []
        for sequence, stop in ends:
            self._taking_part = [sequence.request]
            if not self._has_memory(sequence, stop):
                self._pause(max(self._running, key=lambda running: running.request.id))
                return False
            taking_part.append(sequence)
        self._taking_part = [sequence.request for sequence in taking_part]
        self._tell_begun(taking_part)
        return True

    def _tell_begun(self, sequences: Iterable[S]) -> None:
        """Those of which the pass is the first have begun."""
        for sequence in sequences:
            if not sequence.has_begun:
                sequence.has_begun = True
                request = sequence.request
                self.on_begin(Prefill(request.id, sequence.num_resumed, len(request.prompt)))

    def _has_memory(self, sequence: S, stop: int) -> bool:
        """Sees to a sequence's room, and the memory behind it. Raises PageError for one that is
        alone.
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
        """A sequence without room, until there is some: its keys and values are kept as long as
        nothing else needs theirs, and computed again after that.
        """
        self._running.remove(sequence)
        self._kept.end(sequence)
        sequence.num_cached = sequence.num_exact = 0
        self._kind.paused(sequence)
        self._paused.append(sequence)
        self._paused.sort(key=lambda paused: paused.request.id)

    def _blame(self, sequences: Iterable[Running]) -> None:
        """The pass under way has failed for these alone."""
        self._taking_part = [sequence.request for sequence in sequences]

    def _settle(self, turns: Sequence[Scheduled[S]], choices: Sequence[C | None]) -> list[Event]:
        """Has the sequences of a pass go on. What is finished gives its room back; who wrote goes
        behind all others, and a prompt in progress keeps its place, so that prompts are finished
        one after the other.
        """
        if len(turns) == 1 and turns[0].is_final:
            self._kept.note_pass(turns[0].sequence, turns[0].first, turns[0].stop)
        events: list[Event] = []
        for turn, choice in zip(turns, choices, strict=True):
            events += self._kind.written(turn, choice)
        for turn, choice in zip(turns, choices, strict=True):
            if choice is None:
                continue
            sequence = turn.sequence
            self._running.remove(sequence)
            if sequence.is_finished:
                self._kept.end(sequence)
            else:
                self._running.append(sequence)
        return events


def joined(parts: Sequence[PassRows]) -> PassRows:
    """The rows of a pass, part after part."""
    return PassRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
