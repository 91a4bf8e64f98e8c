"""A replay equals an event queue in plain Python on the same tasks, bit by bit, on every code path."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_plan.step import replay as module
from moe_plan.step.replay import ReplayError, TaskGraph, prepare, replay


def make(
    duration: Any, stream: Any, edges: Any = (), collective: Any = None, label: Any = None, dtype: Any = np.int64
) -> TaskGraph:
    pairs = np.array(list(edges), dtype=dtype).reshape(-1, 2)
    collectives = np.full(len(stream), -1) if collective is None else np.array(collective, dtype=dtype)
    return TaskGraph(
        np.array(duration, dtype=float), np.array(stream, dtype=dtype), pairs[:, 0], pairs[:, 1], collectives, label
    )


def reference(tasks: TaskGraph) -> tuple[list[float], list[float]] | None:
    """Return begin and end of all tasks from a heap of events; None if some tasks never begin."""
    number = len(tasks)
    follows: list[list[int]] = [[] for _ in range(number)]
    waits = [0] * number
    pairs = list(zip(tasks.before.tolist(), tasks.after.tolist(), strict=True))
    last: dict[int, int] = {}
    for task, stream in enumerate(tasks.stream.tolist()):
        if stream >= 0:
            if stream in last:
                pairs.append((last[stream], task))
            last[stream] = task
    for source, target in pairs:
        follows[source].append(target)
        waits[target] += 1
    members: dict[int, list[int]] = {}
    for task, collective in enumerate(tasks.collective.tolist()):
        members.setdefault(collective if collective >= 0 else -task - 2, []).append(task)
    group_of = {task: group for group in members.values() for task in group}
    missing = {id(group): len(group) for group in members.values()}
    begin, end = [-1.0] * number, [-1.0] * number
    events: list[tuple[float, int]] = []

    def ready(task: int, now: float) -> None:
        group = group_of[task]
        missing[id(group)] -= 1
        if not missing[id(group)]:
            for one in group:
                begin[one], end[one] = now, now + float(tasks.duration[one])
                heapq.heappush(events, (end[one], one))

    for task in range(number):
        if not waits[task]:
            ready(task, 0.0)
    while events:
        now, task = heapq.heappop(events)
        for target in follows[task]:
            waits[target] -= 1
            if not waits[target]:
                ready(target, now)
    return None if min(begin, default=0.0) < 0 else (begin, end)


@contextmanager
def limits(**values: int) -> Iterator[None]:
    """Set other thresholds between equivalent code paths."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


