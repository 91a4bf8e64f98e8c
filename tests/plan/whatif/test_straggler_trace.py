"""Published traces: strict checks, replays that equal a simulation, and detected stragglers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_comm.cli import run as command
from moe_comm.errors import ConfigError, CorruptFile
from moe_plan.whatif import straggler_trace
from moe_plan.whatif.analysis import what_if
from moe_plan.whatif.straggler_trace import read_straggler_trace, straggler_graph

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

DP, PP, MICRO = 2, 2, 4
ORDERS = (
    [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)],
    [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2), ("F", 3), ("B", 3)],
)
NAMES = {"F": "forward-compute", "B": "backward-compute"}
Seconds = Callable[[str, int, int], float]
"""Returns the seconds of an operation from its type, dp and pp coordinate."""


def healthy(kind: str, dp: int, pp: int) -> float:
    return {"forward-compute": 0.1, "backward-compute": 0.2, "optimizer": 0.05}.get(kind, 0.01)


def slow(kind: str, dp: int, pp: int) -> float:
    """Worker dp 1, pp 0 computes at a third of the speed."""
    return healthy(kind, dp, pp) * (3 if kind.endswith("compute") and (dp, pp) == (1, 0) else 1)


def simulate(seconds: Seconds) -> dict[tuple[str, int, int, int], tuple[float, float]]:
    """Return begin and end by (type, number, dp, pp), computed recursively from the dependencies."""

    def waits(kind: str, number: int, dp: int, pp: int) -> list[tuple[str, int, int, int]]:
        order = [(NAMES[operation], micro) for operation, micro in ORDERS[pp]]
        result: list[tuple[str, int]] = []
        if (kind, number) in order:
            place = order.index((kind, number))
            result += order[place - 1 : place] if place else []
            if kind == "forward-compute":
                result += [("params-all-gather", 0)] * (number == 0) + [("forward-recv", number)] * (pp > 0)
            else:
                result += [("backward-recv", number)] * (pp < PP - 1)
        elif kind.endswith("-send"):
            result += [(f"{kind.split('-')[0]}-compute", number)] + [(kind, number - 1)] * (number > 0)
        elif kind.endswith("-recv"):
            result += [(f"{kind.split('-')[0]}-compute", number - 1), (kind, number - 1)] if number else []
            if kind == "backward-recv" and not number:
                result.append(order[order.index(("backward-compute", 0)) - 2])
        elif kind in TAIL:
            place = TAIL.index(kind)
            result.append((TAIL[place - 1], 0) if place else order[-1])
        return [(operation, index, dp, pp) for operation, index in result]

    def group(kind: str, number: int, dp: int, pp: int) -> list[tuple[str, int, int, int]]:
        direction, _, action = kind.partition("-")
        if action in ("send", "recv"):
            on = 1 if (direction == "forward") == (action == "send") else -1
            return [
                (kind, number, dp, pp),
                (f"{direction}-{'recv' if action == 'send' else 'send'}", number, dp, pp + on),
            ]
        if kind in ("params-all-gather", "grads-reduce-scatter"):
            return [(kind, number, other, pp) for other in range(DP)]
        if kind == "embedding-grads-all-reduce":
            return [(kind, number, dp, other) for other in (0, PP - 1)]
        if kind == "optimizer-clip-main-grad":
            return [(kind, number, one, two) for one in range(DP) for two in range(PP)]
        return [(kind, number, dp, pp)]

    @cache
    def begin(*operation: Any) -> float:
        return max([end(*one) for one in waits(*operation)], default=0.0)

    @cache
    def end(*operation: Any) -> float:
        return max(begin(*one) for one in group(*operation)) + seconds(operation[0], operation[2], operation[3])

    result = {}
    for dp in range(DP):
        for pp in range(PP):
            kinds = [*NAMES.values(), *(["forward-send", "backward-recv"] if pp < PP - 1 else [])]
            kinds += ["forward-recv", "backward-send"] if pp else []
            for kind, number in [*((kind, micro) for kind in kinds for micro in range(MICRO))]:
                result[kind, number, dp, pp] = begin(kind, number, dp, pp), end(kind, number, dp, pp)
            for kind in ("params-all-gather", *TAIL):
                result[kind, 0, dp, pp] = begin(kind, 0, dp, pp), end(kind, 0, dp, pp)
    return result


TAIL = (
    "gc",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer-clip-main-grad",
    "optimizer",
)


def columns(seconds: Seconds, steps: int = 2) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {}
    for step in range(steps):
        for (kind, number, dp, pp), (begin, end) in simulate(seconds).items():
            passes = kind.endswith("compute")
            row = {
                "dp_rank": dp,
                "stage": pp,
                "rank": dp * PP + pp,
                "step": 10 * step,
                "optype": kind,
                "start_ts": begin,
                "duration": end - begin,
                "seq_id": number,
                "mc": 0 if passes else -1,
                "gmc": pp if passes else -1,
                "mb_id": number if passes else -1,
            }
            for name, value in row.items():
                rows.setdefault(name, []).append(value)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(rows["step"]))  # the order of rows in a file must not matter
    return {name: np.array(values)[order] for name, values in rows.items()}


def write(path: Path, rows: dict[str, Any]) -> Path:
    parquet.write_table(arrow.table(rows), path)
    return path


def span_of(seconds: Seconds) -> float:
    return max(end for _, end in simulate(seconds).values())


@pytest.mark.parametrize("seconds", [healthy, slow])
def test_the_replay_of_a_trace_without_gaps_equals_the_trace(tmp_path: Path, seconds: Seconds) -> None:
    graph = straggler_graph(read_straggler_trace(write(tmp_path / "trace.parquet", columns(seconds))))
    result = what_if(graph)
    assert result.steps == (0, 10)
    np.testing.assert_allclose(result.replayed_S, span_of(seconds), rtol=1e-9)
    assert result.replay_error < 1e-9
    assert result.graph_error < 1e-9
    assert graph.gap_N.max() < 1e-9


def test_the_slow_worker_is_detected_with_its_cost(tmp_path: Path) -> None:
    result = what_if(straggler_graph(read_straggler_trace(write(tmp_path / "trace.parquet", columns(slow)))))

    def balanced(kind: str, dp: int, pp: int) -> float:
        return healthy(kind, dp, pp) * (1.5 if kind.endswith("compute") else 1)  # the mean of 3, 1, 1 and 1

    assert result.slowdown == pytest.approx(span_of(slow) / span_of(balanced), rel=1e-9)
    assert result.waste == pytest.approx(1 - span_of(balanced) / span_of(slow), rel=1e-9)
    assert result.worst_ranks == (2,)
    assert result.slowest_ranks_share > 0.9 > result.last_stage_share
    assert result.worker_DP.shape == (DP, PP)
    assert np.unravel_index(result.worker_DP.argmax(), (DP, PP)) == (1, 0)
    assert next(iter(result.by_operation)) == "backward-compute"
    assert result.by_operation["forward-transfer"] == pytest.approx(1)


def test_the_command_accepts_a_published_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path / "trace.parquet", columns(slow)), tmp_path / "out.json"
    assert command(["whatif", str(path), "--json", str(out)]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("2 steps, ") and [line.split()[:2] for line in output[-2:]] == [
        ["pp", "0"],
        ["pp", "1"],
    ]
    result = json.loads(out.read_text())
    assert result["worst_ranks"] == [2] and result["routing"] is None and result["even_s"] == [None, None]
    assert result["replay_error"] < 1e-9


def test_gaps_are_excluded_from_the_replay(tmp_path: Path) -> None:
    rows = columns(healthy)
    late = np.isin(rows["optype"], ("optimizer",))
    rows["start_ts"] = rows["start_ts"] + 0.5 * late
    graph = straggler_graph(read_straggler_trace(write(tmp_path / "trace.parquet", rows)))
    result = what_if(graph)
    np.testing.assert_allclose(result.measured_S, span_of(healthy) + 0.5, rtol=1e-9)
    np.testing.assert_allclose(result.with_gaps_S, result.measured_S, rtol=1e-9)
    np.testing.assert_allclose(result.replayed_S, span_of(healthy), rtol=1e-9)
    assert result.slowdown == pytest.approx(1)


def _without(rows: dict[str, Any], chosen: Any) -> dict[str, Any]:
    return {name: values[~chosen] for name, values in rows.items()}


def _first(rows: dict[str, Any], **values: Any) -> Any:
    result = np.logical_and.reduce([rows[name] == value for name, value in values.items()])
    assert result.any()
    return result & (np.cumsum(result) == 1)


INVALID: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no column": (lambda rows: {name: of for name, of in rows.items() if name != "seq_id"}, "seq_id"),
    "text for numbers": (lambda rows: rows | {"stage": rows["stage"].astype(str)}, "stage must hold integers"),
    "whole seconds": (lambda rows: rows | {"duration": np.ones(len(rows["step"]), int)}, "duration must hold"),
    "a NaN": (lambda rows: rows | {"start_ts": np.where(rows["step"] == 0, np.nan, 0.0)}, "finite"),
    "before it began": (lambda rows: rows | {"duration": -rows["duration"]}, "not be negative"),
    "another operation": (lambda rows: rows | {"optype": np.char.add(rows["optype"], "!")}, "unknown operations"),
    "an end beyond all numbers": (
        lambda rows: rows | {"start_ts": rows["start_ts"] + 1.7e308, "duration": rows["duration"] + 1.7e308},
        "finite",
    ),
    "empty cells": (
        lambda rows: rows | {"seq_id": arrow.array([None, *rows["seq_id"][1:].tolist()])},
        "seq_id must hold integers",
    ),
    "numbers for operations": (lambda rows: rows | {"optype": rows["step"]}, "unknown operations"),
    "a huge data-parallel rank": (lambda rows: rows | {"dp_rank": rows["dp_rank"] + (1 << 62)}, "dp_rank must be from"),
    "more workers than rows": (lambda rows: rows | {"dp_rank": rows["dp_rank"] * 500_000}, "pairs of worker and step"),
    "a negative stage": (lambda rows: rows | {"stage": rows["stage"] - 1}, "stage must be from 0"),
    "a stage far away": (lambda rows: rows | {"stage": rows["stage"] << 40}, "stage must be from 0"),
    "a worker that is missing": (
        lambda rows: _without(rows, (rows["dp_rank"] == 1) & (rows["stage"] == 1) & (rows["step"] == 10)),
        "pairs of worker and step",
    ),
    "no rows": (lambda rows: {name: values[:0] for name, values in rows.items()}, "0 operations"),
}


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_traces_are_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    path = write(tmp_path / "trace.parquet", change(columns(healthy)))
    with pytest.raises(CorruptFile, match=message):
        read_straggler_trace(path)


def test_a_receive_without_its_send_is_rejected(tmp_path: Path) -> None:
    rows = columns(healthy)
    rows = _without(rows, _first(rows, optype="forward-send", seq_id=3))
    trace = read_straggler_trace(write(tmp_path / "trace.parquet", rows))
    with pytest.raises(CorruptFile, match="in the collective forward"):
        straggler_graph(trace)


def test_other_files_and_too_large_traces_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text := tmp_path / "text.parquet").write_text("no columns")
    for path in (text, tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError):
            read_straggler_trace(path)
    monkeypatch.setattr(straggler_trace, "MOST_OPERATIONS", 10)
    with pytest.raises(CorruptFile, match="1 to 10"):
        read_straggler_trace(write(tmp_path / "trace.parquet", columns(healthy)))


def test_truncated_and_damaged_files_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.parquet", columns(healthy))
    content = path.read_bytes()
    middle = bytearray(content)
    middle[40:400] = bytes(360)
    for damaged in (content[: len(content) // 2], bytes(middle)):
        path.write_bytes(damaged)
        with pytest.raises((ConfigError, CorruptFile)):
            read_straggler_trace(path)
