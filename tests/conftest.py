"""Set before anything of lowtide is imported: how property tests and Triton run."""

from __future__ import annotations

import os

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels run in its interpreter, which is chosen at import."""
    expression = str(config.getoption("-m"))
    wants_gpu = "gpu" in expression.replace("not gpu", "")
    if not wants_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
