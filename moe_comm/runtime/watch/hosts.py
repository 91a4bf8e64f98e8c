"""Hosts that watch each other: one rank of each tells its host's state in the group's store and reads the others'.

    host 0, its lead ──set──▶ store  moe_comm/watch/<session>/0 = {"beat": ..., "views": [...], "notice": ...}
    host 1, its lead ──set──▶        moe_comm/watch/<session>/1
              all ◀──multi_get──     those of the other hosts

A host that says nothing may be down, or only the link to it: its ranks are unreachable, and nobody says that they have
died. The host at the other end of such a link hears no store; it is cut off, and its ranks that wait for others learn
of it later than those, since a store may also be silent because who keeps it is stopped, which its own host ends.

It goes over a connection of its own on a thread of its own: the main thread may wait in the store for minutes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed import Store

from moe_comm.runtime.watch.graph import View
from moe_comm.runtime.watch.report import views_from_json, views_to_json

PERIOD_S = 0.25
FREE_HOSTS = 16
"""With more, the period grows with their number: each reads what all others say."""
ENDING_S = 2.0
"""A rank that was stopped and keeps the store is ended by its host within ``gone_s`` and about so long."""


@dataclass
class _Host:
    beat: int
    changed_s: float
    views: list[View]
    notice: str = ""

    @property
    def is_odd(self) -> bool:
        return any(view.fate in ("ended", "failed") for view in self.views)

    @property
    def has_left(self) -> bool:
        return all(view.fate in ("left", "failed", "caught") for view in self.views)


class HostBeats:
    """This host among the others.

    number: which host this is, from 0. first: a rank of each host. views: of this host's ranks. leads: whether this
    rank speaks for its host now. gone_s: a host without beats for this long is gone. members: how every rank is named
    before its host has said anything.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        hosts: Sequence[Sequence[int]],
        views: Callable[[], list[View]],
        leads: Callable[[], bool],
        gone_s: float,
        members: Sequence[View],
    ) -> None:
        self._store = store
        self._number, self._hosts = number, hosts
        self._views, self._leads, self._gone_s = views, leads, gone_s
        self._notice = ""
        self._heard_s = self._asked_s = 0.0
        names = {view.rank: view for view in members}
        self._known = {
            other: _Host(0, 0.0, [names[rank] for rank in ranks])
            for other, ranks in enumerate(hosts)
            if other != number
        }
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe_comm-watch-hosts", daemon=True)

    @staticmethod
    def announce(store: Store, number: int) -> None:
        """Leave something to read; before any host starts."""
        store.set(str(number), "")

    def start(self) -> None:
        self._thread.start()

    def tell(self, notice: str) -> None:
        """Pass ``notice`` on to the other hosts."""
        self._notice = notice

    @property
    def period_s(self) -> float:
        return PERIOD_S * max(1.0, len(self._hosts) / FREE_HOSTS)

    def notices(self) -> dict[int, str]:
        """What other hosts have told, by host."""
        with self._lock:
            return {number: host.notice for number, host in self._known.items() if host.notice}

    @property
    def mute_s(self) -> float:
        """For how long the store has not answered this rank, which asks it all the time."""
        asked = self._asked_s
        return time.monotonic() - asked if asked else 0.0

    @property
    def cut_s(self) -> float:
        """After so long without the store this host is cut off, if its ranks wait for others."""
        return 2 * self._gone_s + ENDING_S

    def is_odd(self) -> bool:
        """A quick look whether there is something to judge on other hosts."""
        if self.mute_s >= self.cut_s:
            return True
        with self._lock:
            hosts = list(self._known.values())
            return any(host.is_odd or (self._age_s(host) >= self._gone_s and not host.has_left) for host in hosts)

    def others(self) -> list[View]:
        """Ranks of other hosts as far as known. Those of a host without beats are unreachable."""
        found: list[View] = []
        with self._lock:
            for host in self._known.values():
                age = self._age_s(host)
                if age < self._gone_s:
                    # That a host is not heard for longer than usual does not make its ranks stuck.
                    more = min(age, 2 * self.period_s)
                    views = host.views if host.beat else []
                    found += [
                        replace(view, silent_s=view.silent_s + more, unbeaten_s=view.unbeaten_s + more)
                        for view in views
                    ]
                elif not host.has_left:
                    words = f"nothing was heard of {host.views[0].host} for {age:.1f} s"
                    found += [
                        replace(view, fate="unreachable", words=words, silent_s=age, unbeaten_s=age)
                        if view.fate in ("alive", "stopped", "traced")
                        else view
                        for view in host.views
                    ]
        return found

    def close(self) -> None:
        self._done.set()
        self._thread.join(1.0)

    def _age_s(self, host: _Host) -> float:
        """For how long it has said nothing; what this host could not hear does not count."""
        return self._heard_s - host.changed_s

    def _run(self) -> None:
        others = [number for number in range(len(self._hosts)) if number != self._number]
        while not self._done.wait(self.period_s):
            try:
                if self._leads():
                    self._asked_s = self._asked_s or time.monotonic()
                    self._exchange(others)
                self._asked_s = 0.0
            except Exception:  # whoever kept the store may have died, or the process is ending
                pass
        with contextlib.suppress(Exception):
            # Whoever leaves last says so: nobody will later. If another did, it could come after what is said then.
            views = self._views()
            if self._notice or all(view.fate in ("left", "failed", "ended") for view in views):
                self._say(views)

    def _say(self, views: Sequence[View]) -> None:
        # The clock is that of all ranks of a host, and never goes back.
        said = {"beat": time.monotonic_ns(), "views": views_to_json(views), "notice": self._notice}
        self._store.set(str(self._number), json.dumps(said))

    def _exchange(self, others: Sequence[int]) -> None:
        self._say(self._views())
        answers = self._store.multi_get([str(number) for number in others])
        now = time.monotonic()
        with self._lock:
            # The store was slow, or this process not run: others may have been kept from speaking as well.
            deaf_s = max(0.0, now - self._heard_s - 2 * self.period_s) if self._heard_s else now
            self._heard_s = now
            for host in self._known.values():
                host.changed_s = min(now, host.changed_s + deaf_s)
            for number, answer in zip(others, answers, strict=True):
                if not answer:
                    continue
                told = json.loads(answer)
                if self._known[number].beat < told["beat"]:
                    views = views_from_json(told["views"])
                    self._known[number] = _Host(told["beat"], now, views, told["notice"])
