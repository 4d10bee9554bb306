"""Where a test of Triton's kernels runs: in the interpreter, or on a GPU with `-m gpu`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ON_GPU = pytest.mark.gpu


def places(small: Iterable[Any], large: Iterable[Any] = ()) -> list[Any]:
    """Pairs of a device and an argument: small ones in the interpreter, all of them on a GPU."""
    on_gpu = [pytest.param("cuda", one, marks=ON_GPU) for one in (*small, *large)]
    return [*(("cpu", one) for one in small), *on_gpu]


DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
