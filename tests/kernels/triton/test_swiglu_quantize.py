"""SwiGLU agrees with its reference; fp8 rows have the bytes of ``wire_dtype.encode``, fused with SwiGLU or not."""

from __future__ import annotations

import pytest
import torch

from moe_comm.dispatch.wire_dtype import WireDtype, decode, encode
from moe_comm.errors import InputError
from moe_comm.kernels.activations import clamped_swiglu
from moe_comm.kernels.fp8 import of_packed
from moe_comm.kernels.swiglu import swiglu_backward_reference, swiglu_forward_reference
from tests.kernels.triton.common import DTYPES, drawn, kernels
from tests.overlap.triton.common import needs_triton
from tests.pool import on_ranks

pytestmark = needs_triton
WIDTHS = (1, 37, 150)
DTYPES_AND_WIDTHS = [*((torch.bfloat16, width) for width in WIDTHS), (torch.float32, 37), (torch.float16, 128)]


@on_ranks(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_and_its_gradient_agree_with_the_reference_also_in_place(dtype: torch.dtype) -> None:
    swiglu = kernels("swiglu")
    for width in WIDTHS:
        h_RG = drawn(5, 2 * width + 1, dtype=dtype)[:, : 2 * width] * 4
        h_RG[0, 0], h_RG[1, 0] = -200.0, 200.0  # exp overflows
        grad_RF = drawn(5, width, dtype=dtype, seed=1)
        expected, recomputed = torch.empty(5, width, dtype=torch.float64), torch.empty(5, width, dtype=torch.float64)
        grad_h_expected = torch.empty(5, 2 * width, dtype=torch.float64)
        swiglu_forward_reference(h_RG.double(), expected)
        swiglu_backward_reference(h_RG.double(), grad_RF.double(), grad_h_expected, recomputed)
        act_RF, grad_h_RG = drawn(5, width, dtype=dtype), drawn(5, 2 * width, dtype=dtype)
        swiglu.swiglu_forward(h_RG, act_RF)
        swiglu.swiglu_backward(h_RG, grad_RF, grad_h_RG, None)
        torch.testing.assert_close(act_RF, expected.to(dtype))
        torch.testing.assert_close(grad_h_RG, grad_h_expected.to(dtype))
        # In place: the gradient overwrites h, and the activation overwrites its gradient.
        h_copy, grad_copy = h_RG.contiguous(), grad_RF.clone()
        swiglu.swiglu_backward(h_copy, grad_copy, h_copy, grad_copy)
        assert torch.equal(h_copy, grad_h_RG) and torch.equal(grad_copy, act_RF), width
    swiglu.swiglu_forward(drawn(0, 8, dtype=dtype), drawn(0, 4, dtype=dtype))


@on_ranks(1)
def test_clamped_swiglu_and_its_gradient_agree_with_autograd_also_in_place() -> None:
    swiglu, glu = kernels("swiglu"), (1.702, 1.5)
    for dtype, width in DTYPES_AND_WIDTHS:
        h_RG, grad_RF = drawn(5, 2 * width, dtype=dtype) * 2, drawn(5, width, dtype=dtype, seed=1)
        leaf = h_RG.double().requires_grad_()
        expected = clamped_swiglu(*glu)(leaf)
        (grad_h_expected,) = torch.autograd.grad(expected, leaf, grad_RF.double())
        act_RF = torch.empty_like(grad_RF)
        swiglu.swiglu_forward(h_RG, act_RF, glu)
        swiglu.swiglu_backward(h_RG, grad_RF, h_RG, grad_RF, glu)
        torch.testing.assert_close(act_RF, expected.detach().to(dtype))
        torch.testing.assert_close(h_RG, grad_h_expected.to(dtype))
        assert torch.equal(grad_RF, act_RF), (dtype, width)


@on_ranks(1)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", ["token", "block"])
def test_quantized_rows_have_the_bytes_of_the_wire_dtype_with_and_without_swiglu(kind: str, power_of_two: bool) -> None:
    quantize, swiglu = kernels("quantize"), kernels("swiglu")
    wire_dtype, per_row = WireDtype("fp8", kind, power_of_two), kind == "token"
    for dtype, width in DTYPES_AND_WIDTHS:
        h_RG = drawn(3, 2 * width, dtype=dtype) * torch.tensor([[1e-3], [300.0], [0.0]], dtype=dtype)
        act_RF = torch.empty(3, width, dtype=dtype)
        swiglu.swiglu_forward(h_RG, act_RF)
        packed_RB = encode(h_RG, wire_dtype)
        assert torch.equal(quantize.quantize(h_RG, per_row=per_row, power_of_two=power_of_two), packed_RB), (
            dtype,
            width,
        )
        rows = of_packed(packed_RB, 2 * width, wire_dtype.num_scales(2 * width))
        actual_RG = quantize.dequantize_rows(rows.values_RD.view(torch.uint8), rows.scale_RB, dtype, per_row=per_row)
        assert torch.equal(actual_RG, decode(packed_RB, wire_dtype, 2 * width, dtype))
        if wire_dtype == WireDtype("fp8"):
            assert torch.equal(quantize.swiglu_quantize(h_RG), encode(act_RF, wire_dtype)), (dtype, width)


@on_ranks(1)
def test_every_e4m3_number_and_every_tie_is_rounded_as_torch_does() -> None:
    quantize = kernels("quantize")
    # Each e4m3 number and each midpoint, twice; 448 keeps the scale at 1.
    bits = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (bits[1:] + bits[:-1]) / 2
    x = torch.cat((bits, between, between * 1.0001, between * 0.9999, torch.tensor([448.0])))
    rows_RD = torch.stack((x, -x))
    wire_dtype = WireDtype("fp8", "token")
    assert torch.equal(quantize.quantize(rows_RD, per_row=True), encode(rows_RD, wire_dtype))


@on_ranks(1)
def test_a_nan_or_an_infinity_makes_its_block_nan_and_no_other() -> None:
    quantize = kernels("quantize")
    rows_RD = drawn(2, 300)
    rows_RD[0, 5], rows_RD[0, 140], rows_RD[1, 299] = float("nan"), float("inf"), float("-inf")
    for kind in ("token", "block"):
        wire_dtype, per_row = WireDtype("fp8", kind), kind == "token"
        rows = of_packed(quantize.quantize(rows_RD, per_row=per_row), 300, wire_dtype.num_scales(300))
        actual = quantize.dequantize_rows(
            rows.values_RD.view(torch.uint8), rows.scale_RB, torch.float32, per_row=per_row
        )
        expected = decode(encode(rows_RD, wire_dtype), wire_dtype, 300, torch.float32)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@on_ranks(1)
def test_wrong_shapes_and_dtypes_are_input_errors() -> None:
    quantize, swiglu = kernels("quantize"), kernels("swiglu")
    for call in (
        lambda: swiglu.swiglu_forward(drawn(2, 5), drawn(2, 2)),
        lambda: swiglu.swiglu_forward(drawn(2, 6), drawn(2, 4)),
        lambda: swiglu.swiglu_forward(drawn(2, 6), drawn(2, 3).bfloat16()),
        lambda: swiglu.swiglu_backward(drawn(2, 6), drawn(2, 3), drawn(2, 3), None),
        lambda: quantize.swiglu_quantize(drawn(2, 6).double()),
        lambda: quantize.quantize(drawn(6)),
    ):
        with pytest.raises(InputError, match="got"):
            call()


@on_ranks(1)
def test_rows_with_separate_scales_are_decoded_and_only_as_many_as_counted() -> None:
    quantize = kernels("quantize")
    for kind in ("token", "block"):
        wire_dtype, per_row = WireDtype("fp8", kind), kind == "token"
        rows_RD = drawn(12, 300)
        expected_RD = decode(encode(rows_RD, wire_dtype), wire_dtype, 300, torch.float32)
        packed_RB = encode(rows_RD, wire_dtype)
        values_RX = torch.zeros(12, 304, dtype=torch.uint8)
        values_RX[:, :300] = packed_RB[:, :300]
        scale_RS = packed_RB.view(torch.float32)[:, 75 : 75 + wire_dtype.num_scales(300)].contiguous()
        decoded_RD = quantize.dequantize_rows(values_RX[:, :300], scale_RS, torch.float32, per_row=per_row)
        assert torch.equal(decoded_RD, expected_RD)
        counts = torch.tensor([[2, 0], [4, 1]])  # of each three rows; 4 is more than there are
        decoded_RD = quantize.dequantize_rows(
            values_RX[:, :300], scale_RS, torch.float32, per_row=per_row, counts=counts
        )
        for row in (0, 1, 6, 7, 8, 9):
            assert torch.equal(decoded_RD[row], expected_RD[row]), row
        for wrong in (counts[0].repeat(4), torch.zeros(0, dtype=torch.int64)):  # 8 and 0 counts do not divide 12 rows
            with pytest.raises(InputError, match="a number of counts that divides R"):
                quantize.dequantize_rows(values_RX[:, :300], scale_RS, torch.float32, per_row=per_row, counts=wrong)
