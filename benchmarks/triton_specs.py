"""Ahead-of-time compilation specs of all Triton kernels: the arguments of a common launch, without a GPU.

Local operators: wide rows, and routing to 8 of 256 experts. Linear layers: forward and backward. Device executor: 8
ranks, 1024 rows per expert on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_comm.gpu.protocol import MAX_SLICES
from moe_comm.kernels.triton import (
    biases,
    grouped_mm,
    grouped_mm_fp8,
    linear,
    quantize,
    router,
    rows,
    slot_order,
    swiglu,
    swiglu_gradient,
)
from moe_comm.kernels.triton.grouped_mm import tiling_for
from moe_comm.kernels.triton.launch import DTYPES
from moe_comm.overlap.triton import arrived_mm, publish_mm
from moe_comm.overlap.triton.programs import (
    TILES,
    Programs,
    await_rows_kernel,
    enter_kernel,
    gather_matmul_kernel,
    matmul_scatter_kernel,
    push_rows_kernel,
    sum_tiles_kernel,
)
from moe_comm.overlap.triton.tile_list import EXPERTS_AT_ONCE, TILES_AT_ONCE, tile_list_kernel

TARGETS = (80, 90, 100)
"""sm_80 (A100), sm_90 (H100, H200), sm_100 (B200)."""
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with the arguments of a common launch.

    name: unique within a target; used in tables. kernel: the ``@triton.jit`` function.
    types: Triton types ("*bf16", "i32", "i64") of all arguments that are not constants, by name.
    constants: values of the ``tl.constexpr`` arguments, and of arguments that are 1 (strides).
    aligned: names of arguments that are multiples of 16, pointers and numbers.
    cooperative: whether the GPU must run all programs at the same time, because they wait for each other.
    targets: compute capabilities, 90 for sm_90. Specs with the same name have different targets.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    cooperative: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[int, ...] = TARGETS


BF16, FP32 = torch.bfloat16, torch.float32
_EXACT = {"enable_fp_fusion": False}
"""Options of kernels whose multiplications and additions must round separately."""
_ROW_POINTERS = (
    "x_ptr",
    "rows_ptr",
    "y_ptr",
    "grad_ptr",
    "out_ptr",
    "h_ptr",
    "grad_h_ptr",
    "act_ptr",
    "w_ptr",
    "biases_ptr",
)
"""Pointer arguments with the rows' dtype. ``_POINTERS`` has the types of the others."""
_POINTERS = {
    **dict.fromkeys(("index_ptr", "place_ptr", "counts_ptr", "ids_ptr", "order_ptr", "load_ptr"), "*i64"),
    **dict.fromkeys(("ends_ptr", "expert_ptr", "starts_ptr", "totals_ptr", "fault_ptr"), "*i64"),
    **dict.fromkeys(("weights_ptr", "dots_ptr", "scale_ptr", "logits_ptr", "bias_ptr", "scores_ptr"), "*fp32"),
    **dict.fromkeys(("grad_weights_ptr", "grad_scores_ptr", "sections_ptr"), "*fp32"),
    **dict.fromkeys(("packed_ptr", "values_ptr"), "*u8"),
}
_NUMBERS = dict.fromkeys(("scale", "largest", "alpha", "limit"), "fp32")
_UNALIGNED = ("experts", "rows", "tokens", "slots", "chunks", "sections", "scale", "largest", "alpha", "limit",
              "scale_stride", "capacity")  # fmt: skip
"""Numbers that are not multiples of 16. Widths and strides are."""


def _spec(
    name: str, kernel: Any, dtype: torch.dtype, constants: dict[str, Any], warps: int = 4, stages: int = 3,
    exact: bool = False, targets: tuple[int, ...] = TARGETS, words: str | None = None,
) -> KernelSpec:  # fmt: skip
    types = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in _ROW_POINTERS:
            types[argument] = words or POINTERS[dtype]
        else:
            types[argument] = _POINTERS.get(argument) or _NUMBERS.get(argument, "i32")
    aligned = tuple(argument for argument in types if argument not in _UNALIGNED)
    title = f"{name}, {str(dtype).removeprefix('torch.')}" if words is None else name
    return KernelSpec(title, kernel, types, constants, aligned, warps, stages, False, _EXACT if exact else {}, targets)


