"""Spans of synthetic ranks: slices without gaps, exact replays, and detected stragglers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError, CorruptFile
from moe_comm.observe.records import ATTEMPTS, SPANS, Attempt, LineWriter, SpanLine, append
from moe_comm.plan.step.replay import replay
from moe_comm.plan.whatif.analysis import make_tasks, what_if
from moe_comm.plan.whatif.run_spans import OTHER, cut_step
from moe_comm.plan.whatif.run_trace import LATE, make_run_trace, read_run_trace
from moe_comm.plan.whatif.trace_table import TraceGraph

MS = 1_000_000
EP2 = {"dp": 2, "ep": 2}
BASE = 1_000_000 * MS


class Clock:
    """One rank's time: spans one after the other, in milliseconds."""

    def __init__(self, rank: int, step: int = 1, begin: float = 0.0) -> None:
        self.rank, self.step, self.now, self.begin = rank, step, begin, begin
        self.spans: list[SpanLine] = []

    def span(
        self,
        kind: str,
        name: str,
        end: float,
        layer: str = "",
        group: tuple[int, ...] = (),
        call: int = 0,
        peer: int = -1,
        nbytes: int = 0,
        micro: int = 0,
        rows: tuple[int, ...] = (),
        begun: float = 0.0,
    ) -> None:
        begin_ns, end_ns = BASE + round(self.now * MS), BASE + round(end * MS)
        line = SpanLine(
            self.rank,
            kind,
            name,
            begin_ns,
            end_ns,
            self.step,
            micro,
            layer,
            list(group),
            call,
            peer,
            nbytes,
            list(rows),
        )
        self.spans.append(replace(line, begun_ns=BASE + round(begun * MS)) if begun else line)
        self.now = end

    def work(self, name: str, milliseconds: float, layer: str = "", micro: int = 0) -> None:
        self.span("compute", name, self.now + milliseconds, layer, micro=micro)

    def done(self) -> list[SpanLine]:
        whole = SpanLine(self.rank, "step", "step", BASE + round(self.begin * MS), BASE + round(self.now * MS), 0)
        return [*self.spans, replace(whole, step=self.step)]


def meet(
    clocks: list[Clock], kind: str, name: str, takes: float, call: int, layer: str = "", rows: tuple[int, ...] = ()
) -> None:
    end = max(clock.now for clock in clocks) + takes
    for clock in clocks:
        brought = (rows[clock.rank],) if rows and kind == "dispatch" else ()
        nbytes = 100 if rows else 100 + 100 * clock.rank
        clock.span(kind, name, end, layer, tuple(clock.rank for clock in clocks), call, nbytes=nbytes, rows=brought)


def expert_step(experts: tuple[float, float], step: int = 1, late: float = 0.0) -> list[SpanLine]:
    clocks = [Clock(0, step), Clock(1, step, late)]
    for clock in clocks:
        clock.work("attention", 4, "layers.0")
    meet(clocks, "dispatch", "dispatch", 1, 7, "layers.0.moe")
    for clock, takes in zip(clocks, experts, strict=True):
        clock.work("experts", takes, "layers.0.moe")
    meet(clocks, "combine", "combine", 2, 7, "layers.0.moe")
    for clock in clocks:
        clock.now += 3  # time without a span
    meet(clocks, "collective", "sum of gradients", 1, 3)
    return [span for clock in clocks for span in clock.done()]


def seconds(graph: TraceGraph, name: str) -> np.ndarray:
    return graph.value_N[graph.table.name_N == graph.table.names.index(name)]


def test_a_slow_expert_costs_what_it_would_to_share_its_work_out() -> None:
    spans = [span for step in (1, 2) for span in expert_step((6, 10), step)]
    result = make_run_trace(spans, 2, EP2)
    answer = what_if(result.graph, result.even_N)
    np.testing.assert_allclose(answer.measured_S, [0.021, 0.021])
    np.testing.assert_allclose(answer.replayed_S, answer.measured_S, rtol=1e-9)
    assert answer.slowdown == pytest.approx(21 / 19)  # experts take 8 on average, not 10
    assert answer.by_operation["experts"] == pytest.approx(21 / 19)
    assert answer.by_operation["attention"] == pytest.approx(1)
    assert answer.worst_ranks == (1,)
    assert answer.by_place["ep"] == pytest.approx((1, 21 / 19))
    assert answer.slowest_ranks_share == pytest.approx(1)
    # Rows are moved in 150 / 200 of the time if ranks send as much: 1 and 2 ms are 0.75 and 1.5.
    assert answer.routing == pytest.approx(21 / (21 - 2 - 0.75))


