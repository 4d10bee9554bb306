"""Scores of logits against a reference's, with standard errors.

All runs score the same rows in the same order, so that differences are paired. Standard errors
treat a stretch of neighbouring tokens as one observation.
"""

from __future__ import annotations

import io
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import BoolArray, FloatArray, IntArray
from lowtide.decode.forced import ForcedText
from lowtide.decode.sampling import check_finite
from lowtide.errors import StorageError
from lowtide.lab.quality_text import TextSample

MAX_HELD_BYTES = 1 << 26
"""Most bytes of the reference's logits in memory; more are kept in an unnamed file."""


class Estimate(NamedTuple):
    """A mean and its standard error; None with fewer than two stretches of text."""

    mean: float
    error: float | None


class RowScores(NamedTuple):
    """The scores of all rows, in order."""

    loss: FloatArray  # [rows] -log p(the text's token), nats
    kl: FloatArray  # [rows] KL(reference || this), nats
    is_same: FloatArray  # [rows] 1 where the likeliest token is the reference's, else 0
    is_right: FloatArray  # [rows] 1 where it is the text's, else 0

    @classmethod
    def none(cls) -> RowScores:
        """Return the scores of no rows."""
        return cls(*(np.empty(0) for _ in range(4)))

    def part(self, rows: BoolArray) -> RowScores:
        """Return the scores of some rows."""
        return RowScores(*(values[rows] for values in self))


class ScoredRows(NamedTuple):
    """The scored rows of a sample, the same in every run over it."""

    mask: IntArray  # [rows] that hid the token; 0 in an autoregressive model
    stretch: IntArray  # [rows] the stretch of text that the token is of

    @property
    def weights(self) -> FloatArray:
        """Weights [rows], summing to 1, with which every mask counts equally in a mean."""
        masks, counts = np.unique(self.mask, return_counts=True)
        weights: FloatArray = 1 / (len(masks) * counts[np.searchsorted(masks, self.mask)])
        return weights

    def estimate(self, values: FloatArray) -> Estimate:
        """Return the weighted mean of values [rows], with its standard error."""
        # Each mask's mean by itself: that of equal values is exact.
        mean = float(np.mean([values[self.mask == mask].mean() for mask in np.unique(self.mask)]))
        weights = self.weights
        _, stretch = np.unique(self.stretch, return_inverse=True)
        sums = np.bincount(stretch, weights * (values - mean))
        if len(sums) < 2:
            return Estimate(mean, None)
        return Estimate(mean, math.sqrt(float((sums**2).sum()) * len(sums) / (len(sums) - 1)))

    def of_mask(self, mask: int) -> tuple[BoolArray, ScoredRows]:
        """Return the rows whose token a mask hid, as bool [rows] and by themselves."""
        is_its: BoolArray = self.mask == mask
        return is_its, ScoredRows(self.mask[is_its], self.stretch[is_its])


class Comparison(NamedTuple):
    """A run compared with the reference."""

    num_rows: int
    loss: Estimate
    loss_difference: Estimate  # less the reference's
    kl: Estimate
    agreement: Estimate  # share of rows whose likeliest token is the reference's
    accuracy: Estimate  # share of rows whose likeliest token is the text's
    accuracy_difference: Estimate

    @classmethod
    def of(cls, scores: RowScores, reference: RowScores, rows: ScoredRows) -> Comparison:
        return cls(
            len(scores.loss),
            rows.estimate(scores.loss),
            rows.estimate(scores.loss - reference.loss),
            rows.estimate(scores.kl),
            rows.estimate(scores.is_same),
            rows.estimate(scores.is_right),
            rows.estimate(scores.is_right - reference.is_right),
        )

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss; for a diffusion model, of a masked token's."""
        return math.exp(min(self.loss.mean, 700.0))

    def as_dict(self) -> dict[str, object]:
        estimates = {
            name: value._asdict()
            for name, value in self._asdict().items()
            if isinstance(value, Estimate)
        }
        return {"num_rows": self.num_rows, "perplexity": self.perplexity, **estimates}


