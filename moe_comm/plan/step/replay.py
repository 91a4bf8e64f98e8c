"""Event-driven replay of tasks on streams: when each begins and ends, if nothing waits longer than it must.

One graph serves the simulator, which makes up its tasks, and what-if questions, which take them from a trace. A task
begins when the one before it on its stream and all that it depends on have ended. The tasks of one collective *meet*:
they begin together, when the last of them could, and each then takes its own duration (what a rank's transfer takes
once everybody is there).

    rank 0  [ forward 0 ][~~ waits ~~][ dispatch ][ experts ]...      two compute streams, one meeting: the dispatches
    rank 1  [ ---- forward 0, slow ---- ][ dispatch ][ experts ]...   begin together; the slow forward is on the path

Tasks that meet are one node, and nodes are sorted once into levels: longest chain of nodes before them. A level is
then a gather, a segmented maximum and a sum over arrays, for one set of durations or for many at once (*lanes*:
the same graph with other durations). Work and memory are linear in tasks and edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError
from moe_comm.plan.arrays import Floats, Ints

_NARROW = 12
"""Tasks a level below which plain Python beats NumPy's cost per call; both give the same bits."""
_GIVE_UP_AFTER = 512
"""Levels after which sorting looks whether they are narrow."""
_NAMED = 12
"""Tasks of a cycle that an error names."""


class ReplayError(ConfigError):
    """Tasks cannot be replayed: a wrong array, or tasks that wait for each other. The message names them."""


