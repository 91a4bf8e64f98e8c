"""Output of benchmark results: tables with declared columns, and one JSON object."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from moe_comm.runtime.safe_files import check_replaceable, write_file
from moe_comm.runtime.untrusted import make_console

WIDTH = 140
"""Width of tables in files and pipes."""
NOISY = 1.25
"""Ratio of a median to the minimum above which a time is called noisy."""
SPREAD = "min-p90"
Row = Mapping[str, Any]
Column = tuple[str, str | Callable[[Row], Any]]
"""Heading, and the key or the function of the value in a row: a text, an int, or a float, which gets 3 digits."""


def check_writable(out: str | None) -> None:
    """Raise ``OSError`` before the measurement if ``write_json`` could not write ``out``."""
    if out is None or out == "-":
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_replaceable(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):  # a new file replaces an existing one
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), out)


def write_json(result: dict[str, Any], out: str | None) -> None:
    """Write one JSON object to the file ``out``. ``-`` is standard output; None writes nothing.

    Numbers that JSON does not have, such as a median without values, are written as null.
    """
    if out is None:
        return
    text = json.dumps(_with_nulls(result), indent=2, allow_nan=False) + "\n"
    if out == "-":
        sys.stdout.write(text)
    else:
        write_file(Path(out), text)


def _with_nulls(value: Any) -> Any:
    """Return ``value`` with None instead of NaN and infinities."""
    if isinstance(value, dict):
        return {key: _with_nulls(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(tables: list[Table], json_out: str | None = None) -> None:
    """Print tables, to standard error if the JSON object is written to standard output."""
    console = make_console(stderr=json_out == "-")
    if not console.is_terminal:
        console.width = WIDTH
    for table in tables:
        console.print(table)


def make_table(title: str, columns: Sequence[Column], rows: Iterable[Row], caption: str | None = None) -> Table:
    """Return a table with one line for each of ``rows``."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        values = [row.get(value) if isinstance(value, str) else value(row) for _, value in columns]
        table.add_row(*(str(value) if isinstance(value, str | int) else number(value) for value in values))
    return table


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    """Format a number; None is "-"."""
    return "-" if value is None else f"{value:.{digits}g}{unit}" if value < 1000 else f"{value:,.0f}{unit}"


def timed(heading: str, phase: str = "total") -> tuple[Column, Column]:
    """Return the columns of the median of a phase, and of its spread. The keys are those of ``clock.times_of``."""
    return (heading, f"{phase}_ms"), (SPREAD, lambda row: spread(row, phase))


def spread(row: Row, phase: str) -> str:
    """Format minimum and 90th percentile of a phase, marked if the median is far from the minimum."""
    median, least, p90 = (row.get(f"{phase}_{key}") for key in ("ms", "min_ms", "p90_ms"))
    if median is None or least is None:
        return "" if isinstance(median, str) else "-"
    text = number(least) if p90 is None else f"{number(least)}-{number(p90)}"
    return f"{text} noisy" if median > NOISY * least else text


def faster_or_slower(ratio: float | None, partner: str = "") -> str:
    """Format the ratio of a time to the time of ``partner``. ``partner`` is empty if the column title names it."""
    if ratio is None:
        return ""
    if abs(ratio - 1) < 0.005:
        return f"as fast as {partner}" if partner else "as fast"
    than = f" than {partner}" if partner else ""
    return f"{ratio:.3g}x slower{than}" if ratio > 1 else f"{1 / ratio:.3g}x faster{than}"


def heading(result: Row, tokens: bool = True) -> str:
    """Return the shape of a batch, and the machine."""
    s = result["settings"]
    per_rank = f"{s['tokens']} tokens per rank, " if tokens else ""
    ffn = f", F {s['ffn']}" if "ffn" in s else ""
    return (
        f"{s['ranks']} ranks, {per_rank}D {s['hidden']}{ffn}, E {s['experts']}, K {s['top_k']}, "
        f"{s['dtype']}; {machine(result)}"
    )


def machine(result: Row) -> str:
    """Return the processor or GPU, and the instruction set."""
    m = result["machine"]
    return f"{m.get('gpu', m['cpu'])}, {m['cores']} cores, {m['isa']}"


def hosts(settings: Row, links: Sequence[float], ranks: str = "rank(s)") -> str:
    """Return the number of simulated hosts and ranks, and the rates of the links."""
    measured = ", ".join(f"{rate:.2f}" for rate in links)
    return (
        f"{settings['hosts']} hosts x {settings['ranks_per_host']} {ranks}, "
        f"links of {settings['link_gbit']:g} Gbit/s (measured {measured})"
    )


def captions(*parts: str | None) -> str:
    """Return the lines below a table of times: the parts that are not empty, and an explanation of the spread."""
    spread = f"times are medians; {SPREAD}: minimum and 90th percentile; noisy: the median is above {NOISY:g} x minimum"
    return "\n".join([*filter(None, parts), spread])


def skipped(result: Row) -> str | None:
    """Return the reasons why contestants were not measured, one per line."""
    return "\n".join(f"{name}: {reason}" for name, reason in result["skipped"].items()) or None
