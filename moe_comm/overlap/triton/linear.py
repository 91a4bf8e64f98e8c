"""The operators of ``overlap/linear.py`` as Triton kernels (``programs.py``).

forward    gather_matmul    one kernel
           matmul_scatter   one kernel
backward   gather_matmul    pushes rows of x again; one kernel for grad @ weight and its sum; then grad.T @ x
           matmul_scatter   one kernel that gathers grad for grad @ weight and keeps it for grad.T @ x

Each call is one turn (``memory.py``). The bits depend on the tile sizes, not on the number of programs or on timing.
Weight gradients are one GEMM over the rows of all ranks.

With MOE_COMM_GEMM=cuda, the GEMMs of bf16 rows are kernels in CUDA C++ where they run (csrc/cuda/gemm/listed.h), beside
the kernels that move rows:

                  current stream                                            side stream
gather_matmul     tiles of own rows, then of each rank's after their flags  push own rows
matmul_scatter    columns in slices, tiles of the next rank's rows first,   sum a tile of all ranks, in rank order,
                  stored to the memory of that rank, then their flags       after its flags; round once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.gpu.blocks import round_up
from moe_comm.gpu.gemm import GpuGemm, ListedTiles, RanksRows
from moe_comm.gpu.protocol import TILE_ROWS
from moe_comm.kernels.tensor_cores import current_stream, listed_launcher, setting
from moe_comm.kernels.triton.launch import DTYPES, on_device_of, options
from moe_comm.overlap.chunked import exact_mm
from moe_comm.overlap.triton.memory import KernelTurn, Names, SymmetricMemory, memory_of
from moe_comm.overlap.triton.programs import (
    Programs,
    aligned,
    await_rows_kernel,
    enter_kernel,
    gather_matmul_kernel,
    matmul_scatter_kernel,
    push_rows_kernel,
    sum_tiles_kernel,
)
from moe_comm.overlap.triton.tile_list import TileList, tiles_of_ranks

Gradients = tuple[Tensor | None, Tensor | None]
"""Gradients of x and the weight; None for a gradient that is not needed."""


class _Section(NamedTuple):
    """The memory of one transfer within a turn: size of its data, number of its flags, and their descriptions."""

    data_bytes: int
    flags: int
    names: Names


@dataclass(frozen=True)
class LinearKernels:
    """The four passes without autograd. All calls are collective. The operator is named as in ``overlap/linear.py``,
    which checks the operands.

    A rank that does not raise its flag in time is reported by a later call or by ``memory.check(wait=True)`` on a GPU,
    and results that depend on its rows are NaN.
    """

    memory: SymmetricMemory
    programs: Programs

    @classmethod
    def of(cls, group: ProcessGroup | None, like: Tensor, moving: int | None = None) -> LinearKernels:
        """Return the kernels for tensors like ``like``, with the default sizes for their device.

        Args:
            moving: Programs that communicate; None: the default.
        """
        programs = Programs.of(like.device, like.dtype, moving)
        return cls(memory_of(group, like.device), programs)

    def forward(self, operator: str, x: Tensor, w: Tensor) -> Tensor:
        """Return the result of ``operator``."""
        with on_device_of(x):
            if operator == "gather_matmul":
                y_WSN, _ = self._gathered(x.contiguous(), w.t(), f"gather_matmul of {tuple(x.shape)}", None)
                return y_WSN.flatten(0, 1)
            return self._scattered(x.contiguous(), w)

    def gradients(self, operator: str, x: Tensor, w: Tensor, grad: Tensor, needs_x: bool, needs_w: bool) -> Gradients:
        """Return the gradients of x and the weight for ``grad`` of the result."""
        if not (needs_x or needs_w):
            return None, None
        with on_device_of(x):
            if operator == "gather_matmul":
                return self._gather_gradients(x.contiguous(), w, grad.contiguous(), needs_x, needs_w)
            description = f"matmul_scatter backward of {tuple(x.shape)}"
            b_NK = w if needs_x else w[:, :0]
            grad_WSK, grad_w = self._gathered(grad.contiguous(), b_NK, description, x if needs_w else None)
            return grad_WSK.flatten(0, 1) if needs_x else None, grad_w

    def _scattered(self, x_TK: Tensor, w: Tensor) -> Tensor:
        world, columns = self.memory.world, w.shape[0]
        rows = x_TK.shape[0] // world
        y_SN = x_TK.new_zeros(rows, columns) if not x_TK.numel() else x_TK.new_empty(rows, columns)
        if x_TK.numel() and columns:
            description = f"matmul_scatter of {tuple(x_TK.shape)} by {columns}"
            turn = self.memory.turn(*self._sums_section(y_SN), description)
            self._multiply_and_sum(turn, x_TK.unflatten(0, (world, rows)), w.t(), y_SN)
            self.memory.finish(turn)
        return y_SN

    def _gather_gradients(self, x_SD: Tensor, w_ND: Tensor, grad_TN: Tensor, needs_x: bool, needs_w: bool) -> Gradients:
        if not x_SD.numel():
            return torch.zeros_like(x_SD) if needs_x else None, torch.zeros_like(w_ND) if needs_w else None
        grad_x = grad_w = None
        sums, received = self._sums_section(x_SD), self._rows_section(x_SD)
        offset = round_up(sums.data_bytes)

        def name(index: int) -> str:
            return sums.names(index) if index < sums.flags else received.names(index - sums.flags)

        description = f"gather_matmul backward of {tuple(x_SD.shape)} by {w_ND.shape[0]}"
        turn = self.memory.turn(offset + received.data_bytes, sums.flags + received.flags, name, description)
        if needs_w:
            with self.memory.fork():
                self._push(turn, x_SD, offset, sums.flags)
        if needs_x:
            grad_x = torch.empty_like(x_SD)
            self._multiply_and_sum(turn, grad_TN.unflatten(0, (self.memory.world, x_SD.shape[0])), w_ND, grad_x)
        self.memory.join()
        if needs_w:
            self._await(turn, x_SD, offset, sums.flags)
            grad_w = exact_mm(grad_TN.t(), self._received(turn, x_SD, offset).flatten(0, 1))
        self.memory.finish(turn)
        return grad_x, grad_w

    def _gathered(
        self, x_SD: Tensor, b_DN: Tensor, description: str, other_TK: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return [W, S, N] = gathered x @ b, and [D, K] = gathered x.T @ other."""
        memory, programs = self.memory, self.programs
        (rows, inner), columns = x_SD.shape, b_DN.shape[1]
        y_WSN = x_SD.new_empty(memory.world, rows, columns)
        if not rows * inner or not (columns or other_TK is not None):
            return y_WSN.zero_(), None if other_TK is None else x_SD.new_zeros(inner, other_TK.shape[1])
        turn = memory.turn(*self._rows_section(x_SD), f"{description} by {columns}")
        if columns and not self._multiply_arrived(turn, x_SD, b_DN, y_WSN):
            gather_matmul_kernel[(programs.moving + programs.computing,)](
                x_SD, b_DN, y_WSN, memory.peers_W, memory.fault,
                rows, inner, columns, b_DN.stride(0), b_DN.stride(1),
                *self._arguments(turn), programs.moving,
                DTYPE=DTYPES[x_SD.dtype], ALIGNED=aligned(x_SD), CHUNK=programs.tile.rows, COPY=programs.copy,
                **programs.launch(x_SD.device),
            )  # fmt: skip
        elif not columns:
            self._push(turn, x_SD)
            self._await(turn, x_SD)
        product = None
        if other_TK is not None:
            product = exact_mm(self._received(turn, x_SD).flatten(0, 1).t(), other_TK)
        memory.finish(turn)
        return y_WSN, product

    def _multiply_and_sum(self, turn: KernelTurn, x_WSK: Tensor, b_KN: Tensor, y_SN: Tensor) -> None:
        """Write this rank's rows of the sum over ranks of x @ b to y. x and y are dense; b has any strides."""
        (_, rows, inner), columns = x_WSK.shape, b_KN.shape[1]
        memory, programs = self.memory, self.programs
        if self._multiply_published(turn, x_WSK, b_KN, y_SN):
            return
        memory.join()
        matmul_scatter_kernel[(programs.moving + programs.computing,)](
            x_WSK, b_KN, y_SN, memory.peers_W, memory.fault,
            rows, inner, columns, b_KN.stride(0), b_KN.stride(1),
            *self._arguments(turn), programs.computing,
            DTYPE=DTYPES[x_WSK.dtype], ALIGNED=aligned(x_WSK), **programs.launch(x_WSK.device),
        )  # fmt: skip

    def _multiply_arrived(self, turn: KernelTurn, x_SD: Tensor, b_DN: Tensor, y_WSN: Tensor) -> bool:
        """Push x, and write the gathered x @ b to y, if a kernel in CUDA C++ multiplies them."""
        memory, (rows, inner), columns = self.memory, x_SD.shape, b_DN.shape[1]
        w_END, received_TD = b_DN.t().unsqueeze(0), memory.data(turn, (memory.world * rows, inner), x_SD.dtype)
        y_TN = y_WSN.flatten(0, 1)
        gemm = self._launcher(received_TD, w_END, y_TN, False)
        if gemm is None or not aligned(x_SD):
            return False
        with memory.fork():
            self._push(turn, x_SD)
        tiles = tiles_of_ranks(rows, memory.rank, memory.world, 0, x_SD.device)
        number = tiles.items_N6.shape[0]
        words = tiles.count.new_zeros(1), tiles.count.new_empty(number * -(-columns // TILE_ROWS))
        ranks = RanksRows(number // memory.world, x_SD, memory.rank * rows)
        self._launch(gemm, turn, tiles, words, ranks, (received_TD, w_END, y_TN))
        memory.join()
        return True

    def _multiply_published(self, turn: KernelTurn, x_WSK: Tensor, b_KN: Tensor, y_SN: Tensor) -> bool:
        """As ``_multiply_and_sum``, if a kernel in CUDA C++ multiplies."""
        memory, programs = self.memory, self.programs
        w_END, x_TK = b_KN.t().unsqueeze(0), x_WSK.flatten(0, 1)
        slot_SN = memory.data(turn, (memory.world, *y_SN.shape), y_SN.dtype)[memory.rank]
        gemm = self._launcher(x_TK, w_END, slot_SN, True)
        if gemm is None:
            return False
        rank, world, number, call, first_flag, data, timeout_ns = self._arguments(turn)
        peers_W, fault, tile = memory.peers_W, memory.fault, programs.tile
        enter_kernel[(1,)](peers_W, fault, rank, world, number, call, timeout_ns)
        side = memory.fork()
        tiles, flags = tiles_of_ranks(y_SN.shape[0], rank, world, 1, y_SN.device), self._sums_section(y_SN).flags
        ranks = RanksRows(flags // world, slot=data + rank * y_SN.nbytes)
        self._launch(gemm, turn, tiles, (tiles.count.new_zeros(flags + 1), None), ranks, (x_TK, w_END, slot_SN))
        with side:
            sum_tiles_kernel[(programs.moving,)](
                y_SN, peers_W, fault, *y_SN.shape, rank, world, number, first_flag, data, timeout_ns,
                DTYPE=DTYPES[y_SN.dtype], BLOCK_M=tile.rows, BLOCK_N=tile.columns,
                **options(y_SN, num_warps=tile.warps),
            )  # fmt: skip
        memory.join()
        return True

    def _launcher(self, rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, published: bool) -> GpuGemm | None:
        """Return what launches the kernel in CUDA C++ for these matrices, or None for Triton."""
        tile = self.programs.tile
        if setting() != "cuda" or (tile.rows, tile.columns) != (TILE_ROWS, TILE_ROWS):  # other flags
            return None
        return listed_launcher(rows_RD, w_END, out_RN, published)

    def _launch(
        self, gemm: GpuGemm, turn: KernelTurn, tiles: TileList, words: Sequence[Tensor | None], ranks: RanksRows,
        matrices: tuple[Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Launch the GEMM of rows, weights and results. words: counters, and room for tiles that are set aside."""
        published = ranks.own_SD is None
        all_words = tiles.items_N6, tiles.count, tiles.rows_EW, tiles.tiles_W, *words
        flags, blocks = self.memory.row_flags(turn), self.programs.computing
        listed, (rows_RD, w_END, out_RN) = ListedTiles(all_words, flags, published, blocks, ranks), matrices
        gemm.listed(rows_RD, w_END, out_RN, None, listed, current_stream(rows_RD.device))

    def _push(self, turn: KernelTurn, x_SD: Tensor, offset: int = 0, flag: int = 0) -> None:
        """Push this rank's rows to the peers, without a GEMM."""
        memory, programs = self.memory, self.programs
        push_rows_kernel[(programs.moving,)](
            x_SD, memory.peers_W, memory.fault, *x_SD.shape, *self._arguments(turn, offset, flag),
            DTYPE=DTYPES[x_SD.dtype], ALIGNED=aligned(x_SD), CHUNK=programs.tile.rows, COPY=programs.copy,
        )  # fmt: skip

    def _await(self, turn: KernelTurn, x_SD: Tensor, offset: int = 0, flag: int = 0) -> None:
        """Wait for the rows that peers push."""
        memory, programs = self.memory, self.programs
        await_rows_kernel[(programs.moving,)](
            memory.peers_W, memory.fault, *x_SD.shape, *self._arguments(turn, offset, flag),
            DTYPE=DTYPES[x_SD.dtype], CHUNK=programs.tile.rows, COPY=programs.copy,
        )  # fmt: skip

    def _received(self, turn: KernelTurn, x_SD: Tensor, offset: int = 0) -> Tensor:
        """Return [W, S, D] after all rows are complete; valid until the next turn."""
        rows_WSD = self.memory.data(turn, (self.memory.world, *x_SD.shape), x_SD.dtype, offset)
        rows_WSD[self.memory.rank] = x_SD
        return rows_WSD

    def _arguments(self, turn: KernelTurn, offset: int = 0, flag: int = 0) -> tuple[int, ...]:
        """Return the arguments ``rank`` to ``timeout_ns`` of the kernels.

        offset: bytes from the start of the turn's data. flag: index of the first flag among the turn's flags.
        """
        memory = self.memory
        place = turn.first_flag + flag, turn.data + offset
        return memory.rank, memory.world, turn.number, turn.call, *place, memory.timeout_ns

    def _rows_section(self, x_SD: Tensor) -> _Section:
        """Return the memory for the rows of all ranks, with a flag for each chunk."""
        rows, size = x_SD.shape[0], self.programs.tile.rows
        chunks = -(-rows // size)

        def name(index: int) -> str:
            source, chunk = divmod(index, chunks)
            return f"rows {chunk * size} to {min(rows, chunk * size + size) - 1} of rank {source} are complete"

        return _Section(self.memory.world * x_SD.nbytes, self.memory.world * chunks, name)

    def _sums_section(self, y_SN: Tensor) -> _Section:
        """Return the memory for each rank's partial sums, with a flag for each tile."""
        rows, columns = y_SN.shape
        tiles = -(-rows // self.programs.tile.rows) * -(-columns // self.programs.tile.columns)

        def name(index: int) -> str:
            source, tile = divmod(index, tiles)
            return f"tile {tile} (of {tiles}) of rank {source} is complete"

        return _Section(self.memory.world * y_SN.nbytes, self.memory.world * tiles, name)
