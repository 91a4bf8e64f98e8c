"""Contestants of ``bench dispatch``, and the measurement loop. The MPI benchmark uses both, too."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.bench.common.clock import Clock
from moe_comm.bench.common.inputs import RankInputs, check_result, expected_rows, expected_y, make_ids
from moe_comm.bench.common.interleave import run_rounds
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.runtime.memory import address, warm_rows
from moe_comm.topology import ExpertPlacement

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype codes of the native core."""
PAGE = 4096


class Exchange(ABC):
    """An all-to-all implementation."""

    @abstractmethod
    def counts(self, send_E: Tensor, send_splits: list[int], recv: Tensor, recv_splits: list[int]) -> None:
        """Exchange int64 counts per expert. Splits are numbers of experts."""

    @abstractmethod
    def rows(self, send_RD: Tensor, send_splits: list[int], recv_RD: Tensor, recv_splits: list[int]) -> None:
        """Exchange rows. Splits are numbers of rows."""


class GlooExchange(Exchange):
    """``torch.distributed.all_to_all_single``."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group

    def counts(self, send_E: Tensor, send_splits: list[int], recv: Tensor, recv_splits: list[int]) -> None:
        dist.all_to_all_single(recv, send_E, recv_splits, send_splits, group=self.group)

    def rows(self, send_RD: Tensor, send_splits: list[int], recv_RD: Tensor, recv_splits: list[int]) -> None:
        dist.all_to_all_single(recv_RD, send_RD, recv_splits, send_splits, group=self.group)


@dataclass(frozen=True)
class PermuteHandle:
    """State of a dispatch that combine needs.

    order: [T * K] slot of each sent row; rows are sorted by (expert, token, slot).
    send_splits, recv_splits: rows sent to and received from each rank.
    recv_counts: received rows by [source rank][local expert].
    """

    order: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    recv_counts: list[list[int]]


class Permute:
    """Dispatch and combine over an ``Exchange``, as in torchtitan and Hugging Face. Combine reverses the steps.

    sender:    x_TD ─index_select─▶ rows by (expert, token, slot)
                                        │ all-to-all
    receiver:                           └▶ by (source, expert, ...) ─cat of blocks─▶ by (expert, source, ...)

    Args:
        exchange: the all-to-all.
        placement: experts of each rank.
        rank: this rank.
        tuned: reuse all buffers (each call overwrites the results of the previous one), and compute the un-permute and
            the weighted sum with one ``embedding_bag``. If False, allocate new tensors and sum with ``bmm``, as
            torchtitan and Hugging Face do.
    """

    def __init__(self, exchange: Exchange, placement: ExpertPlacement, rank: int, *, tuned: bool) -> None:
        self.exchange = exchange
        self.tuned = tuned
        self.world = placement.world
        self.sizes = list(placement.experts_per_rank)
        self.local = self.sizes[rank]
        self.owners = list(pairwise(placement.offsets))
        self._buffers: dict[str, Tensor] = {}

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, PermuteHandle]:
        """Return the rows of the local experts, [R, D], ordered by (expert, source rank, token, slot)."""
        flat = ids_TK.reshape(-1)
        order = flat.argsort(stable=True)
        send_E = torch.bincount(flat, minlength=sum(self.sizes))
        recv = send_E.new_empty(self.world * self.local)
        self.exchange.counts(send_E, self.sizes, recv, [self.local] * self.world)
        sent_counts: list[int] = send_E.tolist()
        recv_counts: list[list[int]] = recv.view(self.world, self.local).tolist()
        send_splits = [sum(sent_counts[first:stop]) for first, stop in self.owners]
        handle = PermuteHandle(order, send_splits, [sum(counts) for counts in recv_counts], recv_counts)

        send_RD = self._empty("send", x_TD, len(order))
        torch.index_select(x_TD, 0, order // ids_TK.shape[1], out=send_RD)
        recv_RD = self._empty("recv", x_TD, sum(handle.recv_splits))
        self.exchange.rows(send_RD, handle.send_splits, recv_RD, handle.recv_splits)
        blocks = torch.split(recv_RD, [count for counts in recv_counts for count in counts])
        rows_RD = self._empty("rows", x_TD, len(recv_RD))
        by_expert = [blocks[s * self.local + e] for e in range(self.local) for s in range(self.world)]
        torch.cat(by_expert, out=rows_RD)
        return rows_RD, handle

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, sent: PermuteHandle) -> Tensor:
        """Return the weighted sum of the K rows of each token, [T, D]."""
        blocks = torch.split(rows_RD, [counts[e] for e in range(self.local) for counts in sent.recv_counts])
        send_RD = self._empty("combine send", rows_RD, len(rows_RD))
        by_source = [blocks[e * self.world + s] for s in range(self.world) for e in range(self.local)]
        torch.cat(by_source, out=send_RD)
        recv_RD = self._empty("combine recv", rows_RD, len(sent.order))
        self.exchange.rows(send_RD, sent.recv_splits, recv_RD, sent.send_splits)
        weights = weights_TK.to(rows_RD.dtype)
        inverse = torch.empty_like(sent.order)
        inverse[sent.order] = torch.arange(len(inverse), device=inverse.device)
        if self.tuned and len(recv_RD):
            bags_TK = inverse.view(weights_TK.shape)
            return F.embedding_bag(bags_TK, recv_RD, per_sample_weights=weights, mode="sum")
        slots_TKD = recv_RD.index_select(0, inverse).view(*weights_TK.shape, rows_RD.shape[1])
        return torch.bmm(weights.unsqueeze(1), slots_TKD).squeeze(1)

    def _empty(self, name: str, like: Tensor, rows: int) -> Tensor:
        shape = (rows, like.shape[1])
        if not self.tuned:
            return like.new_empty(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < prod(shape):
            buffer = self._buffers[name] = like.new_empty(prod(shape))
        return buffer[: prod(shape)].view(shape)


TimedPhase = tuple[str | None, Callable[[], None]]
"""Name and function of a phase. A phase named None is not timed."""


class Contestant(ABC):
    """An implementation that ``measure`` times."""

    name: str

    @abstractmethod
    def steps(self) -> list[TimedPhase]:
        """Return the phases of one iteration, in order."""

    @abstractmethod
    def check(self) -> dict[str, float]:
        """Compare the results with plain torch and return the error by operation. Collective."""


class TorchPeer(Contestant):
    """Contestant that dispatches and combines with torch permutations and an all-to-all. Forward only."""

    def __init__(
        self, name: str, exchange: Exchange, settings: DispatchBench, rank: int, inputs: RankInputs, *, tuned: bool
    ) -> None:
        placement = ExpertPlacement.balanced(settings.experts, settings.ranks)
        self.name, self.settings, self.rank, self.inputs = name, settings, rank, inputs
        self.permute = Permute(exchange, placement, rank, tuned=tuned)
        local = placement.local_range(rank)
        self.scale_L = inputs.scale_E[local.start : local.stop]

    def _dispatch(self) -> None:
        self.rows_RD, self.sent = self.permute.dispatch(self.inputs.x_TD, self.inputs.ids_TK)

    def _experts(self) -> None:
        counts_L = torch.tensor(self.sent.recv_counts, dtype=torch.int64, device="cpu").sum(0)
        self.out_RD = self.rows_RD * self.scale_L.repeat_interleave(counts_L)[:, None]

    def _combine(self) -> None:
        self.y_TD = self.permute.combine(self.out_RD, self.inputs.weights_TK, self.sent)

    def _free(self) -> None:
        del self.rows_RD, self.sent, self.out_RD, self.y_TD

    def steps(self) -> list[TimedPhase]:
        return [("dispatch", self._dispatch), (None, self._experts), ("combine", self._combine), (None, self._free)]

    def check(self) -> dict[str, float]:
        self._dispatch()
        check_result(self.name, "dispatch", self.rows_RD, expected_rows(self.settings, self.rank), bits=True)
        self._experts()
        self._combine()
        error = check_result(self.name, "combine", self.y_TD, expected_y(self.inputs), bits=False)
        self._free()
        return {"combine": error}


class OtherWork:
    """Work between two calls that replaces the content of the caches of a core, as other layers do in decode."""

    def __init__(self, num_bytes: int = 16 << 20, width: int = 512) -> None:
        self._values = torch.ones(num_bytes // 4, dtype=torch.float32, device="cpu")
        self._square = torch.full((width, width), 1 / width, dtype=torch.float32, device="cpu")

    def __call__(self) -> None:
        self._values.add_(1)
        (self._square @ self._square).softmax(1).sum().item()
        sum(len(str(number)) for number in range(2000))  # the code and the objects of Python


def measure(contestants: Iterable[Contestant], clock: Clock, settings: DispatchBench) -> None:
    """Time the phases of all contestants in interleaved rounds. All ranks start each phase at the same time."""
    other_work = OtherWork() if settings.cold else None

    def measure_steps(contestant: Contestant, _: int) -> None:
        for phase, work in contestant.steps():
            if phase is None:
                work()
            else:
                if other_work is not None:
                    other_work()
                clock.measure(contestant.name, (phase, work), in_a_row=settings.in_a_row)

    run_rounds(list(contestants), measure_steps, clock, settings.warmup, settings.rounds, collect_s=math.inf)


class SharedSegments:
    """One shared memory block per rank, mapped by all ranks, without a name in the file system. Collective."""

    def __init__(self, num_bytes: int) -> None:
        size = max(PAGE, -(-num_bytes // PAGE) * PAGE)
        own_fd = os.memfd_create("moe_comm_limit", os.MFD_CLOEXEC)
        self._maps = []
        try:
            os.posix_fallocate(own_fd, 0, size)
            peers: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(peers, (os.getpid(), own_fd, size))
            for pid, fd, peer_size in peers:
                peer = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
                try:
                    self._maps.append(mmap.mmap(peer, peer_size))
                finally:
                    os.close(peer)
            dist.barrier()
        finally:
            os.close(own_fd)
        for block in self._maps:
            with contextlib.suppress(OSError):
                block.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = [np.frombuffer(block, np.uint8) for block in self._maps]
        for view in self.bytes:
            view[::PAGE] = 0  # map every page into this process
        dist.barrier()

    def address(self, rank: int) -> int:
        """Return the address of ``rank``'s block in this process."""
        return int(self.bytes[rank].ctypes.data)

    def tensor(self, rank: int, rows: int, like: Tensor) -> Tensor:
        """Return a view of ``rank``'s block, [rows, D] with the D and dtype of ``like``."""
        num_bytes = rows * like.shape[1] * like.element_size()
        return torch.from_numpy(self.bytes[rank][:num_bytes]).view(like.dtype).view(rows, like.shape[1])


