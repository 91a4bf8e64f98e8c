"""Dispatch of few rows through ``peer_to_peer``, for decoding: one kernel sends, and nobody is asked how many come.

Every (expert, source rank) has a fixed place for ``max_tokens`` rows at the expert's owner, so nothing needs to be
counted before rows leave:

    expert 0   │ from rank 0: a b · · │ from rank 1: c · · · │        max_tokens 4; counts 2 and 1
    expert 1   │ from rank 0: · · · · │ from rank 1: c d e · │

    ll_send ─▶ [anything else] ─▶ ll_arrive ─▶ experts ─▶ ll_ready ─▶ sum

Between ``ll_send`` and ``ll_arrive`` the rows travel while the device does something else; ``FewSent.receive`` is where
it comes back to them. There is no backward, and no check that ranks agree: both would cost a round trip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.comm.header import Header
from moe_comm.dispatch.peer_to_peer.memory import PeerMemory
from moe_comm.dispatch.peer_to_peer.rows import Arriving, Form, place
from moe_comm.errors import ConfigError, HeapError, InputError
from moe_comm.gpu.limits import check_shared
from moe_comm.gpu.protocol import MAX_PARTS, NOWHERE, Offer, address
from moe_comm.runtime.memory import DTYPE_CODES

MOST_TOKENS = 65535
"""A count is 16 bits of a word."""
BUSY_BLOCKS = 256
"""About as many blocks of ll_send as there should be."""


@dataclass(frozen=True, eq=False)
class Buffers:
    """Places that stay, on every rank: for arriving rows, and for results that peers read.

    arriving_W5, results_W5: all ranks' offers, on the device. results_RD: as ``FewSent.results`` shows them.
    """

    max_tokens: int
    arriving: Arriving
    results_RD: Tensor
    arriving_W5: Tensor
    results_W5: Tensor


def make_buffers(memory: PeerMemory, form: Form, max_tokens: int, header: Header) -> Buffers:
    """Collective.

    Raises:
        ConfigError: too many tokens, also for the GPU. RankMismatch, HeapError: on every rank.
    """
    if not 0 < max_tokens <= MOST_TOKENS:
        raise ConfigError(f"max_tokens must be between 1 and {MOST_TOKENS}; got {max_tokens}")
    turns, shape = memory.turns, memory.turns.shape
    words = {"hidden": form.hidden, "dtype": DTYPE_CODES[form.dtype], "format": form.packing}
    check_shared("ll_send", turns.device, f"max_tokens={max_tokens}", max_tokens=max_tokens, **words)
    own = shape.own_experts
    num_rows = (own.stop - own.start) * shape.world * max_tokens
    problem: HeapError | None = None
    arriving, results_RD = None, None
    try:
        arriving = form.allocate(turns.heap, num_rows)
        results_RD = turns.heap.rows(num_rows, form.hidden, form.dtype)
        results_RD.zero_()
    except HeapError as error:
        problem = error
    arriving_W5 = _offered(memory, header, None if arriving is None else arriving.offer)
    results_W5 = _offered(memory, header, None if results_RD is None else Offer(place(turns.heap, results_RD)))
    if arriving is None or results_RD is None:
        raise problem or HeapError("no room")
    return Buffers(max_tokens, arriving, results_RD, arriving_W5, results_W5)


def _offered(memory: PeerMemory, header: Header, offer: Offer | None) -> Tensor:
    """[W, 5] all ranks' offers, on the device, to keep."""
    memory.turns.meet(header.pack().tobytes(), offer or Offer(NOWHERE))
    memory.check(header)
    return memory.turns.scratch.offers_W5.clone()


@dataclass(frozen=True, eq=False)
class FewSent:
    """Rows on their way. place_TK: where each slot's row is; -1 for a dropped one."""

    memory: PeerMemory
    buffers: Buffers
    header: Header
    place_TK: Tensor
    timeout_s: float

    @property
    def _parts(self) -> int:
        return parts_of(self.memory.turns.shape.experts)

    @property
    def results(self) -> Tensor:
        """[L, W * max_tokens, D] where ``low_latency_combine`` reads results without a copy; to be written to after
        ``receive``."""
        own = self.memory.turns.shape.own_experts
        rows_RD = self.buffers.results_RD
        return rows_RD.view(own.stop - own.start, -1, rows_RD.shape[1])

    def receive(self) -> tuple[Tensor, Tensor]:
        """Wait, on the device, until all rows are there.

        Returns:
            rows_LND: [L, N, D], N = W * max_tokens, of this rank's L experts. Those of rank w for expert e are
                ``rows[e, w * max_tokens:][:counts[e, w]]``; the others are from earlier calls. Valid until the next
                ``low_latency_dispatch``.
            counts_LW: [L, W] int64, on the device.

        Raises:
            PeerTimeout, PeerDied: on the CPU; on a GPU the next call does.
        """
        turns, shape = self.memory.turns, self.memory.turns.shape
        num_local = shape.own_experts.stop - shape.own_experts.start
        counts_LW = torch.empty(shape.local_experts, shape.world, dtype=torch.int64, device=turns.device)
        turns.begin(self.timeout_s)
        turns.plan.receive_few(self._parts, address(counts_LW))
        if self.memory.on_host:
            self.memory.look(self.header)
        rows_RD = self.buffers.arriving.rows()
        num_rows = shape.world * self.buffers.max_tokens
        return rows_RD.view(num_local, num_rows, rows_RD.shape[1]), counts_LW[:num_local]


def send_few(
    memory: PeerMemory, buffers: Buffers, x_TD: Tensor, ids_TK: Tensor, header: Header, timeout_s: float
) -> FewSent:
    """Queue the sending of ``x_TD``, dense rows, to the experts ``ids_TK``, dense int64.

    Raises:
        InputError: more tokens than ``max_tokens``; on this rank alone.
    """
    form, turns = buffers.arriving.form, memory.turns
    if x_TD.shape[0] > buffers.max_tokens:
        raise InputError(f"low-latency dispatch of {x_TD.shape[0]} tokens through places for {buffers.max_tokens}")
    tokens, top_k = ids_TK.shape
    place_TK = torch.empty_like(ids_TK)
    turns.plan.send_few(
        tokens,
        top_k,
        address(ids_TK),
        form.hidden,
        DTYPE_CODES[form.dtype],
        address(x_TD),
        x_TD.stride(0) * x_TD.element_size(),
        address(buffers.arriving_W5),
        address(place_TK),
        buffers.max_tokens,
        parts_of(turns.shape.experts),
        *form.words,
    )
    return FewSent(memory, buffers, header, place_TK, timeout_s)


def sum_few(sent: FewSent, weights_TK: Tensor, blocks: int) -> Tensor:
    """Queue the sum of each token's results, [T, D]. ``sent.results`` holds this rank's."""
    turns, form = sent.memory.turns, sent.buffers.arriving.form
    tokens, top_k = sent.place_TK.shape
    y_TD = torch.empty(tokens, form.hidden, dtype=form.dtype, device=turns.device)
    turns.count_turn()
    turns.plan.sum_few(
        blocks,
        tokens,
        top_k,
        form.hidden,
        DTYPE_CODES[form.dtype],
        address(sent.place_TK),
        address(weights_TK),
        address(y_TD),
        address(sent.buffers.results_W5),
    )
    return y_TD


def parts_of(experts: int) -> int:
    """Blocks of ll_send an expert; alike on every rank."""
    return max(1, min(MAX_PARTS, BUSY_BLOCKS // experts))