def test_waiting_is_left_to_the_replay() -> None:
    graph = make_run_trace(expert_step((6, 10)), 2, EP2).graph
    assert seconds(graph, "combine") == pytest.approx([0.002, 0.002])  # though rank 0 was in it for 6 ms
    assert seconds(graph, OTHER) == pytest.approx([0.003, 0.003])
    value_N = np.where(np.isclose(graph.value_N, 0.010), 0.006, graph.value_N)
    assert replay(make_tasks(graph), value_N).end.max() == pytest.approx(0.017)


def test_a_rank_that_comes_late_to_a_step_did_something_else_until_then() -> None:
    result = make_run_trace(expert_step((6, 6), late=5), 2, EP2)
    answer = what_if(result.graph)
    assert seconds(result.graph, LATE) == pytest.approx([0.005])
    assert answer.measured_S == pytest.approx([0.022])
    assert answer.replay_error < 1e-9
    assert np.isnan(answer.routing)


def test_a_rank_that_left_a_call_early_did_not_wait_for_who_came_later() -> None:
    early, late = Clock(0), Clock(1)
    early.span("collective", "sum", 2, group=(0, 1), call=1)
    early.work("forward", 3)
    late.work("forward", 9)
    late.span("collective", "sum", 10, group=(0, 1), call=1)
    graph = make_run_trace(early.done() + late.done(), 2, EP2).graph
    times = replay(make_tasks(graph))
    assert times.end[graph.table.rank_N == 0].max() == pytest.approx(0.005)
    assert times.end.max() == pytest.approx(0.010)


def test_a_wait_for_a_call_that_began_before_is_for_what_the_others_do_until_it_ends() -> None:
    clocks = [Clock(0), Clock(1)]
    meet(clocks, "combine", "combine", 1, 1, "layers.0.moe")
    clocks[0].work("experts", 2, "layers.0.moe")
    clocks[0].span("combine", "results of others", 7.5, "layers.0.moe")  # those of rank 1, ready at 7
    clocks[1].work("experts", 6, "layers.0.moe")
    clocks[1].span("combine", "results of others", 7.5, "layers.0.moe")
    graph = make_run_trace([span for clock in clocks for span in clock.done()], 2, EP2).graph
    assert replay(make_tasks(graph)).end.max() == pytest.approx(0.0075)
    faster = np.where(np.isclose(graph.value_N, 0.006), 0.003, graph.value_N)
    assert replay(make_tasks(graph), faster).end.max() == pytest.approx(0.0045)


def pipeline(forward: float, step: int = 1) -> list[SpanLine]:
    """Two stages, two micro-batches, forwards only."""
    one, two = Clock(0, step), Clock(1, step)
    arrives = []
    for micro in range(2):
        one.work("forward", forward, "stage 0", micro)
        before = one.now
        one.span("transfer", "send activations", before, "stages 0-1", peer=1, nbytes=64, micro=micro)
        arrives.append(before + 0.5)
    one.span("transfer", "between passes", one.now + 1)
    for micro in range(2):
        begin = two.now
        two.span("transfer", "receive activations", max(begin, arrives[micro]), "stages 0-1", peer=0, micro=micro)
        two.work("forward", 4, "stage 1", micro)
    return one.done() + two.done()


@pytest.mark.parametrize("forward", [2.0, 7.0])
def test_a_stage_waits_for_the_one_before_it(forward: float) -> None:
    graph = make_run_trace(pipeline(forward), 2, {"pp": 2}).graph
    answer = what_if(graph)
    expected = max(forward + 0.5 + 8, 2 * forward + 0.5 + 4)
    assert answer.measured_S == pytest.approx([expected / 1e3])
    assert answer.replay_error < 1e-9
    # From one speed of the first stage the other one follows.
    other = 9 - forward
    graph = make_run_trace(pipeline(other), 2, {"pp": 2}).graph
    if other == 7.0:  # else the second transfer was hidden, and how long it took is not known
        changed = np.where(np.isclose(graph.value_N, other / 1e3), forward / 1e3, graph.value_N)
        assert replay(make_tasks(graph), changed).end.max() == pytest.approx(expected / 1e3)


