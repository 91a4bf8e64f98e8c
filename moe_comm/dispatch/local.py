"""``local``: one rank holds every expert; rows are only sorted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_comm.dispatch import plain
from moe_comm.dispatch.base import Dispatcher, Layout
from moe_comm.dispatch.header import Header, check


@dataclass(frozen=True)
class _State:
    place_TK: Tensor


class LocalDispatcher(Dispatcher):
    """All experts here, plain torch; runs on any device."""

    name = "local"

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, Layout]:
        check([], self.rank, header)
        kept, place_TK, counts_E = plain.sort_slots(ids_TK, self.num_experts)
        top_k = ids_TK.shape[1]
        layout = Layout(
            num_tokens=x_TD.shape[0],
            top_k=top_k,
            hidden=x_TD.shape[1],
            dtype=x_TD.dtype,
            device=x_TD.device,
            rows_per_expert=tuple(counts_E.tolist()),
            num_rows=kept.numel(),
            num_dropped=ids_TK.numel() - kept.numel(),
            label=header.label,
            state=_State(place_TK),
        )
        return x_TD[kept // top_k], layout

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, layout: Layout, header: Header) -> Tensor:
        return plain.weighted_sum(rows_RD, layout.state.place_TK, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, layout: Layout, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        place_TK = layout.state.place_TK
        grad_rows_RD = plain.spread(grad_TD, place_TK, weights_TK, layout.num_rows)
        return grad_rows_RD, None if rows_RD is None else plain.weight_grad(grad_TD, rows_RD, place_TK)
