"""Triton's experts in every pair of formats, of any size, against the plain ones."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_triton import TOLERANCE, Size, check_gated_mlps
from test_triton_packed import NAMES, PackedCase

from lowtide.formats import formats


@st.composite
def cases(draw: st.DrawFn) -> PackedCase:
    """Few rows or none of one expert or several, of which none, some or all are in slots."""
    inward, outward = (draw(st.sampled_from(["", *NAMES])) for _ in range(2))
    hidden, width = (
        32 * draw(st.integers(1, 5)) if name == "MXFP4" else draw(st.integers(3, 150))
        for name in (inward, outward)
    )
    num_experts = draw(st.integers(1, 5))
    k = draw(st.integers(1, num_experts))
    size = Size(draw(st.integers(0, 20)), num_experts, k, hidden, width)
    own = draw(st.sampled_from([[], [0], [*range(0, num_experts, 2)], [*range(num_experts)]]))
    gate, down = (formats()[name] if name else None for name in (inward, outward))
    dtype = draw(st.sampled_from([*TOLERANCE]))
    return PackedCase(size, dtype, "cpu", (gate, gate, down), draw(st.booleans()), own)


@examples(15)
@given(cases())
def test_any_experts_equal_the_plain_ones(case: PackedCase) -> None:
    check_gated_mlps(case)
