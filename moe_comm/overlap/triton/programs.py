"""The fused kernels of linear layers, with their numbers of programs and tile sizes (Flux, arXiv 2406.06858).

all-gather + GEMM        rank 1 of 3                        own rows are complete at once; the others in ring order
    moving               rows of rank 1 ──▶ rank 0, ──▶ rank 2                ranks  1  2  0
    computing            tiles of rank 1's rows │ wait, tiles of rank 2's │ wait, tiles of rank 0's

GEMM + reduce-scatter    rank 1 of 3           the next rank's rows first, own rows last: no two ranks write to one rank
    computing            tiles for rank 2 │ tiles for rank 0 │ own tiles                              at the same time
    moving               own tile, once ranks 0, 1 and 2 have written it: summed in rank order, rounded once

With MOE_COMM_GEMM=cuda, kernels in CUDA C++ take the place of the computing programs where they run (``linear.py``);
the moving ones are then kernels of their own, on a side stream. Memory, flags and reports are the same, so ranks may
differ.

A tile of the first one waits for one flag: that of the chunk of rows that contains it. For the second one, each rank
has a slot for each rank's partial sums, in the dtype of the rows, and a flag for each tile in it. No atomics are used
for sums, so the bits do not depend on timing. A turn is one call of an operator (``memory.py``).

Programs are persistent: all n programs run on the device at once, and each runs every n-th task. A program waits
only for programs of its rank with lower numbers. Triton's interpreter runs programs in order of number, so it cannot
deadlock; on a GPU all programs are resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.triton.device import int64, multiply_add, rounded, tile_at
from moe_comm.kernels.triton.grouped_mm import Tiling
from moe_comm.kernels.triton.launch import DTYPES, waiting_programs
from moe_comm.overlap.triton.flags import data_of, enter, may_write_to, notify, wait_at_least, words_of
from moe_comm.overlap.triton.memory import TURN_ARGUMENTS

TILES = {
    torch.float32: Tiling(64, 64, 32, 4, 3),
    torch.bfloat16: Tiling(128, 128, 64, 8, 3),
    torch.float16: Tiling(128, 128, 64, 8, 3),
}
"""fp32 uses no tensor cores, because TF32 would lose bits; its tiles are smaller to avoid register spills."""


@dataclass(frozen=True)
class Programs:
    """Programs and tile of a fused kernel.

    moving: programs that push rows to peers, or sum what peers have pushed. computing: programs that multiply. All of
    them must be resident at once: at most one per processor. copy: elements that a pushing program moves in one step, a
    power of two. The rows of a tile are pushed under one flag.
    """

    moving: int
    computing: int
    tile: Tiling
    copy: int = 4096

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, moving: int | None = None) -> Programs:
        """Return the default for ``device``, with as many programs as ``waiting_programs`` allows.

        Args:
            device: the GPU, or the CPU for Triton's interpreter.
            dtype: of the rows and weights.
            moving: how many of the programs move rows; the others compute. None: an eighth.
        """
        if dtype not in DTYPES:
            raise InputError(f"the Triton operators support {', '.join(map(str, DTYPES))}; got {dtype}")
        total = waiting_programs(device)
        moving = moving or max(1, total // 8)
        if moving >= max(total, 2):
            raise ConfigError(f"{moving} communicating programs leave none of {total} to compute; use fewer")
        return cls(moving, max(1, total - moving), TILES[dtype])

    def launch(self, device: torch.device) -> dict[str, Any]:
        """Return launch options. Cooperative: CUDA rejects a grid that is not resident at once and would deadlock."""
        if device.type != "cuda":
            return self.tile.blocks
        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "launch_cooperative_grid": True}
        return {**self.tile.blocks, **options}


def aligned(x: Tensor) -> bool:
    """Return whether all rows of the dense ``x`` are aligned to 16 bytes, as wide loads need."""
    return x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0


@triton.jit
def tile_product(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, tile_m, tile_n, rows, inner, columns, b_stride_k, b_stride_n,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return fp32 [BLOCK_M, BLOCK_N] of a [rows, inner] @ b [inner, columns], summed in order of K; 0 outside."""
    if ALIGNED:
        a_ptr = tl.multiple_of(a_ptr, 16)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * inner + k[None, :]
    b_ptrs = b_ptr + k.to(tl.int64)[:, None] * b_stride_k + n.to(tl.int64)[None, :] * b_stride_n
    in_m = (m < rows)[:, None]
    in_n = (n < columns)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, inner, BLOCK_K):
        a = tl.load(a_ptrs, mask=in_m & (k < inner - first)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=in_n & (k < inner - first)[:, None], other=0.0)
        acc = multiply_add(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * b_stride_k
    return acc


@triton.jit
def tile_offsets(tile_m, tile_n, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of a tile's elements in a dense [rows, columns], and the mask of valid elements."""
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = m.to(tl.int64)[:, None] * columns + n[None, :]
    return offsets, (m < rows)[:, None] & (n < columns)[None, :]


@triton.jit
def push_rows(  # type: ignore[no-untyped-def]
    x_ptr, rows, width, peers_ptr, fault_ptr, rank, world, turn, first_flag, data, timeout_ns, program, programs,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Copy x [rows, width] to the peers' data [W, rows, width], at index ``rank``; one of ``programs`` programs.

    Each chunk of CHUNK rows has the flag ``first_flag + rank * chunks + chunk``. The previous rank is served first,
    because it computes this rank's rows first; so in each step each rank sends to one peer and receives from one.
    """
    chunks = tl.cdiv(rows, CHUNK)
    for task in range(program, (world - 1) * chunks, programs):
        peer = (rank + world - 1 - task // chunks) % world
        chunk = task % chunks
        if may_write_to(peers_ptr, peer, rank, turn, fault_ptr, timeout_ns):
            first = int64(chunk) * CHUNK * width
            elements = tl.minimum(int64(rows) - chunk * CHUNK, CHUNK) * width
            from_ptr = x_ptr + first
            to_ptr = data_of(peers_ptr, peer, data, DTYPE) + int64(rank) * rows * width + first
            if ALIGNED:
                from_ptr = tl.multiple_of(from_ptr, 16)
                to_ptr = tl.multiple_of(to_ptr, 16)
            for start in range(0, elements, COPY):
                element = start + tl.arange(0, COPY)
                mask = element < elements
                tl.store(to_ptr + element, tl.load(from_ptr + element, mask=mask), mask=mask)
            notify(words_of(peers_ptr, peer), first_flag + rank * chunks + chunk, turn)


@triton.jit(do_not_specialize=TURN_ARGUMENTS)
def gather_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, b_ptr, y_ptr, peers_ptr, fault_ptr, rows, inner, columns, b_stride_k, b_stride_n, rank, world, turn, call,
    first_flag, data, timeout_ns, moving,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, COPY: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute y [W, rows, columns] = each rank's x [rows, inner] @ b [inner, columns]; x and y dense."""
    program = tl.program_id(0)
    if program == 0:
        enter(peers_ptr, rank, world, turn, call)
    if program < moving:
        push_rows(
            x_ptr, rows, inner, peers_ptr, fault_ptr, rank, world, turn, first_flag, data, timeout_ns,
            program, moving, DTYPE, ALIGNED, CHUNK, COPY,
        )  # fmt: skip
    else:
        chunks = tl.cdiv(rows, CHUNK)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        tiles_n = tl.cdiv(columns, BLOCK_N)
        per_rank = tiles_m * tiles_n
        for task in range(program - moving, world * per_rank, tl.num_programs(0) - moving):
            source = (rank + task // per_rank) % world
            tile_m, tile_n = tile_at(task % per_rank, tiles_m, tiles_n)
            complete = source == rank
            a_ptr = x_ptr
            if source != rank:
                flag = first_flag + source * chunks + tile_m * BLOCK_M // CHUNK
                complete = wait_at_least(words_of(peers_ptr, rank), flag, turn, source, fault_ptr, timeout_ns)
                a_ptr = data_of(peers_ptr, rank, data, DTYPE) + int64(source) * rows * inner
            acc = tile_product(
                a_ptr, b_ptr, tile_m, tile_n, rows, inner, columns, b_stride_k, b_stride_n,
                ALIGNED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.where(complete, acc, float("nan"))
            offsets, inside = tile_offsets(tile_m, tile_n, rows, columns, BLOCK_M, BLOCK_N)
            to_ptr = y_ptr + int64(source) * rows * columns
            tl.store(to_ptr + offsets, rounded(acc, DTYPE), mask=inside)


@triton.jit(do_not_specialize=TURN_ARGUMENTS)
def push_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, peers_ptr, fault_ptr, rows, width, rank, world, turn, call, first_flag, data, timeout_ns,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Run only the moving programs."""
    program = tl.program_id(0)
    if program == 0:
        enter(peers_ptr, rank, world, turn, call)
    push_rows(
        x_ptr, rows, width, peers_ptr, fault_ptr, rank, world, turn, first_flag, data, timeout_ns,
        program, tl.num_programs(0), DTYPE, ALIGNED, CHUNK, COPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=TURN_ARGUMENTS)
def await_rows_kernel(  # type: ignore[no-untyped-def]
    peers_ptr, fault_ptr, rows, width, rank, world, turn, call, first_flag, data, timeout_ns,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of all peers. On a timeout, set the first row of the missing rows to NaN."""
    chunks = tl.cdiv(rows, CHUNK)
    for task in range(tl.program_id(0), (world - 1) * chunks, tl.num_programs(0)):
        source = (rank + 1 + task // chunks) % world
        flag = first_flag + source * chunks + task % chunks
        if not wait_at_least(words_of(peers_ptr, rank), flag, turn, source, fault_ptr, timeout_ns):
            row_ptr = data_of(peers_ptr, rank, data, DTYPE) + int64(source) * rows * width
            nan = tl.full((COPY,), float("nan"), tl.float32)
            for first in range(0, width, COPY):
                column = first + tl.arange(0, COPY)
                tl.store(row_ptr + column, rounded(nan, DTYPE), mask=column < width)


@triton.jit
def sum_tile(  # type: ignore[no-untyped-def]
    y_ptr, peers_ptr, fault_ptr, rows, columns, tile_m, tile_n, rank, world, turn, first_flag, data, timeout_ns,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tile of y: the sum over ranks, in their order, of the tiles that they have written here, once they have.

    A tile of a rank has the flag ``first_flag + rank * tiles of y + number of the tile, row by row``.
    """
    tiles_n = tl.cdiv(columns, BLOCK_N)
    per_rank = tl.cdiv(rows, BLOCK_M) * tiles_n
    offsets, inside = tile_offsets(tile_m, tile_n, rows, columns, BLOCK_M, BLOCK_N)
    slots_ptr = data_of(peers_ptr, rank, data, DTYPE)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for source in range(world):
        flag = first_flag + source * per_rank + tile_m * tiles_n + tile_n
        complete = wait_at_least(words_of(peers_ptr, rank), flag, turn, source, fault_ptr, timeout_ns)
        part_ptr = slots_ptr + int64(source) * rows * columns
        part = tl.load(part_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(complete, part, float("nan"))
    tl.store(y_ptr + offsets, rounded(total, DTYPE), mask=inside)


@triton.jit(do_not_specialize=TURN_ARGUMENTS)
def matmul_scatter_kernel(  # type: ignore[no-untyped-def]
    x_ptr, b_ptr, y_ptr, peers_ptr, fault_ptr, rows, inner, columns, b_stride_k, b_stride_n, rank, world, turn, call,
    first_flag, data, timeout_ns, computing,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute y [rows, columns]: this rank's rows of the sum over ranks of x [W, rows, inner] @ b [inner, columns]."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    per_rank = tiles_m * tiles_n
    if program == 0:
        enter(peers_ptr, rank, world, turn, call)
    if program < computing:
        for task in range(program, world * per_rank, computing):
            peer = (rank + 1 + task // per_rank) % world
            tile_m, tile_n = tile_at(task % per_rank, tiles_m, tiles_n)
            acc = tile_product(
                x_ptr + int64(peer) * rows * inner, b_ptr, tile_m, tile_n, rows, inner, columns,
                b_stride_k, b_stride_n, ALIGNED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            offsets, inside = tile_offsets(tile_m, tile_n, rows, columns, BLOCK_M, BLOCK_N)
            slot_ptr = data_of(peers_ptr, peer, data, DTYPE) + int64(rank) * rows * columns
            # A mask instead of a branch: Triton 3.6 cannot compile an accumulator used in a branch for sm_100.
            allowed = may_write_to(peers_ptr, peer, rank, turn, fault_ptr, timeout_ns)
            tl.store(slot_ptr + offsets, rounded(acc, DTYPE), mask=inside & allowed)
            if allowed:
                flag = first_flag + rank * per_rank + tile_m * tiles_n + tile_n
                notify(words_of(peers_ptr, peer), flag, turn)
    else:
        for tile in range(program - computing, per_rank, tl.num_programs(0) - computing):
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n)
            sum_tile(
                y_ptr, peers_ptr, fault_ptr, rows, columns, tile_m, tile_n, rank, world, turn, first_flag, data,
                timeout_ns, DTYPE, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit(do_not_specialize=TURN_ARGUMENTS)
def enter_kernel(peers_ptr, fault_ptr, rank, world, turn, call, timeout_ns):  # type: ignore[no-untyped-def]
    """Enter a turn, and wait until this rank may write to all ranks; one program."""
    enter(peers_ptr, rank, world, turn, call)
    for peer in range(world):
        may_write_to(peers_ptr, peer, rank, turn, fault_ptr, timeout_ns)


@triton.jit(do_not_specialize=TURN_ARGUMENTS)
def sum_tiles_kernel(  # type: ignore[no-untyped-def]
    y_ptr, peers_ptr, fault_ptr, rows, columns, rank, world, turn, first_flag, data, timeout_ns,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the sums of ``matmul_scatter_kernel``, by columns, as the kernel in CUDA C++ computes them."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    for tile in range(tl.program_id(0), tiles_m * tl.cdiv(columns, BLOCK_N), tl.num_programs(0)):
        sum_tile(
            y_ptr, peers_ptr, fault_ptr, rows, columns, tile % tiles_m, tile // tiles_m, rank, world, turn,
            first_flag, data, timeout_ns, DTYPE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
