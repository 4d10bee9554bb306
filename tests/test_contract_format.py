"""What every format of matrices promises, against another implementation's weights.

A format that is added gets a row in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import SCALES, random_blocks
from packed_matrices import content_of
from test_toy_format import LONG, ONE, SHORT, Offsets
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lowtide.formats import formats
from lowtide.formats.convert import convert
from lowtide.formats.ggml import FORMATS as GGML
from lowtide.formats.matrix import Bytes, MatrixFormat
from lowtide.formats.plain import SAFETENSORS_NAME, plain_format
from lowtide.kernels.reference import REFERENCE

TORCH = {name: getattr(torch, torch_name) for torch_name, name in SAFETENSORS_NAME.items()}
SHAPE = (4, 512)  # whole blocks of every format
MANY_ROWS = (700, 512)  # two tiles of products and a part of one


class Row(NamedTuple):
    """A format with random matrices in it."""

    format: MatrixFormat
    draw: Callable[[tuple[int, int], int], list[Bytes]]  # of each tensor, by shape and seed
    exact: Callable[[Sequence[Bytes], tuple[int, int]], Tensor]  # float32 [rows, columns]
    spoil: Callable[[list[Bytes]], None] | None = None  # makes one weight of row 3 infinite or NaN


def plain(name: str) -> Row:
    def draw(shape: tuple[int, int], seed: int) -> list[Bytes]:
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return [weights.to(TORCH[name]).reshape(-1).view(torch.uint8).numpy()]

    def exact(content: Sequence[Bytes], shape: tuple[int, int]) -> Tensor:
        return torch.from_numpy(content[0].copy()).view(TORCH[name]).float().view(shape)

    def spoil(content: list[Bytes]) -> None:
        torch.from_numpy(content[0]).view(TORCH[name])[3 * SHAPE[1] + 7] = float("-inf")

    return Row(formats()[name], draw, exact, spoil)


def ggml(stored: MatrixFormat, kind: Type) -> Row:
    def draw(shape: tuple[int, int], seed: int) -> list[Bytes]:
        return [random_blocks(shape, kind, seed).reshape(-1)]

    def exact(content: Sequence[Bytes], shape: tuple[int, int]) -> Tensor:
        blocks = content[0].reshape(-1, *stored.block_bytes)
        return torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy()).view(shape)

    def spoil(content: list[Bytes]) -> None:
        start = SCALES[kind][-1]
        blocks = content[0].reshape(SHAPE[0], -1, *stored.block_bytes)
        blocks[3, 0, start : start + 2] = (0x00, 0x7C)

    return Row(stored, draw, exact, spoil if kind in SCALES else None)


def mxfp4() -> Row:
    """As safetensors files have it: blocks and scales."""

    def draw(shape: tuple[int, int], seed: int) -> list[Bytes]:
        rng, num_blocks = np.random.default_rng(seed), shape[0] * shape[1] // 32
        codes = rng.integers(0, 256, 16 * num_blocks, np.uint8)
        return [codes, rng.integers(110, 130, num_blocks, np.uint8)]

    def exact(content: Sequence[Bytes], shape: tuple[int, int]) -> Tensor:
        blocks, scales = (torch.from_numpy(each.copy()) for each in content)
        tensors = blocks.view(1, shape[0], -1, 16), scales.view(1, shape[0], -1)
        return convert_moe_packed_tensors(*tensors)[0].t().float().contiguous()

    return Row(formats()["MXFP4 blocks"], draw, exact)


def rounded(num_bits: int) -> Row:
    """q8 and q4, by the words of `formats/quantised.py`, a weight at a time."""
    stored = formats()[f"q{num_bits}"]

    def exact(content: Sequence[Bytes], shape: tuple[int, int]) -> Tensor:
        num_rows, num_columns = shape
        num_groups, group_bytes = num_columns // 64, 64 * num_bits // 8
        weights = np.zeros(shape, np.float32)
        for row, stored_row in enumerate(content[0].reshape(num_rows, -1)):
            codes, ends = np.split(stored_row, [num_groups * group_bytes])
            scales, zeros = ends.copy().view(np.float16).astype(np.float32).reshape(2, num_groups)
            for column in range(num_columns):
                group, k = divmod(column, 64)
                own = codes[group * group_bytes :]
                code = own[k] if num_bits == 8 else own[k % 32] >> (4 * (k // 32)) & 15
                weights[row, column] = scales[group] * np.float32(code) + zeros[group]
        return torch.from_numpy(weights)

    def spoil(content: list[Bytes]) -> None:
        content[0].reshape(SHAPE[0], -1)[3, -2:] = (0x00, 0x7C)

    def draw(shape: tuple[int, int], seed: int) -> list[Bytes]:
        return [content_of(stored, shape, seed)]

    return Row(stored, draw, exact, spoil)


def offsets(stored: Offsets, dtype: str) -> Row:
    """Formats of somebody else: test_toy_format.py."""

    def draw(shape: tuple[int, int], seed: int) -> list[Bytes]:
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()
        own = stored.pack(weights.reshape(-1).view(torch.uint8).numpy())
        return [np.frombuffer(own, np.uint8).copy()]

    def exact(content: Sequence[Bytes], shape: tuple[int, int]) -> Tensor:
        bits = content[0].view(dtype).astype(np.int64) + ONE
        return torch.from_numpy(bits.astype(np.uint16).view(np.float16)).float().view(shape)

    return Row(stored, draw, exact)


FORMATS: Mapping[str, Row] = {
    **{name: plain(name) for name in TORCH},
    **{each.name: ggml(each, Type[each.ggml_name]) for each in GGML},
    "MXFP4 blocks": mxfp4(),
    "q8": rounded(8),
    "q4": rounded(4),
    "OFFSET16": offsets(SHORT, "i2"),
    "OFFSET32": offsets(LONG, "i4"),
}

every_format = pytest.mark.parametrize("row", FORMATS.values(), ids=list(FORMATS))


def test_every_format_has_its_row() -> None:
    assert set(formats()) <= set(FORMATS)


@every_format
def test_a_matrix_takes_the_bytes_that_are_said(row: Row) -> None:
    stored = row.format.for_rows(SHAPE[1])
    for number, content in enumerate(row.draw(SHAPE, 0)):
        num_rows_bytes = stored.num_bytes(SHAPE[1], number)
        assert content.size == SHAPE[0] * num_rows_bytes == stored.num_bytes(2048, number)
    assert row.draw(SHAPE, 0)[0].size == stored.matrix_bytes(SHAPE)


@every_format
@pytest.mark.parametrize("dtype", TORCH.values(), ids=str)
def test_weights_are_rounded_once(row: Row, dtype: torch.dtype) -> None:
    """As they are read, wherever in a buffer they begin, and as kept ones are multiplied."""
    content, stored = row.draw(SHAPE, 1), row.format.for_rows(SHAPE[1])
    exact = row.exact(content, SHAPE)
    assert exact.isfinite().all() and exact.std() > 0
    shifted = [np.concatenate((each[:1], each))[1:] for each in content]
    target = np.empty(exact.numel() * dtype.itemsize, np.uint8)
    convert(shifted, stored, target, plain_format(dtype))
    assert torch.equal(torch.from_numpy(target).view(dtype).view(SHAPE), exact.to(dtype))
    if not row.format.is_kept:
        return
    matrix = stored.matrix([torch.from_numpy(each) for each in content], SHAPE)
    out, some = torch.empty(SHAPE, dtype=dtype), torch.empty(2, SHAPE[1], dtype=dtype)
    REFERENCE.unpack(matrix, out)
    REFERENCE.select_rows(matrix, torch.tensor([3, 1]), some)
    assert torch.equal(out, exact.to(dtype)) and torch.equal(some, out[[3, 1]])
    assert matrix.shape == SHAPE and matrix.nbytes == sum(each.size for each in content)


@pytest.mark.parametrize(
    "row",
    [row for row in FORMATS.values() if row.format.is_kept],
    ids=[name for name, row in FORMATS.items() if row.format.is_kept],
)
def test_a_product_is_that_of_the_weights_unpacked(row: Row) -> None:
    content = row.draw(MANY_ROWS, 2)
    x = torch.randn(5, MANY_ROWS[1], generator=torch.Generator().manual_seed(0))
    out = torch.empty(5, MANY_ROWS[0])
    tensors = [torch.from_numpy(each) for each in content]
    matrix = row.format.for_rows(MANY_ROWS[1]).matrix(tensors, MANY_ROWS)
    REFERENCE.multiply_by(x, matrix, out)
    wanted = x @ row.exact(content, MANY_ROWS).t()
    torch.testing.assert_close(out, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize(
    "row",
    [row for row in FORMATS.values() if row.spoil],
    ids=[name for name, row in FORMATS.items() if row.spoil],
)
def test_a_weight_that_is_no_number_is_found(row: Row) -> None:
    content, stored = [each.copy() for each in row.draw(SHAPE, 3)], row.format.for_rows(SHAPE[1])
    is_finite = partial(stored.is_finite, content[0])
    assert is_finite()
    assert row.spoil is not None
    row.spoil(content)
    assert not is_finite()
