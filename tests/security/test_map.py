"""Each group of inputs.md, which lists inputs that broke other libraries, has a row, and its tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.dispatch.cases import BY_NAME
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests/security/inputs.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| (.+) \|$", PAGE, re.MULTILINE)


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the names of the tests in a Python or C++ file."""
    text = (ROOT / file).read_text()
    if file.endswith(".cpp"):
        return frozenset(re.findall(r"^TEST\((\w+)\)", text, re.MULTILINE))
    return frozenset(node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))


def test_every_group_has_a_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 16))


@pytest.mark.parametrize(("number", "what", "cell"), ROWS, ids=[row[0] for row in ROWS])
def test_every_named_test_exists(number: str, what: str, cell: str) -> None:
    names = re.findall(r"`([^`]*)::(\w+)`", cell)
    assert names and len(names) == cell.count("`") // 2, what
    file = ""
    for new_file, name in names:
        file = new_file or file
        assert name in names_in(file), f"{file} has no {name}"


def test_every_named_case_of_the_contract_exists() -> None:
    for quoted in re.findall(r"\(cases? ([^;)]*)", PAGE):
        assert set(re.findall(r'"([^"]+)"', quoted)) <= BY_NAME.keys(), quoted


def test_every_format_that_is_fuzzed_is_named() -> None:
    section = PAGE.partition("Formats: ")[2].partition(". A case")[0]
    assert set(re.findall(r"`(\w+)`", section)) == TARGETS.keys()
