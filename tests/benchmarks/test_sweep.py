"""Sweeps of ``bench dispatch``: scaling along one axis, small batches, and plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plot, sweep
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.errors import ConfigError

TINY = DispatchBench(ranks=2, tokens=33, hidden=48, experts=7, top_k=3, warmup=1, iterations=2)


def test_sweep_reports_growth_per_line(tmp_path: Path) -> None:
    base = replace(TINY, ranks=1, peers=("torch_gloo",))
    result = sweep.run(sweep.Sweep(base, "hidden", (16, 32)))
    assert result["values"] == [16, 32]
    assert set(result["milliseconds"]) == set(result["linearity"])
    assert "torch_gloo dispatch" in result["milliseconds"]
    svg = plot.write(result, tmp_path / "plot")[0].read_text()
    assert svg.startswith("<svg") and svg.count("<polyline") > len(result["milliseconds"])


def test_small_batches_are_measured_in_a_row_and_after_a_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SMALL", (1, 3))
    result = sweep.small(replace(TINY, ranks=1, peers=()), str(tmp_path / "small.json"))
    assert json.loads((tmp_path / "small.json").read_text()).keys() == result.keys()
    for mode, in_a_row in (("in_a_row", sweep.IN_A_ROW), ("after_a_barrier", 1)):
        assert set(result[mode]["overhead_us"]) == {1, 3}
        assert result[mode]["settings"]["in_a_row"] == in_a_row


def test_linearity_of_a_straight_line_is_one() -> None:
    line = sweep.linearity((10, 100, 1000), [1.0, 10.0, 100.0])
    assert line["log_slope"] == pytest.approx(1.0)
    assert line["unit_cost_ratio"] == pytest.approx(1.0)


def test_a_sweep_must_increase() -> None:
    with pytest.raises(ConfigError, match="increasing"):
        sweep.Sweep(TINY, "tokens", (8, 4))
