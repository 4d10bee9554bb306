"""How alike experts are: by what they make of the same inputs, and by their weights.

One layer is measured at a time, in memory of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lowtide.core import IntArray, Step, StepKind, WeightArray
from lowtide.experts.rows import Routing
from lowtide.lab.buddies import CoActivations
from lowtide.llm import LLM

MAX_PASS_ROWS = 512
"""Rows that `LLM.run_experts` takes at once."""
MAX_BYTES = 1 << 29
"""Most bytes of a layer's outputs or weights that are compared, all experts together."""
NUM_WEIGHTS = 1 << 16
"""Weights of an expert that are compared, about: evenly spread columns of its matrices."""

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and how much there is."""


def num_inputs(llm: LLM) -> int:
    """Rows that every expert of a layer is given to be compared by outputs."""
    shape = llm.config.moe_shape
    row_bytes = 4 * shape.num_experts * shape.hidden_size
    most = MAX_PASS_ROWS // shape.num_experts_per_token
    return max(1, min(most, MAX_BYTES // row_bytes))


def output_similarity(
    llm: LLM, seen: CoActivations, progress: Progress | None = None
) -> WeightArray:
    """Cosine of two experts' outputs on the same inputs. [layers, experts, experts] float32

    Row i is of inputs whose tokens chose i, since a buddy would work for these: the mean
    over those, and over all inputs counted as one more. `seen` has kept `num_inputs`. Raises what
    `LLM.run_experts` raises.
    """
    num_layers = llm.config.num_moe_layers
    layers = []
    for layer in range(num_layers):
        x, chosen = seen.inputs(layer, num_inputs(llm))
        layers.append(cosines_of_outputs(_outputs(llm, layer, x), chosen))
        if progress is not None:
            progress("comparing outputs", layer + 1, num_layers)
    return np.stack(layers)


def cosines_of_outputs(outputs: Tensor, chosen: IntArray) -> WeightArray:
    """As `output_similarity`, of one layer. outputs [experts, tokens, hidden] float32, which are
    overwritten; chosen [tokens, k] -> [experts, experts]"""
    num_experts, num_tokens = outputs.shape[:2]
    unit = normalize(outputs, dim=2, out=outputs)
    total, own = torch.zeros(2, num_experts, num_experts)
    for token in range(num_tokens):
        alike = unit[:, token] @ unit[:, token].t()
        total += alike
        own[chosen[token]] += alike[chosen[token]]
    count = np.bincount(chosen.ravel(), minlength=num_experts)[:, None]
    mean = (own + total / num_tokens) / torch.from_numpy(1 + count)
    cosines: WeightArray = mean.float().numpy()
    return cosines


def weight_similarity(llm: LLM, progress: Progress | None = None) -> WeightArray:
    """Cosine of two experts' weights. [layers, experts, experts] float32

    Of about `NUM_WEIGHTS` of each. Raises StorageError when an expert cannot be read.
    """
    shape = llm.config.moe_shape
    most = min(NUM_WEIGHTS, MAX_BYTES // (4 * shape.num_experts))
    num_columns = max(1, most // (2 * shape.expert_size + shape.hidden_size))
    layers = []
    for layer in range(shape.num_layers):
        experts = range(shape.num_experts)
        columns = [llm.expert_columns(layer, expert, num_columns) for expert in experts]
        unit = normalize(torch.stack(columns), dim=1)
        layers.append((unit @ unit.t()).numpy())
        if progress is not None:
            progress("comparing weights", layer + 1, shape.num_layers)
    return np.stack(layers)


def _outputs(llm: LLM, layer: int, x: Tensor) -> Tensor:
    """What each expert of a layer makes of rows x [n, hidden]. [experts, n, hidden] float32

    Some experts are run together, each token once for each of them with all weight on that one:
    every expert is wanted, and read, once.
    """
    shape = llm.config.moe_shape
    k, num_rows = shape.num_experts_per_token, len(x)
    rows = x.to(llm.dtype).repeat(k, 1)
    weights = torch.eye(k).repeat_interleave(num_rows, dim=0)
    outputs = torch.empty(shape.num_experts, num_rows, shape.hidden_size)
    step = Step(StepKind.PREFILL, 0)
    for start in range(0, shape.num_experts, k):
        first = min(start, shape.num_experts - k)
        experts = torch.arange(first, first + k).expand(len(rows), k)
        out = llm.run_experts(layer, rows, Routing(experts.contiguous(), weights), step)
        outputs[first : first + k] = out.view(k, num_rows, shape.hidden_size)
    return outputs
