"""No CUDA kernel spills, and none uses more registers than recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cuda_resources
from moe_comm.errors import KernelError, MissingDependency

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "cuda-resources.json"
AGAIN = "python -m benchmarks.cuda_resources --csrc csrc --json benchmarks/results/cuda-resources.json"
MARGIN = 8
"""Tolerance in registers, because allocations of compilers differ."""


@pytest.fixture(scope="module", autouse=True)
def nvcc() -> None:
    try:
        cuda_resources.find_nvcc()
    except MissingDependency as error:
        pytest.skip(str(error))


def check(target: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    before = {row["kernel"]: row for row in recorded["results"] if row["target"] == target}
    found = {row["kernel"]: row for row in cuda_resources.resources(target, cuda_resources.read_tree(ROOT / "csrc"))}
    assert found.keys() == before.keys(), f"other kernels than in the table; run {AGAIN}"
    for kernel, row in found.items():
        was = before[kernel]
        assert row["spill_bytes"] == 0, f"{kernel} spills: {row}"
        assert row["registers"] <= was["registers"] + MARGIN, f"{kernel}: fix it, or {AGAIN}: {row}, was {was}"
        assert row["shared_bytes"] <= was["shared_bytes"], f"{kernel}: fix it, or {AGAIN}: {row}, was {was}"
        assert row["stack_bytes"] <= was["stack_bytes"], f"{kernel}: fix it, or {AGAIN}: {row}, was {was}"


def test_no_kernel_spills_or_takes_more_of_a_hopper_than_recorded() -> None:
    check("sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in cuda_resources.TARGETS if target != "sm_90a"])
def test_no_kernel_spills_or_takes_more_of_another_generation_than_recorded(target: str) -> None:
    check(target)


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