def test_a_rank_with_several_stages_waits_for_what_its_next_pass_takes() -> None:
    one, two = Clock(0), Clock(1)
    one.work("forward", 3, "stage 0")
    one.span("transfer", "send activations", 3, "stages 0-1", peer=1)
    one.work("forward", 1.25, "stage 2", 1)
    one.span("transfer", "send activations", 4.25, "stages 2-3", peer=1, micro=1)  # for later
    two.work("forward", 1, "stage 3", 0)
    two.span("transfer", "between passes", 4.5)
    two.work("forward", 2, "stage 1")
    graph = make_run_trace(one.done() + two.done(), 2, {"pp": 2}).graph
    assert replay(make_tasks(graph)).end.max() == pytest.approx(0.0065)
    later = np.where(np.isclose(graph.value_N, 0.003), 0.005, graph.value_N)
    assert replay(make_tasks(graph), later).end.max() == pytest.approx(0.0085)
    other = np.where(np.isclose(graph.value_N, 0.00125), 0.004, graph.value_N)
    assert replay(make_tasks(graph), other).end.max() == pytest.approx(0.007), "that of the first rank itself"


def test_after_its_last_pass_a_rank_waits_until_what_it_sent_is_asked_for() -> None:
    one, two = Clock(0), Clock(1)
    one.work("forward", 1, "stage 0")
    one.span("transfer", "send activations", 1, "stages 0-1", peer=1)
    one.work("garbage collection", 5)
    one.span("transfer", "between passes", 6.5)
    one.work("backward", 2, "stage 0")
    two.span("transfer", "between passes", 1.5)
    two.work("forward", 0.5, "stage 1")
    two.work("backward", 1, "stage 1")
    two.span("transfer", "send gradients", 3, "stages 0-1", peer=0)
    two.span("transfer", "between passes", 6.25)  # asked for at 6
    graph = make_run_trace(one.done() + two.done(), 2, {"pp": 2}).graph
    ends = replay(make_tasks(graph)).end
    assert [ends[graph.table.rank_N == rank].max() for rank in (0, 1)] == pytest.approx([0.0085, 0.00625])
    sooner = np.where(np.isclose(graph.value_N, 0.005), 0.003, graph.value_N)
    ends = replay(make_tasks(graph), sooner).end
    assert [ends[graph.table.rank_N == rank].max() for rank in (0, 1)] == pytest.approx([0.0065, 0.00425])


def early_call(inside: str = "") -> list[SpanLine]:
    """Rank 0 begins a call after 2 ms and waits for it after 8, rank 1 after 5 and at once; nobody waits for long."""
    one, two = Clock(0), Clock(1)
    one.work("attention", 2)
    one.work("experts", 6)
    two.work("attention", 5)
    for clock, begun, end in ((one, 2, 8.125), (two, 0, 5.5)):
        outer = clock.now
        clock.span("collective", "sum", end, group=(0, 1), call=1, begun=begun)
        if inside:
            clock.now = outer
            clock.span(inside, inside, end, "layers.0.moe")
    two.work("forward", 3)
    return one.done() + two.done()


@pytest.mark.parametrize("inside", ["", "dispatch"])
@pytest.mark.parametrize(
    ("slow", "ends"),
    [
        (("attention", 0, 2), (0.008125, 0.0085)),
        (("attention", 0, 7), (0.013125, 0.0105)),  # both begin it later
        (("experts", 0, 9), (0.011125, 0.0085)),  # by then it has been begun
        (("attention", 1, 9), (0.009125, 0.0125)),
    ],
)
def test_a_call_that_goes_on_beside_other_work_is_waited_for_from_when_all_had_begun_it(
    slow: tuple[str, int, float], ends: tuple[float, float], inside: str
) -> None:
    graph = make_run_trace(early_call(inside), 2, EP2).graph
    table = graph.table
    chosen = (table.name_N == table.names.index(slow[0])) & (table.rank_N == slow[1])
    assert chosen.sum() == 1
    result = replay(make_tasks(graph), np.where(chosen, slow[2] / 1e3, graph.value_N)).end
    assert [result[table.rank_N == rank].max() for rank in (0, 1)] == pytest.approx(ends)


