"""Conversions of stored weights, against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowtide.errors import UnsupportedError
from lowtide.formats import format_of, formats, plain
from lowtide.formats.convert import convert
from lowtide.formats.plain import ITEM_BYTES, SAFETENSORS_NAME

TORCH = {name: getattr(torch, torch_name) for torch_name, name in SAFETENSORS_NAME.items()}
PAIRS = [(a, b) for a in ITEM_BYTES for b in ITEM_BYTES]
SPECIAL = np.array(
    # Zeros, infinities, quiet and signalling NaNs, subnormals, ties, the largest numbers.
    [
        *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001),
        *(0x7FFFFFFF, 0xFFFFFFFF, 0x00000001, 0x807FFFFF, 0x00400000, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x477FE000, 0x477FF000, 0x33000000, 0x33000001),
    ],
    np.uint32,
)


def converted(source: NDArray[np.uint8], source_dtype: str, dtype: str) -> torch.Tensor:
    num_elements = len(source) // ITEM_BYTES[source_dtype]
    target = np.full(num_elements * ITEM_BYTES[dtype], 0xA5, np.uint8)
    convert([source], formats()[source_dtype], target, formats()[dtype])
    return torch.from_numpy(target).view(TORCH[dtype])


def check_as_torch(source: NDArray[np.uint8], source_dtype: str, dtype: str) -> None:
    actual = converted(source, source_dtype, dtype)
    expected = torch.from_numpy(source.copy()).view(TORCH[source_dtype]).to(TORCH[dtype])
    assert torch.equal(actual.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    bits = torch.int32 if dtype == "F32" else torch.int16  # signs of zeros count too
    assert torch.equal(actual.view(bits)[is_number], expected.view(bits)[is_number])


@pytest.mark.parametrize(("source_dtype", "dtype"), PAIRS)
def test_every_special_number_converts_as_in_torch(source_dtype: str, dtype: str) -> None:
    if source_dtype == "F32":
        source = SPECIAL.view(np.uint8)
    else:  # every number the type has
        source = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    check_as_torch(source, source_dtype, dtype)


@pytest.mark.parametrize(("source_dtype", "dtype"), PAIRS)
@given(seed=st.integers(0, 2**32 - 1), num_elements=st.integers(1, 300), skip=st.integers(0, 7))
def test_any_bits_at_any_address_convert_as_in_torch(
    source_dtype: str, dtype: str, seed: int, num_elements: int, skip: int
) -> None:
    num_bytes = num_elements * ITEM_BYTES[source_dtype]
    stored = np.random.default_rng(seed).integers(0, 256, skip + num_bytes, dtype=np.uint8)
    check_as_torch(stored[skip:], source_dtype, dtype)


@pytest.mark.parametrize(("source_dtype", "dtype"), PAIRS)
@pytest.mark.parametrize("extra", [-1, 0, 1, 13])
def test_lengths_about_the_chunk_size(
    source_dtype: str, dtype: str, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "CHUNK_WEIGHTS", 64)
    values = torch.randn(128 + extra, generator=torch.Generator().manual_seed(1))
    source = values.to(TORCH[source_dtype]).view(torch.uint8).numpy()
    check_as_torch(source, source_dtype, dtype)


@pytest.mark.parametrize(("source_dtype", "dtype"), PAIRS)
def test_nothing_converts_to_nothing(source_dtype: str, dtype: str) -> None:
    nothing = np.empty(0, np.uint8)
    convert([nothing], formats()[source_dtype], nothing.copy(), formats()[dtype])


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="I8.*BF16, F16, F32"):
        format_of("I8")


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_is_finite(dtype: str, broken: float) -> None:
    values = torch.linspace(-3, 3, 99).to(TORCH[dtype])
    values[7] = torch.finfo(TORCH[dtype]).max
    assert formats()[dtype].is_finite(values.view(torch.uint8).numpy())
    values[98] = broken
    assert not formats()[dtype].is_finite(values.view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_is_finite_agrees_with_torch_on_every_number(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    values = torch.from_numpy(every.view(np.int16)).view(TORCH[dtype])
    for i in range(0, 1 << 16, 257):
        assert formats()[dtype].is_finite(every[i : i + 1].view(np.uint8)) == bool(
            values[i].isfinite()
        )
