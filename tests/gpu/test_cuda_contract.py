"""The dispatch contract on CUDA tensors: rows equal those of the CPU, bits equal plain torch on the same device,
and values are close to those of the CPU.

One GPU is enough: the group is NCCL with one rank, on which ``all_to_all`` and ``all_gather`` are built directly
(``make_dispatcher`` would take ``local`` there). ``pytest tests/dispatch --device cuda`` tests several ranks with
CUDA tensors, which gloo copies through host memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import Dispatcher, DispatchOptions, make_dispatcher
from moe_comm.dispatch.backends.all_gather import AllGatherDispatcher
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.errors import InputError, RoutingError
from moe_comm.layers.check import CheckGradsConfig, run_check_grads
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement
from tests.dispatch import cases, workers
from tests.dispatch.cases import CASES, Case
from tests.dispatch.workers import Job, Result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS = ("local", "all_to_all", "all_gather")
FIELDS = ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad")


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """One rank; NCCL for CUDA tensors."""
    with init_ranks("cuda", timeout_s=60):
        yield dist.group.WORLD


@pytest.fixture(autouse=True)
def repeatable_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    # cuBLAS is deterministic only with a fixed workspace, and torch's deterministic mode requires it.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def build(backend: str, num_experts: int, group: dist.ProcessGroup) -> Dispatcher:
    placement, options = ExpertPlacement.balanced(num_experts, 1), DispatchOptions(timeout_s=60)
    if backend == "all_to_all":
        return AllToAllDispatcher(placement, group, 0, options)
    if backend == "all_gather":
        return AllGatherDispatcher(placement, group, 0, options)
    return make_dispatcher(num_experts, group, backend="local", options=options, device="cuda")


def on_cuda(dispatcher: Dispatcher, case: Case) -> Result:
    batch, experts = cases.make(case)
    with workers.poisoned():
        return workers.layer(dispatcher, case, workers.to_device(batch, "cuda"), experts.cuda())


@pytest.mark.parametrize("name", [case.name for case in CASES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_the_cpu_and_has_plain_torchs_bits(backend: str, name: str, group: dist.ProcessGroup) -> None:
    case = cases.BY_NAME[name]
    result = on_cuda(build(backend, case.num_experts, group), case)
    plain = on_cuda(LocalDispatcher(ExpertPlacement.balanced(case.num_experts, 1), None, 0, DispatchOptions()), case)
    cpu = workers.run_case(case, Job("plain"), None, 0, 1)
    assert result.rows_per_expert == cpu.rows_per_expert
    assert result.num_dropped == cpu.num_dropped
    assert torch.equal(result.rows_RD, cpu.rows_RD)
    for field in FIELDS:
        actual, expected_bits, expected_values = getattr(result, field), getattr(plain, field), getattr(cpu, field)
        assert (actual is None) == (expected_values is None)
        if actual is not None:
            assert torch.equal(actual, expected_bits), field
            assert_close(actual, expected_values, case, field)


def assert_close(actual: Tensor, expected: Tensor, case: Case, field: str) -> None:
    """Allow a few roundings of the largest value, because GEMMs add in a different order on each device."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert not actual.isnan().any(), field
    if not actual.numel():
        return
    dtypes = {case.dtype, case.weights_dtype, torch.float32}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    scale = max(1.0, float(expected.abs().max()))
    difference = float((actual.double() - expected.double()).abs().max())
    assert difference <= 8 * eps * scale * case.hidden**0.5, f"{field} differs by {difference}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_is_a_typed_error_and_the_dispatcher_stays_usable(backend: str, group: dist.ProcessGroup) -> None:
    dispatcher = build(backend, 4, group)
    x_TD = torch.randn(5, 8, device="cuda")
    ids_TK = torch.tensor([[0, 3]] * 5, device="cuda")
    wrong_TK = ids_TK.clone()
    wrong_TK[2, 1] = 4
    with pytest.raises(RoutingError, match="expert id 4 of token 2"):
        dispatcher.dispatch(x_TD, wrong_TK)
    with pytest.raises(InputError, match="on cuda:0 but the expert ids are on cpu"):
        dispatcher.dispatch(x_TD, ids_TK.cpu())
    sent = dispatcher.dispatch(x_TD, ids_TK)
    y_TD = dispatcher.combine(sent.rows_RD, torch.full((5, 2), 0.5, device="cuda"), sent.handle)
    assert torch.equal(y_TD, x_TD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_gradient_of_the_layer_agrees_with_float64(dtype: str, group: dist.ProcessGroup) -> None:
    report = run_check_grads(CheckGradsConfig(dtype=dtype, device="cuda", shared_ffn=32), group)
    assert report.ok, str(report)


def test_our_kernels_run_on_every_device() -> None:
    native = pytest.importorskip("moe_comm._C", reason="the native core is not built")
    probe_json = native.cuda_probe()
    if probe_json is None:
        pytest.skip("built without CUDA")
    probe = json.loads(probe_json)
    assert len(probe["devices"]) == torch.cuda.device_count()
    assert all(device["kernel_ran"] for device in probe["devices"]), probe
