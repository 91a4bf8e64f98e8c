"""Shared by all fuzz targets: their results, and a temporary folder for their files."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

READ, REFUSED = "read", "refused"


@functools.cache
def folder() -> Path:
    """Return the temporary folder of this process, which is removed at exit."""
    path = Path(tempfile.mkdtemp(prefix="moe_comm-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def refused(error: Exception) -> str:
    """Check that the message of ``error`` can be encoded and does not contain the whole file. Return REFUSED."""
    assert len(str(error).encode()) < 20_000
    return REFUSED