CODE_PATHS = [
    {"_NARROW": 0},  # arrays throughout
    {"_NARROW": 10**6, "_GIVE_UP_AFTER": 1},  # plain Python throughout
]


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Tasks on a few streams; most edges lead forward, collectives are small, and some graphs have cycles."""
    number = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    stream = rng.integers(-1, draw(st.integers(1, 6)), number)
    edges = rng.integers(0, max(number, 1), (draw(st.integers(0, 2 * number)) if number else 0, 2))
    edges = edges[edges[:, 0] != edges[:, 1]]
    if draw(st.integers(0, 4)):
        edges = np.sort(edges, axis=1)
    collective = np.full(number, -1)
    for group in range(draw(st.integers(0, number // 4)) if number else 0):
        # Close to each other, and often on different streams, so that most graphs can be replayed.
        at = int(rng.integers(0, number))
        neighbors = np.arange(at, min(number, at + 5))
        _, first_of_stream = np.unique(stream[neighbors], return_index=True)
        collective[neighbors[first_of_stream]] = 3 * group
    duration = rng.integers(0, 4, number) * draw(st.sampled_from([1.0, 0.1]))
    return make(duration, stream, edges, collective)


@settings(max_examples=200, deadline=None)
@given(graphs(), st.sampled_from(CODE_PATHS))
def test_replay_equals_the_event_queue(tasks: TaskGraph, thresholds: dict[str, int]) -> None:
    expected = reference(tasks)
    with limits(**thresholds):
        if expected is None:
            with pytest.raises(ReplayError, match="wait for each other"):
                prepare(tasks)
            return
        times = replay(tasks)
    assert times.begin.tolist() == expected[0]
    assert times.end.tolist() == expected[1]
    assert times.span == max(expected[1], default=0.0)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 2**32 - 1), st.sampled_from(CODE_PATHS))
def test_each_lane_equals_a_separate_replay(tasks: TaskGraph, seed: int, thresholds: dict[str, int]) -> None:
    if reference(tasks) is None:
        return
    lanes = np.random.default_rng(seed).random((len(tasks), 3))
    with limits(**thresholds):
        plan = prepare(tasks)
        together = replay(plan, lanes)
        assert replay(replace(tasks, duration=lanes)).end.tolist() == together.end.tolist()
        for lane in range(3):
            alone = replay(plan, lanes[:, lane])
            assert np.array_equal(together.begin[:, lane], alone.begin)
            assert np.array_equal(together.end[:, lane], alone.end)
            assert together.span[lane] == alone.span


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(0, 2**32 - 1))
def test_longer_tasks_never_make_any_task_end_sooner(tasks: TaskGraph, seed: int) -> None:
    if reference(tasks) is None:
        return
    rng = np.random.default_rng(seed)
    longer = tasks.duration + rng.random(len(tasks)) * rng.integers(0, 2, len(tasks))
    plan = prepare(tasks)
    before, after = replay(plan), replay(plan, longer)
    assert (after.begin >= before.begin).all() and (after.end >= before.end).all()


def test_collective_begins_when_the_last_task_is_ready_and_durations_differ() -> None:
    #          rank 0: compute 1, collective 2, compute 1; rank 1: compute 5, collective 3, compute 1
    tasks = make([1, 2, 1, 5, 3, 1], [0, 0, 0, 1, 1, 1], collective=[-1, 7, -1, -1, 7, -1])
    times = replay(tasks)
    assert times.begin.tolist() == [0, 5, 7, 0, 5, 8]
    assert times.end.tolist() == [1, 7, 8, 5, 8, 9]
    faster = replay(tasks, np.array([1.0, 9, 1, 5, 3, 1]))
    assert faster.end.tolist() == [1, 14, 15, 5, 8, 9]  # the collective of rank 0 starts when rank 1 has computed


def test_streams_run_in_order_and_tasks_without_a_stream_start_at_once() -> None:
    tasks = make([3, 1, 2, 4, 4], [5, 0, 5, -1, -1])
    assert replay(tasks).begin.tolist() == [0, 0, 3, 0, 0]


def test_each_lane_is_as_long_as_its_own_longest_chain() -> None:
    tasks = make([[1, 9], [2, 2], [1, 1]], [0, 1, 2], [(0, 2), (1, 2)])
    assert replay(tasks).span.tolist() == [3, 10]


@pytest.mark.parametrize("thresholds", CODE_PATHS)
def test_cycle_names_only_its_tasks(thresholds: dict[str, int]) -> None:
    names = ["idle", "send", "receive", "after", "far"]
    tasks = make([1] * 5, [0, 1, 1, 1, 2], [(0, 1), (2, 1), (3, 4)], label=names.__getitem__)
    with limits(**thresholds), pytest.raises(ReplayError) as caught:
        prepare(tasks)
    message = str(caught.value)
    assert (
        "task 1 (send) waits for task 2 (receive)" in message and "task 2 (receive) waits for task 1 (send)" in message
    )
    assert not any(name in message for name in ("idle", "after", "far"))
    assert isinstance(caught.value, ConfigError)


def test_collectives_in_different_orders_are_a_cycle() -> None:
    tasks = make([1] * 4, [0, 0, 1, 1], collective=[0, 1, 1, 0])
    with pytest.raises(ReplayError, match="begins together with"):
        replay(tasks)
    with pytest.raises(ReplayError, match="task 1 waits for task 0"):
        replay(make([1, 1], [0, 0], collective=[4, 4]))
    with pytest.raises(ReplayError, match="task 0 waits for task 0"):
        replay(make([1], [0], [(0, 0)]))


def test_the_message_of_a_long_cycle_is_truncated() -> None:
    number = 1000
    tasks = make([1] * number, [-1] * number, [(at, (at + 1) % number) for at in range(number)])
    with pytest.raises(ReplayError, match="and 988 more") as caught:
        prepare(tasks)
    assert len(str(caught.value)) < 2000


def test_narrow_part_after_many_levels_is_sorted_as_well() -> None:
    """A chain that exceeds the threshold of narrow levels, and independent tasks."""
    chain = 3 * module._GIVE_UP_AFTER
    tasks = make([0.5] * (chain + 50), [0] * chain + [-1] * 50, [(chain // 2, chain + 7)])
    times = replay(tasks)
    assert times.span == 0.5 * chain
    assert times.begin[chain + 7] == times.end[chain // 2]
    assert len(prepare(tasks).levels) == chain + 1


def test_large_graph_with_collectives_of_many_ranks() -> None:
    """64 ranks of 100 tasks, every fourth a collective of 8, and edges to the neighbour."""
    ranks, each = 64, 100
    rng = np.random.default_rng(0)
    rank, step = np.divmod(np.arange(ranks * each), each)
    collective = np.where(step % 4 == 3, step * ranks + rank // 8, -1)
    source = np.flatnonzero((step % 8 == 5) & (rank + 1 < ranks) & (step + 1 < each))
    tasks = make(rng.random(ranks * each), rank, np.stack([source, source + each + 1], axis=1), collective)
    expected = reference(tasks)
    assert expected is not None
    times = replay(tasks)
    assert times.begin.tolist() == expected[0] and times.end.tolist() == expected[1]


def test_nothing_to_replay_takes_no_time() -> None:
    tasks = make([], [])
    assert replay(tasks).span == 0.0
    assert replay(tasks, np.empty((0, 3))).span.tolist() == [0, 0, 0]


def test_invalid_arrays_are_rejected() -> None:
    none = np.full(2, -1)
    empty = np.empty(0, dtype=np.int64)
    two, streams = np.ones(2), np.zeros(2, dtype=np.int64)
    for match, arguments in {
        r"\[tasks, lanes\]": (np.ones((2, 1, 1)), streams, empty, empty, none),
        "stream must have one entry per task, 2; got 3": (two, np.zeros(3, dtype=int), empty, empty, none),
        "collective must have one entry": (two, streams, empty, empty, np.full(1, -1)),
        "stream must be -1": (two, np.array([0, -2]), empty, empty, none),
        "integers": (two, np.zeros(2), empty, empty, none),
        "pairs": (two, streams, np.array([0]), empty, none),
        "after contains task 2": (two, streams, np.array([0]), np.array([2]), none),
        "before contains task -1": (two, streams, np.array([-1]), np.array([0]), none),
        "task 1 takes nan": (np.array([0, np.nan]), streams, empty, empty, none),
        "task 0 takes -1": (np.array([-1.0, 0]), streams, empty, empty, none),
        "task 1 takes inf": (np.array([0, np.inf]), streams, empty, empty, none),
    }.items():
        with pytest.raises(ReplayError, match=match):
            TaskGraph(*arguments)
    plan = prepare(TaskGraph(two, streams, empty, empty, none))
    for wrong in (np.ones(3), np.ones((3, 2)), np.array([1.0, -1.0])):
        with pytest.raises(ReplayError):
            replay(plan, wrong)


def test_int8_arrays_are_accepted() -> None:
    assert replay(make([1, 1], [0, 0], [(0, 1)], dtype=np.int8)).span == 2.0
