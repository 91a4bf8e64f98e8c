"""Experts with fp8 GEMMs (``Experts.gemm_dtype``) on CPUs, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions, WireDtypes
from moe_comm.errors import ConfigError, InputError
from moe_comm.integrations.hugging_face import swap_moe, swapped_experts
from moe_comm.kernels.fp8 import quantize_rows, quantize_weights, scaled_grouped_mm_into
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig, check_grads
from moe_comm.layers.moe.experts import Experts
from moe_comm.overlap.options import Overlap
from tests.dispatch.workers import ErrorText, caught, poisoned
from tests.integrations.models import load, save_model
from tests.train.common import train, write_text

HIDDEN, FFN = 256, 160
CASES = ("unequal tokens", "no tokens on rank 0", "no tokens anywhere", "dropped slots")
ROUNDING = 2.0**-4
"""Largest relative error of a value in e4m3, above 2^-6 times its scale."""


@dataclass(frozen=True)
class Settings:
    backend: str = "all_to_all"
    dispatch: str = "fp8_block"
    dtype: torch.dtype = torch.float32
    gemm_dtype: str = "fp8"
    recompute: bool = False
    bias: bool = False
    overlap: Overlap | None = None


def build(settings: Settings, group: Any = None) -> MoELayer:
    config = MoEConfig(
        HIDDEN,
        FFN,
        RouterConfig(8, 2),
        expert_bias=settings.bias,
        recompute=settings.recompute,
        expert_gemm_dtype=settings.gemm_dtype,  # type: ignore[arg-type]
    )
    wire_dtypes = WireDtypes(settings.dispatch)  # type: ignore[arg-type]
    options = DispatchOptions(wire_dtypes=wire_dtypes, peer_to_peer=PeerToPeerOptions(emulate=True, heap_bytes=1 << 22))
    backend = settings.backend if group is not None else "auto"
    layer = MoELayer.build(
        config, group, backend=backend, seed=0, options=options, dtype=settings.dtype, overlap=settings.overlap
    )
    layer.experts.reset_parameters(1, layer.local_experts, std=0.2)
    return layer


def run(layer: MoELayer, tokens: int = 23, seed: int = 0) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    generator = torch.Generator().manual_seed(seed)
    dtype = layer.experts.w13.dtype
    x_TD = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    layer.zero_grad()
    with poisoned():
        y_TD = layer(x_TD)
        y_TD.backward(torch.randn(tokens, HIDDEN, generator=generator).to(dtype))
    assert x_TD.grad is not None
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y_TD.detach(), "x": x_TD.grad, **grads}


def error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


# --- the product ---


@pytest.mark.parametrize(("inner", "columns"), [(256, 128), (200, 150), (24, 18)])
def test_products_equal_float64_on_dequantized_operands_and_rows_are_independent(inner: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows_RK = torch.randn(30, inner, generator=generator) * torch.logspace(-2, 2, 30)[:, None]
    counts = [17, 0, 2, 11]
    rows, weights = quantize_rows(rows_RK), quantize_weights(torch.randn(4, columns, inner, generator=generator))
    wide = weights[1].double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :columns, :inner]
    w_ENK = weights[0].double() * wide
    dequantized_RK = rows.values_RD.double() * rows.scale_RB.double().repeat_interleave(128, 1)[:, :inner]
    expected_RN = torch.cat([part @ w.T for part, w in zip(dequantized_RK.split(counts), w_ENK, strict=True)])
    out_RN = torch.full((30, columns), torch.nan)
    scaled_grouped_mm_into(rows, weights, counts, out_RN)
    # An fp32 sum of up to 256 products: at most 2^-24 times their number, relative to the sum of magnitudes.
    assert error(out_RN, expected_RN) < 1e-5
    few_RN = torch.full((3, columns), torch.nan)
    scaled_grouped_mm_into(quantize_rows(rows_RK[15:18]), weights, [2, 0, 1, 0], few_RN)
    assert torch.equal(few_RN[:2], out_RN[15:17])


# --- the layer ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_is_near_one_whose_rows_are_dequantized(dtype: torch.dtype) -> None:
    """Weights and activations are rounded to e4m3 in addition: two operands of a relative error up to ``ROUNDING``."""
    actual, expected = (run(build(Settings(dtype=dtype, gemm_dtype=gemm_dtype))) for gemm_dtype in ("fp8", "same"))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert 1e-3 < error(actual[name], tensor) < 2 * ROUNDING, name


def test_the_wire_dtype_fp8_block_delivers_the_bits_that_the_receiver_computes() -> None:
    """A row has the same bytes, whether the sender or the owner of the expert quantizes it."""
    of_wire, of_receiver = run(build(Settings())), run(build(Settings(dispatch="same")))
    for name, tensor in of_receiver.items():
        assert torch.equal(of_wire[name], tensor), name


def test_recomputed_hidden_rows_have_the_same_bits() -> None:
    saved, recomputed = run(build(Settings(bias=True))), run(build(Settings(bias=True, recompute=True)))
    for name, tensor in saved.items():
        assert torch.equal(recomputed[name], tensor), name


def test_autocast_computes_in_its_dtype_from_fp32_sums() -> None:
    layer = build(Settings())
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(layer)
    assert error(actual["y"], run(layer)["y"]) < 2 * ROUNDING


def test_experts_without_a_dispatch_quantize_their_rows() -> None:
    experts = Experts(2, 128, 24, bias=True, transposed=True)
    with torch.no_grad():
        assert experts.b13 is not None and experts.b2 is not None
        experts.b13.fill_(3.0)
        experts.b2.fill_(-1.0)
    rows_RD = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    expected_RD = experts(rows_RD, [2, 3])
    experts.gemm_dtype = "fp8"
    assert 0 < error(experts(rows_RD, [2, 3]), expected_RD) < 2 * ROUNDING


def gradients(rank: int, world: int, settings: Settings) -> tuple[bool, str]:
    layer = build(settings, dist.group.WORLD)
    try:
        report = check_grads(layer, tokens=11, tolerance=4 * ROUNDING, cases=CASES)
    finally:
        layer.dispatcher.close()
    return report.ok, str(report)


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        (Settings("all_to_all", bias=True), 4),
        (Settings("all_gather"), 2),
        (Settings("shared_memory"), 4),
        (Settings("shared_memory", overlap=Overlap("auto")), 2),
        (Settings("all_to_all", bias=True, overlap=Overlap(2, 1)), 2),
        (Settings("peer_to_peer", dispatch="same", overlap=Overlap(2, 1)), 2),
    ],
    ids=str,
)
def test_output_and_gradients_have_the_bits_of_one_rank(settings: Settings, world: int, pools: Any) -> None:
    """``check_grads`` compares with one rank and with float64, also for ranks without tokens."""
    if settings.backend in ("shared_memory", "peer_to_peer"):
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    for ok, report in pools[world].run(gradients, settings, timeout=120):
        assert ok, report


# --- errors ---


def refused(rank: int, world: int, arg: None) -> list[ErrorText]:
    layer = build(Settings(overlap=Overlap(executor="device")), dist.group.WORLD)
    texts = [caught(lambda: layer(torch.zeros(3, HIDDEN)))]
    layer.overlap = None
    return [*texts, caught(lambda: layer(torch.zeros(3, HIDDEN)))]


def test_the_device_executor_is_refused_on_every_rank(pools: Any) -> None:
    for (kind, text), later in pools[2].run(refused, None):
        assert kind == "ConfigError" and "pipelined" in text and later == ("", "")


def test_widths_and_names_that_fp8_does_not_support_are_typed_errors() -> None:
    with pytest.raises(ConfigError, match="multiple of 128; got 200"):
        MoEConfig(200, 64, RouterConfig(8, 2), expert_gemm_dtype="fp8")
    with pytest.raises(ConfigError, match="one of same, fp8"):
        MoEConfig(256, 64, RouterConfig(8, 2), expert_gemm_dtype="fp16")  # type: ignore[arg-type]
    experts = Experts(2, 200, 24)
    experts.gemm_dtype = "fp8"
    with pytest.raises(InputError, match="multiple of 128 channels; got 200"):
        experts(torch.zeros(3, 200), [1, 2])


# --- swapped models and training ---


def swapped(rank: int, world: int, arg: tuple[str, str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of a swapped MoE block for all tokens, and the gradients of this rank's experts."""
    folder, gemm_dtype = arg
    model = load(folder)
    group = dist.group.WORLD if world > 1 else None
    options = DispatchOptions(wire_dtypes=WireDtypes("fp8_block"))
    swap_moe(model, group, options=options, expert_gemm_dtype=gemm_dtype)  # type: ignore[arg-type]
    (experts,) = swapped_experts(model).values()
    generator = torch.Generator().manual_seed(0)
    x_TD, ids_TK = torch.randn(12, 128, generator=generator), torch.randint(0, 8, (12, 2), generator=generator)
    own = slice(12 * rank // world, 12 * (rank + 1) // world)
    y_TD = experts(x_TD[own], ids_TK[own], torch.full((12, 2), 0.5)[own])
    y_TD.backward(torch.ones_like(y_TD))
    return y_TD.detach(), {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}


def test_swap_moe_takes_the_gemm_dtype(tmp_path: Path, pools: Any) -> None:
    folder = save_model("mixtral", tmp_path, hidden_size=128, num_hidden_layers=1)
    y_TD, grads = swapped(0, 1, (folder, "fp8"))
    outputs, of_ranks = zip(*pools[2].run(swapped, (folder, "fp8"), timeout=120), strict=True)
    assert torch.equal(torch.cat(outputs), y_TD)
    for name, grad in grads.items():
        assert torch.equal(torch.cat([of_rank[name] for of_rank in of_ranks]), grad), name
    assert 1e-3 < error(y_TD, swapped(0, 1, (folder, "same"))[0]) < 2 * ROUNDING
    with pytest.raises(ConfigError, match="multiple of 128; got 32"):
        swap_moe(load(save_model("mixtral", tmp_path / "narrow")), expert_gemm_dtype="fp8")


NOISE = 0.015
"""Runs with different seeds differ by 8% (``tests/dispatch/test_wire_dtype_ranks.py``)."""


def test_training_with_fp8_gemms_reaches_the_same_loss_up_to_noise(tmp_path: Path, pools: Any) -> None:
    settings = [*write_text(tmp_path), "run.steps=16", "optimizer.lr=0.003", "model.hidden=128", "model.init_std=0.05"]
    plain = train(0, 1, settings)
    assert plain.losses[-1] < 0.8 * plain.losses[0], "the loss must fall"
    fp8 = [*settings, "model.expert_gemm_dtype=fp8", "payload.dispatch=fp8_block"]
    fp8 += ["parallel.ep=2", "parallel.overlap_chunks=2", "parallel.executor=pipelined"]
    for result in pools[2].run(train, fp8, timeout=120):
        assert result.losses[-1] != pytest.approx(plain.losses[-1], rel=1e-5), "the GEMMs must be in fp8"
        assert sum(result.losses[-5:]) == pytest.approx(sum(plain.losses[-5:]), rel=NOISE)
        assert result.validation == pytest.approx(plain.validation, rel=NOISE)
