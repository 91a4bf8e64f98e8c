"""Old names of the public API: they work for one release and warn."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is now called ``new``."""
    warnings.warn(
        f"{old} is deprecated and will be removed in the next release; use {new}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def loads_renamed(package: str, renamed: Mapping[str, str], load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` that resolves old names.

    Args:
        package: name of the module that gets the ``__getattr__``.
        renamed: new name of each old one.
        load: returns the object with a given new name; also called for names that are not in ``renamed``.
    """

    def getattr_(name: str) -> Any:
        new = renamed.get(name)
        if new is None:
            return load(name)
        warn_renamed(f"{package}.{name}", f"{package}.{new}")
        return load(new)

    return getattr_


def renamed_fields(**renamed: str) -> Callable[[C], C]:
    """Class decorator: the constructor accepts old keywords and the old attributes can be read.

    Args:
        renamed: new name of each old one, as ``old="new"``.
    """

    def decorate(cls: C) -> C:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for old, new in renamed.items():
                if old in kwargs:
                    warn_renamed(f"{cls.__name__}({old}=...)", f"{new}=")
                    kwargs[new] = kwargs.pop(old)
            init(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[misc]
        return _readable(cls, renamed)

    return decorate


def renamed_attributes(**renamed: str) -> Callable[[C], C]:
    """Class decorator: old attributes can be read. The constructor is untouched."""
    return lambda cls: _readable(cls, renamed)


def _readable(cls: C, renamed: Mapping[str, str]) -> C:
    for old, new in renamed.items():
        setattr(cls, old, _alias(cls.__name__, old, new))
    return cls


def _alias(owner: str, old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warn_renamed(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(read, doc=f"Deprecated alias of ``{new}``.")
