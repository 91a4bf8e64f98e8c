"""The public API: a change of a name or signature is deliberate, everything is documented, and parameters are few."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from functools import cached_property
from typing import Any

import pytest

from tests.support.api import SNAPSHOT, lines, methods, public_objects

MOST_PARAMETERS = 7
FACTORY = {"self", "dtype", "device"}
"""Parameters that do not count. Every torch module has the last two."""

PROPERTIES = (property, cached_property)

OBJECTS = dict(public_objects())


def test_the_public_api_is_that_of_the_snapshot() -> None:
    changes = list(
        difflib.unified_diff(SNAPSHOT.read_text().splitlines(), lines(), "snapshot", "code", n=0, lineterm="")
    )
    assert not changes, "run: python -m tests.support.api --write\n" + "\n".join(changes)


@pytest.mark.parametrize("path", OBJECTS)
def test_every_public_name_is_documented(path: str) -> None:
    value = OBJECTS[path]
    if not callable(value):
        return
    assert value.__doc__, path
    if inspect.isclass(value):
        undocumented = [
            name
            for name, member in methods(value)
            if (inspect.isfunction(getattr(member, "__func__", member)) or isinstance(member, PROPERTIES))
            and not inspect.getdoc(getattr(value, name))
        ]
        assert not undocumented, f"{path}: {undocumented}"


@pytest.mark.parametrize("path", OBJECTS)
def test_parameters_are_few_or_an_options_dataclass(path: str) -> None:
    value = OBJECTS[path]
    is_options = dataclasses.is_dataclass(value) or hasattr(value, "model_fields")  # or a section of a configuration
    if not callable(value) or is_options or "MoETrainer" in path:  # Trainer's own parameters
        return
    if "integrations.deepep" in path:  # DeepEP's own parameters
        return
    functions: list[tuple[str, Any]] = [(path, value)]
    if inspect.isclass(value):
        functions += [(f"{path}.{n}", getattr(m, "__func__", m)) for n, m in methods(value)]
    for name, function in functions:
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            continue
        counted = [n for n in parameters if n not in FACTORY | {"cls"}]
        assert len(counted) <= MOST_PARAMETERS, f"{name}: {counted}"
