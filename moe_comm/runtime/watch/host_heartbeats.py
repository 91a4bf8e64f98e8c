"""Heartbeats between hosts: the leader of each host publishes its host's status in the process group's store.

    leader of host 0 ──set──▶ store  moe_comm/watch/<session>/0 = {"heartbeat": ..., "statuses": [...], "fault": ...}
    leader of host 1 ──set──▶        moe_comm/watch/<session>/1
          all leaders ◀──multi_get── the entries of the other hosts

A host without heartbeats may be down, or only its link. Its ranks are reported as unreachable, not as dead. The host on
the other side of a broken link cannot reach the store. It considers itself isolated if its ranks wait for other hosts.
It decides so later than the other hosts: the store may also be silent because the rank that serves it is stopped, and
that rank's own host ends it.

A separate thread with its own connection does this, because the main thread may wait in the store for minutes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed import Store

from moe_comm.runtime.events import add_lock
from moe_comm.runtime.watch.graph import RankStatus
from moe_comm.runtime.watch.report import statuses_from_json, statuses_to_json

PERIOD_S = 0.25
FREE_HOSTS = 16
"""With more hosts, the period grows with their number: each host reads the entries of all others."""
ENDING_S = 2.0
"""Additional time after ``timeout_s`` in which a host kills a stopped rank that serves the store."""


@dataclass
class _Host:
    """The last entry of another host, and when it changed (``time.monotonic``)."""

    heartbeat: int
    changed_s: float
    statuses: list[RankStatus]
    fault: str = ""

    @property
    def has_left(self) -> bool:
        return all(status.state in ("left", "failed", "caught") for status in self.statuses)


class HostHeartbeats:
    """Exchanges the status of this host with that of the other hosts.

    Args:
        store: a connection that only this object uses.
        number: index of this host in ``hosts``.
        hosts: ranks of each host.
        statuses: returns the status of the ranks of this host.
        is_leader: returns whether this rank is currently the leader of its host.
        timeout_s: a host without heartbeats for this long is unreachable.
        members: name and pid of each rank, for hosts that have not published a status yet.
    """

    _lock: threading.Lock

    def __init__(
        self,
        store: Store,
        number: int,
        hosts: Sequence[Sequence[int]],
        statuses: Callable[[], list[RankStatus]],
        is_leader: Callable[[], bool],
        timeout_s: float,
        members: Sequence[RankStatus],
    ) -> None:
        self._store = store
        self._number, self._hosts = number, hosts
        self._statuses, self._is_leader, self._timeout_s = statuses, is_leader, timeout_s
        self._fault = ""
        self._answered_s = self._asked_s = 0.0
        by_rank = {status.rank: status for status in members}
        self._others = {
            other: _Host(0, 0.0, [by_rank[rank] for rank in ranks])
            for other, ranks in enumerate(hosts)
            if other != number
        }
        add_lock(self, "_lock")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe_comm-watch-hosts", daemon=True)

    @staticmethod
    def announce(store: Store, number: int) -> None:
        """Create the entry of a host. Required before any host starts to read."""
        store.set(str(number), "")

    def start(self) -> None:
        self._thread.start()

    def publish_fault(self, fault: str) -> None:
        """Send a fault (JSON) to the other hosts."""
        self._fault = fault

    @property
    def period_s(self) -> float:
        return PERIOD_S * max(1.0, len(self._hosts) / FREE_HOSTS)

    def faults(self) -> dict[int, str]:
        """Return the faults that other hosts have published, by host."""
        with self._lock:
            return {number: host.fault for number, host in self._others.items() if host.fault}

    @property
    def store_silent_s(self) -> float:
        """Seconds since the oldest unanswered request to the store."""
        asked_s = self._asked_s
        return time.monotonic() - asked_s if asked_s else 0.0

    @property
    def isolation_timeout_s(self) -> float:
        """Seconds without an answer of the store after which this host is isolated, if its ranks wait for others."""
        return 2 * self._timeout_s + ENDING_S

    def needs_check(self) -> bool:
        """Whether another host may have a fault. Cheap."""
        if self.store_silent_s >= self.isolation_timeout_s:
            return True
        with self._lock:
            return any(
                (self._age_s(host) >= self._timeout_s and not host.has_left)
                or any(status.state in ("ended", "failed") for status in host.statuses)
                for host in self._others.values()
            )

    def statuses(self) -> list[RankStatus]:
        """Return the last status of the ranks of other hosts. Ranks of a host without heartbeats are unreachable."""
        results: list[RankStatus] = []
        with self._lock:
            for host in self._others.values():
                age = self._age_s(host)
                if age < self._timeout_s:
                    # The ranks may have made progress since the heartbeat, so a late one must not make them stuck.
                    silent_s = min(age, 2 * self.period_s)
                    results += [
                        replace(
                            status,
                            stalled_s=status.stalled_s + silent_s,
                            heartbeat_age_s=status.heartbeat_age_s + silent_s,
                        )
                        for status in (host.statuses if host.heartbeat else [])
                    ]
                elif not host.has_left:
                    message = f"no heartbeat from {host.statuses[0].host} for {age:.1f} s"
                    results += [
                        replace(status, state="unreachable", message=message, stalled_s=age, heartbeat_age_s=age)
                        if status.state in ("alive", "stopped", "traced")
                        else status
                        for status in host.statuses
                    ]
        return results

    def close(self) -> None:
        self._done.set()
        self._thread.join(1.0)

    def _age_s(self, host: _Host) -> float:
        """Seconds between the last change of a host's entry and the last answer of the store."""
        return self._answered_s - host.changed_s

    def _run(self) -> None:
        other_hosts = [number for number in range(len(self._hosts)) if number != self._number]
        while not self._done.wait(self.period_s):
            try:
                if self._is_leader():
                    self._asked_s = self._asked_s or time.monotonic()
                    self._exchange(other_hosts)
                self._asked_s = 0.0
            except Exception:  # the rank that serves the store may have failed, or this process is ending
                pass
        with contextlib.suppress(Exception):
            # The last rank of a host to leave must publish that. Earlier ones must not: this entry could arrive after
            # a newer one of another rank.
            statuses = self._statuses()
            if self._fault or all(status.state in ("left", "failed", "ended") for status in statuses):
                self._publish(statuses)

    def _publish(self, statuses: Sequence[RankStatus]) -> None:
        # All ranks of a host share this clock, and it is monotonic.
        heartbeat = time.monotonic_ns()
        entry = {"heartbeat": heartbeat, "statuses": statuses_to_json(statuses), "fault": self._fault}
        self._store.set(str(self._number), json.dumps(entry))

    def _exchange(self, other_hosts: Sequence[int]) -> None:
        self._publish(self._statuses())
        answers = self._store.multi_get([str(number) for number in other_hosts])
        now = time.monotonic()
        with self._lock:
            # If the store was slow or this process did not run, other hosts may have been delayed as well.
            late_s = max(0.0, now - self._answered_s - 2 * self.period_s) if self._answered_s else now
            self._answered_s = now
            for host in self._others.values():
                host.changed_s = min(now, host.changed_s + late_s)
            for number, answer in zip(other_hosts, answers, strict=True):
                if not answer:
                    continue
                entry = json.loads(answer)
                if self._others[number].heartbeat < entry["heartbeat"]:
                    statuses = statuses_from_json(entry["statuses"])
                    self._others[number] = _Host(entry["heartbeat"], now, statuses, entry["fault"])
