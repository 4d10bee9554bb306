"""Check of the compiled kernels on this processor: each variant beside the plain one.

    python -m lowtide.kernels.check

Every operator that has variants runs on the same drawn numbers in each variant that the processor
says it has, down from none of its instructions to the best. Variants in float32 and those of int8
rows must have the plain one's bits; sums of bfloat16 dot products may differ by little. The plain
one's products are compared with sums that Python makes of the same numbers. A variant's digest is
of all its results: two libraries with the same digests compute the same, whatever compiled them.

Needs neither torch nor numpy: it runs where Python runs, in an emulator, too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import math
import random
import struct as binary
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lowtide.errors import LowtideError
from lowtide.kernels.cpu.library import fields_of, functions_of, load_part, load_parts, struct
from lowtide.kernels.cpu.sources import CORE, PACKED, PACKING, ROUNDED, all_parts
from lowtide.kernels.cpu.variants import INT8_VARIANTS, VARIANTS, WITHOUT_DOTS, num_variants

Address = int | None

_THREADS = 2
_ROWS = 32  # of products
_SHAPES = ((5, 31), (37, 768))  # outs and inputs of bfloat16 matrices
_OUTS, _INPUTS = 37, 768  # of packed ones, whose blocks have up to 256 weights

_INT, _LONG, _FLOAT, _P = ctypes.c_int, ctypes.c_long, ctypes.c_float, ctypes.c_void_p
_MULTIPLY = (None, _INT, _INT, _INT, _P, _LONG, _P, _P, _P, *4 * (_LONG,))
_EXPERTS = (None, _INT, _INT, *10 * (_P,), *4 * (_LONG,))
_NORM = (None, _INT, _INT, _P, _LONG, _P, _FLOAT, _P, *4 * (_LONG,))
_ROTATE = (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,))
_FUNCTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    CORE: {
        "best_variant": (_INT,),
        "best_int8": (_INT,),
        "best_own": (_INT,),
        "max_rows": (_LONG, _INT),
        "max_own_rows": (_LONG, _INT),
        "plain_multiply": _MULTIPLY,
        "plain_experts": _EXPERTS,
        "multiply_float32": (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,)),
        "multiply_heads": (
            *(None, _INT, _INT, _P, _LONG, _LONG, _P, _LONG, _LONG, _INT),
            *(_P, _LONG, _LONG, *4 * (_LONG,)),
        ),
        "attend": (None, _INT, _INT, *3 * (_P,), _LONG, _P, *5 * (_LONG,), _FLOAT, _P),
        "choose_experts": (None, _INT, _P, _INT, *4 * (_P,), _LONG),
        "rms_norm": _NORM,
        "rms_norm_in_float32": _NORM,
        "rotate": _ROTATE,
        "rotate_in_float32": _ROTATE,
        "rotate_pairs": (None, _INT, _INT, _P, _LONG, _LONG, _P, _P, *3 * (_LONG,)),
        "silu_times": (None, _INT, _INT, _P, _P, _LONG),
        "weigh_rows": (None, _INT, _P, _P, _LONG, _LONG),
        "silu_weigh": (None, _INT, _INT, _P, _LONG, _P, _LONG, _LONG, _LONG),
        "sigmoid_weigh": (None, _INT, _INT, _P, _LONG, _P, *5 * (_LONG,)),
        "delta_steps": (None, _INT, _INT, _P, _P),
        "delta_prepare": (None, _INT, _INT, _P, _P, _P),
    },
    PACKING: {"quantised_pack": (None, _INT, _INT, _INT, _P, _P, _P, _LONG, _LONG)},
    PACKED: {
        "packed_multiply": _MULTIPLY,
        "packed_experts": _EXPERTS,
        "packed_unpack": (None, _INT, _INT, _P, _LONG, _LONG, _P, _LONG, _LONG, _P),
    },
    ROUNDED: {"rounded_multiply": _MULTIPLY, "rounded_experts": _EXPERTS},
}

_FLOAT16_PLACES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Places of a block's scales in float16; at 0 in other types. Any bytes are codes."""

