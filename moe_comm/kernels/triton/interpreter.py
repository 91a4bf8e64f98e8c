"""Whether Triton interprets kernels, and a mend of its interpreter.

Triton 3.6 keeps a scalar as an array of one element and makes a loop's bounds of it with ``int(array)``, which NumPy
refuses since 2.4. Later versions of Triton do not.
"""

from __future__ import annotations

from typing import Any

from triton import knobs

INTERPRETING = bool(knobs.runtime.interpret)
"""TRITON_INTERPRET=1 was set when this was imported; kernels are made for one or the other when they are defined."""


def _mend() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if INTERPRETING:
    _mend()
