"""``all_gather``: every rank gathers all tokens and keeps the rows of its experts.

If top-k is larger than the number of ranks, most tokens have several experts on most ranks. Sending each token once to
each rank then moves fewer bytes than sending it K times (MegaScale-MoE, arXiv 2505.11432, section 3.2).

    rank 0: x0 x1, ids ─┐                    ┌─▶ x0 x1 x2 x3, ids ──rows of experts 0 1──▶ ordered by (expert, source)
                        ├─ all-gather ───────┤
    rank 1: x2 x3, ids ─┘  (padded)          └─▶ x0 x1 x2 x3, ids ──rows of experts 2 3──▶ ordered by (expert, source)

Combine:

    deterministic      return each row to its token, as in ``all_to_all``, and sum in slot order
    otherwise          sum the rows of each token on each rank in fp32, then reduce-scatter these partial sums: fewer
                       bytes if K > 2 W (fp32 sums of 16-bit rows), but another order of sums, and so other bits

There is no wire dtype for partial sums. A combine with a wire dtype always returns each row.

The suffix P of a tensor is the number of gathered tokens: W ranks times the largest number of tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.comm.header import describe
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher, Routes
from moe_comm.dispatch.slots import sums
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.dispatch.wire_dtype import (
    GROUP,
    RowGroups,
    WireDtype,
    decode_groups,
    encode_groups,
    pack,
    unpack,
    unpack_scaled,
)
from moe_comm.kernels.autograd import accumulate_dtype
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.kernels.row_weights import scale_
from moe_comm.runtime.memory import take


@dataclass(frozen=True)
class GatheredRoutes(Routes):
    """gathered_R: flat slot of each row of this rank, in the concatenated ids of all ranks."""

    gathered_R: Tensor


class AllGatherDispatcher(AllToAllDispatcher):
    """For any device and number of hosts. Efficient if top-k is larger than the number of ranks."""

    name = "all_gather"

    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        x_TD = x_TD.contiguous()  # before the handshake, which reports a failure to the other ranks
        handle = self._gathered(x_TD, ids_TK)
        wire_dtype, routes = self.options.wire_dtypes.of(self.context.operation.op), handle.state
        x_PD = self._gather_rows(x_TD, routes.tokens_W, wire_dtype, describe(self.context.operation))
        return x_PD[routes.gathered_R // handle.top_k], handle

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[ScaledRows, DispatchHandle]:
        handle = self._gathered(x_TD, ids_TK)
        wire_dtype, routes = self.options.wire_dtypes.of(self.context.operation.op), handle.state
        packed_PX = self._gather_padded(pack(x_TD, wire_dtype), routes.tokens_W, describe(self.context.operation))
        return unpack_scaled(take(packed_PX, routes.gathered_R // handle.top_k), wire_dtype, handle.hidden), handle

    def _gathered(self, x_TD: Tensor, ids_TK: Tensor) -> DispatchHandle:
        """Run the handshake of a dispatch, gather the ids of all ranks, and return a handle with ``GatheredRoutes``."""
        counts = self._handshake.exchange(self.context.operation, ids_TK, x_TD.device)
        routes = self._routes(ids_TK, counts)
        # int32 is enough: the handshake has checked the range of the ids.
        ids_PK = self._gather_padded(ids_TK.to(torch.int32), counts.tokens_W, describe(self.context.operation), fill=-1)
        own = self.local_experts
        local_PK = torch.where((ids_PK >= own.start) & (ids_PK < own.stop), ids_PK - own.start, -1)
        order, _ = sums.order(local_PK, len(own))
        handle = self._routed(x_TD, counts, routes)
        state = GatheredRoutes(**vars(routes), gathered_R=order[: sum(routes.receive)])
        return replace(handle, num_own=None, state=state)  # the collectives record their own bytes

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle) -> Tensor:
        if self.options.deterministic or self.options.wire_dtypes.of(self.context.operation.op).narrows(handle.dtype):
            return super()._sum(rows_RD, weights_TK, handle)
        self.check_headers(rows_RD.device)
        description = describe(self.context.operation)
        routes: GatheredRoutes = handle.state
        rows_RD = rows_RD.to(accumulate_dtype(rows_RD.dtype))
        if weights_TK is not None:
            rows_RD = rows_RD * self._weights(weights_TK, routes, description).unsqueeze(1)
        longest = max(routes.tokens_W)
        total_PD = rows_RD.new_zeros(self.world * longest, handle.hidden)
        total_PD.index_add_(0, routes.gathered_R // handle.top_k, rows_RD)
        if longest:
            total_PD = self.channel.reduce_scatter(total_PD.view(self.world, longest, handle.hidden), description)
        return total_PD[: handle.num_tokens].to(handle.dtype)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        self.check_headers(grad_TD.device)
        description = describe(self.context.operation)
        routes: GatheredRoutes = handle.state
        weights_R = self._weights(weights_TK, routes, description)
        grad_RD = self._gather_gradients(grad_TD, handle, description)
        dots_R = scale_(grad_RD, weights_R, rows_RD)
        return grad_RD, None if dots_R is None else self._dots(dots_R, handle, description)

    def _send_gradients(self, grad_TD: Tensor, words_TKX: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        self.check_headers(grad_TD.device)
        grad_RD = self._gather_gradients(grad_TD, handle, describe(self.context.operation))
        return grad_RD, self._send_words(words_TKX, handle)

    def _gather_gradients(self, grad_TD: Tensor, handle: DispatchHandle, description: str) -> Tensor:
        """Return [R, D], the gradient of each row's token."""
        routes, wire_dtype = handle.state, self.options.wire_dtypes.of(self.context.operation.op)
        grad_PD = self._gather_rows(grad_TD, routes.tokens_W, wire_dtype, description)
        return take(grad_PD, routes.gathered_R // handle.top_k)

    def _weights(self, weights_TK: Tensor, routes: GatheredRoutes, description: str) -> Tensor:
        """Return [R], the weight of each row of this rank."""
        return self._gather_padded(weights_TK, routes.tokens_W, description).reshape(-1)[routes.gathered_R]

    def _gather_rows(
        self, rows_TD: Tensor, tokens_W: tuple[int, ...], wire_dtype: WireDtype, description: str
    ) -> Tensor:
        """Gather rows in their wire dtype. Group scales are shared by consecutive tokens of a rank."""
        if wire_dtype.scales != "group":
            packed_PX = self._gather_padded(pack(rows_TD, wire_dtype), tokens_W, description)
            return unpack(packed_PX, wire_dtype, rows_TD.shape[1], rows_TD.dtype)
        longest, device = max(tokens_W), rows_TD.device
        if not longest:
            return rows_TD
        groups_W = tuple(-(-tokens // GROUP) for tokens in tokens_W)
        own = RowGroups.of(np.array([rows_TD.shape[0]]), (0, 1), device)
        packed_TX, scale_GD = encode_groups(rows_TD, own, wire_dtype)
        packed_PX = self._gather_padded(packed_TX, tokens_W, description)
        scale_PD = self._gather_padded(scale_GD, groups_W, description)
        padded = RowGroups.of(np.full(self.world, longest), range(self.world + 1), device)
        return decode_groups(packed_PX, scale_PD, padded, rows_TD.dtype)

    def _gather_padded(self, tensor_TX: Tensor, tokens_W: tuple[int, ...], description: str, fill: float = 0) -> Tensor:
        """Return [W * longest, X], the tensors of all ranks padded with ``fill`` to the longest one."""
        longest = max(tokens_W)
        if not longest:
            return tensor_TX
        padded = F.pad(tensor_TX, (0, 0, 0, longest - tensor_TX.shape[0]), value=fill)
        return self.channel.all_gather(padded, description).flatten(0, 1)
