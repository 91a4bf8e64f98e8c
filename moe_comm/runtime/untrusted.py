"""Reading of files that others may have written: regular files of limited size, and strict JSON.

Parsers assume properties that such files may lack: a pipe never ends, a sparse file of a terabyte takes no space on the
disk, and a JSON object may contain a key twice.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

DEEPEST = 64
"""Maximum nesting of objects and lists. Deeper values can overflow the stack of code that handles them later."""


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, and return its descriptor. Never blocks, as opening a pipe would.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
    except OSError:
        os.close(handle)
        raise
    return handle


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, is longer (``EFBIG``), or grew while it was read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"File is longer than {limit} bytes", str(path))
        # Not ``limit``: read() allocates the requested size first.
        content = file.read(size + 1)
    if len(content) > size:
        raise OSError(errno.EBUSY, "File grew while it was read", str(path))
    return content


def parse_object(text: str | bytes, deepest: int = DEEPEST) -> dict[str, Any]:
    """Parse a JSON object, strictly by the standard.

    Raises:
        ValueError: it is not an object, holds a key twice, NaN, infinity, a number with thousands of digits or half of
            a surrogate pair in a key, or is nested more than ``deepest`` levels deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_reject_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    _check_depth(value, deepest)
    return value


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        OSError: there is no such file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return os.fstat(file.fileno()).st_size


def shown(value: object, length: int = 200) -> str:
    """Return an abridged ``repr`` for a message. Never raises."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with thousands of digits, or deeply nested lists
        return f"a {type(value).__name__} too large to show"
    return abridged(text, length)


def abridged(text: str, length: int = 200) -> str:
    """Return the start of a text, in printable form."""
    text = text if len(text) <= length else f"{text[:length]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {shown(key)} occurs twice")
        if not key.isascii():
            key.encode()  # UnicodeEncodeError is a ValueError
        values[key] = value
    return values


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise ValueError(f"{shown(text, 40)} is beyond what a float holds")
    return value


def _check_depth(value: object, deepest: int) -> None:
    level: list[object] = [value]
    for _ in range(deepest):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {deepest} deep")
