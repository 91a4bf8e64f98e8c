"""The dispatcher interface, with autograd on top of three primitives of each backend.

    x_TD, ids_TK ──dispatch──▶ rows_RD (this rank's experts, expert-major) ──experts──▶ rows_RD ──combine──▶ y_TD

Suffixes of tensor names are sizes: T tokens of this rank, D hidden size, K experts per token, R rows of this rank's
experts. A slot is one of the K (token, expert) pairs of a token. The primitives have no autograd:

    _send    dispatch forward: copy each routed row to the rank of its expert
    _sum     combine forward (weighted) and dispatch backward (unweighted): sum the K rows of each token in slot order
    _spread  combine backward: send each token's gradient, times its weight, to its K rows; compute weight gradients
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import refuse_pickling
from moe_comm.comm.group_setup import communicator_of
from moe_comm.comm.header import GroupCalls, Header
from moe_comm.dispatch.arrays import Array, as_tensors
from moe_comm.dispatch.autograd import (
    CombineFunction,
    DispatchFunction,
    combine_forward,
    connected,
    no_rows,
    round_rows,
)
from moe_comm.dispatch.checksums import CorruptionLog, exchange_checksums
from moe_comm.dispatch.dispatch_spans import dispatch_span, record_handle
from moe_comm.dispatch.extra import dispatch_slots, return_slots, with_autograd, with_extra
from moe_comm.dispatch.fault_reports import FaultReports
from moe_comm.dispatch.input_faults import combine_fault, dispatch_fault, scaled_fault, spread_fault
from moe_comm.dispatch.types import Dispatched, DispatchHandle, DispatchOptions, ExtraRoutes
from moe_comm.dispatch.wire.wire_dtype import UNCHANGED, quantized
from moe_comm.errors import InputError, MoeCommError
from moe_comm.kernels.fp8 import ScaledRows, quantize_rows
from moe_comm.topology import ExpertPlacement, Placement

_makers = count(1)
"""Ids for ``Dispatcher.maker``."""


class Dispatcher(FaultReports):
    """Dispatches token rows to the ranks of their experts and combines the results. Differentiable.

    Attributes:
        rounds: whether this class rounds rows to the wire dtype before it calls the backend.
        corruption: checksum mismatches of received rows, with ``DispatchOptions.checksums``.
        row_bytes: bytes of an encoded row, by operation, width and dtype.
        comm: communicator of the group; None without a group.
        calls: sequence numbers of the group's operations.
        maker: id of this dispatcher, unique in the process.
        expert_placement: the placement by which the caller replaces expert ids by ids of slots; each dispatch compares
            it between ranks. None: ids of experts are ids of slots. ``placement`` is the layout of the slots.
        trained: bits that the layer of the next dispatch sets: which of ``header.TRAINED`` require gradients. Compared
            between ranks.
        before_dispatch: called before each dispatch.
        has_unknown_experts: made by ``make_dispatcher``, and no layer nor ``mark_experts`` has declared its experts.
    """

    name: ClassVar[str]
    packs: ClassVar[bool] = False
    """Whether the backend encodes rows in the wire dtype. If not, it is given rows that are already rounded."""
    checks_ids: ClassVar[bool] = False
    """Whether the backend checks the range of expert ids when it counts the slots. If not, ``dispatch`` does."""

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None = None,
        rank: int = 0,
        options: DispatchOptions | None = None,
    ) -> None:
        self.placement = placement
        self.comm = None if group is None else communicator_of(group, (options or DispatchOptions()).timeout_s)
        self.rank = rank
        self.world = placement.world
        self.options = options or DispatchOptions()
        self.rounds = not self.packs and self.options.wire_dtypes != UNCHANGED
        self.corruption = CorruptionLog()
        self.expert_placement: Placement | None = None
        self.trained = 0
        self.before_dispatch: list[Callable[[], None]] = []
        self.has_unknown_experts = False
        self.row_bytes: dict[tuple[str, int, torch.dtype], int] = {}
        self.calls = GroupCalls() if self.comm is None else self.comm.calls
        if self.comm is not None:
            self.comm.users.add(self)
        self._ordinal = self.calls.add_dispatcher()
        self.maker = next(_makers)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickling(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a model communicate over the same group

    @property
    def group(self) -> ProcessGroup | None:
        """The expert-parallel process group; None if this process holds all experts.

        Raises:
            ConfigError: the group has been destroyed.
        """
        return None if self.comm is None else self.comm.group

    @property
    def num_calls(self) -> int:
        """Number of operations that this dispatcher has started."""
        return self.calls.last(self._ordinal)

    @cached_property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return self.placement.num_experts

    @cached_property
    def local_experts(self) -> range:
        """Global ids of this rank's experts."""
        return self.placement.local_range(self.rank)

    def dispatch(
        self,
        x_TD: Tensor | Array,
        ids_TK: Tensor | Array,
        *,
        label: str = "",
        scaled: bool = False,
        extra_TKX: Tensor | None = None,
    ) -> Dispatched:
        """Send each token's row to the owners of its K experts.

        Tensors may also be arrays of other libraries (CuPy, JAX, NumPy), which are read in place through DLPack. They
        have no gradients. ``cupy.from_dlpack(dispatched.rows_RD)`` returns the rows as an array of CuPy.

        Args:
            x_TD: [T, D] fp32, bf16 or fp16, any strides. T may be zero and may differ between ranks.
            ids_TK: [T, K] int32 or int64 global expert ids. -1 drops the slot.
            label: name of the layer, for error messages.
            scaled: return the rows as e4m3 values and fp32 scales per 128 channels (``Dispatched.scaled``), for GEMMs
                that take them. If the wire dtype of dispatch is fp8, these are the received bytes. Otherwise this rank
                quantizes the received rows. The same on every rank. D must be a multiple of 128.
            extra_TKX: [T, K, X] fp32 or int32 values that are sent with the row of each slot, such as routing weights
                for experts that multiply by them (``Dispatched.extra_RX``). Never rounded. Strides may be 0. X and
                ``requires_grad`` are the same on every rank. ``local`` and ``shared_memory`` on the CPU send them in
                the operation that sends the rows, the other backends in one that follows it.

        Returns:
            Rows of this rank's experts, and the handle for ``combine``.

        Raises:
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            ConfigError: ``scaled`` with an fp8 wire dtype over ``hierarchical``; on every rank, before rows move.
            PeerDied, PeerTimeout: a rank died, or did not call in time.
            CorruptPayload: on every rank, for the rows of an earlier dispatch, with ``DispatchOptions.checksums``.
        """
        (x_TD, ids_TK), fault = as_tensors(x=x_TD, ids=ids_TK)
        words_TKX = words_RX = None
        if extra_TKX is not None and isinstance(extra_TKX, Tensor):
            (extra_TKX,), extra_unusable = as_tensors(extra_values=extra_TKX)
            fault = fault or extra_unusable
        header = self.dispatch_header(x_TD, ids_TK, label, scaled=scaled, fault=fault)
        if extra_TKX is not None:
            header, words_TKX = with_extra(header, extra_TKX, x_TD, ids_TK)
        tokens_TD = x_TD.detach() if x_TD.requires_grad else x_TD
        rows: ScaledRows | None = None
        with self.report(header), dispatch_span(self, "dispatch", header.label) as span:
            if scaled and self.options.wire_dtypes.of(header.op).format == "fp8":
                rows, handle = self._send_scaled(tokens_TD, ids_TK, header)
                rows_RD = rows.dequantized(x_TD.dtype) if self.options.checksums else tokens_TD
            else:
                rounded_TD = round_rows(self, tokens_TD, header) if self.rounds else tokens_TD
                if words_TKX is None:
                    rows_RD, handle = self._send(rounded_TD, ids_TK, header)
                else:
                    rows_RD, handle, words_RX = self._send_with(rounded_TD, ids_TK, words_TKX, header)
                rows = quantize_rows(rows_RD) if scaled else None
            if words_TKX is not None:
                handle.extra = ExtraRoutes(header.extra, ids_TK.reshape(-1, 1))
                if words_RX is None:
                    words_RX = self._send_words(words_TKX, handle)
            if self.options.checksums:
                checksums = exchange_checksums(self, tokens_TD, ids_TK, header)
                if checksums is not None:
                    checksums.check(rows_RD)
            record_handle(span, self, handle)
        if extra_TKX is None or words_RX is None:
            return connected(self, x_TD, rows_RD if rows is None else rows, handle)
        if rows is not None:
            rows_RD = no_rows(x_TD, handle)
        rows_RD, extra_RX = with_autograd(self, x_TD, extra_TKX, rows_RD, words_RX, handle)
        return Dispatched(rows_RD, handle, rows, extra_RX)

    def combine(self, rows_RD: Tensor | Array, weights_TK: Tensor | Array, handle: DispatchHandle) -> Tensor:
        """Return the weighted sum of each token's K expert outputs, in fp32 and in slot order.

        Args:
            rows_RD: [R, D] outputs of the experts, in the order of the dispatched rows. Peers read a tensor from
                ``empty_rows`` in place. Any other tensor is copied first. Arrays as in ``dispatch``.
            weights_TK: [T, K] routing weights.
            handle: from ``dispatch``.

        Returns:
            [T, D] in the dtype of ``rows_RD``.

        Raises:
            InputError: shapes, dtype, device or handle do not match the dispatch.
            RankMismatch, PeerDied, PeerTimeout, CorruptPayload: as in ``dispatch``, if operations are ``checked``.
        """
        (rows_RD, weights_TK), unusable = as_tensors(rows=rows_RD, weights=weights_TK)
        fault: MoeCommError | None = unusable or combine_fault(self.maker, rows_RD, weights_TK, handle)
        if fault is None and self.options.checksums and self.handshakes:
            # Without a handshake the other ranks cannot learn of the fault here, so the next dispatch raises it.
            fault = self.corruption.fault()
        if fault is not None:
            self.refuse_operation("combine", handle, fault)
        grad = torch.is_grad_enabled() and (rows_RD.requires_grad or weights_TK.requires_grad)
        if grad:
            return CombineFunction.apply(rows_RD, weights_TK, self, handle)  # type: ignore[no-any-return]
        return combine_forward(self, rows_RD, weights_TK, handle, False)[0]

    @overload
    def spread(self, x_TD: Tensor, handle: DispatchHandle) -> Tensor: ...

    @overload
    def spread(self, x_TD: Tensor, handle: DispatchHandle, extra_TKX: Tensor) -> tuple[Tensor, Tensor]: ...

    def spread(
        self, x_TD: Tensor, handle: DispatchHandle, extra_TKX: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Send other rows along the routes of an earlier dispatch, without counting the slots again.

        The rows are those of ``dispatch`` with the same ids, in the same order, and ``combine`` accepts ``handle`` for
        them. Differentiable. A wire dtype is that of gradients, because this is the transfer of combine's backward.

        Args:
            x_TD: [T, D] with the shape, dtype and device of the dispatched tokens.
            handle: from ``dispatch`` of this dispatcher.
            extra_TKX: as in ``dispatch``, with the X of the dispatch that returned ``handle``.

        Returns:
            [R, D] rows of this rank's experts; with ``extra_TKX`` also their extra values [R, X].

        Raises:
            InputError: shape, dtype, device or handle do not match the dispatch.
            RankMismatch, PeerDied, PeerTimeout: as in ``combine``.
        """
        (x_TD,), fault = as_tensors(x=x_TD)
        if isinstance(extra_TKX, Tensor):
            (extra_TKX,), extra_unusable = as_tensors(extra_values=extra_TKX)
            fault = fault or extra_unusable
        fault = fault or spread_fault(self.maker, x_TD, handle, extra_TKX)
        if fault is not None:
            self.refuse_operation("combine backward", handle, fault)
        header = self.header("combine backward", handle, False)
        if extra_TKX is not None:
            width, is_int = handle.extra.width if handle.extra else 0, extra_TKX.dtype is torch.int32
            header = replace(header, extra=width, extra_int=is_int)
        with self.report(header), dispatch_span(self, header.op, handle.label, handle):
            tokens_TD = round_rows(self, x_TD.detach(), header) if self.rounds else x_TD.detach()
            wide = torch.float64 if x_TD.dtype is torch.float64 else torch.float32
            ones_TK = torch.ones(handle.num_tokens, handle.top_k, dtype=wide, device=handle.device)
            if extra_TKX is not None:
                words_TKX = extra_TKX.detach().view(torch.float32)
                rows_RD, words_RX = self._spread_with(tokens_TD, ones_TK, words_TKX, handle, header)
            else:
                rows_RD, _ = self._spread(tokens_TD, None, ones_TK, handle, header)
        if extra_TKX is not None:
            return with_autograd(self, x_TD, extra_TKX, rows_RD, words_RX, handle)
        if torch.is_grad_enabled() and x_TD.requires_grad:
            rows_RD = DispatchFunction.apply(x_TD, rows_RD, self, handle)
        return rows_RD

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised [num_rows, width] storage that this backend reads and writes fastest."""
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    def own_rows(self, handle: DispatchHandle, sent: int) -> int | None:
        """Return how many of the ``sent`` rows of an operation stay on this rank.

        None if rows are relayed or gathered: the inner collectives record their bytes.
        """
        return None

    def close(self) -> None:
        """Release the resources of this dispatcher. Collective. May be called twice."""

    def release(self) -> None:
        """Drop references to resources of the group, which is being destroyed. Not collective."""

    @property
    def handshakes(self) -> bool:
        """Whether every operation compares headers between ranks, and not dispatch alone."""
        return self.options.checked

    # --- for the functions below and the backends ---

    def header(self, op: str, handle: DispatchHandle, requires_grad: bool) -> Header:
        """Return the next header for ``op`` on the rows of ``handle``."""
        return self._next_header(
            op,
            handle.hidden,
            handle.dtype,
            handle.top_k,
            requires_grad=requires_grad,
            label=handle.label,
            of_call=handle.call,
        )

    def dispatch_header(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        label: Any,
        op: str = "dispatch",
        scaled: bool = False,
        fault: MoeCommError | None = None,
    ) -> Header:
        """Return the header of the dispatch ``op``. It contains the fault if the input is invalid.

        scaled: see ``dispatch``. fault: an error that is already known.
        """
        for call in self.before_dispatch:
            call()
        fault = fault or self._fault(x_TD, ids_TK)
        if not isinstance(label, str):
            fault, label = InputError(f"label must be a str; got {type(label).__name__}"), ""
        if fault is None and scaled:
            fault = scaled_fault(x_TD)
        if fault is None and self.options.checksums:
            fault = self.corruption.fault()
        return self._next_header(
            op,
            x_TD.shape[-1] if x_TD.dim() else 0,
            x_TD.dtype,
            ids_TK.shape[-1] if ids_TK.dim() else 0,
            requires_grad=x_TD.requires_grad and torch.is_grad_enabled(),
            label=label,
            fault=fault,
            scaled=scaled,
            maker=self.maker,
            placement=0 if self.expert_placement is None else self.expert_placement.digest,
            trained=self.trained,
        )

    def _next_header(
        self, op: str, hidden: int, dtype: torch.dtype, top_k: int, requires_grad: bool = False, **fields: Any
    ) -> Header:
        seq, ordinal = self.calls.next(self._ordinal), self._ordinal
        return Header(
            op, seq, hidden, dtype, top_k, self.num_experts, requires_grad, ordinal=ordinal, calls=self.calls, **fields
        )

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        return dispatch_fault(x_TD, ids_TK, None if self.checks_ids else self.num_experts)

    @abstractmethod
    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]: ...

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[ScaledRows, DispatchHandle]:
        """Run ``_send`` with an fp8 wire dtype, and return the encoded rows.

        A backend that encodes rows overrides this. The others move rows in their own dtype, and this rank encodes them.
        A row has the same bytes, whichever rank encodes it.
        """
        rows_RD, handle = self._send(x_TD, ids_TK, header)
        return quantized(rows_RD, self.options.wire_dtypes.of(header.op)), handle

    @abstractmethod
    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor: ...

    @abstractmethod
    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        """``rows_RD`` is None if the weights need no gradient."""

    # --- extra values as words in fp32. Backends that send them with the rows override the first three ---

    def _send_with(
        self, x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor, header: Header
    ) -> tuple[Tensor, DispatchHandle, Tensor | None]:
        """Run ``_send``, and also return the words [R, X]; None if ``_send_words`` sends them."""
        return *self._send(x_TD, ids_TK, header), None

    def _spread_with(
        self, grad_TD: Tensor, weights_TK: Tensor, words_TKX: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor]:
        """Return [R, D] of ``_spread``, and the words [R, X]."""
        return self._spread(grad_TD, None, weights_TK, handle, header)[0], self._send_words(words_TKX, handle)

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor | None, Tensor]:
        """Return [T, D] of ``_sum`` without weights, or None without rows, and the words [T, K, X], 0 where dropped."""
        y_TD = None if rows_RD is None else self._sum(rows_RD, None, handle, header)
        return y_TD, self._return_words(words_RX, handle)

    def _send_words(self, words_TKX: Tensor, handle: DispatchHandle) -> Tensor:
        """Return [R, X], by a dispatch in which each slot is a token. Rows then have the same order."""
        return dispatch_slots(self, words_TKX, handle)

    def _return_words(self, words_RX: Tensor, handle: DispatchHandle) -> Tensor:
        """Return [T, K, X], after ``_send_words`` with the same X."""
        return return_slots(self, words_RX, handle)


def make_handle(
    header: Header, x_TD: Tensor, rows_per_expert: tuple[int, ...], num_rows: int, num_dropped: int, state: Any
) -> DispatchHandle:
    """Return the handle of the dispatch of ``x_TD`` with ``header``."""
    sizes = x_TD.shape[0], header.top_k, x_TD.shape[1], x_TD.dtype, x_TD.device
    return DispatchHandle(*sizes, rows_per_expert, num_rows, num_dropped, header.label, state, header.seq, header.maker)
