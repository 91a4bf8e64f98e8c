"""The graph of waits between ranks, and the search for the culprit: the rank that waits for no other rank.

    rank 0  in all_reduce, call 7 of {0,1} ──▶ rank 1, which has begun 6 calls of {0,1}
    rank 1  in dispatch, call 3 of {1,2}   ──▶ rank 2, which has begun 2 calls of {1,2}
    rank 2  in no collective, no progress for 5 s     ◀── the culprit (MegaScale, arXiv 2402.15627, section 5)

``analyse`` depends only on its arguments; it reads no clock and no process state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from moe_comm.runtime.event_layout import Kind

RankState = Literal["alive", "stopped", "traced", "ended", "unreachable", "left", "failed", "caught"]
"""State of a rank:

alive        its process runs
stopped      stopped by a signal
traced       stopped by a debugger
ended        its process has ended
unreachable  its host sends no heartbeats; the process may run
left         it has finished and is no longer watched
failed       it left with an error of its own
caught       it left with an error that another rank caused
"""
VerdictKind = Literal["died", "unreachable", "stuck", "error"]
SLOW_KINDS = frozenset({Kind.DATA, Kind.CHECKPOINT, Kind.PAUSE})
"""Kinds of spans that may take long (disk, garbage collection) although the rank is healthy."""

Group = tuple[int, ...]
Waits = Mapping[int, tuple[int, ...]]
"""The ranks that each rank waits for, for the ranks that wait."""


@dataclass(frozen=True)
class OpenSpan:
    """An open span of a rank's main thread; see ``event_layout.Span``."""

    kind: Kind
    name: str
    age_s: float
    layer: str = ""
    step: int = 0
    micro: int = 0
    group: Group = ()
    call: int = 0
    peer: int = -1

    def __str__(self) -> str:
        where = [f"layer {self.layer}"] if self.layer else []
        where += [f"micro-batch {self.micro}", f"step {self.step}"]
        where += [f"call {self.call} of ranks {_abridged_ranks(self.group)}"] if self.group else []
        return f"{self.kind.name.lower()} {self.name!r} ({', '.join(where)}) for {self.age_s:.1f} s"


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank. ``calls`` is the number of calls that it has begun, by group and kind."""

    rank: int
    state: RankState = "alive"
    stalled_s: float = 0.0  # seconds since the main thread last began or ended a span
    heartbeat_age_s: float = 0.0  # seconds since the rank's watcher last ran
    timeout_s: float = 5.0  # longest ``stalled_s`` of a healthy rank that others wait for
    stopped_s: float = 5.0  # the same for a stopped process
    start_s: float = 300.0  # the same for a rank that has left, or that is in a span of ``SLOW_KINDS``
    step: int = 0
    open_spans: tuple[OpenSpan, ...] = ()  # open spans of the main thread, outermost first
    calls: Mapping[tuple[Group, Kind], int] = field(default_factory=dict)
    left_s: float = 0.0  # seconds since the rank left
    message: str = ""  # the error with which it left, or why it is unreachable
    host: str = ""
    pid: int = 0

    @property
    def wait(self) -> OpenSpan | None:
        """The innermost open span that moves data between ranks."""
        return next((span for span in reversed(self.open_spans) if span.kind.is_communication), None)

    @property
    def shared_operation(self) -> OpenSpan | None:
        """The innermost open span of a call of a group: ``wait``, or one such as a checkpoint, in which background
        threads communicate."""
        return self.wait or next((span for span in reversed(self.open_spans) if span.group), None)

    @property
    def is_frozen(self) -> bool:
        """Whether none of its Python threads runs: it is stopped, or one thread holds the interpreter's lock."""
        return self.state == "stopped" or min(self.heartbeat_age_s, self.stalled_s) >= self.timeout_s

    @property
    def may_be_slow(self) -> bool:
        """Whether a span of ``SLOW_KINDS`` is open."""
        return any(span.kind in SLOW_KINDS for span in self.open_spans)


@dataclass(frozen=True)
class Verdict:
    """The result of ``analyse``."""

    kind: VerdictKind
    ranks: tuple[int, ...]  # the culprits, or the unreachable ranks
    summary: str  # one sentence
    step: int  # training step of the first culprit
    stalled_s: float  # seconds since the last progress of the first of ``ranks``
    waits_for: Waits  # the ranks that each rank waits for


