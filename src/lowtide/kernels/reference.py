"""Reference kernels in plain torch, for any processor; every faster variant must equal them.

`Kernels` is the base class of all variants, and each of its methods the plain twin of theirs. The
methods write into buffers that they are given or take from the workspace, and allocate nothing
large.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.kernels import int8_rows, reference_delta, reference_rows, stored, tiled_head
from lowtide.kernels.cpu.layer import CompiledLayer
from lowtide.kernels.cpu.weight_calls import CompiledExperts
from lowtide.kernels.int8_rows import GroupedMatrix
from lowtide.kernels.layer_parts import LayerParts
from lowtide.kernels.operands import (
    AnyWeights,
    ClampedWeights,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    ExpertChoice,
    GeluWeights,
    HeadNorms,
    Matrix,
    Rotation,
    SortedPairs,
    SquaredWeights,
)
from lowtide.kernels.routing import limit_to_groups, weights_of
from lowtide.kernels.row_statistics import Form, Guidance, Head, RowStatistics, Wanted
from lowtide.memory.workspace import Buffers
from lowtide.plan import INT8_ROWS

CLAMP_LIMIT = 7.0
CLAMP_SLOPE = 1.702
"""Limit and slope of `clamped_swiglu`; every published gpt-oss has these."""


def name_with_rows(name: str, rounded: Collection[str]) -> str:
    """Return the `Kernels.name` of kernels that round rows for the formats in `rounded`, if any."""
    return f"{name}, {INT8_ROWS} rows" if rounded else name


class Kernels:
    """Operators for one kind of processor, in one compute dtype; chosen once for a model.

    A variant decides for itself which rows it computes and which it leaves to its plain twin.
    """

    name = "torch"
    library: ctypes.CDLL | None = None  # of compiled layers, if any

    def __init__(self, rounded: Collection[str] = (), name: str = name) -> None:
        """Set the options.

        rounded: names of the weight formats whose products round rows to int8 first
          (`int8_rows.py`).
        name: for people and stored costs.
        """
        self.rounded = frozenset(rounded)
        self.name = name_with_rows(name, self.rounded)

    # Products with stored weights

    def multiply(
        self, x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor, num_threads: int = 1
    ) -> None:
        """Compute `out = x @ weight_t + bias`.

        x [n, in], weight_t [in, out], bias [out], out [n, out]. num_threads: of the kernel's own;
        used if `divides` is True for the matrix.
        """
        if bias is None:
            torch.mm(x, weight_t, out=out)
        else:
            torch.addmm(bias, x, weight_t, out=out)

    def multiply_by(
        self,
        x: Tensor,
        matrix: Matrix,
        out: Tensor,
        bias: Tensor | None = None,
        num_threads: int = 1,
        is_rounded: bool | None = None,
    ) -> None:
        """Compute `out = x @ matrix.t() + bias` with a matrix of any format.

        x [n, in], matrix [out, in], out [n, out].
        Each weight is rounded once to the compute dtype, whatever n is; for rows rounded to int8
        see `int8_rows.py`. is_rounded: whether the rows of an expert's matrix are; by default as
        `rounds` says.
        """
        if isinstance(matrix, Tensor):
            self.multiply(x, matrix.t(), bias, out, num_threads)
        elif x.is_meta:
            return
        elif isinstance(matrix, GroupedMatrix) and (
            self.rounds(matrix) if is_rounded is None else is_rounded
        ):
            int8_rows.multiply(x, matrix, bias, out)
        else:
            stored.multiply(self, x, matrix, bias, out)

    def rounds(self, *matrices: Matrix) -> bool:
        """Return True if rows are rounded to int8 before products with a matrix.

        An expert's matrices are decided together: either all that are in groups or none. A rounded
        row's bits do not depend on the number of rows.
        """
        names = {int8_rows.format_name(m) for m in matrices if isinstance(m, GroupedMatrix)}
        return bool(names) and names <= self.rounded

    def unpack(self, matrix: StoredMatrix, out: Tensor) -> None:
        """Compute `StoredMatrix.unpack`."""
        matrix.unpack(out)

    def select_rows(self, matrix: Matrix, rows: Tensor, out: Tensor) -> None:
        """Compute `out = matrix[rows]` for rows [n] int64 and out [n, in] in the compute dtype."""
        if isinstance(matrix, Tensor):
            torch.index_select(matrix, 0, rows, out=out)
        elif not out.is_meta:
            self.unpack(matrix.rows(rows), out)

    def divides(self, x: Tensor, matrix: Matrix) -> bool:
        """Return True if `multiply_by` divides this product among threads of its own."""
        return False

    def several_experts(self, formats: Sequence[MatrixFormat]) -> CompiledExperts | None:
        """Return the operator that computes several experts of few rows in one call.

        formats: of gate, up and down; None if there is no such operator.
        """
        return None

    def gated_mlp(
        self,
        x: Tensor,
        weights: AnyWeights,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
    ) -> None:
        """Compute `out = down(silu(gate(x)) * up(x))` for x [n, hidden].

        gate, up [n, expert_size] are scratch; `out` may be `x`. Rounds where the families' own code
        does: after each matrix product, SiLU and product. Clamped weights make it `out =
        down(clamped_swiglu(gate(x), up(x)))`, every product biased, rounded before and after each
        bias. `GeluWeights` and `SquaredWeights` have functions of their own.
        """
        is_rounded = self.rounds(*weights[:3])
        if isinstance(weights, SquaredWeights):
            self.multiply_by(x, weights.up, gate, is_rounded=is_rounded)
            gate.relu_().square_()
            self.multiply_by(gate, weights.down, out, is_rounded=is_rounded)
            return
        self.multiply_by(x, weights.gate, gate, is_rounded=is_rounded)
        self.multiply_by(x, weights.up, up, is_rounded=is_rounded)
        if isinstance(weights, ClampedWeights):
            clamped_swiglu(gate.add_(weights.gate_bias), up.add_(weights.up_bias))
        elif isinstance(weights, GeluWeights):
            self.gelu_times(gate, up)
        else:
            self.silu_times(gate, up)
        self.multiply_by(gate, weights.down, out, is_rounded=is_rounded)
        if isinstance(weights, ClampedWeights):
            out.add_(weights.down_bias)

    def row_statistics(
        self,
        hidden: Tensor,
        rows: Tensor,
        head: Head,
        wanted: Wanted,
        guidance: Guidance | None,
        form: Form,
        workspace: Buffers,
        run: tiled_head.Run,
    ) -> RowStatistics:
        """Compute the `wanted` statistics of the logits of hidden[rows], from before the last norm.

        hidden [tokens, hidden]; rows [n] int64. run: runs works, possibly on several threads. The
        result is in the workspace. Logits are rounded to the compute dtype, as those of whole rows
        are, then guided and reduced in float32.
        """
        return tiled_head.row_statistics(
            self, hidden, rows, head, wanted, guidance, form, workspace, run
        )

    def whole_layer(self, parts: LayerParts) -> CompiledLayer | None:
        """Return the compiled layer of these parts, or None.

        It runs in one call, or in one up to the router's choice and another after the experts, with
        the bits of these operators run one by one.
        """
        return None

    def takes_rows(self, x: Tensor) -> bool:
        """Return True if the layers of `whole_layer` support these rows, [rows, hidden]."""
        return False

    # Rows between products. num_threads: of the kernel's own, where it divides rows among some.

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        workspace: Buffers,
        out: Tensor,
        num_threads: int = 1,
    ) -> None:
        """Compute `out = weight * (x / rms(x))` over the last dimension; `out` may be `x`.

        x, out [rows, length] or [rows, heads, length], the elements of a row and its heads
        adjacent. Normalises in float32, rounds to the compute dtype, then multiplies by `weight`
        (the order of Llama and most families here), so bfloat16 results round where the original's
        do. A float32 weight multiplies before rounding (gpt-oss).
        """
        reference_rows.rms_norm(x, weight, eps, workspace, out)

    def rotate(
        self, x: Tensor, rotation: Rotation, workspace: Buffers, num_threads: int = 1
    ) -> None:
        """Rotate x [rows, heads, head_dim] in place: dimension i with i + rotary_dim / 2.

        Computed in the dtype of `rotation`: the compute dtype, or float32 and rounded once.
        Dimensions past rotary_dim stay unchanged.
        """
        reference_rows.rotate(x, rotation, workspace)

    def rotate_pairs(
        self, x: Tensor, rotation: Rotation, workspace: Buffers, num_threads: int = 1
    ) -> None:
        """Rotate x [rows, heads, rotary_dim] in place: dimension 2 i with dimension 2 i + 1.

        Computed in float32, which must be the dtype of `rotation`, and rounded once.
        """
        reference_rows.rotate_pairs(x, rotation, workspace)

    def normalise_and_rotate(
        self,
        x: Tensor,
        num_queries: int,
        norms: HeadNorms,
        eps: float,
        rotation: Rotation,
        workspace: Buffers,
        num_threads: int = 1,
    ) -> None:
        """Apply `rms_norm` to queries and keys, then `rotate`, in place.

        x [rows, heads, head_dim]: heads of `num_queries` queries, then of keys, or of either alone;
        heads adjacent.
        """
        for heads, weight in ((x[:, :num_queries], norms.query), (x[:, num_queries:], norms.key)):
            if not heads.shape[1]:
                continue
            if weight.shape[0] != x.shape[-1]:
                heads = heads.flatten(1)  # a view: heads are adjacent
            self.rms_norm(heads, weight, eps, workspace, heads, num_threads)
        self.rotate(x, rotation, workspace, num_threads)

    def silu_times(self, gate: Tensor, up: Tensor, num_threads: int = 1) -> None:
        """Compute `gate = silu(gate) * up` in place, rounded after each of the two.

        Both are contiguous.
        """
        F.silu(gate, inplace=True)
        gate.mul_(up)

    def gelu_times(self, gate: Tensor, up: Tensor) -> None:
        """Compute `gate = gelu(gate) * up` in place, by tanh, rounded after each of the two."""
        torch.ops.aten.gelu_(gate, approximate="tanh")
        gate.mul_(up)

    def weigh_rows(self, x: Tensor, gates: Tensor) -> None:
        """Compute `x *= sigmoid(gates)` in place, rounded after each of the two.

        x [rows, length], gates [rows, 1], both contiguous; `gates` is overwritten.
        """
        x.mul_(gates.sigmoid_())

    def multiply_heads(
        self, x: Tensor, weight: Tensor, out: Tensor, workspace: Buffers, num_threads: int = 1
    ) -> None:
        """Compute `out[:, h] = x[:, h] @ weight[h]`.

        x [rows, heads, in], weight [heads, in, out], out [rows, heads, out].
        """
        reference_rows.multiply_heads(x, weight, out, workspace)

    def gated_norm(
        self,
        x: Tensor,
        gates: Tensor,
        weight: Tensor,
        eps: float,
        workspace: Buffers,
        num_threads: int = 1,
    ) -> None:
        """Compute `x = rms_norm(x) * silu(gates)` in place, rounded once after `rms_norm`.

        x, gates [rows, heads, length], contiguous; `gates` are not changed.
        """
        self.rms_norm(x, weight, eps, workspace, x, num_threads)
        reference_rows.silu_weigh(x, gates, workspace)

    def sigmoid_weigh(self, x: Tensor, gates: Tensor, num_threads: int = 1) -> None:
        """Compute `x *= sigmoid(gates)` in place, rounded after each of the two.

        x, gates [rows, heads, length]; elements of a head are adjacent, and `gates` may change.
        """
        x.mul_(gates.sigmoid_())

    # Gated delta-nets

    def delta_steps(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        before: DeltaState,
        after: DeltaState,
        out: Tensor,
        workspace: Buffers,
        num_threads: int = 1,
    ) -> None:
        """Advance the state of one sequence by its rows, one after the other, and read it.

        out [rows, value_heads, value_width]; `after` may be `before`. All but `rows`, `out` and
        tails, which have the compute dtype, is float32. See `reference_delta.py`.
        """
        for row in range(len(out)):
            one = slice(row, row + 1)
            own = DeltaRows(*(tensor[one] for tensor in rows))
            reference_delta.advance(own, weights, before, after, out[one], workspace)
            before = after

    def delta_chunk(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        before: DeltaState,
        after: DeltaState,
        out: Tensor,
        workspace: Buffers,
        run: tiled_head.Run,
        num_threads: int = 1,
    ) -> None:
        """Advance a state by several rows of a prompt together, and read it after each.

        out [rows, value_heads, value_width]. run: runs works, possibly on several threads.
        Bits depend on how rows are divided into chunks.
        """
        reference_delta.advance(rows, weights, before, after, out, workspace, run)

    # Attention of a single row

    def attends_rows(self, query: Tensor) -> bool:
        """Return True if single rows of query [rows, heads, head_dim] should use `attend_row`."""
        return False

    def attend_row(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float | None,
        out: Tensor,
        num_threads: int,
        sinks: Tensor | None = None,
    ) -> None:
        """Compute attention of one row's heads over all of keys and values.

        query, out [heads, head_dim] contiguous; keys, values [kv_heads, tokens, head_dim], rows
        adjacent, the same stride of heads; scale: by default head_dim ** -0.5. sinks [heads]
        float32: a further score of each head, which takes its share of the softmax.
        """
        grouped = query.view(1, keys.shape[0], -1, query.shape[1])
        scores = grouped.float() @ keys[None].float().transpose(2, 3)
        scores *= query.shape[1] ** -0.5 if scale is None else scale
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(*grouped.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        out.copy_((weights @ values[None].float()).view_as(query))

    # Routing

    def top_experts(self, rank: Tensor, num_chosen: int) -> Tensor:
        """Return each token's experts of highest rank: [tokens, num_chosen] int64, ascending ids.

        rank [tokens, num_experts], floating point. Ties are broken arbitrarily.
        """
        return rank.topk(num_chosen, sorted=False).indices.sort().values

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights.

        Experts [tokens, num_chosen] int64, ascending; weights of the same shape, float32. logits
        [tokens, num_experts] contiguous, overwritten; bias [num_experts] float32 affects the choice
        and not the weights.
        """
        if choice.of_chosen:
            experts = self.top_experts(logits, choice.num_chosen)
            return experts, logits.gather(1, experts).softmax(-1).float() * choice.scaling_factor
        if choice.is_sigmoid:
            scores = logits.sigmoid_()
        else:
            scores = logits.softmax(-1, dtype=torch.float32)
        rank = scores if bias is None else scores + bias
        if choice.num_groups > 1:
            rank = limit_to_groups(rank, choice)
        experts = self.top_experts(rank, choice.num_chosen)
        return experts, weights_of(scores, experts, choice, logits.dtype)

    def sort_pairs(self, experts: Tensor, num_experts: int) -> SortedPairs:
        """Sort the pairs of experts [tokens, k] int64 by expert, without device synchronisation."""
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        part_of = torch.empty_like(flat)
        part_of[order] = torch.arange(len(flat), device=flat.device)
        # `bincount` would look for the largest id first, on the host.
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        return SortedPairs(order // experts.shape[1], part_of.view(experts.shape), counts)

    def combine(
        self,
        parts: Tensor,
        part_of: Tensor,
        weights: Tensor,
        term: Tensor,
        term_fp32: Tensor,
        out: Tensor,
    ) -> None:
        """Sum each token's expert outputs in ascending expert id, in float32.

        parts [tokens * k, hidden]: expert outputs in the compute dtype; part_of [tokens, k] int64:
        the row of `parts` with a token's j-th expert, ascending by expert id; weights [tokens, k]
        float32 in the same order; term [tokens, hidden] compute dtype and term_fp32 are scratch;
        out [tokens, hidden] float32.

        One multiply, then one add per expert: never fused, so the bits do not depend on which
        expert's output arrived first.
        """
        out.zero_()
        for j in range(part_of.shape[1]):
            torch.index_select(parts, 0, part_of[:, j], out=term)
            term_fp32.copy_(term)
            term_fp32.mul_(weights[:, j : j + 1])
            out.add_(term_fp32)


REFERENCE = Kernels()


def clamped_swiglu(gate: Tensor, up: Tensor) -> None:
    """Compute `gate = (up + 1) * gate * sigmoid(slope * gate)` of clamped inputs, in place.

    gate is clamped from above, up on both sides; `up` is overwritten. gate * sigmoid(slope * gate)
    is computed as silu(slope * gate) / slope, which needs no scratch and rounds as often.
    """
    gate.clamp_(max=CLAMP_LIMIT).mul_(CLAMP_SLOPE)
    F.silu(gate, inplace=True)
    up.clamp_(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1)
    gate.mul_(up).div_(CLAMP_SLOPE)
