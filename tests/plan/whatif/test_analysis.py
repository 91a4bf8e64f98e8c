"""Straggler analysis of small graphs with times that can be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_comm.errors import ConfigError, CorruptFile
from moe_plan.step.replay import ReplayError
from moe_plan.whatif import analysis as whatif
from moe_plan.whatif.analysis import correlation, operation_of, what_if
from moe_plan.whatif.trace_table import TraceGraph, TraceTable, ideal_seconds, operation_seconds

NAMES = ("forward-compute", "backward-compute", "sum")


def table(rows: list[tuple[int, int, int, int, float, float]]) -> TraceTable:
    """Return the table of rows (name, step, micro-batch, rank, begin, end). The dp coordinate is the rank."""
    name, step, micro, rank, begin, end = (np.array(column) for column in zip(*rows, strict=True))
    zero = np.zeros(len(rows), dtype=np.int64)
    return TraceTable(
        NAMES, name, step, micro, zero, rank, begin * 1.0, end * 1.0, name == 2, zero, {"dp": rank, "pp": zero}
    )


def graph(rows: list[tuple[int, int, int, int, float, float]], **more: Any) -> TraceGraph:
    """Return a graph in which the operations of a rank run in sequence and the sums of a step are one collective."""
    trace_table = table(rows)
    none = np.zeros(0, dtype=np.int64)
    return TraceGraph.make(
        trace_table,
        trace_table.step_N * 100 + trace_table.rank_N,
        np.where(trace_table.moves_N, trace_table.step_N, -1),
        more.pop("before", none),
        more.pop("after", none),
        trace_table.name_N,
        **more,
    )


ROWS = [
    *((0, step, 0, rank, 0.0, end) for step, rank, end in ((0, 0, 1.0), (0, 1, 3.0), (1, 0, 1.0), (1, 1, 1.0))),
    *((2, step, -1, rank, begin, end) for step, rank, begin, end in ((0, 0, 1, 3.5), (0, 1, 3, 3.5))),
    *((2, 1, -1, rank, 1.0, 2.0) for rank in (0, 1)),
]


def test_the_ideal_step_has_mean_compute_and_median_transfer_times() -> None:
    result = what_if(graph(ROWS))
    assert result.replayed_S == pytest.approx([3.5, 2.0])
    assert result.ideal_S == pytest.approx([2.25, 2.25])  # forwards of 1.5, sums of 0.5, 0.5, 1 and 1
    assert result.slowdown == pytest.approx(5.5 / 4.5)
    assert result.by_operation == pytest.approx({"forward-compute": (3.75 + 1.75) / 4.5, "sum": (2 + 2.5) / 4.5})
    assert result.by_coordinate["dp"] == pytest.approx((4.75 / 4.5, (3.75 + 2.5) / 4.5))
    assert result.worst_ranks == (1,)
    assert result.slowest_ranks_share == pytest.approx((5.5 - (2.25 + 2.5)) / (5.5 - 4.5))


def test_without_slow_ranks_no_time_is_wasted() -> None:
    result = what_if(graph([row for row in ROWS if row[1] == 1]))
    assert result.slowdown == 1 and result.waste == 0
    assert np.isnan(result.slowest_ranks_share) and np.isnan(result.last_stage_share)


def test_results_do_not_depend_on_the_number_of_variants_per_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = what_if(graph(ROWS))
    monkeypatch.setattr(whatif, "_CELLS", 1)
    assert what_if(graph(ROWS)).by_coordinate == at_once.by_coordinate


def test_a_collective_that_ends_before_another_rank_enters_takes_no_time() -> None:
    trace_table = table([(2, 0, -1, 0, 0.0, 1.0), (2, 0, -1, 1, 4.0, 5.0)])
    assert operation_seconds(trace_table, np.array([0, 0])).tolist() == [0.0, 1.0]
    assert operation_seconds(trace_table, np.array([-1, -1])).tolist() == [1.0, 1.0]


def test_balancing_work_between_stages_keeps_its_sum() -> None:
    trace_table = table([(0, 0, 0, rank, 0.0, end) for rank, end in ((0, 2.0), (1, 4.0), (2, 9.0))])
    trace_table = TraceTable(
        **{**vars(trace_table), "coordinates": {"dp": trace_table.rank_N * 0, "pp": trace_table.rank_N}}
    )
    none = np.zeros(0, dtype=np.int64)
    separate = np.arange(3)
    kinds = np.array([0, 0, -1])
    balanced = TraceGraph.make(trace_table, separate, separate * 0 - 1, none, none, separate, balance_N=kinds)
    # The third stage has no work of this kind, so it gets none.
    assert ideal_seconds(balanced) == pytest.approx([2.0, 2.0, 9.0])
    both = TraceGraph.make(trace_table, separate, separate * 0 - 1, none, none, separate, balance_N=separate * 0)
    assert ideal_seconds(both) == pytest.approx([5.0, 5.0, 5.0])


def test_forward_and_backward_passes_with_equal_variation_are_correlated() -> None:
    durations = np.random.default_rng(0).uniform(1, 2, 20)
    rows = [(0, 0, micro, 0, 0.0, one) for micro, one in enumerate(durations)]
    rows += [(1, 0, micro, 0, 0.0, 2 * one) for micro, one in enumerate(durations)]
    assert correlation(graph(rows)) == pytest.approx(1)
    assert np.isnan(correlation(graph(rows[:20])))
    assert np.isnan(correlation(graph(ROWS)))


def test_both_ends_of_a_transfer_are_one_operation() -> None:
    assert operation_of("forward-send") == operation_of("forward-recv") == "forward-transfer"
    assert operation_of("send gradients") == operation_of("receive gradients") == "transfer of gradients"
    assert operation_of("forward") == "forward"


def test_invalid_graphs_are_rejected() -> None:
    with pytest.raises(CorruptFile, match="another step"):
        graph(ROWS, before=np.array([0]), after=np.array([3]))
    with pytest.raises(ReplayError, match="forward-compute of rank"):
        what_if(graph(ROWS, before=np.array([4]), after=np.array([0])))
    nothing = [(0, 0, 0, 0, 1.0, 1.0)]
    with pytest.raises(ConfigError, match="duration 0"):
        what_if(graph(nothing))
