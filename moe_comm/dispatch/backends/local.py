"""``local``: one rank holds all experts. Dispatch only sorts rows."""

from __future__ import annotations

from torch import Tensor

from moe_comm.comm.header import Header, check
from moe_comm.dispatch import plain, sums
from moe_comm.dispatch.base import Dispatcher, make_handle
from moe_comm.dispatch.types import DispatchHandle, routing_error
from moe_comm.errors import RoutingError


class LocalDispatcher(Dispatcher):
    """Holds all experts. Uses plain torch, and Triton on a GPU."""

    name = "local"

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None  # _send checks the ids with the counts that it copies to the host

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        check([], self.rank, header)
        order, place_TK = plain.order_slots(ids_TK, self.num_experts)
        *rows_per_expert, num_dropped, num_bad, _, _ = plain.count_slots(ids_TK, self.num_experts).tolist()
        if num_bad:
            raise routing_error(ids_TK, self.num_experts)
        top_k = ids_TK.shape[1]
        num_rows = sum(rows_per_expert)
        handle = make_handle(header, x_TD, tuple(rows_per_expert), num_rows, num_dropped, place_TK)
        return sums.take(x_TD, order[:num_rows] // top_k), handle

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        return sums.weighted_sum(rows_RD, handle.state, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        return sums.spread(grad_TD, handle.state, weights_TK, handle.num_rows, rows_RD)
