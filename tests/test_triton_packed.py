"""Triton's experts over packed weights, against products with what those stand for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from test_triton import Case, Size, check_gated_mlps
from torch import Tensor
from triton_places import places

from lowtide.experts.layout import Formats, PartLayout
from lowtide.formats import formats
from lowtide.formats.convert import convert
from lowtide.formats.plain import plain_format
from lowtide.formats.quantised import QuantisedRows
from lowtide.kernels.operands import ClampedWeights, ExpertWeights

NAMES = ("q8", "q4", "MXFP4")
ODD = [Size(33, 16, 2, 72, 104), Size(3, 4, 4, 200, 132)]
BLOCKS = [Size(7, 6, 3, 96, 32), Size(33, 4, 2, 288, 96)]
"""Rows of MXFP4 are whole blocks of 32; those of the others end anywhere."""

CASES = [(name, size) for name in NAMES for size in (BLOCKS if name == "MXFP4" else ODD)]
OTHERS = (torch.float32, torch.float16)
"""Types that weights are unpacked into on a GPU besides bfloat16."""

LARGE = [Size(1, 64, 8, 2048, 512), Size(517, 16, 6, 2048, 1408), Size(63, 8, 4, 2880, 2880)]


class PackedCase(Case):
    """Slots full of packed weights."""

    def filled(self) -> Tensor:
        generator = np.random.default_rng(1)
        slots = np.zeros((self.num_slots, self.layout.num_bytes), np.uint8)
        for slot in slots:
            for part in self.layout.largest.parts:
                start = part.offsets[0]
                fill(part, slot[start : start + part.num_bytes[0]], generator)
        found = torch.from_numpy(slots).to(self.device)
        return found.view(self.layout.dtype) if self.layout.is_plain else found

    def weights(self, slot: int) -> ExpertWeights | ClampedWeights:
        stored, layout = self.slots[slot].view(torch.uint8).cpu().numpy(), self.layout.largest
        return layout.weights(*(self.unpacked(part, stored) for part in layout.parts))

    def unpacked(self, part: PartLayout, slot: np.ndarray) -> Tensor:
        """Each weight rounded once to the compute dtype."""
        found = torch.empty(part.shape, dtype=self.layout.dtype)
        packed = slot[part.offsets[0] :][: part.num_bytes[0]]
        plain = plain_format(found.dtype)
        convert([packed], part.format, found.view(-1).view(torch.uint8).numpy(), plain)
        return found.to(self.device)


def fill(part: PartLayout, target: np.ndarray, generator: np.random.Generator) -> None:
    """Weights of about the size of 1 / sqrt(inputs), codes beyond a row's end too."""
    form, num_columns = part.format, part.shape[-1]
    size = num_columns**-0.5
    target[:] = generator.integers(0, 256, len(target), np.uint8)
    if form.name == "MXFP4":
        exponents = target.reshape(-1, 17)[:, 0]  # numbers of 4 bits are about 3 on average
        exponents[:] = 126 + int(np.log2(size)) + generator.integers(-1, 1, len(exponents))
    elif isinstance(form, QuantisedRows):
        rows = target.reshape(part.shape[0], -1)
        ends = rows[:, -4 * form.num_groups :].view(np.float16)
        scales, zeros = ends[:, : form.num_groups], ends[:, form.num_groups :]
        scales[:] = size * 12**0.5 / 2**form.num_bits * generator.uniform(0.5, 1.5, scales.shape)
        zeros[:] = -scales * 2 ** (form.num_bits - 1)
    else:
        weights = size * generator.standard_normal(part.shape, np.float32).reshape(-1)
        source = weights.astype(np.float32).view(np.uint8)
        convert([source], plain_format(torch.float32), target, form)


def uniform(name: str) -> Formats:
    """All three matrices in one format."""
    return (formats()[name],) * 3


@pytest.mark.gpu
@pytest.mark.parametrize("names", [("q4", "q4", ""), ("", "", "q8"), ("MXFP4", "MXFP4", "q4")])
def test_down_may_be_in_another_format_on_a_gpu(names: tuple[str, str, str]) -> None:
    kept = tuple(formats()[name] if name else None for name in names)
    check_gated_mlps(PackedCase(BLOCKS[0], torch.bfloat16, "cuda", kept))


def each_into(small: Sequence[Any], large: Sequence[Any]) -> list[Any]:
    """Places, as `places` has them, of pairs of a case and what weights are unpacked into."""
    others = itertools.product([*small, *large], OTHERS)
    in_bfloat16 = [(case, torch.bfloat16) for case in large]
    return places([(case, torch.bfloat16) for case in small], [*others, *in_bfloat16])


@pytest.mark.parametrize(
    ("device", "case"),
    each_into(CASES, [*itertools.product(NAMES, [BLOCKS[1], *LARGE])]),
    ids=str,
)
def test_packed_experts_equal_the_plain_ones(
    device: str, case: tuple[tuple[str, Size], torch.dtype]
) -> None:
    """In other types, and in any company: `test_triton_formats.py`."""
    (name, size), dtype = case
    check_gated_mlps(PackedCase(size, dtype, device, uniform(name)))


@pytest.mark.parametrize(("device", "dtype"), places([torch.bfloat16], OTHERS), ids=str)
def test_packed_and_clamped_ones(device: str, dtype: torch.dtype) -> None:
    """As gpt-oss has them."""
    case = PackedCase(BLOCKS[1], dtype, device, uniform("MXFP4"), is_clamped=True)
    check_gated_mlps(case)
