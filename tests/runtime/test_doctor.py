"""The doctor reports what is installed in a table and in JSON, and gives advice for what is missing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from typing import Any

import pytest

from moe_comm.runtime import cpu_guard, doctor


@pytest.fixture(scope="module")
def report() -> doctor.DoctorReport:
    return doctor.examine()


def test_json_holds_every_topic(report: doctor.DoctorReport) -> None:
    data = json.loads(report.to_json())
    assert data["healthy"] is True
    topics = {
        "python",
        "torch",
        "extras",
        "cpu",
        "pidfd",
        "bf16",
        "shm",
        "compiler",
        "nvcc",
        "native",
        "gpus",
        "nccl",
    }
    assert topics | {"backends", "findings"} <= data.keys()
    assert set(data["backends"]) >= {"local", "shared_memory", "all_to_all", "all_gather"}
    assert data["native"]["isa"] in data["native"]["isas"]
    assert data["shm"]["bytes"] >= data["shm"]["free_bytes"] >= 0


def test_missing_or_broken_findings_have_advice(report: doctor.DoctorReport) -> None:
    assert all(finding.advice for finding in report.findings if finding.status in ("missing", "broken"))
    assert {finding.status for finding in report.findings} <= {"ok", "note", "missing", "broken"}


def test_table_shows_every_finding(report: doctor.DoctorReport, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show(report)
    shown = capsys.readouterr().out
    assert all(finding.name in shown for finding in report.findings)
    assert shown.rstrip().endswith("moe_comm can work here.")


def test_a_broken_finding_makes_the_report_unhealthy(
    report: doctor.DoctorReport, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = doctor.DoctorFinding("software", "torch", "broken", "[not] installed", "pip install torch")
    worse = dataclasses.replace(report, findings=[*report.findings, broken])
    assert not worse.healthy
    doctor.show(worse)
    shown = capsys.readouterr().out
    assert "[not] installed" in shown
    assert "torch: pip install torch" in shown
    assert "cannot work here yet" in shown


DIES_UNGUARDED = (
    f"import os, signal\nif {cpu_guard.VARIABLE!r} not in os.environ:\n    os.kill(os.getpid(), signal.SIGILL)\n"
)


@pytest.mark.parametrize(
    ("script", "status", "unguarded", "guarded"),
    [
        ("pass", "ok", "ok", "ok"),
        (DIES_UNGUARDED, "note", "died with SIGILL", "ok"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "broken", "died with SIGILL", "died with SIGILL"),
        ("raise SystemExit('no bf16')", "broken", "failed: no bf16", "failed: no bf16"),
    ],
    ids=["works", "works with the guard", "always dies", "raises"],
)
def test_bf16_is_tried_in_a_child_with_and_without_the_guard(
    monkeypatch: pytest.MonkeyPatch, script: str, status: str, unguarded: str, guarded: str
) -> None:
    monkeypatch.setattr(doctor, "BF16_TEST", script)
    notes = doctor.DoctorReport()
    doctor._bf16(notes)
    assert notes.data["bf16"]["unguarded"] == unguarded
    assert notes.data["bf16"]["guarded"] == guarded
    assert [finding.status for finding in notes.findings] == [status]
    assert signal.getsignal(signal.SIGILL) == signal.SIG_DFL


def test_more_threads_than_cores_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, status in (("1", "ok"), (str(10**6), "note"), ("2,2", "note")):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        notes = doctor.DoctorReport()
        doctor._cpu(notes)
        threads = {finding.name: finding for finding in notes.findings}["threads per rank"]
        assert threads.status == status
        assert value in threads.value
        assert bool(threads.advice) is (status == "note")


def test_full_or_absent_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: str) -> Any:
        raise FileNotFoundError(2, "No such file or directory", path)

    real = os.statvfs("/")
    full = os.statvfs_result((*real[:4], 0, *real[5:]))  # f_bavail is the fifth
    for answer, status in ((absent, "missing"), (lambda path: full, "note")):
        monkeypatch.setattr(os, "statvfs", answer)
        notes = doctor.DoctorReport()
        doctor._memory(notes)
        assert [finding.status for finding in notes.findings] == [status]
        assert notes.findings[0].advice


def test_torch_that_is_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, status in (("2.10.9", "broken"), ("2.11.0+cu130", "ok"), ("3.0", "ok"), (None, "broken")):
        monkeypatch.setattr(doctor, "_version", lambda package, version=version: version)
        notes = doctor.DoctorReport()
        doctor._software(notes)
        assert {finding.name: finding.status for finding in notes.findings}["torch"] == status
