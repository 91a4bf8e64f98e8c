"""The Triton kernels around dispatch on a GPU, at the sizes of real layers.

Results are compared with the bits of the CPU where the contract promises them, otherwise with float64.
``tests/kernels/triton`` compares the same kernels with the same references in Triton's interpreter, at odd sizes.
"""

from __future__ import annotations

import importlib.util
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from moe_comm.dispatch.slots import plain
from moe_comm.dispatch.wire_dtype import WireDtype, decode, encode
from moe_comm.kernels import row_weights
from moe_comm.kernels.fp8 import of_packed, quantize_weights
from moe_comm.kernels.swiglu import swiglu_backward_reference, swiglu_forward_reference
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.router import Router, RouterConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, TOP_K, EXPERTS, WIDTHS = 300, 8, 32, (1024, 7168, 999)


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(4096, 8, 256), (301, 2, 3), (1, 8, 8), (0, 2, 4)])
def test_slots_are_ordered_as_by_a_stable_sort(tokens: int, top_k: int, experts: int) -> None:
    from moe_comm.kernels.triton.slot_order import order_slots

    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(-2, experts + 1, (tokens, top_k), generator=generator)
    order, place_TK, actual = (t.cpu() for t in order_slots(ids_TK.to(DEVICE), experts))
    exact_order, exact_place_TK = plain.order_slots(ids_TK, experts)
    counts = plain.count_slots(ids_TK, experts)[: experts + 2]
    num_rows = int(counts[:experts].sum())
    assert torch.equal(actual, counts)
    assert torch.equal(place_TK, exact_place_TK)
    assert torch.equal(order[:num_rows], exact_order[:num_rows])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_sums_and_dot_products_have_the_cpus_bits(dtype: torch.dtype, width: int) -> None:
    from moe_comm.kernels.triton.rows import copy_rows, scale_rows_, spread, take_rows, weighted_sum

    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    ids_TK = ids_TK.masked_fill(torch.rand(TOKENS, TOP_K, generator=generator) < 0.1, -1)
    order, place_TK = plain.order_slots(ids_TK, EXPERTS)
    num_rows = int((ids_TK >= 0).sum())
    x_TD, grad_TD = _drawn(TOKENS, width, dtype=dtype), _drawn(TOKENS, width, dtype=dtype, seed=1)
    weights_TK, token_R = _drawn(TOKENS, TOP_K, seed=2), order[:num_rows] // TOP_K
    rows_RD = take_rows(x_TD.to(DEVICE), token_R.to(DEVICE))
    assert torch.equal(rows_RD.cpu(), x_TD[token_R])
    assert torch.equal(copy_rows(x_TD.to(DEVICE), place_TK.to(DEVICE), num_rows), rows_RD)
    place, weights = place_TK.to(DEVICE), weights_TK.to(DEVICE)
    for w, on_cpu in ((weights, weights_TK), (None, None)):
        assert torch.equal(weighted_sum(rows_RD, place, w).cpu(), plain.weighted_sum(x_TD[token_R], place_TK, on_cpu))
    grad_RD, grad_TK = spread(grad_TD.to(DEVICE), place, weights, num_rows, rows_RD)
    assert torch.equal(grad_RD.cpu(), plain.spread(grad_TD, place_TK, weights_TK, num_rows))
    assert grad_TK is not None
    assert torch.equal(grad_TK.cpu(), plain.weight_grad(grad_TD, x_TD[token_R], place_TK))
    factor_T, scaled_TD = _drawn(TOKENS, seed=3), x_TD.to(DEVICE, copy=True)
    dots_T = scale_rows_(scaled_TD, factor_T.to(DEVICE), grad_TD.to(DEVICE))
    assert dots_T is not None
    assert torch.equal(dots_T.cpu(), row_weights.lane_dot(x_TD, grad_TD))
    assert torch.equal(scaled_TD.cpu(), row_weights.scale(x_TD, factor_T))


