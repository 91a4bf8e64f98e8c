"""What a run's ranks write down of every step, as a hook of the trainer; the files are ``observe.rank_log``'s."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from moe_comm.errors import PeerDied
from moe_comm.observe.probe import Probe, first_ranks
from moe_comm.observe.rank_log import RankLog, StepParts
from moe_comm.runtime.device_clock import cuda_times
from moe_comm.runtime.event_layout import region_bytes
from moe_comm.runtime.event_reader import read_state
from moe_comm.runtime.events import EVENTS
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.sections import ObserveSection

ROUND_TRIPS = 8


class Recording(StepHook):
    """Lines of this rank's steps. Every rank makes one. Collective.

    Args:
        done: steps after which the run goes on. device: "cuda" takes the times of spans on the GPU.
    """

    def __init__(self, folder: Path, ranks: Ranks, settings: ObserveSection, done: int, device: str = "cpu") -> None:
        ensure_region(ranks.rank, settings.records)
        hosts = ranks.texts(socket.gethostname())
        EVENTS.count_anew()  # ranks have attached to their regions at different places
        several = len(set(hosts)) > 1
        skew_ns = clock_skew(ranks, hosts)[0] if several else 0
        self._every = settings.every
        self._probe = Probe(hosts, ranks.world_group) if several and settings.every and can_send() else None
        EVENTS.device = cuda_times() if device == "cuda" else None
        self._log = RankLog(folder, ranks.rank, done=done, every=settings.every, skew_ns=skew_ns)
        self._began_s = time.time()

    on_disk = True

    def before_step(self, step: int) -> None:
        self._log.begin(step)
        self._began_s = time.time()

    def after_step(self, report: StepReport) -> None:
        times = report.times
        parts = StepParts(
            self._began_s,
            times.total,
            times.compute,
            times.communication,
            times.data,
            times.checkpoint,
            report.memory_bytes,
            self._links(report.step),
        )
        self._log.end(report.step, parts)

    def close(self) -> None:
        self._log.close()
        if self._probe is not None:
            self._probe.close()
        EVENTS.device = None

    def _links(self, step: int) -> dict[int, float]:
        if self._probe is None or step % self._every:
            return {}
        try:
            return self._probe()
        except RuntimeError as error:
            raise PeerDied(f"a probe between hosts did not complete: {error}") from error


def ensure_region(rank: int, records: int) -> None:
    """Let ``EVENTS`` record as ``rank`` into a ring of ``records``, unless it does (into a board that ranks share)."""
    state = read_state(EVENTS.region)
    # A rank that was forked has its region from the process before it, which others were forked from too.
    if state is None or (state.rank, state.pid) != (rank, os.getpid()) or EVENTS.records < records:
        EVENTS.attach(memoryview(mmap.mmap(-1, region_bytes(records))), rank, records)


def can_send() -> bool:
    """Whether ranks can send each other what is on the host."""
    return dist.is_initialized() and "cpu" in dist.get_backend_config()


def clock_skew(ranks: Ranks, hosts: Sequence[str], now: Callable[[], int] = time.time_ns) -> tuple[int, int]:
    """What added to this host's clock gives that of rank 0's host, and how wrong it may be; both ns. Collective.

    The first rank of each host asks rank 0 for the time, one host after the other; of some answers the quickest is
    taken, and the clock read in its middle (Cristian 1989). The error is at most half the time it took.
    """
    mine = torch.zeros(ranks.world, 2, dtype=torch.int64)
    firsts = [rank for rank in first_ranks(hosts) if hosts[rank] != hosts[0]]
    if can_send():
        for asking in firsts:
            if ranks.rank == asking:
                mine[asking] = torch.tensor(_ask(now))
            elif ranks.rank == 0:
                for _ in range(ROUND_TRIPS):
                    dist.recv(torch.empty(1, dtype=torch.int64), asking)
                    dist.send(torch.tensor([now()]), asking)
    found = ranks.sum(mine)
    by_host = {hosts[asking]: found[asking].tolist() for asking in firsts}
    skew, error = by_host.get(hosts[ranks.rank], (0, 0))
    return int(skew), int(error)


def _ask(now: Callable[[], int]) -> tuple[int, int]:
    answers = []
    for _ in range(ROUND_TRIPS):
        told = torch.empty(1, dtype=torch.int64)
        before = now()
        dist.send(torch.zeros(1, dtype=torch.int64), 0)
        dist.recv(told, 0)
        after = now()
        answers.append((after - before, int(told) - (before + after) // 2))
    took, skew = min(answers)
    return skew, took // 2 + 1
