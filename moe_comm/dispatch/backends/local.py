"""``local``: one rank holds all experts. Dispatch only sorts rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.header import check
from moe_comm.dispatch.backends.native import NO_ROW_WORDS, NativeDispatcher, RowWordsArgs, supported
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.slots import sums
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions, earlier_routing_error, routing_error
from moe_comm.dispatch.wire_dtype import pack, unpack_scaled
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.runtime.memory import private_heap
from moe_comm.runtime.native_core import native, native_is_built
from moe_comm.topology import ExpertPlacement

FAULT_WORDS = 3
"""Words of a report, see ``kernels/triton/slot_order.py``."""


class InvalidIds:
    """The report of invalid expert ids by kernels whose results the CPU does not wait for.

    Kernels write it to pinned memory, if an id is invalid. The next call, the backward pass, or whoever reads the
    counts raises the error.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._sizes = device, (1, 0)
        self._words = torch.zeros(FAULT_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._read = self._words.numpy()

    def report(self, top_k: int, num_experts: int) -> Tensor:
        """Return the words for a kernel. Raise RoutingError for an earlier one, as ``check``."""
        if self._read[0]:
            self.check()
        self._sizes = top_k, num_experts
        return self._words

    def check(self) -> None:
        """Raise RoutingError if a kernel has reported invalid ids. Does not wait."""
        if self._read[0]:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the kernel may still write the other words
            bad, first, value = self._words.tolist()
            self._read[:] = 0  # not zero_, which fails if the words were created in inference mode
            top_k, num_experts = self._sizes
            raise earlier_routing_error(bad, first, value, top_k, num_experts)


class LocalDispatcher(Dispatcher):
    """Holds all experts. Uses plain torch, and Triton on a GPU."""

    name = "local"
    checks_ids = True  # _send checks with the counts that it copies to the CPU
    _invalid_ids: dict[torch.device, InvalidIds] | None = None

    def invalid_ids(self, device: torch.device) -> InvalidIds:
        """Return the report of the kernels on ``device``."""
        if self._invalid_ids is None:
            self._invalid_ids = {}
        found = self._invalid_ids.get(device)
        if found is None:
            found = self._invalid_ids[device] = InvalidIds(device)
        return found

    def check_ids(self) -> None:
        for found in (self._invalid_ids or {}).values():
            if found.device.type == "cuda":
                torch.cuda.synchronize(found.device)
            found.check()

    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        order_R, handle = self._sorted(x_TD, ids_TK)
        return sums.copy(x_TD, handle.state, order_R), handle

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[ScaledRows, DispatchHandle]:
        order_R, handle = self._sorted(x_TD, ids_TK)
        wire_dtype = self.options.wire_dtypes.of(self.context.operation.op)
        packed_RX = sums.copy(pack(x_TD, wire_dtype), handle.state, order_R)
        return unpack_scaled(packed_RX, wire_dtype, handle.hidden), handle

    def _sorted(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        """Return the flat slot of each row, and the handle."""
        check([], self.rank, self.context.operation)
        earlier = (self._invalid_ids or {}).get(x_TD.device)
        if earlier is not None:  # of a call whose counts stayed on the device
            earlier.check()
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

    def _places(self, handle: DispatchHandle) -> Tensor | None:
        return handle.state if isinstance(handle.state, Tensor) else None


class NativeLocalDispatcher(NativeDispatcher, LocalDispatcher):
    """``local`` on the CPU: sorts rows in fp32, bf16 or fp16 into reused memory. Other rows use ``LocalDispatcher``."""

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None = None,
        rank: int = 0,
        options: DispatchOptions | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        self._layout = native().Layout
        self._open(private_heap(), None)

    def _send_with(
        self, x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor | None
    ) -> tuple[Tensor, DispatchHandle, Tensor | None]:
        if self.context.operation.fault is None and supported(x_TD):
            return super()._send_with(x_TD, ids_TK, words_TKX)
        return *LocalDispatcher._send(self, x_TD, ids_TK), None

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[ScaledRows, DispatchHandle]:
        if x_TD.is_cpu:  # the handle must be the native core's
            return Dispatcher._send_scaled(self, x_TD, ids_TK)
        return LocalDispatcher._send_scaled(self, x_TD, ids_TK)

    def _sum(
        self,
        rows_RD: Tensor | None,
        weights_TK: Tensor | None,
        handle: DispatchHandle,
        words: RowWordsArgs = NO_ROW_WORDS,
    ) -> Tensor:
        if isinstance(handle.state, self._layout):
            return super()._sum(rows_RD, weights_TK, handle, words)
        assert rows_RD is not None
        return LocalDispatcher._sum(self, rows_RD, weights_TK, handle)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(handle.state, self._layout):
            return super()._spread(grad_TD, rows_RD, weights_TK, handle)
        return LocalDispatcher._spread(self, grad_TD, rows_RD, weights_TK, handle)

    def _spread_with(
        self, grad_TD: Tensor, weights_TK: Tensor, words_TKX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        if isinstance(handle.state, self._layout):
            return super()._spread_with(grad_TD, weights_TK, words_TKX, handle)
        return Dispatcher._spread_with(self, grad_TD, weights_TK, words_TKX, handle)

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        if isinstance(handle.state, self._layout):
            return super()._sum_with(rows_RD, words_RX, handle)
        return Dispatcher._sum_with(self, rows_RD, words_RX, handle)


def local_dispatcher(
    placement: ExpertPlacement, group: ProcessGroup | None, options: DispatchOptions
) -> LocalDispatcher:
    """Return a dispatcher for one rank that holds all experts, with the native core if it is built."""
    kind = NativeLocalDispatcher if native_is_built() else LocalDispatcher
    return kind(placement, group, 0, options)
