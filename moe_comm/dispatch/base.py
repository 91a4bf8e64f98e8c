"""The dispatcher interface, with autograd on top of three primitives of each backend.

    x_TD, ids_TK ──dispatch──▶ rows_RD (this rank's experts, expert-major) ──experts──▶ rows_RD ──combine──▶ y_TD

Suffixes of tensor names are sizes: T tokens of this rank, D hidden size, K experts per token, R rows of this rank's
experts. A slot is one of the K (token, expert) pairs of a token. The primitives have no autograd:

    _send    dispatch forward: copy each routed row to the rank of its expert
    _sum     combine forward (weighted) and dispatch backward (unweighted): sum the K rows of each token in slot order
    _spread  combine backward: send each token's gradient, times its weight, to its K rows; compute weight gradients
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import _StopRecomputationError  # no public name

from moe_comm.comm.group_setup import communicator_of
from moe_comm.comm.header import DTYPES, GroupCalls, Header
from moe_comm.deprecated import warn_renamed
from moe_comm.dispatch.arrays import Array, as_tensors
from moe_comm.dispatch.checksums import CorruptionLog, exchange_checksums
from moe_comm.dispatch.dispatch_spans import dispatch_span, record_handle
from moe_comm.dispatch.group_scales import rounded_in_groups
from moe_comm.dispatch.types import DROPPED, Dispatched, DispatchHandle, DispatchOptions, routing_error
from moe_comm.dispatch.wire_dtype import UNCHANGED, pack, rounded, unpack_scaled
from moe_comm.errors import InputError, MoeCommError, PeerRaised, known_to_peers, mark_known
from moe_comm.kernels.fp8 import BLOCK, ScaledRows, quantize_rows
from moe_comm.topology import ExpertPlacement, Placement

ID_DTYPES = (torch.int64, torch.int32)
MESSAGE_CHARS = 160
"""Length limit for the text of an exception in a header."""

_makers = count(1)
"""Ids for ``Dispatcher.maker``."""


class Dispatcher(ABC):
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
        self.row_bytes: dict[tuple[str, int, torch.dtype], int] = {}
        self.calls = GroupCalls() if self.comm is None else self.comm.calls
        if self.comm is not None:
            self.comm.users.add(self)
        self._ordinal = self.calls.add_dispatcher()
        self.maker = next(_makers)

    @property
    def group(self) -> ProcessGroup | None:
        """The expert-parallel process group; None if this process holds all experts.

        Raises:
            ConfigError: the group has been destroyed.
        """
        return None if self.comm is None else self.comm.group

    @property
    def damage(self) -> CorruptionLog:
        """Deprecated alias of ``corruption``."""
        warn_renamed("Dispatcher.damage", "Dispatcher.corruption")
        return self.corruption

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
        self, x_TD: Tensor | Array, ids_TK: Tensor | Array, *, label: str = "", scaled: bool = False
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

        Returns:
            Rows of this rank's experts, and the handle for ``combine``.

        Raises:
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            ConfigError: ``scaled`` with an fp8 wire dtype over ``hierarchical``; on every rank, before rows move.
            PeerDied, PeerTimeout: a rank died, or did not call in time.
            CorruptPayload: on every rank, for the rows of an earlier dispatch, with ``DispatchOptions.checksums``.
        """
        fault = None
        if not (isinstance(x_TD, Tensor) and isinstance(ids_TK, Tensor)):
            (x_TD, ids_TK), fault = as_tensors(x_TD, ids_TK)
        header = self.dispatch_header(x_TD, ids_TK, label)
        if fault is not None:
            header = replace(header, fault=fault)
        if scaled:
            header = replace(header, scaled=True, fault=header.fault or _scaled_fault(x_TD))
        tokens_TD = x_TD.detach() if x_TD.requires_grad else x_TD
        rows: ScaledRows | None = None
        with dispatch_span(self, "dispatch", label) as span:
            if scaled and self.options.wire_dtypes.of(header.op).format == "fp8":
                rows, handle = self._send_scaled(tokens_TD, ids_TK, header)
                rows_RD = rows.dequantized(x_TD.dtype) if self.options.checksums else tokens_TD
            else:
                rounded_TD = _rounded(self, tokens_TD, header) if self.rounds else tokens_TD
                rows_RD, handle = self._send(rounded_TD, ids_TK, header)
                rows = quantize_rows(rows_RD) if scaled else None
            if self.options.checksums:
                checksums = exchange_checksums(self, tokens_TD, ids_TK, header)
                if checksums is not None:
                    checksums.check(rows_RD)
            record_handle(span, self, handle)
        if rows is not None:
            rows_RD = x_TD.new_full((1, 1), torch.nan).expand(handle.num_rows, handle.hidden)
        if header.requires_grad:
            rows_RD = _Dispatch.apply(x_TD, rows_RD, self, handle)
        return Dispatched(rows_RD, handle, rows)

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
        unusable = None
        if not (isinstance(rows_RD, Tensor) and isinstance(weights_TK, Tensor)):
            (rows_RD, weights_TK), unusable = as_tensors(rows_RD, weights_TK)
        fault = unusable or _combine_fault(self, rows_RD, weights_TK, handle)
        if fault is not None:
            self._raise_fault(fault, self.header("combine", handle, False), rows_RD, everywhere=self.handshakes)
        grad = torch.is_grad_enabled() and (rows_RD.requires_grad or weights_TK.requires_grad)
        if grad:
            return _Combine.apply(rows_RD, weights_TK, self, handle)  # type: ignore[no-any-return]
        return _combined(self, rows_RD, weights_TK, handle, False)[0]

    def spread(self, x_TD: Tensor, handle: DispatchHandle) -> Tensor:
        """Send other rows along the routes of an earlier dispatch, without counting the slots again.

        The rows are those of ``dispatch`` with the same ids, in the same order, and ``combine`` accepts ``handle`` for
        them. Differentiable. A wire dtype is that of gradients, because this is the transfer of combine's backward.

        Args:
            x_TD: [T, D] with the shape, dtype and device of the dispatched tokens.
            handle: from ``dispatch`` of this dispatcher.

        Returns:
            [R, D] rows of this rank's experts.

        Raises:
            InputError: shape, dtype, device or handle do not match the dispatch.
            RankMismatch, PeerDied, PeerTimeout: as in ``combine``.
        """
        header = self.header("combine backward", handle, False)
        fault = _spread_fault(self, x_TD, handle)
        if fault is not None:
            self._raise_fault(fault, header, x_TD, everywhere=self.handshakes)
        tokens_TD = _rounded(self, x_TD.detach(), header) if self.rounds else x_TD.detach()
        wide = torch.float64 if x_TD.dtype is torch.float64 else torch.float32
        ones_TK = torch.ones(handle.num_tokens, handle.top_k, dtype=wide, device=handle.device)
        with dispatch_span(self, header.op, handle.label, handle):
            rows_RD, _ = self._spread(tokens_TD, None, ones_TK, handle, header)
        if torch.is_grad_enabled() and x_TD.requires_grad:
            rows_RD = _Dispatch.apply(x_TD, rows_RD, self, handle)
        return rows_RD

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised [num_rows, width] storage that this backend reads and writes fastest."""
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    def own_rows(self, handle: DispatchHandle, sent: int) -> int | None:
        """Return how many of the ``sent`` rows of an operation stay on this rank.

        None if rows are relayed or gathered: the inner collectives record their bytes.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most backends own nothing beyond their group
        """Release the resources of this dispatcher. Collective. May be called twice."""

    def release(self) -> None:  # noqa: B027
        """Drop references to resources of the group, which is being destroyed. Not collective."""

    def refuse(self, fault: MoeCommError, x: Tensor, *, label: str = "") -> NoReturn:
        """Raise ``fault`` of this rank on every rank, in place of the next dispatch.

        Args:
            x: any tensor with the dtype and device of the rows that would have been sent.
        """
        header = Header(
            "dispatch",
            self.calls.next(self._ordinal),
            0,
            x.dtype,
            1,
            self.num_experts,
            False,
            label,
            None,
            ordinal=self._ordinal,
            calls=self.calls,
        )
        self._raise_fault(fault, header, x)

    def _raise_fault(self, fault: MoeCommError, header: Header, x: Tensor, *, everywhere: bool = True) -> NoReturn:
        """Raise ``fault`` on this rank, and ``everywhere`` on every rank: ``_send`` stops at the handshake."""
        if everywhere:
            self._send(x.new_empty(0, 0), x.new_empty(0, 1, dtype=torch.int64), replace(header, fault=fault))
        raise fault

    def abort(self, error: Exception, *, label: str = "", in_flight: bool = False) -> None:
        """Report to the other ranks that this rank raised ``error`` between two operations.

        The other ranks raise ``PeerRaised`` from their current or next dispatcher operation on this group. The caller
        raises ``error`` again. This call waits for the other ranks for at most ``DispatchOptions.timeout_s``.
        Afterwards the group can be used again. Nothing happens if ``error`` came from an operation, because all ranks
        raise it.

        If the ranks do not compare headers in the next operation (rows are in flight, or operations are not
        ``checked``), the other ranks raise ``PeerError`` where they wait, and the group is unusable afterwards.

        Args:
            error: exception of this rank.
            label: name of the layer, for the other ranks' message.
            in_flight: rows of an operation that has started are still in transfer.
        """
        if self.world == 1 or known_to_peers(error):
            return
        mark_known(error)
        where = f" in layer {label!r}" if label else ""
        text = " ".join(str(error).split())[:MESSAGE_CHARS]
        text = f"raised {type(error).__name__}{where} instead of its next operation: {text}"
        if in_flight or not self.handshakes:
            self._report_stop(f"rank {self.rank} {text}")
            return
        with suppress(MoeCommError):
            self.refuse(PeerRaised(text), torch.empty(0), label=label)

    def abort_on_error(self, label: str = "", *, in_flight: bool = False) -> AbstractContextManager[None]:
        """Return a context manager that calls ``abort`` for an exception that leaves the ``with`` block.

        The block holds the code between two operations: the experts, or the call of ``backward``.
        """
        return _AbortOnError(self, label, in_flight)

    @property
    def handshakes(self) -> bool:
        """Whether every operation compares headers between ranks, and not dispatch alone."""
        return self.options.checked

    def _report_stop(self, text: str) -> None:  # noqa: B027 - only backends over torch.distributed wait for a report
        """Report that this rank stops, to ranks that wait outside a handshake."""

    # --- for the functions below and the backends ---

    def header(self, op: str, handle: DispatchHandle, requires_grad: bool) -> Header:
        """Return the next header for ``op`` on the rows of ``handle``."""
        return Header(
            op,
            self.calls.next(self._ordinal),
            handle.hidden,
            handle.dtype,
            handle.top_k,
            self.num_experts,
            requires_grad,
            handle.label,
            None,
            handle.call,
            self._ordinal,
            0,
            self.calls,
        )

    def dispatch_header(self, x_TD: Tensor, ids_TK: Tensor, label: str, op: str = "dispatch") -> Header:
        """Return the header of the dispatch ``op``. It contains the fault if the input is invalid."""
        fault = self._fault(x_TD, ids_TK)
        if fault is None and self.options.checksums:
            fault = self.corruption.fault()
        return Header(
            op,
            self.calls.next(self._ordinal),
            x_TD.shape[-1] if x_TD.dim() else 0,
            x_TD.dtype,
            ids_TK.shape[-1] if ids_TK.dim() else 0,
            self.num_experts,
            x_TD.requires_grad and torch.is_grad_enabled(),
            label,
            fault,
            0,
            self._ordinal,
            self.maker,
            self.calls,
            placement=0 if self.expert_placement is None else self.expert_placement.digest,
        )

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        if x_TD.dim() != 2 or ids_TK.dim() != 2 or x_TD.shape[0] != ids_TK.shape[0]:
            return InputError(
                f"dispatch needs x [T, D] and ids [T, K]; got {tuple(x_TD.shape)} and {tuple(ids_TK.shape)}"
            )
        if x_TD.dtype not in DTYPES:
            return InputError(f"rows must be float32, bfloat16, float16 or float64; got {x_TD.dtype}")
        if ids_TK.dtype not in ID_DTYPES:
            return InputError(f"expert ids must be int64 or int32; got {ids_TK.dtype}")
        if x_TD.device != ids_TK.device:
            return InputError(f"x is on {x_TD.device} but the expert ids are on {ids_TK.device}")
        if ids_TK.shape[1] < 1:
            return InputError("top-k must be at least 1; got ids of width 0")
        if self.checks_ids or not ids_TK.numel():
            return None
        low, high = (int(v) for v in torch.aminmax(ids_TK))
        if low >= DROPPED and high < self.num_experts:
            return None
        return routing_error(ids_TK, self.num_experts)

    @abstractmethod
    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]: ...

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[ScaledRows, DispatchHandle]:
        """Run ``_send`` with an fp8 wire dtype, and return the encoded rows.

        A backend that encodes rows overrides this. The others move rows in their own dtype, and this rank encodes them.
        A row has the same bytes, whichever rank encodes it.
        """
        rows_RD, handle = self._send(x_TD, ids_TK, header)
        wire_dtype = self.options.wire_dtypes.of(header.op)
        return unpack_scaled(pack(rows_RD, wire_dtype), wire_dtype, handle.hidden), handle

    @abstractmethod
    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor: ...

    @abstractmethod
    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        """``rows_RD`` is None if the weights need no gradient."""


