"""Files of ours with a byte that is another one: a typed error, or what they said."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_buddy_counts import made
from test_calibrate import make_calibration
from test_trace import make_trace

from lowtide.errors import StorageError, UsageError
from lowtide.replay.calibration import Calibration
from lowtide.replay.trace import Trace

FILES: dict[str, tuple[Any, Any]] = {
    "trace": (make_trace, Trace.load),
    "calibration": (make_calibration, Calibration.load),
    "buddies": (made, Calibration.load),
}


@pytest.mark.parametrize("name", FILES)
@examples(40)
@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_flipped_byte_never_does_worse_than_an_error(
    name: str, tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    make, load = FILES[name]
    path = tmp_path_factory.mktemp("flipped") / "it"
    make().save(path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(data)
    with suppress(UsageError, StorageError):
        load(path)
