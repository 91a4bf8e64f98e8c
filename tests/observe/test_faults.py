"""Fault specifications, their schedule, records of injections, and their outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.observe.faults import (
    DAMAGE,
    FATAL,
    KINDS,
    PROGRESS,
    WAIT,
    FaultPlan,
    FaultSpec,
    Injection,
    fault_outcomes,
    parse,
    read_injections,
    summary,
    write_injection,
)
from moe_comm.observe.records import ATTEMPTS, FAULTS, INJECTED, Attempt, FaultRecord, append


def test_a_fault_specification_round_trips() -> None:
    assert parse("kill:rank=1,step=5") == FaultSpec("kill", rank=1, step=5)
    assert parse("nan_loss:rank=any,probability=0.01") == FaultSpec("nan_loss", probability=0.01)
    assert parse("stop:mean_s=60") == FaultSpec("stop", mean_s=60.0)
    slow = FaultSpec("slow_sleep", step=2, seconds=0.5, steps=3, at="end")
    assert parse(" slow_sleep:seconds=0.5, steps = 3,step=2, at=end") == slow
    assert parse("hold_gil:step=1").seconds > 60, "by default, until the rank is killed"
    assert set(KINDS) > FATAL | DAMAGE
    for kind in KINDS:
        fault = parse(f"{kind}:rank=2,step=7")
        assert parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil:step=1", r"unknown kind 'kil' \(did you mean kill\?\); known: kill, stop"),
        ("", "unknown kind ''"),
        ("kill", "one of step, probability and mean_s; got none"),
        ("kill:step=1,mean_s=3", "got step and mean_s"),
        ("kill:step=0", "step must be at least 1; got 0"),
        ("kill:step=x", "step must be a whole number; got 'x'"),
        ("kill:rank=one,step=1", "rank must be a whole number or any; got 'one'"),
        ("kill:rank=-1,step=1", "rank must be at least 0"),
        ("kill:step=1,step=2", "step needs one value"),
        ("kill:step=", "step needs one value, as in step=5"),
        ("kill:stp=1", r"kill has no option 'stp' \(did you mean step\?\)"),
        ("kill:step=1,seconds=2", "kill has no option 'seconds'; it has: rank, step"),
        ("kill:step=1,at=middle", "at must be one of start, forward, backward, end"),
        ("kill:probability=1.5", r"probability must be in \(0, 1\]; got 1.5"),
        ("kill:probability=nan", r"probability must be in \(0, 1\]"),
        ("stop:mean_s=inf", "mean_s must be positive"),
        ("stop:mean_s=-3", "mean_s must be positive"),
    ],
)
def test_an_invalid_fault_raises_with_advice(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@given(st.text(max_size=60))
def test_any_text_parses_or_raises_config_error(text: str) -> None:
    for candidate in (text, f"kill:{text}"):
        with contextlib.suppress(ConfigError):
            assert parse(candidate).kind in KINDS


def due_on(texts: list[str], world: int, steps: int, seed: int = 3) -> list[tuple[int, int, str]]:
    """Return (step, rank, kind) of all due faults, without injecting them."""
    plans = [FaultPlan.of(texts, seed, rank, world) for rank in range(world)]
    return [
        (step, plan.rank, due.fault.kind)
        for step in range(1, steps + 1)
        for plan in plans
        for thread in (False, True)
        for due in plan.due(step, 0.0, thread=thread)
    ]


def test_due_faults_depend_only_on_the_seed_and_the_step() -> None:
    texts = ["kill:rank=1,step=5", "nan_loss:probability=0.2", "raise_thread:step=9", "exit:step=5"]
    due_faults = due_on(texts, 4, 200)
    assert due_faults == due_on(texts, 4, 200) != due_on(texts, 4, 200, seed=4)
    assert (5, 1, "kill") in due_faults
    for kind in ("raise_thread", "exit"):  # a fault without a rank is due on one random rank
        assert len([one for one in due_faults if one[2] == kind]) == 1
    chances = [one for one in due_faults if one[2] == "nan_loss"]
    assert 20 <= len(chances) <= 60 and len({step for step, _, _ in chances}) == len(chances)
    assert len({rank for _, rank, _ in chances}) == 4
    # The faults of step 100 do not depend on earlier calls.
    plan = FaultPlan.of(texts, 3, 0, 4)
    assert [(100, 0, due.fault.kind) for due in plan.due(100, 0.0)] == [
        one for one in due_faults if one[:2] == (100, 0)
    ]


def test_an_injected_fault_is_not_injected_again() -> None:
    plan = FaultPlan.of(["kill:rank=0,step=5"], 0, 0, 1)
    (due,) = plan.due(5, 0.0)
    restarted = FaultPlan.of(["kill:rank=0,step=5"], 0, 0, 1, attempt=1)
    restarted.fired = {due.key}
    assert not restarted.due(5, 0.0)
    with pytest.raises(ConfigError, match="no rank 2; there are 2 ranks"):
        FaultPlan.of(["kill:rank=2,step=5"], 0, 0, 2)


@pytest.mark.parametrize("kind", sorted(WAIT))
def test_a_waiting_fault_is_due_until_it_is_injected(kind: str) -> None:
    """This includes restarted ranks that do not repeat the planned step."""
    plans = [FaultPlan.of([f"{kind}:step=5"], 1, rank, 4) for rank in range(4)]
    (plan,) = (plan for plan in plans if plan.due(5, 0.0))
    (due,) = plan.due(5, 0.0)
    assert not plan.due(4, 0.0) and plan.due(9, 0.0) == [due]
    assert not any(other.due(9, 0.0) for other in plans if other is not plan)
    plan.fired.add(due.key)
    assert not plan.due(9, 0.0)


def test_mean_time_between_faults_uses_the_clock() -> None:
    plans = [FaultPlan.of(["stop:mean_s=10"], 1, rank, 4) for rank in range(4)]
    count = sum(len(plan.due(step, 0.5 * step)) for plan in plans for step in range(1, 20_001))
    assert 900 <= count <= 1100, "mean_s is the mean over all ranks together: 10,000 s of run time"
    one = FaultPlan.of(["stop:rank=1,mean_s=10"], 1, 0, 4)
    assert not any(one.due(step, 100.0 * step) for step in range(1, 100))


def test_injections_are_read_back_without_truncated_lines(tmp_path: Path) -> None:
    path = tmp_path / INJECTED
    assert read_injections(path) == []
    lines = [Injection(2.0, "1@5", "kill", 1, 5, 0, "kill:rank=1,step=5"), Injection(1.0, "0@2", "exit", 0, 2, 0, "")]
    for line in lines:
        write_injection(path, line)
    with path.open("a") as file:
        file.write('[]\n{"time_s": "late", "key": 1}\nnull\n{"time_s": 3.0, "ke')
    assert read_injections(path) == sorted(lines, key=lambda one: one.time_s)


def test_faults_are_detected_by_events_before_the_recovery(tmp_path: Path) -> None:
    kill = Injection(100.0, "0@5", "kill", 1, 5, 0, "kill:rank=1,step=5")
    slow = dataclasses.replace(kill, time_s=200.0, key="1@9", kind="slow_cpu", step=9, attempt=1)
    damage = dataclasses.replace(kill, time_s=300.0, key="2@12", kind="checkpoint_flip", step=12, attempt=1)
    for injection in (kill, slow, damage):
        write_injection(tmp_path / INJECTED, injection)
    append(tmp_path / FAULTS, FaultRecord(100.25, 5, "died", [1], "stop"))
    append(tmp_path / FAULTS, FaultRecord(304.0, 8, "checkpoint", [], "restart", "its sha256 differs"))
    append(tmp_path / ATTEMPTS, Attempt(1, 2, 101.0, 102.0, 5, "checkpoint"))
    append(tmp_path / ATTEMPTS, Attempt(2, 2, 303.0, 305.0, 9, "checkpoint"))
    steps = [
        (5, 103.0, 1),
        (6, 104.0, 1),
        (9, 200.5, 1),
        (10, 201.0, 1),
        (13, 301.0, 1),
        (12, 306.0, 2),
        (13, 307.0, 2),
    ]
    for step, time_s, attempt in steps:
        append(tmp_path / PROGRESS, {"step": step, "time_s": time_s, "attempt": attempt})
    outcomes = fault_outcomes(tmp_path)
    assert [(one.detected_s, one.recovered_s) for one in outcomes[::2]] == [(0.25, 4.0), (4.0, 7.0)]
    assert outcomes[0].noticed == "died rank 1: stop"
    assert math.isnan(outcomes[1].detected_s) and outcomes[1].recovered_s == 1.0 and not outcomes[1].noticed
    result = summary(outcomes)
    assert result["kill"] == {
        "count": 1,
        "detected": {"median": 0.25, "p99": 0.25, "worst": 0.25},
        "recovered": {"median": 4.0, "p99": 4.0, "worst": 4.0},
    }
    assert result["slow_cpu"]["detected"] is None
    assert json.loads(json.dumps(result)) == result
