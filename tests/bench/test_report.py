"""Tables of benchmarks state which of two times is shorter."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from moe_comm.bench.common import report

SETTINGS = {
    "ranks": 2,
    "tokens": 8,
    "hidden": 16,
    "experts": 4,
    "top_k": 2,
    "dtype": "float32",
    "hosts": 2,
    "ranks_per_host": 1,
    "link_gbit": 1.0,
    "chunks": 4,
}
MACHINE = {"cpu": "a CPU", "cores": 2, "isa": "avx2"}
RESULT: dict[str, Any] = {"settings": SETTINGS, "machine": MACHINE, "skipped": {}, "link_gbit_measured": [1.0]}


def lines(tables: list[Table]) -> list[str]:
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in captured.get().splitlines()]


def row(tables: list[Table], name: str) -> str:
    return next(line for line in lines(tables) if line.startswith(name))


@pytest.mark.parametrize(("speedup", "text"), [(34.0, "34x slower"), (0.5, "2x faster"), (1.001, "as fast")])
def test_a_peer_is_reported_as_slower_or_faster(speedup: float, text: str) -> None:
    peer = {"dispatch_ms": 10.0, "combine_ms": 12.0, "speedup": speedup}
    own = {"backend": "shared_memory", "dispatch_ms": 1.0, "combine_ms": 2.0, "dispatch_backward_ms": None}
    limit = {"limit_ratio": 1.25, "dispatch_limit_ms": 0.8, "combine_limit_ms": 1.6}
    overhead = {"overhead_us": {"dispatch": 200.0, "combine": 400.0}}
    tables = report.dispatch_tables(RESULT | own | limit | overhead | {"peers": {"torch_gloo": peer}})
    assert "than moe_comm" in " ".join(lines(tables))
    assert row(tables, "torch_gloo").endswith(text)
    assert row(tables, "bare copies").endswith("1.25x faster")


@pytest.mark.parametrize(("vs_serial", "text"), [(0.8, "1.25x faster"), (1.03, "1.03x slower")])
def test_overlap_is_reported_as_faster_or_slower_than_serial(vs_serial: float, text: str) -> None:
    case = {"op": "dispatch_matmul", "direction": "forward", "rows": 64, "ratio": 1.0}
    times = dict.fromkeys(("compute_ms", "comm_ms", "wire_ms", "serial_ms", "overlapped_ms"), 1.0)
    summary = {"slowest_case": case, "slowest_vs_serial": vs_serial, "layer": []}
    operator = case | times | {"vs_serial": vs_serial, "hidden": 0.4}
    tables = report.overlap_tables(RESULT | summary | {"results": [operator]})
    assert row(tables, "dispatch_matmul").endswith(f"{text} 0.40")
    assert row(tables, "smallest gain") == (
        f"smallest gain of overlapped: {text} than serial (dispatch_matmul, forward, 64 rows, ratio 1)"
    )


def test_hierarchical_is_compared_with_all_to_all() -> None:
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "total_ms": 3.0, "counted_bytes": None, "link_bytes": None}
    result = {"results": [times | {"contestant": "hierarchical", "speedup": 2.0}]}
    tables = report.hierarchical_tables(RESULT | result)
    assert "than all_to_all" in " ".join(lines(tables)) and row(tables, "hierarchical").endswith("2x faster")
