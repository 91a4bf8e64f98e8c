"""Native kernels: every instruction set gives the same bits, rounding equals torch's, and SwiGLU is accurate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

_C = pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.dispatch.backends.local import LocalDispatcher, NativeLocalDispatcher  # noqa: E402
from moe_comm.runtime.memory import DTYPE_CODES  # noqa: E402
from moe_comm.topology import ExpertPlacement  # noqa: E402

ISAS = _C.isas()
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    assert _C.set_isa(ISAS[0])


def bits(x: Tensor) -> Tensor:
    """View the elements as integers, so that NaN equals NaN and -0 differs from 0."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether all bits are equal. Any NaN equals any other NaN."""
    nan = a.isnan() & b.isnan()
    return torch.equal(bits(a).masked_fill(nan, 0), bits(b).masked_fill(nan, 0))


def swiglu(h_RF: Tensor, threads: int = 1) -> Tensor:
    rows, width = h_RF.shape[0], h_RF.shape[1] // 2
    act_RF = torch.full((rows, width), float("nan"), dtype=h_RF.dtype)
    _C.swiglu_forward(h_RF.data_ptr(), h_RF.stride(0), act_RF.data_ptr(), rows, width, DTYPE_CODES[h_RF.dtype], threads)
    return act_RF


def swiglu_backward(h_RF: Tensor, grad_RF: Tensor, threads: int = 1) -> tuple[Tensor, Tensor]:
    rows, width = grad_RF.shape
    grad_h_RF, act_RF = torch.full((rows, 2 * width), float("nan"), dtype=h_RF.dtype), torch.empty_like(grad_RF)
    code = DTYPE_CODES[h_RF.dtype]
    pointers = (grad_RF.data_ptr(), grad_h_RF.data_ptr(), act_RF.data_ptr())
    _C.swiglu_backward(h_RF.data_ptr(), h_RF.stride(0), *pointers, rows, width, code, threads)
    return grad_h_RF, act_RF


def layer(dispatcher: LocalDispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, g_TD: Tensor) -> list[Tensor]:
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    dispatched = dispatcher.dispatch(x_TD, ids_TK)
    y_TD = dispatcher.combine(dispatched.rows_RD, weights_TK, dispatched.handle)
    y_TD.backward(g_TD)
    assert x_TD.grad is not None and weights_TK.grad is not None
    return [dispatched.rows_RD.detach().clone(), y_TD.detach().clone(), x_TD.grad, weights_TK.grad]


def narrowed(values_T: Tensor, dtype: torch.dtype, width: int = 33) -> Tensor:
    """Round floats to ``dtype`` by a combine of rows of ones: in full vectors and in the tail of each row."""
    dispatcher = NativeLocalDispatcher(ExpertPlacement.balanced(1, 1))
    ids_TK = torch.zeros(len(values_T), 1, dtype=torch.int64)
    dispatched = dispatcher.dispatch(torch.ones(len(values_T), width, dtype=dtype), ids_TK)
    y_TD = dispatcher.combine(dispatched.rows_RD, values_T[:, None], dispatched.handle)
    assert same(y_TD, y_TD[:, -1:].expand_as(y_TD).contiguous()), "the tail of a row is not rounded like its vectors"
    return y_TD[:, 0].contiguous()


def test_the_best_instruction_set_is_in_use_and_the_baseline_is_available() -> None:
    assert _C.isa() == ISAS[0] and "baseline" in ISAS
    assert not _C.set_isa("z80") and _C.isa() == ISAS[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 31, 64, 100, 1025])
def test_dispatch_and_combine_have_the_reference_bits(isa: str, dtype: torch.dtype, hidden: int) -> None:
    assert _C.set_isa(isa)
    g = torch.Generator().manual_seed(hidden)
    tokens, experts, top_k = 40, 7, 3
    x_TD = torch.randn(tokens, hidden, generator=g).to(dtype)
    grad_TD = torch.randn(tokens, hidden, generator=g).to(dtype)
    ids_TK = torch.randint(-1, experts, (tokens, top_k), generator=g)
    weights_TK = torch.randn(tokens, top_k, generator=g)
    placement = ExpertPlacement.balanced(experts, 1)
    native = layer(NativeLocalDispatcher(placement), x_TD, ids_TK, weights_TK, grad_TD)
    plain = layer(LocalDispatcher(placement), x_TD, ids_TK, weights_TK, grad_TD)
    assert all(map(torch.equal, native, plain))


