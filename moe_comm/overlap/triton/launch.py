"""Launches of the kernels for experts: memory, tables and names of flags for error messages.

Each launch is one turn, a numbered call of an operator on symmetric memory (``memory.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import MoeCommError
from moe_comm.gpu.blocks import ALIGN
from moe_comm.kernels.triton.launch import DTYPES, on_device_of, waiting_programs
from moe_comm.overlap.tiles import Cut, Ints
from moe_comm.overlap.triton.dispatch_matmul import dispatch_matmul_kernel
from moe_comm.overlap.triton.matmul_combine import matmul_combine_kernel
from moe_comm.overlap.triton.memory import Names, SymmetricMemory, memory_of
from moe_comm.overlap.triton.routes import (
    RowPositions,
    combine_sums,
    combine_tiles,
    direct_sends,
    dispatch_tiles,
    relay_items,
    relay_sends,
)
from moe_comm.overlap.triton.tiling import ExpertTiling


@dataclass(frozen=True, eq=False)
class TritonDispatch:
    """One dispatch by the Triton kernels, after the handshake. The combine kernel needs it to return the results.

    relayed_WW: rows from each rank to each rank if rows are relayed (one copy per token and rank), else None.
    """

    dispatcher: AllToAllDispatcher
    handle: DispatchHandle
    positions: RowPositions
    tiling: ExpertTiling
    relayed_WW: Ints | None

    @property
    def memory(self) -> SymmetricMemory:
        return memory_of(self.dispatcher.group, self.handle.device)

    def with_programs(self, programs: int | None) -> TritonDispatch:
        """Return the same dispatch with another number of communicating programs; None: the default. Same bits."""
        return replace(self, tiling=replace(self.tiling, communicators=programs))

    def handshake(self, op: str, fault: MoeCommError | None = None) -> None:
        """Run the handshake of an operation on these rows, if the dispatcher is checked. Raises ``fault``."""
        header = replace(self.dispatcher.header(op, self.handle, False), fault=fault)
        self.dispatcher.check_headers(header, self.handle.device)
        if fault is not None:
            raise fault


@dataclass(frozen=True, eq=False)
class DispatchProducts:
    """h_RG: products. rows_RD, scale_R: received rows and weights in symmetric memory, valid until the next turn."""

    h_RG: Tensor
    rows_RD: Tensor
    scale_R: Tensor


def run_dispatch(dispatch: TritonDispatch, x_TD: Tensor, weights_TK: Tensor | None, w_EGD: Tensor) -> DispatchProducts:
    """Send rows to their experts, and multiply them there by their slot's weight, if any, and w.T. No autograd.

    x_TD: [T, D]; weights_TK: [T, K] fp32, dense; w_EGD: [E, G, D], any strides.
    """
    positions, tiling, memory = dispatch.positions, dispatch.tiling, dispatch.memory
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    device, element = x_TD.device, x_TD.element_size()
    inner, columns, top_k, world = x_TD.shape[1], w_EGD.shape[1], positions.top_k, positions.ring.world
    relay, slots = None, 0
    if dispatch.relayed_WW is None:
        sends = direct_sends(positions, tiling.send_rows)
        num_flags = max(dispatch.dispatcher.placement.experts_per_rank) * world
    else:
        sends = relay_sends(positions, dispatch.relayed_WW, tiling.send_rows)
        relay = relay_items(positions, dispatch.relayed_WW, tiling.send_rows)
        slots, num_flags = relay.slots, relay.num_flags
    tiles = dispatch_tiles(positions, Cut(tiling.rows, tiling.extra_tiles), columns, relay is not None)
    scaled = weights_TK is not None
    row_sizes = (positions.max_rows * inner * element, positions.max_rows * 4 * scaled)
    slot_sizes = (slots * inner * element, slots * top_k * 8, slots * top_k * 4 * scaled)
    starts = _sections((*row_sizes, *slot_sizes))
    description = f"{'matmul_combine backward' if scaled else 'dispatch_matmul'} of {inner} columns, top-{top_k}"
    turn = memory.turn(starts[-1], num_flags, description, _dispatch_names(dispatch))
    rows_at, scale_at, *slots_at = (turn.data + start for start in starts[:-1])
    h_RG = torch.empty(positions.num_rows, columns, dtype=x_TD.dtype, device=device)
    moving, computing = tiling.split(waiting_programs(device), 2 if relay is not None else 1)
    relaying = moving if relay is not None else 0
    no_table = x_TD.new_empty(0, dtype=torch.int64)
    with on_device_of(x_TD):
        dispatch_matmul_kernel[(moving + relaying + computing,)](
            x_TD, x_TD.stride(0), weights_TK if weights_TK is not None else no_table,
            positions.place_TK, positions.owner_TK, sends.items, len(sends), sends.index,
            relay.items if relay is not None else no_table, len(relay) if relay is not None else 0,
            tiles.items, len(tiles), tiles.flags,
            torch.zeros(sends.num_counters, dtype=torch.int64, device=device),
            torch.zeros(world, dtype=torch.int64, device=device),
            w_EGD, *w_EGD.stride(), h_RG,
            memory.peers_W, memory.rank, world, turn.number, turn.call, turn.first_flag,
            rows_at, scale_at, *slots_at, memory.fault, memory.timeout_ns, columns, inner,
            ELEMENT=DTYPES[x_TD.dtype], SCALED=scaled, RELAYED=relay is not None, TOP_K=top_k,
            SEND_PROGRAMS=moving, RELAY_PROGRAMS=relaying, COMPUTE_PROGRAMS=computing,
            SEND_ROWS=tiling.send_rows, SEND_COLUMNS=tiling.send_columns, **tiling.blocks, **tiling.launch(device),
        )  # fmt: skip
    memory.finish(turn)
    rows_RD = memory.data(turn, (positions.num_rows, inner), x_TD.dtype)
    return DispatchProducts(h_RG, rows_RD, memory.data(turn, (positions.num_rows * scaled,), torch.float32, starts[1]))


def run_combine(
    dispatch: TritonDispatch, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute rows @ w.T, and sum the results of each token, with weights if given. No autograd.

    rows_RF: [R, F] dense; w_EDF: [E, D, F], any strides; weights_TK: [T, K] fp32, dense.

    Returns:
        y_TD: [T, D]. results_RD: [R, D] this rank's products in symmetric memory, valid until the next turn.
    """
    positions, tiling, memory = dispatch.positions, dispatch.tiling, dispatch.memory
    device, columns, inner = rows_RF.device, w_EDF.shape[1], w_EDF.shape[2]
    slices = tiling.slices_of(columns)
    tiles = combine_tiles(positions, Cut(tiling.rows, tiling.extra_tiles), columns, slices, tiling.columns)
    sums = combine_sums(positions, columns, slices, tiling.columns, tiling.sum_tokens)
    description = f"{'dispatch_matmul backward' if weights_TK is None else 'matmul_combine'} of {columns} columns"
    num_bytes = positions.max_rows * columns * rows_RF.element_size()
    turn = memory.turn(num_bytes, sums.num_flags, description, _combine_names(dispatch, slices))
    y_TD = torch.empty(positions.num_tokens, columns, dtype=rows_RF.dtype, device=device)
    summing, computing = tiling.split(waiting_programs(device), 1)
    with on_device_of(rows_RF):
        matmul_combine_kernel[(computing + summing,)](
            rows_RF, w_EDF, *w_EDF.stride(), tiles.items, len(tiles), tiles.flags,
            torch.zeros(sums.num_flags, dtype=torch.int64, device=device),
            sums.items, len(sums), sums.sources, len(sums.sources), positions.place_TK, positions.owner_TK,
            weights_TK if weights_TK is not None else positions.place_TK, y_TD,  # any tensor: not read without weights
            memory.peers_W, memory.rank, memory.world, turn.number, turn.call, turn.first_flag,
            turn.data, memory.fault, memory.timeout_ns, columns, inner,
            ELEMENT=DTYPES[rows_RF.dtype], WEIGHTED=weights_TK is not None, TOP_K=positions.top_k,
            COMPUTE_PROGRAMS=computing, SUM_PROGRAMS=summing, TOKENS=tiling.sum_tokens, SUM_COLUMNS=tiling.columns,
            enable_fp_fusion=False,  # the sum multiplies, rounds, adds and rounds, as on CPUs
            **tiling.blocks, **tiling.launch(device),
        )  # fmt: skip
    memory.finish(turn)
    return y_TD, memory.data(turn, (positions.num_rows, columns), rows_RF.dtype)


def _dispatch_names(dispatch: TritonDispatch) -> Names:
    world, experts = dispatch.positions.ring.world, dispatch.positions.experts
    relayed = dispatch.relayed_WW is not None

    def name(flag: int) -> str:
        if not relayed:
            return f"rows of rank {flag % world} for expert {experts.start + flag // world}"
        if flag < world:
            return f"all relayed rows of rank {flag} are in place"
        return f"block {flag - world} of relayed rows"

    return name


def _combine_names(dispatch: TritonDispatch, slices: int) -> Names:
    world = dispatch.positions.ring.world
    return lambda flag: f"slice {flag // world} of {slices} of the results of rank {flag % world}"


def _sections(sizes: tuple[int, ...]) -> list[int]:
    """Return the first byte of each section of a turn's data, and the end."""
    return [0, *np.cumsum([-(-size // ALIGN) * ALIGN for size in sizes]).tolist()]
