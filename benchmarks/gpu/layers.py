"""Measure forward and backward of ``MoELayer``, Hugging Face's ``grouped_mm`` and SonicMoE on one GPU.

    python -m benchmarks.gpu.layers mixtral-8x7b --results results.jsonl

The contestants are those of ``moe-comm bench layer``. They have the same weights, which are generated on the device.
Only one contestant is in memory at a time. If one raises, the next one still runs. The first one that succeeds is the
reference of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.record import Work, run_part
from benchmarks.gpu.timing import Timer, gemm_tflop_s
from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer.benchmark import KINDS, ContestantRun, allowed_error, make_inputs, relative_error
from moe_comm.layers.moe.experts import Experts

SHAPES = {
    "mixtral-8x7b": {"tokens": 4096, "hidden": 4096, "ffn": 14336, "experts": 8, "top_k": 2},
    "qwen3-30b-a3b": {"tokens": 4096, "hidden": 2048, "ffn": 768, "experts": 128, "top_k": 8},
    "deepseek-v3": {"tokens": 4096, "hidden": 7168, "ffn": 2048, "experts": 256, "top_k": 8},
    # The rows of one of eight ranks: a rank receives as many rows as it sends, for 32 of 256 experts.
    "deepseek-v3-ep8": {"tokens": 4096, "hidden": 7168, "ffn": 2048, "experts": 32, "top_k": 8},
    "sonic-16k": {"tokens": 16384, "hidden": 2560, "ffn": 1280, "experts": 64, "top_k": 4},
    "small": {"tokens": 64, "hidden": 64, "ffn": 32, "experts": 8, "top_k": 2},
}
for _name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-ep8"):
    SHAPES[f"{_name}-32k"] = {**SHAPES[_name], "tokens": 32768}
COMPARED = 16
"""Number of experts whose weight gradients are compared."""
CONTESTANTS = ("moe_comm_ep1", "hf_grouped_mm", "sonic_moe")


def measure(settings: LayerBench, name: str, timer: Timer, reference: dict[str, Tensor]) -> dict[str, Any]:
    """Return the row of one contestant. The first results fill ``reference``; later results are compared with it."""
    kind = KINDS[name]
    reason = kind.unavailable_reason(settings)
    if reason is not None:
        return {"who": name, "skipped": reason}
    cuda = settings.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    x_TD, grad_TD = make_inputs(settings, 0)
    # The contestants set all weights. Without the patch, MoELayer first initialises them on the CPU, which takes a
    # minute for DeepSeek-V3.
    with mock.patch.object(Experts, "reset_parameters"):
        run = ContestantRun(kind(settings, 0), x_TD, grad_TD)
    try:
        run.forward()
        run.backward()
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        limit = max(kind.tolerance or 0.0, allowed_error(settings, x_TD))
        error = _compared(name, run, reference, limit)
        forward = timer.measure(run.forward, kernels=False)

        def both() -> None:
            run.forward()
            run.backward()
            run.free()

        times = timer.measure(both)
        # From the third call on, launches of moe_comm are repeated from a record.
        run.forward()
        run.backward()
        error = max(error, _compared(name, run, reference, limit))
    finally:
        run.contestant.close()
    return {
        "who": name,
        "what": "forward and backward",
        **{key: getattr(settings, key) for key in ("tokens", "hidden", "ffn", "experts", "top_k", "dtype")},
        "max_error": error,
        "peak_mib": peak / 2**20,
        "forward_device_us": forward["device_us"],
        "forward_host_us": forward["host_us"],
        **times,
        "tflop_s": settings.flops / times["device_us"] / 1e6,
    }


def _compared(name: str, run: ContestantRun, reference: dict[str, Tensor], limit: float) -> float:
    """Return the largest relative error of the last pass of ``run``, and free it. The first pass is the reference."""
    # Keep the weight gradients of a few experts only: those of all experts take a quarter of the memory.
    results = {what: value if value.dim() < 3 else value[:COMPARED].clone() for what, value in run.results().items()}
    run.free()
    error = max((relative_error(results[what], want) for what, want in reference.items()), default=0.0)
    if not error <= limit:
        raise AssertionError(f"{name} differs from the first contestant by {error:.3g} (allowed {limit:.3g})")
    if not reference:
        reference.update(results)
    return error


def operations(name: str, device: str) -> Iterator[tuple[str, Work]]:
    """Yield the names and functions of the measurements of a shape."""
    timer = Timer(device, 2, 5)
    settings = LayerBench(ranks=1, dtype="bfloat16", device=device, **SHAPES[name])  # type: ignore[arg-type]
    reference: dict[str, Tensor] = {}
    for who in CONTESTANTS:
        yield f"{name}, {who}", partial(measure, settings, who, timer, reference)
    size = 8192 if device == "cuda" else 128
    yield f"{name}, product", lambda: {"who": "torch.mm", "size": size, "tflop_s": gemm_tflop_s(timer, size)}


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "layer", operations, limit_s=40.0, shapes=SHAPES))