# --- rounding ---


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_survives_widening_and_narrowing(isa: str, dtype: torch.dtype) -> None:
    assert _C.set_isa(isa)
    all_halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    dispatcher = NativeLocalDispatcher(ExpertPlacement.balanced(1, 1))
    dispatched = dispatcher.dispatch(all_halves.view(-1, 64), torch.zeros(1 << 10, 1, dtype=torch.int64))
    assert torch.equal(bits(dispatched.rows_RD), bits(all_halves.view(-1, 64)))  # also the bits of NaN
    for weight in (1.0, 0.5, 3.0, 2.0**-9):
        y_TD = dispatcher.combine(dispatched.rows_RD, torch.full((1 << 10, 1), weight), dispatched.handle)
        expected = (0.0 + all_halves.float() * weight).to(dtype)
        assert same(y_TD.view(-1), expected), weight


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_floats_round_to_nearest_even_as_in_torch(isa: str, dtype: torch.dtype) -> None:
    assert _C.set_isa(isa)
    halves = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halves = halves[halves.isfinite()]
    middle = ((halves[:-1].double() + halves[1:].double()) / 2).float()  # ties, exact in float
    neighbours = [torch.nextafter(middle, torch.tensor(toward)) for toward in (float("inf"), -float("inf"))]
    random_bits = np.random.default_rng(3).integers(0, 1 << 32, 1 << 17, dtype=np.uint64).astype(np.uint32)
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504, 65519.996, 65520, 65536, 3.4e38, 1e-45]
    values = torch.cat(
        [halves, middle, *neighbours, torch.from_numpy(random_bits.view(np.float32).copy()), torch.tensor(special)]
    )
    values = torch.cat([values, -values])
    assert same(narrowed(values, dtype), (0.0 + values).to(dtype))


# --- SwiGLU ---


def exact(h_RF: Tensor, grad_RF: Tensor | None = None) -> list[Tensor]:
    """Return the float64 activation, and with ``grad_RF`` also the gradient of ``h_RF``."""
    h = h_RF.double().requires_grad_()
    gate, up = h.chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) * up
    if grad_RF is None:
        return [act.detach()]
    act.backward(grad_RF.double())
    assert h.grad is not None
    return [act.detach(), h.grad]


def ulps(got: Tensor, expected: Tensor) -> float:
    """Return the largest error in float32 units in the last place of the expected value."""
    unit = torch.from_numpy(np.spacing(expected.float().abs().numpy())).double()
    return float(((got.double() - expected).abs() / unit).max())


@pytest.mark.parametrize("isa", ISAS)
def test_swiglu_in_float32_is_within_ulps_of_float64(isa: str) -> None:
    assert _C.set_isa(isa)
    g = torch.Generator().manual_seed(2)
    for scale in (0.01, 1.0, 20.0):
        h_RF = torch.randn(300, 2 * 333, generator=g) * scale
        h_RF.clamp_(-80, 80)
        [act] = exact(h_RF)
        assert ulps(swiglu(h_RF), act) <= 4
        grad_RF = torch.randn(300, 333, generator=g)
        act, grad_h = exact(h_RF, grad_RF)
        got_h, got_act = swiglu_backward(h_RF, grad_RF)
        assert ulps(got_act, act) <= 4
        assert ulps(got_h[:, 333:], grad_h[:, 333:]) <= 4
        # The derivative of silu is zero near -1.28, where a relative error has no bound, and 1 - sigmoid cancels.
        scale_RF = (grad_RF * h_RF[:, 333:]).double().abs()
        error = (got_h[:, :333].double() - grad_h[:, :333]).abs()
        assert float((error / scale_RF).max()) <= 12 * 2**-23


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_swiglu_in_half_precision_rounds_once(isa: str, dtype: torch.dtype) -> None:
    """All sums are in fp32 and rounded once: the error is about half a unit at most, and less than torch's own."""
    assert _C.set_isa(isa)
    g = torch.Generator().manual_seed(4)
    h_RF = (torch.randn(200, 2 * 65, generator=g) * 3).to(dtype)
    grad_RF = torch.randn(200, 65, generator=g).to(dtype)
    act, grad_h = exact(h_RF, grad_RF)
    got_h, got_act = swiglu_backward(h_RF, grad_RF)
    forward = swiglu(h_RF)
    assert torch.equal(forward, got_act), "backward does not recompute the bits of the forward"
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for got, expected in ((forward, act), (got_h, grad_h)):
        error = (got.double() - expected).abs()
        slack = 2**-20 * (1 + h_RF.double().abs().max() * grad_RF.double().abs().max())
        assert bool((error <= 0.5 * eps * expected.abs() + tiny + slack).all())
    gate, up = h_RF.chunk(2, dim=1)
    torch_act = torch.nn.functional.silu(gate) * up
    assert (forward.double() - act).abs().mean() <= (torch_act.double() - act).abs().mean()
    torch.testing.assert_close(forward, torch_act, rtol=3 * eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 32, 100])
