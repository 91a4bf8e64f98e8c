"""Training hook that writes step lines and spans of each rank; see ``moe_comm.observe.rank_log`` for the files."""

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
from moe_comm.runtime.event_reader import read_header
from moe_comm.runtime.events import EVENTS
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.sections import ObserveSection

ROUND_TRIPS = 8
"""Time requests per host in ``clock_skew``."""


class Recording(StepHook):
    """Write this rank's step lines and spans. Collective.

    Args:
        done: completed steps when the run resumes.
        device: "cuda" measures spans with GPU time stamps.
    """

    def __init__(self, folder: Path, ranks: Ranks, settings: ObserveSection, done: int, device: str = "cpu") -> None:
        ensure_region(ranks.rank, settings.records)
        hosts = ranks.gather_texts(socket.gethostname())
        EVENTS.reset_call_counts()  # ranks attach at different times, so their counts can differ
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
        """Probe the links between hosts in every ``observe.every``-th step."""
        if self._probe is None or step % self._every:
            return {}
        try:
            return self._probe()
        except RuntimeError as error:
            raise PeerDied(f"a probe between hosts did not complete: {error}") from error


def ensure_region(rank: int, records: int) -> None:
    """Attach ``EVENTS`` to a ring of ``records`` spans for ``rank``, unless it already has one."""
    header = read_header(EVENTS.region)
    # A forked rank inherits the region of its parent process, which it shares with other ranks.
    if header is None or (header.rank, header.pid) != (rank, os.getpid()) or EVENTS.records < records:
        EVENTS.attach(memoryview(mmap.mmap(-1, region_bytes(records))), rank, records)


def can_send() -> bool:
    """Return whether the default process group can send CPU tensors."""
    return dist.is_initialized() and "cpu" in dist.get_backend_config()


def clock_skew(ranks: Ranks, hosts: Sequence[str], now: Callable[[], int] = time.time_ns) -> tuple[int, int]:
    """Return the offset from this host's clock to that of rank 0's host, and its maximum error, in ns. Collective.

    One host after the other, the first rank of each host requests the time from rank 0 several times. The round trip
    with the shortest duration is used, with the local time at its midpoint (Cristian 1989). The error is at most half
    of its duration.
    """
    skews = torch.zeros(ranks.world, 2, dtype=torch.int64, device="cpu")
    clients = [rank for rank in first_ranks(hosts) if hosts[rank] != hosts[0]]
    if can_send():
        for client in clients:
            if ranks.rank == client:
                skews[client] = torch.tensor(_measure_skew(now), dtype=torch.int64, device="cpu")
            elif ranks.rank == 0:
                for _ in range(ROUND_TRIPS):
                    dist.recv(torch.empty(1, dtype=torch.int64, device="cpu"), client)
                    dist.send(torch.tensor([now()], dtype=torch.int64, device="cpu"), client)
    skews = ranks.sum(skews)
    by_host = {hosts[client]: skews[client].tolist() for client in clients}
    skew, error = by_host.get(hosts[ranks.rank], (0, 0))
    return int(skew), int(error)


def _measure_skew(now: Callable[[], int]) -> tuple[int, int]:
    round_trips = []
    for _ in range(ROUND_TRIPS):
        server_ns = torch.empty(1, dtype=torch.int64, device="cpu")
        before = now()
        dist.send(torch.zeros(1, dtype=torch.int64, device="cpu"), 0)
        dist.recv(server_ns, 0)
        after = now()
        round_trips.append((after - before, int(server_ns) - (before + after) // 2))
    duration, skew = min(round_trips)
    return skew, duration // 2 + 1
