"""GEMM + reduce-scatter in one persistent kernel (Flux, arXiv 2406.06858).

    rank 1 of 3                                                     the next rank's rows first, own rows last: no two
    computing  tiles for rank 2 │ tiles for rank 0 │ own tiles       ranks write to one at the same time
    moving     own tile, as soon as its share from rank 0, 1 and 2 is there: added in that order, rounded once

Every rank has a slot for each rank's share of its rows, and a flag for each tile in it. Shares travel in the dtype of
the rows; nothing is added by atomics, so the bits do not depend on who comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.kernels.triton.device import int64, rounded
from moe_comm.overlap.triton.device import data_of, enter, may_write_to, words_of
from moe_comm.overlap.triton.flags import notify, wait_at_least
from moe_comm.overlap.triton.memory import TURN_ARGUMENTS, Names, SymmetricMemory, Turn
from moe_comm.overlap.triton.programs import DTYPES, Programs, aligned, tile_at, tile_offsets, tile_product


@triton.jit(do_not_specialize=TURN_ARGUMENTS)
def matmul_scatter_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    b_ptr,
    y_ptr,
    peers_ptr,
    fault_ptr,
    rows,
    inner,
    columns,
    b_stride_k,
    b_stride_n,
    rank,
    world,
    turn,
    call,
    first_flag,
    data,
    timeout_ns,
    computing,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [rows, columns] = this rank's rows of the sum over ranks of x [W, rows, inner] @ b [inner, columns]."""
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
            # A mask and no branch: for sm_100, Triton 3.6 cannot compile an accumulator that is used in one.
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
                arrived = wait_at_least(words_of(peers_ptr, rank), flag, turn, source, fault_ptr, timeout_ns)
                share_ptr = slots_ptr + int64(source) * rows * columns
                share = tl.load(share_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
                total += tl.where(arrived, share, float("nan"))
            tl.store(y_ptr + offsets, rounded(total, DTYPE), mask=inside)


@dataclass(frozen=True)
class Scatter:
    """Where a turn adds up the ranks' shares of rows [S, N]: at the start of its data and its flags."""

    memory: SymmetricMemory
    turn: Turn
    programs: Programs

    @staticmethod
    def needs(rows: int, columns: int, dtype: torch.dtype, world: int, programs: Programs) -> tuple[int, int]:
        """Bytes of data, and flags."""
        tiles = -(-rows // programs.block_m) * -(-columns // programs.block_n)
        return world * rows * columns * dtype.itemsize, world * tiles

    @staticmethod
    def names(rows: int, columns: int, programs: Programs) -> Names:
        """What a flag says."""
        tiles = -(-rows // programs.block_m) * -(-columns // programs.block_n)

        def name(place: int) -> str:
            source, tile = divmod(place, tiles)
            return f"that rank {source}'s share of tile {tile} (of {tiles}) has arrived"

        return name

    def multiply(self, x_WSK: Tensor, b_KN: Tensor, y_SN: Tensor) -> None:
        """Write this rank's rows of the sum of all ranks' products. x and y are dense; b has any strides."""
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