def _scaled_fault(x_TD: Tensor) -> InputError | None:
    if x_TD.dim() == 2 and x_TD.shape[1] and not x_TD.shape[1] % BLOCK:
        return None
    return InputError(
        f"scaled rows have one scale per {BLOCK} channels, so D must be a positive multiple of {BLOCK}; got x "
        f"{tuple(x_TD.shape)}. Dispatch without scaled (expert_gemm_dtype='same'), or change the hidden size"
    )


class _AbortOnError:
    """Result of ``Dispatcher.abort_on_error``. A class, because ``contextmanager`` takes several calls more."""

    __slots__ = ("_dispatcher", "_in_flight", "_label")

    def __init__(self, dispatcher: Dispatcher, label: str, in_flight: bool) -> None:
        self._dispatcher, self._label, self._in_flight = dispatcher, label, in_flight

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # Activation checkpointing ends a forward pass early with _StopRecomputationError.
        if isinstance(error, Exception) and not isinstance(error, _StopRecomputationError):
            self._dispatcher.abort(error, label=self._label, in_flight=self._in_flight)


def _rounded(dispatcher: Dispatcher, rows_RD: Tensor, header: Header) -> Tensor:
    """Return ``rows_RD`` rounded to the wire dtype of the operation."""
    if header.fault is not None:
        return rows_RD
    wire_dtype = dispatcher.options.wire_dtypes.of(header.op)
    return rounded_in_groups(rows_RD, wire_dtype) if wire_dtype.scales == "group" else rounded(rows_RD, wire_dtype)


