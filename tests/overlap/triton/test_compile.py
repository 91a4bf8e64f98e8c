"""Every kernel compiles for GPUs that are not there, and none takes more of one than is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.overlap.triton.common import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "benchmarks" / "results" / "triton-resources.json"
AHEAD = (sys.executable, "-m", "moe_comm.overlap.triton.ahead")
AGAIN = "python -m moe_comm.overlap.triton.ahead --json benchmarks/results/triton-resources.json"
REGISTERS = 65536
"""32-bit registers of a multiprocessor of sm_80, sm_90 and sm_100."""
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Most that one program can have."""


def _compile(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What ``ahead`` writes for each target, which it compiles for at once; in processes of their own, as this one's
    Triton may have been imported to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    started = []
    for target in SHARED_BYTES:
        command = [*AHEAD, "--json", str(folder / target), "--targets", target.removeprefix("sm_"), *arguments]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=280)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(text[-2000:] for text in said)
    return [json.loads((folder / target).read_text()) for target in SHARED_BYTES]


def _check(found: dict[str, Any]) -> None:
    recorded = json.loads(RECORDED.read_text())
    before = {(row["kernel"], row["target"]): row for row in recorded["results"]}
    for row in found["results"]:
        assert row["registers"] * row["threads"] <= REGISTERS, row
        assert row["shared_bytes"] <= SHARED_BYTES[row["target"]], row
        assert (row["kernel"], row["target"]) in before, f"{row['kernel']} is not in the table; run {AGAIN}"
        if found["triton"] == recorded["triton"]:
            was = before[row["kernel"], row["target"]]["stack_bytes"]
            assert row["stack_bytes"] <= was, f"spills more than the recorded {was} bytes; fix it, or {AGAIN}: {row}"


def test_every_kernel_compiles_for_three_generations_and_takes_no_more_than_recorded(tmp_path: Path) -> None:
    """As in a bfloat16 layer's forward pass; for sm_100 with the assembler that Triton brings for it."""
    found = _compile(tmp_path, "--only", "forward, bfloat16", "rows, bfloat16")
    for table in found:
        assert {row["kernel"].split(",")[0] for row in table["results"]} == {
            *("gather_matmul", "matmul_scatter", "push_rows", "await_rows"),
            *("dispatch_matmul", "matmul_combine"),
            *("weighted_sum", "swiglu", "swiglu_quantize", "grouped_mm"),
        }
        _check(table)


@pytest.mark.slow
def test_every_way_to_launch_a_kernel_compiles_and_takes_no_more_than_recorded(tmp_path: Path) -> None:
    for table in _compile(tmp_path):
        _check(table)


def test_nothing_is_compiled_where_triton_interprets() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [*AHEAD, "--only", "await_rows"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "unset it before triton is imported" in done.stderr