def slot_destinations(settings: DispatchBench, rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return owner rank [T*K] and row index at the owner [T*K] of each slot, and the number of rows of each rank.

    A slot is one of the K expert choices of a token. Rows at an owner are ordered by (expert, source rank, slot).
    """
    placement = ExpertPlacement.balanced(settings.experts, settings.ranks)
    ids = [make_ids(settings, source).reshape(-1) for source in range(settings.ranks)]
    counts_WE = torch.stack([torch.bincount(flat, minlength=settings.experts) for flat in ids])
    owner_E = torch.repeat_interleave(
        torch.arange(settings.ranks, device="cpu"),
        torch.tensor(placement.experts_per_rank, dtype=torch.int64, device="cpu"),
    )
    total_E = counts_WE.sum(0)
    rows_W = torch.zeros(settings.ranks, dtype=torch.int64, device="cpu").index_add_(0, owner_E, total_E)
    first_E = total_E.cumsum(0) - total_E - (rows_W.cumsum(0) - rows_W)[owner_E]
    local_ids = ids[rank]
    order = local_ids.argsort(stable=True)
    within = torch.empty_like(local_ids)
    local_E = counts_WE[rank]
    within[order] = torch.arange(len(local_ids), device="cpu") - (local_E.cumsum(0) - local_E)[local_ids[order]]
    row = first_E[local_ids] + counts_WE[:rank].sum(0)[local_ids] + within
    return owner_E[local_ids], row, rows_W.tolist()


class BareCopies(Contestant):
    """The lower bound of the times, named "limit" in results: bare copies of the same bytes by all ranks at once.

    The copies are written in C++ with non-temporal stores. Dispatch copies row t of x to K addresses in the memory of
    the owner ranks. Combine reads K rows from the memory of the owners and writes their weighted sum. The addresses are
    computed in advance and all pages are touched. There is no exchange of counts, no handshake and no waiting. The
    difference to this time is the overhead of a dispatcher. The constructor is collective.
    """

    name = "limit"
    MAX_TOP_K = 64
    """Maximum of the native core's bare weighted sum."""

    def __init__(self, native: Any, settings: DispatchBench, rank: int, inputs: RankInputs, threads: int) -> None:
        self.native, self.settings, self.rank, self.inputs, self.threads = native, settings, rank, inputs, threads
        owner, row, rows_W = slot_destinations(settings, rank)
        self.rows = rows_W[rank]
        self.row_bytes = inputs.x_TD.shape[1] * inputs.x_TD.element_size()
        self.received = SharedSegments(self.rows * self.row_bytes)
        self.outputs = SharedSegments(self.rows * self.row_bytes)
        self.token = torch.arange(settings.tokens, device="cpu").repeat_interleave(settings.top_k)
        self.received_addresses = self._addresses(self.received, owner, row)
        self.output_addresses = self._addresses(self.outputs, owner, row)
        self.weights_TK = inputs.weights_TK.float().contiguous()
        # Huge pages, as for the results of a dispatcher.
        self.y_TD = warm_rows(settings.tokens, settings.hidden, inputs.x_TD.dtype, inputs.x_TD.device).zero_()

    def _addresses(self, segments: SharedSegments, owner: Tensor, row: Tensor) -> Tensor:
        base = torch.tensor(
            [segments.address(peer) for peer in range(self.settings.ranks)], dtype=torch.int64, device="cpu"
        )
        return (base[owner] + row * self.row_bytes).contiguous()

    def dispatch(self) -> None:
        """Copy each routed row to its destination."""
        self.native.bare_gather(
            address(self.inputs.x_TD, self.inputs.x_TD.dtype),
            address(self.token, torch.int64),
            address(self.received_addresses, torch.int64),
            len(self.token),
            self.row_bytes,
            self.threads,
        )

    def combine(self) -> None:
        """Compute the weighted sum of each token."""
        self.native.bare_weighted_sum(
            address(self.y_TD, self.inputs.x_TD.dtype),
            address(self.output_addresses, torch.int64),
            address(self.weights_TK, torch.float32),
            self.settings.tokens,
            self.settings.top_k,
            self.settings.hidden,
            DTYPE_CODES[self.inputs.x_TD.dtype],
            self.threads,
        )

    def experts(self) -> None:
        """Write the rows that ``combine`` reads, so that the caches have the same state as for other contestants."""
        rows_RD = self.received.tensor(self.rank, self.rows, self.inputs.x_TD)
        torch.mul(rows_RD, 1.0, out=self.outputs.tensor(self.rank, self.rows, self.inputs.x_TD))

    def steps(self) -> list[tuple[str | None, Callable[[], None]]]:
        return [("dispatch", self.dispatch), (None, self.experts), ("combine", self.combine)]

    def check(self) -> dict[str, float]:
        """Compare with plain torch, and fill the rows that ``combine`` reads. Collective."""
        expected_RD = expected_rows(self.settings, self.rank)
        self.outputs.tensor(self.rank, self.rows, expected_RD).copy_(expected_RD)
        self.dispatch()
        dist.barrier()
        check_result(
            self.name, "dispatch", self.received.tensor(self.rank, self.rows, expected_RD), expected_RD, bits=True
        )
        self.combine()
        weighted_TD = self.inputs.x_TD.float() * self.weights_TK.sum(1, keepdim=True)
        error = check_result(self.name, "combine", self.y_TD, weighted_TD.to(self.y_TD.dtype), bits=False)
        return {"combine": error}
