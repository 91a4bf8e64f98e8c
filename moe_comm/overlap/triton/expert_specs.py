"""Ahead-of-time compilation specs of the operators for experts: 8 experts per token, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.kernels.triton.grouped_mm import tiling_for
from moe_comm.kernels.triton.launch import DTYPES
from moe_comm.kernels.triton.spec import POINTERS, TARGETS, KernelSpec
from moe_comm.overlap.triton.arrived_mm import VARYING, arrived_mm_kernel
from moe_comm.overlap.triton.dispatch_matmul import dispatch_matmul_kernel
from moe_comm.overlap.triton.matmul_combine import matmul_combine_kernel
from moe_comm.overlap.triton.tile_list import EXPERTS_AT_ONCE, EXTRA_PERCENT, TILES_AT_ONCE, tile_list_kernel
from moe_comm.overlap.triton.tiling import ExpertTiling

_NUMBERS = ("num_sends", "num_relays", "num_tiles", "num_sums", "num_sources", "rank", "world", "turn", "call")
_OFFSETS = ("first_flag", "timeout_ns")
_ALIGNED = (
    *("rows_at", "scale_at", "slots_at", "slot_places_at", "slot_scales_at", "out_at", "columns", "inner", "x_stride"),
    *("w_stride_expert", "w_stride_column", "w_stride_inner"),
)
_ROWS = ("x_ptr", "w_ptr", "h_ptr", "rows_ptr", "y_ptr")
PROCESSORS = 132
"""Processors of the GPU that the numbers of programs are for. Other numbers are compiled at first use."""


def _spec(
    name: str, kernel: Any, dtype: torch.dtype, dense: str, constants: dict[str, Any], weighted: str
) -> KernelSpec:
    tiling = ExpertTiling.of(dtype)
    constants = {"ELEMENT": DTYPES[dtype], "TOP_K": 8, dense: 1, **tiling.blocks, **constants}
    types = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in _ROWS:
            types[argument] = POINTERS[dtype]
        elif argument.endswith("_ptr"):
            types[argument] = "*fp32" if argument == weighted else "*i64"
        else:
            types[argument] = "i64" if argument in _OFFSETS else "i32"
    return KernelSpec(
        f"{name}, {str(dtype).removeprefix('torch.')}",
        kernel,
        types,
        constants,
        (*_ALIGNED, *(argument for argument in types if argument.endswith("_ptr"))),
        tiling.warps,
        tiling.stages,
        options={"enable_fp_fusion": False} if kernel is matmul_combine_kernel else {},
    )


def _dispatch(name: str, dtype: torch.dtype, *, scaled: bool, relayed: bool) -> KernelSpec:
    tiling = ExpertTiling.of(dtype)
    moving, computing = tiling.split(PROCESSORS, 2 if relayed else 1)
    constants = {
        "SCALED": scaled,
        "RELAYED": relayed,
        "SEND_PROGRAMS": moving,
        "RELAY_PROGRAMS": moving if relayed else 0,
        "COMPUTE_PROGRAMS": computing,
        "SEND_ROWS": tiling.send_rows,
        "SEND_COLUMNS": tiling.send_columns,
    }
    dense = "w_stride_column" if scaled else "w_stride_inner"
    return _spec(name, dispatch_matmul_kernel, dtype, dense, constants, "scale_ptr" if scaled else "")


def _combine(name: str, dtype: torch.dtype, *, weighted: bool) -> KernelSpec:
    tiling = ExpertTiling.of(dtype)
    summing, computing = tiling.split(PROCESSORS, 1)
    constants = {
        "WEIGHTED": weighted,
        "COMPUTE_PROGRAMS": computing,
        "SUM_PROGRAMS": summing,
        "TOKENS": tiling.sum_tokens,
        "SUM_COLUMNS": tiling.columns,
    }
    dense = "w_stride_inner" if weighted else "w_stride_column"
    return _spec(name, matmul_combine_kernel, dtype, dense, constants, "weights_ptr" if weighted else "")


def _arrived(dtype: torch.dtype, target: int) -> KernelSpec:
    """Return the spec of the first GEMM of experts with 1024 rows on average, with w13 of 4096 x 7168."""
    tiling = tiling_for(dtype, target, 1024)
    strides = {"w_stride_inner": 1}
    constants = {"ELEMENT": DTYPES[dtype], "WHOLE": True, "TAIL": tiling.tail_rows, **tiling.blocks, **strides}
    types = {}
    for argument in arrived_mm_kernel.arg_names:
        if argument in constants:
            continue
        if argument in ("rows_ptr", "w_ptr", "out_ptr"):
            types[argument] = POINTERS[dtype]
        elif argument.endswith("_ptr"):
            types[argument] = "*i64"
        else:
            types[argument] = "i64" if argument == "timeout_ns" else "i32"
    aligned = tuple(argument for argument in types if argument not in VARYING)
    name = f"arrived_mm, {str(dtype).removeprefix('torch.')}"
    return KernelSpec(
        name, arrived_mm_kernel, types, constants, aligned, tiling.warps, tiling.stages, False, targets=(target,)
    )


def _tile_list() -> KernelSpec:
    """Return the spec of the list of tiles for 8 ranks."""
    constants = {"WORLD": 8, "SOURCES": 16, "ROWS": 128, "EXTRA": EXTRA_PERCENT}
    constants |= {"EXPERTS": EXPERTS_AT_ONCE, "TILES": TILES_AT_ONCE}
    names = [argument for argument in tile_list_kernel.arg_names if argument not in constants]
    types = {argument: "*i64" if argument.endswith("_ptr") else "i32" for argument in names}
    pointers = tuple(argument for argument in names if argument.endswith("_ptr"))
    return KernelSpec("tile_list", tile_list_kernel, types, constants, pointers, cooperative=False)


EXPERT_KERNELS: tuple[KernelSpec, ...] = (
    _tile_list(),
    *(_arrived(dtype, target) for dtype in (torch.bfloat16, torch.float32) for target in TARGETS),
    _dispatch("dispatch_matmul, forward", torch.bfloat16, scaled=False, relayed=False),
    _dispatch("dispatch_matmul, forward, relayed", torch.bfloat16, scaled=False, relayed=True),
    _dispatch("matmul_combine, backward", torch.bfloat16, scaled=True, relayed=False),
    _dispatch("matmul_combine, backward, relayed", torch.bfloat16, scaled=True, relayed=True),
    _combine("matmul_combine, forward", torch.bfloat16, weighted=True),
    _combine("dispatch_matmul, backward", torch.bfloat16, weighted=False),
    _dispatch("dispatch_matmul, forward", torch.float32, scaled=False, relayed=False),
    _combine("matmul_combine, forward", torch.float32, weighted=True),
)
"""All variants in bfloat16, and the forward pass in float32."""
