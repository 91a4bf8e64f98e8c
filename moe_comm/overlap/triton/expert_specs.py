"""Ahead-of-time compilation specs of the kernels of the device executor: 8 ranks, 1024 rows per expert on average."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.gpu.protocol import MAX_SLICES
from moe_comm.kernels.triton.grouped_mm import tiling_for
from moe_comm.kernels.triton.launch import DTYPES
from moe_comm.kernels.triton.spec import POINTERS, TARGETS, KernelSpec
from moe_comm.overlap.triton import arrived_mm, publish_mm
from moe_comm.overlap.triton.tile_list import EXPERTS_AT_ONCE, EXTRA_PERCENT, TILES_AT_ONCE, tile_list_kernel


def _product(kernel: Any, varying: tuple[str, ...], dtype: torch.dtype, target: int, **constants: int) -> KernelSpec:
    """Return the spec of a GEMM with matrices of whole steps, whose inner dimension is contiguous."""
    tiling = tiling_for(dtype, target, 1024)
    constants |= {"WHOLE": True, **tiling.blocks, "w_stride_inner": 1}
    types = {}
    for argument in kernel.arg_names:
        if argument in constants or argument == "ELEMENT":
            continue
        if argument in ("rows_ptr", "w_ptr", "out_ptr"):
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
    constants = {"WORLD": 8, "SOURCES": 16, "ROWS": 128, "EXTRA": EXTRA_PERCENT}
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
