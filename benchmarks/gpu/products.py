"""Measure grouped GEMMs: ``grouped_mm`` in Triton, ``F.grouped_mm``, ``torch.mm`` expert by expert, and one dense
``torch.mm`` with the same FLOPs.

    python -m benchmarks.gpu.products --results results.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.record import Work, run_part
from benchmarks.gpu.timing import Timer, gemm_tflop_s, random

ERROR_BOUND = 1e-2
"""Largest allowed relative error (Frobenius norm) against fp32 products of the same bf16 values."""


@dataclass(frozen=True)
class Shape:
    """Rows R in total, experts E, input width D, output width N."""

    name: str
    rows: int
    experts: int
    inner: int
    columns: int

    def counts(self) -> list[int]:
        """Return rows per expert: uneven, with one expert without rows if there are more than two."""
        weights = torch.rand(self.experts, generator=torch.Generator().manual_seed(0)) + 0.5
        if self.experts > 2:
            weights[1] = 0
        counts = (weights / weights.sum() * self.rows).long()
        counts[0] += self.rows - counts.sum()
        return counts.tolist()

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns


GPU_SHAPES = (
    Shape("Mixtral 8x7B, gate and up", 8192, 8, 4096, 2 * 14336),
    Shape("Mixtral 8x7B, down", 8192, 8, 14336, 4096),
    Shape("Qwen3-30B-A3B, gate and up", 32768, 128, 2048, 2 * 768),
    Shape("DeepSeek-V3, 128 rows an expert", 32 * 128, 32, 7168, 2 * 2048),
    Shape("DeepSeek-V3, 1024 rows an expert", 32 * 1024, 32, 7168, 2 * 2048),
)
CPU_SHAPES = (Shape("small", 48, 4, 64, 32),)


class Problem:
    """Values of a shape, and the contestants of each operation."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.counts = shape, shape.counts()
        self.counts_E = torch.tensor(self.counts, device=device)
        self.ends_E = self.counts_E.cumsum(0).to(torch.int32)
        self.rows_RD = random(device, shape.rows, shape.inner)
        self.grad_RN = random(device, shape.rows, shape.columns, seed=1)
        self.w_END = random(device, shape.experts, shape.columns, shape.inner, seed=2) / shape.inner**0.5

    def expert_products(self, operation: str) -> Tensor:
        """Compute expert by expert with ``torch.mm``, which needs the counts on the host."""
        rows, grads = self.rows_RD.split(self.counts), self.grad_RN.split(self.counts)
        if operation == "forward":
            return torch.cat([x @ w.T for x, w in zip(rows, self.w_END, strict=True)])
        if operation == "gradient of rows":
            return torch.cat([g @ w for g, w in zip(grads, self.w_END, strict=True)])
        return torch.stack([g.T @ x for g, x in zip(grads, rows, strict=True)])

    def contestants(self, operation: str) -> dict[str, Callable[[], Tensor]]:
        """Return the contestants of an operation by name."""
        found: dict[str, Callable[[], Tensor]] = {
            "torch.mm by expert": partial(self.expert_products, operation),
            "moe_comm grouped_mm": partial(self._triton, operation),
        }
        if hasattr(functional, "grouped_mm"):
            found["F.grouped_mm"] = partial(self._torch, operation, functional.grouped_mm)
        elif hasattr(torch, "_grouped_mm"):
            found["torch._grouped_mm"] = partial(self._torch, operation, torch._grouped_mm)
        return found

    def _torch(self, operation: str, grouped: Any) -> Tensor:
        if operation == "forward":
            return grouped(self.rows_RD, self.w_END.transpose(1, 2), offs=self.ends_E)  # type: ignore[no-any-return]
        if operation == "gradient of rows":
            return grouped(self.grad_RN, self.w_END, offs=self.ends_E)  # type: ignore[no-any-return]
        return grouped(self.grad_RN.T, self.rows_RD, offs=self.ends_E)  # type: ignore[no-any-return]

    def _triton(self, operation: str) -> Tensor:
        from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, grouped_weight_grad_into

        s, like = self.shape, self.rows_RD
        if operation == "forward":
            out = like.new_empty(s.rows, s.columns)
            grouped_mm_into(self.rows_RD, self.w_END, self.counts_E, out)
        elif operation == "gradient of rows":
            out = like.new_empty(s.rows, s.inner)
            grouped_mm_into(self.grad_RN, self.w_END.transpose(1, 2), self.counts_E, out)
        else:
            out = like.new_empty(s.experts, s.columns, s.inner)
            grouped_weight_grad_into(self.grad_RN, self.rows_RD, self.counts_E, out)
        return out


def measure(shape: Shape, operation: str, who: str, timer: Timer) -> dict[str, Any]:
    """Return the row of one contestant in one operation."""
    problem = Problem(shape, timer.device)
    work = problem.contestants(operation)[who]
    reference, got = problem.expert_products(operation), work()
    error = float((got.float() - reference.float()).norm() / reference.float().norm())
    if not error <= ERROR_BOUND:
        raise AssertionError(f"{who}, {operation}: differs from torch.mm by {error:.3g} (allowed {ERROR_BOUND})")
    del reference, got
    times = timer.measure(work)
    rate = shape.flops / times["device_us"] / 1e6
    return {"shape": shape.name, "rows": shape.rows, "experts": shape.experts, "inner": shape.inner,
            "columns": shape.columns, "what": operation, "who": who, "max_error": error, "tflop_s": rate,
            **times}  # fmt: skip


def measure_dense(shape: Shape, timer: Timer) -> dict[str, Any]:
    """Return the rate of one dense product with the FLOPs of the shape, and of a square one in the same process."""
    rows_RD = random(timer.device, shape.rows, shape.inner)
    w_ND = random(timer.device, shape.columns, shape.inner, seed=1)
    us = timer.many(lambda: rows_RD @ w_ND.T)
    square = gemm_tflop_s(timer, 8192 if timer.device == "cuda" else 128)
    return {"shape": shape.name, "what": "forward", "who": "torch.mm, dense", "device_us": us,
            "tflop_s": shape.flops / us / 1e6, "gemm_tflop_s": square}  # fmt: skip


def operations(device: str) -> Iterator[tuple[str, Work]]:
    """Yield the names and functions of the measurements."""
    timer = Timer(device, 3, 10)
    for shape in GPU_SHAPES if device == "cuda" else CPU_SHAPES:
        yield f"{shape.name}, dense", partial(measure_dense, shape, timer)
        names = Problem(CPU_SHAPES[0], "cpu").contestants("forward")
        for operation in ("forward", "gradient of rows", "gradient of weights"):
            for who in names:
                yield f"{shape.name}, {operation}, {who}", partial(measure, shape, operation, who, timer)


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "products", operations, limit_s=30.0))
