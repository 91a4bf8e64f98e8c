"""GEMM + reduce-scatter in one persistent kernel (Flux, arXiv 2406.06858).

    rank 1 of 3                                                     the next rank's rows first, own rows last: no two
    computing  tiles for rank 2 │ tiles for rank 0 │ own tiles      ranks write to one rank at the same time
    moving     own tile, once ranks 0, 1 and 2 have written it: summed in rank order, rounded once

Each rank has a slot for each rank's partial sums, and a flag for each tile in it. Partial sums are sent in the dtype of
the rows. No atomics are used for sums, so the bits do not depend on timing. A turn is one call of an operator
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
from moe_comm.overlap.triton.flags import data_of, enter, may_write_to, notify, wait_at_least, words_of
from moe_comm.overlap.triton.memory import TURN_ARGUMENTS, KernelTurn, Names, SymmetricMemory
from moe_comm.overlap.triton.programs import Programs, aligned, tile_offsets, tile_product


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
            tile = task % per_rank
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n)
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
                notify(words_of(peers_ptr, peer), first_flag + rank * per_rank + tile, turn)
    else:
        for tile in range(program - computing, per_rank, tl.num_programs(0) - computing):
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n)
            offsets, inside = tile_offsets(tile_m, tile_n, rows, columns, BLOCK_M, BLOCK_N)
            slots_ptr = data_of(peers_ptr, rank, data, DTYPE)
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for source in range(world):
                flag = first_flag + source * per_rank + tile
                complete = wait_at_least(words_of(peers_ptr, rank), flag, turn, source, fault_ptr, timeout_ns)
                part_ptr = slots_ptr + int64(source) * rows * columns
                part = tl.load(part_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
                total += tl.where(complete, part, float("nan"))
            tl.store(y_ptr + offsets, rounded(total, DTYPE), mask=inside)


@dataclass(frozen=True)
class TritonScatter:
    """One fused matmul + reduce-scatter call: the sum over ranks of rows [S, N]."""

    memory: SymmetricMemory
    turn: KernelTurn
    programs: Programs

    @staticmethod
    def needs(rows: int, columns: int, dtype: torch.dtype, world: int, programs: Programs) -> tuple[int, int]:
        """Return the bytes of data and the number of flags."""
        tiles = -(-rows // programs.block_m) * -(-columns // programs.block_n)
        return world * rows * columns * dtype.itemsize, world * tiles

    @staticmethod
    def names(rows: int, columns: int, programs: Programs) -> Names:
        """Return the descriptions of the flags."""
        tiles = -(-rows // programs.block_m) * -(-columns // programs.block_n)

        def name(index: int) -> str:
            source, tile = divmod(index, tiles)
            return f"tile {tile} (of {tiles}) of rank {source} is complete"

        return name

    def multiply(self, x_WSK: Tensor, b_KN: Tensor, y_SN: Tensor) -> None:
        """Write this rank's rows of the sum over ranks of x @ b to y. x and y are dense; b has any strides."""
        (world, rows, inner), columns = x_WSK.shape, b_KN.shape[1]
        memory, turn, programs = self.memory, self.turn, self.programs
        grid = programs.moving + programs.computing
        matmul_scatter_kernel[(grid,)](
            x_WSK, b_KN, y_SN, memory.peers_W, memory.fault,
            rows, inner, columns, b_KN.stride(0), b_KN.stride(1),
            memory.rank, world, turn.number, turn.call, turn.first_flag, turn.data, memory.timeout_ns,
            programs.computing,
            DTYPE=DTYPES[x_WSK.dtype],
            ALIGNED=aligned(x_WSK.data_ptr(), row_bytes=inner * x_WSK.element_size()),
            **programs.launch(x_WSK.device),
        )  # fmt: skip
