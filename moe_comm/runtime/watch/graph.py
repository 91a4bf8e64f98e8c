"""Who waits for whom, and which rank is the cause of it: the one that waits for nobody.

    rank 0  in all_reduce, call 7 of {0,1} ──▶ rank 1, which has begun 6 calls of {0,1}
    rank 1  in dispatch, call 3 of {1,2}   ──▶ rank 2, which has begun 2 calls of {1,2}
    rank 2  in no collective, silent for 5 s     ◀── the culprit (MegaScale, arXiv 2402.15627, section 5)

Nothing here looks at processes or clocks: ``analyse`` is a function of what is known of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from moe_comm.runtime.event_layout import Kind

Fate = Literal["alive", "stopped", "traced", "ended", "unreachable", "left", "failed", "caught"]
"""Of a rank's process: runs; is stopped; is held by a debugger; is gone; may run on a host that is not heard; is done
and no more watched; left with an error of its own; left with one that another rank gave it."""
VerdictKind = Literal["died", "unreachable", "stuck", "error"]
PATIENT_KINDS = frozenset({Kind.DATA, Kind.CHECKPOINT, Kind.PAUSE})
"""What takes as long as disks do, and is no sign of a stuck rank."""

Group = tuple[int, ...]


@dataclass(frozen=True)
class Doing:
    """A span that a rank's main thread has begun and not ended; see ``events.Span``."""

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
        where += [f"call {self.call} of ranks {_few(self.group)}"] if self.group else []
        return f"{self.kind.name.lower()} {self.name!r} ({', '.join(where)}) for {self.age_s:.1f} s"


@dataclass(frozen=True)
class View:
    """What is known of a rank.

    silent_s: since its main thread last began or ended something. unbeaten_s: since its watcher last ran.
    patience_s: how long it may be silent while others wait for it. stopped_s: how long a stopped one may be so.
    description: what it is in the middle of, outermost first. calls: how many it has begun, by group and kind.
    left_s: how long ago it left, with ``words``.
    """

    rank: int
    fate: Fate = "alive"
    silent_s: float = 0.0
    unbeaten_s: float = 0.0
    patience_s: float = 5.0
    stopped_s: float = 5.0
    start_s: float = 300.0
    step: int = 0
    description: tuple[Doing, ...] = ()
    calls: Mapping[tuple[Group, Kind], int] = field(default_factory=dict)
    left_s: float = 0.0
    words: str = ""
    host: str = ""
    pid: int = 0

    @property
    def wait(self) -> Doing | None:
        """The innermost thing it does that moves data between ranks."""
        return next((one for one in reversed(self.description) if one.kind.moves), None)

    @property
    def meets(self) -> Doing | None:
        """The innermost thing it does that others do with it: ``wait``, or one like saving, which a thread beside the
        main one may carry out with the other ranks'."""
        return self.wait or next((one for one in reversed(self.description) if one.group), None)

    @property
    def is_frozen(self) -> bool:
        """Whether none of its threads runs: it is stopped, or one of them keeps the interpreter's lock."""
        return self.fate == "stopped" or min(self.unbeaten_s, self.silent_s) >= self.patience_s

    @property
    def is_patient(self) -> bool:
        """Whether it does something that may take long."""
        return any(one.kind in PATIENT_KINDS for one in self.description)


@dataclass(frozen=True)
class Verdict:
    """ranks: the culprits, or those that are out of reach. what: a sentence. edges: the ranks that each one waits for.
    silent_s: how long ago the first of ``ranks`` last gave a sign of health."""

    kind: VerdictKind
    ranks: tuple[int, ...]
    what: str
    step: int
    silent_s: float
    edges: Mapping[int, tuple[int, ...]]


