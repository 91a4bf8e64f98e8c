"""Effective training time of runs with known times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_comm.observe.effective import EffectiveTime, effective_time
from moe_comm.observe.records import ATTEMPTS, METRICS, Attempt, append, read_lines
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.resilience.attempts import AttemptLog, carry_over


def _step(step: int, total: float, checkpoint: float = 0.0, skipped: str = "") -> str:
    return json.dumps({"step": step, "times": {"total": total, "checkpoint": checkpoint}, "skipped": skipped})


def _attempt(number: int, started: float, ready: float, **more: object) -> Attempt:
    fields = {"number": number, "world": 2, "started_s": started, "ready_s": ready, "first_step": 1, "source": "fresh"}
    return Attempt(**fields | more)  # type: ignore[arg-type]


def _write(run: Path, attempts: list[Attempt], lines: list[str]) -> None:
    for attempt in attempts:
        append(run / ATTEMPTS, attempt)
    (run / METRICS).write_text("".join(f"{line}\n" for line in lines))


def test_a_stop_by_the_user_is_a_pause_and_not_a_fault(tmp_path: Path) -> None:
    """Stopped with Ctrl-C after 130 s and resumed an hour later; the second start takes 4 s."""
    _write(
        tmp_path,
        [_attempt(0, 100.0, 110.0), _attempt(1, 3730.0, 3734.0, first_step=3, last_s=130.0, ended="interrupted")],
        [_step(1, 10.0), _step(2, 10.0), _step(3, 6.0)],
    )
    effective = effective_time(tmp_path, 3740.0)
    assert effective is not None
    assert (effective.wall_s, effective.start_s, effective.restart_s, effective.productive_s) == (40.0, 14.0, 0.0, 26.0)


@pytest.mark.parametrize(
    ("result", "ended"),
    [
        ({"status": "interrupted", "signal": 2}, "interrupted"),
        ({"status": "interrupted", "signal": 15}, ""),
        ({"status": "finished", "signal": 0}, "finished"),
        ({"status": "failed"}, ""),
        (None, ""),
    ],
)
def test_an_attempt_records_how_the_previous_one_ended(
    tmp_path: Path, result: dict[str, object] | None, ended: str
) -> None:
    append(tmp_path / ATTEMPTS, _attempt(0, 100.0, 110.0))
    if result is not None:
        (tmp_path / "result.json").write_text(json.dumps(result))
    log = AttemptLog(tmp_path, ParallelMesh(ParallelConfig()), 2, "checkpoint", ["here"])
    assert log.attempt.ended == ended


def test_the_activities_add_up_to_the_wall_time(tmp_path: Path) -> None:
    _write(
        tmp_path,
        [
            _attempt(0, 100.0, 110.0),
            _attempt(1, 137.0, 140.0, first_step=3, last_s=130.0, lost_steps=2, lost_s=8.0),
        ],
        [
            _step(1, 5.0),
            _step(2, 5.0, 1.0),
            '{"step": 2, "validation/loss": 3.0}',
            _step(3, 4.0, 0.5, "NaN"),
            _step(4, 6.0),
        ],
    )
    effective = effective_time(tmp_path, 200.0)
    assert effective == EffectiveTime(
        attempts=2,
        steps=3,
        lost_steps=2,
        wall_s=100.0,
        productive_s=15.0,
        start_s=10.0,
        restart_s=10.0,
        again_s=12.0,
        checkpoint_s=1.0,
    )
    assert effective is not None and effective.ratio == 0.15 and effective.other_s == 52.0
    assert "15.0% of 100.0 s in 2 attempt(s)" in str(effective) and "2 repeated steps 12.0 s" in str(effective)
    assert effective.as_dict()["ratio"] == 0.15


def test_invalid_and_truncated_lines_are_skipped(tmp_path: Path) -> None:
    lines = [_step(1, 2.0), "[]", '{"step": "x"}', _step(2, float("nan")), _step(3, 1.0)[:-9]]
    _write(tmp_path, [_attempt(0, 0.0, 1.0)], lines)
    effective = effective_time(tmp_path, 4.0)
    assert effective is not None and (effective.steps, effective.productive_s) == (1, 2.0)


def test_the_end_is_when_the_last_step_was_written(tmp_path: Path) -> None:
    _write(tmp_path, [_attempt(0, 1000.0, 1001.0)], [_step(1, 2.0)])
    os.utime(tmp_path / METRICS, (1008.0, 1008.0))
    effective = effective_time(tmp_path)
    assert effective is not None and effective.wall_s == 8.0


def test_a_run_without_a_step_has_no_effective_time(tmp_path: Path) -> None:
    assert effective_time(tmp_path) is None
    _write(tmp_path, [_attempt(0, 5.0, 5.0)], [])
    effective = effective_time(tmp_path, 5.0)
    assert effective is not None and effective.ratio == 0.0


def test_an_attempt_records_what_the_previous_one_lost(tmp_path: Path) -> None:
    mesh = ParallelMesh(ParallelConfig())
    first = AttemptLog(tmp_path, mesh, 0, "fresh", ["a"])
    first.before_step(1)
    first.before_step(2)
    (tmp_path / METRICS).write_text("".join(f"{_step(step, 0.5 * step)}\n" for step in (1, 2, 3, 4)))
    os.utime(tmp_path / METRICS, (1234.0, 1234.0))
    second = AttemptLog(tmp_path, mesh, 2, "peer memory", ["a"]).attempt
    assert (first.attempt.number, second.number, second.first_step) == (0, 1, 3)
    assert (second.last_s, second.lost_steps, second.lost_s) == (1234.0, 2, 3.5)


def _folder(parent: Path, name: str, number: int) -> Path:
    """Create a run folder that is newer than those with lower numbers."""
    folder = parent / f"{name}-20260101-{number:06d}"
    folder.mkdir()
    settings = folder / "config.resolved.toml"
    settings.touch()
    os.utime(settings, (1000.0 + number, 1000.0 + number))
    return folder


def test_a_run_that_restarts_in_a_new_folder_keeps_its_first_start(tmp_path: Path) -> None:
    """The run restarts twice. The second attempt dies before its first step."""
    mesh = ParallelMesh(ParallelConfig())
    first, second = (_folder(tmp_path, "run", number) for number in (1, 2))
    _folder(tmp_path, "run-b", 4)
    _write(first, [_attempt(0, 100.0, 110.0)], [_step(1, 5.0), _step(2, 6.0)])
    os.utime(first / METRICS, (130.0, 130.0))
    earlier = carry_over(second, "run")
    assert earlier == first
    log = AttemptLog(second, mesh, 0, "fresh", ["a"], earlier).attempt
    assert (log.number, log.first_step, log.last_s, log.lost_steps, log.lost_s) == (1, 1, 130.0, 2, 11.0)
    (first / "result.json").write_text('{"status": "failed"}')
    third = _folder(tmp_path, "run", 3)
    assert carry_over(third, "run") == second
    AttemptLog(third, mesh, 0, "fresh", ["a"], second).before_step(1)
    starts = list(read_lines(third / ATTEMPTS, Attempt))
    assert [one.number for one in starts] == [0, 1] and starts[0].started_s == 100.0
    (third / METRICS).write_text(f"{_step(1, 4.0)}\n")
    effective = effective_time(third, starts[1].ready_s + 4.0)
    assert effective is not None and (effective.attempts, effective.steps, effective.productive_s) == (2, 1, 4.0)
    assert effective.wall_s == starts[1].ready_s + 4.0 - 100.0
    assert abs(effective.start_s + effective.restart_s + effective.productive_s - effective.wall_s) < 1e-3
    assert carry_over(third, "run") is None, "the folder already has its own attempts"
    assert carry_over(_folder(tmp_path, "other", 5), "other") is None


def test_neither_a_finished_run_nor_a_corrupted_list_of_starts_is_carried_over(tmp_path: Path) -> None:
    first, second = (_folder(tmp_path, "run", number) for number in (1, 2))
    _write(first, [_attempt(0, 100.0, 110.0)], [])
    (first / "result.json").write_text('{"status": "finished"}')
    assert carry_over(second, "run") is None
    (first / "result.json").unlink()
    (first / ATTEMPTS).write_text("no JSON\n")
    assert carry_over(second, "run") is None
    assert not (second / ATTEMPTS).exists()


def test_process_start_s_is_the_start_time_of_the_process() -> None:
    before = time.time()
    code = "import time, moe_comm.train.resilience.attempts as a; print(a.process_start_s(), time.time())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    started, now = map(float, output.split())
    assert before - 0.05 <= started <= now, "must be exact to a tick of the system clock"