class _Dispatch(torch.autograd.Function):
    """Identity on the dispatched rows. Its backward sums the K gradient rows of each token."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows_RD: Tensor, dispatcher: Dispatcher, handle: DispatchHandle) -> Tensor:
        ctx.dispatcher, ctx.handle = dispatcher, handle
        return rows_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        return dispatch_backward(ctx.dispatcher, grad_RD, ctx.handle), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_TK: Tensor, dispatcher: Dispatcher, handle: DispatchHandle
    ) -> Tensor:
        y_TD, wide_TK = _combined(dispatcher, rows_RD, weights_TK, handle, True)
        # In backward, peers read the saved rows in place again.
        ctx.save_for_backward(rows_RD, wide_TK)
        ctx.dispatcher, ctx.handle, ctx.weights_dtype = dispatcher, handle, weights_TK.dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_TK = ctx.saved_tensors
        rows = rows_RD if ctx.needs_input_grad[1] else None
        grad_rows_RD, grad_TK = combine_backward(ctx.dispatcher, grad_TD, rows, weights_TK, ctx.handle)
        return grad_rows_RD, None if grad_TK is None else grad_TK.to(ctx.weights_dtype), None, None


def dispatch_backward(dispatcher: Dispatcher, grad_RD: Tensor, handle: DispatchHandle) -> Tensor:
    """Return [T, D], the gradient of dispatched tokens. For operators that have their own autograd. Collective."""
    header = dispatcher.header("dispatch backward", handle, False)
    if dispatcher.rounds:
        grad_RD = _rounded(dispatcher, grad_RD, header)
    with dispatch_span(dispatcher, header.op, handle.label, handle):
        return dispatcher._sum(grad_RD, None, handle, header)


def combine_backward(
    dispatcher: Dispatcher, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the rows and weights of a combine, as ``dispatch_backward``.

    Args:
        rows_RD: the combined rows; None if the weights need no gradient.
        weights_TK: fp32 (fp64 for fp64 rows).
    """
    header = dispatcher.header("combine backward", handle, rows_RD is not None)
    if dispatcher.rounds:
        grad_TD = _rounded(dispatcher, grad_TD, header)
    with dispatch_span(dispatcher, header.op, handle.label, handle):
        return dispatcher._spread(grad_TD, rows_RD, weights_TK, handle, header)


