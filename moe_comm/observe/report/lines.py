"""Read lines of large or corrupted files in bounded memory: all of them, or an even sample."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_comm.runtime.untrusted import MAX_LINE, lines_of, open_regular

PROBE_BYTES = 1 << 18


def spread_lines(path: Path, most: int) -> Iterator[bytes]:
    """Yield about ``most`` evenly sampled complete lines of a file, including the first and last, or all if there are
    fewer. A last line without newline is skipped.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(PROBE_BYTES)
        length = len(head) / max(head.count(b"\n"), 1)
        if size <= most * length:
            yield from all_lines(path)
            return
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:  # no writer leaves holes; samples of them are of no use
            yield from itertools.islice(all_lines(path), most)
            return
        reached = 0
        for number in range(most):
            offset = int(max(size - 1.5 * length, 0) * number / max(most - 1, 1))
            if offset < reached:
                continue
            file.seek(offset)
            if offset > reached:
                file.readline(MAX_LINE)
            raw = file.readline(MAX_LINE)
            reached = file.tell()
            if raw.endswith(b"\n"):
                yield raw


def all_lines(path: Path) -> Iterator[bytes]:
    """Yield all complete lines of a file."""
    return (raw for raw in lines_of(path) if raw.endswith(b"\n"))


def object_of(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if there is none."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value: object) -> float:
    """Return a JSON number as a float; NaN for other values and for integers beyond the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
