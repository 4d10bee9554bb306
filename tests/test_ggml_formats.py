"""ggml's packed types against the `gguf` package, bit for bit."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import SCALES

from lowtide.errors import UnsupportedError
from lowtide.formats import format_of, formats, loadable_dtypes
from lowtide.formats.ggml import FORMATS, TYPE_NAMES, GgmlFormat, mxfp4_weights
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.reference import REFERENCE
from lowtide.schemas.weights import ExpertTable, StoredLayer

NUM_BLOCKS = 300


def kind_of(stored: GgmlFormat) -> Type:
    return Type[stored.ggml_name]


@pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.ggml_name)
def test_bits_are_those_of_the_package(stored: GgmlFormat) -> None:
    kind = kind_of(stored)
    assert GGML_QUANT_SIZES[kind] == (stored.block_size, *stored.block_bytes)
    blocks = np.random.default_rng(1).integers(
        0, 256, (NUM_BLOCKS, *stored.block_bytes), dtype=np.uint8
    )
    assert check_bits(stored, blocks) > 0.8
    check_bits(stored, extreme_blocks(stored).reshape(-1, *stored.block_bytes))


def check_bits(stored: GgmlFormat, blocks: np.ndarray) -> float:
    """Returns the share of numbers among the weights."""
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind_of(stored)).reshape(-1)
    # At any address: what is read begins anywhere in a buffer.
    shifted = np.empty(blocks.size + 1, np.uint8)[1:]
    shifted[:] = blocks.reshape(-1)
    actual = stored.unpack(shifted).view(np.float32)
    is_number = ~np.isnan(expected)
    assert (np.isnan(actual) == ~is_number).all()
    assert (actual.view(np.uint32) == expected.view(np.uint32))[is_number].all()
    return float(is_number.mean())


def test_bits_on_a_gpu_are_those_on_the_host() -> None:
    """Of every byte at every scale."""
    blocks = np.empty((256, 16, 17), np.uint8)
    blocks[:, :, 0] = np.arange(256)[:, None]
    blocks[:, :, 1:] = np.arange(256).reshape(16, 16)
    expected = formats()["MXFP4"].unpack(blocks.reshape(-1)).view(np.uint32)
    found = mxfp4_weights(torch.from_numpy(blocks.reshape(256, -1))).numpy().view(np.uint32)
    assert (found.reshape(-1) == expected).all()


def test_a_gpu_keeps_mxfp4_alone() -> None:
    """Of gate and up both or none: they are in one tile."""
    fp4, q8 = formats()["MXFP4"], formats()["Q8_0"]
    stored = [(fp4, fp4, fp4), (fp4, fp4, q8), (fp4, q8, fp4), (q8, q8, q8)]
    layers = tuple(StoredLayer(each, (1, 1, 1)) for each in stored)
    table = replace(ExpertTable.empty(), layers=layers)
    assert table.kept() == stored
    on_gpu = [(fp4, fp4, fp4), (fp4, fp4, None), (None, None, fp4), (None, None, None)]
    assert table.kept(has_gpu=True) == on_gpu


def test_types_have_the_package_s_numbers() -> None:
    own = {number: name for number, name in TYPE_NAMES.items() if name in Type.__members__}
    assert own == {kind.value: kind.name for kind in Type}


def test_safetensors_files_have_none_of_them() -> None:
    assert not any(name.startswith("GGUF") for name in loadable_dtypes())
    assert format_of("GGUF Q4_K") is formats()["Q4_K"]
    with pytest.raises(UnsupportedError, match="supported: BF16, F16, F32"):
        format_of("Q4_K")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_kernels()


def test_compiled_bits_of_any_blocks(library: ctypes.CDLL) -> None:
    """Scales that are infinities or below normal ones, too; what is no number is none in both."""
    num_variants = PackedOperators(library).num_variants
    for stored in FORMATS:
        matrix = stored.matrix([torch.from_numpy(extreme_blocks(stored))], (100, 1024))
        expected, out = (torch.empty(*matrix.shape, dtype=torch.bfloat16) for _ in range(2))
        REFERENCE.unpack(matrix, expected)
        for variant in range(num_variants):
            PackedOperators(library, variant).unpack(matrix, out)
            assert torch.equal(out.isnan(), expected.isnan())
            is_number = ~expected.isnan()
            found, wanted = (each[is_number].view(torch.int16) for each in (out, expected))
            assert torch.equal(found, wanted)


def extreme_blocks(stored: GgmlFormat) -> np.ndarray:
    """Draw random bytes for 100 rows of 1,024 weights, most of them with an extreme scale.

    Extreme: a zero, the least or largest number, an infinity or NaN; MXFP4 has every scale that
    there is.
    """
    rng, kind = np.random.default_rng(4), kind_of(stored)
    num_blocks, size = 100 * 1024 // stored.block_size, stored.block_bytes[0]
    blocks = rng.integers(0, 256, (num_blocks, size), dtype=np.uint8)
    extremes = np.array([0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x3C00], np.uint16)
    extremes = np.concatenate((extremes, extremes | 0x8000))
    for start in SCALES.get(kind, ()):
        chosen = np.flatnonzero(rng.random(num_blocks) < 0.8)
        scales = rng.choice(extremes, len(chosen))
        blocks[chosen, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind is Type.MXFP4:
        blocks[:, 0] = np.arange(num_blocks) % 256
    return blocks.reshape(-1)
