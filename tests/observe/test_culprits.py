"""Ranks that delayed a run, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm.cli import run as command
from moe_comm.errors import InputError
from moe_comm.observe import records
from moe_comm.observe.culprits import culprits
from moe_comm.observe.records import FaultRecord, LineWriter
from tests.observe.test_diagnose import STEPS, lines


def write(folder: Path, slow: dict[int, float]) -> Path:
    for line in lines(4, slow=slow):
        records.append(folder / records.RANKS / f"rank-{line.rank:05d}.jsonl", line)
    return folder


def test_consecutive_windows_with_the_same_diagnosis_are_merged(tmp_path: Path) -> None:
    write(tmp_path, {2: 2.0})
    (entry,) = culprits(tmp_path, size=8)
    assert (entry.finding.ranks, entry.first_step, entry.last_step) == ((2,), 1, STEPS)
    assert str(entry).startswith(f"steps 1 to {STEPS}: slow rank, rank 2 (100% confidence): rank 2 on host1 spends ")


def test_detected_faults_are_included_in_order(tmp_path: Path) -> None:
    write(tmp_path, {2: 2.0})
    writer = LineWriter(tmp_path / records.FAULTS)
    writer.write(FaultRecord(0.0, 30, "stuck", [1], "restart", "rank 1 is hung"))
    writer.write(FaultRecord(0.0, 31, "spike", [0], "rerun"))
    writer.close()
    entries = culprits(tmp_path)
    assert [(one.finding.kind, one.finding.ranks, one.first_step) for one in entries] == [
        ("slow rank", (2,), 1),
        ("hang", (1,), 30),
    ]
    assert culprits(tmp_path, (25, 35))[0].finding.kind == "hang"


def test_the_command_prints_slow_ranks_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, healthy = write(tmp_path / "slow", {0: 3.0}), write(tmp_path / "fine", {})
    out = tmp_path / "found.json"
    assert command(["diagnose", str(slow), "--steps", "5:15", "--json", str(out)]) == 0
    assert "steps 5 to 15: slow rank, rank 0 (" in capsys.readouterr().out
    (entry,) = json.loads(out.read_text())
    assert entry["finding"]["kind"] == "slow rank" and entry["finding"]["ranks"] == [0]
    assert command(["diagnose", str(healthy)]) == 0
    assert capsys.readouterr().out == "no rank, link or host stands out\n"


def test_a_folder_without_records_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="observe"):
        culprits(tmp_path)
    assert command(["diagnose", str(tmp_path / "none")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
