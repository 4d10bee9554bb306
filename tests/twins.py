"""A model with a twin over a cache of its own, in which no sequence ends, moves or gives way.

Both run each pass and have the same bits. So the keys that a request takes over from others,
wherever they are kept, are those of one sequence that had never ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from inside import states_of
from torch import Tensor

from lowtide.core import IntArray
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.logits import Model
from lowtide.engine.running.engine import Engine
from lowtide.layers.batch import Batch, Segment
from lowtide.memory.kv_cache import KVCache, KVRange


class Subject(NamedTuple):
    """A model over its KV cache, and its twin over one that has room for all sequences."""

    model: Model
    kv_cache: KVCache
    twin: Model
    twin_cache: KVCache
    engine: Engine | None = None


@dataclass(eq=False)
class Lineage:
    """A sequence that never ends: its tokens [n], as they were fed, and the twin's range of keys.

    held: the range that it stands for, and how often that was kept by then.
    states: copies, by the number of tokens, of a model that has any.
    """

    tokens: IntArray
    kv: KVRange
    held: tuple[KVRange, int]
    states: dict[int, Tensor] = field(default_factory=dict)


class Beside:
    """A subject's model, each of whose passes is also one of its twin."""

    decoder: BatchDecoder[Any]

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._lineages: list[Lineage] = []
        self._newest: dict[int, Lineage] = {}  # by request
        self.in_company: set[int] = set()  # requests that had not all passes for themselves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject.model, name)

    def forward(self, batch: Batch) -> Tensor:
        names = [int(batch.step.rows.request[one.start]) for one in batch.segments]
        if len(names) > 1:
            self.in_company.update(names)
        ranges = [
            self._lineage(name, one, batch.token_ids[one.start : one.stop].numpy())
            for name, one in zip(names, batch.segments, strict=True)
        ]
        pairs = zip(batch.segments, ranges, strict=True)
        segments = tuple(replace(one, kv=kv) for one, kv in pairs)
        for segment in segments:
            segment.kv.copies_due = dict.fromkeys(segment.cuts, False)
        expected = self._subject.twin.forward(replace(batch, segments=segments)).clone()
        self._note_states(names, segments)
        found = self._subject.model.forward(batch)
        assert torch.equal(found, expected)
        return found

    def _note_states(self, names: list[int], segments: tuple[Segment, ...]) -> None:
        cache = self._subject.twin_cache
        cache.end_pass(segment.kv for segment in segments)
        if cache.has_states:
            for name, segment in zip(names, segments, strict=True):
                own, store = segment.kv.states, states_of(cache)
                copied = {place: own.snapshots[place] for place in segment.cuts}
                for place, slot in {**copied, segment.end_position: own.before}.items():
                    self._newest[name].states[place] = store.content(slot).clone()
                store.drop(own, *copied)

    def _lineage(self, name: int, segment: Segment, fed: IntArray) -> KVRange:
        """Where the twin has a request's keys, which are the bits that the model has."""
        [known] = [s.tokens for s in self.decoder.running if s.request.id == name]
        own = self._newest.get(name)
        if own is None or own.held != (segment.kv, segment.kv.num_kept):
            if own is not None:  # it was paused
                self.in_company.add(name)
            self._newest[name] = own = self._begun(segment, known)
            self._lineages.append(own)
        assert self._has(own, segment, known)
        own.tokens[segment.first_position : segment.end_position] = fed
        return own.kv

    def _begun(self, segment: Segment, known: IntArray) -> Lineage:
        """One that begins with keys that some sequence had of the same tokens."""
        first, cache = segment.first_position, self._subject.twin_cache
        held = segment.kv, segment.kv.num_kept
        made = Lineage(np.full(len(known), -1), cache.allocate(len(known)), held)
        if first:
            has = (one for one in self._lineages if self._has(one, segment, known))
            source = next(has, None)
            assert source is not None, f"{first} tokens have keys that no sequence had"
            cache.claim(made.kv, 0, first)
            copies = zip(
                cache.rows(made.kv, 0, first), cache.rows(source.kv, 0, first), strict=True
            )
            for copy, array in copies:
                copy[:] = array
            made.tokens[:first] = known[:first]
            if cache.has_states:
                [(_, content)] = cache.restored_states(made.kv, first, ()).items()
                content[:] = source.states[first].numpy()
                made.states[first] = source.states[first]
        return made

    def _has(self, one: Lineage, segment: Segment, known: IntArray) -> bool:
        """Return True if `one` has the segment's first keys and states, and of the same tokens."""
        first, cache = segment.first_position, self._subject.kv_cache
        if not np.array_equal(one.tokens[:first], known[:first]):
            return False
        if first and cache.has_states:
            states = states_of(cache).content(segment.kv.states.before)
            if first not in one.states or not torch.equal(one.states[first], states):
                return False
        found = self._subject.kv_cache.rows(segment.kv, 0, first)
        wanted = self._subject.twin_cache.rows(one.kv, 0, first)
        return all(map(np.array_equal, found, wanted))
