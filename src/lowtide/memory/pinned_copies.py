"""What every pass sends to a GPU and asks back beside its experts: small, through pinned memory.

torch keeps pinned memory for its next use, and does not hand it out while a copy that was queued
from it or into it is under way: it needs no ring here, and no owner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.memory.cuda_streams import CudaEvent


def to_device(device: torch.device, *rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in host memory, of one length and type, on a GPU: one copy, for which nothing waits.

    For any other device they are handed back as they are.
    """
    if device.type != "cuda":
        return rows
    pinned = torch.empty((len(rows), len(rows[0])), dtype=rows[0].dtype, pin_memory=True)
    torch.stack(rows, out=pinned)
    there = torch.empty(pinned.shape, dtype=pinned.dtype, device=device)
    return there.copy_(pinned, non_blocking=True).unbind()


def to_host(values: Tensor) -> Tensor:
    """Values of a GPU in host memory once what is queued there has ended; nothing waits.

    Those of any other device are handed back as they are.
    """
    if values.device.type != "cuda":
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Waits for a GPU until what was queued on its current stream has ended, copies to the host
    included. Raises DeviceError when that failed or takes far too long.
    """
    stream = torch.cuda.current_stream(device)
    CudaEvent(stream.record_event()).wait()
