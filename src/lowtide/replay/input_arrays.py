"""Experts' inputs as arrays of a calibration's file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.files.array_file import Arrays, Contradiction, check_values
from lowtide.formats.expert_inputs import ExpertInputs

PREFIX = "inputs_"
INPUT_DTYPES = {
    PREFIX + name: dtype
    for name, dtype in {
        "fingerprint": "|u1",
        "num_rows": "<i8",
        "hidden": "<f4",
        "activated": "<f4",
    }.items()
}
"""Arrays of stored experts' inputs and their types."""

_MAX_FINGERPRINT_BYTES = 256


def arrays_of_inputs(inputs: ExpertInputs) -> dict[str, Any]:
    """Return experts' inputs as the arrays of `INPUT_DTYPES`."""
    arrays = {
        "fingerprint": np.frombuffer(inputs.fingerprint.encode(), np.uint8),
        "num_rows": inputs.num_rows,
        "hidden": inputs.hidden,
        "activated": inputs.activated,
    }
    return {PREFIX + name: np.ascontiguousarray(array) for name, array in arrays.items()}


def inputs_of(
    arrays: Arrays, num_layers: int, num_experts: int, sizes: tuple[int, int]
) -> ExpertInputs:
    """Rebuild the inputs from `arrays_of_inputs`.

    sizes: widths of hidden and of activated rows. Raises Contradiction.
    """
    num_rows = arrays[PREFIX + "num_rows"]
    check_values(num_rows, "rows", (num_layers, num_experts))
    means = []
    for name, size in zip(("hidden", "activated"), sizes, strict=True):
        means.append(arrays[PREFIX + name])
        check_values(means[-1], f"{name} inputs", (num_layers, num_experts, size))
    return ExpertInputs(_fingerprint(arrays[PREFIX + "fingerprint"]), num_rows, *means)


def _fingerprint(data: NDArray[Any]) -> str:
    if data.ndim != 1 or data.size > _MAX_FINGERPRINT_BYTES:
        raise Contradiction(f"its inputs' fingerprint has shape {data.shape}")
    try:
        return data.tobytes().decode("ascii")
    except ValueError:
        raise Contradiction("its inputs' fingerprint is not text") from None
