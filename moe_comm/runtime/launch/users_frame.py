"""What of a traceback its reader can change: the frames of their own code, without those of installed packages."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parents[2]) + "/"
_INSTALLED = (
    _OURS,
    *(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen ",
)


def users_frame(error: BaseException) -> str:
    """The innermost frame of the user's code as ``file, line n, in name: source``; "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}: {last.line or ''}".rstrip(": ")


def shorten(error: BaseException) -> None:
    """Take the frames of installed packages out of the traceback of ``error``, but for the outermost."""
    at = error.__traceback__
    while at is not None:
        after: TracebackType | None = at.tb_next
        while after is not None and _is_installed(after.tb_frame.f_code.co_filename):
            after = after.tb_next
        at.tb_next = after
        at = after


def _is_installed(filename: str) -> bool:
    return filename.startswith(_INSTALLED)
