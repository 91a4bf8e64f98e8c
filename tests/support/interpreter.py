"""Triton's interpreter without what it repeats in each call, which takes half of the time of a kernel.

Triton reads TRITON_INTERPRET when it is first imported. The pytest process does not import it with this variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any


def interpret() -> None:
    """Let Triton interpret kernels; only in a rank's process, before any module that imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    _shorten()


@cache
def _shorten() -> None:
    from triton.runtime import interpreter

    interpreter._patch_lang = _patch_once(interpreter._patch_lang, interpreter.tl)
    # No checks of each sum and product of integers against 32 bits, which the small sizes of tests cannot exceed.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _patch_once(patch: Callable[[Any], Any], language: Any) -> Callable[[Any], Any]:
    """Return ``patch``, which replaces operators of the language, without its repetition in each device function."""
    patched: set[Any] = set()

    @cache
    def modules_of(function: Any) -> list[Any]:
        seen = {id(value) for value in function.__globals__.values()}
        return [module for module in (language, language.core) if id(module) in seen]

    def patch_lang(function: Any) -> Any:
        modules = modules_of(function)
        if patched and patched.issuperset(modules):
            return None  # a device function: no caller uses the result
        scope, outermost = patch(function), not patched
        patched.update(modules)
        if not outermost:
            return scope

        def restore() -> None:
            scope.restore()
            patched.clear()

        return SimpleNamespace(restore=restore)

    return patch_lang
