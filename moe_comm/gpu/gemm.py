"""Grouped GEMMs on Hopper's tensor cores (csrc/cuda/gemm): GPUs of compute capability 9.0, bf16 and e4m3.

nvcc compiles them for sm_90a into the native core, or NVRTC compiles them at first use. Each call is one launch by
native code, which also describes the matrices to TMA, the copy engine of the GPU.

Errors: MissingDependency without native core, compiled kernels and NVRTC; KernelError if NVRTC or the driver fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_comm.gpu import nvrtc
from moe_comm.gpu.launch import Driver, Module
from moe_comm.gpu.protocol import RowFlags
from moe_comm.gpu.record import AddTo
from moe_comm.runtime.native_core import native

if TYPE_CHECKING:
    from moe_comm import _C

SOURCE = "cuda/gemm/kernels.cu"
"""File with the kernels, relative to csrc."""
ARCH = "sm_90a"
CAPABILITY = (9, 0)
MULTIPLE = 8
"""TMA requires widths and strides that are multiples of this, and addresses that are multiples of 16 bytes."""


Glu = tuple[float, float]
"""The activation of a gated pair: (alpha, limit) of gpt-oss's, whose gate and up alternate in h, or ``SWIGLU``, where h
is gate | up (csrc/cuda/gemm/swiglu.h)."""
SWIGLU: Glu = (0.0, 0.0)


class TakenRows(NamedTuple):
    """Rows of experts that are rows of other tensors: row r is ``x_TD[slot_R[r] // top_k]``.

    slot_R: [R] int64, on the device. Those of rows beyond the experts' are not read.
    """

    x_TD: Tensor
    slot_R: Tensor
    top_k: int


class SwigluGradient(NamedTuple):
    """What ``GpuGemm.swiglu_gradient`` reads and writes besides a product.

    h_RG: gate and up. grad_h_RG, act_RF: outputs, multiplied by the weights. weights_N: fp32 weight of each slot, or
    None. slot_R: int64 slot of each row; None: rows are slots. sections_SR: fp32 output, the sums of <act, grad_act>
    over each section of ``SECTION`` columns; or None.
    """

    h_RG: Tensor
    grad_h_RG: Tensor
    act_RF: Tensor
    weights_N: Tensor | None = None
    slot_R: Tensor | None = None
    sections_SR: Tensor | None = None


class RanksRows(NamedTuple):
    """What a linear layer over the rows of all ranks adds to ``ListedTiles``, whose tiles have rows of one rank each.

    flags: of each rank, one for 128 rows or, published, 128 x 128 results. own_SD: this rank's rows, which are not in
    the memory that receives rows, and own_row, their first row. slot: where a rank receives the results of this one, in
    bytes from the start of its block; ``out_RN`` is this place in the own block.
    """

    flags: int
    own_SD: Tensor | None = None
    own_row: int = 0
    slot: int = 0


class ListedTiles(NamedTuple):
    """Tiles of 128 rows, in the order in which they are computed, and what orders them with other ranks.

    words: int64, on the device: the tiles, their number, rows of each expert from each rank, tiles with rows of each
    rank (``overlap.triton.tile_list.TileList``), counters that are zero, and, for rows that are in flight, room for a
    word for each tile of the results. flags: of the rows; published: of the results, which other ranks wait for.
    blocks: thread blocks of the launch. ranks: for linear layers.
    """

    words: Sequence[Tensor | None]
    flags: RowFlags
    published: bool
    blocks: int
    ranks: RanksRows | None = None


SECTION = 256
"""Columns of a section of a dot product."""


class GpuGemm:
    """Launches the kernels on one device. Any thread may launch.

    Args:
        index: of the CUDA device.
        blocks: number of its multiprocessors.
        code, driver: for tests.
    """

    def __init__(self, index: int, blocks: int, *, code: bytes | None = None, driver: Driver | None = None) -> None:
        core = native()
        module = Module(index, code or kernel_code(), core.gpu_gemm_kernels(), "gemm_", driver)
        addresses = module.driver.addresses("cuTensorMapEncodeTiled")
        self._native = core.GpuGemm(addresses, module.context, module.functions, blocks)

    def rows(
        self, rows: Tensor | TakenRows, w_END: Tensor, counts_E: Tensor, out_RN: Tensor, act_RF: Tensor | None,
        stream: int, bias_EN: Tensor | None = None, *, glu: Glu = SWIGLU,
    ) -> None:  # fmt: skip
        """Write out[r] = rows[r] @ w[e].T for each row r of expert e, for matrices that ``takes_rows`` accepts.

        Args:
            rows: [R, D]; ``TakenRows`` only with ``act_RF``.
            act_RF: if given, the activation ``glu`` of the rounded values of out is written as well.
            stream: handle of a stream of the device.
            bias_EN: added to the sums in fp32.
        """
        rows_RD, slot_R, _ = rows if isinstance(rows, TakenRows) else (rows, None, 1)
        addresses = _addresses(rows_RD, w_END, counts_E, out_RN, act_RF, slot_R, bias_EN)
        self._native.rows(*_rows_arguments(rows, w_END, out_RN, act_RF, bias_EN, addresses), glu, stream)

    def record_rows(
        self, rows: Tensor | TakenRows, w_END: Tensor, out_RN: Tensor, act_RF: Tensor | None,
        bias_EN: Tensor | None = None, *, glu: Glu = SWIGLU,
    ) -> AddTo:  # fmt: skip
        """Return what adds ``rows`` to a record, for the buffers of its tensors, slots and biases last."""
        rows = rows._replace(x_TD=rows.x_TD.detach()) if isinstance(rows, TakenRows) else rows.detach()
        bias_EN = None if bias_EN is None else bias_EN.detach()
        places = partial(_rows_arguments, rows, w_END.detach(), out_RN, act_RF, bias_EN)
        return self._adds("rows", lambda at: (*places(at), glu))

    def listed(
        self, rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, act_RF: Tensor | None, tiles: ListedTiles, stream: int,
        bias_EN: Tensor | None = None, *, glu: Glu = SWIGLU,
    ) -> None:  # fmt: skip
        """Write the results of ``rows`` for the tiles of a list, as their rows are received, or with flags for ranks
        that read them. The kernel waits for other ranks, so ``tiles.blocks`` leaves processors free."""
        at = _addresses(rows_RD, w_END, None, out_RN, act_RF, None, bias_EN)
        rows, w, transposed, _, experts, out, act, of = _rows_arguments(rows_RD, w_END, out_RN, act_RF, bias_EN, at)
        flags, published, ranks = tiles.flags, tiles.published, tiles.ranks or RanksRows(0)
        words = (*_addresses(*tiles.words), *_addresses(flags.peers_W, flags.state, flags.report, flags.abort))
        of_ranks = ranks.flags, ranks.own_row, ranks.slot
        numbers = flags.rank, flags.world, flags.first_flag, flags.turn, flags.timeout_ns, *of_ranks
        own = (0,) * 5 if ranks.own_SD is None else (ranks.own_SD.data_ptr(), *_form(ranks.own_SD))
        matrices, list_of = (rows, w, out, act, own), (*words, *numbers)
        self._native.listed(matrices, transposed, experts, of, glu, list_of, published, tiles.blocks, stream)

    def swiglu_gradient(
        self, grad_RD: Tensor, w2_EDF: Tensor, counts_E: Tensor, of: SwigluGradient, stream: int,
        *, glu: Glu = SWIGLU,
    ) -> None:  # fmt: skip
        """Write the gradient of h, and the activation, for the gradient grad[r] @ w2[e] of the activation of each row r
        of expert e, rounded to bf16; for matrices that ``takes_gradient`` accepts."""
        addresses = _addresses(grad_RD, w2_EDF, counts_E, *of)
        self._native.swiglu_gradient(*_gradient_arguments(grad_RD, w2_EDF, of, addresses), glu, stream)

    def record_gradient(self, grad_RD: Tensor, w2_EDF: Tensor, of: SwigluGradient, *, glu: Glu = SWIGLU) -> AddTo:
        """Return what adds ``swiglu_gradient`` to a record, for the buffers of its tensors."""
        places = partial(_gradient_arguments, grad_RD, w2_EDF.detach(), of)
        return self._adds("swiglu_gradient", lambda at: (*places(at), glu))

    def weights(self, grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor, stream: int) -> None:
        """Write out[e] = grad.T @ rows over the rows of expert e, for matrices that ``takes_weights`` accepts.

        If out is fp32, add to it.
        """
        addresses = _addresses(grad_RN, rows_RD, counts_E, out_END)
        self._native.weights(*_weights_arguments(grad_RN, rows_RD, out_END, addresses), stream)

    def record_weights(self, grad_RN: Tensor, rows_RD: Tensor, out_END: Tensor) -> AddTo:
        """Return what adds ``weights`` to a record, for the buffers of its tensors."""
        return self._adds("weights", partial(_weights_arguments, grad_RN, rows_RD, out_END))

    def rows_fp8(
        self, rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], counts: Tensor, out_RN: Tensor, stream: int
    ) -> None:
        """Write out[r] = rows[r] @ w[e].T for each row r of expert e, for operands that ``takes_fp8`` accepts.

        The sum of each 128 channels is multiplied by the product of its two scales and added to an fp32 total in one
        fused operation, in the order of channels.

        Args:
            rows, weights, counts: as in ``grouped_mm_fp8_into``.
        """
        (values_RK, scale_RB), (w_ENK, w_scale_ECB) = rows, weights
        experts, columns, inner = w_ENK.shape
        blocked = counts.dim() == 2
        sources = counts.shape[1] if blocked else 1
        by_expert = w_ENK.stride(0) if experts > 1 else columns * w_ENK.stride(1)
        matrices = (
            (values_RK.data_ptr(), *_form(values_RK)),
            (w_ENK.data_ptr(), columns, inner, w_ENK.stride(1), by_expert),
            (out_RN.data_ptr(), *_form(out_RN)),
        )
        room = values_RK.shape[0] // (experts * sources) if blocked else 0
        self._native.rows_fp8(
            matrices, (scale_RB.data_ptr(), *scale_RB.stride()), (w_scale_ECB.data_ptr(), *w_scale_ECB.stride()[:2]),
            (counts.data_ptr(), experts, sources, room), stream,
        )  # fmt: skip

    def _adds(self, name: str, places: Callable[[Sequence[int]], tuple[Any, ...]]) -> AddTo:
        """Return what adds a launch to a record. places: the native arguments for the numbers of its buffers."""

        def add(record: _C.GpuRecord, grid: Sequence[int], buffers: Sequence[Any]) -> bool:
            getattr(record, name)(self._native, *places([-1 if buffer is None else buffer for buffer in buffers]))
            return True

        return add


def _rows_arguments(
    rows: Tensor | TakenRows, w_END: Tensor, out_RN: Tensor, act_RF: Tensor | None, bias_EN: Tensor | None,
    at: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the native arguments for tensors of these shapes and strides. at: addresses, or numbers of buffers, of
    rows, w, counts, out, act, slots and biases."""
    rows_RD, _, top_k = rows if isinstance(rows, TakenRows) else (rows, None, 1)
    transposed = w_END.stride(2) != 1
    experts, columns, inner = w_END.shape
    sizes = (inner, columns, w_END.stride(2)) if transposed else (columns, inner, w_END.stride(1))
    by_expert = w_END.stride(0) if experts > 1 else sizes[0] * sizes[2]
    act = (0,) * 4 if act_RF is None else _form(act_RF)
    return (
        (at[0], *_form(rows_RD)), (at[1], *sizes, by_expert), transposed, at[2], experts, (at[3], *_form(out_RN)),
        (at[4], *act), (at[5], top_k, at[6], 0 if bias_EN is None else bias_EN.stride(0)),
    )  # fmt: skip


def _gradient_arguments(grad_RD: Tensor, w2_EDF: Tensor, of: SwigluGradient, at: Sequence[int]) -> tuple[Any, ...]:
    """Return the native arguments. at: addresses, or numbers of buffers, of grad, w2, counts and those of ``of``."""
    experts, inner, columns = w2_EDF.shape
    by_expert = w2_EDF.stride(0) if experts > 1 else inner * w2_EDF.stride(1)
    matrices = [(one, *_form(t)) for one, t in zip(at[3:6], of[:3], strict=True)]
    w2 = at[1], inner, columns, w2_EDF.stride(1), by_expert
    return (at[0], *_form(grad_RD)), w2, at[2], experts, matrices, at[6:]


def _weights_arguments(grad_RN: Tensor, rows_RD: Tensor, out_END: Tensor, at: Sequence[int]) -> tuple[Any, ...]:
    """Return the native arguments. at: addresses, or numbers of buffers, of grad, rows, counts and out."""
    grad, rows = (at[0], *_form(grad_RN)), (at[1], *_form(rows_RD))
    if out_END.stride(2) != 1:  # the transpose of each matrix is dense
        grad, rows, out_END = rows, grad, out_END.transpose(1, 2)
    experts, columns, inner = out_END.shape
    by_column = out_END.stride(1)
    by_expert = out_END.stride(0) if experts > 1 else columns * by_column
    adds = out_END.dtype == torch.float32
    return grad, rows, at[2], experts, (at[3], columns, inner, by_column, by_expert), adds


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _form(rows_RD: Tensor) -> tuple[int, int, int, int]:
    return (*rows_RD.shape, rows_RD.stride(0), 0)


def kernel_code() -> bytes:
    """Return the machine code of the kernels: that of the native core, or compiled by NVRTC."""
    code: bytes = native().gpu_gemm_code()
    return code or nvrtc.kernels(ARCH, source=SOURCE)


@cache
def gpu_gemm(index: int) -> GpuGemm:
    """Return the launcher of a device of compute capability 9.0."""
    return GpuGemm(index, torch.cuda.get_device_properties(index).multi_processor_count)


def takes_bias(bias_EN: Tensor | None) -> bool:
    """Return whether ``GpuGemm.rows`` takes these biases: bf16, pairs of them in words."""
    return bias_EN is None or (
        bias_EN.dtype == torch.bfloat16
        and bias_EN.stride(1) == 1
        and bias_EN.stride(0) % 2 == 0
        and bias_EN.data_ptr() % 4 == 0
    )


def takes_rows(rows: Tensor | TakenRows, w_END: Tensor, out_RN: Tensor, act_RF: Tensor | None = None) -> bool:
    """Return whether ``GpuGemm.rows`` takes these matrices, whose shapes match: bf16, D and N multiples of 8.

    The answer does not depend on the number of rows, so that all ranks of a group get the same. ``TakenRows`` are at
    most 2³² slots of 64 GiB.
    """
    if isinstance(rows, TakenRows):
        rows_RD, slot_R, _ = rows
        limit = 2**32
        fits = (
            slot_R.is_contiguous()
            and slot_R.numel() < limit
            and rows_RD.shape[0] * rows_RD.stride(0) // MULTIPLE < limit
        )
        if act_RF is None or not fits:
            return False
    else:
        rows_RD = rows
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


def takes_gradient(grad_RD: Tensor, w2_EDF: Tensor, of: SwigluGradient) -> bool:
    """Return whether ``GpuGemm.swiglu_gradient`` takes these matrices, whose shapes match: bf16, D and F multiples of
    8, F dense. As in ``takes_rows``, the answer does not depend on the number of rows."""
    experts, inner, columns = w2_EDF.shape
    by_expert, by_inner, by_column = w2_EDF.stride()
    matrices = (grad_RD, *of[:3])
    others = [t for t in of[3:] if t is not None]
    return (
        grad_RD.dtype == torch.bfloat16
        and inner > 0
        and inner % MULTIPLE == 0
        and columns % MULTIPLE == 0
        and by_column == 1
        and by_inner >= columns
        and by_inner % MULTIPLE == 0
        and (experts == 1 or (by_expert >= inner * by_inner and by_expert % by_inner == 0))
        and all(h.stride(0) % columns == 0 for h in (of.h_RG, of.grad_h_RG))
        and all(rows.stride(0) % MULTIPLE == 0 and rows.stride(0) >= rows.shape[1] for rows in matrices)
        and all(t.data_ptr() % (2 * MULTIPLE) == 0 for t in (*matrices, w2_EDF))
        and all(t.is_contiguous() for t in others)
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
        and (experts == 1 or (by_expert >= columns * by_column and by_expert % by_column == 0))
        and all(rows.stride(0) % MULTIPLE == 0 and rows.stride(0) >= rows.shape[1] for rows in (grad_RN, rows_RD))
        and all(tensor.data_ptr() % (2 * MULTIPLE) == 0 for tensor in (grad_RN, rows_RD, out_END))
    )


def takes_fp8(rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], out_RN: Tensor) -> bool:
    """Return whether ``GpuGemm.rows_fp8`` takes these operands, whose shapes match: bf16 results, N a multiple of 8.

    As in ``takes_rows``, the answer does not depend on the number of rows.
    """
    (values_RK, scale_RB), (w_ENK, w_scale_ECB) = rows, weights
    experts, columns, inner = w_ENK.shape
    multiple = 2 * MULTIPLE
    by_column = w_ENK.stride(1)
    return (
        out_RN.dtype == torch.bfloat16
        and columns % MULTIPLE == 0
        and inner > 0
        and w_ENK.stride(2) == 1
        and by_column % multiple == 0
        and by_column >= inner
        and (experts == 1 or (w_ENK.stride(0) >= columns * by_column and w_ENK.stride(0) % by_column == 0))
        and values_RK.stride(1) == 1
        and values_RK.stride(0) % multiple == 0
        and values_RK.stride(0) >= inner
        and scale_RB.stride(0) < 2**23
        and (w_scale_ECB.shape[2] == 1 or w_scale_ECB.stride(2) == 1)
        and out_RN.stride(0) % MULTIPLE == 0
        and out_RN.stride(0) >= columns
        and all(tensor.data_ptr() % multiple == 0 for tensor in (values_RK, w_ENK, out_RN))
    )
