"""Check one small call of each family of kernels against torch, in about 20 seconds.

    python -m benchmarks.gpu.smoke --results results.jsonl

This part runs first, so that a defect is found before the long measurements. Operations are named after their family
(``probe``, ``peer_to_peer``, ``triton``, ``layer``, ``bulk``), and the driver skips the later parts of a family that
failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.dispatchers import Case, DispatcherContestant, check, difference, peer_to_peer, reference
from benchmarks.gpu.movement import measure_fixed, measure_low_latency
from benchmarks.gpu.record import Work, run_part
from benchmarks.gpu.timing import Timer, random
from moe_comm.bench.common.machine import machine_info, versions
from moe_comm.gpu.launch import compiled_archs
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig

PACKAGES = ("torch", "triton", "transformers", "cupy-cuda13x", "cupy-cuda12x", "sonic-moe", "pytest", "hypothesis")
LAYER_ERROR = 3e-2
"""Largest relative error (Frobenius norm) of a bf16 layer on the device against the same layer in fp32 on the CPU."""


def probe(device: str) -> dict[str, Any]:
    """Return versions, and on CUDA the properties of the device and what the native core was compiled for."""
    found: dict[str, Any] = {"machine": machine_info(device), "packages": versions(PACKAGES)}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "capability": torch.cuda.get_device_capability(0),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "compiled_for": compiled_archs(),
        }
    return found


def round_trip(case: Case, wire_dtype: str, **settings: Any) -> dict[str, Any]:
    """Compare a dispatch, a combine and their gradients with torch."""
    x_TD, ids_TK, weights_TK = case.inputs()
    expected = reference(x_TD, ids_TK, weights_TK)
    name = "peer_to_peer" if wire_dtype == "same" else f"peer_to_peer {wire_dtype}"
    x_TD, weights_TK = x_TD.requires_grad_(), weights_TK.requires_grad_()
    who = DispatcherContestant(peer_to_peer(case, wire_dtype, **settings), wire_dtype)
    rows_RD, handle = who.dispatch(x_TD, ids_TK)
    y_TD = who.combine(rows_RD, weights_TK, handle)
    error = check(name, rows_RD.detach(), y_TD.detach(), expected, 1)
    y_TD.backward(torch.ones_like(y_TD))
    # All elements of dy are 1, so each element of a token's gradient is the sum of the token's weights.
    assert x_TD.grad is not None
    wanted_TD = weights_TK.detach().double().sum(1, keepdim=True).expand_as(x_TD)
    return {"max_error": error, "gradient_error": difference(name, x_TD.grad, wanted_TD)}


def triton_operators(device: str) -> dict[str, Any]:
    """Compare a grouped GEMM and a weighted sum in Triton with torch."""
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into

    counts = [5, 0, 130, 64]
    rows_RD = random(device, sum(counts), 128)
    w_END = random(device, len(counts), 192, 128, seed=1) / 16
    out_RN = rows_RD.new_empty(sum(counts), 192)
    grouped_mm_into(rows_RD, w_END, torch.tensor(counts, device=device), out_RN)
    parts = zip(rows_RD.double().split(counts), w_END.double(), strict=True)
    exact_RN = torch.cat([rows @ w.T for rows, w in parts])
    return {"grouped_mm_error": difference("grouped_mm", out_RN, exact_RN)}


def layer(device: str) -> dict[str, Any]:
    """Compare output and input gradient of a small bf16 ``MoELayer`` with fp32 on the CPU."""
    config = MoEConfig(128, 256, RouterConfig(8, 2))
    x_TD = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    found = []
    exact_layer = MoELayer.build(config, seed=0).bfloat16().float()
    for module, where, dtype in (
        (exact_layer, "cpu", torch.float32),
        (MoELayer.build(config, seed=0).to(device, torch.bfloat16), device, torch.bfloat16),
    ):
        x = x_TD.detach().clone().to(where, dtype).requires_grad_()
        y = module(x)
        y.float().square().sum().backward()
        assert x.grad is not None, "no input gradient"
        found.append((y.detach().double().cpu(), x.grad.double().cpu()))
    errors = {}
    for name, exact, got in zip(("output", "input gradient"), *found, strict=True):
        errors[name] = float((got - exact).norm() / exact.norm())
        if not errors[name] <= LAYER_ERROR:
            raise AssertionError(f"layer: {name} differs from the CPU by {errors[name]:.3g} (allowed {LAYER_ERROR})")
    return {"errors": errors}


def repeated(device: str) -> dict[str, Any]:
    """Compare the bits of calls of a layer. From the third one on, native code repeats the launches of the second."""
    built = MoELayer.build(MoEConfig(128, 256, RouterConfig(8, 2)), seed=0).to(device, torch.bfloat16)
    x_TD, calls = random(device, 96, 128), []
    for _ in range(4):
        x = x_TD.clone().requires_grad_()
        built.zero_grad(set_to_none=True)
        y = built(x)
        y.backward(x_TD)
        calls.append({"output": y.detach(), "x": x.grad, **{name: p.grad for name, p in built.named_parameters()}})
    for number, call in enumerate(calls[1:], 2):
        for name, value in call.items():
            first = calls[0][name]
            if value is not None and (first is None or not torch.equal(value, first)):
                raise AssertionError(f"call {number} of a layer has other bits than the first one: {name}")
    return {"calls": len(calls)}


def operations(device: str) -> Iterator[tuple[str, Work]]:
    """Yield the names and functions of the checks."""
    case = Case(Timer(device, 1, 3), tokens=96, hidden=256, experts=16, top_k=4)
    yield "probe", partial(probe, device)
    yield "peer_to_peer, bf16", partial(round_trip, case, "same")
    yield "peer_to_peer, fp8", partial(round_trip, case, "fp8_block")
    yield "peer_to_peer, dispatch_fixed", partial(measure_fixed, case)
    yield "peer_to_peer, low latency", partial(measure_low_latency, case)
    yield "triton, operators", partial(triton_operators, device)
    yield "layer, forward and backward", partial(layer, device)
    yield "layer, repeated", partial(repeated, device)
    yield "bulk, bf16", partial(round_trip, case, "same", bulk_copies=True)


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "smoke", operations, limit_s=20.0))
