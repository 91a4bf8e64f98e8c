"""``local``: one rank holds every expert; rows are only sorted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_comm.comm.header import Header, check
from moe_comm.dispatch import plain, sums
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import DispatchHandle, routing_error
from moe_comm.errors import RoutingError


@dataclass(frozen=True)
class _State:
    place_TK: Tensor


class LocalDispatcher(Dispatcher):
    """All experts here; plain torch, and Triton on a GPU."""

    name = "local"

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None  # _send looks at the ids with its one copy to the host

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        check([], self.rank, header)
        order, place_TK = plain.order_slots(ids_TK, self.num_experts)
        *rows_per_expert, num_dropped, num_bad, _, _ = plain.count_slots(ids_TK, self.num_experts).tolist()
        if num_bad:
            raise routing_error(ids_TK, self.num_experts)
        top_k = ids_TK.shape[1]
        num_rows = sum(rows_per_expert)
        handle = DispatchHandle(
            num_tokens=x_TD.shape[0],
            top_k=top_k,
            hidden=x_TD.shape[1],
            dtype=x_TD.dtype,
            device=x_TD.device,
            rows_per_expert=tuple(rows_per_expert),
            num_rows=num_rows,
            num_dropped=num_dropped,
            label=header.label,
            state=_State(place_TK),
            maker=header.maker,
        )
        return sums.take(x_TD, order[:num_rows] // top_k), handle

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        return sums.weighted_sum(rows_RD, handle.state.place_TK, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        return sums.spread(grad_TD, handle.state.place_TK, weights_TK, handle.num_rows, rows_RD)
