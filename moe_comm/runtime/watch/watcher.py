"""Ranks that watch each other and report which rank died or is stuck, and which ranks only wait for it.

    with watching(WatchOptions(), "runs/mine/faults") as watch:     # collective
        for step in range(1, steps + 1):
            with watch.step(step):
                ...                                                 # EVENTS spans record the waits

A thread in every rank publishes a heartbeat and checks the other ranks of its host. It detects the end of a process at
once. It detects a rank that makes no progress when the rank's timeout expires: the process is stopped, a thread holds
the interpreter's lock, or other ranks wait for its main thread. Hosts check each other through the process group's
store. Then every rank writes the same report to a file: which rank waited for which, in which operation, layer,
micro-batch and step, the Python stacks of the culprits, and the last events of all ranks.

The timeout is ``stuck_s``, or ten times the longest pause of the rank in a step so far, if that is longer. Before the
first step has ended and between steps, where ranks compile, evaluate, save and export, it is ``start_s``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store  # there is no public function

from moe_comm.errors import FROM_PEERS, HeapError, MissingDependency, PeerError
from moe_comm.runtime.event_layout import ACTIVE_AT, HEARTBEAT_AT, LONG, Span
from moe_comm.runtime.event_reader import read_calls, read_header, read_open, read_spans
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.launch.agent import NOTICED
from moe_comm.runtime.native_core import native_is_built
from moe_comm.runtime.watch.fault_handler import EARLY, POLL_S, FaultHandler, ProgressTimeout, WatchOptions
from moe_comm.runtime.watch.graph import OpenSpan, RankState, RankStatus, analyse, isolated_host
from moe_comm.runtime.watch.host_heartbeats import HostHeartbeats
from moe_comm.runtime.watch.report import LAST_EVENTS, DetectedFault, describe, fault_json, last_events
from moe_comm.runtime.watch.status_table import Phase, StatusTable, TextGather, gather_texts

CHECK_S = 0.2
"""Minimum time between two searches for a culprit."""
FRESH_S = 1.0
"""A rank whose heartbeat is older than this is not the leader of its host."""
SUSPENDED_S = 1.0
"""If this watcher did not run for this long, the time before does not count against other ranks."""
STACKS_S = 0.3
"""Maximum time to wait for the Python stacks of a stuck rank."""
SETTLE_S = 2.0
"""Maximum time for which a rank that leaves waits for a report, and for its watcher's threads."""
STARVED_S = 1.0
"""The run delay of a main thread is measured once it has made no progress for this long."""
_BY_PHASE: dict[Phase, RankState] = {Phase.LEFT: "left", Phase.FAILED: "failed", Phase.CAUGHT: "caught"}
_LOST = re.compile(
    "closed by peer|reset by peer|read error|write error|broken pipe|connection|gloo|nccl", re.IGNORECASE
)


