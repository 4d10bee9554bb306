"""The packed types of GGUF files, which matrices keep where the host computes.

Names are ggml's. Unpacked to float32, bit for bit as the `gguf` Python package does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from lowtide.formats.convert import convert
from lowtide.formats.ggml import grid_types, k_types, small_types
from lowtide.formats.ggml.small_types import BlockGroups
from lowtide.formats.matrix import Bytes, MatrixFormat
from lowtide.formats.plain import plain_format
from lowtide.formats.quantised_matrix import Groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FindGroups = Callable[[Bytes], BlockGroups]

MXFP4 = "MXFP4"

ROW_GROUP = 32
"""Length in which rows of activations are rounded; every block size is a multiple."""


class GgmlFormat(MatrixFormat):
    """Blocks of adjacent weights of a row with their scales, in one tensor."""

    unpacked = "F32"
    is_kept = True
    in_safetensors = False

    def __init__(
        self, ggml_name: str, block: np.dtype[np.void], size: int, find_groups: FindGroups
    ) -> None:
        """block: the fields of a block of `size` weights."""
        self.name = self.ggml_name = ggml_name
        self.is_of_host = ggml_name != MXFP4  # a GPU's kernels know only MXFP4
        self.dtypes = (f"GGUF {ggml_name}",)
        self.block_size = size
        self.block_bytes = (block.itemsize,)
        self._find_groups = find_groups

    def unpack(self, *stored: Bytes) -> Bytes:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays so
            return self._find_groups(stored[0]).weights().reshape(-1).view(np.uint8)

    def groups(self, stored: Bytes) -> BlockGroups:
        """Split blocks into numbers, scales and offsets."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._find_groups(stored)

    def matrix(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> PackedMatrix:
        return PackedMatrix(self, tensors[0], shape)

    def has_tensor(self, name: str, dtype: str) -> bool:
        return dtype == self.dtypes[0]

    def is_finite(self, stored: Bytes) -> bool:
        return bool(np.isfinite(self.unpack(stored).view(np.float32)).all())


class PackedMatrix:
    """A matrix [out, in] whose rows are whole blocks, in host memory; MXFP4 also on a GPU."""

    def __init__(self, packed: GgmlFormat, stored: Tensor, shape: tuple[int, ...]) -> None:
        """stored: 1-D uint8."""
        self.format = packed
        self.shape = shape
        self.stored = stored.view(shape[0], -1)  # [out, bytes of a row]

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def device(self) -> torch.device:
        return self.stored.device

    def rows(self, features: slice | Tensor) -> PackedMatrix:
        chosen = self.stored[features]
        return PackedMatrix(self.format, chosen, (chosen.shape[0], *self.shape[1:]))

    def groups(self) -> Groups:
        """Split the matrix into codes, scales and zeros."""
        import torch

        num_rows = self.shape[0]
        numbers, scales, offsets = self.format.groups(self.stored.view(-1).numpy())
        codes = torch.from_numpy(numbers).view(num_rows, -1, numbers.shape[2])
        of_groups = torch.from_numpy(scales).view(num_rows, -1)
        zeros = torch.zeros_like(of_groups) if offsets is None else torch.from_numpy(-offsets)
        return Groups(codes, of_groups, zeros.view(num_rows, -1))

    def unpack(self, out: Tensor) -> None:
        import torch

        if self.device.type != "cpu":
            out.copy_(mxfp4_weights(self.stored))
            return
        target = out.view(-1).view(torch.uint8).numpy()
        convert([self.stored.view(-1).numpy()], self.format, target, plain_format(out.dtype))


def mxfp4_weights(stored: Tensor) -> Tensor:
    """Unpack MXFP4 rows [out, bytes of a row] to float32 [out, in] in torch, on any device."""
    import torch

    blocks = stored.view(len(stored), -1, 17)
    exponents, codes = blocks[:, :, :1].int(), blocks[:, :, 1:]
    codes = torch.cat((codes & 15, codes >> 4), dim=2)
    values = torch.tensor(small_types.MXFP4_VALUES.tolist(), dtype=torch.float32)
    # 2 ** (exponent - 128), of which the two least are below the normal numbers.
    bits = torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23)
    numbers = values.to(stored.device).index_select(0, codes.view(-1).int()).view(codes.shape)
    return numbers.mul_(bits.view(torch.float32)).view(len(stored), -1)


FORMATS = tuple(
    GgmlFormat(name, block, size, find_groups)
    for size, types in ((32, small_types.TYPES), (256, k_types.TYPES | grid_types.TYPES))
    for name, (block, find_groups) in types.items()
)

TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    dict(enumerate(("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1")))
    | dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS"), 10))
    | dict(enumerate(("IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), 18))
    | dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 24))
    | {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
)
"""Type names by the number in a GGUF file; some of them cannot be read."""
