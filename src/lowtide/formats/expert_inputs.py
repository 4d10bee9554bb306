"""Mean squares of the inputs of experts' matrices, which weight rounding errors.

The error of a weight costs its square times the mean square of the weight's input; codes, scales
and zeros are chosen to minimise that (`MatrixFormat.pack`). This module neither measures nor stores
the numbers.
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
"""Rows of the layer's mean mixed into an expert's own, since a text may have few of those."""


@dataclass(frozen=True, eq=False)
class ExpertInputs:
    """Mean squares of every expert's inputs over the rows of a text that chose the expert.

    An expert that no row chose has the mean over all rows of its layer. num_rows [layers, experts];
    hidden [layers, experts, hidden_size], for gate and up; activated [layers, experts,
    expert_size], for down.
    """

    fingerprint: str  # of the model's weights: `LLM.fingerprint`
    num_rows: IntArray
    hidden: MeanSquares
    activated: MeanSquares

    def check(self, fingerprint: str, where: str) -> None:
        """Raise UsageError if these inputs belong to other weights; `where`: their file."""
        if self.fingerprint != fingerprint:
            raise UsageError(
                f"The experts' inputs in {where} are another model's: of the same shape and with "
                f"other weights ({self.fingerprint[:12]}, and these are {fingerprint[:12]}); give "
                "another `calibration`, and run lowtide calibrate --inputs."
            )

    def importance(self, layer: int, expert: int, is_down: bool) -> MeanSquares:
        """Return the weight of a squared error at each input [inputs] of a matrix."""
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
        """Number of pairs of a row and an expert that it chose, over all layers."""
        return int(self.num_rows.sum())

    @property
    def num_unseen(self) -> int:
        """Number of experts that no row chose."""
        return int((self.num_rows == 0).sum())

    @cached_property
    def digest(self) -> str:
        """Digest of all contents."""
        digest = hashlib.sha256(self.fingerprint.encode())
        for array in (self.num_rows, self.hidden, self.activated):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @cached_property
    def _layer_means(self) -> tuple[MeanSquares, MeanSquares]:
        """Layer means [layers, inputs] for gate and up, and for down."""
        return layer_means(self.num_rows, self.hidden), layer_means(self.num_rows, self.activated)


def layer_means(num_rows: IntArray, of_experts: MeanSquares) -> MeanSquares:
    """Return means [layers, inputs] over all rows of a layer, from the means of its experts."""
    share = num_rows / np.maximum(1, num_rows.sum(axis=1, keepdims=True))
    means: MeanSquares = np.einsum("le,lei->li", share.astype(np.float32), of_experts)
    return means
