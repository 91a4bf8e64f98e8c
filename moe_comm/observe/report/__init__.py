"""HTML reports of one run, or comparing two runs, in a self-contained file.

run folder ── read ──▶ arrays ── figures ──▶ small lists ── page ──▶ report.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_comm.observe.report.figures import panels
from moe_comm.observe.report.page import render
from moe_comm.observe.report.read import Run, read_run
from moe_comm.runtime.safe_files import write_file

__all__ = ["Run", "panels", "read_run", "render", "write_report"]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run, or the comparison of two runs.

    Args:
        folders: one or two run folders.
        out: the file; None: report.html in the run folder, or compare.html in the first one.

    Returns:
        The path of the file.

    Raises:
        ConfigError: a folder does not exist or has no run, or there are more than two.
        MissingDependency: plotly is not installed.
        OSError: the file cannot be written.
    """
    if not 1 <= len(folders) <= 2:
        raise ConfigError(f"a report requires one or two runs; got {len(folders)}")
    page = render([panels(read_run(folder)) for folder in folders])
    out = out or folders[0] / ("report.html" if len(folders) == 1 else "compare.html")
    write_file(out, page)
    return out