def analyse(statuses: Sequence[RankStatus]) -> Verdict | None:
    """Return the culprits, or None if all ranks are healthy or the ranks waited for are within their timeouts."""
    by_rank = {status.rank: status for status in statuses}
    waits_for = waits(statuses)
    reachable = {rank: _reachable(rank, waits_for) for rank in waits_for}
    longest_waits = _longest_waits(by_rank, reachable)
    died = [status for status in statuses if status.state == "ended"]
    if died:
        return _verdict("died", died, f"{_name_ranks(died)} died", waits_for)
    lost = [status for status in statuses if status.state == "unreachable"]
    if lost:
        why = f"{lost[0].message}; it is down, or the link to it" if lost[0].message else "the host or its link is down"
        step = max(status.step for status in statuses)  # the last status of the lost ranks may be old
        summary = f"{_name_ranks(lost)} cannot be reached: {why}"
        return replace(_verdict("unreachable", lost, summary, waits_for), step=step)
    failed = sorted((status for status in statuses if status.state == "failed"), key=lambda status: -status.left_s)
    if failed and (failed[0].rank in longest_waits or any(status.state == "caught" for status in statuses)):
        first = failed[:1]
        return _verdict("error", first, f"{_name_ranks(first)} left with {first[0].message or 'an error'}", waits_for)
    stopped = [
        status
        for status in statuses
        if status.state == "stopped" and min(status.stalled_s, status.heartbeat_age_s) >= status.stopped_s
    ]
    if stopped:
        return _verdict("stuck", stopped, f"{_name_ranks(stopped)} is stuck: stopped by a signal", waits_for)
    stuck = [status for status in statuses if _is_stuck(status, waits_for, longest_waits)]
    if stuck:
        summary = "; ".join(f"{_name_ranks([status])} is stuck: {_describe_stuck(status)}" for status in stuck)
        return _verdict("stuck", stuck, summary, waits_for)
    for cycle in _cycles(by_rank, reachable):
        if all(status.stalled_s >= status.timeout_s and not status.may_be_slow for status in cycle):
            operations = "; ".join(f"rank {status.rank} in {status.shared_operation}" for status in cycle)
            summary = f"ranks wait for each other in different operations: {operations}"
            return _verdict("stuck", cycle, summary, waits_for)
    return None


def isolated_host(
    statuses: Sequence[RankStatus], local_ranks: Sequence[int], store_silent_s: float, stalled_s: float
) -> Verdict | None:
    """Return a verdict that this host is isolated, or None.

    It is isolated if one of its ranks has waited for ranks of other hosts for ``stalled_s`` and beyond its timeout.

    Args:
        statuses: of all ranks; those of other hosts are the last ones received.
        local_ranks: ranks of this host.
        store_silent_s: seconds since the process group's store last answered.
    """
    waits_for = waits(statuses)
    local = [status for status in statuses if status.rank in local_ranks]

    def waits_for_other_host(status: RankStatus) -> bool:
        wait = status.wait
        ranks = waits_for.get(status.rank, ()) if wait is None else wait.group if wait.peer < 0 else (wait.peer,)
        return any(rank not in local_ranks for rank in ranks)

    stalled = [
        status for status in local if status.state == "alive" and status.stalled_s >= max(stalled_s, status.timeout_s)
    ]
    if not any(waits_for_other_host(status) and not status.may_be_slow for status in stalled):
        return None
    summary = (
        f"{_name_ranks(local)}: their host is cut off from the others: the process group's store has not answered it "
        f"for {store_silent_s:.1f} s; its link is down, or the host that serves the store"
    )
    ranks = tuple(status.rank for status in local)
    return Verdict("unreachable", ranks, summary, stalled[0].step, store_silent_s, waits_for)


def waits(statuses: Sequence[RankStatus]) -> dict[int, tuple[int, ...]]:
    """Return the ranks that each rank waits for. Ranks that do not wait are left out.

    A rank in a call of a group waits for the members that have begun fewer calls, or that are frozen in the call.
    A rank in a transfer waits for the rank at the other end, unless that rank is in a transfer with it.
    A rank that makes no progress outside of calls, such as one that waits for a GPU, may wait for any rank that has
    begun fewer calls of one of its groups.
    """
    by_rank = {status.rank: status for status in statuses}
    waits_for = {
        status.rank: tuple(sorted(_targets(status, by_rank)))
        for status in statuses
        if status.state == "alive" and not status.is_frozen
    }
    return {rank: targets for rank, targets in waits_for.items() if targets}


