"""What experts' matrices are multiplied with, as far as rounding their weights asks: mean squares.

An error at a weight costs its square times the mean square of that weight's inputs; codes, scales
and zeros are chosen for the least of that (`MatrixFormat.pack`). Knows neither how the numbers were
measured nor where they are kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.core import IntArray
from lowtide.errors import UsageError

MeanSquares = NDArray[np.float32]

PRIOR_ROWS = 16
"""Rows of the layer's mean that count beside an expert's own, as a text may have few of those."""


@dataclass(frozen=True, eq=False)
class ExpertInputs:
    """Mean squares of every expert's inputs, over the rows of a text that chose the expert; where
    none did, over all rows of its layer.

    num_rows [layers, experts]; hidden [layers, experts, hidden_size], of gate and up; activated
    [layers, experts, expert_size], of down.
    """

    fingerprint: str  # of the model's weights: `LLM.fingerprint`
    num_rows: IntArray
    hidden: MeanSquares
    activated: MeanSquares

    def check(self, fingerprint: str, where: str) -> None:
        """Raises UsageError for weights that these are not inputs of; `where`: their file."""
        if self.fingerprint != fingerprint:
            raise UsageError(
                f"The experts' inputs in {where} are another model's: of the same shape and with "
                f"other weights ({self.fingerprint[:12]}, and these are {fingerprint[:12]}); give "
                "another --calibration, and run lowtide calibrate --inputs."
            )

    def importance(self, layer: int, expert: int, is_down: bool) -> MeanSquares:
        """What a squared error at each input of down, or of gate and up, counts. [inputs]."""
        own = (self.activated if is_down else self.hidden)[layer, expert]
        of_layer = self._layer_means[is_down][layer]
        num_own = np.float32(self.num_rows[layer, expert])
        total = own * num_own + of_layer * np.float32(PRIOR_ROWS)
        importance: MeanSquares = total / (num_own + np.float32(PRIOR_ROWS))
        return importance

    @property
    def nbytes(self) -> int:
        return self.num_rows.nbytes + self.hidden.nbytes + self.activated.nbytes

    @property
    def num_pairs(self) -> int:
        """Pairs of a row and an expert that it chose, over all layers."""
        return int(self.num_rows.sum())

    @property
    def num_unseen(self) -> int:
        """Experts that no row chose."""
        return int((self.num_rows == 0).sum())

    @cached_property
    def digest(self) -> str:
        """A digest of everything here: other inputs have another."""
        digest = hashlib.sha256(self.fingerprint.encode())
        for array in (self.num_rows, self.hidden, self.activated):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @cached_property
    def _layer_means(self) -> tuple[MeanSquares, MeanSquares]:
        """[layers, inputs] of gate and up, and of down."""
        return layer_means(self.num_rows, self.hidden), layer_means(self.num_rows, self.activated)


def layer_means(num_rows: IntArray, of_experts: MeanSquares) -> MeanSquares:
    """Means over all rows of a layer, from the means of its experts. [layers, inputs]."""
    share = num_rows / np.maximum(1, num_rows.sum(axis=1, keepdims=True))
    means: MeanSquares = np.einsum("le,lei->li", share.astype(np.float32), of_experts)
    return means
