"""The contract of dispatchers over kernels: the three primitives of ``peer_to_peer``; see there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.header import Header, fault_word
from moe_comm.comm.meeting import compare
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.group_scales import rounded_in_groups
from moe_comm.dispatch.handshake import settings_of
from moe_comm.dispatch.peer_to_peer.access import launcher_for
from moe_comm.dispatch.peer_to_peer.memory import PeerMemory, peer_memory
from moe_comm.dispatch.peer_to_peer.rows import Form, check_room, move_rows, place, readable
from moe_comm.dispatch.peer_to_peer.streams import Lane
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import rounded
from moe_comm.errors import ConfigError, HeapError, InputError, MoeCommError, RoutingError, mark_known
from moe_comm.gpu.blocks import Blocks
from moe_comm.gpu.heap import capturing
from moe_comm.gpu.launch import Launcher
from moe_comm.gpu.limits import check_shared
from moe_comm.gpu.protocol import HEADER_WORDS, NOTHING, NOWHERE, SAME, Offer, Shape
from moe_comm.gpu.turns import Turns
from moe_comm.runtime.memory import DTYPE_CODES, native
from moe_comm.topology import ExpertPlacement

ROOM_WORD = HEADER_WORDS - 1
"""Of a dispatch's header: bytes of the largest place in this rank's heap. The text of the label ends before it."""
BLOCKS_ON_HOST = 4


@dataclass(frozen=True, eq=False)
class Places:
    """place_TK: where each slot's row is, as csrc/layout.h packs owner and row; -1 where it is nowhere."""

    place_TK: Tensor


