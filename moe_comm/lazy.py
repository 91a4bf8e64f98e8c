"""Public names of a package that are imported on first use (PEP 562).

The stub ``__init__.pyi`` of a package is the only list of its names. Type checkers and ``attach_stub`` read it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
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


def after_import(modules: Sequence[str], action: Callable[[], object]) -> None:
    """Call ``action`` once: now if one of ``modules`` is loaded, else after the first of them has been imported."""
    if any(name in sys.modules for name in modules):
        action()
    else:
        sys.meta_path.insert(0, _Finder(modules, action))


class _Finder(MetaPathFinder):
    def __init__(self, modules: Sequence[str], action: Callable[[], object]) -> None:
        self._modules, self._action = frozenset(modules), action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._action()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
