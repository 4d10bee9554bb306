"""How many compiled products the CPU library keeps, and what that costs.

In bfloat16 and float16, torch's products come from oneDNN, which compiles one kernel for every
exact shape and keeps it. Rows of experts differ from step to step, so shapes are many, and each
kernel holds two thirds of a MiB whatever its size (measured): left alone, a gigabyte in time.
"""

from __future__ import annotations

import os

import torch

NUM_KERNELS = 256
"""Shapes kept, process-wide. Compiling one again takes some 0.2 ms, a small expert's product 0.05:
those of one block's steps must all find room."""

KERNEL_BYTES = 700 << 10


def limit_library_cache() -> None:
    """Bounds the cache to `NUM_KERNELS`. Must come before the process's first product.

    torch has one more cache in every thread, which would keep alive what the first one lets go;
    a single entry there costs 2 microseconds per product (measured).
    """
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(NUM_KERNELS)
    os.environ["LRU_CACHE_CAPACITY"] = "1"


def library_cache_bytes(dtype: torch.dtype) -> int:
    """What the cache may come to hold when a model computes in `dtype`."""
    return 0 if dtype == torch.float32 else NUM_KERNELS * KERNEL_BYTES
