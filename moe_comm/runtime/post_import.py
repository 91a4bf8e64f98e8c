"""Run a function after another package's module has been imported, in whichever order the packages are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


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
