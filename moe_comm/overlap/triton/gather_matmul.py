"""All-gather + GEMM in one persistent kernel (Flux, arXiv 2406.06858).

    rank 1 of 3                                              own rows are complete at once; the others in ring order
    moving     rows of rank 1 ──▶ rank 0, ──▶ rank 2                ranks  1  2  0
    computing  tiles of rank 1's rows │ wait, tiles of rank 2's │ wait, tiles of rank 0's

A tile waits for one flag: that of the chunk of rows that contains it. A turn is one call of an operator
(``memory.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.kernels.triton.device import int64, rounded, tile_at
from moe_comm.kernels.triton.launch import DTYPES
from moe_comm.overlap.triton.flags import data_of, enter, wait_at_least, words_of
from moe_comm.overlap.triton.memory import TURN_ARGUMENTS, KernelTurn, Names, SymmetricMemory
from moe_comm.overlap.triton.programs import Programs, aligned, push_rows, tile_offsets, tile_product


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
    peers_ptr, fault_ptr, rows, width, rank, world, turn, first_flag, data, timeout_ns,
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


@dataclass(frozen=True)
class TritonGather:
    """One fused all-gather + matmul call, over rows [S, D] of each rank.

    offset: bytes from the start of the turn's data. flag: index of the first flag among the turn's flags.
    """

    memory: SymmetricMemory
    turn: KernelTurn
    programs: Programs
    offset: int = 0
    flag: int = 0

    @staticmethod
    def needs(rows: int, width: int, dtype: torch.dtype, world: int, programs: Programs) -> tuple[int, int]:
        """Return the bytes of data and the number of flags."""
        return world * rows * width * dtype.itemsize, world * -(-rows // programs.chunk_rows)

    @staticmethod
    def names(rows: int, programs: Programs) -> Names:
        """Return the descriptions of the flags."""
        chunks, size = -(-rows // programs.chunk_rows), programs.chunk_rows

        def name(index: int) -> str:
            source, chunk = divmod(index, chunks)
            return f"rows {chunk * size} to {min(rows, chunk * size + size) - 1} of rank {source} are complete"

        return name

    @property
    def location(self) -> tuple[int, int, int, int, int]:
        """rank, world, turn, first flag and data, in the order of the kernels' arguments."""
        memory, turn = self.memory, self.turn
        return memory.rank, memory.world, turn.number, turn.first_flag + self.flag, turn.data + self.offset

    def multiply(self, x_SD: Tensor, b_DN: Tensor, y_WSN: Tensor) -> None:
        """Gather x and write all ranks' rows @ b to y. x and y are dense; b has any strides."""
        (rows, inner), columns = x_SD.shape, b_DN.shape[1]
        memory, programs = self.memory, self.programs
        rank, world, number, first_flag, data = self.location
        grid = programs.moving + programs.computing
        gather_matmul_kernel[(grid,)](
            x_SD, b_DN, y_WSN, memory.peers_W, memory.fault,
            rows, inner, columns, b_DN.stride(0), b_DN.stride(1),
            rank, world, number, self.turn.call, first_flag, data, memory.timeout_ns, programs.moving,
            DTYPE=DTYPES[x_SD.dtype], ALIGNED=_aligned(x_SD), CHUNK=programs.chunk_rows, COPY=programs.copy,
            **programs.launch(x_SD.device),
        )  # fmt: skip

    def push(self, x_SD: Tensor) -> None:
        """Push this rank's rows to the peers, without a GEMM."""
        memory, programs = self.memory, self.programs
        rank, world, number, first_flag, data = self.location
        push_rows_kernel[(programs.moving,)](
            x_SD, memory.peers_W, memory.fault, *x_SD.shape,
            rank, world, number, self.turn.call, first_flag, data, memory.timeout_ns,
            DTYPE=DTYPES[x_SD.dtype], ALIGNED=_aligned(x_SD), CHUNK=programs.chunk_rows, COPY=programs.copy,
        )  # fmt: skip

    def await_all(self, x_SD: Tensor) -> None:
        """Wait for the rows that peers push."""
        memory, programs = self.memory, self.programs
        await_rows_kernel[(programs.moving,)](
            memory.peers_W, memory.fault, *x_SD.shape, *self.location, memory.timeout_ns,
            DTYPE=DTYPES[x_SD.dtype], CHUNK=programs.chunk_rows, COPY=programs.copy,
        )  # fmt: skip

    def rows(self, x_SD: Tensor) -> Tensor:
        """Return [W, S, D] after all rows are complete; valid until the next turn."""
        shape = (self.memory.world, *x_SD.shape)
        rows_WSD = self.memory.data(self.turn, shape, x_SD.dtype, self.offset)
        rows_WSD[self.memory.rank] = x_SD
        return rows_WSD


def _aligned(x_SD: Tensor) -> bool:
    return aligned(x_SD.data_ptr(), row_bytes=x_SD.shape[1] * x_SD.element_size())