# As packed.py numbers them: form, dtype of scales, zeros, and the logarithm of a group.
_INTS_OF_4, _INTS_OF_8, _FP8 = 1, 2, 3
_BF16, _F16, _F32 = 0, 1, 2
_SECTIONED = (
    (_INTS_OF_4, _F16, True, 7),
    (_INTS_OF_4, _BF16, False, 5),
    (_INTS_OF_8, _F32, True, 7),
    (_FP8, _BF16, False, 7),
    (_FP8, _F32, False, 7),
)


def main() -> int:
    """Print a line for each variant; return 1 if one is not as it should be."""
    faulthandler.enable()  # an instruction that the processor lacks ends the process
    try:
        load_parts(all_parts(), _print_progress)
    except LowtideError as error:
        print(error, file=sys.stderr)
        return 1
    kernels = Kernels()
    print(f"kernels: {kernels.path}")
    best = kernels.best_int8()
    names = VARIANTS[: num_variants(kernels.core)]
    faults = check("", names, WITHOUT_DOTS, list(_exact_cases(kernels)))
    faults += check("int8 rows, ", INT8_VARIANTS[: best + 1], best, list(_int8_cases(kernels)))
    for fault in faults:
        print(f"wrong: {fault}")
    if not faults:
        print("all is as it should be")
    return 1 if faults else 0


def _print_progress(what: str, done: int, total: int) -> None:
    print(f"\r{what}", end="\n" if done == total else "", file=sys.stderr, flush=True)


class Known(NamedTuple):
    """Result at a place, as Python computes it, and how far another may be from it."""

    place: int
    value: float
    slack: float


class Case(NamedTuple):
    """Operator on given numbers."""

    name: str
    run: Callable[[int], array[Any]]  # by a variant's number
    sums_dots: bool = False  # bits depend on the variant where it has bfloat16 dot products
    known: Sequence[Known] = ()
    is_bf16: bool = True


def check(title: str, names: Sequence[str], last_exact: int, cases: Sequence[Case]) -> list[str]:
    """Run all cases in each variant, print its digest, and return what is wrong.

    last_exact: the last variant that has the first one's bits in every case.
    """
    faults: list[str] = []
    plain: list[array[Any]] = []
    for number, name in enumerate(names):
        print(f"{title + name:28}", end=" ", flush=True)
        digest = hashlib.sha256()
        for at, case in enumerate(cases):
            found = case.run(number)
            digest.update(found.tobytes())
            if number == 0:
                plain.append(found)
                faults += _beside_known(f"{title}{name}: {case.name}", case, found)
            elif case.sums_dots and number > last_exact:
                if not _is_near(plain[at], found, case.is_bf16):
                    faults.append(f"{title}{name}: {case.name} is far from the plain one's")
            elif found != plain[at]:
                faults.append(f"{title}{name}: {case.name} has other bits than the plain one's")
        print(digest.hexdigest()[:16], flush=True)
    return faults


def _beside_known(name: str, case: Case, found: array[Any]) -> list[str]:
    numbers = _wide(found) if case.is_bf16 else found
    return [
        f"{name} is {numbers[each.place]:g} at {each.place}, and Python says {each.value:g}"
        for each in case.known
        if not abs(numbers[each.place] - each.value) <= each.slack
    ]


def _is_near(plain: array[Any], found: array[Any], is_bf16: bool) -> bool:
    """Return True if numbers differ by at most a 64th of the largest."""
    wanted, numbers = (_wide(each) if is_bf16 else each for each in (plain, found))
    most = max(map(abs, wanted)) / 64
    return all(abs(a - b) <= most for a, b in zip(wanted, numbers, strict=True))


# Numbers


