"""Packages whose names load on first use."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import moe_comm
from moe_comm.errors import MissingDependency

ROOT = Path(moe_comm.__file__).parent
TEXTS = {file.parent: file.read_text() for file in sorted(ROOT.rglob("__init__.py"))}
LAZY = [
    ".".join(("moe_comm", *folder.relative_to(ROOT).parts))
    for folder, text in TEXTS.items()
    # The folder of an adapter has the name of the system, without which it raises.
    if "attach_stub(" in text and ("require(" not in text or find_spec(folder.name) is not None)
]


@pytest.mark.parametrize("name", LAZY)
def test_every_name_loads_and_none_is_that_of_a_module(name: str) -> None:
    """A module with the same name would replace a function when it is imported."""
    package = importlib.import_module(name)
    assert package.__file__ is not None
    for public in package.__all__:
        try:
            assert getattr(package, public) is not None
        except MissingDependency:  # of vLLM, which imports the folder of its adapter
            assert find_spec(name.rpartition(".")[2]) is None
    modules = {path.stem for path in Path(package.__file__).parent.iterdir()}
    assert not modules & set(package.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    for name in LAZY:
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            getattr(importlib.import_module(name), "nothing")  # noqa: B009 - no attribute of the package
