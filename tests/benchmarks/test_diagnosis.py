"""``python -m benchmarks.diagnosis``: injected faults and the expected diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.diagnosis import study as diagnosis
from benchmarks.diagnosis.study import WARM, WINDOW, DiagnosisCase, DiagnosisStudy, hangs, judge, slow_links, slow_ranks
from moe_comm.errors import ConfigError
from moe_comm.observe import records
from moe_comm.observe.faults import Injection, parse, write_injection
from moe_comm.observe.records import FaultRecord
from moe_comm.observe.window import make_window
from tests.observe.test_diagnose import lines


def test_every_window_with_a_fault_is_followed_by_a_healthy_window() -> None:
    for plan in (slow_ranks(DiagnosisStudy(slow=5)), slow_links(DiagnosisStudy(links=5))):
        assert [case.first for case in plan] == [WARM + 1 + WINDOW * index for index in range(10)]
        for faulty, healthy in zip(plan[::2], plan[1::2], strict=True):
            fault = parse(faulty.fault)
            assert (fault.rank, fault.step, fault.steps) == (*faulty.ranks, faulty.first, WINDOW)
            assert not healthy.fault and not healthy.ranks
    assert (
        slow_ranks(DiagnosisStudy(slow=5))
        == slow_ranks(DiagnosisStudy(slow=5))
        != slow_ranks(DiagnosisStudy(slow=5, seed=1))
    )


def test_a_case_is_correct_if_the_expected_finding_or_none_is_named() -> None:
    slow = make_window(lines(4, slow={1: 2.0}))
    cases = [
        DiagnosisCase(1, "f", "slow rank", (1,)),
        DiagnosisCase(1, "f", "slow rank", (2,)),
        DiagnosisCase(1, "", "", ()),
    ]
    assert [one.right for one in judge(slow, cases)] == [True, False, False]
    assert [one.named for one in judge(slow, cases)] == ["slow rank 1"] * 3
    assert [one.right for one in judge(make_window(lines(4)), cases)] == [False, False, True]


def test_a_hang_is_evaluated_by_the_first_record_before_the_next_hang(tmp_path: Path) -> None:
    for step, rank in ((5, 1), (7, 2), (9, 2), (12, 0)):
        fault = f"stop:rank={rank},step={step}"
        injection = Injection(float(step), f"{step}", "stop", rank, step, 0, fault)
        write_injection(tmp_path / records.INJECTED, injection)
    for time_s, kind, rank in ((5.5, "stuck", 1), (9.5, "spike", 2), (9.7, "died", 3)):
        records.append(tmp_path / records.FAULTS, FaultRecord(time_s, int(time_s), kind, [rank], "stop"))
    assert [(one.named, one.right) for one in hangs(tmp_path)] == [
        ("hang 1", True),
        ("", False),  # later records belong to the next hang
        ("hang 3", False),
        ("", False),
    ]


@pytest.mark.slow
def test_slow_ranks_are_detected_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full study with few cases. The delay is as long as many steps, so that it is detected on a busy machine too,
    where a step may take ten times longer."""
    monkeypatch.setattr(diagnosis, "SLOW_S", (0.5,))
    messages: list[str] = []
    result = diagnosis.run(DiagnosisStudy(slow=2, links=0, hangs=0, ranks=2), messages.append)
    assert result["cases"] == result["healthy"] == 2 and result["right"] == 2
    assert messages == [f"slow rank: 2 of 2 correct; no finding in {result['quiet']} of 2 healthy windows"]


def test_too_few_hosts_are_rejected() -> None:
    with pytest.raises(ConfigError, match="at least 2 ranks and 3 hosts"):
        DiagnosisStudy(hosts=2)
