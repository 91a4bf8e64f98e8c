"""Reports: reading run folders, panel data, and escaping of file content."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_comm.observe.effective import effective_time
from moe_comm.observe.records import (
    ATTEMPTS,
    FAULTS,
    LOADS,
    METRICS,
    PLACEMENTS,
    Attempt,
    FaultRecord,
    LoadLine,
    PlacementLine,
    RankStep,
    append,
    read_folder,
    read_lines,
    to_json,
)
from moe_comm.observe.report import panels, read_run, write_report
from moe_comm.observe.report.figures import POINTS, links_of, slowdown
from moe_comm.observe.report.lines import spread_lines
from moe_comm.observe.report.page import embedded
from moe_comm.runtime.untrusted import printable_line
from tests.support.synthetic import SlowLink, Straggler, SyntheticFault, SyntheticRun, write_run

pytest.importorskip("plotly", reason="needs the observe extra")


def rank_line(step: int, rank: int, compute: float, **more: Any) -> RankStep:
    defaults: dict[str, Any] = {
        "host": f"h{rank // 2}",
        "begin_s": 100.0 + 2 * step,
        "total": 2.0,
        "communication": 0.5,
    }
    return RankStep(
        step=step, rank=rank, compute=compute, data=0.1, checkpoint=0.0, memory_bytes=1 << 30, **defaults | more
    )


def metrics_line(step: int, **more: Any) -> dict[str, Any]:
    times = {"total": 2.0, "compute": 1.0, "communication": 0.5, "data": 0.25, "checkpoint": 0.125}
    defaults = {
        "step": step,
        "loss": 10.0 - step,
        "grad_norm": 1.0,
        "times": times,
        "loop_s": 0.125,
        "tokens_per_s": 50.0,
    }
    return defaults | more


def write_metrics(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curves_have_each_step_once_and_null_for_missing_values(tmp_path: Path) -> None:
    lines = [
        metrics_line(1),
        metrics_line(2, grad_norm=None, skipped="NaN on rank 1"),
        {"step": 2, "validation/loss": 3.0},
    ]
    write_metrics(tmp_path, [*lines, metrics_line(3, mfu=0.5)])
    data = panels(read_run(tmp_path))["curves"]
    assert data["step"] == [1, 2, 3]
    assert data["values"]["loss"] == [9.0, 8.0, 7.0]
    assert data["values"]["grad_norm"] == [1.0, None, 1.0]
    assert data["values"]["mfu"] == [None, None, 0.5]
    assert [data["values"][part][0] for part in ("compute", "communication", "data", "checkpoint", "loop")] == [
        1.0,
        0.5,
        0.25,
        0.125,
        0.125,
    ]
    assert data["skipped"] == [[2, "NaN on rank 1"]]


def test_many_steps_are_reduced_to_few_points_with_minima_and_maxima(tmp_path: Path) -> None:
    write_metrics(tmp_path, [metrics_line(step, loss=50.0 if step == 3333 else 2.0) for step in range(1, 5001)])
    data = panels(read_run(tmp_path))["curves"]
    assert len(data["step"]) == POINTS
    assert max(data["high"]["loss"]) == 50.0 and max(data["low"]["loss"]) == 2.0
    assert 2.0 < max(data["values"]["loss"]) < 50.0


def test_health_is_across_layers_even_if_only_the_worst_were_written(tmp_path: Path) -> None:
    across = {"imbalance": [1.5, 3.0], "diversity": [0.9, 0.2]}
    load = {"layers": [4], "imbalance": [3.5], "diversity": [0.1]}
    write_metrics(tmp_path, [metrics_line(1, load=load, load_across=across)])
    data = panels(read_run(tmp_path))["health"]
    assert data["across"]["imbalance"] == [[1.5], [3.0]]
    assert data["values"]["imbalance"] == [[None]] * 4 + [[3.5]]
    assert len(data["layers"]) == 5


def test_loads_are_relative_to_the_mean_of_their_layer(tmp_path: Path) -> None:
    for step, load in ((1, [4, 0, 0, 0]), (20, [1, 1, 1, 1]), (40, [0, 0, 0, 0])):
        append(tmp_path / LOADS, LoadLine(step, "a", load))
        append(tmp_path / LOADS, LoadLine(step, "b", [3, 1, 2, 2]))
    data = panels(read_run(tmp_path))["loads"]
    assert data["step"] == [1, 20, 40] and data["layers"] == ["a", "b"]
    assert [one[0] for one in data["ratio"]] == [[400, 0, 0, 0], [100, 100, 100, 100], [100, 100, 100, 100]]
    assert data["ratio"][0][1] == [150, 50, 100, 100]


def test_owners_are_shown_after_the_first_decision_and_after_switches(tmp_path: Path) -> None:
    first, second = [[0], [0], [1], [1]], [[0], [1, 0], [0], [1]]
    for step, owners, switched in ((10, first, False), (20, first, False), (30, second, True), (40, second, False)):
        append(tmp_path / PLACEMENTS, PlacementLine(step, "a", owners, 2, int(step > 20), switched, "", 1.5, 1.1))
    append(tmp_path / PLACEMENTS, PlacementLine(10, "b", first, 2, ratio_before=float("nan")))
    (tmp_path / METRICS).write_text("")
    data = panels(read_run(tmp_path))["placements"]
    assert data["layers"] == ["a", "b"] and data["ranks"] == 2
    assert data["step"] == [[10, 30], [10]]
    assert data["owners"] == [[[0, 0, 1, 1], [0, [1, 0], 0, 1]], [[0, 0, 1, 1]]]
    assert data["ratio"] == [[[1.5, 1.1], [1.5, 1.1]], [[None, 1.0]]]


def test_loads_of_many_experts_and_steps_are_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.observe.report.read.MOST_LOADS", 16_000)
    for step in range(1, 31):
        append(tmp_path / LOADS, LoadLine(step, "a", [step] * 2000))
    data = panels(read_run(tmp_path))["loads"]
    assert data["step"][0] == 1 and data["step"][-1] == 30 and len(data["step"]) == 8
    assert data["per"] == 4 and len(data["ratio"][0][0]) == 500


def test_a_straggler_has_a_slowdown_in_its_pipeline_stage(tmp_path: Path) -> None:
    # Stage 1 has twice the work of stage 0; rank 6 is slow even so.
    for rank in range(8):
        for step in (1, 2):
            compute = (1.0 if rank < 4 else 2.0) * (1.5 if rank == 6 else 1.0)
            append(tmp_path / f"ranks/rank-{rank:05d}.jsonl", rank_line(step, rank, compute))
    append(tmp_path / ATTEMPTS, Attempt(0, 8, 90.0, 102.0, 1, "fresh", {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "ep": 2}))
    data = panels(read_run(tmp_path))["ranks"]
    assert data["slowdown"] == [1, 1, 1, 1, 1, 1, 1.5, 1]
    assert data["pp"] == [0, 0, 0, 0, 1, 1, 1, 1] and data["dp"] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert data["hosts"] == ["h0", "h1", "h2", "h3"] and data["host"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data["values"]["compute"][6] == [3.0, 3.0]


def test_many_ranks_and_steps_are_binned_and_stalls_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.observe.report.figures.CELLS", 10)
    for rank in (0, 1):
        for step in range(1, 101):
            line = replace(rank_line(step, rank, 1.0 + rank), checkpoint=3.0 if step == 77 and rank == 1 else 0.0)
            append(tmp_path / f"ranks/rank-{rank:05d}.jsonl", line)
    data = panels(read_run(tmp_path))["ranks"]
    assert data["bins"] == [1, 21, 41, 61, 81] and data["width"] == 20
    assert data["values"]["compute"] == [[1.0] * 5, [2.0] * 5]
    assert data["values"]["checkpoint"] == [[0.0] * 5, [0.0, 0.0, 0.0, 3.0, 0.0]]


def test_slowdown_of_ranks_without_data_is_nan() -> None:
    found = slowdown(np.array([[1.0, np.nan], [np.nan, np.nan], [3.0, 3.0]]), [0, 0, 0])
    assert found[0] == 0.5 and math.isnan(found[1]) and found[2] == 1.5


def test_bytes_are_means_per_step_between_ranks_and_between_hosts(tmp_path: Path) -> None:
    for step in (1, 2):
        append(
            tmp_path / "ranks/rank-00000.jsonl",
            rank_line(step, 0, 1.0, peers={"1": 10, "2": 100 * step}, sent={"dispatch": 50}),
        )
        append(tmp_path / "ranks/rank-00001.jsonl", rank_line(step, 1, 1.0, peers={"2": 7}))
        append(tmp_path / "ranks/rank-00002.jsonl", rank_line(step, 2, 1.0, links={"0": 0.25 * step}))
    lines = read_run(tmp_path).ranks
    data = links_of(lines)
    assert data["rank"] == {"labels": ["0", "1", "2"], "values": [[None, 10, 150], [None, None, 7], [None] * 3]}
    assert data["host"] == {"labels": ["h0", "h1"], "values": [[10, 157], [None, None]]}
    assert data["probe"]["values"] == [[None, 0.375], [None, None]]
    assert lines.sent["dispatch"].tolist() == [50, 0, 0]


def test_effective_time_counts_each_step_once(tmp_path: Path) -> None:
    write_metrics(tmp_path, [metrics_line(step) for step in range(1, 6)])  # 10 s, 9.375 without checkpoints
    append(tmp_path / ATTEMPTS, Attempt(0, 1, 100.0, 102.0, 1, "fresh"))
    append(tmp_path / FAULTS, FaultRecord(107.0, 3, "died", [0], "restart", noticed_s=0.5))
    append(tmp_path / ATTEMPTS, Attempt(1, 1, 110.0, 112.0, 3, "checkpoint", last_s=106.0))
    for step, begin in ((1, 102.0), (2, 104.0), (3, 112.0), (4, 114.0), (5, 118.0)):
        append(tmp_path / "ranks/rank-00000.jsonl", rank_line(step, 0, 1.0, begin_s=begin))
    data = panels(read_run(tmp_path))["timeline"]
    assert data["wall_s"] == 20.0 and data["effective"] == pytest.approx(9.375 / 20)
    assert data["text"].startswith("effective training time: 46.9% of 20.0 s in 2 attempt(s)")
    assert [(one["begin"], one["ready"], one["end"]) for one in data["attempts"]] == [(0, 2, 6), (10, 12, 20)]
    assert data["faults"][0] | {"what": ""} == {
        "at": 7,
        "step": 3,
        "kind": "died",
        "ranks": [0],
        "action": "restart",
        "what": "",
        "noticed_s": 0.5,
    }


def test_the_page_ends_where_the_run_has_ended(tmp_path: Path) -> None:
    write_metrics(tmp_path, [metrics_line(step) for step in range(1, 6)])
    append(tmp_path / ATTEMPTS, Attempt(0, 1, 100.0, 102.0, 1, "fresh"))
    append(tmp_path / "ranks/rank-00000.jsonl", rank_line(5, 0, 1.0, begin_s=110.0))
    expected = effective_time(tmp_path, 125.0)
    assert expected is not None
    result = {"status": "finished", "ended_s": 125.0, "effective_time": expected.as_dict()}
    (tmp_path / "result.json").write_text(json.dumps(result))
    shown = panels(read_run(tmp_path))
    (tile,) = (one["value"] for one in shown["summary"] if one["name"] == "Effective training time")
    assert shown["timeline"]["effective"] == expected.ratio and tile == pytest.approx(expected.ratio, rel=1e-4)
    assert shown["timeline"]["text"] == str(expected)
    assert shown["timeline"]["wall_s"] == shown["timeline"]["attempts"][0]["end"] == 25.0
    append(tmp_path / ATTEMPTS, Attempt(1, 1, 130.0, 132.0, 6, "checkpoint", last_s=112.0, ended="finished"))
    assert panels(read_run(tmp_path))["timeline"]["wall_s"] > 25.0, "the end of an earlier start is not that of the run"


def test_starts_mappings_and_validation_losses_are_in_the_data_of_the_charts(tmp_path: Path) -> None:
    lines: list[Any] = [metrics_line(step) for step in range(1, 9)]
    write_metrics(
        tmp_path, [*lines[:4], {"step": 4, "validation/loss": 3.25}, *lines[4:], {"step": 8, "validation/loss": 3.0}]
    )
    starts = [(1, {"dp": 2, "ep": 2}), (3, {"dp": 2, "ep": 2}), (6, {"tp": 2, "ep": 1})]
    for number, (first, mapping) in enumerate(starts):
        append(tmp_path / ATTEMPTS, Attempt(number, 2, 100.0 + number, 101.0 + number, first, "fresh", mapping))
    shown = panels(read_run(tmp_path))
    assert shown["curves"]["validation"] == [[4, 3.25], [8, 3.0]]
    assert shown["curves"]["step"] == list(range(1, 9))
    assert {one["name"]: one["value"] for one in shown["summary"]}["Validation loss, last"] == 3.0
    attempts = shown["timeline"]["attempts"]
    assert [(one["first_step"], one["remapped"], one["mapping"]) for one in attempts] == [
        (1, False, "2 ranks, dp2 ep2"),
        (3, False, "2 ranks, dp2 ep2"),
        (6, True, "2 ranks, tp2"),
    ]


def test_missing_or_corrupted_files_are_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    write_metrics(tmp_path, [metrics_line(1), metrics_line(2)])
    with (tmp_path / METRICS).open("a") as file:
        file.write('not json\n[1]\n{"step": "x", "loss": 1}\n{"step": 3, "loss": 1' + "")
    bad = tmp_path / "ranks/rank-00000.jsonl"
    append(bad, rank_line(1, 0, 1.0))
    append(bad, {"step": 2, "rank": "zero"})
    with bad.open("a") as file:
        file.write(to_json(replace(rank_line(1, 0, 1.0), step=10**400)) + "\n" + '{"step": 3, "ra')
    os.mkfifo(tmp_path / LOADS)
    run = read_run(tmp_path)
    notes = " ".join(run.notes)
    assert "metrics.jsonl: skipped 2 invalid line(s)" in notes
    assert "ranks/: skipped 2 invalid line(s)" in notes
    assert "loads.jsonl cannot be read" in notes and "attempts.jsonl is missing" in notes
    data = panels(run)
    assert data["curves"]["step"] == [1, 2] and data["ranks"]["rank"] == [0]
    page = write_report([tmp_path]).read_text()
    assert "attempts.jsonl is missing" in page


@pytest.mark.parametrize("content", [None, "config.resolved.toml", METRICS])
def test_empty_runs_give_a_page_and_other_folders_an_error(tmp_path: Path, content: str | None) -> None:
    if content is None:
        with pytest.raises(ConfigError, match="is not a run folder"):
            write_report([tmp_path])
        with pytest.raises(ConfigError, match="is not a folder"):
            write_report([tmp_path / "nothing"])
    else:
        (tmp_path / content).write_text("")
        assert "Missing data" in write_report([tmp_path]).read_text()


def test_lines_are_sampled_evenly_from_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:06d} {'x' * 90}\n" for number in range(5000)) + "cut")
    found = [int(line[:6]) for line in spread_lines(path, 50)]
    assert found[0] == 0 and found[-1] >= 4998 and 45 <= len(found) <= 50
    assert found == sorted(set(found)) and max(np.diff(found)) < 150
    assert len(list(spread_lines(path, 6000))) == 5000


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=hacked()>\u2028&amp;'\""


def test_text_from_files_never_becomes_markup(tmp_path: Path) -> None:
    run = tmp_path / "run<b onclick=hacked()>"
    append(run / "ranks/rank-00000.jsonl", rank_line(1, 0, 1.0, host=HOSTILE, sent={HOSTILE: 1}))
    append(run / LOADS, LoadLine(1, HOSTILE, [1, 2]))
    append(run / FAULTS, FaultRecord(1.0, 1, HOSTILE, [0], HOSTILE, HOSTILE))
    append(run / ATTEMPTS, Attempt(0, 1, 1.0, 2.0, 1, HOSTILE))
    write_metrics(run, [metrics_line(1, skipped=HOSTILE)])
    (run / "result.json").write_text(json.dumps({"status": HOSTILE}))
    page = write_report([run]).read_text()
    found = [markup for markup in ("<b onclick", "<img src=x", "<script>window.hacked") if markup in page]
    assert not found
    assert page.count("</script>") == 5, "only the five scripts of the report"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None and "<" not in data[1] and "\u2028" not in data[1]
    assert json.loads(data[1])["runs"][0]["ranks"]["hosts"] == [printable_line(HOSTILE)]
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and policy[1].count("'sha256-") == 4
    assert "unsafe-eval" not in policy[1] and "http" not in policy[1]


def test_embedded_json_has_only_finite_numbers() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embedded({"a": math.nan})


def test_a_thousand_ranks_fit_into_ten_megabytes(tmp_path: Path) -> None:
    synthetic = SyntheticRun(
        ranks=1000, steps=30, rank_every=4, layers=16, experts=128, pp=4, stragglers=(Straggler(137, 1.4),)
    )
    write_run(tmp_path / "run", synthetic)
    data = panels(read_run(tmp_path / "run"))
    assert len(data["ranks"]["rank"]) == 1000 and int(np.argmax(data["ranks"]["slowdown"])) == 137
    assert data["ranks"]["slowdown"][137] == pytest.approx(1.4, rel=0.02)
    page = write_report([tmp_path / "run"])
    assert page.stat().st_size < 10e6


def test_synthetic_runs_are_readable(tmp_path: Path) -> None:
    fault = SyntheticFault(6, "died", (1,), lost=2, injected=True)
    slow = SlowLink(0, 2, factor=5.0)
    synthetic = SyntheticRun(
        ranks=4, steps=10, ranks_per_host=2, ep=2, faults=(fault,), slow_links=(slow,), span_steps=(3,), load_every=5
    )
    folder = write_run(tmp_path / "run", synthetic)
    steps = list(read_folder(folder / "ranks", RankStep))
    assert [line.step for line in steps if line.rank == 0] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10]
    for line in steps:
        assert line.compute + line.communication + line.data + line.checkpoint <= line.total + 1e-5
    assert next(line.links for line in steps if line.rank == 2 and line.links) == {"0": 0.01}
    assert [one.first_step for one in read_lines(folder / ATTEMPTS, Attempt)] == [1, 4]
    from moe_comm.observe.records import SpanLine

    spans = list(read_folder(folder / "spans", SpanLine))
    calls = [one for one in spans if one.kind == "dispatch" and one.layer == "layers.0.moe" and one.group == [0, 1]]
    assert {one.rank for one in calls} == {0, 1} and len({(one.call, one.end_ns) for one in calls}) == 1
    with pytest.raises(ConfigError, match="not empty"):
        write_run(folder, synthetic)


def test_command_writes_one_page_or_compares_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, step_s in (("a", 1.0), ("b", 2.0)):
        write_run(tmp_path / name, SyntheticRun(ranks=2, steps=4, step_s=step_s))
    assert cli.run(["report", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a/report.html").exists()
    assert cli.run(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "x/ab.html")]) == 0
    assert "ab.html" in capsys.readouterr().out and 'id="differences"' in (tmp_path / "x/ab.html").read_text()
    assert cli.run(["report", str(tmp_path / "none")]) == 2