def analyse(views: Sequence[View]) -> Verdict | None:
    """The culprits, or None while nobody is to blame: all are well, or those waited for may yet come."""
    by_rank = {view.rank: view for view in views}
    edges = waits(views)
    waited = _waited(by_rank, edges)
    died = [view for view in views if view.fate == "ended"]
    if died:
        return _verdict("died", died, f"{_who(died)} died", edges)
    lost = [view for view in views if view.fate == "unreachable"]
    if lost:
        why = f"{lost[0].words}; it is down, or the link to it" if lost[0].words else "the host or its link is down"
        step = max(view.step for view in views)  # what was last heard of them may be old
        return replace(_verdict("unreachable", lost, f"{_who(lost)} cannot be reached: {why}", edges), step=step)
    failed = sorted((view for view in views if view.fate == "failed"), key=lambda view: -view.left_s)
    if failed and (failed[0].rank in waited or any(view.fate == "caught" for view in views)):
        first = failed[:1]
        return _verdict("error", first, f"{_who(first)} left with {first[0].words or 'an error'}", edges)
    stopped = [
        view for view in views if view.fate == "stopped" and min(view.silent_s, view.unbeaten_s) >= view.stopped_s
    ]
    if stopped:
        return _verdict("stuck", stopped, f"{_who(stopped)} is stuck: stopped by a signal", edges)
    stuck = [view for view in views if _is_stuck(view, edges, waited)]
    if stuck:
        return _verdict("stuck", stuck, "; ".join(f"{_who([view])} is stuck: {_how(view)}" for view in stuck), edges)
    for ring in _rings(by_rank, edges):
        if all(view.silent_s >= view.patience_s and not view.is_patient for view in ring):
            places = "; ".join(f"rank {view.rank} in {view.meets}" for view in ring)
            return _verdict("stuck", ring, f"ranks wait for each other in different operations: {places}", edges)
    return None


def cut_off(views: Sequence[View], here: Sequence[int], mute_s: float, long_s: float) -> Verdict | None:
    """That the host of the ranks ``here`` is cut off, where one of them has waited for ranks of other hosts for
    ``long_s`` and for longer than its patience; else None.

    Args:
        views: those of other hosts as last heard.
        mute_s: for how long the store that joins the hosts has not answered this one.
    """
    edges = waits(views)
    own = [view for view in views if view.rank in here]

    def beyond(view: View) -> bool:
        wait = view.wait
        waited = edges.get(view.rank, ()) if wait is None else wait.group if wait.peer < 0 else (wait.peer,)
        return any(rank not in here for rank in waited)

    long = [view for view in own if view.fate == "alive" and view.silent_s >= max(long_s, view.patience_s)]
    if not any(beyond(view) and not view.is_patient for view in long):
        return None
    what = (
        f"{_who(own)}: their host is cut off from the others: the process group's store has not answered it for "
        f"{mute_s:.1f} s; its link is down, or the host that keeps the store"
    )
    return Verdict("unreachable", tuple(view.rank for view in own), what, long[0].step, mute_s, edges)


def waits(views: Sequence[View]) -> dict[int, tuple[int, ...]]:
    """The ranks that each rank waits for; only those with any.

    A rank in a call of a group, saving is one, waits for the members that have begun fewer calls, or that are frozen in
    the call; in a transfer, for the rank at its other end, unless that is in one with it. A rank whose main thread is
    silent outside of all calls, as one that waits for a GPU, may wait for those that have begun fewer calls of any of
    its groups.
    """
    by_rank = {view.rank: view for view in views}
    found: dict[int, tuple[int, ...]] = {}
    for view in views:
        if view.fate != "alive" or view.is_frozen:
            continue
        targets = _targets(view, by_rank)
        if targets:
            found[view.rank] = tuple(sorted(targets))
    return found