@pytest.mark.parametrize("width", [768, 2048, 999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_times_weights_has_the_bits_of_separate_kernels(dtype: torch.dtype, width: int) -> None:
    from moe_comm.kernels.triton.rows import scale_rows_
    from moe_comm.kernels.triton.swiglu import swiglu_backward, swiglu_backward_weighted

    place_TK = torch.randperm(TOKENS * TOP_K, generator=torch.Generator().manual_seed(0)).view(TOKENS, TOP_K).to(DEVICE)
    weights_TK, rows = _drawn(TOKENS, TOP_K, seed=1).to(DEVICE), TOKENS * TOP_K
    h_RG, grad_RF = _drawn(rows, 2 * width, dtype=dtype).to(DEVICE), _drawn(rows, width, dtype=dtype, seed=2).to(DEVICE)
    expected_RG, act_RF, actual_RG = torch.empty_like(h_RG), torch.empty_like(grad_RF), torch.empty_like(h_RG)
    swiglu_backward(h_RG, grad_RF, expected_RG, act_RF)
    weights_R = torch.empty(rows, device=DEVICE).scatter_(0, place_TK.flatten(), weights_TK.flatten())
    dots_R = scale_rows_(act_RF, weights_R, grad_RF)
    scale_rows_(expected_RG, weights_R)
    dots_TK = torch.empty_like(weights_TK)
    swiglu_backward_weighted(h_RG, grad_RF, actual_RG, grad_RF, (weights_TK, place_TK, dots_TK))
    assert dots_R is not None and torch.equal(dots_TK, dots_R[place_TK])
    assert torch.equal(actual_RG, expected_RG) and torch.equal(grad_RF, act_RF)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gradients_of_logits_agree_with_float64_and_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    from moe_comm.kernels.triton.linear import linear_gradients

    for tokens, experts, hidden in ((3000, 128, 2048), (100, 33, 200)):
        grad_TE = (_drawn(tokens, experts) * 1e-3).to(DEVICE)
        w_ED = _drawn(experts, hidden, dtype=dtype, seed=1).to(DEVICE)
        x_TD = _drawn(tokens, hidden, dtype=dtype, seed=2).to(DEVICE)
        grad_x_TD, grad_ED = linear_gradients(grad_TE, x_TD, w_ED, (True, True))
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(grad_x_TD, (grad_TE.double() @ w_ED.double()).to(dtype), **tolerance)
        exact_ED = (grad_TE.double().T @ x_TD.double()).to(dtype)
        torch.testing.assert_close(grad_ED, exact_ED, **tolerance)
        of_rows, _ = linear_gradients(grad_TE[5:70], x_TD[5:70], w_ED, (True, False))
        assert torch.equal(of_rows, grad_x_TD[5:70])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_agrees_with_float64_and_fp8_has_the_cpus_bytes(dtype: torch.dtype) -> None:
    from moe_comm.kernels.swiglu import swiglu
    from moe_comm.kernels.triton import quantize

    for width in (2048, 1000):
        h_RG, grad_RF = _drawn(50, 2 * width, dtype=dtype), _drawn(50, width, dtype=dtype, seed=1)
        act, grad_h = torch.empty(50, width, dtype=torch.float64), torch.empty(50, 2 * width, dtype=torch.float64)
        swiglu_forward_reference(h_RG.double(), act)
        swiglu_backward_reference(h_RG.double(), grad_RF.double(), grad_h, None)
        leaf = h_RG.to(DEVICE).requires_grad_()
        act_on_gpu = swiglu(leaf)
        act_on_gpu.backward(grad_RF.to(DEVICE))
        torch.testing.assert_close(act_on_gpu.cpu(), act.to(dtype))
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.cpu(), grad_h.to(dtype))
        for kind, power_of_two in (("token", False), ("block", False), ("block", True)):
            wire_dtype = WireDtype("fp8", "token" if kind == "token" else "block", power_of_two)
            packed_RB = encode(h_RG, wire_dtype)
            actual_RB = quantize.quantize(h_RG.to(DEVICE), per_row=kind == "token", power_of_two=power_of_two)
            assert torch.equal(actual_RB.cpu(), packed_RB)
            rows = of_packed(packed_RB.to(DEVICE), 2 * width, wire_dtype.num_scales(2 * width))
            values_RG = rows.values_RD.view(torch.uint8)
            back_RG = quantize.dequantize_rows(values_RG, rows.scale_RB, dtype, per_row=kind == "token")
            assert torch.equal(back_RG.cpu(), decode(packed_RB, wire_dtype, 2 * width, dtype))
        fused = quantize.swiglu_quantize(leaf.detach()).cpu()
        assert torch.equal(fused, encode(act_on_gpu.detach().cpu(), WireDtype("fp8")))


@pytest.mark.parametrize(
    "config",
    [
        RouterConfig(256, 8, "sigmoid", scale=2.5, num_groups=8, top_groups=4, correction_bias=True),
        RouterConfig(128, 8, "softmax"),
        RouterConfig(60, 4, "softmax", normalize=False),
        RouterConfig(32, 4, "topk_softmax"),
    ],
    ids=lambda config: f"{config.score} {config.num_experts}",
)
def test_routing_agrees_with_float64_and_does_not_depend_on_the_batch(config: RouterConfig) -> None:
    from moe_comm.kernels.triton.router import route

    router = Router(4, config)
    if router.correction_bias is not None:
        router.correction_bias.copy_(_drawn(config.num_experts, seed=1) * 0.1)
    logits_TE = _drawn(500, config.num_experts)
    wide_logits, gpu_logits = logits_TE.double().requires_grad_(), logits_TE.to(DEVICE).requires_grad_()
    scores_TE = wide_logits.sigmoid() if config.score == "sigmoid" else wide_logits.softmax(-1)
    ids_TK = router._choose(wide_logits.detach(), scores_TE.detach())
    weights_TK = router._weights(wide_logits, scores_TE, ids_TK)
    bias = None if router.correction_bias is None else router.correction_bias.to(DEVICE)
    gpu_ids, gpu_weights, _ = route(gpu_logits, bias, config)
    same_T = (gpu_ids.cpu() == ids_TK).all(-1)
    assert same_T.float().mean() > 0.99  # the other tokens have scores that fp32 cannot distinguish
    grad_TK = _drawn(500, config.top_k, seed=2) * same_T[:, None]
    torch.testing.assert_close(gpu_weights.cpu()[same_T].double(), weights_TK[same_T], rtol=1e-4, atol=1e-6)
    (actual,) = torch.autograd.grad(gpu_weights, gpu_logits, grad_TK.to(DEVICE))
    (expected,) = torch.autograd.grad(weights_TK, wide_logits, grad_TK.double())
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-3, atol=1e-6)
    part = route(gpu_logits.detach()[7:9], bias, config)
    assert torch.equal(part[0], gpu_ids[7:9]) and torch.equal(part[1], gpu_weights[7:9])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_products_and_gradients_agree_with_float64(dtype: torch.dtype) -> None:
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, grouped_weight_grad_into

    for counts, inner, columns in (
        ([300, 0, 77, 1], 512, 768),
        ([3, 0, 5, 1], 512, 256),
        ([130, 200], 100, 36),
        ([128, 192, 193, 64, 65], 256, 320),  # whole and partial tiles
    ):
        rows_RD = _drawn(sum(counts), inner, dtype=dtype)
        w_END = _drawn(len(counts), columns, inner, dtype=dtype, seed=1) / inner**0.5
        grad_RN = _drawn(sum(counts), columns, dtype=dtype, seed=2)
        wide_rows, wide_w = rows_RD.double().requires_grad_(), w_END.double().requires_grad_()
        expected = torch.cat([part @ wide_w[e].T for e, part in enumerate(wide_rows.split(counts))])
        expected.backward(grad_RN.double())
        rows, w, grad = rows_RD.to(DEVICE), w_END.to(DEVICE), grad_RN.to(DEVICE)
        counts_E = torch.tensor(counts, device=DEVICE)
        out_RN, grad_RD, grad_END = (torch.empty_like(t) for t in (grad, rows, w))
        grouped_mm_into(rows, w, counts_E, out_RN)
        grouped_mm_into(grad, w.transpose(1, 2), counts_E, grad_RD)
        grouped_weight_grad_into(grad, rows, counts_E, grad_END)
        close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        for actual, exact in ((out_RN, expected), (grad_RD, wide_rows.grad), (grad_END, wide_w.grad)):
            assert exact is not None
            error = (actual.cpu().double() - exact).norm() / exact.norm()
            assert error < close, (counts, error)
        assert not any(grad_END[e].any() for e, count in enumerate(counts) if not count)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_grouped_products_with_tma_have_the_bits_of_those_without(dtype: torch.dtype, transposed: bool) -> None:
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into

    for counts in ([300, 0, 77, 1], [3, 0, 5, 1], [128, 192, 193, 64]):
        w_END = _drawn(4, 320, 512, dtype=dtype, seed=1).to(DEVICE)
        if transposed:
            w_END = w_END.transpose(1, 2).contiguous().transpose(1, 2)
        rows_RD = _drawn(sum(counts), 512, dtype=dtype).to(DEVICE)
        grad_RN = _drawn(sum(counts), 320, dtype=dtype, seed=2).to(DEVICE)
        results, counts_E = [], torch.tensor(counts, device=DEVICE)
        for tma in (False, True):
            out_RN, grad_RD = torch.empty_like(grad_RN), torch.empty_like(rows_RD)
            grouped_mm_into(rows_RD, w_END, counts_E, out_RN, tma=tma)
            grouped_mm_into(grad_RN, w_END.transpose(1, 2), counts_E, grad_RD, tma=tma)
            results.append((out_RN, grad_RD))
        assert all(map(torch.equal, *results)), counts


