"""What runs several experts at once, as its callers see it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lowtide.core import IntArray
from lowtide.kernels.cpu.weight_calls import ExpertCallStruct
from lowtide.kernels.operands import SlotPlaces


class SeveralExperts(Protocol):
    """One call over the experts of few rows each in host memory, with the bits of one by one."""

    max_rows: int  # of one expert

    def takes(self, x: Tensor) -> bool:
        """Whether `run_experts` takes these rows."""
        ...

    def gated_mlps(
        self,
        groups: IntArray,
        places: SlotPlaces,
        parts: Tensor,
        gate: Tensor,
        up: Tensor,
        num_threads: int,
    ) -> None:
        """`Kernels.gated_mlp` of several experts over their rows of `parts`, in place."""
        ...

    def run_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        slots: IntArray,
        places: SlotPlaces,
        parts: Tensor,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
        num_threads: int,
    ) -> None:
        """`Kernels.gated_mlp` of every expert of the tokens, and `Kernels.combine`."""
        ...

    def layer_call(
        self,
        x: Tensor,
        num_chosen: int,
        places: SlotPlaces,
        parts: Tensor,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
        num_threads: int,
    ) -> ExpertCallStruct:
        """What `run_experts` is given, for who knows which experts are in which slots."""
        ...
