"""Small copies to and from a GPU in every pass, through pinned memory.

torch caches pinned memory and does not reuse it while a queued copy from or into it is under way:
no ring and no owner are needed here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.memory.cuda_streams import CudaEvent


def to_device(
    device: torch.device, *rows: Tensor, there: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Copy rows of equal length and type from host memory to a GPU in one asynchronous copy.

    there: [rows, length], where they go; by default new memory. Other devices get the rows
    themselves.
    """
    if device.type != "cuda":
        return rows
    pinned = torch.empty((len(rows), len(rows[0])), dtype=rows[0].dtype, pin_memory=True)
    torch.stack(rows, out=pinned)
    if there is None:
        there = torch.empty(pinned.shape, dtype=pinned.dtype, device=device)
    return there.copy_(pinned, non_blocking=True).unbind()


def to_host(values: Tensor) -> Tensor:
    """Copy a GPU's values to host memory asynchronously, after its queued work.

    Values of other devices are returned as they are.
    """
    if values.device.type != "cuda":
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the work queued on a GPU's current stream has ended, including copies.

    Raises DeviceError if it failed or takes far too long.
    """
    stream = torch.cuda.current_stream(device)
    CudaEvent(stream.record_event()).wait()
