"""``shared_memory``, and what it shares with ``local`` on the CPU: rows that the native core moves.

Dispatch copies each row once, from the caller's tensor to its final position at the owner of its expert. Combine reads
the output rows of the owners in place. csrc/cpu/communicator.h defines the protocol, csrc/cpu/transfer.h the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import Communicator
from moe_comm.comm.group_setup import heap_of
from moe_comm.comm.header import DISPATCH_AGAIN, OPS, failure, fault_word
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.operation import ID_DTYPES, Operation
from moe_comm.dispatch.pending import IncomingRows, OutgoingRows, PendingDispatcher, PendingTransfer
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import rounded
from moe_comm.errors import InputError, MoeCommError, PeerError, RoutingError, mark_known
from moe_comm.kernels.token_rows import TokenRows
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS
from moe_comm.runtime.memory import (
    DTYPE_CODES,
    address,
    as_tensors,
    block,
    from_capsule,
    in_memory,
    is_plain,
    private_heap,
    row_address,
    warm_rows,
)
from moe_comm.runtime.native_core import native
from moe_comm.topology import ExpertPlacement

if TYPE_CHECKING:
    from moe_comm import _C


def supported(x: Tensor) -> bool:
    """Return whether the native core can move rows of this tensor."""
    return x.device.type == "cpu" and x.dtype in DTYPE_CODES


WordsArgs = tuple[int, int, int, int]
"""Address, width, and strides of the words of slots."""
NO_WORDS = (0, 0, 0, 0)
RowWordsArgs = tuple[int, int, int]
"""Address and width of the words of rows, and address of the words of slots."""
NO_ROW_WORDS = (0, 0, 0)
LAYER_DTYPES = (torch.float32, torch.bfloat16)
"""Of ``run_layer``: those that experts read in place."""
LocatedRows = tuple[list[tuple[list[int], int]], list[int], int]
"""Of ``Transfer.share``: address of each rank's rows and their stride, for each part; tokens of each rank; places."""


class _NativeTransfer(PendingTransfer):
    """A transfer of the native core."""

    _native: _C.PendingReceive | _C.PendingSum
    _dispatcher: NativeDispatcher

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._native.finish()
        finally:
            self._native.abandon()  # has no effect after finish
            if not self._native.finished():
                self._dispatcher.retain(self)


class NativeIncomingRows(_NativeTransfer, IncomingRows):
    """Rows that the native core receives."""

    def __init__(
        self,
        dispatcher: NativeDispatcher,
        native: _C.PendingReceive,
        rows_RD: Tensor,
        handle: DispatchHandle,
        *buffers: object,
    ) -> None:
        self._dispatcher, self._native, self._receive = dispatcher, native, native
        self.rows_RD, self.handle = rows_RD, handle
        self._buffers = buffers  # peers may read and write them

    def ready(self, peer: int) -> bool:
        return self._receive.ready(peer)

    def next(self, peers: Sequence[int]) -> int:
        return self._receive.next(peers)


class NativeOutgoingRows(_NativeTransfer, OutgoingRows):
    """Outputs of experts that peers read through the native core."""

    def __init__(self, dispatcher: NativeDispatcher, native: _C.PendingSum, rows_RD: Tensor, y_TD: Tensor) -> None:
        self._native = self._pending_sum = native
        self._dispatcher, self._operation, self._y_TD = dispatcher, dispatcher.context.operation, y_TD
        self._rows_RD = rows_RD  # peers read it

    def raise_flag(self, peer: int) -> None:
        self._pending_sum.raise_flag(peer)

    def ready(self) -> bool:
        return self._pending_sum.ready()

    def sum(self, weights_TK: Tensor | None) -> Tensor:
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        try:
            weights = address(weights_TK, torch.float32, (len(self._y_TD), self._operation.top_k))
            self._pending_sum.sum(weights, address(self._y_TD, self._rows_RD.dtype))
        except self._dispatcher.errors as error:
            raise self._dispatcher.translated(error, self._operation) from None
        return self._y_TD


