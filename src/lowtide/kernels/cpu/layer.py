"""Compiled layers: a layer of a few bfloat16 rows in one or two calls, or all layers in one.

Each matrix may be in any format with compiled products, and each layer of any kind in `_MIXERS`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import InternalError
from lowtide.kernels.cpu.few_rows import MAX_HEAD_DIM, FewRows, choice_struct, delta_weights_struct
from lowtide.kernels.cpu.library import functions_of, struct
from lowtide.kernels.cpu.weight_calls import MatrixCall
from lowtide.kernels.layer_parts import (
    DeltaParts,
    GroupedParts,
    LatentParts,
    LayerParts,
    MixerParts,
    NormParts,
    PassFacts,
    Product,
    Residents,
    RouterParts,
    Scratch,
    ShortConvParts,
    Status,
)
from lowtide.kernels.operands import Matrix

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mix_grouped": (None, _P, _P, _LONG),
    "mix_latent": (None, _P, _P, _LONG),
    "mix_convolution": (None, _P, _P, _LONG),
    "mix_delta": (None, _P, _P, _LONG),
    "run_to_router": (None, _P, _P, _INT, _P, _P),
    "run_from_experts": (None, _P, _P),
    "run_layers": (_INT, _P, _P, _LONG, _INT, _P),
    "reset_run": (None, _P),
    "open_run": (_P,),
    "close_run": (None, _P),
}


class CompiledPass:
    """Arguments of a pass and scratch of its layers; keeps all of it alive.

    Later passes whose rows are in the same memory reuse it.
    """

    def __init__(self, variant: int, facts: PassFacts, scratch: Scratch, num_threads: int) -> None:
        self.scratch = scratch
        self._struct = struct("Pass")(
            variant=variant,
            num_threads=num_threads,
            num_rows=len(facts.x),
            x=facts.x.data_ptr(),
            **{name: _address(each) for name, each in scratch._asdict().items()},
        )
        self._angles = (struct("Angles") * len(facts.rotations))()
        self._struct.angles = ctypes.addressof(self._angles)
        self.address = ctypes.addressof(self._struct)
        self.begin(facts)

    def begin(self, facts: PassFacts) -> None:
        """Begin another pass, whose `x` must be the same memory."""
        self._facts = facts
        for angles, (cos, sin) in zip(self._angles, facts.rotations, strict=True):
            angles.cos, angles.sin, angles.half = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
            angles.is_float32 = cos.dtype is torch.float32
        self._struct.tokens = facts.tokens.ctypes.data
        self._struct.sequences = facts.sequences.ctypes.data
        self._struct.num_sequences = len(facts.sequences)


class CompiledLayer:
    """Layer of few rows, with the bits of its operators run one by one.

    Keeps alive the weights that its struct points to. `mixes`: run the mixer in the call; False
    if it has been run already.
    """

    def __init__(self, few_rows: FewRows, parts: LayerParts, calls: Sequence[MatrixCall]) -> None:
        """Build the struct; parts: accepted by `takes_layer`; calls: one for each of `products`."""
        self.functions = functions_of(few_rows.library, _FUNCTIONS)
        self._variant = few_rows.number
        self._parts = parts
        self._struct, self._mixer = _layer_struct(parts, calls, self.functions)
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
        self, bound: CompiledPass, mixes: bool, experts: Tensor, weights: Tensor
    ) -> None:
        """Run the layer up to the router's choice.

        experts [rows, k] int64, ascending, and float32 weights are written. The experts' input is
        `Scratch.mlp_input`.
        """
        self.functions["run_to_router"](
            self._address, bound.address, mixes, experts.data_ptr(), weights.data_ptr()
        )

    def run_from_experts(self, bound: CompiledPass) -> None:
        """Run the rest of the layer; `Scratch.routed` must hold the experts' sum."""
        self.functions["run_from_experts"](self._address, bound.address)

    def turn(self, bound: CompiledPass) -> ctypes.Structure:
        """Return an entry for a call over several layers; `self` and `bound` have to outlive it."""
        experts = self._parts.experts
        return struct("Turn")(
            self._address, bound.address, -1 if experts is None else experts.number
        )


