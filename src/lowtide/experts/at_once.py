"""Several experts of a few tokens each in one call on the host, where its kernels can.

Handing one expert to a thread takes Python as long as a machine of many cores takes to compute it.
One call has that cost once, and all cores share each expert's weights, however few experts there
are.
"""

from __future__ import annotations

from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.experts.rows import ExpertBuffers, Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.kernels.layer_parts import InPlace
from lowtide.kernels.operands import ExpertWeights, SlotPlaces
from lowtide.kernels.reference import Kernels
from lowtide.kernels.several_experts import SeveralExperts
from lowtide.threads.executor import Executor


def cores_beside_device(executor: Executor) -> int:
    """All but one, which is the calling thread's: it queues the device's work meanwhile."""
    return max(1, executor.num_cores - 1)


class ExpertsAtOnce:
    """Calls over experts in some slots.

    Does not know which expert is in which slot, nor how long it stays there.
    """

    def __init__(self, kernels: SeveralExperts, slots: ExpertSlots, num_threads: int) -> None:
        """`slots`: of experts without biases, all of one layout; their memory has to last as
        long as this is used."""
        self._kernels = kernels
        self._places = _places(slots)
        self._layout = slots.layout
        self._num_threads = num_threads

    @classmethod
    def of(cls, slots: ExpertSlots, kernels: Kernels, num_threads: int) -> ExpertsAtOnce | None:
        """None where `kernels` have no call for the experts in `slots`."""
        layout = slots.layout
        is_taken = layout.largest.weights is ExpertWeights and len({*layout.layers}) == 1
        several = kernels.several_experts
        if not layout.is_plain:
            several = kernels.several_stored(layout.largest.formats)
        return cls(several, slots, num_threads) if is_taken and several is not None else None

    def in_place(self, slot_of: IntArray) -> InPlace | None:
        """For kernels that run whole layers; None where weights are in a format of few bits.
        slot_of [num_experts]: always of the present."""
        if not self._layout.is_plain:
            return None
        return InPlace(self._places, slot_of, self._layout.largest.parts[0].shape[0])

    def takes(self, x: Tensor) -> bool:
        """Whether `run_layer` takes these rows."""
        return self._kernels.takes(x)

    def takes_experts(self, num_tokens: IntArray) -> BoolArray:
        """Which experts `run` takes, by their tokens."""
        return num_tokens <= self._kernels.max_rows

    def run(self, groups: IntArray, parts: Tensor, gate: Tensor, up: Tensor) -> None:
        """Gated MLPs over their groups' rows of `parts`, in place, with the bits of one by one.

        groups [experts, 3]: see `ExpertRows.groups`; parts [pairs, hidden]; gate, up [pairs,
        expert_size]: scratch. All of them contiguous.
        """
        self._kernels.gated_mlps(groups, self._places, parts, gate, up, self._num_threads)

    def run_layer(
        self, x: Tensor, routing: Routing, slots: IntArray, buffers: ExpertBuffers, out: Tensor
    ) -> None:
        """All experts of a few tokens and their sum, with the bits of one by one.

        x [tokens, hidden]; slots: one for each distinct expert, ascending by expert; out [tokens,
        hidden] float32. All of them contiguous.
        """
        self._kernels.run_experts(
            x,
            experts=routing.experts,
            weights=routing.weights,
            slots=slots,
            places=self._places,
            parts=buffers.parts,
            gate=buffers.gate,
            up=buffers.up,
            out=out,
            num_threads=self._num_threads,
        )


def _places(slots: ExpertSlots) -> SlotPlaces:
    start, layout = slots.image(0).data_ptr(), slots.layout
    gate, up, down = (start + part.offsets[0] for part in layout.largest.parts)
    return SlotPlaces(gate, up, down, layout.num_bytes)