def _targets(status: RankStatus, by_rank: Mapping[int, RankStatus]) -> set[int]:
    """Return the ranks that a rank waits for."""
    wait = status.shared_operation
    if wait is None:
        if status.stalled_s < status.timeout_s or status.may_be_slow:
            return set()
        return {
            rank
            for (group, kind), count in status.calls.items()
            for rank in group
            if rank in by_rank and rank != status.rank and by_rank[rank].calls.get((group, kind), 0) < count
        }
    if wait.peer >= 0:
        peer = by_rank.get(wait.peer)
        is_mutual = peer is not None and peer.wait is not None and peer.wait.peer == status.rank
        return {wait.peer} if peer is not None and (peer.is_frozen or not is_mutual) else set()
    others = {rank for rank in wait.group if rank != status.rank and rank in by_rank}
    frozen = {rank for rank in others if by_rank[rank].is_frozen}
    if wait.call:
        late = {rank for rank in others if by_rank[rank].calls.get((wait.group, wait.kind), 0) < wait.call}
    else:
        late = {rank for rank in others if all(span.group != wait.group for span in by_rank[rank].open_spans)}
    return late | frozen


def _reachable(rank: int, waits_for: Waits) -> set[int]:
    """Return the ranks that ``rank`` waits for, directly or through other ranks."""
    results: set[int] = set()
    pending = list(waits_for[rank])
    while pending:
        target = pending.pop()
        if target not in results:
            results.add(target)
            pending.extend(waits_for.get(target, ()))
    return results


def _longest_waits(by_rank: Mapping[int, RankStatus], reachable: Mapping[int, set[int]]) -> dict[int, float]:
    """Return the longest wait in seconds for each rank that others wait for, directly or through other ranks."""
    results: dict[int, float] = {}
    for start, targets in reachable.items():
        wait = by_rank[start].shared_operation
        seconds = wait.age_s if wait is not None else by_rank[start].stalled_s
        for rank in targets:
            results[rank] = max(results.get(rank, 0.0), seconds)
    return results


def _is_stuck(status: RankStatus, waits_for: Waits, longest_waits: Mapping[int, float]) -> bool:
    """Whether others have waited for a rank beyond its timeout, and it makes no progress and waits for no rank."""
    if status.rank not in longest_waits or status.rank in waits_for:
        return False
    if status.wait is not None and not status.is_frozen:  # slow links, or a wait for a rank whose status is unknown
        return False
    if status.state == "left":
        return min(status.left_s, longest_waits[status.rank]) >= status.start_s
    timeout = status.start_s if status.may_be_slow else status.timeout_s
    return status.state == "alive" and status.stalled_s >= timeout and longest_waits[status.rank] >= timeout / 2


def _describe_stuck(status: RankStatus) -> str:
    """Return the description of a stuck rank."""
    if status.state == "left":
        return f"it left {status.left_s:.1f} s ago, and others still wait for it"
    operation = f"in {status.open_spans[-1]}" if status.open_spans else "between operations"
    # The watcher runs several times a second, so it may have run once after the main thread's last progress.
    if status.is_frozen or status.heartbeat_age_s >= status.timeout_s / 2:
        seconds = f"{status.heartbeat_age_s:.1f} s"
        return f"none of its Python threads has run for {seconds} (the interpreter's lock is held), {operation}"
    return f"its main thread has shown no progress for {status.stalled_s:.1f} s, {operation}"


def _cycles(by_rank: Mapping[int, RankStatus], reachable: Mapping[int, set[int]]) -> list[list[RankStatus]]:
    """Return the sets of ranks that wait for each other and for no rank outside of the set.

    These are the strongly connected components without outgoing edges. They are found by reachability, which is
    simpler than Tarjan's algorithm and fast enough: few ranks wait in cycles.
    """
    results: list[list[RankStatus]] = []
    for start in sorted(reachable):
        cycle = reachable[start]
        closed = start in cycle and all(reachable.get(rank) == cycle for rank in cycle)
        if closed and min(cycle) == start and all(by_rank[rank].state == "alive" for rank in cycle):
            results.append([by_rank[rank] for rank in sorted(cycle)])
    return results


def _verdict(kind: VerdictKind, statuses: Sequence[RankStatus], summary: str, waits_for: Waits) -> Verdict:
    first = statuses[0]
    stalled = first.stalled_s
    if kind == "died" or first.state == "stopped":
        stalled = min(first.stalled_s, first.heartbeat_age_s)
    elif kind == "error":
        stalled = first.left_s
    return Verdict(kind, tuple(status.rank for status in statuses), summary, first.step, stalled, waits_for)


def _name_ranks(statuses: Sequence[RankStatus]) -> str:
    return " and ".join(f"rank {status.rank} (pid {status.pid}, {status.host})" for status in statuses)


def _abridged_ranks(ranks: Group) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
