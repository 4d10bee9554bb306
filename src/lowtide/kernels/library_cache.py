"""Limit on the compiled products that torch's CPU library caches, and their memory.

In bfloat16 and float16, torch's products come from oneDNN, which compiles and caches one kernel for
every exact shape. The numbers of experts' rows differ from step to step, so there are many shapes,
and each kernel takes two thirds of a MiB whatever its size (measured): without a limit, a gigabyte
in time.
"""

from __future__ import annotations

import os

import torch

NUM_KERNELS = 256
"""Shapes cached per process.

Compiling one again takes some 0.2 ms, a small expert's product 0.05: those of one block's steps
must all fit.
"""

KERNEL_BYTES = 700 << 10


def limit_library_cache() -> None:
    """Limit the cache to `NUM_KERNELS`; must run before the process's first product.

    torch has one more cache in every thread, which would keep evicted kernels alive; its limit of
    one entry costs 2 microseconds per product (measured).
    """
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(NUM_KERNELS)
    os.environ["LRU_CACHE_CAPACITY"] = "1"


def library_cache_bytes(dtype: torch.dtype) -> int:
    """Return the most bytes the cache can take for a model that computes in `dtype`."""
    return 0 if dtype == torch.float32 else NUM_KERNELS * KERNEL_BYTES
