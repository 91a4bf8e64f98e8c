"""Rows and experts of the device executor: ``peer_to_peer`` moves rows while GEMMs wait for its flags, or set them.

    forward    separate stream   meet ▸ push_tiles ─ flags ──┐            meet ▸ ready ▸ sum ▸ ready ▸ sum ... ▸ done
               caller's stream                   tile list ▸ arrived_mm ▸ ... ▸ publish_mm ── flags ──┘
    backward   the same with spread_tiles instead of push_tiles; the order and the list of tiles are those of forward

Rows are sent by expert, with a flag for each tile (csrc/cuda/order.h), on few thread blocks, so that GEMMs compute
while rows move. The GEMMs are in ``triton/arrived_mm.py`` and ``triton/publish_mm.py``, and have the bits of serial
execution, as the sums have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.overlapped import OverlappedPrimitives
from moe_comm.errors import MoeCommError
from moe_comm.gpu.gemm import Glu
from moe_comm.gpu.protocol import RowFlags
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.autograd import needed_gradients, once_differentiable
from moe_comm.kernels.expert_mlp import ExpertMLP, LocalExperts
from moe_comm.kernels.expert_mlp_gpu import FirstProduct, FirstSwiGLU
from moe_comm.kernels.row_weights import RowWeights
from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, weight_grad
from moe_comm.overlap.executors.pipelined import Run, Sums
from moe_comm.overlap.executors.shared_rows import SharedDispatch, SharedGradients, SharedSend
from moe_comm.overlap.executors.transport import RowSend
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.triton import arrived_mm, publish_mm, tile_list
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS


@dataclass(frozen=True, eq=False)
class DeviceDispatch(SharedDispatch):
    """One dispatch over ``peer_to_peer`` for kernels that wait on the device.

    tiles: of the rows of this rank's experts. flags: of the rows. order: of this rank's tokens, by expert, for rows and
    gradients. num_blocks: thread blocks that send rows while a GEMM computes.
    """

    dispatcher: OverlappedPrimitives
    tiles: tile_list.TileList
    flags: RowFlags
    order: Tensor
    num_blocks: int

    @classmethod
    def start(
        cls, dispatcher: OverlappedPrimitives, x_TD: Tensor, ids_TK: Tensor, overlap: Overlap, label: str
    ) -> tuple[DeviceDispatch, SharedSend]:
        """Start a dispatch on a separate stream, and list its tiles. Collective; see ``SharedDispatch.open``."""
        blocks = arrived_mm.sending_blocks(x_TD.device, overlap.programs)
        start = partial(dispatcher.start_dispatch_on_side_stream, num_blocks=blocks)
        shared, send = SharedDispatch.open(dispatcher, x_TD, ids_TK, overlap, label=label, start=start)
        try:
            flags, experts, counts_WE = dispatcher.row_flags(), dispatcher.local_experts, dispatcher.device_counts_WE
            tile_rows = arrived_mm.tiling_of(send.rows_RD, len(experts)).rows
            tiles = tile_list.list_tiles(counts_WE, experts, dispatcher.rank, shared.handle.num_rows, tile_rows)
            order = dispatcher.send_order
            assert order is not None
            dispatcher.memory.join()
        except BaseException as error:
            send.abort(error)
            raise
        return cls(dispatcher, shared.handle, shared.chunks, shared.sources, tiles, flags, order, blocks), send

    @property
    def experts_function(self) -> type[torch.autograd.Function]:
        return DeviceExperts

    def counts_of(self, experts: int) -> Tensor:
        """Return the rows of the first ``experts`` local experts, int64 on the device. Others have no parameters, and
        no rows: slots for copies that this call does not use."""
        return self.tiles.counts_E[:experts]

    def multiply_arrived(self, send: RowSend, bias_EN: Tensor | None = None) -> FirstProduct:
        """Return the GEMM of the rows of ``send``, which adds ``bias_EN``. It waits for the rows on the device, and
        closes ``send``."""
        flags = send.flags if isinstance(send, FlaggedGradients) else self.flags

        def multiply(rows_RD: Tensor, w_END: Tensor, out_RN: Tensor) -> None:
            arrived_mm.arrived_mm_into(rows_RD, w_END, self.tiles, flags, out_RN, bias_EN=bias_EN)
            self.dispatcher.memory.join()
            send.close()

        return multiply

    def swiglu_arrived(self, send: RowSend, b13_EG: Tensor | None, glu: Glu) -> FirstSwiGLU:
        """Return the first GEMM with an activation behind it, which does nothing unless one kernel computes both."""

        def multiply(rows_RD: Tensor, w_EGD: Tensor, h_RG: Tensor, act_RF: Tensor) -> bool:
            done = arrived_mm.arrived_mm_into(rows_RD, w_EGD, self.tiles, self.flags, h_RG, act_RF, b13_EG, glu=glu)
            if done:
                self.dispatcher.memory.join()
                send.close()
            return done

        return multiply

    def multiply_and_sum(
        self,
        op: str,
        rows_RD: Tensor,
        w_END: Tensor,
        weights_TK: Tensor | None = None,
        requires_grad: bool = False,
        bias_EN: Tensor | None = None,
    ) -> tuple[Sums, Tensor]:
        """Multiply rows by the weights of their experts, and sum each token's results. Collective.

        Rows of a narrower wire dtype, and those of a fast combine, are summed after the GEMM.

        Args:
            op: "combine" or "dispatch backward". The latter has no ``weights_TK`` and no ``requires_grad``.
            bias_EN: of the experts, added to their results; or None.

        Returns:
            A function that makes the current stream wait for the sums and returns them; and the results, [R, D].
        """
        dispatcher, handle = self.dispatcher, self.handle
        if not dispatcher.sums_slices(op, handle.dtype, weights_TK is not None):
            out_RD = dispatcher.empty_rows(handle.num_rows, handle.hidden, handle.dtype, handle.device)
            grouped_mm_into(rows_RD, w_END, self.counts_of(w_END.shape[0]), out_RD, bias_EN=bias_EN)
            if weights_TK is None:
                y_TD = dispatcher.dispatch_backward(out_RD, handle)
            else:
                y_TD, _ = dispatcher.combine_forward(out_RD, weights_TK, handle, requires_grad)
            return lambda _: y_TD, out_RD

        def compute(out_RD: Tensor, flags: RowFlags) -> None:
            publish_mm.publish_mm_into(rows_RD, w_END, self.tiles, flags, out_RD, bias_EN)

        with dispatcher.operation(op, handle, requires_grad, flagged=True):
            sums_TD, results_RD = dispatcher.sum_while(compute, weights_TK, handle)

        def wait(_: Tensor | None) -> Tensor:
            dispatcher.wait_for_side_stream()
            return sums_TD

        return wait, results_RD

    def send_gradients(
        self, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool, unscaled: bool
    ) -> FlaggedGradients:
        return FlaggedGradients(self, grad_TD, weights_TK, weights_grad, unscaled)


class FlaggedGradients(SharedGradients):
    """Sends the gradients of tokens by expert, with a flag for each (expert, source, tile): ``flags``."""

    flags: RowFlags

    def __init__(
        self, dispatch: DeviceDispatch, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool, unscaled: bool
    ) -> None:
        super().__init__(dispatch, grad_TD, weights_TK, weights_grad, unscaled)
        self._on_device = dispatch
        self._operation: Operation | None = None

    def start(self, results_RD: Tensor | None) -> None:
        dispatch, handle = self._on_device, self._on_device.handle
        dispatcher, weights_TK = dispatch.dispatcher, self._weights_TK
        needs = self._weights_grad if self._unscaled else results_RD is not None
        operation = dispatcher.operation("combine backward", handle, needs, extra=int(self._unscaled), flagged=True)
        with operation:
            if self._unscaled:
                self.weights_R = dispatcher.send_weights(weights_TK, handle)
                weights_TK = torch.ones_like(weights_TK)
            self.rows_RD, self._grad_TK = dispatcher.spread_on_side_stream(
                self._grad_TD, results_RD, weights_TK, handle, dispatch.order, dispatch.num_blocks
            )
        self.flags, self._operation = dispatcher.row_flags(), operation

    def close(self) -> None:
        """End the operation. The rows are complete after the GEMM of ``multiply_arrived``, or after ``wait``."""
        operation, self._operation = self._operation, None
        if operation is not None:
            self._on_device.dispatcher.end_spread(operation)

    def wait(self) -> None:
        """End the operation, and make the current stream wait until all ranks have written their rows."""
        self.close()
        self._on_device.dispatcher.wait_for_side_stream()

    def abort(self, error: BaseException) -> None:
        with suppress(MoeCommError):
            self.close()

    def start_weight_gradient(self, dots_R: Tensor | None) -> Callable[[], Tensor | None]:
        if self._unscaled:
            return super().start_weight_gradient(dots_R)

        def wait() -> Tensor | None:
            self._on_device.dispatcher.wait_for_side_stream()
            return self._grad_TK

        return wait


class DeviceExperts(torch.autograd.Function):
    """Run the experts, or one GEMM. Arguments and results are those of ``pipelined._Experts``."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, input_RD: Tensor | None, run: Run, settings: LocalExperts, keep_h: bool, *tensors: Any
    ) -> Tensor:
        dispatch: Any = run.forward
        send, run.send = run.send, None
        experts = settings.with_tensors(tensors)
        rows_RD = input_RD if send is None else send.rows_RD
        assert rows_RD is not None
        h_RG = out_RD = None
        try:
            b13_EG = b2_ED = None
            if isinstance(experts, ExpertMLP):
                b13_EG, b2_ED = experts.tensors[2:]
            first = _grouped(dispatch) if send is None else dispatch.multiply_arrived(send, b13_EG)
            if isinstance(experts, ExpertMLP):
                keep_h, glu = keep_h and not experts.recompute, experts.activation.glu
                both = None if send is None or glu is None else dispatch.swiglu_arrived(send, b13_EG, glu)
                h_RG, last_RF, w_last = expert_mlp_gpu.hidden(experts, rows_RD, first, both)
            else:
                last_RF, w_last = rows_RD, tensors[0]
            if run.returns:
                run.back, out_RD = dispatch.multiply_and_sum(
                    "combine", last_RF, w_last, run.wide_TK, run.requires_grad, b2_ED
                )
            else:
                out_RD = rows_RD.new_empty(rows_RD.shape[0], w_last.shape[1])
                first(rows_RD, w_last, out_RD)
        except BaseException as error:
            if send is not None:
                send.abort(error)
            raise
        keep_out = run.returns and run.needs_weights and not run.unscaled
        ctx.save_for_backward(rows_RD, h_RG if keep_h else None, out_RD if keep_out else None, *tensors)
        ctx.run, ctx.settings, ctx.received = run, settings, None
        return token.new_empty(0) if run.returns else out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=run.backward.handle.label), run.guard():
            return _backward(ctx, run, grad_RD)


