"""Compiles the Triton kernels for GPUs that need not be there; prints what they use.

One JSON object: per kernel, how often each of `INSTRUCTIONS` occurs in its PTX, and the shared
memory of a block. Run by test_triton.py as a process of its own, because the interpreter is chosen
at import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowtide.kernels import (
    triton_experts,
    triton_head,
    triton_routing,
    triton_rows,
)

INSTRUCTIONS = (
    "mma.sync",
    "cp.async.cg",
    "cp.async.ca",
    "fma.",
    "mul.rn.f32",
    "add.rn.f32",
    "wgmma.mma",
    "tcgen05.mma",
)
TARGET = GPUTarget("cuda", 80, 32)

TILES = {"slots": "*i32", "starts": "*i32", "stops": "*i32", "num_tiles": "*i32"}
MATRICES = {"weights": "*bf16", "slot_stride": "i32", "x": "*bf16", "out": "*bf16"}
MATRICES |= {"hidden": "i32", "width": "i32"}


def blocks(
    rows: int,
    chosen: Mapping[str, Mapping[int, triton_experts.Blocks]],
    form: str = "plain",
    length: int = 2048,
    is_clamped: bool = False,
) -> dict[str, int | str]:
    """The constants of a launch over tiles of `rows` pairs and matrices with rows of a length."""
    columns, depth, _ = chosen[form][rows]
    shape = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth}
    kind = {"FORMAT": form, "LENGTH": 0 if form == "plain" else length, "CLAMPED": is_clamped}
    return {**shape, **kind, "UPCAST": False}


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, int | str | None],
    target: GPUTarget = TARGET,
    **options: Any,
) -> dict[str, int]:
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types},
    )
    done = triton.compile(source, target=target, options=options)
    found = {instruction: done.asm["ptx"].count(instruction) for instruction in INSTRUCTIONS}
    return {**found, "shared_bytes": done.metadata.shared}


def head(is_guided: bool, dtype: str, capability: int) -> dict[str, int]:
    """`reduce_tiles` with all that can be wanted."""
    types = {"x": f"*{dtype}", "weight": f"*{dtype}", "bests": "*i32"}
    types |= {name: "*fp32" for name in ("greatests", "rests", "seconds", "moments")}
    types |= {"num_rows": "i32", "hidden": "i32", "vocab_size": "i32"}
    constants: dict[str, int | None] = {
        "TILE": triton_head.TILE_COLUMNS,
        "BLOCK_M": triton_head._BLOCK_ROWS,
        "BLOCK_N": triton_head._BLOCK_COLUMNS,
        "BLOCK_K": triton_head._DEPTH_BYTES // {"bf16": 2, "fp32": 4}[dtype],
        "UPCAST": False,
    }
    if is_guided:
        types |= {"other_x": f"*{dtype}", "factors": "*fp32"}
    else:
        constants |= {"other_x": None, "factors": None}
    target = GPUTarget("cuda", capability, 32)
    options = triton_head.launch_options(is_guided)
    return compiled(triton_head._reduce_tiles, types, constants, target, **options)


def main() -> None:
    offsets = {"gate_offset": "i32", "up_offset": "i32", "gate_bias": "i32", "up_bias": "i32"}
    plan = {"counts": "*i64", "slot_of": "*i32", "num_experts": "i32", **TILES}
    place = {"source": "*bf16", "pairs": "*i32", "out": "*bf16", "hidden": "i32"}
    top = {"rank": "*fp32", "chosen": "*i64", "num_experts": "i32", "num_chosen": "i32"}
    sort = {"experts": "*i64", "token_of": "*i64", "part_of": "*i64", "counts": "*i64"}
    sort |= {"num_pairs": "i32", "k": "i32"}
    combine = {"parts": "*bf16", "part_of": "*i64", "weights": "*fp32", "out": "*fp32"}
    combine |= {"hidden": "i32", "k": "i32"}
    choose = {"logits": "*fp32", "bias": "*fp32", "chosen": "*i64", "weights": "*fp32"}
    choose |= {"num_experts": "i32", "num_chosen": "i32", "num_groups": "i32"}
    choose |= {"num_groups_kept": "i32", "scaling_factor": "fp32", "sum_epsilon": "fp32"}
    sigmoid = {"IS_SIGMOID": True, "NORMALISE": True, "ROUNDS_WEIGHTS": False}
    sigmoid |= {"NUM_GROUP_BEST": 2, "BLOCK_G": 8, "BLOCK_S": 32}  # LLaDA2's 256 experts
    softmax = {"IS_SIGMOID": False, "NORMALISE": True, "ROUNDS_WEIGHTS": True, "bias": None}
    softmax |= {"NUM_GROUP_BEST": 1, "BLOCK_G": 1, "BLOCK_S": 128}  # Qwen3's
    softmax["OF_CHOSEN"] = sigmoid["OF_CHOSEN"] = False
    of_chosen = {**softmax, "OF_CHOSEN": True, "NORMALISE": False}  # gpt-oss'
    narrow_choose = {name: kind for name, kind in choose.items() if name != "bias"}
    narrow_choose["logits"] = "*bf16"
    norm = {"x": "*bf16", "x_stride": "i32", "weight": "*bf16", "eps": "fp32", "out": "*bf16"}
    norm |= {"out_stride": "i32", "length": "i32"}
    rotate = {"x": "*bf16", "row_stride": "i32", "head_stride": "i32", "cos": "*bf16"}
    rotate |= {"sin": "*bf16", "half": "i32", "pair_step": "i32", "partner": "i32"}
    both = {"x": "*bf16", "row_stride": "i32", "num_queries": "i32", "query_weight": "*bf16"}
    both |= {"key_weight": "*bf16", "eps": "fp32", "cos": "*bf16", "sin": "*bf16"}
    both |= {"half": "i32", "head_dim": "i32"}
    one_warp: dict[str, Any] = {"num_warps": 1}
    unfused = {**one_warp, "enable_fp_fusion": False}
    wide_weights = {"weights": "*fp32", "x": "*fp32", "out": "*fp32"}
    gate_up, gate_up_types = triton_experts._gate_up, MATRICES | TILES | offsets
    down, down_types = (
        triton_experts._down,
        MATRICES | TILES | {"down_offset": "i32", "down_bias": "i32"},
    )
    small, large = triton_experts.TILE_SIZES
    gate_up_blocks, down_blocks = triton_experts.GATE_UP_BLOCKS, triton_experts.DOWN_BLOCKS
    stages = {"num_stages": triton_experts._NUM_STAGES}
    found = {
        "gate_up": compiled(gate_up, gate_up_types, blocks(small, gate_up_blocks), **stages),
        "down": compiled(down, down_types, blocks(small, down_blocks), **stages),
        **{
            f"float32 {kernel.__name__} {rows} on {capability}": compiled(
                kernel,
                types | wide_weights,
                blocks(rows, chosen),
                GPUTarget("cuda", capability, 32),
                **stages,
            )
            for kernel, types, chosen, rows, capability in (
                (gate_up, gate_up_types, gate_up_blocks, small, 86),  # an RTX 3090
                (gate_up, gate_up_types, gate_up_blocks, large, 86),
                (down, down_types, down_blocks, small, 120),  # an RTX 5090
            )
        },
        **{
            f"{form} {kernel.__name__} {rows} on {capability}": compiled(
                kernel,
                types | {"weights": "*u8"},
                blocks(rows, chosen, form, length, is_clamped=form == "MXFP4"),
                GPUTarget("cuda", capability, 32),
                num_warps=chosen[form][rows].num_warps,
                **stages,
            )
            for form, length in (("q8", 2048), ("q4", 1408), ("MXFP4", 2880))
            for kernel, types, chosen, rows, capability in (
                (gate_up, gate_up_types, gate_up_blocks, small, 80),
                (gate_up, gate_up_types, gate_up_blocks, large, 90),
                (down, down_types, down_blocks, small, 80),
                (gate_up, gate_up_types, gate_up_blocks, small, 89),
                (down, down_types, down_blocks, small, 100),
            )
        },
        **{
            f"bf16 {kernel.__name__} {rows} on {capability}": compiled(
                kernel,
                types,
                blocks(rows, chosen),
                GPUTarget("cuda", capability, 32),
                **stages,
            )
            for capability in (89, 100)  # an RTX 4060, a B200
            for kernel, types, chosen, rows in (
                (gate_up, gate_up_types, gate_up_blocks, large),
                (down, down_types, down_blocks, small),
            )
        },
        "float32 q4": compiled(
            down,
            down_types | wide_weights | {"weights": "*u8"},
            blocks(small, down_blocks, "q4"),
            GPUTarget("cuda", 86, 32),
            **stages,
        ),
        "hopper": compiled(  # bfloat16 on a Hopper: products of 64 rows by warp groups
            gate_up,
            gate_up_types,
            blocks(large, gate_up_blocks),
            GPUTarget("cuda", 90, 32),
            **stages,
        ),
        **{
            f"head {dtype}{' guided' if is_guided else ''} on {capability}": head(
                is_guided, dtype, capability
            )
            for is_guided, dtype, capability in (
                (False, "bf16", 80),
                (True, "bf16", 86),
                (False, "fp32", 86),
                (True, "fp32", 86),
                (False, "bf16", 90),
                (True, "bf16", 90),
                (False, "bf16", 89),
                (False, "bf16", 100),
                (True, "bf16", 120),
            )
        },
        "join": compiled(
            triton_head._join_tiles,
            {name: "*fp32" for name in ("greatests", "rests", "seconds", "moments")}
            | {"greatest_out": "*fp32", "probability_out": "*fp64", "second_out": "*fp64"}
            | {"entropy_out": "*fp64", "bests": "*i32", "best_out": "*i64"}
            | {"num_rows": "i32", "num_tiles": "i32"},
            {"BLOCK_R": triton_head._JOINED_ROWS, "BLOCK_T": 256},
        ),
        "plan": compiled(triton_experts._plan_tiles, plan, {"BLOCK_M": 16, "BLOCK_E": 256}),
        "place": compiled(triton_experts._place_rows, place, {"BLOCK_M": 16, "BLOCK_H": 256}),
        "top": compiled(triton_routing._top_experts, top, {"BLOCK_E": 256}, num_warps=1),
        "sort": compiled(triton_routing._sort_pairs, sort, {"BLOCK": 1024}),
        "combine": compiled(
            triton_routing._combine, combine, {"BLOCK_H": 1024}, enable_fp_fusion=False
        ),
        **{
            f"{name} on {capability}": compiled(
                kernel, types, constants, GPUTarget("cuda", capability, 32), **options
            )
            for capability in (80, 89, 100, 120)
            for name, kernel, types, constants, options in (
                ("sigmoid", triton_routing._choose_experts, choose, sigmoid, one_warp),
                ("softmax", triton_routing._choose_experts, narrow_choose, softmax, one_warp),
                ("chosen", triton_routing._choose_experts, narrow_choose, of_chosen, one_warp),
                ("norm", triton_rows._rms_norm, norm, {"BLOCK": 2048}, {"num_warps": 4}),
                ("rotate", triton_rows._rotate, rotate, {"BLOCK": 64}, unfused),
                (
                    "normalise and rotate",
                    triton_rows._normalise_and_rotate,
                    both,
                    {"BLOCK_HALF": 32, "BLOCK_REST": 64},
                    unfused,
                ),
            )
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