def test_swiglu_has_the_same_bits_on_every_isa_with_any_strides_and_threads(dtype: torch.dtype, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    wide = (torch.randn(300, 2 * width + 5, generator=g) * 4).to(dtype)
    h_RF, grad_RF = wide[:, : 2 * width], torch.randn(300, width, generator=g).to(dtype)
    results = []
    for isa in ISAS:
        assert _C.set_isa(isa)
        for rows, threads in ((h_RF, 1), (h_RF.contiguous(), 3)):
            results.append([swiglu(rows, threads), *swiglu_backward(rows, grad_RF, threads)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_nan_infinite_and_very_large_gates(isa: str, dtype: torch.dtype) -> None:
    """NaN stays NaN, large gates saturate to 0 or to the identity, and no other result is NaN or infinite."""
    assert _C.set_isa(isa)
    edge = 3e38 if dtype != torch.float16 else 6e4
    inf = float("inf")
    gates = torch.tensor([float("nan"), inf, 0.0, -0.0, 88.0, 89.0, -88.0, -104.0, edge, -edge, -inf], dtype=dtype)
    h_RF = torch.stack([gates, torch.ones_like(gates)], dim=1)
    act = swiglu(h_RF)[:, 0]
    grad_h, _ = swiglu_backward(h_RF, torch.ones_like(gates)[:, None])
    assert act[0].isnan() and grad_h[0].isnan().all()
    assert act[1] == float("inf")
    assert act[2] == 0 and act[3] == 0
    assert torch.equal(act[[4, 5, 8]], gates[[4, 5, 8]])
    low = [6, 7, 9, 10]
    assert (act[low].double().abs() < 1e-30).all() and (grad_h[low].double().abs() < 1e-30).all()
    assert act[2:].isfinite().all() and grad_h[2:].isfinite().all()
    assert torch.equal(grad_h[[4, 5, 8], 0], torch.ones(3, dtype=dtype))
    torch.testing.assert_close(grad_h[2:4, 0], torch.full((2,), 0.5, dtype=dtype))


def test_bare_copy_kernels_of_the_benchmarks_are_correct() -> None:
    g = torch.Generator().manual_seed(9)
    for isa in ISAS:
        assert _C.set_isa(isa)
        x_TD = torch.randn(30, 70, generator=g)
        index = torch.randint(0, 30, (50,), generator=g)
        out = torch.full((50, 70), float("nan"))
        places = torch.randperm(50, generator=g)
        addresses = out.data_ptr() + places * 280
        _C.bare_gather(x_TD.data_ptr(), index.data_ptr(), addresses.data_ptr(), 50, 280, 2)
        assert torch.equal(out[places], x_TD[index])
        weights = torch.randn(10, 3, generator=g)
        picks = torch.randint(0, 30, (10, 3), generator=g)
        sources = x_TD.data_ptr() + picks * 280
        total = torch.full((10, 70), float("nan"))
        _C.bare_weighted_sum(total.data_ptr(), sources.data_ptr(), weights.data_ptr(), 10, 3, 70, 0, 1)
        expected = torch.zeros(10, 70)
        for k in range(3):
            expected += x_TD[picks[:, k]] * weights[:, k, None]
        assert torch.equal(total, expected)
