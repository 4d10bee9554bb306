"""Calls that compute several experts of a few tokens each on the host.

Handing one expert to a thread costs as much Python time as computing it takes on a machine with
many cores. A call over several experts has that cost once, and all cores share each expert's
weights, so even few experts keep them busy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.experts.layout import ExpertLayout
from lowtide.experts.rows import ExpertBuffers, LayerCall
from lowtide.experts.slots import ExpertSlots
from lowtide.kernels.cpu.weight_calls import CompiledExperts
from lowtide.kernels.layer_parts import ExpertParts
from lowtide.kernels.operands import ClampedWeights, ExpertWeights, SlotPlaces
from lowtide.kernels.reference import Kernels
from lowtide.threads.executor import Executor


def cores_beside_device(executor: Executor) -> int:
    """Return the number of cores without the calling thread's, which queues the device's work."""
    return max(1, executor.num_cores - 1)


class BatchedExperts:
    """Calls over experts in given slots, all of one layer.

    Does not know which expert is in which slot, nor for how long.
    """

    def __init__(
        self, layers: Sequence[CompiledExperts], slots: ExpertSlots, num_threads: int
    ) -> None:
        """Prepare the calls; layers: the compiled experts of each layer.

        The memory of `slots` must outlive this object.
        """
        places = [_places(layout, slots) for layout in slots.layout.layers]
        self._layers = list(zip(layers, places, strict=True))
        self.max_rows = min(kernels.max_rows for kernels in layers)  # of one expert
        self._layouts = slots.layout.layers
        self._num_threads = num_threads

    @classmethod
    def of(cls, slots: ExpertSlots, kernels: Kernels, num_threads: int) -> BatchedExperts | None:
        """Create the calls; None if `kernels` have none for the experts in `slots`."""
        layouts = slots.layout.layers
        if layouts[0].weights not in (ExpertWeights, ClampedWeights):
            return None
        # Biases are in the compute dtype.
        of_layout = {each: kernels.several_experts(each.formats[:3]) for each in {*layouts}}
        layers = [of_layout[layout] for layout in layouts]
        taken = [each for each in layers if each is not None]
        return cls(taken, slots, num_threads) if len(taken) == len(layouts) else None

    def parts(self, layer: int) -> ExpertParts:
        """Return a layer's experts, for kernels that run whole layers."""
        kernels, places = self._layers[layer]
        return ExpertParts(kernels, places, layer, self._layouts[layer].parts[0].shape[0])

    def takes_experts(self, num_tokens: IntArray) -> BoolArray:
        """Mark the experts that `run` supports, by their number of tokens."""
        return num_tokens <= self.max_rows

    def run(self, groups: IntArray, parts: Tensor, gate: Tensor, up: Tensor, layer: int) -> None:
        """Compute gated MLPs on their groups' rows of `parts`, in place.

        The bits are those of one expert at a time. groups [experts, 3]: see `ExpertRows.groups`;
        parts [pairs, hidden]; gate, up [pairs, expert_size]: scratch. All are contiguous.
        """
        kernels, places = self._layers[layer]
        kernels.gated_mlps(groups, places, parts, gate, up, self._num_threads)

    def takes(self, call: LayerCall) -> bool:
        """Return True if `layer_call` supports a layer's rows."""
        return self._layers[call.layer][0].takes(call.x)

    def layer_call(self, call: LayerCall) -> tuple[ctypes.Structure, ExpertBuffers]:
        """Prepare a call for all of a layer's experts and their sum; the slots are given later.

        Also returns its scratch from the workspace, to be kept, as is `call`, while the experts
        run.
        """
        kernels, places = self._layers[call.layer]
        num_pairs, k = call.routing.experts.numel(), call.routing.experts.shape[1]
        width = self._layouts[call.layer].parts[0].shape[0]
        pairs = ExpertBuffers.of_pairs(call.workspace, num_pairs, width, call.x)
        made = kernels.layer_call(call.x, k, places, *pairs, call.out, self._num_threads)
        return made, pairs


def _places(layout: ExpertLayout, slots: ExpertSlots) -> SlotPlaces:
    start = slots.image(0).data_ptr()
    gate, up, down, *biases = (start + part.offsets[0] for part in layout.parts)
    return SlotPlaces(gate, up, down, slots.layout.num_bytes, *biases)
