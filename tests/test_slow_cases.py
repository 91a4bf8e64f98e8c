"""The cases that ``slow_cases.txt`` lists are those of tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW_CASES = Path(__file__).with_name("slow_cases.txt")
CASES = [line for line in SLOW_CASES.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("test", sorted({case.partition("[")[0] for case in CASES}))
def test_a_listed_test_exists_and_has_cases(test: str) -> None:
    file, name = test.split("::")
    assert f"\ndef {name}(" in (SLOW_CASES.parents[1] / file).read_text()


def test_cases_are_listed_once_and_sorted() -> None:
    assert sorted(set(CASES)) == CASES and SLOW_CASES.read_text().endswith("]\n")
