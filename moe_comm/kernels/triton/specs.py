"""Ahead-of-time compilation specs of the local operators, for wide rows and routing to 8 of 256 experts."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.kernels.triton import grouped_mm, quantize, router, scale_rows, swiglu, take_rows, weighted_sum
from moe_comm.kernels.triton.launch import DTYPES
from moe_comm.kernels.triton.spec import POINTERS, TARGETS, KernelSpec

BF16, FP32 = torch.bfloat16, torch.float32
_EXACT = {"enable_fp_fusion": False}
"""Options of kernels whose multiplications and additions must round separately."""
_ROW_POINTERS = ("x_ptr", "rows_ptr", "y_ptr", "grad_ptr", "out_ptr", "h_ptr", "grad_h_ptr", "act_ptr", "w_ptr")
"""Pointer arguments with the rows' dtype. ``_POINTERS`` has the types of the others."""
_POINTERS = {
    **dict.fromkeys(("index_ptr", "place_ptr", "counts_ptr", "ids_ptr"), "*i64"),
    **dict.fromkeys(("weights_ptr", "dots_ptr", "scale_ptr", "logits_ptr", "bias_ptr", "scores_ptr"), "*fp32"),
    **dict.fromkeys(("grad_weights_ptr", "grad_scores_ptr"), "*fp32"),
    **dict.fromkeys(("packed_ptr", "values_ptr"), "*u8"),
}
_NUMBERS = {"scale": "fp32", "largest": "fp32"}
_UNALIGNED = ("experts", "rows", "tokens", "slots", "scale", "largest", "scale_stride", "capacity")
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
    tile = {"ROWS": 1, "COLUMNS": swiglu.TILE_ELEMENTS}
    sums = {"WEIGHTED": True, "TOP_K": 8, "UNROLL": True, "TOKENS": 1, "COLUMNS": weighted_sum.TILE_ELEMENTS}
    scale = {"DOTTED": True, "SLOTS": scale_rows.SLOTS, "COLUMNS": scale_rows.COLUMNS, "STEPS": scale_rows.STEPS}
    return (
        _spec("weighted_sum, forward", weighted_sum.weighted_sum_kernel, dtype, {**element, **sums}, exact=True),
        _spec(
            "weighted_sum, backward", scale_rows.scale_rows_kernel, dtype,
            {**element, **scale, "PLACED": True, "TOP_K": 8}, exact=True,
        ),
        _spec("swiglu, forward", swiglu.swiglu_kernel, dtype, {**element, **tile}, exact=True),
        _spec(
            "swiglu, backward", swiglu.swiglu_backward_kernel, dtype, {**element, **tile, "RECOMPUTE": True},
            exact=True,
        ),
    )  # fmt: skip


def _quantize_specs() -> tuple[KernelSpec, ...]:
    specs = []
    for name, what in (
        ("quantize", quantize.ROWS),
        ("swiglu_quantize, forward", quantize.SWIGLU),
        ("swiglu_quantize, backward", quantize.SWIGLU_BACKWARD),
    ):
        for per_row in (False, True):
            for targets in ((80,), (90, 100)):
                constants = {
                    "ELEMENT": DTYPES[BF16], "WHAT": what, "PER_ROW": per_row, "POWER_OF_TWO": False,
                    "CONVERTS": targets[0] >= quantize.CONVERTS_FROM, "BLOCK": quantize.BLOCK, "BLOCKS": 8,
                }  # fmt: skip
                title = f"{name}, a scale a row" if per_row else name
                specs.append(_spec(title, quantize.quantize_kernel, BF16, constants, exact=True, targets=targets))
    for name, counted in (("dequantize", False), ("dequantize, counted", True)):
        constants = {
            "ELEMENT": DTYPES[BF16], "PER_ROW": False, "COUNTED": counted, "BLOCK": quantize.BLOCK, "BLOCKS": 8
        }  # fmt: skip
        specs.append(_spec(name, quantize.dequantize_kernel, BF16, constants))
    return tuple(specs)


def _router_specs() -> tuple[KernelSpec, ...]:
    sizes = {"TOP_K": 8, "BLOCK_E": 256, "TOKENS": router.TILE_ELEMENTS // 256, "NORMALIZE": True}
    no_groups = {"NUM_GROUPS": 1, "TOP_GROUPS": 1, "BLOCK_G": 1, "TOP_TWO": False, "BIASED": False}
    groups = {"NUM_GROUPS": 8, "TOP_GROUPS": 4, "BLOCK_G": 8, "TOP_TWO": True, "BIASED": True}
    specs = []
    for score, of_score in (("softmax", no_groups), ("sigmoid", groups), ("topk_softmax", no_groups)):
        common = {**sizes, "SCORE": router.SCORES[score]}
        forward = {**common, **of_score, "BLOCK_K": 8, "SCORED": True}
        backward = {**common, "WEIGHTED": True, "SCORED": True}
        specs.append(_spec(f"route, forward, {score}", router.route_kernel, FP32, forward))
        specs.append(_spec(f"route, backward, {score}", router.route_backward_kernel, FP32, backward))
    return tuple(specs)


def _grouped_specs(dtype: torch.dtype) -> tuple[KernelSpec, ...]:
    element = {"ELEMENT": DTYPES[dtype]}
    specs = []
    for targets in ((target,) for target in TARGETS):
        many_rows = grouped_mm.tiling_for(dtype, targets[0], 1000)
        few_rows = grouped_mm.tiling_for(dtype, targets[0], 1)
        weights = grouped_mm.tiling_for(dtype, targets[0], 1000, weights=True)
        for name, tiling, unit_stride in (
            ("grouped_mm, forward", many_rows, "w_stride_inner"),
            ("grouped_mm, forward, few rows", few_rows, "w_stride_inner"),
            ("grouped_mm, gradient of rows", many_rows, "w_stride_column"),
        ):
            constants = {**element, **tiling.blocks, "WHOLE": True, unit_stride: 1}
            kernel = grouped_mm.grouped_mm_kernel
            specs.append(_spec(name, kernel, dtype, constants, tiling.warps, tiling.stages, targets=targets))
        constants = {**element, **weights.blocks, "out_stride_inner": 1}
        kernel, name = grouped_mm.grouped_weight_grad_kernel, "grouped_mm, gradient of weights"
        specs.append(_spec(name, kernel, dtype, constants, weights.warps, weights.stages, targets=targets))
    return tuple(specs)


LOCAL_KERNELS: tuple[KernelSpec, ...] = (
    _spec("take_rows", take_rows.take_rows_kernel, BF16, {"ROWS": 1, "COLUMNS": take_rows.TILE_WORDS}, words="*i64"),
    *_rows_specs(BF16),
    *_rows_specs(FP32),
    *_quantize_specs(),
    *_router_specs(),
    *_grouped_specs(BF16),
    *_grouped_specs(FP32),
)
"""Compiled together with the kernels of overlap by ``python -m moe_comm.overlap.triton.ahead``."""
