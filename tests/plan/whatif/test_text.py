"""``moe-comm whatif``: the cost of stragglers in a run, as text, JSON and a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_comm.cli import run as command
from moe_comm.observe.records import ATTEMPTS, SPANS, Attempt, LineWriter, SpanLine, append
from moe_plan.whatif.analysis import WhatIf, what_if
from moe_plan.whatif.run_trace import read_run_trace
from moe_plan.whatif.text import summary, text

MS = 10**6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run of two ranks and two steps: rank 0 computes 6 ms, rank 1 10 ms, then a collective takes 2 ms."""
    result = tmp_path / "slow-run"
    append(result / ATTEMPTS, Attempt(0, 2, 0.5, 0.6, 1, "fresh", {"dp": 2}))
    for rank, takes in ((0, 6), (1, 10)):
        writer = LineWriter(result / SPANS / f"rank-{rank:05d}.jsonl")
        for step in (1, 2):
            start = (1000 + step) * 1000 * MS
            collective_start, end = start + takes * MS, start + 12 * MS
            for kind, name, begin_ns, end_ns, group in (
                ("step", "step", start, end, []),
                ("compute", "forward and backward", start, collective_start, []),
                ("collective", "sum of gradients", collective_start, end, [0, 1]),
            ):
                call = step if group else 0
                writer.write(SpanLine(rank, kind, name, begin_ns, end_ns, step, group=group, call=call))
        writer.close()
    return result


def test_a_slow_rank_is_reported_with_its_cost(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "w.json", tmp_path / "w.html"
    assert command(["whatif", str(folder), "--json", str(out), "--page", str(page)]) == 0
    output = capsys.readouterr().out
    assert "2 steps, 12.0 ms each; 10.0 ms without stragglers" in output and "slowdown 1.200, 16.7% wasted" in output
    assert "slowest ranks (1)" in output
    lines = output.splitlines()
    operations = next(at for at, line in enumerate(lines) if line.startswith("slowdown by kind of operation"))
    places = next(at for at, line in enumerate(lines) if line.startswith("slowdown by coordinate"))
    assert operations < places and lines[operations + 1].split()[0] == "1.200"
    assert lines[places + 1] == "  by dp  1: 1.200"
    result = json.loads(out.read_text())
    assert result["slowdown"] == pytest.approx(1.2) and result["measured_s"] == pytest.approx([0.012, 0.012])
    assert result["worst_ranks"] == [1] and result["replay_error"] == pytest.approx(0)
    assert [(one["rank"], one["slowdown"]) for one in result["by_rank"]] == [(0, 1.0), (1, pytest.approx(1.2))]
    assert output.splitlines()[-4:-1] == ["slowdown by worker", "         dp 0     dp 1", "pp 0  1.000    1.200 ▒"]
    html = page.read_text()
    assert "Slowdown by worker" in html and "What if: slow-run" in html and "<script src=" not in html


def test_json_on_standard_output_is_the_only_output_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["whatif", str(folder), "--json", "-", "--page", "w.html"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] and "slowdown 1.200" in captured.err and "wrote w.html" in captured.err
    assert not (tmp_path / "-").exists()


def test_an_unwritable_page_is_reported_before_the_analysis(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["whatif", str(folder), "--page", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Is a directory" in captured.err


def test_steps_can_be_chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["whatif", str(folder), "--steps", "2:2"]) == 0
    captured = capsys.readouterr().out
    assert captured.startswith("1 step, ") and "one step is not representative of a run" in captured
    assert command(["whatif", str(folder), "--steps", "2:2", "--json", "-"]) == 0
    assert "not representative" in json.loads(capsys.readouterr().out)["caution"]
    assert command(["whatif", str(folder), "--steps", "7:9"]) == 2
    assert "no spans" in capsys.readouterr().err


def test_paths_without_a_run_or_a_trace_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["whatif", str(tmp_path)]) == 2
    (tmp_path / "a.parquet").write_text("no table")
    assert command(["whatif", str(tmp_path / "a.parquet"), "--steps", "1:2"]) == 2
    assert "not to published traces" in capsys.readouterr().err
    assert command(["whatif", str(tmp_path / "a.parquet")]) in (1, 2)
    assert "a.parquet" in capsys.readouterr().err


@pytest.fixture
def result(folder: Path) -> WhatIf:
    trace = read_run_trace(folder)
    return what_if(trace.graph, trace.even_N)


def test_a_large_replay_error_is_reported(result: WhatIf) -> None:
    assert "above 5%" not in text(result) and "one step" not in text(result) and "of the lost time" in text(result)
    assert summary(result)["caution"] is None
    assert "above 5%" in text(replace(result, replayed_S=result.replayed_S * 0.9))


def test_unknown_values_are_omitted(result: WhatIf) -> None:
    unknown = replace(
        result, even_S=result.even_S * np.nan, slowest_ranks_share=np.nan, last_stage_share=np.nan, correlation=np.nan
    )
    output, numbers = text(unknown), summary(unknown)
    assert "uneven routing" not in output and "fixing" not in output and "nan" not in output
    assert numbers["routing"] is numbers["mended_workers"] is numbers["correlation"] is None
    assert "last pipeline stage" not in text(result), "there is only one stage"
