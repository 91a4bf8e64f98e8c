"""``peer_to_peer``: kernels write rows straight to their places in other GPUs' memory, and read results where they are.

    rank 0   count ─▶ meet ─▶ (places) ─▶ push ──── rows ───▶ rank 1's block
    rank 1   count ─▶ meet ─▶ (places) ─▶ arrive ◀─ a word for each expert and rank that has sent it all of its rows

In ``meet`` the device itself exchanges headers and counts; the host learns what it must allocate and no more. A rank
also says how large a place its heap has left, so that all raise the same ``HeapError`` before rows move. Combine and
the backward passes meet again, read or write peers' rows in place, and end when all have. Sums, products and dot
products are added in the order of the CPU's kernels, so the bits are theirs.

On a GPU the host waits in dispatch for the counts; in the other operations only where ``DispatchOptions.checked`` is
set, until headers are compared, but never for rows. Without it their errors come with the next call and end the group's
use. The protocol is in csrc/cuda/args.h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.base import dispatch_by
from moe_comm.dispatch.peer_to_peer.few import Buffers, FewSent, make_buffers, send_few, sum_few
from moe_comm.dispatch.peer_to_peer.rows import Form, move_rows
from moe_comm.dispatch.peer_to_peer.steps import PeerSteps, dense
from moe_comm.dispatch.peer_to_peer.streams import record_stream
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.errors import ConfigError, HeapError, InputError
from moe_comm.gpu.heap import capturing
from moe_comm.gpu.protocol import NOWHERE, Offer


@dataclass(frozen=True, eq=False)
class FixedDispatched:
    """A dispatch whose sizes the host never learned.

    rows_CD: [capacity_rows, D]; those from ``ends_E[-1]`` on are not written.
    ends_E: [local experts] int32 on the device: where each expert's rows end, as ``torch._grouped_mm`` takes it.
    handle: for ``combine``; its ``rows_per_expert`` is empty and its ``num_rows`` the capacity.
    """

    rows_CD: Tensor
    ends_E: Tensor
    handle: DispatchHandle


class PeerToPeerDispatcher(PeerSteps):
    """GPUs of one host that reach each other's memory. Construction is collective over ``group``; see ``PeerSteps``."""

    @cached_property
    def _few(self) -> dict[tuple[int, torch.dtype, int], Buffers]:
        """Made on first use."""
        return {}

    def dispatch_async(
        self, x_TD: Tensor, ids_TK: Tensor, *, label: str = ""
    ) -> tuple[Dispatched, torch.cuda.Event | None]:
        """``dispatch`` without having the caller's stream wait for it: with ``own_stream``, rows may be used after the
        event (None where there is nothing to wait for). Errors are those of ``dispatch``."""
        self._lane.join = False
        try:
            return self.dispatch(x_TD, ids_TK, label=label), self._lane.event
        finally:
            self._lane.join = True

    def dispatch_fixed(self, x_TD: Tensor, ids_TK: Tensor, *, label: str = "") -> FixedDispatched:
        """Dispatch to a block of ``PeerToPeerOptions.capacity_rows`` rows, without the host: a CUDA graph can hold it.

        Slots that find no room get no row and add nothing to the output; ``report.overflow`` counts them. ``combine``
        takes the handle as ever. Inputs are checked by shape here and by value on the device: what is wrong comes with
        the next call that looks (``check``).

        Raises:
            ConfigError: no ``capacity_rows``. InputError, HeapError: on this rank; on the others with ``check``.
        """
        if self.own.capacity_rows is None:
            raise ConfigError("dispatch_fixed needs PeerToPeerOptions(capacity_rows=...), the same on every rank")
        header = self.dispatch_header(x_TD, ids_TK, label)
        ends: list[Tensor] = []
        found = dispatch_by(self, x_TD, lambda x: self._send_fixed(x, ids_TK, header, ends))
        return FixedDispatched(found.rows_RD, ends[0], found.handle)

    def low_latency_dispatch(self, x_TD: Tensor, ids_TK: Tensor, max_tokens: int, *, label: str = "") -> FewSent:
        """Dispatch of at most ``max_tokens`` tokens a rank in one kernel, without backward; see ``few.py``.

        ``low_latency_combine`` must follow before anything else on this group's ``peer_to_peer``. The first call with
        another ``max_tokens``, width or dtype sets up places for it, which is collective. Ids out of range count as -1.

        Raises:
            ConfigError: ``max_tokens`` out of range. InputError: bad shapes, more tokens; on this rank alone.
            HeapError, RankMismatch: of the first call, on every rank.
        """
        header = self.dispatch_header(x_TD, ids_TK, label)
        if header.fault is not None:
            raise header.fault
        form = self._form(x_TD, header.op)
        x_TD = dense(self._rounded(x_TD.detach(), form, sends=True))
        ids_TK = ids_TK.to(torch.int64).contiguous()
        with self._running(header, x_TD, ids_TK):
            buffers = self._few_buffers(form, max_tokens, header)
            sent = send_few(self.memory, buffers, x_TD, ids_TK, header, self.options.timeout_s)
            self.memory.pending = describe(header)
            self._lane.hand_over(sent.place_TK)
        return sent

    def low_latency_combine(self, rows_LND: Tensor, weights_TK: Tensor, sent: FewSent) -> Tensor:
        """[T, D] sum of each token's results, weighted, in fp32 and in slot order.

        Args:
            rows_LND: the experts' output, as ``sent.receive`` gave their input; ``sent.results`` need not be copied.
            weights_TK: routing weights.

        Raises:
            InputError: rows or weights of another shape.
        """
        if rows_LND.shape != sent.results.shape or weights_TK.shape != sent.place_TK.shape:
            raise InputError(
                f"combine needs rows {tuple(sent.results.shape)} and weights {tuple(sent.place_TK.shape)}; got "
                f"{tuple(rows_LND.shape)} and {tuple(weights_TK.shape)}"
            )
        weights_TK = weights_TK.detach().to(torch.float32).contiguous()
        self.memory.pending = ""
        with self._running(sent.header, rows_LND, weights_TK):
            if rows_LND.data_ptr() != sent.results.data_ptr():
                sent.results.copy_(rows_LND.detach())
            y_TD = sum_few(sent, weights_TK, self._blocks)
            if self.memory.on_host:
                self.memory.look(sent.header)
            self._lane.hand_over(y_TD)
        return y_TD

    def _few_buffers(self, form: Form, max_tokens: int, header: Header) -> Buffers:
        buffers = self._few.get((form.hidden, form.dtype, max_tokens))
        if buffers is None:
            self._not_captured(
                f"the first low_latency_dispatch of {max_tokens} tokens", "call it and its combine once before"
            )
            header = replace(header, label=f"low latency, {max_tokens} tokens")
            buffers = make_buffers(self.memory, replace(form, relay=False), max_tokens, header)
            self._few[form.hidden, form.dtype, max_tokens] = buffers
        return buffers

    def check(self) -> None:
        """Wait for what is queued and raise what went wrong in it.

        Raises:
            PeerError: whatever it was, this group's use ends with it where nobody was waiting.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.memory.begin(Header("dispatch", self.num_calls, 0, torch.float32, 1, self.num_experts, False), 0.0)
        self.memory.end()

    @property
    def overflow(self) -> int:
        """Slots of this rank that found no room in the last ``dispatch_fixed`` that is over."""
        return self.memory.turns.report.overflow

    def record_stream(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """``x`` is used on another stream, too: its memory is not given out before that has passed."""
        record_stream(self.memory.turns.heap, x, stream)

    def own_rows(self, handle: DispatchHandle, leaving: int) -> int:
        return leaving // self.world  # as if shares were even: counts stay on the GPU

    def _send_fixed(
        self, x_TD: Tensor, ids_TK: Tensor, header: Header, ends: list[Tensor]
    ) -> tuple[Tensor, DispatchHandle]:
        """``_send`` to a block of fixed size; appends where experts end."""
        if header.fault is not None:
            self._refuse(header)
        turns, room, form = self.memory.turns, self.own.capacity_rows or 0, self._form(x_TD, header.op)
        x_TD, ids_TK = dense(self._rounded(x_TD, form, sends=True)), ids_TK.to(torch.int64).contiguous()
        with self._running(header, x_TD, ids_TK):
            try:
                arriving = form.allocate(turns.heap, room)
            except HeapError as problem:
                if capturing(self.device):
                    raise  # waiting for what the others say would be for ever
                turns.count_and_meet(self.packed(header), ids_TK, self._blocks, Offer(NOWHERE))
                self.memory.check(header, ids_TK)
                raise problem
            turns.count_and_meet(self.packed(header), ids_TK, self._blocks, arriving.offer._replace(room=room))
            rows_RD, place_TK = move_rows(turns, x_TD, ids_TK, arriving, self._blocks)
            ends.append(turns.scratch.summary[1 : len(self.local_experts) + 1].to(torch.int32))
            if self.memory.on_host:
                self.memory.check(header, ids_TK)
            self._lane.hand_over(rows_RD, place_TK, ends[-1])
        return rows_RD, self._layout(x_TD, ids_TK, rows_RD, place_TK, header)
