"""The variant of a GPU that has Triton: norms, rotations and routing in a launch or two each.

Its products are torch's, as its twins are; experts are computed from a device's slots by
`triton_experts`. Sorting and summing up have the plain bits, the rest differs in rounding.
"""

from __future__ import annotations

from torch import Tensor

from lowtide.kernels import triton_routing, triton_rows
from lowtide.kernels.operands import ExpertChoice, HeadNorms, Rotation, SortedPairs
from lowtide.kernels.reference import Kernels
from lowtide.memory.workspace import Buffers


class TritonKernels(Kernels):
    """What lies between products, for tensors on the GPU."""

    name = "triton"

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, workspace: Buffers, out: Tensor
    ) -> None:
        triton_rows.rms_norm(x, weight, eps, out)

    def rotate(self, x: Tensor, rotation: Rotation, workspace: Buffers) -> None:
        triton_rows.rotate(x, *rotation)

    def rotate_pairs(self, x: Tensor, rotation: Rotation, workspace: Buffers) -> None:
        triton_rows.rotate(x, *rotation, is_interleaved=True)

    def normalise_and_rotate(
        self,
        x: Tensor,
        num_queries: int,
        norms: HeadNorms,
        eps: float,
        rotation: Rotation,
        workspace: Buffers,
    ) -> None:
        if norms.query.shape[0] == x.shape[-1] and rotation.cos.dtype == x.dtype:
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
