"""Operators on the meta device that return only shapes.

torch answers most of them by code of its compiler, whose import takes seconds. A pass in register
mode needs none of it: most results already have a place, and the others' shapes are simple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Uncomputed(TorchFunctionMode):
    """Mode in which a model's operators on the meta device compute nothing.

    Operators with an output buffer do nothing; the others of a pass make an empty tensor of the
    right shape and type. All other operators are torch's.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _TORCHS_OWN:
            return func(*args, **named)
        several = args[0] if args and isinstance(args[0], tuple) else args
        tensors = [value for value in several if isinstance(value, Tensor)]
        is_meta = all(tensor.is_meta for tensor in tensors)
        if is_meta and named.get("out") is not None:
            return named["out"]
        in_place = name.endswith("_") and not name.endswith("__")
        if is_meta and (in_place or named.pop("inplace", False)):
            return args[0]
        if tensors and is_meta and name in _SHAPES:
            return _SHAPES[name](*args, **named)
        if name == "arange" and str(named.get("device")) == "meta":
            return _arange(*args, **named)  # type: ignore[arg-type]
        return func(*args, **named)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _arange(*bounds: int, dtype: torch.dtype = torch.int64, device: object) -> Tensor:
    return _empty([len(range(*bounds))], dtype)


def _elementwise(x: Tensor, *others: object) -> Tensor:
    """Return an empty result of an elementwise operator: of the wider type."""
    dtype, shapes = x.dtype, [x.shape]
    for other in others:
        if isinstance(other, Tensor):
            shapes.append(other.shape)
        if isinstance(other, Tensor | float | int):
            dtype = torch.result_type(_empty([1] * x.dim(), dtype), other)
    return _empty(np.broadcast_shapes(*shapes), dtype)


def _reduced(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    shape = list(x.shape)
    shape[dim : dim + 1 or None] = [1] if keepdim else []  # also of -1
    return _empty(shape, x.dtype)


def _product(x: Tensor, y: Tensor) -> Tensor:
    return _empty([*x.shape[:-1], y.shape[-1]], x.dtype)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return _empty([sum(map(len, parts)), *parts[0].shape[1:]], parts[0].dtype)


def _topk(x: Tensor, k: int, dim: int = -1, sorted: bool = True) -> object:
    shape = list(x.shape)
    shape[dim] = k
    return torch.return_types.topk((_empty(shape, x.dtype), _empty(shape, torch.int64)))


def _like(x: Tensor, dim: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    return _empty(x.shape, dtype or x.dtype)


def _flash(query: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return _empty(query.shape, query.dtype), _empty(query.shape[:3], torch.float32)


_TORCHS_OWN = frozenset(
    ("__get__", "__getitem__", "__len__", "numel", "view", "narrow", "expand", "permute", "t")
)
"""Attributes and views: most of a pass' calls, and none of them computes."""

_BINARY = ("add", "sub", "mul", "div", "__rsub__", "__rdiv__", "__rpow__", "logaddexp")
_UNARY = ("rsqrt", "sigmoid", "silu", "cos", "sin")

_SHAPES: Mapping[str, Callable[..., object]] = {
    **dict.fromkeys((*_BINARY, *_UNARY), _elementwise),
    **dict.fromkeys(("mean", "sum", "amax"), _reduced),
    "masked_fill": lambda x, mask, value: _elementwise(x, mask),
    **dict.fromkeys(("softmax", "ones_like"), _like),
    "mm": _product,
    "addmm": lambda bias, x, y: _product(x, y),
    "cat": _cat,
    "topk": _topk,
    "sort": lambda x: torch.return_types.sort((_like(x), _like(x, dtype=torch.int64))),
    "gather": lambda x, dim, index: _empty(index.shape, x.dtype),
    "_scaled_dot_product_flash_attention_for_cpu": _flash,
}
