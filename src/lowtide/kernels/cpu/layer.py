"""Compiled layers: a layer of a few bfloat16 rows in one or two calls, or all layers in one.

The structs mirror those of layer.cpp. Each matrix may be in any format with compiled products.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide.errors import InternalError
from lowtide.kernels.cpu.few_rows import MAX_HEAD_DIM, ChoiceStruct, FewRows, choice_struct
from lowtide.kernels.cpu.library import check_layouts, functions_of
from lowtide.kernels.cpu.residency import ResidencyStruct
from lowtide.kernels.cpu.weight_calls import MatrixCall, PlacesStruct
from lowtide.kernels.layer_parts import (
    AttentionParts,
    LayerParts,
    PassFacts,
    Product,
    Residents,
    RouterParts,
    Scratch,
    Status,
)
from lowtide.kernels.operands import Matrix

_INT, _LONG, _FLOAT, _P = ctypes.c_int, ctypes.c_long, ctypes.c_float, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "run_to_router": (None, _P, _P, _INT, _P, _P),
    "run_from_experts": (None, _P, _P),
    "run_layers": (_INT, _P, _P, _LONG, _INT, _P),
    "reset_run": (None, _P),
    "open_run": (_P,),
    "close_run": (None, _P),
}


class _Matrix(ctypes.Structure):
    _fields_: ClassVar = [
        ("multiply", _P),
        ("variant", _INT),
        ("type", _INT),
        ("weight", _P),
        ("bias", _P),
        ("num_outs", _LONG),
    ]


class _Attention(ctypes.Structure):
    _fields_: ClassVar = [
        ("norm", _P),
        ("projections", _Matrix * 3),
        ("num_projections", _LONG),
        ("query_norm", _P),
        ("key_norm", _P),
        ("query_norm_length", _LONG),
        ("key_norm_length", _LONG),
        ("output", _Matrix),
        ("keys", _P),
        ("values", _P),
        ("head_stride", _LONG),
        ("num_heads", _LONG),
        ("num_key_heads", _LONG),
        ("head_dim", _LONG),
        ("scale", _FLOAT),
    ]


class _Experts(ctypes.Structure):
    _fields_: ClassVar = [
        ("router", _P),
        ("is_float32", _LONG),
        ("bias", _P),
        ("choice", ChoiceStruct),
        ("run", _P),
        ("mlps", _P),
        ("variant", _INT),
        ("types", _INT * 3),
        ("places", PlacesStruct),
        ("width", _LONG),
    ]


class _Shared(ctypes.Structure):
    _fields_: ClassVar = [("gate", _Matrix), ("up", _Matrix), ("down", _Matrix), ("share", _P)]


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        ("attention", _Attention),
        ("mlp_norm", _P),
        ("experts", _Experts),
        ("shared", _Shared),
        ("hidden", _LONG),
        ("eps", _FLOAT),
    ]


class _Pass(ctypes.Structure):
    _fields_: ClassVar = [
        ("variant", _INT),
        ("num_threads", _INT),
        ("num_rows", _LONG),
        ("x", _P),
        ("cos", _P),
        ("sin", _P),
        ("half", _LONG),
        ("tokens", _P),
        *((name, _P) for name in Scratch._fields),
    ]


class _Turn(ctypes.Structure):
    _fields_: ClassVar = [("layer", _P), ("pass", _P), ("number", _LONG)]


class CompiledPass:
    """Arguments of a pass and scratch of its layers; keeps all of it alive.

    It is reused for later passes over the same memory of rows.
    """

    def __init__(self, variant: int, facts: PassFacts, scratch: Scratch, num_threads: int) -> None:
        self._scratch = scratch
        x, of_pass = facts.x, (None, None, 0, None)
        self._struct = _Pass(
            variant, num_threads, len(x), x.data_ptr(), *of_pass, *map(_address, scratch)
        )
        self.address = ctypes.addressof(self._struct)
        self.begin(facts)

    def begin(self, facts: PassFacts) -> None:
        """Begin another pass, whose `x` must be the same memory."""
        struct, (cos, sin) = self._struct, facts.rotation
        self._facts = facts
        struct.cos, struct.sin, struct.half = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        struct.tokens = facts.tokens.ctypes.data


class CompiledLayer:
    """Layer of few rows, with the bits of its operators run one by one.

    Keeps alive the weights that its struct points to. `attends`: run attention in the call; False
    if it has been run already.
    """

    def __init__(self, few_rows: FewRows, parts: LayerParts, calls: Sequence[MatrixCall]) -> None:
        """Build the struct; parts: accepted by `takes_layer`; calls: one for each of `products`."""
        self.functions = _functions(few_rows.library)
        self._variant = few_rows.number
        self._parts = parts
        self._struct = _layer_struct(parts, calls)
        self._address = ctypes.addressof(self._struct)
        self.max_rows = min([few_rows.max_rows, *(call.calls.max_rows for call in calls)])
        self.max_expert_rows = _max_expert_rows(parts, self.max_rows)  # experts included

    @classmethod
    def of(
        cls,
        few_rows: FewRows,
        parts: LayerParts,
        matrix_call: Callable[[Matrix], MatrixCall | None],
    ) -> CompiledLayer | None:
        """Build a compiled layer; None if a layer of these parts cannot run in one call.

        It can if `matrix_call` has a compiled product for each matrix, and `takes_layer` accepts
        the rest.
        """
        found = [matrix_call(product.weight) for product in parts.products]
        calls = [each for each in found if each is not None]
        is_taken = len(calls) == len(found) and takes_layer(parts)
        return cls(few_rows, parts, calls) if is_taken else None

    def bind(self, facts: PassFacts, scratch: Scratch, num_threads: int) -> CompiledPass:
        """Prepare a pass for this layer and all like it."""
        return CompiledPass(self._variant, facts, scratch, num_threads)

    def run_to_router(
        self, bound: CompiledPass, attends: bool, experts: Tensor, weights: Tensor
    ) -> None:
        """Run the layer up to the router's choice.

        experts [rows, k] int64, ascending, and float32 weights are written. The experts' input is
        `Scratch.mlp_input`.
        """
        self.functions["run_to_router"](
            self._address, bound.address, attends, experts.data_ptr(), weights.data_ptr()
        )

    def run_from_experts(self, bound: CompiledPass) -> None:
        """Run the rest of the layer; `Scratch.routed` must hold the experts' sum."""
        self.functions["run_from_experts"](self._address, bound.address)

    def turn(self, bound: CompiledPass) -> _Turn:
        """Return an entry for a call over several layers; `self` and `bound` have to outlive it."""
        experts = self._parts.experts
        return _Turn(self._address, bound.address, -1 if experts is None else experts.number)


