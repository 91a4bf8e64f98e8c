"""Dispatch and combine in the native core; ``local`` and ``shared_memory`` on CPU tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.dispatch.base import Layout
from moe_comm.dispatch.header import Header, failure, fault_word
from moe_comm.errors import RoutingError
from moe_comm.runtime.shared import DTYPE_CODES, block, native, warm

if TYPE_CHECKING:
    from moe_comm import _C


def supported(x: Tensor) -> bool:
    """Whether the native core can move this tensor's rows."""
    return x.device.type == "cpu" and x.dtype in DTYPE_CODES


def _dense(x: Tensor) -> Tensor:
    """``x`` with unit stride along its rows' elements; rows themselves may be any distance apart."""
    return x if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()


class NativeRows:
    """The three primitives of ``Dispatcher`` on a ``_C.Transfer``.

    communicator: None where this process holds all experts. timeout_s: how long it waits for a peer in these calls.
    """

    def __init__(
        self,
        communicator: _C.Communicator | None,
        heap: _C.Heap,
        expert_offsets: tuple[int, ...],
        rank: int,
        timeout_s: float = math.inf,
    ) -> None:
        self._core = native()
        self._communicator, self._timeout_s = communicator, timeout_s
        self.rank = rank
        self.heap = heap
        self._transfer = self._core.Transfer(communicator, heap, list(expert_offsets), threads=torch.get_num_threads())

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A block of this rank's heap, which peers read in place."""
        return block(self.heap, num_rows, width, dtype)

    def send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, Layout]:
        """Dispatch; see ``Dispatcher._send``."""
        tokens, hidden = (x_TD.shape[0], x_TD.shape[1]) if header.fault is None else (0, header.hidden)
        fault, text = 0, ""
        if header.fault is not None:
            fault, text = fault_word(header.fault), str(header.fault)
        else:
            x_TD = _dense(x_TD)
            ids_TK = ids_TK.to(torch.int64).contiguous()
        self._begin()
        try:
            capsule, native_layout = self._transfer.send(
                header.compared(),
                header.label,
                fault,
                text,
                x_TD.data_ptr(),
                x_TD.stride(0) * x_TD.element_size() if fault == 0 else 0,
                ids_TK.data_ptr(),
                tokens,
                header.top_k,
                hidden,
                DTYPE_CODES.get(header.dtype, 0),
            )
        except self._core.HandshakeFailed as error:
            raise self._explain(error, header) from None
        rows = native_layout.rows
        rows_RD = torch.from_dlpack(capsule) if rows and hidden else x_TD.new_empty(rows, hidden)
        layout = Layout(
            num_tokens=tokens,
            top_k=header.top_k,
            hidden=hidden,
            dtype=header.dtype,
            device=x_TD.device,
            rows_per_expert=native_layout.rows_per_expert,
            num_rows=rows,
            num_dropped=native_layout.dropped,
            label=header.label,
            state=native_layout,
            call=header.seq,
        )
        return rows_RD, layout

    def sum(self, rows_RD: Tensor, weights_TK: Tensor | None, layout: Layout, header: Header) -> Tensor:
        """Combine; see ``Dispatcher._sum``."""
        rows_RD = _dense(rows_RD)
        y_TD = warm(layout.num_tokens, layout.hidden, layout.dtype)
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        self._begin()
        try:
            self._transfer.sum(
                header.compared(),
                header.label,
                layout.state,
                rows_RD.data_ptr(),
                rows_RD.stride(0) * rows_RD.element_size(),
                0 if weights_TK is None else weights_TK.data_ptr(),
                y_TD.data_ptr(),
            )
        except self._core.HandshakeFailed as error:
            raise self._explain(error, header) from None
        return y_TD

    def spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, layout: Layout, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        """Combine backward; see ``Dispatcher._spread``."""
        grad_TD = _dense(grad_TD)
        rows = None if rows_RD is None else _dense(rows_RD)
        weights_TK = weights_TK.contiguous()
        grad_TK = None if rows is None else torch.empty(layout.num_tokens, layout.top_k)
        self._begin()
        try:
            capsule = self._transfer.spread(
                header.compared(),
                header.label,
                layout.state,
                grad_TD.data_ptr(),
                grad_TD.stride(0) * grad_TD.element_size(),
                0 if rows is None else rows.data_ptr(),
                0 if rows is None else rows.stride(0) * rows.element_size(),
                weights_TK.data_ptr(),
                rows is not None,
                0 if grad_TK is None else grad_TK.data_ptr(),
            )
        except self._core.HandshakeFailed as error:
            raise self._explain(error, header) from None
        if layout.num_rows and layout.hidden:
            return torch.from_dlpack(capsule), grad_TK
        return grad_TD.new_empty(layout.num_rows, layout.hidden), grad_TK

    def _begin(self) -> None:
        # The group's other users have timeouts of their own.
        if self._communicator is not None:
            self._communicator.set_timeout(self._timeout_s)

    def _explain(self, error: Any, header: Header) -> Exception:
        """The typed error that every rank raises after a failed handshake."""
        explained = failure(error.headers, self.rank, header)
        if len(error.headers) == 1 and isinstance(explained, RoutingError):
            return RoutingError(str(explained).removeprefix("rank 0: "))
        return explained