@dataclass(frozen=True)
class Tasks:
    """What runs where, for how long, and what it waits for.

    duration: float64 [n], or [n, lanes]; seconds, finite and not negative.
    stream: [n]; tasks of one stream run one after the other in order of appearance. -1: on no stream, so that it
        waits for nothing but ``before`` and its meeting.
    before, after: [d]; task ``after[i]`` begins when ``before[i]`` has ended, or later.
    meeting: [n]; -1, or the number of a collective, whose tasks all begin when the last of them is ready. Each then
        takes its own duration.
    label: a task's name for messages, from its index.

    Arrays are converted to int64 and float64 and belong to the object from then on.

    Raises:
        ReplayError: arrays do not fit each other, or hold what cannot be.
    """

    duration: Floats
    stream: Ints
    before: Ints
    after: Ints
    meeting: Ints
    label: Callable[[int], str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        duration = np.ascontiguousarray(self.duration, dtype=np.float64)
        if duration.ndim not in (1, 2):
            raise ReplayError(f"durations must be [tasks] or [tasks, lanes]; got shape {duration.shape}")
        object.__setattr__(self, "duration", duration)
        for name in ("stream", "before", "after", "meeting"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("stream", "meeting"):
            got = getattr(self, name)
            if len(got) != len(duration):
                raise ReplayError(f"{name} must have one entry a task, {len(duration)}; got {len(got)}")
            if len(got) and got.min() < -1:
                at = int(got.argmin())
                raise ReplayError(f"{name} must be -1 (none) or a number from 0; {self.name(at)} has {got[at]}")
        if len(self.before) != len(self.after):
            raise ReplayError(f"before and after are pairs; got {len(self.before)} and {len(self.after)} entries")
        for name in ("before", "after"):
            got = getattr(self, name)
            if len(got) and not (got.min() >= 0 and got.max() < len(duration)):
                wrong = got[(got < 0) | (got >= len(duration))][0]
                raise ReplayError(f"{name} names task {wrong}; there are {len(duration)} tasks, from 0")
        _check_durations(self, duration)

    def __len__(self) -> int:
        return len(self.stream)

    def name(self, task: int) -> str:
        """The task in words, for messages."""
        return f"task {task}" if self.label is None else f"task {task} ({self.label(task)})"


@dataclass(frozen=True)
class Times:
    """When tasks begin and end: float64 seconds after the earliest could begin, in the shape of the durations."""

    begin: Floats
    end: Floats

    @property
    def span(self) -> Floats:
        """Seconds until everything has ended: a 0-d array, or one number a lane."""
        return np.asarray(self.end.max(axis=0, initial=0.0))


@dataclass(frozen=True)
class Plan:
    """The order in which a graph's tasks are looked at; made by ``prepare``, used for any durations.

    Tasks, nodes (a meeting, or a task that meets nobody) and edges are sorted by level.

    order: [n]; the task in each place. place: its inverse.
    source: [e]; the place of the task that each edge comes from, edges sorted by the node they lead to.
    first_edge: [nodes + 1]; where each node's edges begin. node: [n]; the node of the task in each place.
    levels: for each level the first of its tasks' places, of its nodes and of its edges; and one more for the end.
    """

    tasks: Tasks
    order: Ints
    place: Ints
    source: Ints
    first_edge: Ints
    node: Ints
    levels: Ints


def prepare(tasks: Tasks) -> Plan:
    """Sort ``tasks`` into levels.

    Raises:
        ReplayError: some wait for each other.
    """
    node, number = _nodes(tasks.meeting)
    before, after = _edges(tasks)
    into = node[after]
    nodes, sizes = _sorted_levels(node[before], into, number)
    if len(nodes) < number:
        done = np.zeros(number, dtype=bool)
        done[nodes] = True
        raise ReplayError(_cycle(tasks, node, before, after, done))
    rank = np.empty(number, dtype=np.int64)
    rank[nodes] = np.arange(number)

    node = rank[node]
    order = np.argsort(node, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    into = rank[into]
    sort = np.argsort(into, kind="stable")
    first_edge = _offsets(np.bincount(into, minlength=number))
    first_task = _offsets(np.bincount(node, minlength=number))
    starts = _offsets(sizes)
    levels = np.stack([first_task[starts], starts, first_edge[starts]], axis=1)
    return Plan(tasks, order, place, place[before[sort]], first_edge, node[order], levels)


def replay(tasks: Tasks | Plan, duration: Floats | None = None) -> Times:
    """Begin and end of every task.

    Args:
        tasks: a ``Plan`` where the same graph is replayed again: sorting it takes longer than the replay.
        duration: seconds [n] or [n, lanes], in place of the tasks' own.

    Raises:
        ReplayError: tasks wait for each other, or durations do not fit.
    """
    plan = tasks if isinstance(tasks, Plan) else prepare(tasks)
    if duration is None:
        duration = plan.tasks.duration
    else:
        duration = np.asarray(duration, dtype=np.float64)
        if duration.ndim not in (1, 2) or len(duration) != len(plan.tasks):
            raise ReplayError(f"durations must be [{len(plan.tasks)}] or [.., lanes]; got shape {duration.shape}")
        _check_durations(plan.tasks, duration)
    takes = duration[plan.order]
    narrow = takes.ndim == 1 and len(takes) < _NARROW * len(plan.levels)
    begin, end = (_replay_narrow if narrow else _replay_wide)(plan, takes)
    return Times(begin[plan.place], end[plan.place])


# ---- the replay itself


def _replay_wide(plan: Plan, takes: Floats) -> tuple[Floats, Floats]:
    """A level at a time. Arrays are in order of place."""
    begin, end = np.zeros_like(takes), np.empty_like(takes)
    levels = plan.levels.tolist()
    for number, ((t0, n0, e0), (t1, n1, e1)) in enumerate(pairwise(levels)):
        if number:
            arrived = end[plan.source[e0:e1]]
            if e1 - e0 > n1 - n0:
                arrived = np.maximum.reduceat(arrived, plan.first_edge[n0:n1] - e0, axis=0)
            if t1 - t0 > n1 - n0:
                arrived = arrived[plan.node[t0:t1] - n0]
            begin[t0:t1] = arrived
        np.add(begin[t0:t1], takes[t0:t1], out=end[t0:t1])
    return begin, end


def _replay_narrow(plan: Plan, takes: Floats) -> tuple[Floats, Floats]:
    """A task at a time: for long chains of which few run beside each other."""
    nodes, sources, first = plan.node.tolist(), plan.source.tolist(), plan.first_edge.tolist()
    begin: list[float] = []
    end: list[float] = []
    last, ready = -1, 0.0
    for node, seconds in zip(nodes, takes.tolist(), strict=True):
        if node != last:
            ready = max([end[source] for source in sources[first[node] : first[node + 1]]], default=0.0)
            last = node
        begin.append(ready)
        end.append(ready + seconds)
    return np.array(begin), np.array(end)


# ---- the order


def _nodes(meeting: Ints) -> tuple[Ints, int]:
    """The node of each task, and how many nodes there are."""
    meets = meeting >= 0
    met, inverse = np.unique(meeting[meets], return_inverse=True)
    node = np.empty(len(meeting), dtype=np.int64)
    node[meets] = inverse
    alone = np.flatnonzero(~meets)
    node[alone] = np.arange(len(met), len(met) + len(alone))
    return node, len(met) + len(alone)


def _edges(tasks: Tasks) -> tuple[Ints, Ints]:
    """What was said, and one task of a stream after the other."""
    order = np.argsort(tasks.stream, kind="stable")
    sorted_ = tasks.stream[order]
    same = (sorted_[1:] == sorted_[:-1]) & (sorted_[1:] >= 0)
    return np.concatenate([tasks.before, order[:-1][same]]), np.concatenate([tasks.after, order[1:][same]])


def _sorted_levels(out: Ints, into: Ints, number: int) -> tuple[Ints, Ints]:
    """Nodes in order of level (those on no cycle), and how many each level has (Kahn's algorithm, a level at once)."""
    waits = np.bincount(into, minlength=number)
    sort = np.argsort(out, kind="stable")
    targets, first = into[sort], _offsets(np.bincount(out, minlength=number))
    front = np.flatnonzero(waits == 0)
    mark = np.empty(number, dtype=np.int64)
    levels: list[Ints] = []
    seen = 0
    while len(front):
        levels.append(front)
        seen += len(front)
        if len(levels) >= _GIVE_UP_AFTER and seen < _NARROW * len(levels):
            levels += _narrow_levels(targets, first, waits, front)
            break
        counts = first[front + 1] - first[front]
        edges = np.arange(counts.sum()) + np.repeat(first[front] - np.cumsum(counts) + counts, counts)
        reached = targets[edges]
        np.subtract.at(waits, reached, 1)
        front = reached[waits[reached] == 0]
        places = np.arange(len(front))
        mark[front] = places
        front = front[mark[front] == places]  # each once, also where several edges reach it in this level
    sizes = np.array([len(level) for level in levels], dtype=np.int64)
    return np.concatenate([*levels, np.empty(0, dtype=np.int64)]), sizes


def _narrow_levels(targets: Ints, first: Ints, waits: Ints, front: Ints) -> list[Ints]:
    """The levels after ``front``, a node at a time."""
    to, start, left = targets.tolist(), first.tolist(), waits.tolist()
    levels: list[list[int]] = []
    nodes: list[int] = front.tolist()
    while nodes:
        following = []
        for node in nodes:
            for target in to[start[node] : start[node + 1]]:
                left[target] -= 1
                if not left[target]:
                    following.append(target)
        levels.append(following)
        nodes = following
    return [np.array(level, dtype=np.int64) for level in levels[:-1]]


def _cycle(tasks: Tasks, node: Ints, before: Ints, after: Ints, done: NDArray[np.bool_]) -> str:
    """Words for tasks that wait for each other: every node that is not ``done`` waits for another such."""
    left = ~done[node[before]] & ~done[node[after]]
    came: dict[int, tuple[int, int]] = {
        int(n): (int(b), int(a)) for n, b, a in zip(node[after[left]], before[left], after[left], strict=True)
    }
    at = next(iter(came))
    seen: dict[int, int] = {}
    walk: list[tuple[int, int]] = []
    while at not in seen:
        seen[at] = len(walk)
        walk.append(came[at])
        at = int(node[came[at][0]])
    words = []
    cycle = walk[seen[at] :]
    for place, (b, a) in enumerate(cycle[:_NAMED]):
        words.append(f"{tasks.name(a)} waits for {tasks.name(b)}")
        follows = cycle[(place + 1) % len(cycle)][1]
        if follows != b:
            words.append(f"{tasks.name(b)} meets {tasks.name(follows)}")
    more = f"; and {len(cycle) - _NAMED} more" if len(cycle) > _NAMED else ""
    return (
        f"tasks wait for each other: {'; '.join(words)}{more}. Look at the order of their streams and at what their "
        "meetings hold"
    )


def _offsets(counts: Ints) -> Ints:
    """Where each begins, and where the last ends."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def _whole(name: str, got: NDArray[np.generic]) -> Ints:
    got = np.asarray(got)
    if got.ndim != 1 or (got.size and got.dtype.kind not in "iu"):
        raise ReplayError(f"{name} must be a flat array of whole numbers; got {got.dtype} of shape {got.shape}")
    return np.ascontiguousarray(got, dtype=np.int64)


def _check_durations(tasks: Tasks, duration: Floats) -> None:
    if duration.size and not (duration.min() >= 0 and duration.max() < np.inf):  # False for NaN, too
        bad = np.argwhere(~((duration >= 0) & (duration < np.inf)))[0]
        raise ReplayError(
            f"durations must be finite and not negative; {tasks.name(int(bad[0]))} takes {duration[tuple(bad)]} s"
        )
