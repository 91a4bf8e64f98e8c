"""Replay of tasks on streams: computes when each task begins and ends.

The simulator builds a graph of tasks from a model, and what-if analysis builds one from a trace. A stream runs its
tasks one after another. A task begins when its predecessor on the stream and all its dependencies have ended. The tasks
of one collective begin together, when the last of them is ready. Each then runs for its own duration.

    rank 0  [ forward 0 ][~~ waits ~~][ dispatch ][ experts ]...      two compute streams and one collective: both
    rank 1  [ ---- forward 0, slow ---- ][ dispatch ][ experts ]...   dispatches begin after the slow forward

The tasks of a collective form one node. Nodes are sorted into levels by the longest chain of nodes before them. A level
is replayed by a gather, a segmented maximum and a sum over arrays, for one set of durations or for several (*lanes*:
the same graph with other durations). Time and memory are linear in tasks and edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError
from moe_plan.arrays import Floats, Ints

_NARROW = 12
"""Tasks per level below which plain Python is faster than NumPy. Both give the same bits."""
_GIVE_UP_AFTER = 512
"""Number of levels after which sorting continues in plain Python if the levels are narrow on average."""
_NAMED = 12
"""Number of tasks of a cycle that an error names."""


class ReplayError(ConfigError):
    """Tasks cannot be replayed: an array is invalid, or tasks wait for each other. The message names them."""


@dataclass(frozen=True)
class TaskGraph:
    """Tasks with durations, streams and dependencies.

    duration: float64 [n], or [n, lanes]; finite seconds of at least 0.
    stream: [n]; tasks of one stream run in order of appearance. -1: the task is on no stream.
    before, after: [d]; task ``after[i]`` begins when ``before[i]`` has ended, or later.
    collective: [n]; the number of a collective, or -1. Its tasks begin when the last of them is ready.
    label: returns a name for messages, given the index of a task.

    Arrays are converted to int64 and float64, and are owned by the object.

    Raises:
        ReplayError: the arrays are inconsistent or contain invalid values.
    """

    duration: Floats
    stream: Ints
    before: Ints
    after: Ints
    collective: Ints
    label: Callable[[int], str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        duration = np.ascontiguousarray(self.duration, dtype=np.float64)
        if duration.ndim not in (1, 2):
            raise ReplayError(f"durations must be [tasks] or [tasks, lanes]; got shape {duration.shape}")
        object.__setattr__(self, "duration", duration)
        for name in ("stream", "before", "after", "collective"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        for name in ("stream", "collective"):
            values = getattr(self, name)
            if len(values) != len(duration):
                raise ReplayError(f"{name} must have one entry per task, {len(duration)}; got {len(values)}")
            if len(values) and values.min() < -1:
                at = int(values.argmin())
                raise ReplayError(f"{name} must be -1 (none) or at least 0; {self.name(at)} has {values[at]}")
        if len(self.before) != len(self.after):
            raise ReplayError(f"before and after must be pairs; got {len(self.before)} and {len(self.after)} entries")
        for name in ("before", "after"):
            values = getattr(self, name)
            if len(values) and not (values.min() >= 0 and values.max() < len(duration)):
                missing_task = values[(values < 0) | (values >= len(duration))][0]
                raise ReplayError(f"{name} contains task {missing_task}; there are {len(duration)} tasks, from 0")
        _check_durations(self, duration)

    def __len__(self) -> int:
        return len(self.stream)

    def name(self, task: int) -> str:
        """Return a name of the task for messages."""
        return f"task {task}" if self.label is None else f"task {task} ({self.label(task)})"


@dataclass(frozen=True)
class ReplayTimes:
    """Begin and end of tasks: float64 seconds after the first begin, in the shape of the durations."""

    begin: Floats
    end: Floats

    @property
    def span(self) -> Floats:
        """Seconds until all tasks have ended: a 0-d array, or one number per lane."""
        return np.asarray(self.end.max(axis=0, initial=0.0))


@dataclass(frozen=True)
class ReplayPlan:
    """The order in which ``replay`` visits a graph's tasks, for any durations. ``prepare`` builds it.

    Tasks, nodes (a collective, or a single task) and edges are sorted by level. The position of a task is its index in
    this order.

    order: [n]; the task at each position. position: its inverse.
    source: [e]; position of the source task of each edge. Edges are sorted by their target node.
    first_edge: [nodes + 1]; the first edge of each node. node: [n]; the node of the task at each position.
    levels: [levels + 1, 3]; the first position, node and edge of each level, and the ends of the last.
    """

    tasks: TaskGraph
    order: Ints
    position: Ints
    source: Ints
    first_edge: Ints
    node: Ints
    levels: Ints


def prepare(tasks: TaskGraph) -> ReplayPlan:
    """Sort ``tasks`` into levels. Raises ReplayError if tasks wait for each other."""
    node, number = _nodes(tasks.collective)
    before, after = _edges(tasks)
    target_node = node[after]
    nodes, sizes = _sorted_levels(node[before], target_node, number)
    if len(nodes) < number:
        done = np.zeros(number, dtype=bool)
        done[nodes] = True
        raise ReplayError(_cycle(tasks, node, before, after, done))
    rank = np.empty(number, dtype=np.int64)
    rank[nodes] = np.arange(number)

    node = rank[node]
    order = np.argsort(node, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    target_node = rank[target_node]
    sort = np.argsort(target_node, kind="stable")
    first_edge = _offsets(np.bincount(target_node, minlength=number))
    first_task = _offsets(np.bincount(node, minlength=number))
    starts = _offsets(sizes)
    levels = np.stack([first_task[starts], starts, first_edge[starts]], axis=1)
    return ReplayPlan(tasks, order, position, position[before[sort]], first_edge, node[order], levels)


def replay(tasks: TaskGraph | ReplayPlan, duration: Floats | None = None) -> ReplayTimes:
    """Return the begin and end of every task.

    Args:
        tasks: a ``ReplayPlan`` to replay a graph repeatedly. Sorting takes longer than the replay.
        duration: seconds [n] or [n, lanes], instead of the tasks' own durations.

    Raises:
        ReplayError: tasks wait for each other, or the durations are invalid.
    """
    plan = tasks if isinstance(tasks, ReplayPlan) else prepare(tasks)
    if duration is None:
        duration = plan.tasks.duration
    else:
        duration = np.asarray(duration, dtype=np.float64)
        if duration.ndim not in (1, 2) or len(duration) != len(plan.tasks):
            raise ReplayError(f"durations must be [{len(plan.tasks)}] or [.., lanes]; got shape {duration.shape}")
        _check_durations(plan.tasks, duration)
    sorted_durations = duration[plan.order]
    narrow = sorted_durations.ndim == 1 and len(sorted_durations) < _NARROW * len(plan.levels)
    begin, end = (_replay_narrow if narrow else _replay_wide)(plan, sorted_durations)
    return ReplayTimes(begin[plan.position], end[plan.position])


# ---- replay


def _replay_wide(plan: ReplayPlan, durations: Floats) -> tuple[Floats, Floats]:
    """Replay a level at a time. Arrays are in order of position; t, n, e are positions of tasks, nodes and edges."""
    begin, end = np.zeros_like(durations), np.empty_like(durations)
    levels = plan.levels.tolist()
    for number, ((t0, n0, e0), (t1, n1, e1)) in enumerate(pairwise(levels)):
        if number:
            ready = end[plan.source[e0:e1]]
            if e1 - e0 > n1 - n0:
                ready = np.maximum.reduceat(ready, plan.first_edge[n0:n1] - e0, axis=0)
            if t1 - t0 > n1 - n0:
                ready = ready[plan.node[t0:t1] - n0]
            begin[t0:t1] = ready
        np.add(begin[t0:t1], durations[t0:t1], out=end[t0:t1])
    return begin, end


def _replay_narrow(plan: ReplayPlan, durations: Floats) -> tuple[Floats, Floats]:
    """Replay a task at a time. This is faster for long chains with little parallelism."""
    nodes, sources, first_edge = plan.node.tolist(), plan.source.tolist(), plan.first_edge.tolist()
    begin: list[float] = []
    end: list[float] = []
    last, ready = -1, 0.0
    for node, seconds in zip(nodes, durations.tolist(), strict=True):
        if node != last:
            ready = max([end[source] for source in sources[first_edge[node] : first_edge[node + 1]]], default=0.0)
            last = node
        begin.append(ready)
        end.append(ready + seconds)
    return np.array(begin), np.array(end)


# ---- order


def _nodes(collective: Ints) -> tuple[Ints, int]:
    """Return the node of each task, and the number of nodes."""
    joined = collective >= 0
    numbers, inverse = np.unique(collective[joined], return_inverse=True)
    node = np.empty(len(collective), dtype=np.int64)
    node[joined] = inverse
    alone = np.flatnonzero(~joined)
    node[alone] = np.arange(len(numbers), len(numbers) + len(alone))
    return node, len(numbers) + len(alone)


def _edges(tasks: TaskGraph) -> tuple[Ints, Ints]:
    """Return dependencies and the edges between consecutive tasks of a stream."""
    order = np.argsort(tasks.stream, kind="stable")
    sorted_ = tasks.stream[order]
    same = (sorted_[1:] == sorted_[:-1]) & (sorted_[1:] >= 0)
    return np.concatenate([tasks.before, order[:-1][same]]), np.concatenate([tasks.after, order[1:][same]])


def _sorted_levels(out: Ints, into: Ints, number: int) -> tuple[Ints, Ints]:
    """Return the nodes on no cycle in order of level, and the size of each level (Kahn's algorithm by levels)."""
    waits = np.bincount(into, minlength=number)
    sort = np.argsort(out, kind="stable")
    targets, first = into[sort], _offsets(np.bincount(out, minlength=number))
    front = np.flatnonzero(waits == 0)
    mark = np.empty(number, dtype=np.int64)
    levels: list[Ints] = []
    visited = 0
    while len(front):
        levels.append(front)
        visited += len(front)
        if len(levels) >= _GIVE_UP_AFTER and visited < _NARROW * len(levels):
            levels += _narrow_levels(targets, first, waits, front)
            break
        counts = first[front + 1] - first[front]
        edges = np.arange(counts.sum()) + np.repeat(first[front] - np.cumsum(counts) + counts, counts)
        reached = targets[edges]
        np.subtract.at(waits, reached, 1)
        front = reached[waits[reached] == 0]
        positions = np.arange(len(front))
        mark[front] = positions
        front = front[mark[front] == positions]  # each node once, even if several edges reach it in this level
    sizes = np.array([len(level) for level in levels], dtype=np.int64)
    return np.concatenate([*levels, np.empty(0, dtype=np.int64)]), sizes


def _narrow_levels(targets: Ints, first: Ints, waits: Ints, front: Ints) -> list[Ints]:
    """Return the levels after ``front``, a node at a time."""
    target_list, first_edge, unmet = targets.tolist(), first.tolist(), waits.tolist()
    levels: list[list[int]] = []
    nodes: list[int] = front.tolist()
    while nodes:
        following = []
        for node in nodes:
            for target in target_list[first_edge[node] : first_edge[node + 1]]:
                unmet[target] -= 1
                if not unmet[target]:
                    following.append(target)
        levels.append(following)
        nodes = following
    return [np.array(level, dtype=np.int64) for level in levels[:-1]]


def _cycle(tasks: TaskGraph, node: Ints, before: Ints, after: Ints, done: NDArray[np.bool_]) -> str:
    """Describe tasks that wait for each other. Every node that is not ``done`` waits for another such node."""
    in_cycle = ~done[node[before]] & ~done[node[after]]
    edge_into: dict[int, tuple[int, int]] = {
        int(n): (int(b), int(a))
        for n, b, a in zip(node[after[in_cycle]], before[in_cycle], after[in_cycle], strict=True)
    }
    at = next(iter(edge_into))
    visited: dict[int, int] = {}
    walk: list[tuple[int, int]] = []
    while at not in visited:
        visited[at] = len(walk)
        walk.append(edge_into[at])
        at = int(node[edge_into[at][0]])
    words = []
    cycle = walk[visited[at] :]
    for index, (b, a) in enumerate(cycle[:_NAMED]):
        words.append(f"{tasks.name(a)} waits for {tasks.name(b)}")
        follows = cycle[(index + 1) % len(cycle)][1]
        if follows != b:
            words.append(f"{tasks.name(b)} begins together with {tasks.name(follows)}")
    more = f"; and {len(cycle) - _NAMED} more" if len(cycle) > _NAMED else ""
    return (
        f"tasks wait for each other: {'; '.join(words)}{more}. Check the order of the streams and the tasks of the "
        "collectives"
    )


def _offsets(counts: Ints) -> Ints:
    """Return the prefix sums of ``counts``, from 0 to the total."""
    result = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def _integers(name: str, values: NDArray[np.generic]) -> Ints:
    values = np.asarray(values)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ReplayError(f"{name} must be a flat array of integers; got {values.dtype} of shape {values.shape}")
    return np.ascontiguousarray(values, dtype=np.int64)


def _check_durations(tasks: TaskGraph, duration: Floats) -> None:
    if duration.size and not (duration.min() >= 0 and duration.max() < np.inf):  # False for NaN, too
        bad = np.argwhere(~((duration >= 0) & (duration < np.inf)))[0]
        raise ReplayError(
            f"durations must be finite and not negative; {tasks.name(int(bad[0]))} takes {duration[tuple(bad)]} s"
        )