class NativeDispatcher(Dispatcher):
    """A dispatcher whose primitives run in the native core, each with one call of its ``Transfer``."""

    checks_ids = True  # the native core checks
    heap: _C.Heap

    def _open(self, heap: _C.Heap, peers: Communicator | None) -> None:
        """Move rows through ``heap``. peers: of the ranks that read it; None if this process holds all experts."""
        core, self._peers = native(), peers
        self.errors = (MoeCommError, core.HandshakeFailed)
        self.heap, self._results = heap, private_heap()
        offsets, threads = list(self.placement.offsets), torch.get_num_threads()
        self._transfer = core.Transfer(None if peers is None else peers.core, heap, offsets, threads=threads)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a block of this rank's heap, which peers read in place. Other dtypes and devices get a new tensor."""
        if device.type != "cpu" or dtype not in DTYPE_CODES:
            return super().empty_rows(num_rows, width, dtype, device)
        return block(self.heap, num_rows, width, dtype)

    def _run(self, call: Callable[..., Any], *args: Any, read: Tensor | None = None) -> Any:
        """Call the native core for the current operation. read: rows that peers read in place."""
        operation, peers = self.context.operation, self._peers
        if peers is not None and peers.core_timeout_s != self.options.timeout_s:
            peers.set_core_timeout(self.options.timeout_s)
        try:
            return call(operation.compared(), operation.label, *args)
        except BaseException as error:
            if not isinstance(error, self.errors[1]):  # after a failed handshake no peer reads
                self.retain(read)
            if isinstance(error, self.errors):
                raise self.translated(error, operation) from None
            raise

    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        return self._send_with(x_TD, ids_TK, None)[:2]

    def _send_with(
        self, x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor | None
    ) -> tuple[Tensor, DispatchHandle, Tensor | None]:
        if self.context.operation.fault is not None:
            with self._start_send(x_TD, ids_TK) as incoming:
                return incoming.rows_RD, incoming.handle, None
        words = NO_WORDS
        if words_TKX is not None:
            words_TKX, words = _words_args(words_TKX, x_TD.shape[0], ids_TK.shape[1])
        capsule, state, sizes, rows, dropped, own, received = self._run(self._transfer.send, x_TD, ids_TK, words)
        rows_RD = from_capsule(capsule) if rows and x_TD.shape[1] else x_TD.new_empty(rows, x_TD.shape[1])
        words_RX = None if received is None else _received(received, rows, words)
        return rows_RD, self._handle(x_TD, sizes, rows, dropped, state, own), words_RX

    def _start_send(self, x_TD: Tensor, ids_TK: Tensor) -> NativeIncomingRows:
        """Start ``_send``. This rank's own rows are complete on return; rows of peers may be in flight."""
        operation = self.context.operation
        fault = operation.fault is not None
        tokens, hidden = (0, operation.hidden) if fault else (x_TD.shape[0], x_TD.shape[1])
        if not fault:
            x_TD = _dense(x_TD)
            ids_TK = ids_TK.to(torch.int64).contiguous()
        capsule, state, pending = self._run(
            self._transfer.start_send,
            fault_word(operation.fault),
            str(operation.fault or ""),
            *((0, 0) if fault else row_address(x_TD, operation.dtype, (tokens, hidden))),
            0 if fault else address(ids_TK, torch.int64, (tokens, operation.top_k)),
            tokens,
            operation.top_k,
            hidden,
            DTYPE_CODES.get(operation.dtype, 0),
        )
        rows = state.rows
        rows_RD = from_capsule(capsule) if rows and hidden else x_TD.new_empty(rows, hidden)
        handle = self._handle(x_TD, state.rows_per_expert, rows, state.dropped, state, state.own)
        return NativeIncomingRows(self, pending, rows_RD, handle, capsule)

    def reads_in_place(self, x_TD: Tensor) -> bool:
        return supported(x_TD) and not self.options.checksums

    def dispatch_in_place(self, x_TD: Tensor, ids_TK: Tensor, *, label: str = "") -> tuple[TokenRows, DispatchHandle]:
        (x_TD, ids_TK), unusable = as_tensors(x=x_TD, ids=ids_TK)
        operation = self.dispatch_operation(x_TD, ids_TK, label, fault=unusable)
        operation.in_place = True
        with operation:
            if operation.fault is not None:
                self._send(x_TD, ids_TK)  # raises on every rank
            x_TD = self._tokens_in_place(x_TD)
            shared, state, sizes, rows, dropped, own, located = self._run(self._transfer.share, x_TD, ids_TK)
            handle = self._handle(x_TD, sizes, rows, dropped, state, own)
            handle.in_place = True
            self.record_handle(operation.span, handle)
        return self._token_rows(shared, located, handle, [x_TD])[0], handle

    def run_layer(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        transposed: bool,
        label: str,
    ) -> tuple[Tensor, int] | None:
        x_TD, ids_TK, weights_TK = tensors
        given = [one for one in (*tensors, *weights) if one is not None]
        with_memory = [one for one in given if one.numel()]
        if (
            x_TD.dtype not in LAYER_DTYPES
            or weights_TK.dtype not in DTYPE_CODES
            or ids_TK.shape != weights_TK.shape
            or not is_plain(with_memory)
            or (len(with_memory) < len(given) and not in_memory(*given))
            or any(not one.is_contiguous() for one in given[5:])  # the separate calls copy biases
            or not self.reads_in_place(x_TD)
            or not weights_TK.is_cpu
            or self.rounds
            or COMMUNICATION.read
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        dispatch = self.dispatch_operation(x_TD, ids_TK, label)
        dispatch.in_place = True
        if dispatch.fault is not None:
            with dispatch:
                self._send(x_TD, ids_TK)  # raises on every rank
        combine = self._new_operation(
            "combine", dispatch.hidden, dispatch.dtype, dispatch.top_k, label=label, of_call=dispatch.seq
        )
        peers, core, timeout_s = self._peers, native(), self.options.timeout_s
        if peers is not None and peers.core_timeout_s != timeout_s:
            peers.set_core_timeout(timeout_s)
        try:
            capsule, received = core.run_layer(
                self._transfer,
                (dispatch.compared(), combine.compared()),
                label,
                (x_TD, ids_TK, weights_TK if weights_TK.dtype is torch.float32 else weights_TK.float()),
                weights,
                transposed,
                self._results,
                torch.get_num_threads(),
                (dispatch.new_span(), EVENTS.span(Kind.COMPUTE, "experts", layer=label), combine.new_span()),
            )
        except Exception as error:
            started = combine if _is_of(error, combine, self.rank) else dispatch
            if started is dispatch:  # ranks in separate calls have not counted the combine
                self.calls.take_back(combine.ordinal, combine.seq)
            if isinstance(error, (PeerError, self.errors[1])):
                raise self.translated(error, started) from None
            self.abort(error, label=label)  # of this rank alone: the others wait for its dispatch or combine
            raise
        return torch.empty_like(x_TD) if capsule is None else from_capsule(capsule), received

    def dispatch_again(self, x_TD: Tensor, handle: DispatchHandle) -> TokenRows:
        with self.operation(DISPATCH_AGAIN, handle):
            return self._share_again([self._tokens_in_place(x_TD)], None, handle)[0][0]

    def share_gradients(
        self,
        grad_TD: Tensor,
        x_TD: Tensor | None,
        weights_TK: Tensor,
        needs_weights: bool,
        handle: DispatchHandle,
    ) -> tuple[TokenRows, TokenRows | None, Tensor]:
        (grad_TD,) = self._readable("combine backward", handle, gradient=grad_TD)
        again = x_TD is not None
        with self.operation("combine backward", handle, needs_weights, extra=1, in_place=True, again=again):
            parts = [_dense(self._rounded(grad_TD) if self.rounds else grad_TD)]
            if x_TD is not None:
                parts.append(self._tokens_in_place(x_TD, DISPATCH_AGAIN))
            rows, weights_R = self._share_again(parts, weights_TK, handle)
        assert weights_R is not None
        return rows[0], rows[1] if again else None, weights_R

    def _share_again(
        self, parts: list[Tensor], weights_TK: Tensor | None, handle: DispatchHandle
    ) -> tuple[list[TokenRows], Tensor | None]:
        """Return the rows of each part [T, D], which experts read in place, and the weight of each row."""
        at = [row_address(part, handle.dtype, (handle.num_tokens, handle.hidden)) for part in parts]
        weights_R = None
        if weights_TK is not None:
            weights_TK = weights_TK.contiguous()
            weights_R = torch.empty(handle.num_rows, dtype=torch.float32, device="cpu")
        words = address(weights_TK, torch.float32, (handle.num_tokens, handle.top_k))
        shared, located = self._run(
            self._transfer.share_again, handle.state, at, words, 0 if weights_R is None else weights_R.data_ptr()
        )
        return self._token_rows(shared, located, handle, parts), weights_R

    def _tokens_in_place(self, x_TD: Tensor, op: str = "") -> Tensor:
        x_TD = x_TD.detach() if x_TD.requires_grad else x_TD
        x_TD = self._rounded(x_TD, op) if self.rounds else x_TD
        return x_TD if x_TD.is_contiguous() else _dense(x_TD)

    def _token_rows(
        self, shared: _C.SharedTokens, located: LocatedRows, handle: DispatchHandle, parts: list[Tensor]
    ) -> list[TokenRows]:
        state: _C.Layout = handle.state
        (of_parts, tokens, place), shape = located, (handle.num_rows, handle.hidden)
        keep = shared, state, parts  # without peers, the rows are in ``parts``
        return [
            TokenRows(
                base,
                tokens,
                stride,
                place,
                shape,
                handle.dtype,
                partial(self._transfer.copy_shared, state, shared, i),
                keep,
            )
            for i, (base, stride) in enumerate(of_parts)
        ]

    def start_sum(self, rows_RD: Tensor, handle: DispatchHandle) -> NativeOutgoingRows:
        """Start ``_sum``. ``rows_RD`` is a block of ``empty_rows``; the caller fills it and raises flags."""
        # Allocate before the call: an allocation failure after it would not be reported to the peers.
        y_TD = warm_rows(handle.num_tokens, handle.hidden, handle.dtype, handle.device)
        fault = self.context.operation.fault
        pending = self._run(
            self._transfer.start_sum,
            fault_word(fault),
            str(fault or ""),
            handle.state,
            *((0, 0) if fault else row_address(rows_RD, handle.dtype, (handle.num_rows, handle.hidden))),
            False,  # computed: the caller fills rows_RD after this call
        )
        return NativeOutgoingRows(self, pending, rows_RD, y_TD)

    def _sum(
        self,
        rows_RD: Tensor | None,
        weights_TK: Tensor | None,
        handle: DispatchHandle,
        words: RowWordsArgs = NO_ROW_WORDS,
    ) -> Tensor:
        """Return sums, empty without rows."""
        empty = rows_RD is None or not handle.num_tokens or not handle.hidden
        results = None if empty else self._results
        capsule = self._run(self._transfer.sum, handle.state, rows_RD, weights_TK, results, words, read=rows_RD)
        if empty:
            return torch.empty(handle.num_tokens, handle.hidden, dtype=handle.dtype, device="cpu")
        return from_capsule(capsule)

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        words_RX, width = words_RX.contiguous(), words_RX.shape[1]
        words_TKX = torch.empty(handle.num_tokens, handle.top_k, width, dtype=torch.float32, device="cpu")
        words = address(words_RX, torch.float32, (handle.num_rows, width)), width, address(words_TKX, torch.float32)
        y_TD = self._sum(rows_RD, None, handle, words)
        return None if rows_RD is None else y_TD, words_TKX

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        spread = _Spread(grad_TD, rows_RD, weights_TK, handle)
        capsule, _ = self._run(self._transfer.spread, *spread.args, NO_WORDS, read=spread.rows_RD)
        return spread.received(capsule), spread.grad_TK

    def _spread_with(
        self, grad_TD: Tensor, weights_TK: Tensor, words_TKX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        spread = _Spread(grad_TD, None, weights_TK, handle)
        words_TKX, words = _words_args(words_TKX, handle.num_tokens, handle.top_k)
        capsule, received = self._run(self._transfer.spread, *spread.args, words)
        return spread.received(capsule), _received(received, handle.num_rows, words)

    def _start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[NativeIncomingRows, Tensor | None]:
        """Start ``_spread``. The gradient of the weights is complete on return."""
        spread = _Spread(grad_TD, rows_RD, weights_TK, handle)
        capsule, pending = self._run(self._transfer.start_spread, *spread.args)
        grad_RD = spread.received(capsule)
        return NativeIncomingRows(self, pending, grad_RD, handle, capsule, spread.rows_RD), spread.grad_TK

    def retain(self, buffers: object) -> None:
        """Keep memory that peers may still read after an error, so that it is not reused."""
        if self._peers is not None and buffers is not None:
            self._peers.retained.append(buffers)

    def translated(self, error: BaseException, operation: Operation) -> Exception:
        """Return the exception that every rank raises for ``error`` of the native core. It is marked as known."""
        if isinstance(error, MoeCommError):
            result: Exception = error
        else:
            headers: list[bytes] = error.headers  # type: ignore[attr-defined]
            result = failure(headers, self.rank, operation)
            if len(headers) == 1 and isinstance(result, RoutingError):
                result = RoutingError(str(result).removeprefix("rank 0: "))
        mark_known(result)
        return result


def _is_of(error: BaseException, operation: Operation, rank: int) -> bool:
    """Return whether this rank was in ``operation`` when its handshake failed."""
    headers: list[bytes] | None = getattr(error, "headers", None)
    return headers is not None and np.frombuffer(headers[rank], np.int64)[0] == OPS.index(operation.op)


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with unit stride inside rows. The stride between rows is arbitrary."""
    return x if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()


def _words_args(words_TKX: Tensor, tokens: int, top_k: int) -> tuple[Tensor, WordsArgs]:
    """Return words that the native core reads in place, and its arguments."""
    if words_TKX.stride(2) != 1:
        words_TKX = words_TKX.contiguous()
    width = words_TKX.shape[2]
    pointer, _ = row_address(words_TKX, torch.float32, (tokens, top_k, width))
    return words_TKX, (pointer, width, words_TKX.stride(0), words_TKX.stride(1))


def _received(capsule: Any, rows: int, words: WordsArgs) -> Tensor:
    return from_capsule(capsule) if rows else torch.empty(0, words[1], dtype=torch.float32, device="cpu")


class _Spread:
    """The arguments of ``spread`` of the native core, and the tensors whose addresses they hold."""

    def __init__(self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle) -> None:
        self.handle = handle
        self.grad_TD = grad_TD if grad_TD.is_contiguous() else _dense(grad_TD)
        self.rows_RD = rows_RD if rows_RD is None or rows_RD.is_contiguous() else _dense(rows_RD)
        self.weights_TK = weights_TK if weights_TK.is_contiguous() else weights_TK.contiguous()
        self.grad_TK: Tensor | None = None
        if rows_RD is not None:
            self.grad_TK = torch.empty(handle.num_tokens, handle.top_k, dtype=torch.float32, device="cpu")
        self.args = (
            handle.state,
            *row_address(self.grad_TD, handle.dtype, (handle.num_tokens, handle.hidden)),
            *row_address(self.rows_RD, handle.dtype, (handle.num_rows, handle.hidden)),
            address(self.weights_TK, torch.float32, (handle.num_tokens, handle.top_k)),
            rows_RD is not None,
            address(self.grad_TK, torch.float32, (handle.num_tokens, handle.top_k)),
        )

    def received(self, capsule: Any) -> Tensor:
        """Return the rows [R, D] that the native core has received."""
        rows, hidden = self.handle.num_rows, self.handle.hidden
        return from_capsule(capsule) if rows and hidden else self.grad_TD.new_empty(rows, hidden)


class SharedMemoryDispatcher(NativeDispatcher, PendingDispatcher):
    """Zero-copy transfer between CPU ranks of one host. Construction is collective over ``group``."""

    name = "shared_memory"
    collectives_in_flight = False

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup,
        rank: int,
        options: DispatchOptions | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        assert self.comm is not None
        self.shared = heap_of(self.comm, self.options.timeout_s)
        self._open(self.shared.heap, self.comm)

    def release(self) -> None:
        for name in ("shared", "heap", "_results", "_transfer"):  # absent if construction failed
            self.__dict__.pop(name, None)

    def set_step(self, step: int) -> None:
        """Set the training step that error reports show."""
        self.shared.communicator.set_step(step)

    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> IncomingRows:
        operation = self.context.operation
        wire_dtype = self.options.wire_dtypes.of(operation.op)
        if operation.fault is None and not (operation.scaled and wire_dtype.format == "fp8"):
            x_TD = rounded(x_TD, wire_dtype)
        return self._start_send(x_TD, ids_TK)

    def rows_by_source(self, incoming: IncomingRows) -> npt.NDArray[np.int64]:
        return np.frombuffer(incoming.handle.state.counts, np.int64).reshape(self.world, -1)

    def start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[IncomingRows, Tensor | None]:
        grad_TD = rounded(grad_TD, self.options.wire_dtypes.of(self.context.operation.op))
        return self._start_spread(grad_TD, rows_RD, weights_TK, handle)

    @property
    def handshakes(self) -> bool:
        """True: every operation compares headers in shared memory."""
        return True

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        shape, ids_shape = x_TD.shape, ids_TK.shape
        fits = len(shape) == len(ids_shape) == 2 and shape[0] == ids_shape[0] and ids_shape[1] > 0
        if fits and x_TD.is_cpu and ids_TK.is_cpu and x_TD.dtype in DTYPE_CODES and ids_TK.dtype in ID_DTYPES:
            return None  # fast path; the native core checks the range of ids when it counts slots
        if not x_TD.is_cpu or x_TD.dtype not in DTYPE_CODES:
            return InputError(
                f"shared_memory moves float32, bfloat16 and float16 rows on the CPU; got {x_TD.dtype} on "
                f"{x_TD.device}. For others, pass backend='all_to_all'"
            )
        return super()._fault(x_TD, ids_TK)