def _rows_specs(dtype: torch.dtype) -> tuple[KernelSpec, ...]:
    element = {"ELEMENT": DTYPES[dtype]}
    tile = {"CLAMPED": False, "ROWS": 1, "COLUMNS": swiglu.TILE_ELEMENTS}
    sums = {"WEIGHTED": True, "TOP_K": 8, "UNROLL": True, "TOKENS": 1, "COLUMNS": rows.TILE_ELEMENTS}
    scale = {"DOTTED": True, "SLOTS": rows.SLOTS, "COLUMNS": rows.COLUMNS, "STEPS": rows.STEPS}
    return (
        _spec("weighted_sum, forward", rows.weighted_sum_kernel, dtype, {**element, **sums}, exact=True),
        _spec(
            "weighted_sum, backward", rows.scale_rows_kernel, dtype,
            {**element, **scale, "PLACED": True, "TOP_K": 8}, exact=True,
        ),
        _spec(
            "gradient of biases", biases.sum_rows_kernel, dtype,
            {**element, "OUT": DTYPES[dtype], "WEIGHTED": True, "BLOCK_E": 128, "GROUP": biases.GROUP,
             "COLUMNS": biases.COLUMNS}, exact=True,
        ),
        _spec(
            "dot products with biases", biases.add_bias_dots_kernel, dtype,
            {"PLACED": True, "SLOTS": biases.SLOTS}, exact=True,
        ),
        _spec("swiglu, forward", swiglu.swiglu_kernel, dtype, {**element, **tile}, exact=True),
        _spec(
            "swiglu, backward", swiglu.swiglu_backward_kernel, dtype, {**element, **tile, "RECOMPUTE": True},
            exact=True,
        ),
        _spec(
            "swiglu, backward, times weights", swiglu.weighted_swiglu_backward_kernel, dtype,
            {**element, "CLAMPED": False, "PLACED": True, "DOTTED": True, "SLOTS": swiglu.SLOTS, "STEPS": swiglu.STEPS},
            exact=True,
        ),
        _spec(
            "clamped swiglu, forward", swiglu.swiglu_kernel, dtype, {**element, **tile, "CLAMPED": True}, exact=True
        ),
        _spec(
            "clamped swiglu, backward, times weights", swiglu.weighted_swiglu_backward_kernel, dtype,
            {**element, "CLAMPED": True, "PLACED": True, "DOTTED": True, "SLOTS": swiglu.SLOTS, "STEPS": swiglu.STEPS},
            exact=True,
        ),
    )  # fmt: skip


def _copy_specs() -> tuple[KernelSpec, ...]:
    tile = {"ROWS": 1, "COLUMNS": rows.TILE_ELEMENTS}
    chunk = {"SLOTS": slot_order.SLOTS, "EXPERTS": slot_order.EXPERTS}
    placed = {**chunk, "CHUNKS": slot_order.CHUNKS, "SUMMED": False, "ORDERED": False, "REPORTED": True}
    count = _spec("count_chunks", slot_order.count_chunks_kernel, BF16, chunk, words="*i64")
    place = _spec("place_slots", slot_order.place_slots_kernel, BF16, placed, words="*i64")
    return (
        _spec("take_rows", rows.take_rows_kernel, BF16, {**tile, "TOP_K": 0}, words="*i64"),
        _spec("copy_rows", rows.take_rows_kernel, BF16, {**tile, "TOP_K": 8}, words="*i64"),
        _spec(
            "sum of sections",
            swiglu_gradient.add_sections_kernel,
            BF16,
            {"PLACED": True, "SLOTS": swiglu_gradient.SLOTS},
            words="*fp32",
        ),
        replace(count, types={**count.types, "counts_ptr": "*i32"}),
        replace(place, types={**place.types, "counts_ptr": "*i32"}),
    )


def _quantize_specs() -> tuple[KernelSpec, ...]:
    specs = []
    for name, fused in (("quantize", False), ("swiglu_quantize, forward", True)):
        for per_row in (False, True):
            for targets in ((80,), (90, 100)):
                constants = {
                    "ELEMENT": DTYPES[BF16], "SWIGLU": fused, "PER_ROW": per_row, "POWER_OF_TWO": False,
                    "CONVERTS": targets[0] >= quantize.CONVERTS_FROM, "BLOCK": quantize.BLOCK, "BLOCKS": 8,
                }  # fmt: skip
                title = f"{name}, a scale a row" if per_row else name
                specs.append(_spec(title, quantize.quantize_kernel, BF16, constants, exact=True, targets=targets))
    for name, counted in (("dequantize", False), ("dequantize, counted", True)):
        constants = {
            "ELEMENT": DTYPES[BF16], "PER_ROW": False, "COUNTED": counted, "BLOCK": quantize.BLOCK, "BLOCKS": 8
        }  # fmt: skip
        specs.append(_spec(name, quantize.dequantize_kernel, BF16, constants))
    for targets in ((80,), (90, 100)):
        constants = {
            "CONVERTS": targets[0] >= quantize.CONVERTS_FROM, "BLOCK": quantize.BLOCK, "w_stride_inner": 1
        }  # fmt: skip
        spec = _spec(
            "quantize_weights", quantize.quantize_weights_kernel, BF16, constants, 8, exact=True, targets=targets
        )
        specs.append(spec)
    return tuple(specs)


