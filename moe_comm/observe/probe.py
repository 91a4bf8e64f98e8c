"""Measure the time of a message of fixed size between each pair of hosts during a run.

    round k of hosts - 1:   barrier;   host i ── PROBE_BYTES ──▶ host i + k        all hosts at once, each link once

The first rank of each host probes. The receiver measures the time from the end of the barrier until the message is
complete. There is no reply: it would queue behind the message of its sender, so that a slow sender would also look like
a slow receiver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span
from moe_comm.runtime.groups import group_of
from moe_comm.runtime.seconds import seconds_of

PROBE_BYTES = 256 << 10
"""2 ms at 1 Gbit/s, far above the latency of a message; 5 us at 400 Gbit/s, below it."""


def first_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each host, given the host of each rank."""
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())


class Probe:
    """Probe the links between the hosts of ``group``. All ranks construct and call it. Collective.

    Args:
        hosts: host of each rank of the group, in rank order.
        group: a group whose backend supports CPU tensors, such as gloo; None: the default group.
        timeout_s: timeout of a probe in seconds.
    """

    def __init__(self, hosts: Sequence[str], group: ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
        self._ends = first_ranks(hosts)
        self._rank = dist.get_rank(group)
        self._timeout = timedelta(seconds=seconds_of("timeout_s", timeout_s))
        # A separate group, so that probes never wait for messages of training. All ranks construct it.
        self._group: ProcessGroup | None = dist.new_group(
            [dist.get_global_rank(group, rank) if group is not None else rank for rank in self._ends],
            backend="gloo",
            timeout=self._timeout,
        )
        self._message = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cpu")
        self._received = torch.empty_like(self._message)

    @property
    def takes_part(self) -> bool:
        """Whether this rank probes."""
        return len(self._ends) > 1 and self._rank in self._ends

    def __call__(self) -> dict[int, float]:
        """Return the seconds of a message from the first rank of each other host, by rank. Collective.

        Ranks that do not probe return {}.
        """
        if not self.takes_part:
            return {}
        index = self._ends.index(self._rank)
        hosts = len(self._ends)
        seconds = {}
        for distance in range(1, hosts):
            target, source = (index + distance) % hosts, (index - distance) % hosts
            # A recorded call of the group, so that the watcher knows which rank this one waits for.
            with communication_span(Kind.COLLECTIVE, "probe between hosts", group=group_of(self._group)):
                # All hosts begin together: the delay of a host in the training step must not count for the link.
                dist.barrier(self._group)
                began = time.perf_counter()
                pending = dist.irecv(self._received, group=self._group, group_src=source, tag=distance)
                sent = dist.isend(self._message, group=self._group, group_dst=target, tag=distance)
                _wait(pending)
                seconds[self._ends[source]] = time.perf_counter() - began
                _wait(sent)
        return seconds

    def close(self) -> None:
        """Destroy the group. A second call does nothing."""
        group, self._group = self._group, None
        if self.takes_part and group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()
