"""``local`` on CPU tensors: the native core sorts rows into reused memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.header import Header
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.backends.native import NativeRows, supported
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.runtime.memory import DTYPE_CODES, native, native_is_built, private_heap
from moe_comm.topology import ExpertPlacement


class NativeLocalDispatcher(LocalDispatcher):
    """Holds all experts. Rows in fp32, bf16 or fp16 on the CPU use the native core; other rows use the base class."""

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None = None,
        rank: int = 0,
        options: DispatchOptions | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        self._core = native()
        self._rows = NativeRows(private_heap(), placement.offsets, rank)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return reused memory on the CPU, and a new tensor elsewhere."""
        if device.type == "cpu" and dtype in DTYPE_CODES:
            return self._rows.empty_rows(num_rows, width, dtype)
        return super().empty_rows(num_rows, width, dtype, device)

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        if header.fault is None and supported(x_TD):
            return self._rows.send(x_TD, ids_TK, header)[:2]
        return super()._send(x_TD, ids_TK, header)

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[ScaledRows, DispatchHandle]:
        if x_TD.is_cpu:  # the handle must be the native core's
            return Dispatcher._send_scaled(self, x_TD, ids_TK, header)
        return super()._send_scaled(x_TD, ids_TK, header)

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        if isinstance(handle.state, self._core.Layout):
            return self._rows.sum(rows_RD, weights_TK, handle, header)
        return super()._sum(rows_RD, weights_TK, handle, header)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(handle.state, self._core.Layout):
            return self._rows.spread(grad_TD, rows_RD, weights_TK, handle, header)[:2]
        return super()._spread(grad_TD, rows_RD, weights_TK, handle, header)

    def _send_with(
        self, x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor, header: Header
    ) -> tuple[Tensor, DispatchHandle, Tensor | None]:
        if header.fault is None and supported(x_TD):
            return self._rows.send(x_TD, ids_TK, header, words_TKX)
        return super()._send_with(x_TD, ids_TK, words_TKX, header)

    def _spread_with(
        self, grad_TD: Tensor, weights_TK: Tensor, words_TKX: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor]:
        if isinstance(handle.state, self._core.Layout):
            rows_RD, _, words_RX = self._rows.spread(grad_TD, None, weights_TK, handle, header, words_TKX)
            assert words_RX is not None
            return rows_RD, words_RX
        return super()._spread_with(grad_TD, weights_TK, words_TKX, handle, header)

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor | None, Tensor]:
        if isinstance(handle.state, self._core.Layout):
            return self._rows.sum_with(rows_RD, words_RX, handle, header)
        return super()._sum_with(rows_RD, words_RX, handle, header)


def local_dispatcher(
    placement: ExpertPlacement, group: ProcessGroup | None, options: DispatchOptions
) -> LocalDispatcher:
    """Return a dispatcher for one rank that holds all experts, with the native core if it is built."""
    kind = NativeLocalDispatcher if native_is_built() else LocalDispatcher
    return kind(placement, group, 0, options)
