"""Arguments of the kernels in csrc/cuda: their names and the struct that contains them.

A kernel takes one struct of 8-byte words by value. csrc/cuda/args.h declares the names of the words, and the native
core returns them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from moe_comm.errors import ConfigError
from moe_comm.runtime.native_core import native

Words = Mapping[str, int]
"""Arguments of a kernel by name: numbers and addresses (0 for none)."""

Fields = Mapping[str, Sequence[str]]
"""Names of the arguments of each kernel, in order."""


class Packer:
    """Packs arguments into the struct of a kernel."""

    def __init__(self, fields: Fields) -> None:
        self.fields = {kernel: tuple(names) for kernel, names in fields.items()}
        self._structs = {kernel: struct.Struct(f"={len(names)}q") for kernel, names in self.fields.items()}
        self._getters = {kernel: _getter(names) for kernel, names in self.fields.items()}

    def pack(self, kernel: str, words: Words) -> bytes:
        """Return the bytes of the struct."""
        names = self.fields.get(kernel)
        if names is None:
            raise ConfigError(f"unknown kernel {kernel!r}; known: {', '.join(sorted(self.fields))}")
        try:
            if len(words) == len(names):
                return self._structs[kernel].pack(*self._getters[kernel](words))
        except KeyError:
            pass
        except struct.error as error:
            raise ConfigError(f"kernel {kernel!r}: a value does not fit in int64 ({error}): {dict(words)}") from None
        missing, unknown = sorted(set(names) - set(words)), sorted(set(words) - set(names))
        raise ConfigError(
            f"kernel {kernel!r}: missing words {missing}, unknown words {unknown}; it takes {list(names)}"
        )


def _getter(names: Sequence[str]) -> Callable[[Words], tuple[int, ...]]:
    """Return a function that gets the values of ``names``. ``itemgetter`` returns no tuple for a single name."""
    return itemgetter(*names) if len(names) > 1 else lambda words: tuple(words[name] for name in names)


def kernel_fields() -> dict[str, tuple[str, ...]]:
    """Return the names of all kernels' arguments, from the native core."""
    return {kernel: tuple(names) for kernel, names in native().p2p_words().items()}
