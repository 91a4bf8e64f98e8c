"""``python -m benchmarks.diagnosis``: what is on purpose, and who must have been named for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.diagnosis import study as diagnosis
from benchmarks.diagnosis.study import PART, WARM, Case, Cases, hangs, judge, slow_links, slow_ranks
from moe_comm.errors import ConfigError
from moe_comm.observe import records
from moe_comm.observe.faults import Injection, parse, write_injection
from moe_comm.observe.records import FaultRecord
from moe_comm.observe.window import make_window
from tests.observe.test_diagnose import lines


def test_every_case_is_followed_by_as_many_healthy_steps() -> None:
    for plan in (slow_ranks(Cases(slow=5)), slow_links(Cases(links=5))):
        assert [case.first for case in plan] == [WARM + 1 + PART * index for index in range(10)]
        for on_purpose, healthy in zip(plan[::2], plan[1::2], strict=True):
            fault = parse(on_purpose.fault)
            assert (fault.rank, fault.step, fault.steps) == (*on_purpose.ranks, on_purpose.first, PART)
            assert not healthy.fault and not healthy.ranks
    assert slow_ranks(Cases(slow=5)) == slow_ranks(Cases(slow=5)) != slow_ranks(Cases(slow=5, seed=1))


def test_a_case_is_right_if_the_right_one_is_named_or_nobody_where_nobody_is() -> None:
    slow = make_window(lines(4, slow={1: 2.0}))
    cases = [Case(1, "f", "slow rank", (1,)), Case(1, "f", "slow rank", (2,)), Case(1, "", "", ())]
    assert [one.right for one in judge(slow, cases)] == [True, False, False]
    assert [one.named for one in judge(slow, cases)] == ["slow rank 1"] * 3
    assert [one.right for one in judge(make_window(lines(4)), cases)] == [False, False, True]


def test_a_hang_is_named_by_the_record_that_follows_it_before_the_next(tmp_path: Path) -> None:
    for step, rank in ((5, 1), (7, 2), (9, 2), (12, 0)):
        fault = f"stop:rank={rank},step={step}"
        injection = Injection(float(step), f"{step}", "stop", rank, step, 0, fault)
        write_injection(tmp_path / records.INJECTED, injection)
    for time_s, kind, rank in ((5.5, "stuck", 1), (9.5, "spike", 2), (9.7, "died", 3)):
        records.append(tmp_path / records.FAULTS, FaultRecord(time_s, int(time_s), kind, [rank], "stop"))
    assert [(one.named, one.right) for one in hangs(tmp_path)] == [
        ("hang 1", True),
        ("", False),  # what came later is of the next one
        ("hang 3", False),
        ("", False),
    ]


def test_slow_ranks_are_found_in_a_run_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, on few cases: a rank that is slow for as long as many steps take is found whatever else the machine
    does, which may make every step take ten times as long as it should."""
    monkeypatch.setattr(diagnosis, "SLOW_S", (0.5,))
    said: list[str] = []
    found = diagnosis.run(Cases(slow=2, links=0, hangs=0, ranks=2), said.append)
    assert found["cases"] == found["healthy"] == 2 and found["right"] == 2
    assert said == [f"slow rank: 2 of 2 named rightly; nobody named in {found['quiet']} of 2 healthy windows"]


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 ranks, 3 hosts"):
        Cases(hosts=2)