def _combined(
    dispatcher: Dispatcher, rows_RD: Tensor, weights_TK: Tensor, handle: DispatchHandle, grad: bool
) -> tuple[Tensor, Tensor]:
    """Combine without autograd. Also return the weights in the dtype of the multiplication."""
    header = dispatcher.header("combine", handle, grad)
    wide = torch.float64 if rows_RD.dtype is torch.float64 else torch.float32
    wide_TK = weights_TK if weights_TK.dtype is wide else weights_TK.to(wide)
    rounded_RD = _rounded(dispatcher, rows_RD, header) if dispatcher.rounds else rows_RD
    with dispatch_span(dispatcher, header.op, handle.label, handle):
        return dispatcher._sum(rounded_RD, wide_TK, handle, header), wide_TK


def dispatch_by(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    send: Callable[[Tensor], tuple[Tensor, DispatchHandle]],
    label: str = "",
    *,
    counted: bool = True,
) -> Dispatched:
    """Dispatch with autograd through ``send``, which has none.

    Args:
        counted: whether the span counts as a call of the group; False if the caller records that call.
    """
    with dispatch_span(dispatcher, "dispatch", label, counted=counted) as span:
        rows_RD, handle = send(x_TD.detach())
        record_handle(span, dispatcher, handle)
    if torch.is_grad_enabled() and x_TD.requires_grad:
        rows_RD = _Dispatch.apply(x_TD, rows_RD, dispatcher, handle)
    return Dispatched(rows_RD, handle)


