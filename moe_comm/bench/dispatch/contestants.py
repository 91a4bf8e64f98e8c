"""Contestants of ``bench dispatch``, and the measurement loop. The MPI benchmark uses both, too."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.bench.common.clock import Clock
from moe_comm.bench.common.inputs import RankInputs, check_result, expected_rows, expected_y
from moe_comm.bench.common.interleave import run_rounds
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.topology import ExpertPlacement


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


class Contestant(Protocol):
    """An implementation that ``measure`` times."""

    name: str

    def steps(self) -> list[TimedPhase]:
        """Return the phases of one iteration, in order."""

    def check(self) -> dict[str, float]:
        """Compare the results with plain torch and return the error by operation. Collective."""


class TorchPeer:
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


def measure(contestants: Iterable[Contestant], clock: Clock, settings: DispatchBench) -> None:
    """Time the phases of all contestants in interleaved rounds. All ranks start each phase at the same time."""

    def measure_steps(contestant: Contestant, _: int) -> None:
        for phase, work in contestant.steps():
            if phase is None:
                work()
            else:
                clock.measure(contestant.name, (phase, work), in_a_row=settings.in_a_row)

    run_rounds(list(contestants), measure_steps, clock, settings.warmup, settings.rounds, collect_s=math.inf)
