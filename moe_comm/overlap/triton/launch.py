"""Launches of the kernels for experts: what a call needs of memory and tables, and what its flags are called."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import MoeCommError
from moe_comm.gpu.blocks import ALIGN
from moe_comm.overlap.tiles import Cut, Ints
from moe_comm.overlap.triton.dispatch_matmul import dispatch_matmul_kernel
from moe_comm.overlap.triton.matmul_combine import matmul_combine_kernel
from moe_comm.overlap.triton.memory import Names, SymmetricMemory, memory_of
from moe_comm.overlap.triton.programs import DTYPES
from moe_comm.overlap.triton.routes import (
    Places,
    combine_sums,
    combine_tiles,
    direct_sends,
    dispatch_tiles,
    relay_items,
    relay_sends,
)
from moe_comm.overlap.triton.tiling import ExpertTiling, processors


@dataclass(frozen=True, eq=False)
class TritonPassage:
    """Where the rows of one dispatch went; what brings them back."""

    dispatcher: AllToAllDispatcher
    handle: DispatchHandle
    places: Places
    tiling: ExpertTiling
    relayed_WW: Ints | None

    @property
    def memory(self) -> SymmetricMemory:
        return memory_of(self.dispatcher.group, self.handle.device)

    def with_programs(self, communicating: int | None) -> TritonPassage:
        """The same with so many programs that communicate; None: a share of all. The bits do not depend on it."""
        return replace(self, tiling=replace(self.tiling, communicators=communicating))

    def begin(self, op: str, fault: MoeCommError | None = None) -> None:
        """The handshake of an operation on these rows, if the dispatcher is checked; raises ``fault``."""
        header = replace(self.dispatcher.header(op, self.handle, False), fault=fault)
        self.dispatcher.agree_again(header, self.handle.device)
        if fault is not None:
            raise fault


@dataclass(frozen=True, eq=False)
class Arrived:
    """h_RG: products. rows_RD, scale_R: what arrived, in symmetric memory: valid until the next turn."""

    h_RG: Tensor
    rows_RD: Tensor
    scale_R: Tensor


def run_dispatch(passage: TritonPassage, x_TD: Tensor, weights_TK: Tensor | None, w_EGD: Tensor) -> Arrived:
    """Rows to their experts, times their slot's weight if there are any, @ w.T. No autograd.

    x_TD: [T, D]; weights_TK: [T, K] fp32, dense; w_EGD: [E, G, D], any strides.
    """
    places, tiling, memory = passage.places, passage.tiling, passage.memory
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    device, element = x_TD.device, x_TD.element_size()
    inner, columns, top_k, world = x_TD.shape[1], w_EGD.shape[1], places.top_k, places.ring.world
    relay, slots = None, 0
    if passage.relayed_WW is None:
        sends = direct_sends(places, tiling.send_rows)
        num_flags = max(passage.dispatcher.placement.experts_per_rank) * world
    else:
        sends = relay_sends(places, passage.relayed_WW, tiling.send_rows)
        relay = relay_items(places, passage.relayed_WW, tiling.send_rows)
        slots, num_flags = relay.slots, relay.num_flags
    tiles = dispatch_tiles(places, Cut(tiling.rows, tiling.extra_tiles), columns, relay is not None)
    scaled = weights_TK is not None
    row_sizes = (places.most_rows * inner * element, places.most_rows * 4 * scaled)
    slot_sizes = (slots * inner * element, slots * top_k * 8, slots * top_k * 4 * scaled)
    starts = _sections((*row_sizes, *slot_sizes))
    description = f"{'matmul_combine backward' if scaled else 'dispatch_matmul'} of {inner} columns, top-{top_k}"
    turn = memory.turn(starts[-1], num_flags, description, _dispatch_names(passage))
    rows_at, scale_at, *slots_at = (turn.data + start for start in starts[:-1])
    h_RG = torch.empty(places.num_rows, columns, dtype=x_TD.dtype, device=device)
    each, compute = tiling.split(processors(device), 2 if relay is not None else 1)
    relays = each if relay is not None else 0
    nothing = x_TD.new_empty(0, dtype=torch.int64)
    with _on(device):
        dispatch_matmul_kernel[(each + relays + compute,)](
            x_TD,
            x_TD.stride(0),
            weights_TK if weights_TK is not None else nothing,
            places.place_TK,
            places.owner_TK,
            sends.items,
            len(sends),
            sends.index,
            relay.items if relay is not None else nothing,
            len(relay) if relay is not None else 0,
            tiles.items,
            len(tiles),
            tiles.flags,
            torch.zeros(sends.num_counters, dtype=torch.int64, device=device),
            torch.zeros(world, dtype=torch.int64, device=device),
            w_EGD,
            *w_EGD.stride(),
            h_RG,
            memory.peers_W,
            memory.rank,
            world,
            turn.number,
            turn.call,
            turn.first_flag,
            rows_at,
            scale_at,
            *slots_at,
            memory.fault,
            memory.timeout_ns,
            columns,
            inner,
            ELEMENT=DTYPES[x_TD.dtype],
            SCALED=scaled,
            RELAYED=relay is not None,
            TOP_K=top_k,
            SEND_PROGRAMS=each,
            RELAY_PROGRAMS=relays,
            COMPUTE_PROGRAMS=compute,
            SEND_ROWS=tiling.send_rows,
            SEND_COLUMNS=tiling.send_columns,
            BLOCK_M=tiling.rows,
            BLOCK_N=tiling.columns,
            BLOCK_K=tiling.inner,
            **tiling.launch(device),
        )
    memory.finish(turn)
    rows_RD = memory.data(turn, (places.num_rows, inner), x_TD.dtype)
    return Arrived(h_RG, rows_RD, memory.data(turn, (places.num_rows * scaled,), torch.float32, starts[1]))


def run_combine(
    passage: TritonPassage, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """rows @ w.T, back to their tokens, and summed there, with weights if there are any. No autograd.

    rows_RF: [R, F] dense; w_EDF: [E, D, F], any strides; weights_TK: [T, K] fp32, dense.

    Returns:
        y_TD: [T, D]. results_RD: [R, D] this rank's products, in symmetric memory: valid until the next turn.
    """
    places, tiling, memory = passage.places, passage.tiling, passage.memory
    device, columns, inner = rows_RF.device, w_EDF.shape[1], w_EDF.shape[2]
    slices = tiling.slices_of(columns)
    tiles = combine_tiles(places, Cut(tiling.rows, tiling.extra_tiles), columns, slices, tiling.columns)
    sums = combine_sums(places, columns, slices, tiling.columns, tiling.sum_tokens)
    description = f"{'dispatch_matmul backward' if weights_TK is None else 'matmul_combine'} of {columns} columns"
    num_bytes = places.most_rows * columns * rows_RF.element_size()
    turn = memory.turn(num_bytes, sums.num_flags, description, _combine_names(passage, slices))
    y_TD = torch.empty(places.num_tokens, columns, dtype=rows_RF.dtype, device=device)
    summing, compute = tiling.split(processors(device), 1)
    with _on(device):
        matmul_combine_kernel[(compute + summing,)](
            rows_RF,
            w_EDF,
            *w_EDF.stride(),
            tiles.items,
            len(tiles),
            tiles.flags,
            torch.zeros(sums.num_flags, dtype=torch.int64, device=device),
            sums.items,
            len(sums),
            sums.sources,
            len(sums.sources),
            places.place_TK,
            places.owner_TK,
            weights_TK if weights_TK is not None else places.place_TK,
            y_TD,
            memory.peers_W,
            memory.rank,
            memory.world,
            turn.number,
            turn.call,
            turn.first_flag,
            turn.data,
            memory.fault,
            memory.timeout_ns,
            columns,
            inner,
            ELEMENT=DTYPES[rows_RF.dtype],
            WEIGHTED=weights_TK is not None,
            TOP_K=places.top_k,
            COMPUTE_PROGRAMS=compute,
            SUM_PROGRAMS=summing,
            TOKENS=tiling.sum_tokens,
            SUM_COLUMNS=tiling.columns,
            BLOCK_M=tiling.rows,
            BLOCK_N=tiling.columns,
            BLOCK_K=tiling.inner,
            enable_fp_fusion=False,  # the sum multiplies, rounds, adds, rounds, as on CPUs
            **tiling.launch(device),
        )
    memory.finish(turn)
    return y_TD, memory.data(turn, (places.num_rows, columns), rows_RF.dtype)


def _dispatch_names(passage: TritonPassage) -> Names:
    world, experts = passage.places.ring.world, passage.places.experts
    relayed = passage.relayed_WW is not None

    def name(flag: int) -> str:
        if not relayed:
            return f"rows of rank {flag % world} for expert {experts.start + flag // world}"
        if flag < world:
            return f"all relayed rows of rank {flag} are in place"
        return f"block {flag - world} of relayed rows"

    return name


def _combine_names(passage: TritonPassage, slices: int) -> Names:
    world = passage.places.ring.world
    return lambda flag: f"slice {flag // world} of {slices} of the results of rank {flag % world}"


def _sections(sizes: tuple[int, ...]) -> list[int]:
    """First byte of each part of a turn's data, and the end."""
    return [0, *np.cumsum([-(-size // ALIGN) * ALIGN for size in sizes]).tolist()]


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
