"""The contract of dispatchers over kernels: the three primitives of ``peer_to_peer``; see there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch.base import Dispatcher, DispatchOptions, Layout
from moe_comm.dispatch.channel import Channel
from moe_comm.dispatch.group_scales import rounded_in_groups
from moe_comm.dispatch.handshake import digest, meet, settings_of
from moe_comm.dispatch.header import Header
from moe_comm.dispatch.payload import rounded
from moe_comm.dispatch.peer_access import launcher_for
from moe_comm.dispatch.peer_memory import PeerMemory, peer_memory
from moe_comm.dispatch.peer_rows import Form, check_room, move_rows, place, readable
from moe_comm.dispatch.peer_streams import Lane
from moe_comm.errors import ConfigError, HeapError, InputError, MoeCommError, RoutingError
from moe_comm.gpu.blocks import Blocks
from moe_comm.gpu.heap import capturing
from moe_comm.gpu.launch import Launcher
from moe_comm.gpu.limits import check_shared
from moe_comm.gpu.turns import HEADER_WORDS, SAME, Met, Offer, Shape, Slots, Turns, address
from moe_comm.runtime.shared import DTYPE_CODES
from moe_comm.topology import ExpertPlacement

ROOM_WORD = HEADER_WORDS - 1
"""Of a dispatch's header: bytes of the largest place in this rank's heap. The text of the label ends before it."""
BLOCKS_ON_HOST = 4
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Places:
    """place_TK: where each slot's row is, as csrc/layout.h packs owner and row; -1 where it is nowhere."""

    place_TK: Tensor