def routed_step(rows: tuple[int, int], step: int, slow: tuple[float, float] = (1, 1)) -> list[SpanLine]:
    """Experts take 2 ms, and 1 ms for 100 rows, times ``slow``."""
    clocks = [Clock(0, step), Clock(1, step)]
    meet(clocks, "dispatch", "dispatch", 1, 1 + step, "layers.0.moe", rows)
    for clock, mine, times in zip(clocks, rows, slow, strict=True):
        clock.work("experts", (2 + mine / 100) * times, "layers.0.moe")
    meet(clocks, "combine", "combine", 1, 1 + step, "layers.0.moe", rows)
    return [span for clock in clocks for span in clock.done()]


def test_a_slow_rank_is_not_taken_for_uneven_routing() -> None:
    spans = [span for step in range(8) for span in routed_step((300, 300), step, (1, 3))]
    result = make_run_trace(spans, 2, EP2)
    answer = what_if(result.graph, result.even_N)
    assert answer.slowdown == pytest.approx(17 / 12)
    assert answer.routing == pytest.approx(1)
    assert [worker.slowdown for worker in answer.ranks] == pytest.approx([1, 17 / 12])
    # Nor where by chance it has a little more to do: then no more than that is put down to routing.
    spans = [span for step in range(8) for span in routed_step((300 - step, 300 + step), step, (1, 3))]
    result = make_run_trace(spans, 2, EP2)
    assert 1 < what_if(result.graph, result.even_N).routing < 1.02


def test_uneven_routing_is_not_taken_for_a_slow_rank() -> None:
    spans = [span for step in range(8) for span in routed_step((300 - 30 * step, 300 + 30 * step), step)]
    result = make_run_trace(spans, 2, EP2)
    answer = what_if(result.graph, result.even_N)
    even = make_run_trace([span for step in range(8) for span in routed_step((300, 300), step)], 2, EP2)
    np.testing.assert_allclose(answer.even_S, what_if(even.graph).replayed_S, rtol=1e-6)
    assert answer.slowdown / answer.routing == pytest.approx(1, rel=0.01)


def test_work_is_shared_out_between_stages() -> None:
    answer = what_if(make_run_trace(pipeline(8), 2, {"pp": 2}).graph)
    # 8 and 4 ms become 6 and 6; of each micro-batch's transfer 0.5 remains.
    assert answer.ideal_S == pytest.approx([0.0185])
    assert answer.by_operation["forward"] == pytest.approx(20.5 / 18.5)


def test_steps_that_a_rank_lacks_are_skipped_and_of_two_times_the_later_counts() -> None:
    spans = expert_step((6, 10), 1) + [span for span in expert_step((6, 10), 2) if span.rank == 0]
    again = [
        replace(span, begin_ns=span.begin_ns + 100 * MS, end_ns=span.end_ns + 100 * MS) for span in expert_step((6, 7))
    ]
    result = make_run_trace(spans + again, 2, EP2)
    assert result.skipped == (2,)
    assert what_if(result.graph).measured_S == pytest.approx([0.018])


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans()), max_size=12))
def test_a_step_is_cut_without_gaps(bounds: list[tuple[int, int, bool]]) -> None:
    whole = SpanLine(0, "step", "step", 0, 50, 1)
    spans = [
        SpanLine(0, "collective" if moves else "compute", "sum" if moves else "forward", min(a, b), max(a, b), 1)
        for a, b, moves in bounds
    ]
    pieces = cut_step([*spans, whole])
    assert pieces[0].begin == 0 and pieces[-1].end == 50
    assert all(one.end == two.begin for one, two in pairwise(pieces))
    assert cut_step(spans) == []


