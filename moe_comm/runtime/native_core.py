"""The native core, ``moe_comm._C``: whether it is built, and whether it was built from these sources."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from moe_comm.errors import MissingDependency, StaleCore

STUB = Path(__file__).parent.parent / "_C.pyi"
"""Describes the interface of the native core. The build stores its hash in the core."""


@lru_cache(maxsize=1)
def native() -> ModuleType:
    """Return the native core.

    Raises:
        MissingDependency: it is not built.
        StaleCore: it was built with another stub than that of this Python code, so its functions may differ.
    """
    try:
        from moe_comm import _C  # may not be built
    except ImportError as error:
        raise MissingDependency(
            f"the native core moe_comm._C is not built ({error}); run `pip install -e .`"
        ) from error
    built = getattr(_C, "interface", "none")
    if STUB.exists() and built != (here := hashlib.sha256(STUB.read_bytes()).hexdigest()):
        raise StaleCore(
            f"{_C.__file__} was built from other sources than this Python code (interface {built[:8]}, expected "
            f"{here[:8]}); run `make build` in a checkout, or `pip install .` again"
        )
    return _C


@lru_cache(maxsize=1)
def native_is_built() -> bool:
    """Return whether this process has the native core. Raises StaleCore as ``native``."""
    try:
        native()
    except MissingDependency:
        return False
    return True