def _targets(view: View, by_rank: Mapping[int, View]) -> set[int]:
    wait = view.meets
    if wait is None:
        if view.silent_s < view.patience_s or view.is_patient:
            return set()
        return {
            rank
            for (group, kind), count in view.calls.items()
            for rank in group
            if rank in by_rank and rank != view.rank and by_rank[rank].calls.get((group, kind), 0) < count
        }
    if wait.peer >= 0:
        peer = by_rank.get(wait.peer)
        together = peer is not None and peer.wait is not None and peer.wait.peer == view.rank
        return {wait.peer} if peer is not None and (peer.is_frozen or not together) else set()
    others = {rank for rank in wait.group if rank != view.rank and rank in by_rank}
    frozen = {rank for rank in others if by_rank[rank].is_frozen}
    if wait.call:
        late = {rank for rank in others if by_rank[rank].calls.get((wait.group, wait.kind), 0) < wait.call}
    else:
        late = {rank for rank in others if all(one.group != wait.group for one in by_rank[rank].description)}
    return late | frozen


def _waited(by_rank: Mapping[int, View], edges: Mapping[int, tuple[int, ...]]) -> dict[int, float]:
    """For each rank that others wait for, by way of others too, the longest that one has done so; seconds."""
    found: dict[int, float] = {}
    for start in edges:
        wait = by_rank[start].meets
        since = wait.age_s if wait is not None else by_rank[start].silent_s
        seen: set[int] = set()
        ahead = list(edges[start])
        while ahead:
            rank = ahead.pop()
            if rank not in seen:
                seen.add(rank)
                found[rank] = max(found.get(rank, 0.0), since)
                ahead.extend(edges.get(rank, ()))
    return found


def _is_stuck(view: View, edges: Mapping[int, tuple[int, ...]], waited: Mapping[int, float]) -> bool:
    """Others have waited for it for long, and it waits for nobody and gives no sign of life."""
    if view.rank not in waited or view.rank in edges:
        return False
    if view.wait is not None and not view.is_frozen:  # it is the links that are slow, or it waits for what is not known
        return False
    if view.fate == "left":
        return min(view.left_s, waited[view.rank]) >= view.start_s
    patience = view.start_s if view.is_patient else view.patience_s
    return view.fate == "alive" and view.silent_s >= patience and waited[view.rank] >= patience / 2


def _how(view: View) -> str:
    if view.fate == "left":
        return f"it left {view.left_s:.1f} s ago, and others still wait for it"
    description = f"in {view.description[-1]}" if view.description else "between operations"
    # A watcher runs several times a second, and may have done so once more after the main thread's last sign.
    if view.is_frozen or view.unbeaten_s >= view.patience_s / 2:
        return f"none of its Python threads has run for {view.unbeaten_s:.1f} s (the interpreter's lock is held), {description}"
    return f"its main thread has shown no progress for {view.silent_s:.1f} s, {description}"


def _rings(by_rank: Mapping[int, View], edges: Mapping[int, tuple[int, ...]]) -> list[list[View]]:
    """Sets of ranks each of which waits for all others of the set and for no rank outside of it (Tarjan's, by way of
    what can be reached, since few ranks wait in rings)."""
    reach: dict[int, set[int]] = {}
    for start in edges:
        seen: set[int] = set()
        ahead = list(edges[start])
        while ahead:
            rank = ahead.pop()
            if rank not in seen:
                seen.add(rank)
                ahead.extend(edges.get(rank, ()))
        reach[start] = seen
    found: list[list[View]] = []
    for start in sorted(edges):
        ring = reach[start]
        whole = start in ring and all(reach.get(rank) == ring for rank in ring)
        if whole and min(ring) == start and all(by_rank[rank].fate == "alive" for rank in ring):
            found.append([by_rank[rank] for rank in sorted(ring)])
    return found


def _verdict(kind: VerdictKind, views: Sequence[View], what: str, edges: Mapping[int, tuple[int, ...]]) -> Verdict:
    first = views[0]
    silent = first.silent_s
    if kind == "died" or first.fate == "stopped":
        silent = min(first.silent_s, first.unbeaten_s)
    elif kind == "error":
        silent = first.left_s
    return Verdict(kind, tuple(view.rank for view in views), what, first.step, silent, edges)


def _who(views: Sequence[View]) -> str:
    return " and ".join(f"rank {view.rank} (pid {view.pid}, {view.host})" for view in views)


def _few(ranks: Group) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