def _backward(ctx: Any, run: Run, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
    needs_token, needs_rows, _, _, _, *needs = needed_gradients(ctx)
    dispatch: Any = run.backward
    send: Any = run.gradients
    run.gradients = None
    rows_RD, h_RG, results_RD, *tensors = ctx.saved_tensors
    experts = ctx.settings.with_tensors(tensors)
    counts_E = dispatch.counts_of(experts.num_experts)
    token_grad = grad_RD.new_empty(0) if ctx.needs_input_grad[0] else None
    first, grad_rows_RD = _grouped(dispatch), None
    weights: RowWeights | None = None
    try:
        if send is not None:
            send.start(results_RD)
            grad_RD, first = send.rows_RD, dispatch.multiply_arrived(send)
            if send.weights_R is not None:
                dots_R = torch.empty_like(send.weights_R) if run.needs_weights else None
                weights = RowWeights(send.weights_R, None, dots_R)
        elif run.returns:
            # A pipeline schedule requests the gradients of the weights in a second pass. The first one has received
            # the rows.
            (grad_RD, weights), ctx.received = ctx.received, None
        dots_R = None if weights is None else weights.dots_N
        grad_RD, sums = grad_RD.contiguous(), run.needs_x and needs_token

        def last(rows: Tensor, w: Tensor) -> None:
            run.returning, _ = dispatch.multiply_and_sum("dispatch backward", rows, w)

        if isinstance(experts, ExpertMLP):
            if send is not None and not (sums or needs[0] or needs[2] or dots_R is not None):
                send.wait()
            products = first, last if sums else None
            grads = expert_mlp_gpu.backward_by(experts, rows_RD, h_RG, grad_RD, counts_E, needs, products, weights)
        else:
            if needs_rows:
                grad_rows_RD = torch.empty_like(rows_RD)
                first(grad_RD, tensors[0].transpose(1, 2), grad_rows_RD)
            elif sums:
                last(grad_RD, tensors[0].transpose(1, 2))
            elif send is not None:
                send.wait()
            grads = (weight_grad(tensors[0], grad_RD, rows_RD, counts_E) if needs[0] else None, None, None, None)
        if send is not None:
            run.weights_grad = send.start_weight_gradient(dots_R)
    except BaseException as error:
        if send is not None:
            send.abort(error)
        raise
    if send is not None and any(ctx.needs_input_grad[5:]) and not any(needs):
        ctx.received = grad_RD, None if weights is None else weights._replace(dots_N=None)
    of_tensors = grads[: len(tensors)]
    return token_grad, grad_rows_RD, None, None, None, *of_tensors


def _grouped(dispatch: Any) -> FirstProduct:
    return lambda rows, w, out: grouped_mm_into(rows, w, dispatch.counts_of(w.shape[0]), out)
