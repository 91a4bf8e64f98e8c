"""Traces of synthetic ranks: contiguous slices, exact replays, and the detection of stragglers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from moe_comm.errors import ConfigError, CorruptFile
from moe_comm.observe.records import ATTEMPTS, SPANS, Attempt, LineWriter, SpanLine, append
from moe_plan.step.replay import replay
from moe_plan.whatif.analysis import make_tasks, what_if
from moe_plan.whatif.run_spans import OTHER, cut_step
from moe_plan.whatif.run_trace import LATE, make_run_trace, read_run_trace
from moe_plan.whatif.trace_table import TraceGraph

MS = 1_000_000
EP2 = {"dp": 2, "ep": 2}
BASE = 1_000_000 * MS


class Clock:
    """Record consecutive spans of one rank. ``now``, ``begin``, ``end`` and ``begun`` are in milliseconds."""

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
        """Return all spans, with the span of the whole step."""
        step = SpanLine(self.rank, "step", "step", BASE + round(self.begin * MS), BASE + round(self.now * MS), 0)
        return [*self.spans, replace(step, step=self.step)]


def record_collective(
    clocks: list[Clock], kind: str, name: str, takes: float, call: int, layer: str = "", rows: tuple[int, ...] = ()
) -> None:
    """Record a collective call that all ranks complete ``takes`` milliseconds after the last one enters it.

    ``rows``: rows that each rank sends, for a dispatch.
    """
    end = max(clock.now for clock in clocks) + takes
    for clock in clocks:
        own_rows = (rows[clock.rank],) if rows and kind == "dispatch" else ()
        nbytes = 100 if rows else 100 + 100 * clock.rank
        clock.span(kind, name, end, layer, tuple(clock.rank for clock in clocks), call, nbytes=nbytes, rows=own_rows)


def expert_step(experts: tuple[float, float], step: int = 1, late: float = 0.0) -> list[SpanLine]:
    """Return a step of two ranks with ``experts`` milliseconds of expert computation. Rank 1 begins ``late``."""
    clocks = [Clock(0, step), Clock(1, step, late)]
    for clock in clocks:
        clock.work("attention", 4, "layers.0")
    record_collective(clocks, "dispatch", "dispatch", 1, 7, "layers.0.moe")
    for clock, milliseconds in zip(clocks, experts, strict=True):
        clock.work("experts", milliseconds, "layers.0.moe")
    record_collective(clocks, "combine", "combine", 2, 7, "layers.0.moe")
    for clock in clocks:
        clock.now += 3  # time without a span
    record_collective(clocks, "collective", "sum of gradients", 1, 3)
    return [span for clock in clocks for span in clock.done()]


def seconds(graph: TraceGraph, name: str) -> np.ndarray:
    """Return the seconds of the operations with this name."""
    return graph.value_N[graph.table.name_N == graph.table.names.index(name)]


def test_the_slowdown_is_relative_to_balanced_expert_times() -> None:
    spans = [span for step in (1, 2) for span in expert_step((6, 10), step)]
    result = make_run_trace(spans, 2, EP2)
    answer = what_if(result.graph, result.even_N)
    np.testing.assert_allclose(answer.measured_S, [0.021, 0.021])
    np.testing.assert_allclose(answer.replayed_S, answer.measured_S, rtol=1e-9)
    assert answer.slowdown == pytest.approx(21 / 19)  # with the mean of 8 ms instead of 10 ms, a step takes 19 ms
    assert answer.by_operation["experts"] == pytest.approx(21 / 19)
    assert answer.by_operation["attention"] == pytest.approx(1)
    assert answer.worst_ranks == (1,)
    assert answer.by_coordinate["ep"] == pytest.approx((1, 21 / 19))
    assert answer.slowest_ranks_share == pytest.approx(1)
    # With balanced routing, experts take 8 ms instead of 10 ms, and ranks send 150 bytes instead of 100 and 200. Then
    # dispatch takes 0.75 ms instead of 1 ms, and combine 1.5 ms instead of 2 ms.
    assert answer.routing == pytest.approx(21 / (21 - 2 - 0.75))


def test_waits_are_computed_by_the_replay() -> None:
    """The duration of a collective call excludes the wait for other ranks; the replay computes the wait."""
    graph = make_run_trace(expert_step((6, 10)), 2, EP2).graph
    assert seconds(graph, "combine") == pytest.approx([0.002, 0.002])  # although the call of rank 0 took 6 ms
    assert seconds(graph, OTHER) == pytest.approx([0.003, 0.003])
    value_N = np.where(np.isclose(graph.value_N, 0.010), 0.006, graph.value_N)
    assert replay(make_tasks(graph), value_N).end.max() == pytest.approx(0.017)


def test_a_late_start_of_a_step_is_a_separate_operation() -> None:
    """If a rank begins a step later than the others, an operation ``LATE`` fills the difference."""
    result = make_run_trace(expert_step((6, 6), late=5), 2, EP2)
    answer = what_if(result.graph)
    assert seconds(result.graph, LATE) == pytest.approx([0.005])
    assert answer.measured_S == pytest.approx([0.022])
    assert answer.replay_error < 1e-9
    assert np.isnan(answer.routing)


def test_a_rank_does_not_depend_on_ranks_that_enter_a_call_after_it_returned() -> None:
    """A rank that returned from a call before another rank entered it does not depend on that rank."""
    rank0, rank1 = Clock(0), Clock(1)
    rank0.span("collective", "sum", 2, group=(0, 1), call=1)
    rank0.work("forward", 3)
    rank1.work("forward", 9)
    rank1.span("collective", "sum", 10, group=(0, 1), call=1)
    graph = make_run_trace(rank0.done() + rank1.done(), 2, EP2).graph
    times = replay(make_tasks(graph))
    assert times.end[graph.table.rank_N == 0].max() == pytest.approx(0.005)
    assert times.end.max() == pytest.approx(0.010)


def test_a_wait_within_an_earlier_call_depends_on_the_last_work_of_the_other_rank() -> None:
    """A wait within an earlier call depends on what the other rank completed last before the wait ended."""
    clocks = [Clock(0), Clock(1)]
    record_collective(clocks, "combine", "combine", 1, 1, "layers.0.moe")
    clocks[0].work("experts", 2, "layers.0.moe")
    clocks[0].span("combine", "results of others", 7.5, "layers.0.moe")  # the results of rank 1 are ready at 7 ms
    clocks[1].work("experts", 6, "layers.0.moe")
    clocks[1].span("combine", "results of others", 7.5, "layers.0.moe")
    graph = make_run_trace([span for clock in clocks for span in clock.done()], 2, EP2).graph
    assert replay(make_tasks(graph)).end.max() == pytest.approx(0.0075)
    faster = np.where(np.isclose(graph.value_N, 0.006), 0.003, graph.value_N)
    assert replay(make_tasks(graph), faster).end.max() == pytest.approx(0.0045)


def pipeline(forward: float, step: int = 1) -> list[SpanLine]:
    """Return the forward passes of two stages and two micro-batches; a pass of stage 0 takes ``forward`` ms."""
    rank0, rank1 = Clock(0, step), Clock(1, step)
    arrivals = []
    for micro in range(2):
        rank0.work("forward", forward, "stage 0", micro)
        sent = rank0.now
        rank0.span("transfer", "send activations", sent, "stages 0-1", peer=1, nbytes=64, micro=micro)
        arrivals.append(sent + 0.5)
    rank0.span("transfer", "between passes", rank0.now + 1)
    for micro in range(2):
        begin = rank1.now
        rank1.span("transfer", "receive activations", max(begin, arrivals[micro]), "stages 0-1", peer=0, micro=micro)
        rank1.work("forward", 4, "stage 1", micro)
    return rank0.done() + rank1.done()


@pytest.mark.parametrize("forward", [2.0, 7.0])
def test_a_stage_waits_for_the_previous_stage(forward: float) -> None:
    graph = make_run_trace(pipeline(forward), 2, {"pp": 2}).graph
    answer = what_if(graph)
    expected = max(forward + 0.5 + 8, 2 * forward + 0.5 + 4)
    assert answer.measured_S == pytest.approx([expected / 1e3])
    assert answer.replay_error < 1e-9
    # A trace with one duration of the first stage predicts the step with the other duration.
    other_forward = 9 - forward
    graph = make_run_trace(pipeline(other_forward), 2, {"pp": 2}).graph
    if other_forward == 7.0:  # otherwise the second transfer was hidden, so its duration is unknown
        changed = np.where(np.isclose(graph.value_N, other_forward / 1e3), forward / 1e3, graph.value_N)
        assert replay(make_tasks(graph), changed).end.max() == pytest.approx(expected / 1e3)


def test_with_virtual_stages_a_wait_depends_on_the_input_of_the_next_pass() -> None:
    """With virtual stages, a wait depends on the send of the next pass's input, not on the latest send."""
    rank0, rank1 = Clock(0), Clock(1)
    rank0.work("forward", 3, "stage 0")
    rank0.span("transfer", "send activations", 3, "stages 0-1", peer=1)
    rank0.work("forward", 1.25, "stage 2", 1)
    rank0.span("transfer", "send activations", 4.25, "stages 2-3", peer=1, micro=1)  # the input of a later pass
    rank1.work("forward", 1, "stage 3", 0)
    rank1.span("transfer", "between passes", 4.5)
    rank1.work("forward", 2, "stage 1")
    graph = make_run_trace(rank0.done() + rank1.done(), 2, {"pp": 2}).graph
    assert replay(make_tasks(graph)).end.max() == pytest.approx(0.0065)
    later = np.where(np.isclose(graph.value_N, 0.003), 0.005, graph.value_N)
    assert replay(make_tasks(graph), later).end.max() == pytest.approx(0.0085)
    other = np.where(np.isclose(graph.value_N, 0.00125), 0.004, graph.value_N)
    assert replay(make_tasks(graph), other).end.max() == pytest.approx(0.007), (
        "the wait must not depend on the latest send"
    )


