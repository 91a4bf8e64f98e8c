"""Layers and dispatchers with Triton kernels have the results of plain torch. CPU tensors use the kernels only if
``native.TRITON_DEVICES`` contains "cpu".
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.expert_call import serial_call
from moe_comm.dispatch.wire_dtype import WireDtype, pack, unpack
from moe_comm.kernels import native
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.router import Router, RouterConfig, Routing
from moe_comm.topology import ExpertPlacement
from tests.kernels.triton.common import drawn, kernels, run_plain_and_triton, some_ids
from tests.overlap.triton.common import needs_triton
from tests.pool import RankPool, on_ranks

pytestmark = needs_triton


@on_ranks(1)
def test_local_dispatch_and_combine_have_the_same_bits() -> None:
    def work() -> list[Tensor]:
        dispatcher = LocalDispatcher(ExpertPlacement.balanced(5, 1))
        x_TD = drawn(7, 20, dtype=torch.bfloat16).requires_grad_()
        weights_TK = drawn(7, 3, seed=1).requires_grad_()
        sent = dispatcher.dispatch(x_TD, some_ids(7, 3, 5))
        y_TD = dispatcher.combine(sent.rows_RD * 2, weights_TK, sent.handle)
        y_TD.backward(drawn(7, 20, dtype=torch.bfloat16, seed=2))
        assert x_TD.grad is not None and weights_TK.grad is not None
        return [sent.rows_RD.detach(), y_TD.detach(), x_TD.grad, weights_TK.grad]

    plain, actual, launched = run_plain_and_triton(work)
    ordered = {"count_chunks_kernel", "place_slots_kernel"}
    assert {*ordered, "take_rows_kernel", "weighted_sum_kernel", "scale_rows_kernel"} == set(launched)
    assert all(map(torch.equal, plain, actual))


@on_ranks(1)
@pytest.mark.parametrize("name", ["fp8_token", "fp8_block_pow2"])
def test_wire_dtypes_have_the_same_bytes(name: str) -> None:
    wire_dtype = WireDtype.named(name)

    def work() -> list[Tensor]:
        packed_RX = pack(drawn(3, 150, dtype=torch.bfloat16), wire_dtype)
        return [packed_RX, unpack(packed_RX, wire_dtype, 150, torch.bfloat16)]

    plain, actual, launched = run_plain_and_triton(work)
    assert launched == ["quantize_kernel", "dequantize_kernel"]
    assert all(map(torch.equal, plain, actual))


@on_ranks(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_launch_grouped_gemms(recompute: bool) -> None:
    counts = [3, 0, 5]

    def work() -> list[Tensor]:
        experts = Experts(3, 12, 10, transposed=True, dtype=torch.bfloat16)
        experts.recompute = recompute
        experts.reset_parameters(3, std=0.5)
        rows_RD = drawn(8, 12, dtype=torch.bfloat16).requires_grad_()
        out_RD = experts(rows_RD, counts)
        out_RD.backward(drawn(8, 12, dtype=torch.bfloat16, seed=1))
        results = [out_RD.detach(), rows_RD.grad, experts.w13.grad, experts.w2.grad]
        return [t for t in results if t is not None]

    plain, results, launched = run_plain_and_triton(work)
    assert launched.count("grouped_mm_kernel") == (5 if recompute else 4), launched
    assert launched.count("grouped_weight_grad_kernel") == 2
    assert "swiglu_kernel" in launched and "swiglu_backward_kernel" in launched
    assert len(results) == 4
    for actual, expected in zip(results, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)
    assert not results[2][1].any() and not results[3][1].any()  # the expert without rows


@on_ranks(1)
@pytest.mark.parametrize(
    "marks",
    [{}, {"grad_added_to_main_grad": False}, {"grad_added_to_main_grad": False, "zero_out_wgrad": True}],
    ids=["no dummy", "dummy", "zeros"],
)
def test_weight_gradients_of_experts_are_added_to_main_grad(marks: dict[str, bool]) -> None:
    """marks: other attributes of the weights."""
    counts, dtype = [3, 0, 5], torch.bfloat16

    def work(main: bool) -> list[Tensor]:
        experts = Experts(3, 12, 10, dtype=dtype)
        experts.reset_parameters(3, std=0.5)
        for seed, w in enumerate((experts.w13, experts.w2)):
            vars(w).update(marks | {"main_grad": drawn(*w.shape, seed=seed)} if main else {})
        for seed in (1, 2):
            experts(drawn(8, 12, dtype=dtype, seed=seed + 5), counts).backward(drawn(8, 12, dtype=dtype, seed=seed))
        results = []
        for seed, w in enumerate((experts.w13, experts.w2)):
            if not main:
                assert w.grad is not None
                results.append(w.grad.float())
                continue
            results.append(vars(w)["main_grad"] - drawn(*w.shape, seed=seed))
            assert vars(w).get("grad_added_to_main_grad", False) == (w.grad is not None) == bool(marks)
            assert not marks.get("zero_out_wgrad") or (w.grad is not None and not w.grad.any())
        return results

    native.TRITON_DEVICES.add("cpu")
    try:
        kernels("device")
        for actual, expected in zip(work(True), work(False), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
            assert not actual[1].any()
    finally:
        native.TRITON_DEVICES.discard("cpu")


@on_ranks(1)
@pytest.mark.parametrize(
    ("activation", "recompute"), [("swiglu", True), ("clamped_swiglu", False)], ids=["swiglu", "gpt-oss"]
)
def test_experts_with_biases_launch_grouped_gemms(activation: str, recompute: bool) -> None:
    dtype = torch.bfloat16

    def work() -> list[Tensor]:
        dispatcher = LocalDispatcher(ExpertPlacement.balanced(4, 1))
        experts = Experts(4, 40, 12, activation, bias=True, transposed=not recompute, dtype=dtype)
        experts.recompute = recompute
        experts.reset_parameters(3, std=0.5)
        for seed, bias in enumerate((experts.b13, experts.b2)):
            assert bias is not None
            bias.data.copy_(drawn(*bias.shape, seed=seed))
        x_TD, weights_TK = drawn(40, 40, dtype=dtype).requires_grad_(), drawn(40, 2, seed=1).requires_grad_()
        ids_TK = some_ids(40, 2, 3)  # the last expert has no rows
        call = serial_call(dispatcher, x_TD, ids_TK, weights_TK)
        y_TD = call.combine(experts(call.rows, call.handle.rows_per_expert, call))
        y_TD.backward(drawn(40, 40, dtype=dtype, seed=2))
        results = [x_TD.grad, weights_TK.grad, *(p.grad for p in experts.parameters())]
        return [y_TD.detach(), *(t for t in results if t is not None)]

    plain, results, launched = run_plain_and_triton(work)
    assert launched.count("grouped_mm_kernel") == (5 if recompute else 4), launched
    assert launched.count("sum_rows_kernel") == 2 and launched.count("add_bias_dots_kernel") == 1
    assert len(results) == len(plain) == 7
    for actual, expected in zip(results, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))
    for grad in results[3:]:
        assert grad[:3].any() and not grad[3].any()


def _launches_of_unsupported_experts(rank: int, world: int, arg: None) -> list[str]:
    experts = Experts(2, 6, 4, "relu2", dtype=torch.float32)
    return run_plain_and_triton(lambda: experts(drawn(4, 6), [1, 3]))[2]


def test_experts_in_fp32_launch_no_triton_kernel(interpreter: RankPool) -> None:
    assert interpreter.run(_launches_of_unsupported_experts)[0] == []


@on_ranks(1)
@pytest.mark.parametrize("drop_invalid", [False, True])
def test_a_router_runs_in_one_kernel_with_the_same_losses_and_gradients(drop_invalid: bool) -> None:
    def work() -> tuple[Routing, Tensor, int, Tensor]:
        router = Router(6, RouterConfig(8, 2, balance_loss=0.1, z_loss=0.01, correction_bias=True))
        router.reset_parameters(std=1.0, generator=torch.Generator().manual_seed(0))
        router.drop_invalid = drop_invalid
        x_TD = drawn(9, 6, dtype=torch.bfloat16)
        if drop_invalid:
            x_TD[4, 0] = float("nan")
        routing = router(x_TD)
        if drop_invalid:
            return routing, routing.weights_TK.detach(), int(router.invalid), router.load_E
        assert routing.aux_loss is not None
        (routing.aux_loss + (routing.weights_TK * drawn(9, 2, seed=1)).sum()).backward()
        assert router.weight.grad is not None
        return routing, router.weight.grad, int(router.invalid), router.load_E

    plain, actual, launched = run_plain_and_triton(work)
    assert launched.count("route_kernel") == 1
    assert launched.count("route_backward_kernel") == (0 if drop_invalid else 1)
    assert torch.equal(actual[0].ids_TK, plain[0].ids_TK) and torch.equal(actual[3], plain[3])
    assert actual[2] == plain[2] == int(drop_invalid)
    torch.testing.assert_close(actual[0].weights_TK, plain[0].weights_TK)
    torch.testing.assert_close(actual[1], plain[1], rtol=1e-4, atol=1e-5)


def test_cpu_tensors_never_use_triton_automatically() -> None:
    assert not native.for_triton(torch.zeros(2))
    assert "cpu" not in native.TRITON_DEVICES