def write_run(folder: Path, spans: list[SpanLine], mapping: dict[str, int]) -> Path:
    append(folder / ATTEMPTS, Attempt(0, 2, 0.5, 0.6, 1, "fresh", mapping))
    for rank in (0, 1):
        writer = LineWriter(folder / SPANS / f"rank-{rank:05d}.jsonl")
        for span in spans:
            if span.rank == rank:
                writer.write(span)
        writer.close()
    return folder


def test_a_folder_is_read_with_the_skew_of_its_hosts(tmp_path: Path) -> None:
    ahead = 10**12
    spans = [
        replace(span, begin_ns=span.begin_ns + ahead, end_ns=span.end_ns + ahead, skew_ns=-ahead) if span.rank else span
        for step in (1, 2)
        for span in expert_step((6, 10), step)
    ]
    run = write_run(tmp_path, spans, EP2)
    assert what_if(read_run_trace(run).graph).measured_S == pytest.approx([0.021, 0.021])
    assert what_if(read_run_trace(run, (2, 9)).graph).steps == (2,)
    with pytest.raises(ConfigError, match="no spans"):
        read_run_trace(run, (3, 9))


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        read_run_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="attempts"):
        read_run_trace(tmp_path)
    with pytest.raises(CorruptFile, match="mapping"):
        read_run_trace(write_run(tmp_path, expert_step((6, 10)), {"dp": 3}))
    with pytest.raises(CorruptFile, match="rank 1"):
        make_run_trace(expert_step((6, 10)), 1, {})
    with pytest.raises(ConfigError, match="recorded completely"):
        make_run_trace([span for span in expert_step((6, 10)) if span.kind != "step"], 2, EP2)


Program = list[tuple[str, list[float]]]
"""What both ranks do one after the other, with milliseconds of each: work, a call that meets, one that is begun here
and waited for at the next "await", which takes no time by itself."""


def ran(program: Program) -> list[SpanLine]:
    """The spans that it leaves."""
    clocks = [Clock(0), Clock(1)]
    begun: list[float] = []
    for call, (what, takes) in enumerate(program, 1):
        if what == "work":
            for clock, own in zip(clocks, takes, strict=True):
                clock.work("forward", own)
        elif what == "meet":
            meet(clocks, "combine", "combine", takes[0], call, "layers.0.moe")
        elif what == "begin":
            begun = [clock.now for clock in clocks]
        elif begun:
            for clock, own in zip(clocks, begun, strict=True):
                end = max(clock.now, *begun)
                clock.span("collective", "sum", end, group=(0, 1), call=call, begun=own if own < clock.now else 0.0)
            begun = []
    return [span for clock in clocks for span in clock.done()]


KINDS = st.sampled_from(["work", "work", "meet", "begin", "await"])
PROGRAMS = st.lists(st.tuples(KINDS, st.lists(st.integers(1, 40), min_size=2, max_size=2)), min_size=4, max_size=12)


@settings(max_examples=60)
@given(PROGRAMS, st.integers(0, 11), st.integers(0, 1), st.integers(0, 80))
def test_what_would_have_been_is_what_is_when_it_is(program: Program, at: int, rank: int, instead: int) -> None:
    at %= len(program)
    # Nothing happens at the very same time.
    program = [
        (what, [own + (3 * place + one + 1) ** 2 / 1e4 for one, own in enumerate(takes)])
        for place, (what, takes) in enumerate(program)
    ]
    takes = program[at][1]
    program[at] = ("work", takes)
    graph = make_run_trace(ran(program), 2, EP2).graph
    table = graph.table
    begin = max([0.0, *((span.end_ns - BASE) / MS for span in ran(program[:at]) if span.rank == rank)])
    chosen = (
        (table.rank_N == rank) & np.isclose(table.begin_N, begin / 1e3) & np.isclose(graph.value_N, takes[rank] / 1e3)
    )
    assert chosen.sum() == 1
    changed = [*takes]
    changed[rank] = 0.25 + instead
    truth = make_run_trace(ran([*program[:at], ("work", changed), *program[at + 1 :]]), 2, EP2).graph
    result = replay(make_tasks(graph), np.where(chosen, changed[rank] / 1e3, graph.value_N)).end
    for one in (0, 1):
        expected = truth.table.end_N[truth.table.rank_N == one].max()
        assert result[table.rank_N == one].max() == pytest.approx(expected)