class CompiledLayers:
    """Several layers in one call, each with its pass; keeps them alive."""

    def __init__(self, layers: Sequence[CompiledLayer], bounds: Sequence[CompiledPass]) -> None:
        self._kept = (layers, bounds)
        self._turns = (struct("Turn") * len(layers))(
            *(layer.turn(bound) for layer, bound in zip(layers, bounds, strict=True))
        )
        functions = layers[0].functions
        self._run_layers, self._reset = functions["run_layers"], functions["reset_run"]
        self._run = functions["open_run"]()
        weakref.finalize(self, functions["close_run"], self._run).atexit = False
        self._call = self._run, ctypes.addressof(self._turns), len(layers)

    def run(self, mixes: bool, residents: Residents | None) -> None:
        """Run the layers completely, whichever of their experts are resident.

        residents: None if no layer has experts. Raises what `Residents.serve` raises.
        """
        address = None if residents is None else residents.address
        try:
            while status := self._run_layers(*self._call, mixes, address):
                if residents is None:
                    raise InternalError(f"Layers without experts ended with status {status}.")
                residents.serve(Status(status))
        except BaseException:
            self._reset(self._run)
            if residents is not None:
                residents.give_up()
            raise


def takes_layer(parts: LayerParts) -> bool:
    """Return True if the layer's tensors other than matrices are supported.

    All must be in host memory and bfloat16, except a router and norms, which may be float32, and
    biases that only rank and `wide` tensors of mixers, which are; heads must be short enough for
    attention.
    """
    router, mixer, numbers = parts.router, parts.mixer, (torch.bfloat16, torch.float32)
    either = [norm.weight for norm in parts.norms]
    wide: list[Tensor | None] = []
    if router is not None:
        either.append(router.weight)
        wide.append(router.bias)
        if router.logit_bias is not None and router.logit_bias.dtype is not router.weight.dtype:
            return False
    if mixer is not None:
        wide += mixer.wide
    return (
        (mixer is None or _head_dim(mixer) <= MAX_HEAD_DIM)
        and all(_is_plain(tensor, torch.bfloat16) for tensor in parts.tensors)
        and all(each.dtype in numbers and _is_plain(each, each.dtype) for each in either)
        and all(each is None or _is_plain(each, torch.float32) for each in wide)
    )