def make_handle(
    header: Header, x_TD: Tensor, rows_per_expert: tuple[int, ...], num_rows: int, num_dropped: int, state: Any
) -> DispatchHandle:
    """Return the handle of the dispatch of ``x_TD`` with ``header``."""
    sizes = x_TD.shape[0], header.top_k, x_TD.shape[1], x_TD.dtype, x_TD.device
    return DispatchHandle(*sizes, rows_per_expert, num_rows, num_dropped, header.label, state, header.seq, header.maker)


def _maker_fault(dispatcher: Dispatcher, handle: DispatchHandle) -> InputError | None:
    if handle.maker == dispatcher.maker:
        return None
    return InputError(
        f"the handle of call {handle.call} belongs to another dispatcher; combine with the one that dispatched"
    )


def _spread_fault(dispatcher: Dispatcher, x_TD: Tensor, handle: DispatchHandle) -> MoeCommError | None:
    given, expected = (
        (tuple(x_TD.shape), x_TD.dtype, x_TD.device),
        ((handle.num_tokens, handle.hidden), handle.dtype, handle.device),
    )
    if given == expected:
        return _maker_fault(dispatcher, handle)
    return InputError(f"spread needs shape, dtype and device of the dispatched tokens, {expected}; got {given}")


def _combine_fault(
    dispatcher: Dispatcher, rows_RD: Tensor, weights_TK: Tensor, handle: DispatchHandle
) -> MoeCommError | None:
    fault = _maker_fault(dispatcher, handle)
    if fault is not None:
        return fault
    if rows_RD.shape != (handle.num_rows, handle.hidden) or rows_RD.dtype != handle.dtype:
        return InputError(
            f"combine needs rows [{handle.num_rows}, {handle.hidden}] {handle.dtype}, as returned by dispatch; "
            f"got {tuple(rows_RD.shape)} {rows_RD.dtype}"
        )
    if weights_TK.shape != (handle.num_tokens, handle.top_k):
        return InputError(f"combine needs weights [{handle.num_tokens}, {handle.top_k}]; got {tuple(weights_TK.shape)}")
    if rows_RD.device != handle.device or weights_TK.device != handle.device:
        return InputError(
            f"combine needs rows and weights on {handle.device}, the device of dispatch; "
            f"got rows on {rows_RD.device} and weights on {weights_TK.device}"
        )
    # Without a handshake the other ranks cannot learn of the fault here, so the next dispatch raises it.
    return dispatcher.corruption.fault() if dispatcher.options.checksums and dispatcher.handshakes else None
