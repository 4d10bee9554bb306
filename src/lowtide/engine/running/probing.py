"""Computes logits of given tokens and experts of given rows with a loaded model.

Runs on the engine's thread. Inputs are checked here, before compiled code uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from lowtide.config import ModelConfig
from lowtide.core import Step, StepKind
from lowtide.decode.causal_sequence import logprobs_of
from lowtide.decode.logits import LOGIT_ROWS, rows_that_predict
from lowtide.decode.request import TokenLogprobs
from lowtide.decode.sampling import check_finite
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.running.engine import Engine
from lowtide.errors import InternalError, UsageError
from lowtide.experts.rows import Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.experts.transfer import DiskTransfer, ticket_result
from lowtide.kernels.operands import Matrix
from lowtide.kernels.reference import Kernels
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.memory.arena import Arena
from lowtide.memory.cuda_streams import device_pass
from lowtide.memory.pinned_copies import to_device
from lowtide.memory.workspace import tiles

TakeLogits = Callable[[int, Tensor], None]
"""Receives the first position, and float32 logits [n, vocab] from it on, valid during the call."""


def logits(
    engine: Engine, token_ids: Sequence[int], block_length: int
) -> Generator[None, None, Tensor]:
    """Compute float32 logits [len, vocab] of every position, on the CPU; yield between passes.

    No block is divided: a block as long as the sequence is one pass. Raises as
    `FaultSearch.naming_faults` does.
    """
    result = torch.empty(len(token_ids), engine.model.config.vocab_size)

    def take(first: int, rows: Tensor) -> None:
        result[first : first + len(rows)].copy_(rows)

    yield from _passes(engine, token_ids, block_length, take)
    return result


def logprobs(
    engine: Engine, token_ids: Sequence[int], num_top: int
) -> Generator[None, None, list[TokenLogprobs]]:
    """Compute log-probabilities of a text's tokens, except the first, after those before each.

    Each has the `num_top` likeliest tokens at its position. For autoregressive models; yields
    between passes. Raises as `logits`.
    """
    found: list[TokenLogprobs] = []

    def take(first: int, rows: Tensor) -> None:
        for position, row in enumerate(rows, first + 1):
            if position < len(token_ids):
                found.append(logprobs_of(row.log_softmax(-1), token_ids[position], num_top))

    yield from _passes(engine, token_ids, 1, take)
    return found


def _passes(
    engine: Engine, token_ids: Sequence[int], block_length: int, take: TakeLogits
) -> Generator[None, None, None]:
    """Run passes over a text, passing their logits to `take` a few rows at a time."""
    num_tokens = len(token_ids)
    kv_range = engine.kv_cache.allocate(num_tokens)
    try:
        pass_rows = max(1, MAX_PASS_ROWS // block_length) * block_length
        for start in range(0, num_tokens, pass_rows):
            if start:
                yield
            part = token_ids[start : start + pass_rows]
            with engine.faults.naming_faults(), device_pass(), torch.inference_mode():
                _logits_pass(engine, part, start, block_length, kv_range, take)
    finally:
        engine.kv_cache.free(kv_range)


def run_experts(engine: Engine, layer: int, x: Tensor, routing: Routing, step: Step) -> Tensor:
    """Run MoE layer `layer`'s experts on checked rows x [rows, hidden].

    Returns float32 [rows, hidden] on the CPU.
    """
    device = engine.model.device
    rows = x.to(device).contiguous()
    experts, weights = (tensor.to(device).contiguous() for tensor in routing)
    with device_pass(), torch.inference_mode():
        out = engine.model.run_experts(layer, rows, Routing(experts, weights), step)
        return out.to("cpu", copy=True)


def expert_columns(engine: Engine, layer: int, expert: int, num_columns: int) -> Tensor:
    """Return evenly spaced columns of an expert's gate, up and down matrices, concatenated.

    They are the numbers used in products: float32, 1-D, on the CPU, read again into memory of their
    own.
    """
    facts = engine.planner.memory.experts
    if facts is None:
        raise InternalError("a column of an expert was asked of a model without experts.")
    layout = facts.layout
    slots = ExpertSlots(Arena(layout.num_bytes), layout)
    transfer = DiskTransfer(engine.reader, facts.table, slots, facts.inputs)
    ticket_result(transfer.start(layer, expert, 0))
    return torch.cat(
        [
            _columns(engine.kernels, layout.dtype, matrix, part.shape, num_columns)
            for matrix, part in zip(
                slots.weights(layer, 0)[:3],
                (part for part in layout.layers[layer].parts if part.shape[0]),
                strict=False,
            )
        ]
    )


def check_expert(config: ModelConfig, layer: int, expert: int, num_columns: int) -> None:
    """Raise UsageError for arguments outside the range of `expert_columns`."""
    config.check_experts("expert_columns")
    _check_layer(layer, config.moe_shape.num_layers)
    if not 0 <= expert < config.moe_shape.num_experts or num_columns < 1:
        raise UsageError(
            f"{num_columns} columns of expert {expert} cannot be: there are experts 0 to "
            f"{config.moe_shape.num_experts - 1}."
        )


def checked_rows(
    config: ModelConfig, dtype: torch.dtype, layer: int, x: Tensor, routing: Routing, step: Step
) -> tuple[Tensor, Routing]:
    """Copy rows and routing for a MoE layer of `config`, after checking them.

    The originals may change afterwards. Raises UsageError.
    """
    config.check_experts("run_experts")
    shape = config.moe_shape
    _check_layer(layer, shape.num_layers)
    _check_tensor("x", x, (dtype,), f"[rows, {config.hidden_size}]")
    num_rows = x.shape[0] if x.dim() else 0
    if tuple(x.shape) != (num_rows, config.hidden_size) or not 1 <= num_rows <= MAX_PASS_ROWS:
        raise UsageError(
            f"x must be [rows, {config.hidden_size}] of 1 to {MAX_PASS_ROWS} rows, not "
            f"{list(x.shape)}."
        )
    if not isinstance(routing, Routing):
        raise UsageError(f"routing must be a Routing, not {type(routing).__name__}.")
    wanted = (num_rows, shape.num_experts_per_token)
    _check_tensor("routing.experts", routing.experts, (torch.int64, torch.int32), list(wanted))
    _check_tensor("routing.weights", routing.weights, (torch.float32,), list(wanted))
    for name, tensor in routing._asdict().items():
        if tuple(tensor.shape) != wanted:
            raise UsageError(
                f"routing.{name} must be {list(wanted)}, {wanted[1]} experts for each row of x, "
                f"not {list(tensor.shape)}."
            )
    if not isinstance(step, Step):
        raise UsageError(f"step must be a Step, not {step!r}.")
    experts = routing.experts.to(torch.int64, copy=True)
    _check_ids(experts, shape.num_experts)
    return x.clone(), Routing(experts, routing.weights.clone())


def _columns(
    kernels: Kernels,
    dtype: torch.dtype,
    matrix: Matrix,
    shape: tuple[int, ...],
    num_columns: int,
) -> Tensor:
    """Return columns of a matrix [out, in], as products with unit vectors, which any format has."""
    num_rows, width = shape
    chosen = torch.linspace(0, width - 1, min(num_columns, width)).long()
    if isinstance(matrix, Tensor):
        return matrix[:, chosen].t().float().flatten()
    units = torch.zeros(len(chosen), width, dtype=dtype)
    units[torch.arange(len(chosen)), chosen] = 1
    out = torch.empty(len(chosen), num_rows, dtype=dtype)
    kernels.multiply_by(units, matrix, out)
    return out.float().flatten()


def _check_layer(layer: object, num_layers: int) -> None:
    is_integer = isinstance(layer, int) and not isinstance(layer, bool)
    if not is_integer or not 0 <= layer < num_layers:  # type: ignore[operator]
        raise UsageError(f"layer {layer!r} is not a MoE layer: they are 0 to {num_layers - 1}.")


def _check_tensor(name: str, value: object, dtypes: Sequence[torch.dtype], shape: object) -> None:
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise UsageError(f"{name} must be a {kinds} tensor {shape}, not {type(value).__name__}.")
    if value.dtype not in dtypes or value.layout is not torch.strided:
        raise UsageError(f"{name} must be {kinds}, not {value.dtype} ({value.layout}).")


def _check_ids(experts: Tensor, num_experts: int) -> None:
    low, high = int(experts.min()), int(experts.max())
    if low < 0 or high >= num_experts:
        wrong = low if low < 0 else high
        raise UsageError(f"Expert {wrong} is not one of 0 to {num_experts - 1}.")
    if (experts.diff(dim=1) <= 0).any():
        raise UsageError("routing.experts must ascend within each row, no expert twice.")


def _logits_pass(
    engine: Engine,
    token_ids: Sequence[int],
    start: int,
    block_length: int,
    kv_range: KVRange,
    take: TakeLogits,
) -> None:
    stop = start + len(token_ids)
    batch = Batch(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(start, stop),
        segments=(Segment(0, len(token_ids), start, block_length, kv_range),),
        step=Step(StepKind.PREFILL, 0),
    )
    hidden = engine.model.forward(batch)
    own = rows_that_predict(np.arange(len(token_ids)), engine.model.config.decoding.logits_shift)
    [there] = to_device(hidden.device, torch.from_numpy(own))
    for rows in tiles(len(token_ids), LOGIT_ROWS):
        own_logits = engine.model.logits(hidden.index_select(0, there[rows])).cpu()
        take(start + rows.start, own_logits)
        check_finite(own_logits.amax(-1), range(start + rows.start, start + rows.stop))
    engine.kv_cache.end_pass([kv_range])
