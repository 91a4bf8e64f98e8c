"""Rank arithmetic: expert placement, parameter shardings, and two parallel mappings folded onto the same ranks."""

from __future__ import annotations

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