def test_weight_gradients_are_added_in_fp32() -> None:
    from moe_comm.kernels.triton.grouped_mm import grouped_weight_grad_into

    counts = [300, 0, 77, 1]
    rows_RD, grad_RN = _drawn(378, 512, dtype=torch.bfloat16), _drawn(378, 320, dtype=torch.bfloat16, seed=1)
    before_END = _drawn(4, 320, 512, seed=2)
    parts = zip(grad_RN.double().split(counts), rows_RD.double().split(counts), strict=True)
    expected_END = before_END.double() + torch.stack([grad.T @ rows for grad, rows in parts])
    main_END = before_END.to(DEVICE)
    counts_E = torch.tensor(counts, device=DEVICE)
    grouped_weight_grad_into(grad_RN.to(DEVICE), rows_RD.to(DEVICE), counts_E, main_END, add=True)
    error = (main_END.cpu().double() - expected_END).norm() / expected_END.norm()
    assert error < 1e-5
    assert torch.equal(main_END[1].cpu(), before_END[1])


@pytest.mark.parametrize("counts", [[300, 0, 77, 1], [3, 0, 5, 1], [128, 192, 193, 64]], ids=str)
def test_fp8_products_agree_with_float64_on_dequantized_operands(counts: list[int]) -> None:
    from moe_comm.kernels.triton import grouped_mm_fp8, quantize

    for inner, columns in ((512, 256), (1000, 300)):
        packed_RB = quantize.quantize(_drawn(sum(counts), inner, dtype=torch.bfloat16).to(DEVICE))
        first = -(-inner // 4)
        scale_RB = packed_RB.view(torch.float32)[:, first : first + -(-inner // 128)]
        w_ENK, w_scale_ECB = quantize_weights(_drawn(4, columns, inner, seed=1).to(DEVICE))
        rows = quantize.dequantize_rows(packed_RB[:, :inner], scale_RB, torch.float32).cpu().double()
        wide_scale = w_scale_ECB.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :columns, :inner]
        w = (w_ENK.double() * wide_scale).cpu()
        expected_RN = torch.cat([part @ w[e].T for e, part in enumerate(rows.split(counts))])
        operands = (packed_RB[:, :inner], scale_RB), (w_ENK, w_scale_ECB)
        for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 5e-3)):
            out_RN = torch.empty(sum(counts), columns, dtype=dtype, device=DEVICE)
            grouped_mm_fp8.grouped_mm_fp8_into(*operands, torch.tensor(counts, device=DEVICE), out_RN)
            assert (out_RN.cpu().double() - expected_RN).norm() / expected_RN.norm() < bound


def test_experts_with_fp8_gemms_are_near_plain_torch() -> None:
    on_cpu = Experts(4, 512, 320, dtype=torch.bfloat16)
    on_cpu.reset_parameters(0, std=0.1)
    on_cpu.gemm_dtype = "fp8"
    results = []
    for experts in (on_cpu, deepcopy(on_cpu).to(DEVICE)):
        values, scales = quantize_weights(experts.w13.detach())
        rows_RD = _drawn(378, 512, dtype=torch.bfloat16).to(experts.w13.device).requires_grad_()
        out_RD = experts(rows_RD, [300, 0, 77, 1])
        out_RD.backward(_drawn(378, 512, dtype=torch.bfloat16, seed=1).to(out_RD.device))
        tensors = [values.view(torch.uint8), scales, out_RD, rows_RD.grad, experts.w13.grad, experts.w2.grad]
        results.append([t.detach().cpu() for t in tensors if t is not None])
    plain, actual = results
    assert len(actual) == 6 and torch.equal(actual[0], plain[0]) and torch.equal(actual[1], plain[1])
    for one, other in zip(actual[2:], plain[2:], strict=True):
        assert (one.double() - other.double()).norm() <= 2e-2 * other.double().norm()