def _router_specs() -> tuple[KernelSpec, ...]:
    sizes = {"TOP_K": 8, "BLOCK_E": 256, "TOKENS": router.TILE_ELEMENTS // 256, "NORMALIZE": True}
    no_groups = {"NUM_GROUPS": 1, "TOP_GROUPS": 1, "BLOCK_G": 1, "TOP_TWO": False, "BIASED": False}
    groups = {"NUM_GROUPS": 8, "TOP_GROUPS": 4, "BLOCK_G": 8, "TOP_TWO": True, "BIASED": True}
    specs = []
    for score, of_score in (("softmax", no_groups), ("sigmoid", groups), ("topk_softmax", no_groups)):
        common = {**sizes, "SCORE": router.SCORES[score]}
        forward = {**common, **of_score, "BLOCK_K": 8, "SCORED": True, "COUNTED": True}
        backward = {**common, "WEIGHTED": True, "SCORED": True, "ZEROS": 256}
        specs.append(_spec(f"route, forward, {score}", router.route_kernel, FP32, forward))
        of_logits = _spec(f"route, backward, {score}", router.route_backward_kernel, FP32, backward)
        specs.append(replace(of_logits, types={**of_logits.types, "zeros_ptr": "*i32"}))
    constants = {"ELEMENT": DTYPES[FP32], "WHOLE": True, **linear.TILING.blocks, "w_stride_inner": 1}
    logits = _spec("logits", linear.linear_kernel, BF16, constants, linear.TILING.warps, linear.TILING.stages)
    specs.append(replace(logits, types={**logits.types, "out_ptr": "*fp32"}))
    tiling = linear.GRADIENT_TILING
    constants = {
        "ELEMENT": DTYPES[BF16], "ADDED": True, "SUMMED": True, "PART": linear.PART, **tiling.blocks,
        "w_stride_column": 1,
    }  # fmt: skip
    gradients = _spec(
        "logits, gradients of tokens and weights", linear.linear_backward_kernel, BF16, constants,
        tiling.warps, tiling.stages,
    )  # fmt: skip
    types = {"grad_ptr": "*fp32", "parts_ptr": "*fp32", "sums_ptr": POINTERS[BF16], "ended_ptr": "*i32"}
    specs.append(replace(gradients, types={**gradients.types, **types}))
    constants = {"ELEMENT": DTYPES[BF16], "COLUMNS": linear.SUM_ELEMENTS}
    parts = _spec("logits, sum of parts", linear.sum_parts_kernel, BF16, constants)
    specs.append(replace(parts, types={**parts.types, "parts_ptr": "*fp32"}))
    return tuple(specs)


def _grouped_specs(dtype: torch.dtype) -> tuple[KernelSpec, ...]:
    element = {"ELEMENT": DTYPES[dtype]}
    specs = []
    for targets in ((target,) for target in TARGETS):
        many_rows = grouped_mm.tiling_for(dtype, targets[0], 1000)
        few_rows = grouped_mm.tiling_for(dtype, targets[0], 1)
        for name, tiling, unit_stride in (
            ("grouped_mm, forward", many_rows, "w_stride_inner"),
            ("grouped_mm, forward, few rows", few_rows, "w_stride_inner"),
            ("grouped_mm, gradient of rows", many_rows, "w_stride_column"),
        ):
            constants = {**element, **tiling.blocks, "WHOLE": True, "BIASED": False, unit_stride: 1}
            kernel = grouped_mm.grouped_mm_kernel
            specs.append(_spec(name, kernel, dtype, constants, tiling.warps, tiling.stages, targets=targets))
        for name, add, wide in (
            ("gradient of weights", False, False),
            ("gradient of weights, in float32", False, True),
            ("gradient of weights, added in float32", True, True),
        ):
            if wide and dtype == FP32:
                continue
            weights = grouped_mm.tiling_for(dtype, targets[0], 1000, "added" if add else "weights")
            constants = {**element, **weights.blocks, "ADD": add, "out_stride_inner": 1}
            if wide:
                constants["ELEMENT"] = DTYPES[FP32]
            spec = _spec(
                f"grouped_mm, {name}", grouped_mm.grouped_weight_grad_kernel, dtype, constants, weights.warps,
                weights.stages, targets=targets,
            )  # fmt: skip
            specs.append(replace(spec, types={**spec.types, "out_ptr": POINTERS[FP32]}) if wide else spec)
    return tuple(specs)


def _tma_specs() -> tuple[KernelSpec, ...]:
    specs = []
    for target in (target for target in TARGETS if target >= grouped_mm.TMA_CAPABILITY):
        for name, mean_rows, transposed in (
            ("grouped_mm, with TMA, forward", 1000, False),
            ("grouped_mm, with TMA, forward, few rows", 1, False),
            ("grouped_mm, with TMA, gradient of rows", 1000, True),
        ):
            tiling = grouped_mm.tiling_for(BF16, target, mean_rows)
            constants = {"ELEMENT": DTYPES[BF16], "TRANSPOSED": transposed, "BIASED": False, **tiling.blocks}
            kernel = grouped_mm.grouped_mm_tma_kernel
            spec = _spec(name, kernel, BF16, constants, tiling.warps, grouped_mm.TMA_STAGES, targets=(target,))
            w_block = (tiling.inner, tiling.columns) if transposed else (tiling.columns, tiling.inner)
            blocks = {"rows": (tiling.rows, tiling.inner), "w": w_block}
            described = {f"{who}_desc": f"tensordesc<bf16[{m}, {n}]>" for who, (m, n) in blocks.items()}
            aligned = tuple(argument for argument in spec.aligned if argument not in described)
            specs.append(replace(spec, types={**spec.types, **described}, aligned=aligned))
    return tuple(specs)


def _fp8_specs() -> tuple[KernelSpec, ...]:
    specs = []
    for target in TARGETS:
        converts = target >= quantize.CONVERTS_FROM
        for name, mean_rows, sources in (
            ("grouped_mm_fp8, forward", 1000, 0),
            ("grouped_mm_fp8, forward, few rows", 1, 0),
            ("grouped_mm_fp8, forward, low latency", 1, 8),
        ):
            tiling = grouped_mm_fp8.fp8_tiling_for(target, mean_rows)
            constants = {
                "ELEMENT": DTYPES[BF16], "WHOLE": True, "CONVERTS": converts, "SOURCES": sources,
                "scale_stride_block": 1, "w_scale_stride_block": 1, **tiling.blocks,
            }  # fmt: skip
            kernel = grouped_mm_fp8.grouped_mm_fp8_kernel
            spec = _spec(name, kernel, BF16, constants, tiling.warps, tiling.stages, targets=(target,))
            words = "*fp8e4nv" if converts else "*u8"
            types = {**spec.types, "values_ptr": words, "w_ptr": words, "w_scale_ptr": "*fp32"}
            aligned = tuple(a for a in spec.aligned if not a.startswith("w_scale_stride"))
            specs.append(replace(spec, types=types, aligned=aligned))
    return tuple(specs)


LOCAL_KERNELS: tuple[KernelSpec, ...] = (
    *_copy_specs(),
    *_rows_specs(BF16),
    *_rows_specs(FP32),
    *_quantize_specs(),
    *_router_specs(),
    *_grouped_specs(BF16),
    *_grouped_specs(FP32),
    *_tma_specs(),
    *_fp8_specs(),
)


_TURN = {"rank": "i32", "world": "i32", "turn": "i32", "call": "i32", "first_flag": "i32", "data": "i32"}
_ALIGNED = ("x_ptr", "b_ptr", "y_ptr", "peers_ptr", "fault_ptr", "inner", "columns", "width", "data")


def _linear_specs(dtype: torch.dtype) -> tuple[KernelSpec, ...]:
    programs, row = Programs(1, 1, TILES[dtype]), POINTERS[dtype]
    memory = {"peers_ptr": "*i64", "fault_ptr": "*i64"}
    tensors = {"x_ptr": row, "b_ptr": row, "y_ptr": row, **memory}
    sizes = {"rows": "i32", "inner": "i32", "columns": "i32"}
    tile = programs.tile
    copy = {"DTYPE": DTYPES[dtype], "CHUNK": tile.rows, "COPY": programs.copy}
    name = str(dtype).removeprefix("torch.")
    specs = []
    # The forward pass multiplies by weight.T, the backward pass by the weight.
    strides = ("b_stride_n", "b_stride_k")
    for direction, (strided, dense) in (("forward", strides), ("backward", strides[::-1])):
        types = {**tensors, **sizes, strided: "i32", **_TURN, "timeout_ns": "i64"}
        constants = {dense: 1, "ALIGNED": True, **tile.blocks}
        for kernel, count, extra in (
            (gather_matmul_kernel, "moving", copy),
            (matmul_scatter_kernel, "computing", {"DTYPE": DTYPES[dtype]}),
        ):
            specs.append(
                KernelSpec(
                    f"{kernel.__name__.removesuffix('_kernel')}, {direction}, {name}", kernel, {**types, count: "i32"},
                    {**constants, **extra}, (*_ALIGNED, strided), tile.warps, tile.stages,
                )
            )  # fmt: skip
    sizes = {"rows": "i32", "width": "i32"}
    push = {**memory, "x_ptr": row, **sizes, **_TURN, "timeout_ns": "i64"}
    wait = {**memory, **sizes, **_TURN, "timeout_ns": "i64"}
    specs.append(KernelSpec(f"push_rows, {name}", push_rows_kernel, push, {**copy, "ALIGNED": True}, _ALIGNED))
    specs.append(KernelSpec(f"await_rows, {name}", await_rows_kernel, wait, copy, _ALIGNED))
    if dtype == torch.bfloat16:  # beside GEMMs in CUDA C++
        entry = {**memory, **{name: _TURN[name] for name in ("rank", "world", "turn", "call")}, "timeout_ns": "i64"}
        specs.append(KernelSpec("enter", enter_kernel, entry, {}, _ALIGNED))
        sizes = {"y_ptr": row, "rows": "i32", "columns": "i32"}
        sums = {**memory, **sizes, **_TURN, "timeout_ns": "i64"}
        del sums["call"]
        block = {"DTYPE": DTYPES[dtype], "BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
        specs.append(KernelSpec(f"sum_tiles, {name}", sum_tiles_kernel, sums, block, _ALIGNED, tile.warps))
    return tuple(specs)


LINEAR_KERNELS: tuple[KernelSpec, ...] = (*_linear_specs(torch.bfloat16), *_linear_specs(torch.float32))
"""The kernels as launched forward and backward."""


def _product(kernel: Any, varying: tuple[str, ...], dtype: torch.dtype, target: int, **constants: int) -> KernelSpec:
    """Return the spec of a GEMM with matrices of whole steps, whose inner dimension is contiguous."""
    tiling = tiling_for(dtype, target, 1024)
    constants |= {"WHOLE": True, "BIASED": False, **tiling.blocks, "w_stride_inner": 1}
    types = {}
    for argument in kernel.arg_names:
        if argument in constants or argument == "ELEMENT":
            continue
        if argument in ("rows_ptr", "w_ptr", "out_ptr", "biases_ptr"):
            types[argument] = POINTERS[dtype]
        elif argument.endswith("_ptr"):
            types[argument] = "*i64"
        else:
            types[argument] = "i64" if argument == "timeout_ns" else "i32"
    aligned = tuple(argument for argument in types if argument not in varying)
    name = f"{kernel.__name__.removesuffix('_kernel')}, {str(dtype).removeprefix('torch.')}"
    constants |= {"ELEMENT": DTYPES[dtype]}
    return KernelSpec(name, kernel, types, constants, aligned, tiling.warps, tiling.stages, False, targets=(target,))


def _products(dtype: torch.dtype, target: int) -> tuple[KernelSpec, KernelSpec]:
    """Return the specs of the first GEMM, and of the last one for rows of 1024 columns or more."""
    return (
        _product(arrived_mm.arrived_mm_kernel, arrived_mm.VARYING, dtype, target),
        _product(publish_mm.publish_mm_kernel, publish_mm.VARYING, dtype, target, SLICES=MAX_SLICES),
    )


def _tile_list() -> KernelSpec:
    constants = {"WORLD": 8, "SOURCES": 16, "ROWS": 128}
    constants |= {"EXPERTS": EXPERTS_AT_ONCE, "TILES": TILES_AT_ONCE}
    names = [argument for argument in tile_list_kernel.arg_names if argument not in constants]
    types = {argument: "*i64" if argument.endswith("_ptr") else "i32" for argument in names}
    pointers = tuple(argument for argument in names if argument.endswith("_ptr"))
    return KernelSpec("tile_list", tile_list_kernel, types, constants, pointers, cooperative=False)


EXPERT_KERNELS: tuple[KernelSpec, ...] = (
    _tile_list(),
    *(spec for dtype in (torch.bfloat16, torch.float32) for target in TARGETS for spec in _products(dtype, target)),
)
"""The kernels in bfloat16 and in float32."""

KERNELS: tuple[KernelSpec, ...] = (*LINEAR_KERNELS, *EXPERT_KERNELS, *LOCAL_KERNELS)
