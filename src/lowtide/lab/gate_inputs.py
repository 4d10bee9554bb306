"""Observers of gate inputs: their mean change from layer to layer, and gates run a layer early."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lowtide.core import IntArray, Step
from lowtide.experts.rows import Routing
from lowtide.layers.batch import KVRange, Segment
from lowtide.llm import LLM
from lowtide.memory.workspace import Workspace
from lowtide.policies.prefetch import Gate
from lowtide.replay.calibration import GATES


class ResidualMean:
    """Observer of the mean difference between gate inputs of MoE layers that follow each other."""

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        self._sum = np.zeros((num_layers - 1, hidden_size))
        self._num_rows = 0
        self._last = torch.empty(0)

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        if layer:
            self._sum[layer - 1] += (x.float() - self._last).sum(0).cpu().numpy()
        else:
            self._num_rows += len(x)
        self._last = x.to(torch.float32, copy=True)

    def vectors(self) -> NDArray[np.float32]:
        """Return what to add to each layer's input to get the next one's. [layers - 1, hidden]."""
        return (self._sum / self._num_rows).astype(np.float32)


class EarlyGates:
    """Observer that runs each router one layer early, on raw features and with the residual added.

    As `experts/early_gate.py` does, with the choice of each token kept.
    """

    def __init__(self, llm: LLM, residual: NDArray[np.float32]) -> None:
        """residual: see `ResidualMean.vectors`."""
        self._routers = llm.routers
        self._residual = torch.from_numpy(residual)
        self._num_experts = llm.config.moe.num_experts
        self._features: list[Tensor] = []  # of the layer before, by gate
        self._experts: list[Tensor] = []  # predicted for this layer, by gate: [rows, k]
        self._num_rows = 0
        num_predicted = len(self._routers) - 1
        self._num_routed = np.zeros((len(GATES), num_predicted))
        self._cosine = np.zeros((len(GATES), num_predicted))
        self.predicted: dict[Gate, list[IntArray]] = {Gate(name): [] for name in GATES}

    @property
    def routed(self) -> NDArray[np.float64]:
        """Share of each token's experts that were predicted. [2, layers - 1]."""
        return self._num_routed / self._num_rows

    @property
    def cosine(self) -> NDArray[np.float64]:
        """Mean cosine of the features used and the true ones. [2, layers - 1]."""
        return self._cosine / self._num_rows

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        if layer == 0:
            self._num_rows += len(x)
            for passes in self.predicted.values():
                passes.append(np.zeros((len(self._routers), self._num_experts), np.int64))
        else:
            self._judge(layer, x, routing.experts)
        if layer + 1 < len(self._routers):
            self._features = [x.clone(), x + self._residual[layer].to(x)]
            self._experts = [self._route(layer + 1, features) for features in self._features]

    def _judge(self, layer: int, x: Tensor, experts: Tensor) -> None:
        for gate, (name, features, early) in enumerate(
            zip(GATES, self._features, self._experts, strict=True)
        ):
            is_foreseen = (experts[:, :, None] == early[:, None, :]).any(2)
            self._num_routed[gate, layer - 1] += float(is_foreseen.float().mean(1).sum())
            cosines = cosine_similarity(features.float(), x.float(), dim=1)
            self._cosine[gate, layer - 1] += float(cosines.sum())
            counts = torch.bincount(early.reshape(-1), minlength=self._num_experts)
            self.predicted[Gate(name)][-1][layer] = counts.cpu().numpy()

    def _route(self, layer: int, features: Tensor) -> Tensor:
        # One sequence runs, and its passes begin where a block does: so do routing windows.
        num_rows = len(features)
        segment = Segment(0, num_rows, 0, num_rows, KVRange(0, num_rows))
        # A router's input and its logits, in float32, each on a 64-byte boundary.
        num_bytes = 4 * num_rows * (features.shape[1] + self._num_experts) + 2 * 64
        room = torch.empty(num_bytes, dtype=torch.uint8, device=features.device)
        return self._routers[layer].within(Workspace(room)).route(features, (segment,)).experts
