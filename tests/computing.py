"""What layers compute with in tests."""

from __future__ import annotations

from lowtide.compute import Compute
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Buffers, Workspace
from lowtide.threads.executor import Executor, InlineExecutor


def on_this_thread(
    workspace: Buffers | None = None,
    kernels: Kernels = REFERENCE,
    executor: Executor | None = None,
) -> Compute:
    """Plain torch in 64 MiB, unless something else is given."""
    if workspace is None:
        workspace = Workspace(Arena(64 << 20).bytes)
    return Compute(executor or InlineExecutor(), kernels, workspace)
