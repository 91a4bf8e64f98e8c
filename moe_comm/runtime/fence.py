"""A memory fence, for words that processes share through a mapping and access from Python.

x86-64 keeps the order of loads and of stores; aarch64 does not. So a writer calls ``fence()`` between the data and the
word that announces it, and a reader between that word and the data.
"""

from __future__ import annotations

__all__ = ["fence"]

try:
    from moe_comm._C import fence
except ImportError:  # the native core is not built

    def fence() -> None:
        """Do nothing: Python has no fence of its own."""
