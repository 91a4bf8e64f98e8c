"""Modules of MoE transformers: each can be used on its own, and with any mapping of ranks.

The names below import their modules on first use, as an MoE layer needs few of them.
"""

from __future__ import annotations

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
