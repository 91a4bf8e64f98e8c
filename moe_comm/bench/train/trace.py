"""Write steps of this library's training loop as a Perfetto trace (open it at https://ui.perfetto.dev).

    host 0, rank 0   [ step of moe_comm ] pause [ step of ep1 ]
    host 1, rank 1   [ step of moe_comm ] pause [ step of ep1 ]

The ranks have the same monotonic clock, because all hosts are on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe_comm.observe import trace
from moe_comm.observe.records import SpanLine
from moe_comm.runtime.safe_files import write_file

PAUSE_NS = 5_000_000
"""Gap between two steps of a trace."""


def write_trace(steps: Sequence[Sequence[Sequence[SpanLine]]], ranks_per_host: int, out: str) -> None:
    """Write ``steps`` in sequence to the file ``out``.

    Args:
        steps: for each step, the spans of each rank, on the monotonic clock. Spans of different steps may have been
            recorded at any time.
        ranks_per_host: number of ranks on each host.
        out: the file.
    """
    lines: list[SpanLine] = []
    begun = 0
    for ranks in steps:
        spans = [span for rank in ranks for span in rank]
        if not spans:
            continue
        first = min(span.begin_ns for span in spans)
        lines += [replace(span, skew_ns=begun - first) for span in spans]
        begun += max(span.end_ns for span in spans) - first + PAUSE_NS
    hosts = {span.rank: f"host {span.rank // ranks_per_host}" for span in lines}
    write_file(Path(out), trace.build(lines, hosts))
