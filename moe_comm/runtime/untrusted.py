"""Files that others may have written: reading of regular files of limited size, strict JSON, and safe printing.

Printing of their text: names and messages in them cannot control the terminal. Control characters move the cursor, set
the title of a window, write the clipboard or hide lines; format characters reverse the order of what is shown. They are
printed as escape sequences, such as ``\\x1b``.

Parsers assume properties that such files may lack: a pipe never ends, a sparse file of a terabyte takes no space on the
disk, and a JSON object may contain a key twice.

OSError: a file cannot be read, or is not a regular file within the limits. ValueError: its content is invalid.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

MAX_LINE = 16 << 20
"""Maximum bytes of a line of a record file."""
DEEPEST = 64
"""Maximum nesting of objects and lists. Deeper values can overflow the stack of code that handles them later."""

_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def open_regular(path: str | os.PathLike[str], follow: bool = True, holes: bool = True) -> int:
    """Open a regular file for reading, and return its descriptor. Never blocks, as opening a pipe would.

    Args:
        follow: whether ``path`` may be a link.
        holes: whether it may be sparse. A hole takes no space, and would be read as any number of zeros.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if not holes and (size := os.fstat(handle).st_size):
            if os.lseek(handle, 0, os.SEEK_HOLE) < size:
                raise OSError(errno.EINVAL, "The file has holes", str(path))
            os.lseek(handle, 0, os.SEEK_SET)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_bounded(path: str | os.PathLike[str], limit: int, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. ``follow``: whether ``path`` may be a link."""
    with os.fdopen(open_regular(path, follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"File is longer than {limit} bytes", str(path))
        # Not ``limit``: read() allocates the requested size first.
        content = file.read(size + 1)
    if len(content) > size:
        raise OSError(errno.EBUSY, "File grew while it was read", str(path))
    return content


def lines_of(path: str | os.PathLike[str], longest: int = MAX_LINE, follow: bool = True) -> Iterator[bytes]:
    """Yield the lines of a regular file with their newlines. Holes of a sparse file are not read.

    Of a line of more than ``longest`` bytes, which no writer writes, only the start is yielded, without a newline. The
    last line of a file has none if its writer was interrupted.
    """
    with os.fdopen(open_regular(path, follow), "rb") as file:
        while raw := file.readline(longest):
            yield raw
            part = raw
            while part and not part.endswith(b"\n"):
                if not part.strip(b"\0"):
                    file.seek(_after_hole(path, file.tell(), follow))
                part = file.readline(longest)


def _after_hole(path: str | os.PathLike[str], at: int, follow: bool) -> int:
    """Return the offset of the first byte at or after ``at`` that is not in a hole."""
    handle = open_regular(path, follow)  # the offset of the reader's own descriptor must not change
    try:
        return os.lseek(handle, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.lseek(handle, 0, os.SEEK_END)  # the hole ends the file
    finally:
        os.close(handle)


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse TOML."""
    try:
        value = tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError("nested too deep") from None
    _check_depth(value, DEEPEST)
    return value


def table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table ``name`` of parsed TOML or JSON; an empty one if it is missing or not a table."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def parse_object(text: str | bytes, deepest: int = DEEPEST) -> dict[str, Any]:
    """Parse a JSON object, strictly by the standard."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_reject_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    _check_depth(value, deepest)
    return value


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes."""
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
    """Return the start of a text as one line in printable form."""
    return printable_line(text if len(text) <= length else f"{text[:length]}...")


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


def printable(text: str) -> str:
    """Return ``text`` with escape sequences for control and format characters other than tab and newline."""
    return _UNSAFE.sub(_escape, text)


def printable_line(text: str) -> str:
    """Return ``printable(text)`` as one line, with escape sequences for newlines and tabs too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def make_console(**settings: Any) -> Console:
    """Return a console of rich that prints strings, also in tables, as ``printable`` returns them.

    A string with invalid markup, such as "[/x]", is printed without markup. ``settings``: those of ``rich.Console``.
    """
    from rich.console import Console  # rich is in the extras of the commands, and takes long to import
    from rich.errors import MarkupError

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            text = printable(text)
            try:
                return super().render_str(text, **options)
            except MarkupError:
                return super().render_str(text, **options | {"markup": False})

    return PrintableConsole(emoji=False, **settings)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([KMGT]iB)?")


def byte_count(size: str | int) -> int:
    """Return a number of bytes from a number, or from a text such as "512MiB". Raises ValueError."""
    match = _SIZE.fullmatch(str(size))
    if match is None:
        raise ValueError(f"budget must be a number of bytes or a text such as '512MiB'; got {size!r}")
    return int(float(match[1]) * _UNITS[match[2] or ""])
