"""Rows of the device executor: ``peer_to_peer`` moves them while GEMMs compute, which wait for its flags or set them.

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
from typing import ClassVar

import torch
from torch import Tensor

from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.overlapped import OverlappedPrimitives
from moe_comm.errors import MoeCommError
from moe_comm.gpu.gemm import Glu
from moe_comm.gpu.protocol import RowFlags
from moe_comm.kernels.expert_mlp_gpu import FirstProduct, FirstSwiGLU
from moe_comm.overlap.executors.pipelined import Sums
from moe_comm.overlap.executors.shared_rows import SharedDispatch, SharedGradients, SharedSend
from moe_comm.overlap.executors.transport import RowSend
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.triton import arrived_mm, publish_mm, tile_list


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

    on_device: ClassVar[bool] = True

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
            from moe_comm.kernels.triton.grouped_mm import grouped_mm_into

            out_RD = dispatcher.empty_rows(handle.num_rows, handle.hidden, handle.dtype, handle.device)
            grouped_mm_into(rows_RD, w_END, self.tiles.counts_E, out_RD, bias_EN=bias_EN)
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
