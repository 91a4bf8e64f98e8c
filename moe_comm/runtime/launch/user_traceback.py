"""The frames of a traceback that belong to user code, not to installed packages."""

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


def user_frame(error: BaseException) -> str:
    """Return the innermost frame of user code as ``file, line n, in name: source``, or ""."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}: {last.line or ''}".rstrip(": ")


def hide_installed_frames(error: BaseException) -> None:
    """Remove the frames of installed packages from the traceback of ``error``, except the outermost one."""
    tb = error.__traceback__
    while tb is not None:
        following: TracebackType | None = tb.tb_next
        while following is not None and _is_installed(following.tb_frame.f_code.co_filename):
            following = following.tb_next
        tb.tb_next = following
        tb = following


def _is_installed(filename: str) -> bool:
    return filename.startswith(_INSTALLED)
