"""Masked diffusion: a masked answer, filled in any order by a model that sees all of it.

Every position of such a model sees every other, so nothing of a pass is valid in the next. Each
pass computes the whole sequence, and with guidance a second copy without the prompt.

Other cache modes (`core.CacheMode`) approximate: they keep keys and values while a block is filled,
and only the block's first pass is whole.

Logits are computed only for positions that may still change. Sequences at different steps share a
pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from torch import Tensor

from lowtide.config import Canvas, ModelConfig
from lowtide.core import (
    CacheMode,
    IntArray,
    PassRows,
    RowKind,
    StepKind,
    align_up,
)
from lowtide.decode import masked_options
from lowtide.decode.candidates import Candidates, Reading
from lowtide.decode.forced import ForcedText, OnLogits
from lowtide.decode.kind import Blame, Kind, Schedule, Scheduled, UsualPass
from lowtide.decode.logits import Model, rows_that_predict
from lowtide.decode.masked_sequence import MaskedSequence
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Event, Request
from lowtide.decode.row_reading import Rows, read_logits, read_statistics
from lowtide.decode.sampling import Sampling, warn_if_never_drawn
from lowtide.errors import NumericError, PlanError
from lowtide.kernels.row_statistics import Wanted
from lowtide.layers.batch import Segment
from lowtide.memory.chunking import LogitNeeds, bucket
from lowtide.memory.kv_pages import GRANULE_TOKENS
from lowtide.params import (
    AUTOREGRESSIVE_ONLY,
    DEFAULT_CANVAS_TOKENS,
    DiffusionParams,
    SamplingParams,
)


class MaskedDiffusion(Kind[Canvas, MaskedSequence, Candidates]):
    """Fills a masked answer with a bidirectional model.

    In exact mode the KV cache holds only what one layer needs during a pass; in other modes it has
    room for all layers.
    """

    absent_fields = frozenset({*AUTOREGRESSIVE_ONLY, *masked_options.FOR_REWRITING})

    def resolved(self, asked: SamplingParams, config: ModelConfig) -> SamplingParams:
        if not self.decoding.is_measured_as_drawn:
            warn_if_never_drawn(asked)
        diffusion = masked_options.resolve(
            asked.diffusion, self.decoding.defaults, asked.most_tokens, config.architecture
        )
        return masked_options.with_early_stop(replace(asked, diffusion=diffusion))

    def room_unit(self, diffusion: DiffusionParams) -> int:
        return 1  # the last block may be shorter

    def max_new_tokens(
        self, num_prompt: int, diffusion: DiffusionParams, context: int, max_positions: int
    ) -> int:
        granules = align_up(context, GRANULE_TOKENS) // GRANULE_TOKENS // _num_copies(diffusion)
        room = min(context, granules * GRANULE_TOKENS) - num_prompt
        return room - room % (diffusion.block_length or 1)

    def check_room(self, num_prompt: int, params: SamplingParams, context: int) -> None:
        """Raise PlanError if the second sequence that guidance computes does not fit."""
        needed = 2 * align_up(num_prompt + params.most_tokens, GRANULE_TOKENS)
        if params.diffusion.cfg_scale and needed > align_up(context, GRANULE_TOKENS):
            raise PlanError(
                f"{num_prompt} prompt tokens and {params.most_tokens} new ones are computed twice "
                f"for guidance, and the context is {context}; raise it to {needed}, lower "
                "`max_tokens` or leave `cfg_scale` out."
            )

    def logit_needs(self, diffusion: DiffusionParams) -> LogitNeeds:
        rule = diffusion.remasking or self.decoding.defaults.remasking
        is_guided = bool(diffusion.cfg_scale)
        return LogitNeeds(rule == "topk_margin", rule == "entropy", is_guided)

    def usual_pass(self, context: int) -> UsualPass:
        num_new = min(DEFAULT_CANVAS_TOKENS, context)
        params = masked_options.resolve(DiffusionParams(), self.decoding.defaults, num_new, "")
        num_tokens = 1.0 if params.steps is None else max(1.0, num_new / params.steps)
        is_whole = self.cache_mode is CacheMode.EXACT
        return UsualPass(context if is_whole else params.block_length or num_new, num_tokens)

    def num_tokens(self, request: Request) -> int:
        length = len(request.prompt) + request.max_tokens
        return _num_copies(request.params.diffusion) * align_up(length, GRANULE_TOKENS)

    def room_tokens(self, request: Request, num_first: int) -> int:
        return self.num_tokens(request)  # its first pass is over all of it

    def begin(self, request: Request) -> MaskedSequence:
        return MaskedSequence(request, self.mask_token_id, self.decoding.is_measured_as_drawn)

    def paused(self, sequence: MaskedSequence) -> None:
        if self.cache_mode is not CacheMode.EXACT:
            sequence.restart_block()

    def schedule(
        self, running: Sequence[MaskedSequence], max_rows: int, share: PromptShare
    ) -> Schedule[MaskedSequence]:
        entries: list[Scheduled[MaskedSequence]] = []
        num_rows = 0
        for sequence in running:
            first, stop = self._fed(sequence)
            length, num_copies = stop - first, _num_copies(sequence.request.params.diffusion)
            if num_rows + num_copies * length <= max_rows:
                entries.append(Scheduled(sequence, first, stop, num_rows, num_copies))
                num_rows += num_copies * length
        return Schedule(StepKind.DENOISE, entries)

    def end_tokens(self, entry: Scheduled[MaskedSequence]) -> int:
        return entry.sequence.kv.capacity

    def _fed(self, sequence: MaskedSequence) -> tuple[int, int]:
        """Return the range of positions that a sequence's next pass computes.

        Other positions keep the keys and values from the block's first pass.
        """
        length, block = len(sequence.tokens), sequence.active_block
        if self.cache_mode is CacheMode.EXACT or not sequence.num_block_passes:
            return 0, length
        # From the hidden state that gives the block's first logits on.
        first = max(0, block.start - self.decoding.logits_shift)
        return first, block.stop if self.cache_mode is CacheMode.DUAL else length

    def pass_rows(self, entry: Scheduled[MaskedSequence]) -> PassRows:
        """Mark a block's first pass as kept if later passes use its keys and values."""
        is_kept = self.cache_mode is not CacheMode.EXACT and not entry.sequence.num_block_passes
        kind, num_rows = RowKind.COMMIT if is_kept else RowKind.DRAFT, entry.end - entry.start
        ids = np.full(num_rows, entry.sequence.request.id)
        return PassRows(ids, np.full(num_rows, kind, np.uint8))

    def copies(self, entry: Scheduled[MaskedSequence]) -> list[tuple[IntArray, Segment]]:
        """Return the sequence and, with guidance, the sequence without its prompt."""
        sequence, first, stop, _, num_copies, *_ = entry
        texts, length = (sequence.tokens, sequence.unconditional_tokens()), len(sequence.tokens)
        return [
            (
                texts[copy][first:stop],
                Segment(
                    start,
                    start + entry.length,
                    first,
                    block_length=length,
                    kv=sequence.kv.part(copy, num_copies),
                    sees_to=length,
                ),
            )
            for copy, start in enumerate(entry.starts)
        ]

    def asked(
        self, entries: Sequence[Scheduled[MaskedSequence]]
    ) -> tuple[int, tuple[LogitNeeds, ...]]:
        """Count rows in buckets, so that a request has few sizes of passes."""
        num_rows, asked = 0, []
        for (is_guided, needs_logits), indices in _read_alike(entries).items():
            if not needs_logits:
                alike = [entries[i] for i in indices]
                num_read = sum(len(entry.sequence.wanted) for entry in alike)
                most = sum(entry.sequence.request.max_tokens for entry in alike)
                num_rows = max(num_rows, bucket(num_read, max(num_read, most)))
                asked.append(LogitNeeds(*_wanted(alike), is_guided))
        return num_rows, tuple(sorted(asked))

    def choose(
        self,
        model: Model,
        hidden: Tensor,
        entries: Sequence[Scheduled[MaskedSequence]],
        blame: Blame,
    ) -> list[Candidates | None]:
        """Choose a candidate for every wanted position of each entry."""
        found = [Candidates.empty(len(entry.sequence.wanted)) for entry in entries]
        for (_, needs_logits), indices in _read_alike(entries).items():
            read = self._read_logits if needs_logits else self._read_statistics
            read(model, hidden, [entries[i] for i in indices], [found[i] for i in indices], blame)
        return [*found]

    def _read_statistics(
        self,
        model: Model,
        hidden: Tensor,
        entries: Sequence[Scheduled[MaskedSequence]],
        found: Sequence[Candidates],
        blame: Blame,
    ) -> None:
        rows = _joined([_rows(entry, self.decoding.logits_shift) for entry in entries])
        statistics = read_statistics(model, hidden, rows, _wanted(entries))
        start = 0
        for entry, candidates in zip(entries, found, strict=True):
            positions = entry.sequence.wanted
            own = statistics.part(start + np.arange(len(positions)))
            with _choosing_for(entry.sequence, blame):
                candidates.put(slice(None), Candidates.likeliest(own, positions))
            start += len(positions)

    def _read_logits(
        self,
        model: Model,
        hidden: Tensor,
        entries: Sequence[Scheduled[MaskedSequence]],
        found: Sequence[Candidates],
        blame: Blame,
    ) -> None:
        for entry, candidates in zip(entries, found, strict=True):
            rows = _rows(entry, self.decoding.logits_shift)
            for part, logits in read_logits(model, hidden, rows):
                with _choosing_for(entry.sequence, blame):
                    candidates.put(part, entry.sequence.choose(logits, part))

    def written(self, entry: Scheduled[MaskedSequence], choice: Candidates | None) -> list[Event]:
        sequence = entry.sequence
        if self.cache_mode is not CacheMode.EXACT:  # what it has of them is wanted again
            sequence.kv.num_written = sequence.kv.capacity
        return [] if choice is None else sequence.denoised(choice)

    def forced(self, text: ForcedText, on_logits: OnLogits) -> MaskedDiffusion:
        """Read the text after its prompt as one block."""
        return _Forced(text, on_logits, self)


