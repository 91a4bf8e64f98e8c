"""``local``: one rank holds all experts. Dispatch only sorts rows."""

from __future__ import annotations

from torch import Tensor

from moe_comm.comm.header import check
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.slots import sums
from moe_comm.dispatch.types import DispatchHandle, routing_error
from moe_comm.dispatch.wire.wire_dtype import pack, unpack_scaled
from moe_comm.kernels.fp8 import ScaledRows


class LocalDispatcher(Dispatcher):
    """Holds all experts. Uses plain torch, and Triton on a GPU."""

    name = "local"
    checks_ids = True  # _send checks with the counts that it copies to the CPU

    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        order_R, handle = self._sorted(x_TD, ids_TK)
        return sums.copy(x_TD, handle.state, order_R), handle

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[ScaledRows, DispatchHandle]:
        order_R, handle = self._sorted(x_TD, ids_TK)
        wire_dtype = self.options.wire_dtypes.of(self.current.op)
        packed_RX = sums.copy(pack(x_TD, wire_dtype), handle.state, order_R)
        return unpack_scaled(packed_RX, wire_dtype, handle.hidden), handle

    def _sorted(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        """Return the flat slot of each row, and the handle."""
        check([], self.rank, self.current)
        order, place_TK, counts = sums.order_and_count(ids_TK, self.num_experts)
        *rows_per_expert, num_dropped, num_bad = counts
        if num_bad:
            raise routing_error(ids_TK, self.num_experts)
        num_rows = sum(rows_per_expert)
        handle = self._handle(x_TD, tuple(rows_per_expert), num_rows, num_dropped, place_TK)
        return order[:num_rows], handle

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle) -> Tensor:
        return sums.weighted_sum(rows_RD, handle.state, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        return sums.spread(grad_TD, handle.state, weights_TK, handle.num_rows, rows_RD)
