"""A run, or two beside each other, as one page of HTML that opens anywhere.

run folder ── read ──▶ arrays ── figures ──▶ small lists ── page ──▶ report.html
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_comm.observe.report.figures import panels
from moe_comm.observe.report.page import render
from moe_comm.observe.report.read import Run, read_run

__all__ = ["Run", "panels", "read_run", "render", "write_report"]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run, or the comparison of two, and return its file.

    Args:
        folders: of one or two runs.
        out: the file; None: report.html in the run's folder, or compare.html in the first one's.

    Raises:
        ConfigError: a folder is not there or holds no run, or there are not one or two.
        MissingDependency: plotly is not installed.
        OSError: the file cannot be written.
    """
    if not 1 <= len(folders) <= 2:
        raise ConfigError(f"a report is about one run or two; got {len(folders)}")
    page = render([panels(read_run(folder)) for folder in folders])
    out = out or folders[0] / ("report.html" if len(folders) == 1 else "compare.html")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(out.name + ".partial")
    fresh.write_text(page, encoding="utf-8")
    os.replace(fresh, out)
    return out
