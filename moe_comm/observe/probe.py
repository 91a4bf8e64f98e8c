"""How long a message of fixed size takes from each host to each other one, while a run goes on.

    round k of hosts - 1:   barrier;   host i ── PROBE_BYTES ──▶ host i + k        all at once: each link once each way

The first rank of each host probes. The receiver measures, from the barrier's end until the message is there. There is
no answer: it would queue behind the answerer's own message, and a slow sender would look like a slow receiver too.
Ranks of one host have no link between them, and probe nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import moving
from moe_comm.runtime.group_names import group_of

PROBE_BYTES = 256 << 10
"""2 ms at 1 Gbit/s, 5 us at 400 Gbit/s: far above what a message costs by itself on the first, below on the second."""


def first_ranks(hosts: Sequence[str]) -> list[int]:
    """The first rank of each host, given each rank's host."""
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())


class Probe:
    """Probes between the hosts of ``group``. Every rank makes one and calls it alike. Collective.

    Args:
        hosts: of each rank of the group, in order.
        group: None: the default one. Of a backend that moves CPU tensors, such as gloo.
    """

    def __init__(self, hosts: Sequence[str], group: ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
        self._ends = first_ranks(hosts)
        self._rank = dist.get_rank(group)
        self._timeout = timedelta(seconds=timeout_s)
        # Of its own, so that what a probe waits for is never a message of training. All ranks make it.
        self._group: ProcessGroup | None = dist.new_group(
            [dist.get_global_rank(group, rank) if group is not None else rank for rank in self._ends],
            backend="gloo",
            timeout=self._timeout,
        )
        self._message = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        self._room = torch.empty_like(self._message)

    @property
    def takes_part(self) -> bool:
        """Whether this rank probes at all."""
        return len(self._ends) > 1 and self._rank in self._ends

    def __call__(self) -> dict[int, float]:
        """Seconds from the first rank of every other host; {} on ranks that do not probe. Collective.

        Raises:
            RuntimeError: of the backend, where a host is gone or takes longer than the timeout.
        """
        if not self.takes_part:
            return {}
        place = self._ends.index(self._rank)
        number = len(self._ends)
        found = {}
        for distance in range(1, number):
            target, source = (place + distance) % number, (place - distance) % number
            # A call of the group that is recorded, so that a watcher knows for whom a rank waits here.
            with moving(Kind.COLLECTIVE, "probe between hosts", group=group_of(self._group)):
                # So that no host begins while another is still at the training step: its lateness is not the link's.
                dist.barrier(self._group)
                began = time.perf_counter()
                pending = dist.irecv(self._room, group=self._group, group_src=source, tag=distance)
                sent = dist.isend(self._message, group=self._group, group_dst=target, tag=distance)
                _wait(pending)
                found[self._ends[source]] = time.perf_counter() - began
                _wait(sent)
        return found

    def close(self) -> None:
        """Give up the group. A second call does nothing."""
        group, self._group = self._group, None
        if self.takes_part and group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()
