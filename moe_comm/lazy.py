"""Public names of a package that are imported on first use (PEP 562).

The stub ``__init__.pyi`` of a package is the only list of its names. Type checkers and ``attach_stub`` read it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def stub_names(stub: Path) -> dict[str, str]:
    """Return the public names of a stub, each with the module that defines it."""
    return {
        alias.name: node.module
        for node in ast.parse(stub.read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.asname
    }


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package with a stub.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package. Its stub has the suffix ``.pyi``, and imports as ``from a import b as b``.
    """
    modules = stub_names(Path(file).with_suffix(".pyi"))

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return load, lambda: sorted(modules), sorted(modules)