class _SeededNumbers:
    """Numbers of one seed: the same everywhere."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def bf16(self, count: int) -> array[int]:
        """Draw from 1/32 to 1/8, of both signs."""
        bits = binary.unpack(f"<{count}H", self.bytes(2 * count))
        return array("H", [each & 0x80FF | 0x3D00 for each in bits])

    def floats(self, count: int) -> array[float]:
        return _wide(self.bf16(count))


def _wide(numbers: array[int]) -> array[float]:
    """Convert bfloat16 to float32."""
    return array("f", binary.pack(f"={len(numbers)}I", *(each << 16 for each in numbers)))


def _at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


class AlignedBytes:
    """Bytes at an address that 64 divides."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._buffer = ctypes.create_string_buffer(len(content) + 64)
        self.address = -(-ctypes.addressof(self._buffer) // 64) * 64
        ctypes.memmove(self.address, content, len(content))


class Kernels:
    """Functions of the loaded libraries, by their names without `lowtide_`."""

    def __init__(self) -> None:
        self.core = load_part(CORE)
        self.path = self.core._name
        self._functions: dict[str, Callable[..., Any]] = {}
        for part, types in _FUNCTIONS.items():
            self._functions |= functions_of(load_part(part), types)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def most_rows(self, variant: int, is_own: bool) -> int:
        """Return the most rows of an exact product; is_own: with q8 or q4."""
        most: int = (self.max_own_rows if is_own else self.max_rows)(variant)
        return most


# Cases


def _exact_cases(kernels: Kernels) -> Iterator[Case]:
    yield from _plain_products(kernels)
    yield from _between_products(kernels)
    yield from _packing(kernels)
    for matrix in matrices(kernels):
        yield from _packed_products(kernels, matrix)
    yield _experts(kernels.plain_experts, "experts in bfloat16", _plain_slots())
    yield _experts(kernels.packed_experts, "packed experts", _packed_slots(kernels))


def _int8_cases(kernels: Kernels) -> Iterator[Case]:
    for matrix in matrices(kernels):
        if matrix.type < _SECTIONS:
            yield _rounded_product(kernels, matrix)
    yield _experts(kernels.rounded_experts, "packed experts", _packed_slots(kernels))


def _plain_products(kernels: Kernels) -> Iterator[Case]:
    draw = _SeededNumbers(1)
    for outs, inputs in _SHAPES:
        x, w, bias = (draw.bf16(count) for count in (_ROWS * inputs, outs * inputs, outs))

        def run(
            variant: int,
            x: array[int] = x,
            w: array[int] = w,
            bias: array[int] = bias,
        ) -> array[int]:
            most = kernels.most_rows(variant, False)
            return _product(kernels.plain_multiply, variant, 0, x, _at(w), bias, most)

        known = _known_sums(x, _wide(w), bias, 0.0)
        yield Case(f"product of {outs} by {inputs}", run, True, known)
    outs, inputs, num_rows = 33, 130, 3
    wide_x, wide_w = draw.floats(num_rows * inputs), draw.floats(outs * inputs)

    def multiply_float32(variant: int) -> array[float]:
        out = array("f", bytes(4 * num_rows * outs))
        shape = _at(out), outs, num_rows, outs, inputs
        kernels.multiply_float32(variant, _THREADS, _at(wide_x), inputs, _at(wide_w), *shape)
        return out

    yield Case("product in float32", multiply_float32, is_bf16=False)


def _product(
    function: Callable[..., Any],
    variant: int,
    type_number: int,
    x: array[int],
    weight: Address,
    bias: array[int],
    most: int,
) -> array[int]:
    """Multiply at most `most` rows at a time, and the first one alone."""
    outs = len(bias)
    num_rows, inputs = _ROWS, len(x) // _ROWS
    out = array("H", bytes(2 * (num_rows + 1) * outs))
    pieces = [(first, min(most, num_rows - first), first) for first in range(0, num_rows, most)]
    for first, count, to in [*pieces, (0, 1, num_rows)]:
        function(
            *(variant, _THREADS, type_number, _at(x) + 2 * first * inputs, inputs, weight),
            *(_at(bias), _at(out) + 2 * to * outs, outs, count, outs, inputs),
        )
    return out


def _known_sums(
    x: array[int], w: array[float], bias: array[int], of_largest: float
) -> Sequence[Known]:
    """Compute some of a product's results.

    of_largest: how far a sum may be off, as a part of the largest input times its weights' sizes.
    """
    outs, inputs = len(bias), len(x) // _ROWS
    wide_x, wide_bias = _wide(x), _wide(bias)
    found = []
    for row, out in ((0, 0), (1, outs - 1), (7, outs // 2), (_ROWS - 1, 2)):
        own, weights = wide_x[row * inputs :][:inputs], w[out * inputs :][:inputs]
        value = math.fsum([wide_bias[out], *(a * b for a, b in zip(own, weights, strict=True))])
        largest, sizes = max(map(abs, own)), math.fsum(map(abs, weights))
        slack = abs(value) / 128 + (1e-5 + of_largest) * largest * sizes
        found.append(Known(row * outs + out, value, slack))
    return found


def _between_products(kernels: Kernels) -> Iterator[Case]:
    """Operators between products, whose bits are the same in every variant."""
    draw = _SeededNumbers(2)
    rows, heads, length = 3, 5, 130
    count, half = rows * heads * length, length // 2
    x, other, weight = draw.bf16(count), draw.bf16(count), draw.bf16(length)
    wide_weight = draw.floats(length)
    cos, sin = draw.bf16(rows * half), draw.bf16(rows * half)
    wide_cos, wide_sin = draw.floats(rows * half), draw.floats(rows * half)
    shape = rows, heads, length

    def norm(function: Callable[..., Any], weight: array[Any]) -> Callable[[int], array[int]]:
        def run(variant: int) -> array[int]:
            out = array("H", x)
            stride = heads * length
            given = _at(x), stride, _at(weight), 1e-6, _at(out), stride
            function(variant, _THREADS, *given, *shape)
            return out

        return run

    yield Case("RMS norm", norm(kernels.rms_norm, weight))
    yield Case("RMS norm in float32", norm(kernels.rms_norm_in_float32, wide_weight))

    def rotate(
        function: Callable[..., Any], cos: array[Any], sin: array[Any]
    ) -> Callable[[int], array[int]]:
        def run(variant: int) -> array[int]:
            out = array("H", x)
            addresses = _at(out), heads * length, _at(cos), _at(sin)
            function(variant, _THREADS, *addresses, *shape, half)
            return out

        return run

    yield Case("rotation", rotate(kernels.rotate, cos, sin))
    yield Case("rotation in float32", rotate(kernels.rotate_in_float32, wide_cos, wide_sin))

    def rotate_pairs(variant: int) -> array[int]:
        out = array("H", x)
        addresses = _at(out), heads * length, length, _at(wide_cos), _at(wide_sin)
        kernels.rotate_pairs(variant, _THREADS, *addresses, rows, heads, half)
        return out

    yield Case("rotation of pairs", rotate_pairs)

    def silu_times(variant: int) -> array[int]:
        out = array("H", x)
        kernels.silu_times(variant, _THREADS, _at(out), _at(other), count)
        return out

    yield Case("SiLU times", silu_times)

    def weigh_rows(variant: int) -> array[int]:
        out = array("H", x)
        kernels.weigh_rows(variant, _at(out), _at(other), rows * heads, length)
        return out

    yield Case("weighed rows", weigh_rows)

    def silu_weigh(variant: int) -> array[int]:
        out = array("H", x)
        strides = heads * length, _at(other), heads * length
        kernels.silu_weigh(variant, _THREADS, _at(out), *strides, rows, heads * length)
        return out

    yield Case("rows weighed by SiLU", silu_weigh)

    def sigmoid_weigh(variant: int) -> array[int]:
        out = array("H", x)
        strides = heads * length, _at(other), heads * length, length
        kernels.sigmoid_weigh(variant, _THREADS, _at(out), *strides, rows, heads, length)
        return out

    yield Case("heads weighed by a sigmoid", sigmoid_weigh)
    yield from _delta_net(kernels, draw)
    yield from _attention(kernels, draw)
    yield _router(kernels, draw)


def _delta_net(kernels: Kernels, draw: _SeededNumbers) -> Iterator[Case]:
    """Rows of a gated delta-net with a state."""
    key_heads, value_heads, key_width, value_width, kernel, num_rows = 2, 4, 24, 40, 4, 3
    channels, width = (
        2 * key_heads * key_width + value_heads * value_width,
        value_heads * value_width,
    )
    mixed, tail = draw.bf16(num_rows * channels), draw.bf16((kernel - 1) * channels)
    beta, time = (draw.bf16(num_rows * value_heads) for _ in range(2))
    conv, matrices = (
        draw.floats(channels * kernel),
        draw.floats(value_heads * key_width * value_width),
    )
    decay = array("f", (-abs(each) for each in draw.floats(value_heads)))
    time_bias = draw.floats(value_heads)
    spec = struct("DeltaSpec")(key_heads, value_heads, key_width, value_width, kernel, 1)

    def structs(*of_states: int) -> tuple[ctypes.Structure, ctypes.Structure]:
        given = _at(mixed), channels, _at(beta), value_heads, _at(time), value_heads
        rows = struct("DeltaRows")(*given, _at(tail), *of_states, width, num_rows)
        return rows, struct("DeltaWeights")(spec, _at(conv), _at(decay), _at(time_bias))

    def steps(variant: int) -> array[float]:
        tail_after, after = array("H", bytes(2 * len(tail))), array("f", bytes(4 * len(matrices)))
        out = array("H", bytes(2 * num_rows * width))
        given = structs(_at(tail_after), _at(matrices), _at(after), _at(out))
        kernels.delta_steps(variant, _THREADS, *map(ctypes.addressof, given))
        return array("f", [*_wide(out), *_wide(tail_after), *after])

    yield Case("delta-net", steps, is_bf16=False)

    def prepare(variant: int) -> array[float]:
        tail_after = array("H", bytes(2 * len(tail)))
        widths = 2 * key_width, value_width, 1, 1
        made = [array("f", bytes(4 * value_heads * num_rows * each)) for each in widths]
        given = *structs(_at(tail_after), 0, 0, 0), struct("DeltaChunk")(*map(_at, made))
        kernels.delta_prepare(variant, _THREADS, *map(ctypes.addressof, given))
        return array("f", [*_wide(tail_after), *(each for part in made for each in part)])

    yield Case("delta-net's chunk", prepare, is_bf16=False)


def _attention(kernels: Kernels, draw: _SeededNumbers) -> Iterator[Case]:
    key_heads, group, tokens, dim = 2, 3, 131, 128
    heads = key_heads * group
    query, sinks = draw.bf16(heads * dim), draw.floats(heads)
    keys, values = (draw.bf16(key_heads * tokens * dim) for _ in range(2))

    def attend(variant: int) -> array[int]:
        out = array("H", bytes(2 * heads * dim))
        addresses = _at(query), _at(keys), _at(values), tokens * dim, _at(out)
        sizes = key_heads, group, tokens, dim, dim
        kernels.attend(variant, _THREADS, *addresses, *sizes, 0.3, _at(sinks))
        return out

    yield Case("attention", attend)
    rows, outs, inputs = 2, 63, 130
    x, w = draw.bf16(rows * heads * inputs), draw.bf16(heads * outs * inputs)

    def multiply_heads(by_outs: bool) -> Callable[[int], array[int]]:
        def run(variant: int) -> array[int]:
            out = array("H", bytes(2 * rows * heads * outs))
            given = _at(x), heads * inputs, inputs
            weights = _at(w), outs * inputs, inputs if by_outs else outs, by_outs
            made = _at(out), heads * outs, outs
            sizes = rows, heads, outs, inputs
            kernels.multiply_heads(variant, _THREADS, *given, *weights, *made, *sizes)
            return out

        return run

    yield Case("heads' products", multiply_heads(False))
    yield Case("heads' products by outputs", multiply_heads(True), sums_dots=True)


def _router(kernels: Kernels, draw: _SeededNumbers) -> Case:
    rows, experts, chosen = 4, 33, 5
    logits, bias = draw.floats(rows * experts), draw.floats(experts)
    choice = struct("Choice")(
        num_experts=experts,
        num_chosen=chosen,
        num_groups=1,
        num_groups_kept=1,
        num_group_best=1,
        normalise=1,
        scaling_factor=1.5,
    )

    def run(variant: int) -> array[float]:
        ids, weights = array("q", bytes(8 * rows * chosen)), array("f", bytes(4 * rows * chosen))
        addresses = _at(bias), ctypes.addressof(choice), _at(ids), _at(weights)
        kernels.choose_experts(variant, _at(logits), 1, *addresses, rows)
        return array("f", [*ids, *weights])

    return Case("router", run, is_bf16=False)


def _packing(kernels: Kernels) -> Iterator[Case]:
    draw = _SeededNumbers(3)
    weights, importance = draw.bf16(_OUTS * _INPUTS), draw.floats(_INPUTS)
    for num_bits in (8, 4):
        for worth in (None, importance):

            def run(
                variant: int, num_bits: int = num_bits, worth: array[float] | None = worth
            ) -> array[int]:
                variant = min(variant, WITHOUT_DOTS)
                return _packed(kernels, variant, num_bits, weights, worth)

            of = f"{num_bits} bits" if worth is None else f"{num_bits} bits, by importance"
            yield Case(f"packing into {of}", run, is_bf16=False)


def _packed(
    kernels: Kernels,
    variant: int,
    num_bits: int,
    weights: array[int],
    worth: array[float] | None = None,
) -> array[int]:
    """Round weights [.., _INPUTS] to q8 or q4."""
    num_rows = len(weights) // _INPUTS
    out = array("B", bytes(num_rows * _INPUTS // 64 * (8 * num_bits + 4)))
    given = _at(weights), None if worth is None else _at(worth), _at(out)
    kernels.quantised_pack(variant, num_bits, 1, *given, num_rows, _INPUTS)
    return out


_SECTIONS = 1 << 16  # and from it on types that lie in sections


class Matrix(NamedTuple):
    """Stored matrix [_OUTS, _INPUTS]."""

    name: str
    type: int
    stored: AlignedBytes
    is_own: bool = False  # q8 or q4, whose variants are their own


def matrices(kernels: Kernels) -> Iterator[Matrix]:
    draw = _SeededNumbers(4)
    for number, block in enumerate(fields_of(kernels.core, "BlockType")):
        num_bits = {"q8": 8, "q4": 4}.get(block.name)
        if num_bits is None:
            num_blocks = _OUTS * _INPUTS // block.start
            content = b"".join(_block(draw, block.name, block.num_bytes) for _ in range(num_blocks))
        else:
            content = _packed(kernels, 0, num_bits, draw.bf16(_OUTS * _INPUTS)).tobytes()
        yield Matrix(block.name, number, AlignedBytes(content), num_bits is not None)
    for form, scale, has_zeros, log_group in _SECTIONED:
        number = _SECTIONS | form | scale << 2 | has_zeros << 4 | log_group << 5
        content = _sections(draw, form, scale, has_zeros, 1 << log_group)
        yield Matrix(f"type {number:#x}", number, AlignedBytes(content))


def _block(draw: _SeededNumbers, name: str, num_bytes: int) -> bytes:
    content = bytearray(draw.bytes(num_bytes))
    for place in _FLOAT16_PLACES.get(name, (0,)):
        content[place + 1] = 0x20  # about 2^-7
    if name == "MXFP4":
        content[0] = 120 + content[0] % 4  # an exponent
    return bytes(content)


def _sections(draw: _SeededNumbers, form: int, scale: int, has_zeros: bool, group: int) -> bytes:
    """Make integers in groups, or FP8 in blocks: codes, scales, zeros, each at a multiple of 64."""
    num_codes = _OUTS * _INPUTS // (2 if form == _INTS_OF_4 else 1)
    rows = -(-_OUTS // group) if form == _FP8 else _OUTS
    num_scales = rows * (_INPUTS // group)
    codes = draw.bytes(num_codes)
    if form == _FP8:
        codes = bytes(each & 0xFE for each in codes)  # no NaN
    made = {_BF16: b"\x00\x3c", _F16: b"\x00\x20", _F32: b"\x00\x00\x00\x3c"}[scale] * num_scales
    zeros = bytes(each & 15 for each in draw.bytes(num_scales)) if has_zeros else b""
    return b"".join(part + bytes(-len(part) % 64) for part in (codes, made, zeros))


def _packed_products(kernels: Kernels, matrix: Matrix) -> Iterator[Case]:
    """Unpack a matrix, and multiply with it."""
    draw = _SeededNumbers(5)
    x, bias = draw.bf16(_ROWS * _INPUTS), draw.bf16(_OUTS)

    def run(variant: int) -> array[int]:
        variant = min(variant, kernels.best_own()) if matrix.is_own else variant
        most = kernels.most_rows(variant, matrix.is_own)
        address = matrix.stored.address
        return _product(kernels.packed_multiply, variant, matrix.type, x, address, bias, most)

    def unpack(variant: int) -> array[int]:
        return _unpacked(kernels, matrix, variant)

    yield Case(f"unpacking of {matrix.name}", unpack)
    # Those of q8 and q4 are not rounded to bfloat16 before they are multiplied.
    known = _known_sums(x, _wide(unpack(0)), bias, 1 / 512 if matrix.is_own else 0.0)
    yield Case(f"product with {matrix.name}", run, True, known)


def _rounded_product(kernels: Kernels, matrix: Matrix) -> Case:
    draw = _SeededNumbers(5)
    x, bias = draw.bf16(_ROWS * _INPUTS), draw.bf16(_OUTS)

    def run(variant: int) -> array[int]:
        address = matrix.stored.address
        given = kernels.rounded_multiply, variant, matrix.type, x, address, bias
        return array("H", [*_product(*given, most=_ROWS), *_product(*given, most=5)])

    known = _known_sums(x, _wide(_unpacked(kernels, matrix, 0)), bias, 1 / 150)
    return Case(f"product with {matrix.name}", run, known=known)


def _unpacked(kernels: Kernels, matrix: Matrix, variant: int) -> array[int]:
    out = array("H", bytes(2 * _OUTS * _INPUTS))
    variant = min(variant, kernels.best_own()) if matrix.is_own else variant
    address = matrix.stored.address
    kernels.packed_unpack(variant, matrix.type, address, _OUTS, _INPUTS, None, 0, _OUTS, _at(out))
    return out


# Experts


class _Slots(NamedTuple):
    """Slots of gate, up and down, one after the other."""

    content: AlignedBytes
    types: array[int]
    starts: tuple[int, ...]  # of the parts of slot 0
    slot_bytes: int
    hidden: int
    width: int


def _plain_slots() -> _Slots:
    hidden, width = 130, 67
    part_bytes = 2 * hidden * width
    content = _SeededNumbers(6).bf16(_NUM_EXPERTS * 3 * hidden * width).tobytes()
    starts = 0, part_bytes, 2 * part_bytes
    return _Slots(
        AlignedBytes(content), array("i", [0, 0, 0]), starts, 3 * part_bytes, hidden, width
    )


def _packed_slots(kernels: Kernels) -> _Slots:
    """Make parts of the types that files of Q4_K_M mix."""
    hidden, width = 512, 256
    draw = _SeededNumbers(7)
    blocks = {block.name: block for block in fields_of(kernels.core, "BlockType")}
    names = "Q4_K", "Q4_K", "Q6_K"
    numbers = array("i", [[*blocks].index(name) for name in names])
    sizes, content = [], b""
    for _ in range(_NUM_EXPERTS):
        for name in names:
            block = blocks[name]
            count = hidden * width // block.start
            content += b"".join(_block(draw, name, block.num_bytes) for _ in range(count))
            sizes.append(count * block.num_bytes)
    starts = 0, sizes[0], sizes[0] + sizes[1]
    return _Slots(AlignedBytes(content), numbers, starts, sum(sizes[:3]), hidden, width)


_NUM_EXPERTS, _CHOSEN = 3, array("q", [0, 2, 1, 2, 0, 1])  # two for each of three tokens


def _experts(function: Callable[..., Any], name: str, slots: _Slots) -> Case:
    num_tokens, k = 3, 2
    draw = _SeededNumbers(8)
    x, weights = draw.bf16(num_tokens * slots.hidden), draw.floats(num_tokens * k)
    numbers = array("q", range(_NUM_EXPERTS))
    addresses = [slots.content.address + start for start in slots.starts]
    places = struct("ExpertPlaces")(*addresses, slots.slot_bytes, None, None, None)

    def run(variant: int) -> array[float]:
        pairs = num_tokens * k
        scratch = [array("H", bytes(2 * pairs * slots.hidden)) for _ in range(3)]
        out = array("f", bytes(4 * num_tokens * slots.hidden))
        given = _at(slots.types), _at(x), _at(_CHOSEN), _at(weights), _at(numbers)
        made = *map(_at, scratch), _at(out)
        sizes = num_tokens, k, slots.hidden, slots.width
        function(variant, _THREADS, *given, ctypes.addressof(places), *made, *sizes)
        return out

    return Case(name, run, sums_dots=True, is_bf16=False)


if __name__ == "__main__":
    sys.exit(main())