def test_after_its_last_pass_a_rank_waits_until_the_receiver_requests_the_message() -> None:
    """After its last pass, a rank waits until the receiver requests the message."""
    rank0, rank1 = Clock(0), Clock(1)
    rank0.work("forward", 1, "stage 0")
    rank0.span("transfer", "send activations", 1, "stages 0-1", peer=1)
    rank0.work("garbage collection", 5)
    rank0.span("transfer", "between passes", 6.5)
    rank0.work("backward", 2, "stage 0")
    rank1.span("transfer", "between passes", 1.5)
    rank1.work("forward", 0.5, "stage 1")
    rank1.work("backward", 1, "stage 1")
    rank1.span("transfer", "send gradients", 3, "stages 0-1", peer=0)
    rank1.span("transfer", "between passes", 6.25)  # rank 0 requests the gradients at 6 ms
    graph = make_run_trace(rank0.done() + rank1.done(), 2, {"pp": 2}).graph
    ends = replay(make_tasks(graph)).end
    assert [ends[graph.table.rank_N == rank].max() for rank in (0, 1)] == pytest.approx([0.0085, 0.00625])
    faster = np.where(np.isclose(graph.value_N, 0.005), 0.003, graph.value_N)
    ends = replay(make_tasks(graph), faster).end
    assert [ends[graph.table.rank_N == rank].max() for rank in (0, 1)] == pytest.approx([0.0065, 0.00425])