@contextmanager
def _choosing_for(sequence: MaskedSequence, blame: Blame) -> Iterator[None]:
    """Blame only this sequence for logits that are not finite."""
    try:
        yield
    except NumericError:
        blame([sequence])
        raise


def _rows(entry: Scheduled[MaskedSequence], logits_shift: int) -> Rows:
    """Return the rows whose hidden states give the logits of the wanted positions."""
    own = rows_that_predict(entry.sequence.wanted - entry.first, logits_shift) + entry.start
    if entry.num_copies == 1:
        return Rows(own)
    return Rows(own, own + entry.length, np.full(len(own), entry.sequence.cfg_scale + 1))


def _read_alike(entries: Sequence[Scheduled[MaskedSequence]]) -> dict[tuple[bool, bool], list[int]]:
    """Group entries whose logits are read alike: (is guided, needs whole logits) -> entries."""
    alike: dict[tuple[bool, bool], list[int]] = {}
    for index, entry in enumerate(entries):
        kind = (entry.num_copies > 1, entry.sequence.reading.needs_logits)
        alike.setdefault(kind, []).append(index)
    return alike


def _wanted(entries: Sequence[Scheduled[MaskedSequence]]) -> Wanted:
    readings = [entry.sequence.reading for entry in entries]
    return Wanted(
        second=any(reading.needs_second for reading in readings),
        entropy=any(reading.needs_entropy for reading in readings),
    )


