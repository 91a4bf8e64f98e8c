"""No CUDA kernel spills, and none uses more registers than recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cuda_resources
from moe_comm.errors import KernelError, MissingDependency

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "cuda-resources.json"
UPDATE_COMMAND = "python -m benchmarks.cuda_resources --csrc csrc --json benchmarks/results/cuda-resources.json"
MARGIN = 8
"""Tolerance in registers, because allocations of compilers differ."""


@pytest.fixture(scope="module", autouse=True)
def nvcc() -> None:
    try:
        cuda_resources.find_nvcc()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.mark.slow  # test_nvrtc.py compares what NVRTC compiles
@pytest.mark.parametrize("target", cuda_resources.TARGETS)
def test_no_kernel_spills_or_exceeds_the_recorded_resources(target: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    recorded_rows = {row["kernel"]: row for row in recorded["results"] if row["target"] == target}
    measured = {row["kernel"]: row for row in cuda_resources.resources(target, cuda_resources.read_tree(ROOT / "csrc"))}
    assert measured.keys() == recorded_rows.keys(), f"the kernels differ from the recorded ones; run {UPDATE_COMMAND}"
    for kernel, row in measured.items():
        limit = recorded_rows[kernel]
        advice = f"{kernel}: fix it or run {UPDATE_COMMAND}: {row}, recorded {limit}"
        assert row["spill_bytes"] == 0, f"{kernel} spills: {row}"
        assert row["registers"] <= limit["registers"] + MARGIN, advice
        assert row["shared_bytes"] <= limit["shared_bytes"], advice
        assert row["stack_bytes"] <= limit["stack_bytes"], advice


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) p2p_greedy(float* x, int n) {
  __shared__ float part[32];
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i * n];
  part[threadIdx.x % 32] = x[n];
  __syncthreads();
  for (int i = 0; i < 64; ++i) x[i * n] = kept[i] + kept[63 - i] * part[i % 32];
}
extern "C" __global__ void p2p_modest(float* x) { *x = 1; }
"""


def test_a_kernel_that_spills_is_detected() -> None:
    rows = cuda_resources.resources("sm_90a", {"x.cu": SPILLING}, "x.cu")
    greedy, modest = sorted(rows, key=lambda row: row["kernel"])
    assert (greedy["kernel"], modest["kernel"]) == ("greedy", "modest")
    assert greedy["spill_bytes"] > 0
    assert (greedy["registers"], greedy["shared_bytes"]) == (32, 128)
    assert (modest["spill_bytes"], modest["stack_bytes"], modest["shared_bytes"]) == (0, 0, 0)


def test_the_output_of_nvcc_is_in_the_error() -> None:
    with pytest.raises(KernelError, match=r'(?s)nvcc failed to compile x.cu for sm_80.*"nonsense" is undefined'):
        list(cuda_resources.resources("sm_80", {"x.cu": "__global__ void f() { nonsense; }"}, "x.cu"))