def early_call(inside: str = "") -> list[SpanLine]:
    """Return a step with an asynchronous call. No rank waits for long.

    Rank 0 starts the call at 2 ms and waits for it from 8 ms. Rank 1 starts it at 5 ms and waits at once.

    ``inside``: kind of an additional span inside the span of the wait, or "".
    """
    rank0, rank1 = Clock(0), Clock(1)
    rank0.work("attention", 2)
    rank0.work("experts", 6)
    rank1.work("attention", 5)
    for clock, begun, end in ((rank0, 2, 8.125), (rank1, 0, 5.5)):
        wait_begin = clock.now
        clock.span("collective", "sum", end, group=(0, 1), call=1, begun=begun)
        if inside:
            clock.now = wait_begin
            clock.span(inside, inside, end, "layers.0.moe")
    rank1.work("forward", 3)
    return rank0.done() + rank1.done()


@pytest.mark.parametrize("inside", ["", "dispatch"])
@pytest.mark.parametrize(
    ("slow", "ends"),
    [
        (("attention", 0, 2), (0.008125, 0.0085)),
        (("attention", 0, 7), (0.013125, 0.0105)),  # rank 0 starts the call at 7 ms, so both ranks complete it later
        (("experts", 0, 9), (0.011125, 0.0085)),  # rank 0 has started the call before, so rank 1 does not wait longer
        (("attention", 1, 9), (0.009125, 0.0125)),
    ],
)
def test_a_wait_for_an_asynchronous_call_depends_on_its_start_on_all_ranks(
    slow: tuple[str, int, float], ends: tuple[float, float], inside: str
) -> None:
    """A wait for an asynchronous call depends on the start of the call on all ranks."""
    graph = make_run_trace(early_call(inside), 2, EP2).graph
    table = graph.table
    chosen = (table.name_N == table.names.index(slow[0])) & (table.rank_N == slow[1])
    assert chosen.sum() == 1
    result = replay(make_tasks(graph), np.where(chosen, slow[2] / 1e3, graph.value_N)).end
    assert [result[table.rank_N == rank].max() for rank in (0, 1)] == pytest.approx(ends)


