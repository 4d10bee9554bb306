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
        """Whether `layer_call` takes these rows."""
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
        """All experts of the tokens and their sum, for code that knows which are chosen and in
        which slots they are."""
        ...