class StatusReader:
    """Reads the status of the ranks in ``table``; see ``RankStatus`` for ``stopped_s`` and ``start_s``.

    Time before ``since_ns`` does not count as stalled. Set it again when this process itself did not run. ``starved_s``
    is the run delay that the last ``stalled_s`` has subtracted, by rank.
    """

    def __init__(self, table: StatusTable, stopped_s: float, start_s: float, since_ns: int) -> None:
        self.since_ns = since_ns
        self.starved_s: dict[int, float] = {}
        self._table, self._stopped_s, self._start_s = table, stopped_s, start_s
        self._delays: dict[int, tuple[int, int]] = {}

    def stalled_s(self, rank: int, now: int) -> float:
        """Return the seconds since the main thread of a rank last began or ended a span.

        The time that the thread was ready to run but got no core is subtracted: a rank on a busy machine is not stuck.
        """
        active = int(LONG.unpack_from(self._table.region(rank), ACTIVE_AT)[0])
        stalled = max(now - max(active, self.since_ns), 0) / 1e9
        self.starved_s[rank] = 0.0
        if stalled < STARVED_S:
            return stalled
        delay = run_delay_ns(self._table.members[rank].pid)
        last_active, first_delay = self._delays.get(rank, (0, 0))
        if last_active != active:
            self._delays[rank] = (active, delay)
            return stalled
        self.starved_s[rank] = min(max(delay - first_delay, 0) / 1e9, stalled)
        return stalled - self.starved_s[rank]

    def status(self, rank: int, now: int) -> RankStatus:
        """Return the status of a rank of this host at time ``now``, ns."""
        table, member = self._table, self._table.members[rank]
        region, entry = table.region(rank), table.entry(rank)
        header = read_header(region)
        stalled = self.stalled_s(rank, now)
        heartbeat_age = 0.0 if header is None else max(now - max(header.heartbeat_ns, self.since_ns), 0) / 1e9
        state: RankState = _BY_PHASE.get(entry.phase, "alive")
        if state == "alive":
            letter = table.letter(rank) if heartbeat_age > 0.2 or stalled >= entry.timeout_s else ""
            if table.ended(rank):
                state = "ended"
            elif letter in ("T", "t"):
                state = "stopped" if letter == "T" else "traced"
        return RankStatus(
            rank=rank,
            state=state,
            stalled_s=stalled,
            heartbeat_age_s=heartbeat_age,
            timeout_s=entry.timeout_s,
            stopped_s=self._stopped_s,
            start_s=self._start_s,
            step=0 if header is None else header.step,
            open_spans=tuple(open_span(span, now) for span in read_open(region) if not span.thread),
            calls=read_calls(region),
            left_s=(now - entry.left_ns) / 1e9 if entry.left_ns else 0.0,
            message=entry.message,
            host=member.label,
            pid=member.pid,
        )


def open_span(span: Span, now: int) -> OpenSpan:
    """Return a span with its age at time ``now``, ns."""
    age = (now - span.begin_ns) / 1e9
    return OpenSpan(span.kind, span.name, age, span.layer, span.step, span.micro, span.group, span.call, span.peer)