class ReferenceLogits:
    """The reference's logits, written once and then read in order by every other run.

    They are in memory if small, else in an unnamed file, of which nothing remains however the
    process ends. Raises StorageError if there is no room for it.
    """

    def __init__(self, num_rows: int, vocab_size: int, folder: Path) -> None:
        """folder: on a disk, not in memory; created if missing."""
        self._row_bytes = 4 * vocab_size
        self._num_bytes = num_rows * self._row_bytes
        self._folder = folder
        self._file = self._open()

    def write(self, logits: Tensor) -> None:
        """Append rows, float32 [n, vocab] in host memory."""
        try:
            self._file.write(logits.contiguous().numpy().tobytes())
        except OSError as reason:
            raise self._refusal(reason.strerror or "it cannot be written") from reason

    def rewind(self) -> None:
        """Start reading again from the first row."""
        self._file.seek(0)

    def read(self, num_rows: int) -> Tensor:
        """Return the next rows, float32 [n, vocab]."""
        data = self._file.read(num_rows * self._row_bytes)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(num_rows, -1)

    def __enter__(self) -> ReferenceLogits:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _open(self) -> IO[bytes]:
        if self._num_bytes <= MAX_HELD_BYTES:
            return io.BytesIO()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(self._folder).free
            if free_bytes < self._num_bytes:
                raise self._refusal(f"{free_bytes} are free")
            return tempfile.TemporaryFile(dir=self._folder)
        except OSError as reason:
            raise self._refusal(reason.strerror or "it cannot be made") from reason

    def _refusal(self, reason: str) -> StorageError:
        return StorageError(
            f"The reference's logits take {self._num_bytes} bytes in {self._folder}: {reason}. "
            "Score fewer --tokens, or name a cache folder with more room in XDG_CACHE_HOME."
        )


class Scorer:
    """Compares every row's logits with the reference's; is an `OnLogits`.

    The reference's own run writes its logits; all others read them.
    """

    def __init__(
        self, sample: TextSample, reference: ReferenceLogits, *, is_reference: bool
    ) -> None:
        self._sample = sample
        self._reference = reference
        self._is_reference = is_reference
        self._text: ForcedText
        self._num_texts = 0
        self._parts: list[RowScores] = []
        self._places: list[tuple[int, IntArray]] = []
        reference.rewind()

    def begin(self, text: ForcedText) -> None:
        """Start a text, to which the next rows belong."""
        self._text = text
        self._num_texts += 1

    def __call__(self, mask: int, positions: IntArray, logits: Tensor) -> None:
        if self._is_reference:
            self._reference.write(logits)
            beside = logits
        else:
            beside = self._reference.read(len(logits))
        wanted = np.asarray(self._text.token_ids, np.int64)[positions]
        self._parts.append(_scores(logits, beside, wanted, positions))
        self._places.append((mask, self._stretches(positions)))

    def finish(self) -> tuple[RowScores, ScoredRows]:
        """Return everything scored."""
        scores = RowScores(*(np.concatenate(values) for values in zip(*self._parts, strict=True)))
        masks = np.concatenate([np.full(len(of), mask) for mask, of in self._places])
        return scores, ScoredRows(masks, np.concatenate([of for _, of in self._places]))

    def _stretches(self, positions: IntArray) -> IntArray:
        longest = max(len(text.token_ids) for text in self._sample.scored)
        stretches: IntArray = (
            self._num_texts * (longest // self._sample.cluster_tokens + 1)
            + positions // self._sample.cluster_tokens
        )
        return stretches


def _scores(logits: Tensor, reference: Tensor, wanted: IntArray, positions: IntArray) -> RowScores:
    """Score row by row, in double precision: equal logits have a KL of exactly 0."""
    check_finite(logits.max(dim=-1).values, positions)
    loss, kl = np.empty(len(wanted)), np.empty(len(wanted))
    for place, (row, other) in enumerate(zip(logits, reference, strict=True)):
        log_p, log_q = other.double().log_softmax(dim=-1), row.double().log_softmax(dim=-1)
        loss[place] = -float(log_q[wanted[place]])
        kl[place] = float((log_p.exp() * (log_p - log_q)).sum())
    best, best_of_reference = (x.argmax(dim=-1).numpy() for x in (logits, reference))
    is_same, is_right = best == best_of_reference, best == wanted
    return RowScores(loss, kl, is_same.astype(np.float64), is_right.astype(np.float64))


def by_mask(
    scores: RowScores, reference: RowScores, rows: ScoredRows, ratios: Sequence[float]
) -> dict[float, Comparison]:
    """Return a comparison for each mask, by its ratio."""
    compared = {}
    for mask, ratio in enumerate(ratios):
        is_its, own = rows.of_mask(mask)
        compared[ratio] = Comparison.of(scores.part(is_its), reference.part(is_its), own)
    return compared