def _head_dim(mixer: MixerParts) -> int:
    """Return the width of what attention compares, a key's; 0 without attention."""
    if isinstance(mixer, GroupedParts):
        return mixer.keys.shape[2]
    return mixer.cache.shape[2] if isinstance(mixer, LatentParts) else 0


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the rows of `tensor` are adjacent, or those of each head of a cache."""
    if tensor.dtype is not dtype or not tensor.is_cpu:
        return False
    return tensor.is_contiguous() or (tensor.dim() == 3 and tensor[0].is_contiguous())


def _max_expert_rows(parts: LayerParts, max_rows: int) -> int:
    """Return the largest number of rows for which one call can run the layer, experts included.

    max_rows: the limit without experts.
    """
    if parts.router is None:
        return max_rows
    return 0 if parts.experts is None else min(max_rows, parts.experts.kernels.max_rows)


def _layer_struct(
    parts: LayerParts,
    calls: Sequence[MatrixCall],
    functions: Mapping[str, ctypes._NamedFuncPointer],
) -> tuple[ctypes.Structure, ctypes.Structure | None]:
    """Build the layer's struct, and its mixer's, which has to live as long."""
    matrices = map(_matrix, parts.products, calls)
    layer = struct("Layer")(mlp_norm=_norm(parts.mlp_norm), hidden=len(parts.mlp_norm.weight))
    mixer = None
    if parts.mixer is not None:
        name, build = _MIXERS[type(parts.mixer)]
        mixer = build(parts.mixer, matrices)
        layer.mix = ctypes.cast(functions[name], _P)
        layer.mixer = ctypes.addressof(mixer)
    if parts.router is not None:
        layer.experts = _experts(parts.router, parts)
    if parts.shared is not None:
        gate, up, down = matrices
        share = _address(parts.shared.share)
        layer.shared = struct("Shared")(gate=gate, up=up, down=down, share=share)
    return layer, mixer


def _grouped(parts: GroupedParts, matrices: Iterator[ctypes.Structure]) -> ctypes.Structure:
    """Build the struct; matrices: those of `products`, and others after them."""
    num_key_heads, _, head_dim = parts.keys.shape
    projections = [next(matrices) for _ in parts.projections]
    return struct("GroupedAttention")(
        norm=_norm(parts.norm),
        projections=(struct("Matrix") * 3)(*projections),
        num_projections=len(projections),
        has_gates=parts.has_gates,
        query_norm=_norm(parts.query_norm),
        key_norm=_norm(parts.key_norm),
        output=next(matrices),
        keys=parts.keys.data_ptr(),
        values=parts.values.data_ptr(),
        head_stride=parts.keys.stride(0),
        num_heads=parts.num_heads,
        num_key_heads=num_key_heads,
        head_dim=head_dim,
        window=parts.window,
        sinks=_address(parts.sinks),
        scale=parts.scale,
        group=parts.group,
    )


def _latent(parts: LatentParts, matrices: Iterator[ctypes.Structure]) -> ctypes.Structure:
    """Build the struct; matrices: those of `products`, and others after them."""
    down = struct("Matrix")() if parts.query_down is None else next(matrices)
    return struct("LatentAttention")(
        norm=_norm(parts.norm),
        query_down=down,
        query_norm=_norm(parts.query_norm),
        query=next(matrices),
        latent_down=next(matrices),
        latent_norm=_norm(parts.latent_norm),
        expansion=parts.expansion.data_ptr(),
        output=next(matrices),
        cache=parts.cache.data_ptr(),
        num_heads=parts.num_heads,
        fixed_dim=parts.fixed_dim,
        rotary_dim=parts.cache.shape[2] - parts.rank,
        rank=parts.rank,
        value_dim=parts.value_dim,
        scale=parts.scale,
    )


def _convolution(parts: ShortConvParts, matrices: Iterator[ctypes.Structure]) -> ctypes.Structure:
    """Build the struct; matrices: those of `products`, and others after them."""
    return struct("ShortConvolution")(
        norm=_norm(parts.norm),
        inward=next(matrices),
        kernel=parts.kernel.data_ptr(),
        bias=_address(parts.bias),
        num_taps=parts.kernel.shape[1],
        outward=next(matrices),
        state=parts.state,
    )


def _delta_net(parts: DeltaParts, matrices: Iterator[ctypes.Structure]) -> ctypes.Structure:
    """Build the struct; matrices: those of `products`, and others after them."""

    def matrix(product: Product | None) -> ctypes.Structure:
        return struct("Matrix")() if product is None else next(matrices)

    tail, state = parts.states
    return struct("DeltaNet")(
        norm=_norm(parts.norm),
        mixed=matrix(parts.mixed),
        gates=matrix(parts.gates),
        beta=matrix(parts.beta),
        time=matrix(parts.time),
        weights=delta_weights_struct(parts.weights),
        head_norm=_norm(parts.head_norm),
        outward=matrix(parts.outward),
        tail=tail,
        matrices=state,
    )


_MIXERS: Mapping[type, tuple[str, Callable[[Any, Iterator[ctypes.Structure]], ctypes.Structure]]]
_MIXERS = {
    GroupedParts: ("mix_grouped", _grouped),
    LatentParts: ("mix_latent", _latent),
    ShortConvParts: ("mix_convolution", _convolution),
    DeltaParts: ("mix_delta", _delta_net),
}
"""By the kind of a mixer's parts: the function that runs it, and what builds its struct."""


def _norm(parts: NormParts | None) -> ctypes.Structure:
    if parts is None:
        return struct("Norm")()
    weight, eps = parts
    return struct("Norm")(weight.data_ptr(), weight.dtype is torch.float32, len(weight), eps)


def _experts(router: RouterParts, parts: LayerParts) -> ctypes.Structure:
    weight, bias, choice, logit_bias = router
    made = struct("Experts")(
        router=weight.data_ptr(),
        is_float32=weight.dtype is torch.float32,
        logit_bias=_address(logit_bias),
        bias=_address(bias),
        choice=choice_struct(choice, len(weight)),
    )
    if parts.experts is not None:
        calls = parts.experts.kernels.calls
        made.run, made.mlps, made.variant = (
            calls.experts_address,
            calls.mlps_address,
            calls.variant,
        )
        made.types = (_INT * 3)(*parts.experts.kernels.types.tolist())
        made.places = struct("ExpertPlaces")(*parts.experts.places)
        made.width = parts.experts.expert_size
    return made


def _matrix(product: Product, call: MatrixCall) -> ctypes.Structure:
    calls, number, address = call
    bias, num_outs = _address(product.bias), product.weight.shape[0]
    return struct("Matrix")(calls.multiply_address, calls.variant, number, address, bias, num_outs)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
