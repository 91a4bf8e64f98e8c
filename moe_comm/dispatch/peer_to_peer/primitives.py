"""The primitives of ``peer_to_peer`` (send, sum, spread), implemented with kernels. See ``dispatcher.py``.

In a handshake, the device exchanges headers, offers (addresses of rows) and counts; see ``gpu/operations.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.channel import Channel
from moe_comm.comm.header import Header, fault_word
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.peer_to_peer.access import launcher_for
from moe_comm.dispatch.peer_to_peer.memory import PeerGroupMemory, shared_peer_memory
from moe_comm.dispatch.peer_to_peer.rows import (
    Reservation,
    RowFormat,
    check_free_bytes,
    offset_of,
    readable,
    relay_links,
)
from moe_comm.dispatch.peer_to_peer.streams import OperationStream
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import rounded, rounded_in_groups
from moe_comm.errors import ConfigError, HeapError, InputError, MoeCommError, mark_known
from moe_comm.gpu.blocks import Blocks
from moe_comm.gpu.heap import capturing
from moe_comm.gpu.launch import Launcher, check_shared, compiled_archs, compiled_for
from moe_comm.gpu.operations import GroupOperations
from moe_comm.gpu.protocol import (
    HEADER_WORDS,
    MOST_SLOTS,
    NOT_RELAYED,
    NOTHING,
    NOWHERE,
    ROW_LINK_WORDS,
    SAME,
    GroupShape,
    Offer,
    Reduction,
    Sending,
    order_words,
    words_address,
)
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.runtime.memory import DTYPE_CODES, address
from moe_comm.runtime.native_core import native
from moe_comm.topology import ExpertPlacement

FREE_BYTES_WORD = HEADER_WORDS - 1
"""Index of the header word with the size in bytes of the block that this rank offers for rows. Dispatch only. The text
of a fault ends before this word."""
EMULATED_BLOCKS = 4
"""Default number of thread blocks if emulated."""

RowsT = TypeVar("RowsT", Tensor, ScaledRows)


class PeerToPeerPrimitives(Dispatcher):
    """Dispatch, combine and their backward passes with kernels. Construction is collective over ``group``.

    ``make_dispatcher`` compares the settings of ranks; this class does not.

    ``state`` of a dispatch handle is a [T, K] tensor: the owner rank and row of each slot, packed as in csrc/layout.h,
    and -1 for dropped slots.

    Args:
        placement, group, rank, options: see ``Dispatcher``.
        device: device of the rows. CPU tensors require ``PeerToPeerOptions(emulate=True)``.
        launcher: launches the kernels. None: the default launcher of the device.
        blocks: this rank's ``Blocks``, if all ranks run in this process without a group, as in
            ``benchmarks/gpu/virtual.py``.

    Raises:
        ConfigError: unsupported device, or ``fast_combine`` with ``deterministic``.
        MissingDependency: no kernels for the device.
        HeapError: a rank cannot allocate its memory; raised on every rank.
    """

    name = "peer_to_peer"
    checks_ids = True  # the count kernel checks
    packs = True

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None,
        rank: int,
        options: DispatchOptions | None = None,
        device: torch.device | str = "cuda",
        launcher: Launcher | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        self.peer_options = self.options.peer_to_peer
        self.device = _indexed(torch.device(device))
        fault: MoeCommError | None = None
        try:
            if self.peer_options.fast_combine and self.options.deterministic:
                raise ConfigError(
                    "fast_combine rounds sums on each rank, so the output depends on the placement of experts: set "
                    "DispatchOptions(deterministic=False) too"
                )
            launcher = launcher or launcher_for(self.device, self.peer_options.emulate)
            experts = placement.num_experts
            check_shared("meet", self.device, f"{experts} experts", experts=experts, with_counts=1)
            self._bulk = self.peer_options.bulk_copies and _has_bulk_copies(self.device)
            if self._bulk:
                check_shared("push", self.device, "bulk_copies=True", chunk=MOST_SLOTS, bulk=1)
        except MoeCommError as error:
            fault = error
        self.channel: Channel | None = None
        if self.comm is not None:
            self.channel = Channel(self.comm, self.options.timeout_s)
            agree(fault or "", partial(gather_texts, self.channel, f"building the {self.name} dispatcher"))
        if fault is not None:
            raise fault
        assert launcher is not None, "every rank raises a fault"
        self.memory: PeerGroupMemory = (
            shared_peer_memory(self.channel, group, rank, placement.offsets, self.device, self.peer_options, launcher)
            if blocks is None
            else PeerGroupMemory(None, GroupOperations(GroupShape(rank, placement.offsets), blocks, launcher))
        )
        self._blocks = self.peer_options.num_blocks or _default_blocks(self.device)
        self._pack_header: Callable[..., bytes] = native().pack_header
        self._row_formats: dict[tuple[int, torch.dtype, str], RowFormat] = {}
        self._sendings: dict[tuple[tuple[int, int], bool, int], Sending] = {}
        self.send_order: Tensor | None = None
        """The order of the last dispatch of ``start_dispatch_on_side_stream``; see csrc/cuda/order.h."""
        self.mean_rows: int | None = None
        """Rows that each rank received on average in the last dispatch whose counts the CPU has read; None before. The
        same on all ranks."""
        self.send_by_expert = True
        """Whether rows that a GEMM waits for are sent by expert. False sends them by token, as a control."""
        self._list_tiles = False
        self._stream = OperationStream(self.device, self.memory.operations.heap, self.peer_options.own_stream)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate rows in this rank's heap, where peers can read them in place; otherwise an ordinary tensor."""
        if device.type == self.device.type and dtype in DTYPE_CODES and num_rows and width:
            try:
                return self.memory.operations.heap.rows(num_rows, width, dtype)
            except HeapError:  # combine tries to allocate again, and raises if that fails
                pass
        return super().empty_rows(num_rows, width, dtype, device)

    @property
    def handshakes(self) -> bool:
        """True: the device compares headers in every operation."""
        return True

    # --- the three primitives ---

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        if x_TD.device.type != self.device.type or x_TD.dtype not in DTYPE_CODES:
            return InputError(
                f"peer_to_peer on {self.device} moves float32, bfloat16 and float16 rows there; got {x_TD.dtype} on "
                f"{x_TD.device}"
            )
        return super()._fault(x_TD, ids_TK)

    def _send(self, x_TD: Tensor, ids_TK: Tensor, *, wait: bool = True) -> tuple[Tensor, DispatchHandle]:
        """Send rows. Without ``wait``, rows of peers may be in flight afterwards."""
        return self._send_rows(x_TD, ids_TK, Reservation.keep, wait)

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[ScaledRows, DispatchHandle]:
        return self._send_rows(x_TD, ids_TK, Reservation.keep_scaled, True)

    def _send_rows(
        self, x_TD: Tensor, ids_TK: Tensor, keep: Callable[[Reservation, int], RowsT], wait: bool
    ) -> tuple[RowsT, DispatchHandle]:
        """Send rows. keep: returns the received rows, and queues the kernels that compute them."""
        if self.context.operation.fault is not None:
            self._refuse()
        if capturing(self.device):
            self._refuse_capture("dispatch", "use dispatch_fixed")
        operations, row_format = self.memory.operations, self._row_format(x_TD, self.context.operation.op)
        if row_format.rounds and row_format.packing == SAME:
            x_TD = self._round_rows(x_TD, row_format)
        x_TD, ids_TK = dense(x_TD), ids_TK.to(torch.int64).contiguous()
        with KernelOperation(self, self.context.operation, x_TD, ids_TK):
            reserved = Reservation(row_format, operations.heap)
            in_flight = False
            try:
                free = reserved.num_bytes.to_bytes(8, sys.byteorder)
                packed = self.packed(self.context.operation)[: FREE_BYTES_WORD * 8] + free
                how = self._sending(row_format, wait)
                place_TK = self._move_rows(packed, x_TD, ids_TK, row_format, reserved.offer, reserved.capacity, how)
                self.memory.check(ids_TK)
                in_flight = not wait
                own_L, rows_W, free_W, num_dropped = operations.plan.counted(FREE_BYTES_WORD)
                check_free_bytes(row_format, rows_W, free_W, self.context.operation)
                self.mean_rows = sum(rows_W) // self.world
                rows = keep(reserved, rows_W[self.rank])
            except BaseException:
                if in_flight:
                    operations.arrive(0, self.world)  # the memory is used again after the rows of peers are written
                reserved.free()
                raise
            if self._stream.is_separate:
                tensors = (rows.values_RD, rows.scale_RB) if isinstance(rows, ScaledRows) else (rows,)
                self._stream.use_by_caller(*tensors, place_TK, self.send_order)
        about_own = ids_TK.numel() * len(self.local_experts) // self.num_experts  # exact without experts
        handle = self._handle(x_TD, tuple(own_L), rows_W[self.rank], num_dropped, place_TK, about_own)
        return rows, handle

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle) -> Tensor:
        row_format = self._row_format(rows_RD, self.context.operation.op)
        if row_format.rounds:
            rows_RD = self._round_rows(rows_RD, row_format)
        return self.sum_rounded(rows_RD, weights_TK, handle)

    def sum_rounded(
        self,
        rows_RD: Tensor | None,
        weights_TK: Tensor | None,
        handle: DispatchHandle,
        words: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run ``_sum`` for rows that are rounded to the wire dtype; None: the sums have no columns.

        words: fp32 [R, 1], and [T, K], which is set to the word of the row of each slot, 0 where dropped.
        """
        heap, columns = self.memory.operations.heap, 0 if rows_RD is None else handle.hidden
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        if weights_TK is not None and self.peer_options.fast_combine and handle.top_k > 1 and self.world > 1:
            assert rows_RD is not None
            return self._sum_reduced(rows_RD, weights_TK, handle)
        words_R1, words_TK = words or (None, None)
        with KernelOperation(self, self.context.operation, rows_RD, weights_TK, words_R1):
            try:
                _read_RD, at = (None, 0) if rows_RD is None else readable(heap, rows_RD)
                _read_R1, words_at = (None, 0) if words_R1 is None else readable(heap, words_R1)
            except HeapError as problem:
                self._raise_no_room(problem)
            y_TD = torch.empty(handle.num_tokens, columns, dtype=handle.dtype, device=handle.device)
            self.memory.operations.sum(
                self.packed(self.context.operation),
                Offer(at, scales=words_at),
                handle.state,
                weights_TK,
                y_TD,
                DTYPE_CODES[handle.dtype],
                self._blocks,
                words_TK,
            )
            self._check_if_blocking()
            if self._stream.is_separate:
                self._stream.use_by_caller(y_TD, words_TK)
        return y_TD

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        if words_RX.shape[1] != 1:
            return super()._sum_with(rows_RD, words_RX, handle)
        if rows_RD is not None:
            rows_RD = self._round_rows(rows_RD, self._row_format(rows_RD, self.context.operation.op))
        words_TK = torch.empty(handle.num_tokens, handle.top_k, dtype=torch.float32, device=handle.device)
        y_TD = self.sum_rounded(rows_RD, None, handle, (words_RX, words_TK))
        return None if rows_RD is None else y_TD, words_TK.unsqueeze(2)

    def _sum_reduced(self, rows_RD: Tensor, weights_TK: Tensor, handle: DispatchHandle) -> Tensor:
        """Combine with rows that each rank has reduced to one per token; see ``PeerToPeerOptions.fast_combine``."""
        heap = self.memory.operations.heap
        with KernelOperation(self, self.context.operation, rows_RD, weights_TK):
            try:
                read_RD, at = readable(heap, rows_RD)
                reduced_RD = heap.rows(rows_RD.shape[0], handle.hidden, handle.dtype)
                links_R2 = heap.rows(rows_RD.shape[0], ROW_LINK_WORDS, torch.int64)
            except HeapError as problem:
                self._raise_no_room(problem)
            links_R2.zero_()  # before the handshake, after which peers write links
            y_TD = torch.empty(handle.num_tokens, handle.hidden, dtype=handle.dtype, device=rows_RD.device)
            self.memory.operations.sum_reduced(
                self.packed(self.context.operation),
                Offer(at, offset_of(heap, reduced_RD), links=offset_of(heap, links_R2)),
                handle.state,
                weights_TK,
                y_TD,
                DTYPE_CODES[handle.dtype],
                self._blocks,
                Reduction(
                    rows_RD.shape[0],
                    address(read_RD, handle.dtype, device=read_RD.device.type),
                    words_address(links_R2),
                    address(reduced_RD, handle.dtype, device=read_RD.device.type),
                ),
            )
            self._check_if_blocking()
            self._stream.use_by_caller(y_TD)
        return y_TD

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        return self._spread_rows(grad_TD, rows_RD, weights_TK.contiguous(), handle, None)[:2]

    def _send_gradients(self, grad_TD: Tensor, words_TKX: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        words_TK = words_TKX.squeeze(2).contiguous()
        rows_RD, _, words_R1 = self._spread_rows(grad_TD, None, None, handle, None, words_TK)
        assert words_R1 is not None
        return rows_RD, words_R1

    def _spread_rows(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor | None,
        weights_TK: Tensor | None,
        handle: DispatchHandle,
        order: Tensor | None,
        words_TK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run ``_spread``, and send fp32 words with the rows, which are returned as [R, 1].

        weights_TK: None: ones. With ``order``, peers may still write rows when it returns.
        """
        grad_TD = dense(self._round_rows(grad_TD, self._row_format(grad_TD, self.context.operation.op)))
        heap, words_R1 = self.memory.operations.heap, None
        with KernelOperation(self, self.context.operation, grad_TD, rows_RD, weights_TK, order, words_TK):
            try:
                _read_RD, at = (None, 0) if rows_RD is None else readable(heap, rows_RD)
                grad_RD = heap.rows(handle.num_rows, handle.hidden, handle.dtype)
                if words_TK is not None:
                    words_R1 = heap.rows(handle.num_rows, 1, torch.float32)
            except HeapError as problem:
                self._raise_no_room(problem)
            dots_TK = None
            if rows_RD is not None:
                dots_TK = torch.empty(handle.num_tokens, handle.top_k, dtype=torch.float32, device=grad_TD.device)
            self.memory.operations.spread(
                self.packed(self.context.operation),
                Offer(at, offset_of(heap, grad_RD), 0 if words_R1 is None else offset_of(heap, words_R1)),
                handle.state,
                weights_TK,
                grad_TD,
                dots_TK,
                DTYPE_CODES[handle.dtype],
                self._blocks,
                order,
                words_TK,
            )
            self._check_if_blocking()
            self._stream.use_by_caller(grad_RD, dots_TK, words_R1)
        return grad_RD, dots_TK, words_R1

    # --- helpers ---

    def _places(self, handle: DispatchHandle) -> Tensor | None:
        places: Tensor = handle.state
        return places

    def _move_rows(
        self,
        packed: bytes,
        x_TD: Tensor,
        ids_TK: Tensor,
        row_format: RowFormat,
        offer: Offer,
        capacity: int,
        how: Sending,
    ) -> Tensor:
        """Queue the kernels of a dispatch. Return [T, K], which will have the location of each slot's row."""
        operations, place_TK = self.memory.operations, torch.empty_like(ids_TK)
        links = (
            relay_links(row_format, operations.heap, offer, capacity, self._blocks) if row_format.relay else NOT_RELAYED
        )
        self.send_order = None
        if self._list_tiles:
            num_words = order_words(ids_TK.numel(), self.num_experts)
            self.send_order = torch.empty(num_words, dtype=torch.int64, device=ids_TK.device)
            how = how._replace(order_at=words_address(self.send_order), by_expert=self.send_by_expert)
        operations.dispatch(packed, offer, ids_TK, place_TK, x_TD, DTYPE_CODES[x_TD.dtype], how, links)
        return place_TK

    def _sending(self, row_format: RowFormat, wait: bool = True) -> Sending:
        """Return how the kernel ``push`` sends rows."""
        key = row_format.words, wait, self._blocks
        how = self._sendings.get(key)
        if how is None:
            how = self._sendings[key] = Sending(self._blocks, *row_format.words, self._bulk, wait)
        return how

    def packed(self, header: Header) -> bytes:
        """Return ``header.pack()``, computed in native code."""
        fault = header.fault
        if fault is None:
            return self._pack_header(header.compared(), header.label, 0, "")
        return self._pack_header(header.compared(), header.label, fault_word(fault), str(fault))

    def _refuse_capture(self, what: str, instead: str) -> NoReturn:
        """Raise the error of an operation for which the CPU waits, while a CUDA graph captures the stream."""
        raise ConfigError(f"a CUDA graph cannot capture {what} of peer_to_peer, for which the CPU waits: {instead}")

    def _refuse(self) -> NoReturn:
        """Report the fault (invalid input) of this rank in a handshake, so that every rank raises it.

        During a CUDA graph capture no handshake can run, so only this rank raises.
        """
        fault = self.context.operation.fault
        if fault is not None and capturing(self.device):
            raise fault
        with KernelOperation(self, self.context.operation):
            self.memory.operations.meet(self.packed(self.context.operation), NOTHING)
            self.memory.check()
        raise fault or AssertionError("_refuse was called without a fault")

    def _raise_no_room(self, problem: HeapError) -> NoReturn:
        """Report in a handshake that this rank has no room in its heap, so that every rank raises."""
        if capturing(self.device):
            raise problem  # a captured handshake would run only with the graph, and this error ends the capture
        self.memory.operations.meet(self.packed(self.context.operation), Offer(NOWHERE))
        self.memory.check()
        raise problem

    def _check_if_blocking(self) -> None:
        """Wait for the handshake and raise its fault: on the CPU, or if ``checked`` is set and no graph is captured."""
        if self.memory.emulated or (self.options.checked and not capturing(self.device)):
            self.memory.check()

    def _round_rows(self, rows_RD: Tensor, row_format: RowFormat) -> Tensor:
        """Round rows to the wire dtype."""
        if not row_format.rounds:
            return rows_RD
        if row_format.wire_dtype.scales == "group":
            return rounded_in_groups(rows_RD, row_format.wire_dtype)
        return rounded(rows_RD, row_format.wire_dtype)

    def _row_format(self, x_TD: Tensor, op: str) -> RowFormat:
        key = x_TD.shape[1], x_TD.dtype, op
        row_format = self._row_formats.get(key)
        if row_format is None:
            row_format = RowFormat(x_TD.shape[1], x_TD.dtype, self.options.wire_dtypes.of(op), self.peer_options.relay)
            self._row_formats[key] = row_format
        return row_format


class KernelOperation:
    """Context manager of one operation. Enter it before the first kernel and exit it after the last kernel is queued.

    The dispatcher's operation stream is current inside the context. ``used`` are the tensors that the kernels read.
    """

    __slots__ = ("_dispatcher", "_operation", "_used")

    def __init__(self, dispatcher: PeerToPeerPrimitives, operation: Header, *used: Tensor | None) -> None:
        self._dispatcher, self._operation, self._used = dispatcher, operation, used

    def __enter__(self) -> None:
        dispatcher = self._dispatcher
        if dispatcher._stream.is_separate:
            dispatcher._stream.enter(self._used)
        try:
            dispatcher.memory.begin(self._operation, dispatcher.options.timeout_s)
        except BaseException:
            if dispatcher._stream.is_separate:
                dispatcher._stream.leave(failed=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, MoeCommError):
            mark_known(error)
        dispatcher = self._dispatcher
        dispatcher.memory.end()
        if dispatcher._stream.is_separate:
            dispatcher._stream.leave(failed=kind is not None)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _default_blocks(device: torch.device) -> int:
    if device.type != "cuda":
        return EMULATED_BLOCKS
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _has_bulk_copies(device: torch.device) -> bool:
    """Return whether ``push`` can copy rows with cp.async.bulk. Emulation copies the same rows with memcpy."""
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return capability >= (9, 0) and compiled_for(compiled_archs(), capability) != "PTX"  # the PTX is for sm_80


def dense(x: Tensor) -> Tensor:
    """Return ``x``, copied if needed so that its rows are contiguous. The stride between rows is arbitrary."""
    return x if x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()
