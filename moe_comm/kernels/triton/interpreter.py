"""Whether Triton interprets kernels, and a fix of its interpreter.

Triton 3.6 stores a scalar as an array of one element and converts loop bounds with ``int(array)``, which NumPy 2.4
rejects. Later versions of Triton do not.
"""

from __future__ import annotations

from typing import Any

from triton import knobs

INTERPRETING = bool(knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set when this module was imported; it applies to all kernels of the process."""


def _patch_interpreter() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_add_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_add_index


if INTERPRETING:
    _patch_interpreter()
