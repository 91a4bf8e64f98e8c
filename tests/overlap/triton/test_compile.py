"""Every kernel compiles ahead of time, without a GPU, and uses no more resources than recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.overlap.triton.common import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "benchmarks" / "results" / "triton-resources.json"
COMPILE_COMMAND = (sys.executable, "-m", "benchmarks.triton_resources")
UPDATE_COMMAND = "python -m benchmarks.triton_resources --json benchmarks/results/triton-resources.json"
REGISTERS = 65536
"""32-bit registers of a multiprocessor of sm_80, sm_90 and sm_100."""
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Maximum shared memory of one program, by target."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of processes that compile; they share what they have compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


def _compile(folder: Path, environment: dict[str, str], only: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return what ``ahead`` writes for the kernels ``only[target]``, () for all. Targets are compiled in parallel.

    Separate processes are needed because this process may have imported Triton as an interpreter.
    """
    processes = []
    for target, names in only.items():
        command = [*COMPILE_COMMAND, "--json", str(folder / target), "--targets", target.removeprefix("sm_")]
        command += ["--only", *names] if names else []
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        stderr_texts = [process.communicate(timeout=280)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(text[-2000:] for text in stderr_texts)
    return [json.loads((folder / target).read_text()) for target in only]


def _check_resources(table: dict[str, Any]) -> None:
    recorded = json.loads(RECORDED.read_text())
    recorded_rows = {(row["kernel"], row["target"]): row for row in recorded["results"]}
    for row in table["results"]:
        assert row["registers"] * row["threads"] <= REGISTERS, row
        assert row["shared_bytes"] <= SHARED_BYTES[row["target"]], row
        assert (row["kernel"], row["target"]) in recorded_rows, f"{row['kernel']} has no record; run {UPDATE_COMMAND}"
        if table["triton"] == recorded["triton"]:
            limit = recorded_rows[row["kernel"], row["target"]]["stack_bytes"]
            assert row["stack_bytes"] <= limit, f"spills more than {limit} bytes; fix it or run {UPDATE_COMMAND}: {row}"


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
def test_forward_kernels_compile_within_recorded_resources(
    tmp_path: Path, environment: dict[str, str], target: str
) -> None:
    """Compile the kernels of a bfloat16 layer's forward pass; for sm_100 without those that transfer rows, and with the
    assembler that Triton bundles."""
    transfers = ("rows, bfloat16", "arrived_mm, bfloat16", "publish_mm, bfloat16", "tile_list")
    (table,) = _compile(
        tmp_path, environment, {target: ("forward, bfloat16", *(transfers if target == "sm_90" else ()))}
    )
    expected = {"gather_matmul", "matmul_scatter", "weighted_sum", "swiglu", "clamped swiglu", "swiglu_quantize"}
    expected |= {"grouped_mm", "grouped_mm_fp8"}
    if target == "sm_90":
        expected |= {"push_rows", "await_rows", "arrived_mm", "publish_mm", "tile_list"}
    assert {row["kernel"].split(",")[0] for row in table["results"]} == expected
    _check_resources(table)


_CARRIES = """
import re
from benchmarks.triton_resources import compiled
from benchmarks.triton_specs import LOCAL_KERNELS
names = ("forward, few rows", "gradient of weights", "with TMA, forward, few rows")
wanted = {*(f"grouped_mm, {name}, bfloat16" for name in names), "grouped_mm_fp8, forward, low latency, bfloat16"}
for spec in LOCAL_KERNELS:
    if spec.name in wanted and 90 in spec.targets:
        wanted.remove(spec.name)
        outer = re.search(r"scf.for .*", compiled(spec, 90).asm["ttgir"])
        assert re.search(r"iter_args\\(.*%skip", outer[0]), f"{spec.name}: {outer[0]}"
assert not wanted, wanted
"""


@pytest.mark.slow
def test_programs_of_grouped_products_share_the_tiles_of_all_experts(environment: dict[str, str]) -> None:
    """Each program must carry its next tile from expert to expert. Triton 3.6 drops a variable that only begins an
    inner loop: then every expert begins with program 0, which computes a tile of each expert while others wait."""
    done = subprocess.run(
        [sys.executable, "-c", _CARRIES], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]


_PRODUCTS = """
import re, sys
from benchmarks.triton_resources import compiled
from benchmarks.triton_specs import LOCAL_KERNELS
target, found = int(sys.argv[1]), []
wanted = re.compile("grouped_mm, .*(forward|few rows|gradient of rows), bfloat16")
for spec in LOCAL_KERNELS:
    if wanted.fullmatch(spec.name) and target in spec.targets:
        ptx = compiled(spec, target).asm["ptx"]
        products = re.findall(r"(?:wgmma|tcgen05)\\.mma[\\w.:]*|mma\\.sync[\\w.]*", ptx)
        steps = {re.sub("m64n[0-9]+", "", one) for one in products}
        assert len(steps) == 1 and not re.search(r"(add|fma)[\\w.]*\\.f32", ptx), (spec.name, steps)
        found.append(steps)
assert len(found) >= 3 and all(steps == found[0] for steps in found), found
"""


@pytest.mark.parametrize(
    "target", ["90", pytest.param("80", marks=pytest.mark.slow), pytest.param("100", marks=pytest.mark.slow)]
)
def test_tiles_for_few_and_for_many_rows_add_products_in_the_same_steps(
    environment: dict[str, str], target: str
) -> None:
    """A rank chooses the tile by its own rows, and must not change the bits of a row. Instructions differ in the number
    of columns only, and no other instruction adds to their sums."""
    done = subprocess.run(
        [sys.executable, "-c", _PRODUCTS, target],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_all_kernel_variants_compile_within_recorded_resources(tmp_path: Path, environment: dict[str, str]) -> None:
    for table in _compile(tmp_path, environment, dict.fromkeys(SHARED_BYTES, ())):
        _check_resources(table)


@pytest.mark.slow
def test_ahead_of_time_compilation_is_refused_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [*COMPILE_COMMAND, "--only", "await_rows"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode != 0
    assert "unset it before triton is imported" in process.stderr