def run_delay_ns(pid: int) -> int:
    """Return how long the main thread of a process was ready but did not run; 0 if the kernel does not report it."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class Watcher:
    """The watcher of this rank, a context manager. ``create`` makes it.

    Args:
        table: the status table of this host.
        folder: folder for reports.
        on_fault: called on every rank with each detected fault, on a separate thread. A culprit is killed when the
            calls of one rank have returned, or half a second later.
        store: connection to the process group's store; None for a single host.
    """

    def __init__(
        self,
        table: StatusTable,
        options: WatchOptions,
        folder: Path,
        on_fault: Sequence[Callable[[DetectedFault], None]] = (),
        store: PrefixStore | None = None,
    ) -> None:
        self.table, self.options = table, options
        self._since = self._last_poll_ns = time.monotonic_ns()
        self._reported: dict[int, tuple[str, int]] = {}
        self._next_check_ns = 0
        self._done = False
        self._hosts: HostHeartbeats | None = None
        self._relayed: dict[int, str] = {}
        self._suspected_ns = 0
        self._reader = StatusReader(table, EARLY * options.stuck_s, options.start_s, self._since)
        self._own = table.region(table.rank)
        EVENTS.attach(self._own, table.rank, table.records)
        LONG.pack_into(self._own, HEARTBEAT_AT, self._last_poll_ns)  # without it, this rank could not be the leader
        self._timeout = ProgressTimeout(table, options)
        self._faults = FaultHandler(table, options, folder, on_fault, self._is_leader)
        if store is not None:
            number = next(n for n, ranks in enumerate(table.hosts) if table.rank in ranks)
            members = [RankStatus(member.rank, host=member.label, pid=member.pid) for member in table.members]
            self._hosts = HostHeartbeats(
                store, number, table.hosts, self._local_statuses, self._is_leader, options.stuck_s, members
            )
        self._thread = threading.Thread(target=self._run, name="moe_comm-watch", daemon=True)

    @classmethod
    def create(
        cls,
        options: WatchOptions,
        folder: str | Path,
        on_fault: Sequence[Callable[[DetectedFault], None]] = (),
        *,
        gather: TextGather = gather_texts,
        host: str | None = None,
    ) -> Self:
        """Create and start the watchers of all ranks of the default process group. Collective.

        Args:
            folder: folder for reports; created with the first report.
            on_fault: see the class.
            gather: all-gathers one text per rank.
            host: ranks with an equal value share a status table. None: ranks that see each other's processes.
        """
        built = gather("built" if native_is_built() else "")
        if not all(built):
            raise MissingDependency(
                f"rank {built.index('')} has no native core (moe_comm._C), which watching needs; "
                "run `pip install -e .` there"
            )
        table = StatusTable.create(dist.get_rank(), gather, records=options.records, host=host)
        store: PrefixStore | None = None
        problem = ""
        if len(table.hosts) > 1:
            session = gather(os.urandom(8).hex())[0]
            try:
                store = PrefixStore(f"moe_comm/watch/{session}", _own_store())
                for number, ranks in enumerate(table.hosts):
                    if table.rank == ranks[0]:
                        HostHeartbeats.announce(store, number)
            except (RuntimeError, OSError) as error:  # raised below, after the collective call of the other ranks
                problem = f"rank {table.rank} cannot use the store of the process group: {error}"[:200]
        watcher = cls(table, options, Path(folder), on_fault, store)
        # This also waits until all ranks record into their tables.
        if problems := [text for text in gather(problem) if text]:
            table.close()
            raise HeapError(problems[0])
        watcher.start()
        return watcher

    @property
    def fault(self) -> DetectedFault | None:
        """The newest detected fault."""
        return self._faults.fault

    @property
    def timeout_s(self) -> float:
        """Seconds that this rank may make no progress in a step while others wait for it."""
        return self._timeout.timeout_s

    def start(self) -> None:
        EVENTS.enabled = True  # the other ranks need the spans of this rank
        self._since = self._reader.since_ns = time.monotonic_ns()
        self._thread.start()
        if self._hosts is not None:
            self._hosts.start()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context manager around training step ``step``, for any training loop."""
        self.begin_step()
        EVENTS.begin_step(step)
        yield
        self.end_step()

    def begin_step(self) -> None:
        """Begin a step. The short timeout applies from the second step on."""
        self._timeout.begin()

    def end_step(self) -> None:
        """End a step. ``start_s`` applies until the next one begins."""
        self._timeout.end()

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching.

        Args:
            error: the error that ends this rank. If another rank caused it, wait up to ``SETTLE_S`` for the report.
        """
        if self._done:
            return
        if isinstance(error, Exception):
            message = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            if _is_from_peers(error):
                self.table.leave(Phase.CAUGHT, f"in {self._last_wait()} {message}")
                self.table.wake()
                self._faults.reported.wait(SETTLE_S)
            else:
                self.table.leave(Phase.FAILED, message)
        else:
            self.table.leave(Phase.LEFT)
        self._done = True
        self.table.wake()
        self._thread.join(SETTLE_S)
        self._faults.close(SETTLE_S)
        if self.table.entry(self.table.rank).phase == Phase.CAUGHT:
            self.table.leave(Phase.LEFT)
        if self._hosts is not None:
            self._hosts.close()
        if not self._thread.is_alive():
            self.table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._done:
            return
        self.close(error)
        if self.fault is None or not isinstance(error, Exception):
            return
        hint = f"{NOTICED}{self.fault.summary}; report: {self.fault.path}"
        if isinstance(error, PeerError) and len(error.args) == 1:
            error.args = (f"{error.args[0]} {hint}",)
        else:
            error.add_note(hint)

    # --- the thread ---

    def _run(self) -> None:
        failures = 0
        while not self._done and failures < 3:
            self.table.wait(POLL_S)
            try:
                self._poll(time.monotonic_ns())
            except Exception:
                failures += 1
                print(f"rank {self.table.rank}: watching failed\n{traceback.format_exc()}", file=sys.stderr)
        if failures:
            self.table.leave(Phase.LEFT)

    def _poll(self, now: int) -> None:
        if now - self._last_poll_ns > SUSPENDED_S * 1e9:
            self._since = self._reader.since_ns = now
        self._last_poll_ns = now
        LONG.pack_into(self._own, HEARTBEAT_AT, now)
        self._timeout.measure(now, self._since)
        if self._hosts is not None:
            self._relay_faults(self._hosts)
        if number := self._faults.pending:
            self._faults.handle(number)
        elif not self._faults.stopping and now >= self._next_check_ns and self._is_leader():
            if self._needs_check(now):
                self._next_check_ns = now + int(CHECK_S * 1e9)
                self._check(now)
            else:
                self._suspected_ns = 0
        if self._faults.stopping and self.options.end:
            self._faults.exit_if_waiting(now)

    def _needs_check(self, now: int) -> bool:
        """Whether some rank may have a fault. Cheap."""
        if self._hosts is not None and self._hosts.needs_check():
            return True
        for rank in self.table.local_ranks:
            entry = self.table.entry(rank)
            if entry.phase in (Phase.LEFT, Phase.CAUGHT):
                continue
            heartbeat = LONG.unpack_from(self.table.region(rank), HEARTBEAT_AT)[0]
            stalled = self._reader.stalled_s(rank, now)
            is_late = now - max(heartbeat, self._since) > FRESH_S * 1e9
            timeout = min(entry.timeout_s, self.options.stuck_s * EARLY if is_late else math.inf)
            if self.table.ended(rank) or entry.phase == Phase.FAILED or stalled >= timeout:
                return True
        return False

    def _is_leader(self) -> bool:
        """Whether this rank is the leader of its host: the first rank that runs and has not left."""
        for rank in self.table.local_ranks:
            if rank == self.table.rank:
                return True
            heartbeat = LONG.unpack_from(self.table.region(rank), HEARTBEAT_AT)[0]
            fresh = time.monotonic_ns() - heartbeat < FRESH_S * 1e9
            has_left = self.table.ended(rank) or self.table.entry(rank).phase in (Phase.LEFT, Phase.FAILED)
            if fresh and not has_left:
                return False
        return False

    def _local_statuses(self) -> list[RankStatus]:
        """Return the status of all ranks of this host."""
        return [self._reader.status(rank, time.monotonic_ns()) for rank in self.table.local_ranks]

    def _check(self, now: int) -> None:
        """As the leader of this host, look for a culprit and post the fault."""
        statuses = self._local_statuses()
        if self._hosts is not None:
            statuses += self._hosts.statuses()
        verdict = analyse(statuses)
        if verdict is None and self._hosts is not None:
            silent_s, timeout_s = self._hosts.store_silent_s, self._hosts.isolation_timeout_s
            if silent_s >= timeout_s:
                verdict = isolated_host(statuses, self.table.local_ranks, silent_s, timeout_s)
        if verdict is None:
            self._suspected_ns = 0
            return
        local = [rank for rank in verdict.ranks if rank in self.table.local_ranks]
        if not local:  # give the host of the culprit the time to post it first
            self._suspected_ns = self._suspected_ns or now
            if now - self._suspected_ns < FRESH_S * 1e9:
                return
        else:
            self._suspected_ns = 0
        states = dict.fromkeys(verdict.ranks, (verdict.kind, -verdict.step))  # for ranks of other hosts
        states |= {rank: (verdict.kind, LONG.unpack_from(self.table.region(rank), ACTIVE_AT)[0]) for rank in local}
        if all(self._reported.get(rank) == state for rank, state in states.items()):
            return
        kills = self.options.end and verdict.kind == "stuck"
        kills = kills and not any(status.state == "left" for status in statuses if status.rank in verdict.ranks)
        stops = kills or verdict.kind in ("died", "error") or (verdict.kind == "unreachable" and self.options.end)
        stacks = {}
        if verdict.kind == "stuck":
            stacks = {rank: self.table.stacks(rank, STACKS_S, resume=kills) for rank in local}
        # If ranks wait for each other, the end of one of them ends the waits of all.
        cycle = all(rank in verdict.waits_for for rank in verdict.ranks)
        victims = verdict.ranks[:1] if cycle else verdict.ranks
        starved = self._reader.starved_s.get(verdict.ranks[0], 0.0) if verdict.kind == "stuck" else 0.0
        fault = DetectedFault(
            kind=verdict.kind,
            ranks=verdict.ranks,
            summary=verdict.summary,
            step=verdict.step,
            action="stop" if stops else "none",
            healthy_ns=now - int((verdict.stalled_s + starved) * 1e9),
            report=describe(verdict, statuses, stacks) + self._last_events(now),
        )
        if self._post_fault(fault, victims if kills else ()):
            self._reported |= states

    def _post_fault(self, fault: DetectedFault, victims: Sequence[int]) -> bool:
        """Post a fault to all ranks. False if another rank of this host has posted one first.

        Two ranks may both consider themselves the leader for a moment, for example after both were suspended.
        """
        text = fault_json(asdict(fault) | {"reporter": self.table.rank, "victims": list(victims)})
        number = self.table.post_fault(text, self._faults.handled)
        if not number:
            return False
        if self._hosts is not None:
            self._hosts.publish_fault(text)
        self._faults.handle(number)
        self.table.wake()
        return True

    def _relay_faults(self, hosts: HostHeartbeats) -> None:
        """As the leader, post the faults that other hosts have published on this host, if it has not posted them."""
        for number, text in hosts.faults().items():
            if self._relayed.get(number) == text or not self._is_leader():
                continue
            values = json.loads(text)
            fault = self._faults.fault
            is_known = self._faults.stopping or (fault is not None and tuple(values["ranks"]) == fault.ranks)
            if not is_known:
                local = {"report": values["report"] + self._last_events(time.monotonic_ns()), "healthy_ns": 0}
                if not self.table.post_fault(fault_json(values | local), self._faults.handled):
                    return  # handle the fault that another rank has posted first
            self._relayed[number] = text
            self._reported |= dict.fromkeys(values["ranks"], (values["kind"], -values["step"]))
            if not is_known:
                return  # handle it before the next one

    def _last_wait(self) -> str:
        """Return the last operation in which the main thread of this rank waited for others."""
        now = time.monotonic_ns()
        spans = [span for span in read_spans(self._own, LAST_EVENTS) if span.kind.is_communication and not span.thread]
        return f"{open_span(spans[-1], now)}:" if spans else ""

    def _last_events(self, now: int) -> str:
        """Return the last events of all ranks of this host as text."""
        table = self.table
        return last_events({rank: read_spans(table.region(rank), LAST_EVENTS) for rank in table.local_ranks}, now)


def _is_from_peers(error: Exception) -> bool:
    """Whether another rank has caused an error. Torch raises errors of connections as plain ``RuntimeError``."""
    from_torch = type(error) is RuntimeError or isinstance(error, DistError)
    return isinstance(error, FROM_PEERS) or (from_torch and _LOST.search(str(error)) is not None)


def _own_store() -> Store:
    """Return a new connection to the store of the default process group. Calls on a shared connection block each
    other."""
    store: Any = _get_default_store()
    connection: Store = store.clone() if hasattr(store, "clone") else store
    return connection


def watching(
    options: WatchOptions | None = None,
    folder: str | Path = "faults",
    on_fault: Sequence[Callable[[DetectedFault], None]] = (),
) -> Watcher:
    """Watch the ranks of the default process group: ``with watching(...) as watch``. Collective.

    Args:
        options: timeouts and reaction; None for the defaults.
        folder: folder for reports; created with the first report.
        on_fault: called on every rank with each detected fault, on a separate thread.

    Returns:
        A context manager. Call its ``step`` around each training step.
    """
    return Watcher.create(options or WatchOptions(), folder, on_fault)