def test_a_call_without_length_at_the_time_of_a_start_does_not_wait_for_itself() -> None:
    """Clocks of low resolution give several events the same time."""
    rank0, rank1 = Clock(0), Clock(1)
    for clock in (rank0, rank1):
        clock.work("forward", 1)
        clock.span("collective", "sum", 1, group=(0, 1), call=2, begun=0.5 if clock is rank0 else 0.0)
        clock.span("collective", "sum", 1, group=(0, 1), call=3)
    graph = make_run_trace(rank0.done() + rank1.done(), 2, EP2).graph
    assert replay(make_tasks(graph), graph.value_N).end.max() == pytest.approx(0.001)


def routed_step(rows: tuple[int, int], step: int, slow: tuple[float, float] = (1, 1)) -> list[SpanLine]:
    """Return a step in which experts take 2 ms plus 1 ms per 100 rows, multiplied by ``slow`` of the rank."""
    clocks = [Clock(0, step), Clock(1, step)]
    record_collective(clocks, "dispatch", "dispatch", 1, 1 + step, "layers.0.moe", rows)
    for clock, own_rows, factor in zip(clocks, rows, slow, strict=True):
        clock.work("experts", (2 + own_rows / 100) * factor, "layers.0.moe")
    record_collective(clocks, "combine", "combine", 1, 1 + step, "layers.0.moe", rows)
    return [span for clock in clocks for span in clock.done()]


def test_a_slow_rank_is_not_attributed_to_routing() -> None:
    spans = [span for step in range(8) for span in routed_step((300, 300), step, (1, 3))]
    result = make_run_trace(spans, 2, EP2)
    answer = what_if(result.graph, result.even_N)
    assert answer.slowdown == pytest.approx(17 / 12)
    assert answer.routing == pytest.approx(1)
    assert [worker.slowdown for worker in answer.ranks] == pytest.approx([1, 17 / 12])
    # If the slow rank also has slightly more rows, only their time is attributed to routing.
    spans = [span for step in range(8) for span in routed_step((300 - step, 300 + step), step, (1, 3))]
    result = make_run_trace(spans, 2, EP2)
    assert 1 < what_if(result.graph, result.even_N).routing < 1.02


def test_uneven_routing_is_not_attributed_to_a_slow_rank() -> None:
    spans = [span for step in range(8) for span in routed_step((300 - 30 * step, 300 + 30 * step), step)]
    result = make_run_trace(spans, 2, EP2)
    answer = what_if(result.graph, result.even_N)
    balanced = make_run_trace([span for step in range(8) for span in routed_step((300, 300), step)], 2, EP2)
    np.testing.assert_allclose(answer.even_S, what_if(balanced.graph).replayed_S, rtol=1e-6)
    assert answer.slowdown / answer.routing == pytest.approx(1, rel=0.01)


def test_the_ideal_step_balances_work_between_stages() -> None:
    answer = what_if(make_run_trace(pipeline(8), 2, {"pp": 2}).graph)
    # Ideally both stages take the mean of 8 and 4 ms, which is 6 ms, and the transfer of a micro-batch takes 0.5 ms.
    assert answer.ideal_S == pytest.approx([0.0185])
    assert answer.by_operation["forward"] == pytest.approx(20.5 / 18.5)


def test_incomplete_steps_are_skipped_and_the_last_execution_is_used() -> None:
    """Steps without spans of all ranks are skipped. Of a repeated step, the last execution is used."""
    spans = expert_step((6, 10), 1) + [span for span in expert_step((6, 10), 2) if span.rank == 0]
    repeated = [
        replace(span, begin_ns=span.begin_ns + 100 * MS, end_ns=span.end_ns + 100 * MS) for span in expert_step((6, 7))
    ]
    result = make_run_trace(spans + repeated, 2, EP2)
    assert result.skipped == (2,)
    assert what_if(result.graph).measured_S == pytest.approx([0.018])


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans()), max_size=12))
def test_a_step_is_cut_without_gaps(bounds: list[tuple[int, int, bool]]) -> None:
    step = SpanLine(0, "step", "step", 0, 50, 1)
    spans = [
        SpanLine(0, "collective" if is_call else "compute", "sum" if is_call else "forward", min(a, b), max(a, b), 1)
        for a, b, is_call in bounds
    ]
    slices = cut_step([*spans, step])
    assert slices[0].begin == 0 and slices[-1].end == 50
    assert all(previous.end == following.begin for previous, following in pairwise(slices))
    assert cut_step(spans) == []


