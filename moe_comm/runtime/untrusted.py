"""Reading files that others may have made: regular files only, no more bytes than allowed, JSON without surprises.

What a parser takes for granted is what such a file leaves out: that it ends (a pipe does not), that it is small (a
sparse file of a terabyte takes no room on the disk), that a key comes once (which of two counts is anybody's guess).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

DEEPEST = 64
"""Objects and lists inside one another. What is deeper may exhaust the stack of whoever looks at it later."""


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor to read a regular file with; the caller closes it. Never waits, as opening a pipe would.

    Raises:
        OSError: it cannot be opened, or is no regular file.
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
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, is longer (``EFBIG``), or grew while it was read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"File is longer than {limit} bytes", str(path))
        # No more than there is: room for all that is asked for is taken before a byte is read.
        content = file.read(size + 1)
    if len(content) > size:
        raise OSError(errno.EBUSY, "File grew while it was read", str(path))
    return content


def parse_object(text: str | bytes, deepest: int = DEEPEST) -> dict[str, Any]:
    """A JSON object, as the standard has it.

    Raises:
        ValueError: it is none, holds a key twice, NaN, infinity, a number of thousands of digits or half of a
            surrogate pair in a key, or is nested more than ``deepest`` deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    _check_depth(value, deepest)
    return value


def regular_size(path: Path) -> int:
    """Size of a regular file in bytes.

    Raises:
        OSError: there is none.
    """
    handle = open_regular(path)
    try:
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def shown(value: object, length: int = 200) -> str:
    """``repr`` for a message, abridged; never raises."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists in lists
        return f"a {type(value).__name__} too large to show"
    return abridged(text, length)


def abridged(text: str, length: int = 200) -> str:
    """The start of a text, for a message that can be printed."""
    text = text if len(text) <= length else f"{text[:length]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} occurs twice")
    for key in found:
        if not key.isascii():
            key.encode()  # UnicodeEncodeError is a ValueError
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


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
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {deepest} deep")
