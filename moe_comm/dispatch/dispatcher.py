"""The dispatcher: dispatch and combine with autograd, on top of the operations of each backend.

    x_TD, ids_TK ──dispatch──▶ rows_RD (this rank's experts, expert-major) ──experts──▶ rows_RD ──combine──▶ y_TD

Suffixes of tensor names are sizes: T tokens of this rank, D hidden size, K experts per token, R rows of this rank's
experts. A slot is one of the K (token, expert) pairs of a token. ``dispatch/row_operations.py`` has the operations
without autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import refuse_pickling
from moe_comm.comm.group_setup import channel_of, communicator_of
from moe_comm.comm.header import GroupCalls, describe
from moe_comm.dispatch.checksums import CorruptionLog, SentChecksums, sums_by_expert
from moe_comm.dispatch.operation import (
    Operation,
    combine_fault,
    dispatch_fault,
    extra_fault,
    scaled_fault,
    spread_fault,
)
from moe_comm.dispatch.row_operations import (
    CombineFunction,
    DispatchFunction,
    ExtraDispatchFunction,
    RowOperations,
)
from moe_comm.dispatch.types import Dispatched, DispatchHandle, DispatchOptions, ExtraRoutes
from moe_comm.dispatch.wire_dtype import UNCHANGED, quantized
from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.kernels.fp8 import ScaledRows, quantize_rows
from moe_comm.kernels.token_rows import TokenRows
from moe_comm.runtime.event_layout import NO_NAME, Kind
from moe_comm.runtime.events import EVENTS, Open, communication_span
from moe_comm.runtime.memory import Array, as_tensors
from moe_comm.topology import ExpertPlacement, Placement

_makers = count(1)
"""Ids for ``Dispatcher.maker``."""


class Dispatcher(RowOperations):
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
        plan_digest: hash of the experts that the layer of the next dispatch lends to other ranks; 0: none. Compared
            between ranks. [1] int64 on the device for ``dispatch_uncounted``.
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
        self.plan_digest: int | Tensor = 0
        self.trained = 0
        self.before_dispatch: list[Callable[[], None]] = []
        self.has_unknown_experts = False
        super().__init__(GroupCalls() if self.comm is None else self.comm.calls)
        if self.comm is not None:
            self.comm.users.add(self)
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
        if isinstance(extra_TKX, Tensor):
            (extra_TKX,), extra_unusable = as_tensors(extra_values=extra_TKX)
            fault = fault or extra_unusable
        operation = self.dispatch_operation(x_TD, ids_TK, label, scaled=scaled, fault=fault)
        words_TKX = None if extra_TKX is None else _extra_words(operation, extra_TKX, x_TD, ids_TK)
        words_RX: Tensor | None = None
        rows: ScaledRows | None = None
        tokens_TD = x_TD.detach() if x_TD.requires_grad else x_TD
        with operation:
            if scaled and self.options.wire_dtypes.of(operation.op).format == "fp8":
                # Experts read the received bytes, so rows are decoded for checksums only.
                rows, handle = self._send_scaled(tokens_TD, ids_TK)
                rows_RD = rows.dequantized(x_TD.dtype) if self.options.checksums else tokens_TD
            else:
                rounded_TD = self._rounded(tokens_TD) if self.rounds else tokens_TD
                rows_RD, handle, words_RX = self._send_with(rounded_TD, ids_TK, words_TKX)
                rows = quantize_rows(rows_RD) if scaled else None
            if words_TKX is not None:
                handle.extra = ExtraRoutes(operation.extra, ids_TK.reshape(-1, 1))
                # This backend did not send the extra values with the rows.
                if words_RX is None:
                    words_RX = self._send_words(words_TKX, handle)
            if self.options.checksums:
                checksums = self.exchange_checksums(tokens_TD, ids_TK, operation)
                if checksums is not None:
                    checksums.check(rows_RD)
            self.record_handle(operation.span, handle)
        if extra_TKX is None or words_RX is None:
            return self.connected(x_TD, rows_RD if rows is None else rows, handle)
        if rows is not None:
            rows_RD = _no_rows(x_TD, handle)
        rows_RD, extra_RX = self._connected_with(x_TD, extra_TKX, rows_RD, words_RX, handle)
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
        rows_RD, weights_TK = self.combinable(rows_RD, weights_TK, handle)
        if torch.is_grad_enabled() and (rows_RD.requires_grad or weights_TK.requires_grad):
            return CombineFunction.apply(rows_RD, weights_TK, self, handle)  # type: ignore[no-any-return]
        return self.combine_forward(rows_RD, weights_TK, handle, False)[0]

    def combinable(
        self, rows_RD: Tensor | Array, weights_TK: Tensor | Array, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        """Return the arguments of ``combine`` as tensors, or raise its error."""
        (rows_RD, weights_TK), unusable = as_tensors(rows=rows_RD, weights=weights_TK)
        fault: MoeCommError | None = unusable or combine_fault(self.maker, rows_RD, weights_TK, handle)
        if fault is None and self.options.checksums and self.handshakes:
            # Without a handshake the other ranks cannot learn of the fault here, so the next dispatch raises it.
            fault = self.corruption.fault()
        if fault is not None:
            self.refuse_operation("combine", handle, fault)
        return rows_RD, weights_TK

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
        operation = self.operation("combine backward", handle)
        if extra_TKX is not None:
            operation.extra, operation.extra_int = extra_TKX.shape[2], extra_TKX.dtype is torch.int32
        with operation:
            tokens_TD = self._rounded(x_TD.detach()) if self.rounds else x_TD.detach()
            wide = torch.float64 if x_TD.dtype is torch.float64 else torch.float32
            ones_TK = torch.ones(handle.num_tokens, handle.top_k, dtype=wide, device=handle.device)
            if extra_TKX is not None:
                words_TKX = extra_TKX.detach().view(torch.float32)
                rows_RD, words_RX = self._spread_with(tokens_TD, ones_TK, words_TKX, handle)
            else:
                rows_RD, _ = self._spread(tokens_TD, None, ones_TK, handle)
        if extra_TKX is not None:
            return self._connected_with(x_TD, extra_TKX, rows_RD, words_RX, handle)
        return self.connected(x_TD, rows_RD, handle).rows_RD

    def reads_in_place(self, x_TD: Tensor) -> bool:
        """Return whether experts can read tokens like ``x_TD`` where they are (``dispatch_in_place``); equal on every
        rank."""
        return False

    def dispatch_in_place(self, x_TD: Tensor, ids_TK: Tensor, *, label: str = "") -> tuple[TokenRows, DispatchHandle]:
        """Dispatch without copies of rows: this rank's experts read the tokens of all ranks in place. No autograd.

        Arguments and errors are those of ``dispatch``. The tokens are valid while the returned rows exist on any rank.
        """
        raise ConfigError(f"{self.name} does not dispatch in place")

    def dispatch_again(self, x_TD: Tensor, handle: DispatchHandle) -> TokenRows:
        """Repeat ``dispatch_in_place`` with the same tokens, for a backward pass. Collective, no autograd."""
        raise ConfigError(f"{self.name} does not dispatch in place")

    def share_gradients(
        self,
        grad_TD: Tensor,
        x_TD: Tensor | None,
        weights_TK: Tensor,
        needs_weights: bool,
        handle: DispatchHandle,
    ) -> tuple[TokenRows, TokenRows | None, Tensor]:
        """Run ``send_gradients`` after ``dispatch_in_place``; with ``x_TD`` also ``dispatch_again``. One operation.

        Args:
            x_TD: The tokens; None on every rank, or on none.

        Returns:
            [R, D], each row's gradient of its token; the rows of the tokens; and [R] weights.
        """
        raise ConfigError(f"{self.name} does not dispatch in place")

    def run_layer(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        transposed: bool,
        label: str,
    ) -> tuple[Tensor, int] | None:
        """Dispatch, compute SwiGLU experts and combine in one native call, without autograd. Collective.

        Ranks may choose differently between this and ``dispatch_in_place``, experts and ``combine``. Results have the
        same bits. The experts have a span.

        Args:
            tensors: x [T, D], ids [T, K] and routing weights [T, K], as of ``dispatch`` and ``combine``.
            weights: w13 [E, 2F, D] and w2 [E, D, F] of this rank's experts in the dtype of x, or [E, D, 2F] and
                [E, F, D] if ``transposed``; biases [E, 2F] and [E, D], or None.

        Returns:
            [T, D] in the dtype of x, and the number of rows of this rank's experts; None, without communication, if
            this dispatcher or these tensors need the separate calls.
        """
        return None

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised [num_rows, width] storage that this backend reads and writes fastest."""
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    def keeps_counts(self, x_TD: Tensor) -> bool:
        """Return whether ``dispatch_uncounted`` supports these tokens; the same on every rank."""
        return False

    def runs_whole_layers(self, x_TD: Tensor) -> bool:
        """Return whether a layer on these tokens can be one function between ranks; ``peer_to_peer/peer_layer.py``."""
        return False

    def dispatch_uncounted(self, x_TD: Tensor, ids_TK: Tensor, label: str) -> Dispatched:
        """Dispatch without waiting for the row counts, which are ``DeviceCounts``."""
        raise ConfigError(f"{self.name} counts rows on the CPU")

    def check_ids(self) -> None:
        """Wait for the device, and raise the error of invalid expert ids that no call has raised.

        Only ``MoELayer`` over ``local`` on a GPU does not wait for the check of its ids: the results of their tokens
        are NaN, and the next call or backward pass raises the error.

        Raises:
            RoutingError: an earlier call had invalid ids.
        """

    def close(self) -> None:
        """Release the resources of this dispatcher. Collective. May be called twice."""

    def release(self) -> None:
        """Drop references to resources of the group, which is being destroyed. Not collective."""

    def dispatch_by(
        self,
        x_TD: Tensor,
        send: Callable[[Tensor], tuple[Tensor | ScaledRows, DispatchHandle]],
        label: str = "",
        *,
        counted: bool = True,
    ) -> Dispatched:
        """Dispatch with ``send``, which has no autograd, and add the autograd node.

        Args:
            counted: whether the span counts as a call of the group; False if the caller records that call.
        """
        span: AbstractContextManager[Open]
        if self.comm is None:
            span = EVENTS.span(Kind.COMPUTE, "dispatch", layer=label)
        else:
            group = self.comm.span_group if counted else NO_NAME
            span = communication_span(Kind.DISPATCH, "dispatch", layer=label, group=group)
        with span as opened:
            rows, handle = send(x_TD.detach())
            self.record_handle(opened, handle)
        return self.connected(x_TD, rows, handle)

    def connected(self, x_TD: Tensor, rows: Tensor | ScaledRows, handle: DispatchHandle) -> Dispatched:
        """Return rows that were dispatched without autograd, connected to the tokens."""
        scaled = None if isinstance(rows, Tensor) else rows
        rows_RD = rows if isinstance(rows, Tensor) else _no_rows(x_TD, handle)
        if x_TD.requires_grad and torch.is_grad_enabled():
            rows_RD = DispatchFunction.apply(x_TD, rows_RD, self, handle)
        return Dispatched(rows_RD, handle, scaled)

    def exchange_checksums(self, x_TD: Tensor, ids_TK: Tensor, operation: Operation) -> SentChecksums | None:
        """Exchange the checksums of the rows that each rank sends, after the ranks have compared their headers.

        None without ``DispatchOptions.checksums``, and for several ranks in one process, which have no group.
        """
        if not self.options.checksums or (self.comm is None and self.world > 1):
            return None
        wire_dtype = self.options.wire_dtypes.of(operation.op)
        sums_2E = sums_by_expert(x_TD, ids_TK, wire_dtype, self.num_experts)
        description = describe(operation)
        if self.comm is None or self.world == 1:
            sums_W2E = sums_2E.unsqueeze(0)
        else:
            sums_W2E = channel_of(self.comm.group).all_gather(sums_2E, f"the checksums of {description}")
        narrowed = wire_dtype.narrows(x_TD.dtype)
        return SentChecksums(sums_W2E, narrowed, self.local_experts, self.corruption, description)

    def dispatch_operation(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        label: Any,
        op: str = "dispatch",
        scaled: bool = False,
        fault: MoeCommError | None = None,
    ) -> Operation:
        """Return the next operation, the dispatch ``op``. It contains the fault if the input is invalid.

        scaled: see ``dispatch``. fault: an error that is already known.
        """
        for call in self.before_dispatch:
            call()
        fault = fault or self._fault(x_TD, ids_TK)
        if not isinstance(label, str):
            fault, label = InputError(f"label must be a str; got {type(label).__name__}"), ""
        if fault is None and scaled:
            fault = scaled_fault(x_TD)
        # Mismatches of earlier rows that no caller has taken are raised here, on every rank.
        if fault is None and self.options.checksums:
            fault = self.corruption.fault()
        x_shape, ids_shape = x_TD.shape, ids_TK.shape
        return Operation(
            op,
            self.calls.next(self._ordinal),
            x_shape[-1] if x_shape else 0,
            x_TD.dtype,
            ids_shape[-1] if ids_shape else 0,
            self.num_experts,
            x_TD.requires_grad and torch.is_grad_enabled(),
            label,
            fault,
            ordinal=self._ordinal,
            maker=self.maker,
            calls=self.calls,
            scaled=scaled,
            placement=self._placement_digest(),
            trained=self.trained,
            dispatcher=self,
        )

    def _placement_digest(self) -> int:
        """Return the digest of the placement of experts, with the upper bits of ``plan_digest``."""
        digest = 0 if self.expert_placement is None else self.expert_placement.digest
        return digest ^ (self.plan_digest >> 24 << 16 if isinstance(self.plan_digest, int) else 0)

    # --- for the backends ---

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        return dispatch_fault(x_TD, ids_TK, None if self.checks_ids else self.num_experts)

    def _handle(
        self,
        x_TD: Tensor,
        rows_per_expert: tuple[int, ...],
        num_rows: int,
        num_dropped: int,
        state: Any,
        num_own: int | None = None,
    ) -> DispatchHandle:
        """Return the handle of the current operation, the dispatch of ``x_TD``."""
        (tokens, hidden), operation = x_TD.shape, self.context.operation
        return DispatchHandle(
            tokens,
            operation.top_k,
            hidden,
            x_TD.dtype,
            x_TD.device,
            rows_per_expert,
            num_rows,
            num_dropped,
            num_own,
            operation.label,
            state,
            operation.seq,
            operation.maker,
        )

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[ScaledRows, DispatchHandle]:
        """Run ``_send`` with an fp8 wire dtype, and return the encoded rows.

        A backend that encodes rows overrides this. The others move rows in their own dtype, and this rank encodes them.
        A row has the same bytes, whichever rank encodes it.
        """
        rows_RD, handle = self._send(x_TD, ids_TK)
        return quantized(rows_RD, self.options.wire_dtypes.of(self.context.operation.op)), handle

    def _connected_with(
        self, x_TD: Tensor, extra_TKX: Tensor, rows_RD: Tensor, words_RX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        """Return received rows and extra values with the history of ``x_TD`` and ``extra_TKX``."""
        extra_RX = words_RX.view(extra_TKX.dtype)
        if torch.is_grad_enabled() and (x_TD.requires_grad or extra_TKX.requires_grad):
            rows_RD, extra_RX = ExtraDispatchFunction.apply(x_TD, extra_TKX, rows_RD, extra_RX, self, handle)
        return rows_RD, extra_RX


def _extra_words(operation: Operation, extra_TKX: Tensor, x_TD: Tensor, ids_TK: Tensor) -> Tensor | None:
    """Add extra values to the header of a dispatch. Return them as fp32 words; None if the input is invalid."""
    operation.fault = operation.fault or extra_fault(extra_TKX, ids_TK.shape, x_TD.device)
    if operation.fault is not None:
        return None
    operation.extra, operation.extra_int = extra_TKX.shape[2], extra_TKX.dtype is torch.int32
    operation.extra_grad = extra_TKX.requires_grad and torch.is_grad_enabled()
    return extra_TKX.detach().view(torch.float32)


def _no_rows(x_TD: Tensor, handle: DispatchHandle) -> Tensor:
    """Placeholder for ``rows_RD`` where experts read fp8 values and scales: an expanded NaN without memory."""
    return x_TD.new_full((1, 1), torch.nan).expand(handle.num_rows, handle.hidden)
