"""Grouped GEMMs on Hopper's tensor cores (csrc/cuda/gemm): GPUs of compute capability 9.0, bf16.

nvcc compiles them for sm_90a into the native core, or NVRTC compiles them at first use. Each call is one launch by
native code, which also describes the matrices to TMA, the copy engine of the GPU.

Errors: MissingDependency without native core, compiled kernels and NVRTC; KernelError if NVRTC or the driver fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from moe_comm.gpu import nvrtc
from moe_comm.gpu.arguments import native_core
from moe_comm.gpu.launch import Driver, Module

SOURCE = "cuda/gemm/kernels.cu"
"""File with the kernels, relative to csrc."""
ARCH = "sm_90a"
CAPABILITY = (9, 0)
MULTIPLE = 8
"""TMA requires widths and strides that are multiples of this, and addresses that are multiples of 16 bytes."""

Repeated = Callable[[Sequence[int], int], None]
"""Launches a kernel on tensors at these addresses, on a stream."""


class GpuGemm:
    """Launches the kernels on one device. Any thread may launch.

    Args:
        index: of the CUDA device.
        blocks: number of its multiprocessors.
        code, driver: for tests.
    """

    def __init__(self, index: int, blocks: int, *, code: bytes | None = None, driver: Driver | None = None) -> None:
        core = native_core()
        module = Module(index, code or kernel_code(), core.gpu_gemm_kernels(), "gemm_", driver)
        addresses = module.driver.addresses("cuTensorMapEncodeTiled")
        self._native = core.GpuGemm(addresses, module.context, module.functions, blocks)

    def rows(
        self, rows_RD: Tensor, w_END: Tensor, counts_E: Tensor, out_RN: Tensor, act_RF: Tensor | None, stream: int
    ) -> None:
        """Write out[r] = rows[r] @ w[e].T for each row r of expert e, for matrices that ``takes_rows`` accepts.

        Args:
            act_RF: if given, out is gate | up, and silu(gate) * up of the rounded values is written as well.
            stream: handle of a stream of the device.
        """
        addresses = [0 if t is None else t.data_ptr() for t in (rows_RD, w_END, counts_E, out_RN, act_RF)]
        self.repeated_rows(rows_RD, w_END, out_RN, act_RF)(addresses, stream)

    def repeated_rows(self, rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, act_RF: Tensor | None) -> Repeated:
        """Return ``rows`` for matrices of these shapes and strides, from the addresses of its tensors and a stream."""
        transposed = w_END.stride(2) != 1
        experts, columns, inner = w_END.shape
        sizes = (inner, columns, w_END.stride(2)) if transposed else (columns, inner, w_END.stride(1))
        by_expert = w_END.stride(0) if experts > 1 else sizes[0] * sizes[2]
        rows, out, act = _form(rows_RD), _form(out_RN), (0,) * 4 if act_RF is None else _form(act_RF)
        launch = self._native.rows

        def repeated(addresses: Sequence[int], stream: int) -> None:
            of_rows, of_w, of_counts, of_out, of_act = addresses
            launch(
                (of_rows, *rows), (of_w, *sizes, by_expert), transposed, of_counts, experts, (of_out, *out),
                (of_act or 0, *act), stream,
            )  # fmt: skip

        return repeated

    def weights(self, grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor, stream: int) -> None:
        """Write out[e] = grad.T @ rows over the rows of expert e, for matrices that ``takes_weights`` accepts.

        If out is fp32, add to it.
        """
        addresses = [t.data_ptr() for t in (grad_RN, rows_RD, counts_E, out_END)]
        self.repeated_weights(grad_RN, rows_RD, out_END)(addresses, stream)

    def repeated_weights(self, grad_RN: Tensor, rows_RD: Tensor, out_END: Tensor) -> Repeated:
        """Return ``weights`` for matrices of these shapes, strides and dtypes, as ``repeated_rows`` does."""
        swapped = out_END.stride(2) != 1
        if swapped:  # the transpose of each matrix is dense
            grad_RN, rows_RD, out_END = rows_RD, grad_RN, out_END.transpose(1, 2)
        experts, columns, inner = out_END.shape
        by_column = out_END.stride(1)
        by_expert = out_END.stride(0) if experts > 1 else columns * by_column
        grad, rows, out = _form(grad_RN), _form(rows_RD), (columns, inner, by_column, by_expert)
        adds, launch = out_END.dtype == torch.float32, self._native.weights

        def repeated(addresses: Sequence[int], stream: int) -> None:
            of_grad, of_rows, of_counts, of_out = addresses
            if swapped:
                of_grad, of_rows = of_rows, of_grad
            launch((of_grad, *grad), (of_rows, *rows), of_counts, experts, (of_out, *out), adds, stream)

        return repeated


def _form(rows_RD: Tensor) -> tuple[int, int, int, int]:
    return (*rows_RD.shape, rows_RD.stride(0), 0)


def kernel_code() -> bytes:
    """Return the machine code of the kernels: that of the native core, or compiled by NVRTC."""
    code: bytes = native_core().gpu_gemm_code()
    return code or nvrtc.kernels(ARCH, source=SOURCE)


@cache
def gpu_gemm(index: int) -> GpuGemm:
    """Return the launcher of a device of compute capability 9.0."""
    return GpuGemm(index, torch.cuda.get_device_properties(index).multi_processor_count)


def takes_rows(rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, act_RF: Tensor | None = None) -> bool:
    """Return whether ``GpuGemm.rows`` takes these matrices, whose shapes match: bf16, D and N multiples of 8.

    The answer does not depend on the number of rows, so that all ranks of a group get the same.
    """
    experts, columns, inner = w_END.shape
    _, by_column, by_inner = w_END.stride()
    plain = by_inner == 1 and by_column >= inner
    stride, size = (by_column, columns) if plain else (by_inner, inner)
    if not inner or rows_RD.dtype != torch.bfloat16 or not (plain or (by_column == 1 and by_inner >= columns)):
        return False
    if act_RF is not None and (not plain or columns % (2 * MULTIPLE) or out_RN.stride(0) % (columns // 2)):
        return False
    by_expert = w_END.stride(0) if experts > 1 else stride * size
    matrices = [rows_RD, out_RN] if act_RF is None else [rows_RD, out_RN, act_RF]
    return (
        columns % MULTIPLE == 0
        and inner % MULTIPLE == 0
        and stride % MULTIPLE == 0
        and by_expert % stride == 0
        and by_expert >= stride * size
        and all(rows.stride(0) % MULTIPLE == 0 and rows.stride(0) >= rows.shape[1] for rows in matrices)
        and all(tensor.data_ptr() % (2 * MULTIPLE) == 0 for tensor in (*matrices, w_END))
    )


def takes_weights(grad_RN: Tensor, rows_RD: Tensor, out_END: Tensor) -> bool:
    """Return whether ``GpuGemm.weights`` takes these matrices, whose shapes match: bf16, out bf16 or fp32, any rows.

    As in ``takes_rows``, the answer does not depend on the number of rows.
    """
    experts, columns, inner = out_END.shape
    if out_END.stride(2) != 1:
        out_END, columns, inner = out_END.transpose(1, 2), inner, columns
    by_expert, by_column, by_inner = out_END.stride()
    multiple = 2 * MULTIPLE // out_END.element_size()
    return (
        rows_RD.dtype == torch.bfloat16
        and columns % MULTIPLE == 0
        and inner % MULTIPLE == 0
        and by_inner == 1
        and by_column >= inner
        and by_column % multiple == 0
        and (experts == 1 or (by_expert >= columns * by_column and by_expert % multiple == 0))
        and all(rows.stride(0) % MULTIPLE == 0 and rows.stride(0) >= rows.shape[1] for rows in (grad_RN, rows_RD))
        and all(tensor.data_ptr() % (2 * MULTIPLE) == 0 for tensor in (grad_RN, rows_RD, out_END))
    )