def _joined(rows: Sequence[Rows]) -> Rows:
    """Concatenate rows that are all guided or all not."""
    own = np.concatenate([each.own for each in rows])
    others = [each.other for each in rows if each.other is not None]
    factors = [each.factors for each in rows if each.factors is not None]
    if not others:
        return Rows(own)
    return Rows(own, np.concatenate(others), np.concatenate(factors))


def _num_copies(diffusion: DiffusionParams) -> int:
    """Return the number of copies of a sequence in a pass: two with guidance."""
    return 2 if diffusion.cfg_scale else 1


class _Forced(MaskedDiffusion):
    """Reads a given text."""

    def __init__(self, text: ForcedText, on_logits: OnLogits, kind: MaskedDiffusion) -> None:
        super().__init__(kind.decoding, kind.use_kv_cache, kind.cache_mode)
        self._text, self._on_logits = text, on_logits

    def begin(self, request: Request) -> MaskedSequence:
        return _ForcedSequence(self._text, self._on_logits, request, self.mask_token_id)


class _ForcedSequence(MaskedSequence):
    """A given text whose tokens after the prompt are hidden by one mask after another."""

    def __init__(
        self, text: ForcedText, on_logits: OnLogits, request: Request, mask_token_id: int
    ) -> None:
        super().__init__(request, mask_token_id, is_measured_as_drawn=False)
        self._text, self._on_logits = text, on_logits
        self._hide()

    @property
    def reading(self) -> Reading:
        return Reading(Sampling(), excluded=self._mask_token_id)  # takes whole rows of logits

    @property
    def is_expected_to_end(self) -> bool:
        return self.num_block_passes + 1 == len(self._text.masks)

    def choose(self, logits: Tensor, part: slice) -> Candidates:
        self._on_logits(self.num_block_passes, self.wanted[part], logits)
        return Candidates.empty(len(logits))

    def denoised(self, candidates: Candidates) -> list[Event]:
        self._num_forwards += 1
        self.num_block_passes += 1
        if self.num_block_passes < len(self._text.masks):
            self._hide()
            return []
        return self._finish(list(self._text.token_ids[self._text.num_context :]), "length")

    def _hide(self) -> None:
        mask = self._text.masks[self.num_block_passes]
        self.tokens[:] = np.where(mask, self._mask_token_id, self._text.token_ids)
        self._is_masked[:] = mask
        self.wanted = np.flatnonzero(mask)
