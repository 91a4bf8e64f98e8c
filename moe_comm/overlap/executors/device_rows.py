"""The device executor over ``peer_to_peer``: the first GEMM of the experts starts while their rows are received.

    separate stream    count ▸ scan ▸ meet ▸ push ───────────────┐ rows of peers, and flags
    caller's stream                        tile list ▸ arrived_mm ▸ activation ▸ w2 ▸ combine

``push`` runs on few thread blocks, and on its own stream, so that own rows are computed while it moves rows. Rows and
flags are those of ``peer_to_peer``; the tiles are listed and the rows are awaited on the device
(``triton/tile_list.py``, ``triton/arrived_mm.py``). The other GEMMs, backward and combine are those of the serial
executor, so the bits of 16-bit experts are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.dispatch.peer_to_peer.primitives import PeerToPeerPrimitives
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import ConfigError, InputError, MissingDependency, MoeCommError
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.expert_mlp import Alloc, ExpertMLP
from moe_comm.kernels.needed_grads import needed_gradients, needs_autograd
from moe_comm.overlap.executors.base import ExpertCall, check_device_experts
from moe_comm.overlap.executors.shared_rows import SharedDispatch, SharedSend, can_pipeline
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS


def peer_fault(dispatcher: PeerToPeerPrimitives, x_TD: Tensor) -> MoeCommError | None:
    """Return the error if the kernels cannot run a whole layer over ``peer_to_peer``, else None."""
    if not can_pipeline(dispatcher):
        wire_dtypes = dispatcher.options.wire_dtypes
        return ConfigError(f"overlap needs wire dtypes with scales for each row; got {wire_dtypes}")
    try:
        from moe_comm.overlap.triton.arrived_mm import rows_fault  # needs Triton
    except MissingDependency as error:
        return error
    return rows_fault(x_TD.dtype, x_TD.device)


@dataclass(eq=False)
class _Run:
    """State that the autograd functions of one call share.

    counts_E: rows of each expert, on the device. alloc: allocates rows that peers can read. guard: context of backward.
    saves_h: keep h for backward. grad_rows_RD: passed from the experts' backward pass to that of the dispatch.
    """

    counts_E: Tensor
    alloc: Alloc
    guard: Callable[[], AbstractContextManager[None]]
    label: str
    saves_h: bool = False
    grad_rows_RD: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _RowsInFlight:
    """The rows of one dispatch, which may be in flight.

    rows_RD: without autograd; connected_RD: connected to the tokens. counts_E: rows of each expert, on the device.
    first: the GEMM that waits for the rows.
    """

    dispatch: SharedDispatch
    send: SharedSend
    connected_RD: Tensor
    counts_E: Tensor
    first: expert_mlp_gpu.FirstProduct

    @property
    def handle(self) -> DispatchHandle:
        return self.dispatch.handle

    @property
    def rows_RD(self) -> Tensor:
        return self.send.rows_RD

    def close(self) -> None:
        """End the dispatch: later operations of the group wait until all rows are complete."""
        self.send.close()


def _open(
    dispatcher: PeerToPeerPrimitives, x_TD: Tensor, ids_TK: Tensor, overlap: Overlap, label: str
) -> _RowsInFlight:
    """Start a dispatch on a separate stream, and list its tiles. Collective."""
    from moe_comm.overlap.triton import arrived_mm as kernels, tile_list  # need Triton

    blocks = kernels.sending_blocks(x_TD.device, overlap.programs)
    start = partial(dispatcher.start_dispatch_aside, num_blocks=blocks)
    dispatch, send = SharedDispatch.open(dispatcher, x_TD, ids_TK, overlap, label=label, start=start)
    try:
        flags, experts, counts_WE = dispatcher.row_flags(), dispatcher.local_experts, dispatcher.device_counts_WE
        tile_rows = kernels.tiling_of(send.rows_RD, len(experts)).rows
        tiles = tile_list.list_tiles(counts_WE, experts, dispatcher.rank, dispatch.handle.num_rows, tile_rows)
        dispatcher.memory.join()
        connected_RD = dispatch.dispatch_in_flight(send, x_TD)
    except BaseException as error:
        send.abort(error)
        raise

    def first(rows_RD: Tensor, w_EGD: Tensor, h_RG: Tensor) -> None:
        kernels.arrived_mm_into(rows_RD, w_EGD, tiles, flags, h_RG)
        dispatcher.memory.join()

    return _RowsInFlight(dispatch, send, connected_RD, tiles.counts_E, first)


class _Rows(torch.autograd.Function):
    """Return the autograd token, an empty tensor: the rows are in flight, and no hook may read them."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, run: _Run) -> Tensor:
        ctx.run = run
        return rows_RD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        run: _Run = ctx.run
        grad_rows_RD, run.grad_rows_RD = run.grad_rows_RD, None
        return grad_rows_RD, None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, run: _Run, received: _RowsInFlight, mlp: ExpertMLP, *tensors: Tensor | None
    ) -> Tensor:
        experts, rows_RD = mlp.with_tensors(tensors), received.rows_RD
        out_RD = run.alloc(rows_RD.shape[0], experts.columns, rows_RD.dtype, rows_RD.device)
        h_RG = expert_mlp_gpu.forward(experts, rows_RD, run.counts_E, out_RD, received.first)
        received.close()
        ctx.save_for_backward(rows_RD, h_RG if run.saves_h else None, *tensors)
        ctx.run, ctx.mlp = run, mlp
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=run.label), run.guard():
            rows_RD, h_RG, *tensors = ctx.saved_tensors
            needs_rows, _, _, _, *needs = needed_gradients(ctx)
            grad_RD = grad_RD if grad_RD.stride(-1) == 1 else grad_RD.contiguous()
            grad_rows = (
                run.alloc(rows_RD.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device) if needs_rows else None
            )
            experts = ctx.mlp.with_tensors(tensors)
            grads = expert_mlp_gpu.backward(experts, rows_RD, h_RG, grad_RD, run.counts_E, grad_rows, needs)
            run.grad_rows_RD = grad_rows
            of_biases = [None] * (len(tensors) - len(grads))
            return rows_RD.new_empty(0) if ctx.needs_input_grad[0] else None, None, None, None, *grads, *of_biases


