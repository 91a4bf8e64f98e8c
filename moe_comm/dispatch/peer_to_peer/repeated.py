"""Operations of ``peer_to_peer`` that native code repeats, as a part of a layer's launches.

    forward    dispatch ─▶ the experts' GEMMs ─▶ combine
    backward   gradients of outputs, with weights ─▶ GEMMs ─▶ gradients of tokens and of weights

Each method queues an operation, and records it for a program (``kernels/triton/program.py``). These are the operations
of ``Dispatcher.dispatch_uncounted``, ``combine_forward``, ``send_gradients`` and ``return_gradients``, with the same
headers and in the same order, so each rank may choose between them and a program.

When native code repeats an operation, only the numbers in its header and the addresses of tensors are new. Rows that
peers read or write are in the heap, and their offsets in it follow from their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_comm.comm.header import DISPATCH_FIXED, LEND, RETURN, Header
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.overlapped import OverlappedPrimitives
from moe_comm.dispatch.peer_to_peer.rows import offset_of
from moe_comm.errors import HeapError
from moe_comm.gpu.operations import RING
from moe_comm.gpu.protocol import NOT_RELAYED, Offer, chunk_of, words_address
from moe_comm.kernels.recording import Number, Step, is_recording, record
from moe_comm.runtime.memory import DTYPE_CODES

if TYPE_CHECKING:
    from moe_comm import _C


class PassNumbers(NamedTuple):
    """Sequence numbers of a pass: of its first operation, and of the dispatch of its rows."""

    first: int
    dispatch: int


class HeaderFields(NamedTuple):
    """What the header of an operation of a pass has besides the rows. ahead: number of operations before it in the
    pass. experts: their number; None: that of the dispatcher."""

    op: str
    ahead: int
    label: str
    requires_grad: bool = False
    extra: int = 0
    trained: int = 0
    placement: int = 0
    experts: int | None = None


class RecordedHeader(NamedTuple):
    """The packed header of an operation. template, numbers: for a record, the same without numbers, and these."""

    packed: bytes
    template: bytes = b""
    numbers: tuple[Number, Number | None] = (Number(0, 0), None)


class RepeatedPrimitives(OverlappedPrimitives):
    """The operations on rows whose number the host does not know."""

    def runs_whole_layers(self, x_TD: Tensor) -> bool:
        """Return whether the operations of a layer on these tokens can be repeated. Ranks may differ."""
        if x_TD.dtype is not torch.bfloat16 or self._stream.is_separate:
            return False
        if self._repeats is None:  # options do not change
            self._repeats = self.keeps_counts(x_TD) and not self.peer_options.relay
        return self._repeats

    _repeats: bool | None = None

    @cached_property
    def capacity_rows(self) -> int | None:
        """Rows for which there is room on each rank; None: unknown before a layer's first call, or not fixed."""
        rows = self.peer_options.capacity_rows
        return None if rows == "memory" else rows

    @cached_property
    def whole_layers(self) -> dict[str, Any]:
        """Whole calls of layers, by label; see ``peer_layer.py``."""
        return {}

    def _new_counts(self) -> Tensor:
        """Return memory on the device for the rows of each of this rank's experts."""
        return torch.empty(len(self.local_experts), dtype=torch.int64, device=self.device)

    def first_operation(
        self, count: int, fields: HeaderFields, rows: tuple[int, torch.dtype], top_k: int, call: int = 0
    ) -> Operation:
        """Count the operations of a pass, and return the first one.

        Args:
            count: number of operations.
            rows: width and dtype.
            call: number of the dispatch.
        """
        return Operation(
            fields.op, self.calls.next(self._ordinal, count), *rows, top_k, fields.experts or self.num_experts,
            fields.requires_grad, fields.label, of_call=call, ordinal=self._ordinal, calls=self.calls, dispatcher=self,
            extra=fields.extra, trained=fields.trained, placement=fields.placement,
        )  # fmt: skip

    def heap_rows(self, operation: Operation, *shapes: tuple[int, torch.dtype]) -> list[Tensor]:
        """Return matrices of ``capacity_rows`` rows in the heap, or report on all ranks that there is no room.

        shapes: width and dtype of each.
        """
        heap, capacity = self.memory.operations.heap, self.capacity_rows or 0
        try:
            return heap.matrices(capacity, *shapes)
        except HeapError as problem:
            with self.running(operation):
                self._raise_no_room(problem)

    def queue_dispatch(
        self, x_TD: Tensor, ids_TK: Tensor, rows_CD: Tensor, fields: HeaderFields, numbers: PassNumbers,
        digest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Dispatch into ``rows_CD``. Return the place of each slot, and the rows of each of this rank's experts.

        digest: [1] int64 on the device, which ranks compare.
        More rows than there is room for, and invalid ids, are a fault on every rank; the counts are then zero.
        """
        operations, ((tokens, top_k), (room, hidden)) = self.memory.operations, (ids_TK.shape, rows_CD.shape)
        place_TK = torch.empty_like(ids_TK)
        counts_E = self._new_counts()
        header = self.pass_header(fields, (hidden, rows_CD.dtype), top_k, numbers)
        how = self._sending(self._row_format(x_TD, "dispatch"))._replace(strict=1)
        offer, code = Offer(offset_of(operations.heap, rows_CD), room=room), DTYPE_CODES[x_TD.dtype]
        of_call = how._replace(own_counts_at=words_address(counts_E), digest_at=words_address(digest))
        operations.dispatch(header.packed, offer, ids_TK, place_TK, x_TD, code, of_call, NOT_RELAYED)
        if is_recording():
            chunk, stride = chunk_of(tokens, top_k), x_TD.stride(0) * x_TD.element_size()

            def add(to: _C.GpuRecord, _: Sequence[int], args: Sequence[Any]) -> bool:
                of_rows = tokens, top_k, hidden, code
                operations.plan.record_dispatch(
                    to, header.template, self._numbers(args), of_rows, or_none(args[2:]), (room, chunk, stride), how
                )
                return True

            record(Step(add, (), (*header.numbers, rows_CD, ids_TK, place_TK, x_TD, counts_E, digest)))
        return place_TK, counts_E

    def queue_sum(
        self, rows_CD: Tensor, place_TK: Tensor, weights_TK: Tensor | None, fields: HeaderFields, numbers: PassNumbers,
        dots_C1: Tensor | None = None, summed: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the weighted sum of each token's rows, or the sum for None; see ``_sum``. Also return the number of
        each slot's row in ``dots_C1``. summed: whether the sums are needed; otherwise they have no columns."""
        operations, ((tokens, top_k), columns) = self.memory.operations, (place_TK.shape, rows_CD.shape[1] * summed)
        heap, dots_TK = operations.heap, None
        y_TD = torch.empty(tokens, columns, dtype=rows_CD.dtype, device=rows_CD.device)
        if dots_C1 is not None:
            dots_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=rows_CD.device)
        header = self.pass_header(fields, (rows_CD.shape[1], rows_CD.dtype), top_k, numbers)
        offer, code = Offer(offset_of(heap, rows_CD)), DTYPE_CODES[rows_CD.dtype]
        if dots_C1 is not None:
            offer = offer._replace(scales=offset_of(heap, dots_C1))
        operations.sum(header.packed, offer, place_TK, weights_TK, y_TD, code, self._blocks, dots_TK)
        if is_recording():

            def add(to: _C.GpuRecord, _: Sequence[int], args: Sequence[Any]) -> bool:
                of_rows = tokens, top_k, columns, code
                operations.plan.record_sum(
                    to, header.template, self._numbers(args), of_rows, or_none(args[2:]), self._blocks
                )
                return True

            record(Step(add, (), (*header.numbers, rows_CD, place_TK, weights_TK, y_TD, dots_C1, dots_TK)))
        return y_TD, dots_TK

    def queue_spread(
        self, x_TD: Tensor, weights_TK: Tensor, place_TK: Tensor, received: tuple[Tensor, Tensor],
        fields: HeaderFields, numbers: PassNumbers,
    ) -> None:  # fmt: skip
        """Write each token's row and weights to the places of its slots in ``received`` of their owners; see
        ``_send_gradients``."""
        operations, (rows_CD, weights_C1) = self.memory.operations, received
        (tokens, top_k), hidden = place_TK.shape, rows_CD.shape[1]
        header = self.pass_header(fields, (hidden, rows_CD.dtype), top_k, numbers)
        heap, code = operations.heap, DTYPE_CODES[rows_CD.dtype]
        offer = Offer(0, offset_of(heap, rows_CD), offset_of(heap, weights_C1))
        operations.spread(header.packed, offer, place_TK, None, x_TD, None, code, self._blocks, None, weights_TK)
        if is_recording():
            stride = x_TD.stride(0) * x_TD.element_size()

            def add(to: _C.GpuRecord, _: Sequence[int], args: Sequence[Any]) -> bool:
                of_rows = tokens, top_k, hidden, code
                operations.plan.record_spread(
                    to, header.template, self._numbers(args), of_rows, args[2:], (self._blocks, stride)
                )
                return True

            record(Step(add, (), (*header.numbers, rows_CD, place_TK, x_TD, weights_C1, weights_TK)))

    def pass_header(
        self, fields: HeaderFields, rows: tuple[int, torch.dtype], top_k: int, numbers: PassNumbers
    ) -> RecordedHeader:
        """Return the header of an operation. rows: width and dtype."""
        of_rows = fields.op not in (DISPATCH_FIXED, LEND, RETURN)
        packed = [
            self.packed(
                Header(
                    fields.op, seq, *rows, top_k, fields.experts or self.num_experts, fields.requires_grad,
                    fields.label, of_call=of_call, ordinal=self._ordinal, placement=fields.placement,
                    extra=fields.extra, trained=fields.trained,
                )
            )
            for seq, of_call in ((numbers.first + fields.ahead, numbers.dispatch if of_rows else 0), (0, 0))
        ]  # fmt: skip
        return RecordedHeader(packed[0], packed[1], (Number(0, fields.ahead), Number(1, 0) if of_rows else None))

    def _numbers(self, args: Sequence[Any]) -> tuple[int, int, int, int]:
        """Return the buffers of the numbers of a recorded header, the address of this rank's block, and ``RING``."""
        seq, call = or_none(args[:2])
        return seq, call, self.memory.operations.blocks.own.data_ptr(), RING


def or_none(buffers: Sequence[Any]) -> list[int]:
    """Return numbers of buffers, -1 for None."""
    return [-1 if buffer is None else buffer for buffer in buffers]
