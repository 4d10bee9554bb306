"""Sums the squares of experts' inputs while a model runs, for `calibrate --inputs`.

    squares = InputSquares(TraceShape(*llm.config.moe_shape))
    with llm.observed(observer, experts=squares):
        llm.generate(...)
    inputs = squares.inputs(llm.fingerprint)

Holds a number for every input of every expert, however long the run is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.experts.rows import ExpertRows
from lowtide.formats.expert_inputs import ExpertInputs, MeanSquares, layer_means
from lowtide.replay.trace import TraceShape


class InputSquares:
    """Observer of experts that sums squares of their inputs, expert by expert."""

    def __init__(self, shape: TraceShape) -> None:
        layers, experts = shape[:2]
        self._num_rows: IntArray = np.zeros((layers, experts), np.int64)
        self._hidden = torch.zeros(layers, experts, shape.hidden_size)
        self._activated = torch.zeros(layers, experts, shape.expert_size)

    def saw_experts(self, layer: int, x: Tensor, rows: ExpertRows, activated: Tensor) -> None:
        squares = x.float().square()  # [tokens, hidden]
        for expert in rows.demanded:
            pairs = rows.pairs(expert)
            self._num_rows[layer, expert] += pairs.stop - pairs.start
            self._hidden[layer, expert] += squares[rows.token_of[pairs]].sum(0)
            self._activated[layer, expert] += activated[pairs].float().square().sum(0)

    def inputs(self, fingerprint: str) -> ExpertInputs:
        """Return the means so far; experts without rows have their layer's mean.

        fingerprint: of the model.
        """
        hidden, activated = (self._means(sums) for sums in (self._hidden, self._activated))
        return ExpertInputs(fingerprint, self._num_rows.copy(), hidden, activated)

    def _means(self, sums: Tensor) -> MeanSquares:
        num_rows = self._num_rows
        divisor = torch.from_numpy(num_rows).clamp(min=1)[:, :, None]
        means: MeanSquares = (sums / divisor).numpy()
        of_layers = np.broadcast_to(layer_means(num_rows, means)[:, None], means.shape)
        is_unseen = num_rows == 0
        means[is_unseen] = of_layers[is_unseen]
        return means
