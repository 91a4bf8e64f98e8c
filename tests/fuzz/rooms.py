"""What all targets share: how they answer, and where they write files."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

READ, REFUSED = "read", "refused"


@functools.cache
def folder() -> Path:
    """Room for the files of this process, which goes with it."""
    path = Path(tempfile.mkdtemp(prefix="moe_comm-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def refused(error: Exception) -> str:
    """Its text can be printed, and is no copy of the file."""
    assert len(str(error).encode()) < 20_000
    return REFUSED
