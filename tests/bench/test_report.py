"""Tables of benchmarks state which of two times is shorter, whose they are, and how far they spread."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from moe_comm.bench.common.ranks import say
from moe_comm.bench.dispatch import benchmark as dispatch, hierarchical
from moe_comm.bench.layer import benchmark as layer
from moe_comm.bench.overlap import benchmark as overlap

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


def stats(median: float, least: float | None = None) -> dict[str, float]:
    return {"median_ms": median, "min_ms": least or median, "p90_ms": 1.5 * median, "iterations": 7}


@pytest.mark.parametrize(("speedup", "text"), [(34.0, "34x slower"), (0.5, "2x faster"), (1.001, "as fast")])
def test_a_peer_is_reported_as_slower_or_faster(speedup: float, text: str) -> None:
    peer = {"dispatch_ms": 10.0, "combine_ms": 12.0, "speedup": speedup}
    own = {"backend": "shared_memory", "dispatch_ms": 1.0, "combine_ms": 2.0, "dispatch_backward_ms": None}
    limit = {"limit_ratio": 1.25, "dispatch_limit_ms": 0.8, "combine_limit_ms": 1.6}
    overhead = {"overhead_us": {"dispatch": 200.0, "combine": 400.0}}
    times = {"moe_comm": (1.0, 2.0), "limit": (0.8, 1.6), "torch_gloo": (10.0, 12.0)}
    details = {name: {"dispatch": stats(a), "combine": stats(b, b / 1.3)} for name, (a, b) in times.items()}
    measured = {"peers": {"torch_gloo": peer}, "details": details}
    tables = dispatch.tables(RESULT | own | limit | overhead | measured)
    assert "than moe_comm" in " ".join(lines(tables))
    assert row(tables, "torch_gloo").startswith("torch_gloo 10 10-15 12 9.23-18 noisy ")
    assert "noisy: the median is above 1.25 x minimum" in " ".join(lines(tables))
    assert row(tables, "torch_gloo").endswith(text)
    assert row(tables, "bare copies").endswith("1.25x faster")


@pytest.mark.parametrize(("vs_serial", "text"), [(0.8, "1.25x faster"), (1.03, "1.03x slower")])
def test_overlap_is_reported_as_faster_or_slower_than_serial(vs_serial: float, text: str) -> None:
    case = {"op": "dispatch_matmul", "direction": "forward", "rows": 64, "ratio": 1.0}
    times = dict.fromkeys(("compute_ms", "comm_ms", "wire_ms", "serial_ms", "overlapped_ms"), 1.0)
    summary = {"slowest_case": case, "slowest_vs_serial": vs_serial, "layer": []}
    times |= {"chunked_comm_ms": 0.7, "overlapped_min_ms": 0.9, "overlapped_p90_ms": 1.1}
    operator = case | times | {"vs_serial": 0.5, "vs_serial_paired": vs_serial, "hidden": 0.4}
    tables = overlap.tables(RESULT | summary | {"results": [operator]})
    assert row(tables, "dispatch_matmul") == f"dispatch_matmul, forward 1 64 1 1 0.7 1 1 0.9-1.1 {text} 0.40"
    assert "in chunks: those of overlapped alone" in " ".join(lines(tables))
    assert row(tables, "smallest gain") == (
        f"smallest gain of overlapped: {text} than serial (dispatch_matmul, forward, 64 rows, ratio 1)"
    )


def test_hierarchical_is_compared_with_all_to_all() -> None:
    times: dict[str, Any] = {
        "forward_ms": 1.0,
        "backward_ms": 2.0,
        "total_ms": 3.0,
        "total_min_ms": 2.0,
        "total_p90_ms": 4.0,
    }
    times |= {"counted_bytes": None, "link_bytes": None}
    result = {"results": [times | {"contestant": "hierarchical", "speedup": 2.0}]}
    tables = hierarchical.tables(RESULT | result)
    assert "than all_to_all" in " ".join(lines(tables)) and row(tables, "hierarchical").endswith("2x faster")


def test_a_layer_is_compared_with_the_layer_of_its_expert_parallel_size() -> None:
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "total_ms": 3.0, "total_min_ms": 2.9, "total_p90_ms": 3.2}
    peer = times | {"ep": 1, "gflops": 10.0, "gemm_fraction": 0.5, "speedup": 1.4, "speedup_of": "moe_comm_ep1"}
    result: dict[str, Any] = {"contestants": {"hf_grouped": peer}, "gemm_gflops": 20.0}
    tables = layer.tables(RESULT | result)
    assert row(tables, "hf_grouped").endswith("1.4x slower than moe_comm_ep1")
    assert " 3 2.9-3.2 " in row(tables, "hf_grouped")


def test_the_first_rank_says_what_is_measured_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("measuring 7 rounds")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "measuring 7 rounds\n")
