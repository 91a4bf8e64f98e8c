"""Experts with fp8 GEMMs in Triton kernels, compared with plain torch, which defines them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.errors import InputError
from moe_comm.gpu.gemm import GpuGemm
from moe_comm.kernels import tensor_cores
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.fp8 import ScaledRows, of_packed, quantize_rows, quantize_weights
from moe_comm.layers.moe.experts import Experts
from moe_comm.runtime.memory import warm_rows
from moe_comm.topology import ExpertPlacement
from tests.kernels.triton.common import drawn, kernels, run_plain_and_triton, some_ids
from tests.overlap.triton.common import needs_triton
from tests.pool import on_ranks
from tests.support.gemm_model import COMPILER, model_gemm

pytestmark = needs_triton
DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = 2e-2
"""Relative to the norm. The kernels add the products of a block in another order. So an activation near the middle of
two e4m3 numbers may round to the other one, which changes it by 2^-3."""


@on_ranks(1, timeout=60)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_weights_have_the_same_bytes(dtype: torch.dtype) -> None:
    """Also weights with any strides, and blocks with an infinity, which become NaN of any sign."""
    rows_RD, w_ENK = drawn(5, 300, dtype=dtype), drawn(2, 200, 150, dtype=dtype)
    w_ENK[1, :128, :128] = 0
    w_ENK[0, 3, 5] = torch.inf

    def work() -> list[Tensor]:
        rows = quantize_rows(rows_RD)
        one_scale = ScaledRows(rows.values_RD, rows.scale_RB[:, :1].expand(-1, 3))
        weights = [*quantize_weights(w_ENK), *quantize_weights(w_ENK.transpose(1, 2))]
        values = [rows.values_RD, weights[0], weights[2]]
        nan = [v.view(torch.uint8) & 0x7F if v.float().isnan().any() else v.view(torch.uint8) for v in values]
        return [*nan, rows.scale_RB, *weights[1::2], rows.dequantized(dtype), one_scale.dequantized(dtype)]

    plain, actual, launched = run_plain_and_triton(work)
    assert launched.count("quantize_weights_kernel") == 2 and "quantize_kernel" in launched
    assert launched.count("dequantize_kernel") == 2
    for one, other in zip(actual, plain, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@on_ranks(1, timeout=60)
def test_row_ranges_are_computed_as_all_rows_and_weights_are_quantized_once() -> None:
    tensors = drawn(3, 80, 256, seed=1), drawn(3, 256, 40, seed=2), drawn(3, 80, seed=3), drawn(3, 256, seed=4)
    mlp, rows_RD, sizes = ExpertMLP(tensors, activation_of("swiglu"), gemm_dtype="fp8"), drawn(9, 256), (4, 0, 5)

    def work() -> list[Tensor]:
        rows, outputs = quantize_rows(rows_RD), [torch.full((9, 256), torch.nan) for _ in range(2)]
        at_once, by_range = (mlp.forward(rows, out_RD, sizes, True, warm_rows) for out_RD in outputs)
        at_once.all_rows()
        for expert, first, end in ((2, 6, 9), (0, 0, 3), (2, 4, 6), (0, 3, 4)):
            by_range.row_range(expert, slice(first, end))
        hidden = [mlp_pass.saved[2] for mlp_pass in (at_once, by_range)]
        return outputs + [h_RG for h_RG in hidden if h_RG is not None]

    plain, actual, launched = run_plain_and_triton(work)
    assert launched.count("quantize_weights_kernel") == 4 and launched.count("grouped_mm_fp8_kernel") == 2 + 2 * 4
    assert torch.equal(plain[0], plain[1]) and torch.equal(plain[2], plain[3])
    for one, other in zip(actual, plain, strict=True):
        assert (one - other).norm() <= TOLERANCE * other.norm()


@on_ranks(1)
def test_wrong_weights_are_input_errors() -> None:
    quantize = kernels("quantize")
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 3, 4, dtype=torch.float64)):
        with pytest.raises(InputError, match="quantize_weights"):
            quantize.quantize_weights(wrong)


@on_ranks(1)
@pytest.mark.parametrize(
    "arg",
    [
        (torch.bfloat16, "swiglu", False),
        (torch.float32, "gelu", True),
    ],
    ids=str,
)
def test_the_layer_with_kernels_is_near_plain_torch(arg: tuple[torch.dtype, str, bool]) -> None:
    dtype, activation, bias = arg

    plain, actual, launched = run_plain_and_triton(lambda: passes(256, 40, activation, bias=bias, dtype=dtype))
    assert launched.count("grouped_mm_fp8_kernel") == launched.count("quantize_weights_kernel") == 2
    # Packed rows are gathered; rows are dequantized in backward only.
    assert launched.count("quantize_kernel") == 2 and launched.count("dequantize_kernel") == 1
    assert len(actual) == len(plain) == (7 if bias else 5)
    for one, other in zip(actual, plain, strict=True):
        assert (one.double() - other.double()).norm() <= TOLERANCE * other.double().norm()


def passes(
    hidden: int, width: int, activation: str, *, bias: bool, dtype: torch.dtype, backward: bool = True
) -> list[Tensor]:
    """Return the outputs and gradients of experts with fp8 GEMMs, on rows of an fp8 dispatch."""
    options = DispatchOptions(wire_dtypes=WireDtypes("fp8_block"))
    dispatcher = LocalDispatcher(ExpertPlacement.balanced(4, 1), options=options)
    experts = Experts(4, hidden, width, activation, bias=bias, dtype=dtype)
    experts.reset_parameters(3, std=0.2)
    experts.gemm_dtype = "fp8"
    x_TD, weights_TK = drawn(9, hidden, dtype=dtype).requires_grad_(), drawn(9, 2, seed=1).requires_grad_()
    call = ExpertCall(dispatcher, dispatcher.dispatch(x_TD, some_ids(9, 2, 4), scaled=True), weights_TK)
    y_TD = call.combine(experts(call.rows, call.handle.rows_per_expert, call))
    if backward:
        y_TD.backward(drawn(9, hidden, dtype=dtype, seed=2))
    grads = [x_TD.grad, weights_TK.grad, *(p.grad for p in experts.parameters())]
    return [y_TD.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@on_ranks(1, timeout=100)
def test_experts_use_the_kernel_for_hopper_in_its_model() -> None:
    model = model_gemm()
    used: list[str] = []

    def launcher_for(rows_RD: Tensor, kernel: str) -> GpuGemm | None:
        used.append(kernel)
        return model if kernel == "rows_fp8" else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tensor_cores.GEMM, "cuda")
        patch.setattr(tensor_cores, "launcher_for", launcher_for)
        (plain,), (actual,), launched = run_plain_and_triton(
            lambda: passes(512, 512, "swiglu", bias=False, dtype=torch.bfloat16, backward=False)
        )
    assert used.count("rows_fp8") == 2 and "grouped_mm_fp8_kernel" not in launched
    assert (actual.double() - plain.double()).norm() <= TOLERANCE * plain.double().norm()


# --- low latency ---


@on_ranks(2)
def test_kernels_read_the_rows_of_a_low_latency_dispatch_in_place(rank: int) -> None:
    """Emulated CUDA kernels move the rows, and interpreted Triton kernels multiply them. The scales have stride 0."""
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    mm, quantize = kernels("grouped_mm_fp8"), kernels("quantize")
    options = DispatchOptions(wire_dtypes=WireDtypes("fp8_token"), peer_to_peer=PeerToPeerOptions(emulate=True))
    dispatcher = make_dispatcher(4, dist.group.WORLD, backend="peer_to_peer", options=options)
    assert isinstance(dispatcher, PeerToPeerDispatcher)
    w13_EGD, w2_EDF = drawn(2, 80, 256, seed=rank) / 16, drawn(2, 256, 40, seed=7 + rank) / 6
    for tokens in (3 + rank, 0 if rank else 8):
        x_TD, ids_TK, weights_TK = drawn(tokens, 256, seed=rank), some_ids(tokens, 2, 4), drawn(tokens, 2, seed=1)
        call = ExpertCall(dispatcher, dispatcher.dispatch(x_TD, ids_TK, scaled=True), weights_TK)
        mlp = ExpertMLP((w13_EGD, w2_EDF, None, None), activation_of("swiglu"), gemm_dtype="fp8")
        expected_TD = call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))

        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, 8)
        rows, counts_LW = sent.receive_scaled()
        w13, w2 = quantize_weights(w13_EGD), quantize_weights(w2_EDF)
        h_RG = x_TD.new_empty(rows.values_RD.shape[0], w13[0].shape[1])
        mm.grouped_mm_fp8_into((rows.values_RD, rows.scale_RB), w13, counts_LW, h_RG)
        act = of_packed(quantize.swiglu_quantize(h_RG), 40)
        mm.grouped_mm_fp8_into((act.values_RD, act.scale_RB), w2, counts_LW, sent.results.flatten(0, 1))
        y_TD = dispatcher.low_latency_combine(sent.results, weights_TK, sent)
        assert (y_TD - expected_TD).norm() <= TOLERANCE * expected_TD.norm()
