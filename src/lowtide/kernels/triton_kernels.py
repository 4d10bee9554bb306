"""Kernels of a GPU that has Triton: norms, rotations and routing in one or two launches each.

Its products are torch's, except that of `row_statistics`; experts are computed from a device's
slots by `triton_experts`. Sorting and summing have the bits of the reference, the others differ in
rounding.
"""

from __future__ import annotations

from torch import Tensor

from lowtide.kernels import triton_head, triton_routing, triton_rows
from lowtide.kernels.operands import ExpertChoice, HeadNorms, Rotation, SortedPairs
from lowtide.kernels.reference import Kernels
from lowtide.kernels.row_statistics import Form, Guidance, Head, Partials, RowStatistics, Wanted
from lowtide.kernels.tiled_head import HeadRows, Run
from lowtide.memory.workspace import Buffers, tiles


class TritonKernels(Kernels):
    """Kernels for tensors on the GPU."""

    name = "triton"

    def row_statistics(
        self,
        hidden: Tensor,
        rows: Tensor,
        head: Head,
        wanted: Wanted,
        guidance: Guidance | None,
        form: Form,
        workspace: Buffers,
        run: Run,
    ) -> RowStatistics:
        # Otherwise torch's product.
        if form is Form.MATERIALISED or not isinstance(head.vocabulary, Tensor):
            return super().row_statistics(
                hidden, rows, head, wanted, guidance, form, workspace, run
            )
        # Buffers are taken in the order and by the names of the plain twin, which takes more: plans
        # are made for that one, and have room for these.
        num_rows, num_tiles = rows.shape[0], triton_head.num_tiles(head.vocabulary.shape[0])
        out = RowStatistics.take(num_rows, wanted, workspace)
        for group in tiles(num_rows, workspace.together("logits", num_rows)):
            part = None if guidance is None else guidance.part(group)
            with workspace.scope():
                inputs = HeadRows.gathered(self, hidden, rows[group], head, part, workspace)
                partials = Partials.take(group.stop - group.start, num_tiles, wanted, workspace)
                triton_head.reduce_tiles(inputs, head.vocabulary, partials)
                triton_head.join_tiles(partials, out.part(group))
        return out

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        workspace: Buffers,
        out: Tensor,
        num_threads: int = 1,
    ) -> None:
        triton_rows.rms_norm(x, weight, eps, out)

    def rotate(
        self, x: Tensor, rotation: Rotation, workspace: Buffers, num_threads: int = 1
    ) -> None:
        triton_rows.rotate(x, *rotation)

    def rotate_pairs(
        self, x: Tensor, rotation: Rotation, workspace: Buffers, num_threads: int = 1
    ) -> None:
        triton_rows.rotate(x, *rotation, is_interleaved=True)

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
        # With queries or keys alone, in long passes, separate kernels give the same bits.
        has_both = 0 < num_queries < x.shape[1]
        if has_both and len(norms.query) == x.shape[-1] and rotation.cos.dtype == x.dtype:
            triton_rows.normalise_and_rotate(x, num_queries, *norms, eps, *rotation)
        else:
            super().normalise_and_rotate(x, num_queries, norms, eps, rotation, workspace)

    def top_experts(self, rank: Tensor, num_chosen: int) -> Tensor:
        return triton_routing.top_experts(rank, num_chosen)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        return triton_routing.choose_experts(logits, bias, choice)

    def sort_pairs(self, experts: Tensor, num_experts: int) -> SortedPairs:
        return triton_routing.sort_pairs(experts, num_experts)

    def combine(
        self,
        parts: Tensor,
        part_of: Tensor,
        weights: Tensor,
        term: Tensor,
        term_fp32: Tensor,
        out: Tensor,
    ) -> None:
        triton_routing.combine(parts, part_of, weights, out)
