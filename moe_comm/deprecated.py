"""Old names of the public API: they work for one release and warn."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is now called ``new``."""
    warnings.warn(
        f"{old} is deprecated and will be removed in the next release; use {new}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def renamed_parameters(*positional: str, **renamed: str) -> Callable[[F], F]:
    """Function decorator: accept old keywords, and keyword-only parameters by position.

    Args:
        positional: names of the keyword-only parameters that were positional before, in order.
        renamed: new name of each old keyword, as ``old="new"``.
    """

    def decorate(function: F) -> F:
        num_positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(function).parameters.values())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in renamed.items():
                if old in kwargs:
                    warn_renamed(f"{function.__qualname__}({old}=...)", f"{new}=")
                    kwargs[new] = kwargs.pop(old)
            if len(args) > num_positional and positional:
                extra = dict(zip(positional, args[num_positional:], strict=False))
                warn_renamed(f"positional {', '.join(extra)} of {function.__qualname__}", "keywords")
                args = args[:num_positional] + args[num_positional + len(extra) :]
                kwargs = extra | kwargs
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def renamed_fields(**renamed: str) -> Callable[[C], C]:
    """Class decorator: the constructor accepts old keywords and the old attributes can be read.

    Args:
        renamed: new name of each old one, as ``old="new"``.
    """

    def decorate(cls: C) -> C:
        cls.__init__ = renamed_parameters(**renamed)(cls.__init__)  # type: ignore[misc]
        return _add_aliases(cls, renamed)

    return decorate


def attribute_parameters(*names: str) -> Callable[[F], F]:
    """Decorator of ``__init__``: accept old keywords that are attributes now, and set these."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            values = {name: kwargs.pop(name) for name in names if name in kwargs}
            function(self, *args, **kwargs)
            for name, value in values.items():
                warn_renamed(f"{type(self).__name__}({name}=...)", f"the attribute {name}")
                setattr(self, name, value)

        return call  # type: ignore[return-value]

    return decorate


def converted_parameters(*old: str, convert: Callable[[dict[str, Any]], None]) -> Callable[[F], F]:
    """Function decorator for old keywords that take more than a rename.

    Args:
        old: the old keywords.
        convert: called if one of them is passed, with a dict of all arguments by name. Replaces them in place, and
            warns.
    """

    def decorate(function: F) -> F:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.keys().isdisjoint(old):
                return function(*args, **kwargs)
            arguments = dict(zip(names[1:], args[1:], strict=False)) | kwargs
            convert(arguments)
            return function(args[0], **arguments)

        return call  # type: ignore[return-value]

    return decorate


def renamed_attributes(**renamed: str) -> Callable[[C], C]:
    """Class decorator: old attributes can be read. The constructor is untouched."""
    return lambda cls: _add_aliases(cls, renamed)


def _add_aliases(cls: C, renamed: Mapping[str, str]) -> C:
    for old, new in renamed.items():
        setattr(cls, old, _alias(cls.__name__, old, new))
    return cls


def _alias(owner: str, old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warn_renamed(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(read, doc=f"Deprecated alias of ``{new}``.")