def write_run(folder: Path, spans: list[SpanLine], mapping: dict[str, int]) -> Path:
    """Write the files of a run with two ranks."""
    append(folder / ATTEMPTS, Attempt(0, 2, 0.5, 0.6, 1, "fresh", mapping))
    for rank in (0, 1):
        writer = LineWriter(folder / SPANS / f"rank-{rank:05d}.jsonl")
        for span in spans:
            if span.rank == rank:
                writer.write(span)
        writer.close()
    return folder


def test_a_folder_is_read_with_the_skew_of_its_hosts(tmp_path: Path) -> None:
    skew_ns = 10**12
    spans = [
        replace(span, begin_ns=span.begin_ns + skew_ns, end_ns=span.end_ns + skew_ns, skew_ns=-skew_ns)
        if span.rank
        else span
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
"""Consecutive operations of both ranks, each with milliseconds for each rank.

"work": computation. "call": a synchronous call. "begin": start an asynchronous call. "await": wait for that call, which
takes no time itself.
"""


def recorded_spans(program: Program) -> list[SpanLine]:
    """Return the spans of both ranks that a run of ``program`` records."""
    clocks = [Clock(0), Clock(1)]
    begun: list[float] = []
    for call, (kind, milliseconds) in enumerate(program, 1):
        if kind == "work":
            for clock, own_ms in zip(clocks, milliseconds, strict=True):
                clock.work("forward", own_ms)
        elif kind == "call":
            record_collective(clocks, "combine", "combine", milliseconds[0], call, "layers.0.moe")
        elif kind == "begin":
            begun = [clock.now for clock in clocks]
        elif begun:
            for clock, start in zip(clocks, begun, strict=True):
                end = max(clock.now, *begun)
                clock.span("collective", "sum", end, group=(0, 1), call=call, begun=start if start < clock.now else 0.0)
            begun = []
    return [span for clock in clocks for span in clock.done()]


KINDS = st.sampled_from(["work", "work", "call", "begin", "await"])
PROGRAMS = st.lists(st.tuples(KINDS, st.lists(st.integers(1, 40), min_size=2, max_size=2)), min_size=4, max_size=12)


@settings(max_examples=60)
@example([("work", [1, 3]), ("begin", [1, 1]), ("work", [1, 1]), ("await", [1, 1])], 0, 0, 0)
@example([("work", [1, 1]), ("begin", [1, 1]), ("work", [1, 1]), ("await", [1, 1]), ("call", [1, 1])], 0, 0, 0)
@given(PROGRAMS, st.integers(0, 11), st.integers(0, 1), st.integers(0, 80))
def test_a_replay_with_a_changed_duration_equals_a_trace_with_that_duration(
    program: Program, index: int, rank: int, changed_ms: int
) -> None:
    """A replay with one changed duration ends when a trace recorded with that duration ends."""
    index %= len(program)
    # Add distinct fractions to all durations, so that no two events have the same time.
    program = [
        (kind, [own_ms + (3 * position + number + 1) ** 2 / 1e4 for number, own_ms in enumerate(milliseconds)])
        for position, (kind, milliseconds) in enumerate(program)
    ]
    milliseconds = program[index][1]
    program[index] = ("work", milliseconds)
    graph = make_run_trace(recorded_spans(program), 2, EP2).graph
    table = graph.table
    begin = max([0.0, *((span.end_ns - BASE) / MS for span in recorded_spans(program[:index]) if span.rank == rank)])
    chosen = (
        (table.rank_N == rank)
        & np.isclose(table.begin_N, begin / 1e3)
        & np.isclose(graph.value_N, milliseconds[rank] / 1e3)
    )
    assert chosen.sum() == 1
    new_milliseconds = [*milliseconds]
    new_milliseconds[rank] = 0.25 + changed_ms
    expected_graph = make_run_trace(
        recorded_spans([*program[:index], ("work", new_milliseconds), *program[index + 1 :]]), 2, EP2
    ).graph
    result = replay(make_tasks(graph), np.where(chosen, new_milliseconds[rank] / 1e3, graph.value_N)).end
    for number in (0, 1):
        expected = expected_graph.table.end_N[expected_graph.table.rank_N == number].max()
        assert result[table.rank_N == number].max() == pytest.approx(expected)