class PeerSteps(Dispatcher):
    """Dispatch, combine and their backward passes by kernels. Construction is collective over ``group``.

    Args:
        device: where rows are; CPU tensors only with ``PeerToPeerOptions(emulate=True)``.
        launcher: what runs the kernels; chosen for the device if not given.
        blocks: this rank's, where all ranks are in this process and there is no group; see ``virtual.py``.

    Raises:
        ConfigError: a device that it is not for. MissingDependency: no kernels for it.
        RankMismatch: ranks build it with different settings. HeapError: a rank has no room, on every rank.
    """

    name = "peer_to_peer"
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
        self.own = self.options.peer_to_peer
        self.device = _indexed(torch.device(device))
        fault: MoeCommError | None = None
        try:
            launcher = launcher or launcher_for(self.device, self.own.emulate)
            experts = placement.num_experts
            check_shared("meet", self.device, f"{experts} experts", experts=experts, with_counts=1, chunks=1)
        except MoeCommError as error:
            fault = error
        self.channel: Channel | None = None
        if self.comm is not None:
            self.channel = Channel(self.comm, self.options.timeout_s)
            same = {
                **settings_of(self),
                "options of peer_to_peer": self.own,
                "device": self.device.type,
            }
            compare(self.channel, f"the {self.name} dispatcher", same, fault=fault)
        if fault is not None or launcher is None:
            raise fault or ConfigError("no launcher")
        self.memory: PeerMemory = (
            peer_memory(self.channel, group, rank, placement.offsets, self.device, self.own, launcher)
            if blocks is None
            else PeerMemory(None, Turns(Shape(rank, placement.offsets), blocks, launcher))
        )
        self._blocks = self.own.num_blocks or _blocks(self.device)
        self._pack_header: Callable[..., bytes] = native().pack_header
        self._forms: dict[tuple[int, torch.dtype, str], Form] = {}
        self._lane = Lane(self.device, self.memory.turns.heap, self.own.own_stream)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Rows in this rank's block, which peers read in place; for what it does not move or has no room for, what
        torch gives."""
        if device.type == self.device.type and dtype in DTYPE_CODES and num_rows and width:
            try:
                return self.memory.turns.heap.rows(num_rows, width, dtype)
            except HeapError:  # combine tries again, and says so
                pass
        return super().empty_rows(num_rows, width, dtype, device)

    @property
    def handshakes(self) -> bool:
        """The device compares headers in every operation."""
        return True

    # --- the three primitives ---

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        if x_TD.device.type != self.device.type or x_TD.dtype not in DTYPE_CODES:
            return InputError(
                f"peer_to_peer on {self.device} moves float32, bfloat16 and float16 rows there; got {x_TD.dtype} on "
                f"{x_TD.device}"
            )
        return super()._fault(x_TD, ids_TK)

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None  # found while counting

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        if header.fault is not None:
            self._refuse(header)
        self._not_captured("dispatch", "use dispatch_fixed")
        turns, form = self.memory.turns, self._form(x_TD, header.op)
        x_TD, ids_TK = dense(self._rounded(x_TD, form, sends=True)), ids_TK.to(torch.int64).contiguous()
        with self._running(header, x_TD, ids_TK):
            said = self.packed(header)
            turns.count_and_meet(with_room(said, turns.heap.room()), ids_TK, self._blocks, NOTHING)
            self.memory.check(header, ids_TK)
            counted = turns.counted(ROOM_WORD)
            check_room(form, counted.rows_W, counted.said_W, header)
            arriving = form.allocate(turns.heap, counted.rows_W[self.rank])
            turns.meet(said, arriving.offer)
            rows_RD, place_TK = move_rows(turns, x_TD, ids_TK, arriving, self._blocks)
            self._settle(header)
            self._lane.hand_over(rows_RD, place_TK)
        return rows_RD, self._layout(x_TD, ids_TK, rows_RD, place_TK, header, tuple(counted.own_L), counted.dropped)

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        heap, rows_RD = self.memory.turns.heap, self._rounded(rows_RD, self._form(rows_RD, header.op))
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        with self._running(header, rows_RD, weights_TK):
            try:
                read_RD = readable(heap, rows_RD)
            except HeapError as problem:
                self._give_up(header, problem)
            y_TD = torch.empty(handle.num_tokens, handle.hidden, dtype=handle.dtype, device=rows_RD.device)
            self.memory.turns.sum(
                self.packed(header),
                Offer(place(heap, read_RD)),
                handle.state.place_TK,
                weights_TK,
                y_TD,
                DTYPE_CODES[handle.dtype],
                self._blocks,
            )
            self._settle(header)
            self._lane.hand_over(y_TD)
        return y_TD

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        grad_TD = dense(self._rounded(grad_TD, self._form(grad_TD, header.op)))
        weights_TK, heap = weights_TK.contiguous(), self.memory.turns.heap
        with self._running(header, grad_TD, rows_RD, weights_TK):
            try:
                read_RD = readable(heap, rows_RD)
                grad_RD = heap.rows(handle.num_rows, handle.hidden, handle.dtype)
            except HeapError as problem:
                self._give_up(header, problem)
            dots_TK = None
            if rows_RD is not None:
                dots_TK = torch.empty(handle.num_tokens, handle.top_k, dtype=torch.float32, device=grad_TD.device)
            self.memory.turns.spread(
                self.packed(header),
                Offer(place(heap, read_RD), place(heap, grad_RD)),
                handle.state.place_TK,
                weights_TK,
                grad_TD,
                dots_TK,
                DTYPE_CODES[handle.dtype],
                self._blocks,
            )
            self._settle(header)
            self._lane.hand_over(grad_RD, dots_TK)
        return grad_RD, dots_TK

    # --- what they are made of ---

    def packed(self, header: Header) -> bytes:
        """``header.pack()``, by native code."""
        fault = header.fault
        said = header.compared(), header.label, fault_word(fault), "" if fault is None else str(fault)
        return self._pack_header(*said)

    def _running(self, header: Header, *used: Tensor | None) -> Running:
        """Around an operation: on the stream where it runs, which is the one that is current inside."""
        return Running(self, header, used)

    def _not_captured(self, what: str, instead: str) -> None:
        """Before a turn in which the host waits for kernels: those of a CUDA graph do not run while it is made.

        Raises:
            ConfigError: the current stream is captured.
        """
        if capturing(self.device):
            raise ConfigError(f"{what} of peer_to_peer waits on the host, which a CUDA graph cannot hold: {instead}")

    def _refuse(self, header: Header) -> NoReturn:
        """Meet the others with a fault of this rank's own; all raise it. In a graph it is this rank's alone."""
        if header.fault is not None and capturing(self.device):
            raise header.fault
        with self._running(header):
            self.memory.turns.meet(self.packed(header), NOTHING)
            self.memory.check(header)
        raise header.fault or AssertionError("nothing to refuse")

    def _give_up(self, header: Header, problem: HeapError) -> NoReturn:
        """Begin the turn only to tell the others of this rank's problem."""
        if capturing(self.device):
            raise problem  # what the others would say comes when the graph runs, and this one never will
        self.memory.turns.meet(self.packed(header), Offer(NOWHERE))
        self.memory.check(header)
        raise problem

    def _settle(self, header: Header) -> None:
        """Raise what went wrong, as far as it is to be waited for."""
        if self.memory.on_host or (self.options.checked and not capturing(self.device)):
            self.memory.check(header)

    def _layout(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        rows_RD: Tensor,
        place_TK: Tensor,
        header: Header,
        rows_per_expert: tuple[int, ...] = (),
        num_dropped: int = 0,
    ) -> DispatchHandle:
        return DispatchHandle(
            num_tokens=x_TD.shape[0],
            top_k=ids_TK.shape[1],
            hidden=x_TD.shape[1],
            dtype=x_TD.dtype,
            device=x_TD.device,
            rows_per_expert=rows_per_expert,
            num_rows=rows_RD.shape[0],
            num_dropped=num_dropped,
            label=header.label,
            state=Places(place_TK),
            call=header.seq,
            maker=header.maker,
        )

    def _rounded(self, rows_RD: Tensor, form: Form, sends: bool = False) -> Tensor:
        """Rows as their payload would have them; ``sends``: the kernel itself packs some."""
        if not form.rounds or (sends and form.packing != SAME):
            return rows_RD
        if form.wire_dtype.scales == "group":
            return rounded_in_groups(rows_RD, form.wire_dtype)
        return rounded(rows_RD, form.wire_dtype)

    def _form(self, x_TD: Tensor, op: str) -> Form:
        key = x_TD.shape[1], x_TD.dtype, op
        form = self._forms.get(key)
        if form is None:
            form = Form(x_TD.shape[1], x_TD.dtype, self.options.wire_dtypes.of(op), self.own.relay)
            self._forms[key] = form
        return form


class Running:
    """An operation of ``steps``, from before its first kernel until all are queued."""

    __slots__ = ("_header", "_steps", "_used")

    def __init__(self, steps: PeerSteps, header: Header, used: tuple[Tensor | None, ...]) -> None:
        self._steps, self._header, self._used = steps, header, used

    def __enter__(self) -> None:
        steps = self._steps
        steps._lane.enter(self._used)
        try:
            steps.memory.begin(self._header, steps.options.timeout_s)
        except BaseException:
            steps._lane.leave(failed=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, MoeCommError):
            mark_known(error)
        self._steps.memory.end()
        self._steps._lane.leave(failed=kind is not None)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _blocks(device: torch.device) -> int:
    if device.type != "cuda":
        return BLOCKS_ON_HOST
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def dense(x: Tensor) -> Tensor:
    """``x`` with unit stride along its rows' elements; rows themselves may be any distance apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()


def with_room(header: bytes, room: int) -> bytes:
    """A dispatch's header that tells of this rank's room."""
    return header[: ROOM_WORD * 8] + room.to_bytes(8, sys.byteorder)