class PeerSteps(Dispatcher):
    """Dispatch, combine and their backward passes by kernels. Construction is collective over ``group``.

    Args:
        device: where rows are; CPU tensors only with ``PeerToPeerOptions(emulate=True)``.
        launcher: what runs the kernels; chosen for the device if not given.
        blocks: this rank's, where all ranks are in this process and there is no group; see ``peer_virtual``.

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
        if group is not None:
            self.channel = Channel(group, rank, self.world, self.options.timeout_s)
            same = {
                **settings_of(self),
                "options of peer_to_peer": digest(self.own),
                "device": digest(self.device.type),
            }
            meet(self.channel, group, f"the {self.name} dispatcher", same, fault=fault)
        if fault is not None or launcher is None:
            raise fault or ConfigError("no launcher")
        self.memory: PeerMemory = (
            peer_memory(self.channel, group, rank, placement.offsets, self.device, self.own, launcher)
            if blocks is None
            else PeerMemory(None, Turns(Shape(rank, placement.offsets), blocks, launcher))
        )
        self._blocks = self.own.num_blocks or _blocks(self.device)
        self._timeout_ns = int(self.options.timeout_s * 1e9)
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

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, Layout]:
        if header.fault is not None:
            self._refuse(header)
        self._not_captured("dispatch", "use dispatch_fixed")
        turns = self.memory.turns
        x_TD, ids_TK = dense(self._rounded(x_TD, header.op, sends=True)), ids_TK.to(torch.int64).contiguous()
        with self._running(header, x_TD, ids_TK):
            slots = Slots.of(ids_TK, self.num_experts, self._blocks)
            said = header.pack()
            words = said.copy()
            words[ROOM_WORD] = turns.heap.room()
            turns.count(slots, self._timeout_ns)
            counted = turns.meet(words, Offer(), self._timeout_ns, slots)
            self.memory.check(self._timeout_ns, header, ids_TK)
            rows_E, dropped = turns.rows_per_expert(), turns.report.dropped
            form = self._form(x_TD, header.op)
            check_room(form, rows_E, self.placement.offsets, turns.said(ROOM_WORD), header)
            own_L = rows_E[turns.shape.own_experts]
            arriving = form.allocate(turns.heap, sum(own_L))
            offered = turns.meet(said, arriving.offer, self._timeout_ns)
            met = Met(offered.offers_W5, counted.counts_WE, counted.summary)
            rows_RD, place_TK = move_rows(turns, x_TD, slots, met, arriving, self._blocks, self._timeout_ns)
            self._settle(header)
            self._lane.hand_over(rows_RD, place_TK)
        return rows_RD, self._layout(x_TD, ids_TK, rows_RD, place_TK, header, tuple(own_L), dropped)

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, layout: Layout, header: Header) -> Tensor:
        heap, rows_RD = self.memory.turns.heap, self._rounded(rows_RD, header.op)
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        with self._running(header, rows_RD, weights_TK):
            read_RD, problem = self._tried(lambda: readable(heap, rows_RD))
            met = self._meet(header, Offer(place(heap, read_RD, problem)), problem)
            y_TD = torch.empty(layout.num_tokens, layout.hidden, dtype=layout.dtype, device=rows_RD.device)
            self._launch_by_token(
                "sum",
                layout,
                met,
                weights_at=address(weights_TK),
                y_at=address(y_TD),
            )
            self._settle(header)
            self._lane.hand_over(y_TD)
        return y_TD

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, layout: Layout, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        grad_TD, weights_TK = dense(self._rounded(grad_TD, header.op)), weights_TK.contiguous()
        heap = self.memory.turns.heap
        with self._running(header, grad_TD, rows_RD, weights_TK):
            read_RD, problem = self._tried(lambda: readable(heap, rows_RD))
            grad_RD, no_grad = self._tried(lambda: heap.rows(layout.num_rows, layout.hidden, layout.dtype))
            offer = Offer(place(heap, read_RD, problem), place(heap, grad_RD, no_grad))
            met = self._meet(header, offer, problem or no_grad)
            shape = layout.num_tokens, layout.top_k
            dots_TK = None if rows_RD is None else torch.empty(shape, dtype=torch.float32, device=grad_TD.device)
            self._launch_by_token(
                "spread",
                layout,
                met,
                weights_at=address(weights_TK),
                grad_at=address(grad_TD),
                stride=grad_TD.stride(0) * grad_TD.element_size(),
                dots_at=address(dots_TK),
            )
            self._settle(header)
            assert grad_RD is not None  # or there was an error
            self._lane.hand_over(grad_RD, dots_TK)
        return grad_RD, dots_TK

    # --- what they are made of ---

    @contextmanager
    def _running(self, header: Header, *used: Tensor | None) -> Iterator[None]:
        """An operation, on the stream where it runs."""
        with self._lane.entered(*used):
            self.memory.begin(header, self.options.timeout_s)
            try:
                yield
            finally:
                self.memory.end()

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
            self._meet(header, Offer())
            self.memory.check(self._timeout_ns, header)
        raise header.fault or AssertionError("nothing to refuse")

    def _meet(self, header: Header, offer: Offer, problem: HeapError | None = None) -> Met:
        """Begin the turn of an operation without counts, or raise this rank's problem: the others learn of it."""
        if problem is not None and capturing(self.device):
            raise problem  # what the others would say comes when the graph runs, and this one never will
        met = self.memory.turns.meet(header.pack(), offer, self._timeout_ns)
        if problem is not None:
            self.memory.check(self._timeout_ns, header)
            raise problem
        if self.memory.on_host:
            self.memory.check(self._timeout_ns, header)
        return met

    def _settle(self, header: Header) -> None:
        """Raise what went wrong, as far as it is to be waited for."""
        if self.memory.on_host or (self.options.checked and not capturing(self.device)):
            self.memory.check(self._timeout_ns, header)

    def _tried(self, allocate: Callable[[], T]) -> tuple[T | None, HeapError | None]:
        try:
            return allocate(), None
        except HeapError as problem:
            return None, problem

    def _launch_by_token(self, kernel: str, layout: Layout, met: Met, **words: int) -> None:
        """Queue ``sum`` or ``spread``, and the end of the turn."""
        places: Places = layout.state
        self.memory.turns.launch(
            kernel,
            min(self._blocks, layout.num_tokens),
            self._timeout_ns,
            hidden=layout.hidden,
            dtype=DTYPE_CODES[layout.dtype],
            tokens=layout.num_tokens,
            top_k=layout.top_k,
            place_at=address(places.place_TK),
            offers_at=address(met.offers_W5),
            **words,
        )
        self.memory.turns.done(self._timeout_ns)

    def _layout(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        rows_RD: Tensor,
        place_TK: Tensor,
        header: Header,
        rows_per_expert: tuple[int, ...] = (),
        num_dropped: int = 0,
    ) -> Layout:
        return Layout(
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
        )

    def _rounded(self, rows_RD: Tensor, op: str, sends: bool = False) -> Tensor:
        """Rows as their payload would have them; ``sends``: the kernel itself packs some."""
        payload = self.options.payloads.of(op)
        if payload.scales == "group":
            return rounded_in_groups(rows_RD, payload)
        return rows_RD if sends and self._form(rows_RD, op).packing != SAME else rounded(rows_RD, payload)

    def _form(self, x_TD: Tensor, op: str) -> Form:
        return Form(x_TD.shape[1], x_TD.dtype, self.options.payloads.of(op), self.own.relay)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _blocks(device: torch.device) -> int:
    if device.type != "cuda":
        return BLOCKS_ON_HOST
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def dense(x: Tensor) -> Tensor:
    """``x`` with unit stride along its rows' elements; rows themselves may be any distance apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()