class CompiledLayers:
    """Several layers in one call, each with its pass; keeps them alive."""

    def __init__(self, layers: Sequence[CompiledLayer], bounds: Sequence[CompiledPass]) -> None:
        self._kept = (layers, bounds)
        self._turns = (_Turn * len(layers))(
            *(layer.turn(bound) for layer, bound in zip(layers, bounds, strict=True))
        )
        functions = layers[0].functions
        self._run_layers, self._reset = functions["run_layers"], functions["reset_run"]
        self._run = functions["open_run"]()
        weakref.finalize(self, functions["close_run"], self._run).atexit = False
        self._call = self._run, ctypes.addressof(self._turns), len(layers)

    def run(self, attends: bool, residents: Residents | None) -> None:
        """Run the layers completely, whichever of their experts are resident.

        residents: None if no layer has experts. Raises what `Residents.serve` raises.
        """
        address = None if residents is None else residents.address
        try:
            while status := self._run_layers(*self._call, attends, address):
                if residents is None:
                    raise InternalError(f"Layers without experts ended with status {status}.")
                residents.serve(Status(status))
        except BaseException:
            self._reset(self._run)
            if residents is not None:
                residents.give_up()
            raise


def _functions(library: ctypes.CDLL) -> dict[str, ctypes._NamedFuncPointer]:
    structs = {
        "Matrix": _Matrix,
        "Attention": _Attention,
        "Choice": ChoiceStruct,
        "ExpertPlaces": PlacesStruct,
        "Experts": _Experts,
        "Shared": _Shared,
        "Layer": _Layer,
        "Pass": _Pass,
        "Turn": _Turn,
        "Residency": ResidencyStruct,
    }
    check_layouts(library, structs)
    return functions_of(library, _FUNCTIONS)


