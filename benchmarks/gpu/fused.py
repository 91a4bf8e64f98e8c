"""Check and measure the grouped GEMMs in CUDA C++ that are fused with what is before or behind them, against the
launches in Triton that they replace.

    tokens to activations       copies of tokens, their product with w13, and SwiGLU
    gradients behind w2         products of gradients with w2, the gradient of SwiGLU, and those of routing weights

Each shape is first compared with Triton: the number of elements whose bits differ, and the relative error of the
gradients of routing weights, which are added in another order.

    python -m benchmarks.gpu.fused --results results.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.record import Work, run_part
from benchmarks.gpu.timing import Timer, random
from moe_comm.gpu.gemm import SWIGLU, SwigluGradient, TakenRows
from moe_comm.kernels import tensor_cores
from moe_comm.kernels.row_weights import RowWeights

SHAPES = (
    # name, tokens, experts, top_k, hidden, expert width
    ("Qwen3-30B-A3B", 4096, 128, 8, 2048, 768),
    ("DeepSeek-V3, 128 rows an expert", 512, 32, 8, 7168, 2048),
    ("DeepSeek-V3, 1024 rows an expert", 4096, 32, 8, 7168, 2048),
    ("Mixtral 8x7B", 4096, 8, 2, 4096, 14336),
    ("gpt-oss-20b", 4096, 32, 4, 2880, 2880),
)
CPU_SHAPES = (("small", 12, 4, 2, 32, 16), ("gpt-oss, small", 12, 4, 2, 32, 16))
CLAMPED = 1.702, 7.0
"""Alpha and limit of the activation of gpt-oss."""
WORK = ("tokens to activations", "gradients behind w2")
ERROR_BOUND = 1e-3
"""Largest allowed relative error (Frobenius norm) of gradients of routing weights against Triton's."""


class Problem:
    """Tokens, their routing, and weights."""

    def __init__(self, shape: tuple[str, int, int, int, int, int], device: str) -> None:
        from moe_comm.kernels.triton.slot_order import order_slots

        name, tokens, experts, self.top_k, hidden, width = shape
        self.glu = CLAMPED if name.startswith("gpt-oss") else SWIGLU
        self.rows = tokens * self.top_k
        self.flops = 2.0 * self.rows * hidden * width
        scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
        ids_TK = scores.topk(self.top_k).indices.to(device)
        self.slot_R, self.place_TK, counts = order_slots(ids_TK, experts)
        self.counts_E = counts[:-2]
        self.x_TD, self.grad_RD = random(device, tokens, hidden), random(device, self.rows, hidden, seed=1)
        self.w13_EGD = random(device, experts, 2 * width, hidden, seed=2) / hidden**0.5
        self.w2_EDF = random(device, experts, hidden, width, seed=3) / width**0.5
        self.h_RG = random(device, self.rows, 2 * width, seed=4)
        self.weights_N = torch.rand(self.rows, generator=torch.Generator().manual_seed(5)).to(device)

    def forward(self, cuda: bool) -> list[Tensor]:
        """Return h and the activation."""
        from moe_comm.kernels.triton.grouped_mm import grouped_mm_into
        from moe_comm.kernels.triton.rows import copy_rows
        from moe_comm.kernels.triton.swiglu import swiglu_forward

        h_RG = torch.empty_like(self.h_RG)
        act_RF = self.h_RG.new_empty(self.rows, self.w2_EDF.shape[2])
        if cuda:
            taken = TakenRows(self.x_TD, self.slot_R, self.top_k)
            if not tensor_cores.multiply_rows(taken, self.w13_EGD, self.counts_E, h_RG, act_RF, None, self.glu):
                raise RuntimeError("taken_swiglu is not used on this device")
        else:
            grouped_mm_into(copy_rows(self.x_TD, self.place_TK, self.rows), self.w13_EGD, self.counts_E, h_RG,
                            native=False)  # fmt: skip
            swiglu_forward(h_RG, act_RF, self.glu)
        return [h_RG, act_RF]

    def backward(self, cuda: bool) -> list[Tensor]:
        """Return the gradient of h, the weighted activation, and the gradients of the routing weights."""
        from moe_comm.kernels.triton.grouped_mm import grouped_mm_into
        from moe_comm.kernels.triton.swiglu import swiglu_backward_weighted
        from moe_comm.kernels.triton.swiglu_gradient import add_sections

        grad_h_RG, dots_N = torch.empty_like(self.h_RG), torch.empty_like(self.weights_N)
        act_RF = self.h_RG.new_empty(self.rows, self.w2_EDF.shape[2])
        weights = RowWeights(self.weights_N, self.place_TK, dots_N, self.slot_R)
        if cuda:
            sections_SR = tensor_cores.sections_like(self.grad_RD, act_RF.shape[1])
            of = SwigluGradient(self.h_RG, grad_h_RG, act_RF, self.weights_N, self.slot_R, sections_SR)
            if not tensor_cores.multiply_gradient(self.grad_RD, self.w2_EDF, self.counts_E, of, self.glu):
                raise RuntimeError("swiglu_gradient is not used on this device")
            add_sections(sections_SR, self.place_TK, dots_N)
        else:
            grouped_mm_into(self.grad_RD, self.w2_EDF.transpose(1, 2), self.counts_E, act_RF, native=False)
            swiglu_backward_weighted(self.h_RG, act_RF, grad_h_RG, act_RF, weights, self.glu)
        return [grad_h_RG, act_RF, dots_N]


def measure(shape: tuple[str, int, int, int, int, int], what: str, who: str, timer: Timer) -> dict[str, Any]:
    """Return the row of one contestant."""
    problem = Problem(shape, timer.device)
    by: Callable[[bool], list[Tensor]] = problem.forward if what == WORK[0] else problem.backward
    row: dict[str, Any] = {"shape": shape[0], "rows": problem.rows, "what": what, "who": who}
    if who == "CUDA C++":
        ours, triton = by(True), by(False)
        row["different"] = sum(int((a != b).sum()) for a, b in zip(ours[:2], triton[:2], strict=True))
        if len(ours) > 2:
            row["max_error"] = error = float((ours[2] - triton[2]).norm() / triton[2].norm())
            if not error <= ERROR_BOUND:
                raise AssertionError(f"gradients of routing weights differ by {error:.3g} (allowed {ERROR_BOUND})")
        if row["different"]:
            raise AssertionError(f"{row['different']} elements have other bits than Triton's")
        del ours, triton
    times = timer.measure(partial(by, who == "CUDA C++"))
    return {**row, "tflop_s": (2 if what == WORK[0] else 1) * problem.flops / times["device_us"] / 1e6, **times}


def operations(device: str) -> Iterator[tuple[str, Work]]:
    """Yield the names and functions of the measurements."""
    timer = Timer(device, 3, 10) if device == "cuda" else Timer(device, 0, 2)  # interpreted: the times mean nothing
    for shape in SHAPES if device == "cuda" else CPU_SHAPES:
        for what in WORK:
            for who in ("Triton", "CUDA C++") if device == "cuda" else ("Triton",):
                yield f"{shape[0]}, {what}, {who}", partial(measure, shape, what, who, timer)


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "fused", operations, limit_s=30.0))