class PeerDeviceCall(ExpertCall):
    """One call of a whole layer of experts without biases over ``peer_to_peer``; ``rows`` is the autograd token."""

    def __init__(
        self,
        dispatcher: PeerToPeerPrimitives,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        overlap: Overlap,
        label: str,
    ) -> None:
        self._weights_TK = weights_TK
        self._received = received = _open(dispatcher, x_TD, ids_TK, overlap, label)
        guard = partial(dispatcher.abort_on_error, received.handle.label)
        self._run = _Run(received.counts_E, dispatcher.empty_rows, guard, received.handle.label)
        self.rows = _Rows.apply(received.connected_RD, self._run)

    @property
    def handle(self) -> DispatchHandle:
        return self._received.handle

    def complete(self) -> None:
        self._received.close()

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """Return [R, D], the experts' outputs.

        Raises:
            ConfigError: the experts have biases, or fp8 GEMMs.
        """
        w13_EGD, w2_EDF, *_ = mlp.tensors
        assert w13_EGD is not None
        assert w2_EDF is not None
        check_device_experts(mlp)
        run, handle, experts = self._run, self.handle, len(self._received.dispatch.dispatcher.local_experts)
        if w13_EGD.shape[0] != experts or w13_EGD.shape[2] != handle.hidden or w13_EGD.device != handle.device:
            raise InputError(
                f"an expert layer needs weights [{experts}, .., {handle.hidden}] of this rank's experts on "
                f"{handle.device}; got {tuple(w13_EGD.shape)} on {w13_EGD.device}"
            )
        mlp.check_weights(rows)
        run.saves_h = needs_autograd(rows, *mlp.tensors) and not mlp.recomputes
        out_RD: Tensor = _Experts.apply(rows, run, self._received, mlp.with_tensors(), *mlp.tensors)
        return out_RD

    def combine(self, rows: Tensor) -> Tensor:
        return self._received.dispatch.dispatcher.combine(rows, self._weights_TK, self.handle)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return self._received.dispatch.abort_on_error(self._received.send)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, w_EGD: Tensor, received: _RowsInFlight, alloc: Alloc) -> Tensor:
        h_RG = rows_RD.new_empty(rows_RD.shape[0], w_EGD.shape[1])
        received.first(rows_RD, w_EGD, h_RG)
        received.close()
        ctx.save_for_backward(rows_RD, w_EGD, received.counts_E)
        ctx.alloc = alloc
        return h_RG

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        from moe_comm.kernels.triton.grouped_mm import grouped_mm_into  # needs Triton
        from moe_comm.kernels.triton.main_grad import weight_grad

        rows_RD, w_EGD, counts_E = ctx.saved_tensors
        needs_rows, needs_w = needed_gradients(ctx)[:2]
        rows, width = rows_RD.shape
        grad_RG, grad_RD, grad_w = grad_RG.contiguous(), None, None
        if needs_rows:
            grad_RD = ctx.alloc(rows, width, rows_RD.dtype, rows_RD.device)
            grouped_mm_into(grad_RG, w_EGD.transpose(1, 2), counts_E, grad_RD)
        if needs_w:
            grad_w = weight_grad(w_EGD, grad_RG, rows_RD, counts_E)
        return grad_RD, grad_w, None, None


def device_dispatch_matmul(
    dispatcher: PeerToPeerPrimitives, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, overlap: Overlap, label: str
) -> tuple[Tensor, SharedDispatch]:
    """Run ``dispatch_matmul`` with the kernels, after its checks. Returns its results."""
    received = _open(dispatcher, x_TD, ids_TK, overlap, label)
    with received.dispatch.abort_on_error(received.send):
        h_RG: Tensor = _Linear.apply(received.connected_RD, w_EGD, received, dispatcher.empty_rows)
    return h_RG, received.dispatch