def takes_layer(parts: LayerParts) -> bool:
    """Return True if the layer's tensors other than matrices are supported.

    All must be bfloat16 in host memory, except a router, which may be float32; heads must be short
    enough for attention.
    """
    router, attention = parts.router, parts.attention
    own = [] if router is None else [router.weight, *([] if router.bias is None else [router.bias])]
    is_short = attention is None or attention.keys.shape[2] <= MAX_HEAD_DIM
    is_float32 = router is None or router.bias is None or router.bias.dtype is torch.float32
    return (
        is_short
        and is_float32
        and all(_is_plain(tensor, torch.bfloat16) for tensor in parts.tensors)
        and all(_is_plain(one, one.dtype) for one in own)
        and (router is None or router.weight.dtype in (torch.bfloat16, torch.float32))
    )


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the rows of `tensor` are adjacent, or those of each head of a cache."""
    if tensor.dtype is not dtype or not tensor.is_cpu:
        return False
    return tensor.is_contiguous() or (tensor.dim() == 3 and tensor[0].is_contiguous())


def _max_expert_rows(parts: LayerParts, max_rows: int) -> int:
    """Return the most rows with which the whole layer, experts included, can run.

    max_rows: the limit without experts.
    """
    if parts.router is None:
        return max_rows
    return 0 if parts.experts is None else min(max_rows, parts.experts.kernels.max_rows)


def _layer_struct(parts: LayerParts, calls: Sequence[MatrixCall]) -> _Layer:
    matrices = [*map(_matrix, parts.products, calls)]
    attention, shared = parts.attention, parts.shared
    return _Layer(
        _Attention() if attention is None else _attention(attention, matrices),
        parts.mlp_norm.data_ptr(),
        _Experts() if parts.router is None else _experts(parts.router, parts),
        _Shared() if shared is None else _Shared(*matrices[-3:], _address(shared.share)),
        parts.mlp_norm.shape[0],
        parts.eps,
    )


def _attention(parts: AttentionParts, matrices: Sequence[_Matrix]) -> _Attention:
    """Build the struct; matrices: projections, output, and others."""
    norms, (num_key_heads, _, head_dim) = parts.head_norms, parts.keys.shape
    num_projections = len(parts.projections)
    return _Attention(
        parts.norm.data_ptr(),
        (_Matrix * 3)(*matrices[:num_projections]),
        num_projections,
        None if norms is None else norms.query.data_ptr(),
        None if norms is None else norms.key.data_ptr(),
        0 if norms is None else norms.query.shape[0],
        0 if norms is None else norms.key.shape[0],
        matrices[num_projections],
        parts.keys.data_ptr(),
        parts.values.data_ptr(),
        parts.keys.stride(0),
        parts.num_heads,
        num_key_heads,
        head_dim,
        head_dim**-0.5,
    )


def _experts(router: RouterParts, parts: LayerParts) -> _Experts:
    weight, bias, choice = router
    struct = _Experts(
        weight.data_ptr(),
        weight.dtype is torch.float32,
        _address(bias),
        choice_struct(choice, len(weight)),
    )
    if parts.experts is not None:
        calls = parts.experts.kernels.calls
        struct.run, struct.mlps, struct.variant = (
            calls.experts_address,
            calls.mlps_address,
            calls.variant,
        )
        struct.types = (_INT * 3)(*parts.experts.kernels.types.tolist())
        struct.places = PlacesStruct(*parts.experts.places)
        struct.width = parts.experts.expert_size
    return struct


def _matrix(product: Product, call: MatrixCall) -> _Matrix:
    calls, number, address = call
    bias, num_outs = _address(product.bias), product.weight.shape[0]
    return _Matrix(calls.multiply_address, calls.variant, number, address, bias, num_outs)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
