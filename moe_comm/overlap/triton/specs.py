"""Ahead-of-time compilation specs of the kernels for linear layers."""

from __future__ import annotations

import torch

from moe_comm.kernels.triton.launch import DTYPES
from moe_comm.kernels.triton.spec import POINTERS, KernelSpec
from moe_comm.overlap.triton.gather_matmul import await_rows_kernel, gather_matmul_kernel, push_rows_kernel
from moe_comm.overlap.triton.matmul_scatter import matmul_scatter_kernel
from moe_comm.overlap.triton.programs import TILES, Programs

_TURN = {"rank": "i32", "world": "i32", "turn": "i32", "call": "i32", "first_flag": "i32", "data": "i32"}
_ALIGNED = ("x_ptr", "b_ptr", "y_ptr", "peers_ptr", "fault_ptr", "inner", "columns", "width", "data")


def _linear_specs(dtype: torch.dtype) -> tuple[KernelSpec, ...]:
    programs, row = Programs(1, 1, **TILES[dtype]), POINTERS[dtype]
    memory = {"peers_ptr": "*i64", "fault_ptr": "*i64"}
    tensors = {"x_ptr": row, "b_ptr": row, "y_ptr": row, **memory}
    sizes = {"rows": "i32", "inner": "i32", "columns": "i32"}
    tiles = {"BLOCK_M": programs.block_m, "BLOCK_N": programs.block_n, "BLOCK_K": programs.block_k}
    copy = {"DTYPE": DTYPES[dtype], "CHUNK": programs.chunk_rows, "COPY": programs.copy}
    name, warps, stages = str(dtype).removeprefix("torch."), programs.num_warps, programs.num_stages
    specs = []
    # The forward pass multiplies by weight.T, the backward pass by the weight.
    strides = ("b_stride_n", "b_stride_k")
    for direction, (strided, dense) in (("forward", strides), ("backward", strides[::-1])):
        types = {**tensors, **sizes, strided: "i32", **_TURN, "timeout_ns": "i64"}
        constants = {dense: 1, "ALIGNED": True, **tiles}
        for kernel, count, extra in (
            (gather_matmul_kernel, "moving", copy),
            (matmul_scatter_kernel, "computing", {"DTYPE": DTYPES[dtype]}),
        ):
            specs.append(
                KernelSpec(
                    f"{kernel.__name__.removesuffix('_kernel')}, {direction}, {name}", kernel, {**types, count: "i32"},
                    {**constants, **extra}, (*_ALIGNED, strided), warps, stages,
                )
            )  # fmt: skip
    sizes = {"rows": "i32", "width": "i32"}
    push = {**memory, "x_ptr": row, **sizes, **_TURN, "timeout_ns": "i64"}
    wait = {**memory, **sizes, **_TURN, "timeout_ns": "i64"}
    del wait["call"]
    specs.append(KernelSpec(f"push_rows, {name}", push_rows_kernel, push, {**copy, "ALIGNED": True}, _ALIGNED))
    specs.append(KernelSpec(f"await_rows, {name}", await_rows_kernel, wait, copy, _ALIGNED))
    return tuple(specs)


LINEAR_KERNELS: tuple[KernelSpec, ...] = (*_linear_specs(torch.bfloat16), *_linear_specs(torch.float32))
"""The kernels as launched forward and backward."""
