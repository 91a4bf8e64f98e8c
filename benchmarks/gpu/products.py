"""Measure grouped GEMMs: ``grouped_mm`` in Triton, with and without TMA, in fp8, and with weight gradients added in
fp32; ``F.grouped_mm``, ``torch.mm`` expert by expert, and one dense ``torch.mm`` with the same FLOPs.

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
from moe_comm.kernels import tensor_cores

ERROR_BOUND = 1e-2
"""Largest allowed relative error (Frobenius norm) against products of the same values by ``torch.mm``."""
FP8_ERROR_BOUND = 6e-2
"""The same in fp8: operands are rounded to 4 significant bits, by 2.6% each (root mean square)."""
OURS, CUDA, TRITON, POINTERS, FP8, FP8_CUDA, ADDED = (
    f"moe_comm {name}"
    for name in ("grouped_mm", "in CUDA C++", "in Triton", "without TMA", "fp8", "fp8 in CUDA C++", "added in fp32")
)


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
            OURS: partial(self._ours, operation),
        }
        if operation != "gradient of weights":
            found[CUDA] = partial(self._ours, operation, native=True)
            found[POINTERS] = partial(self._ours, operation, tma=False)
        if operation == "forward":
            found[FP8], found[FP8_CUDA] = self._fp8(native=False), self._fp8(native=True)
        if operation == "gradient of weights":
            found[TRITON] = partial(self._ours, operation, native=False)
            found[ADDED] = self._added()
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

    def _fp8(self, *, native: bool) -> Callable[[], Tensor]:
        """Return the fp8 product. The first call quantizes the operands."""
        operands: list[Any] = []

        def multiply() -> Tensor:
            from moe_comm.kernels.fp8 import quantize_weights
            from moe_comm.kernels.triton import grouped_mm_fp8, quantize

            inner = self.shape.inner
            if not operands:
                packed_RB = quantize.quantize(self.rows_RD)
                first = -(-inner // 4)
                scale_RB = packed_RB.view(torch.float32)[:, first : first + -(-inner // quantize.BLOCK)]
                operands.append((packed_RB[:, :inner], scale_RB))
                operands.append(quantize_weights(self.w_END))
            out_RN = self.rows_RD.new_empty(self.shape.rows, self.shape.columns)
            grouped_mm_fp8.grouped_mm_fp8_into(operands[0], operands[1], self.counts_E, out_RN, native=native)
            return out_RN

        return multiply

    def _added(self) -> Callable[[], Tensor]:
        """Return the weight gradient that is added to an fp32 tensor, which is zero at the first call."""
        main: list[Tensor] = []

        def add() -> Tensor:
            from moe_comm.kernels.triton.grouped_mm import grouped_weight_grad_into

            if not main:
                main.append(torch.zeros_like(self.w_END, dtype=torch.float32))
            grouped_weight_grad_into(self.grad_RN, self.rows_RD, self.counts_E, main[0], add=True)
            return main[0]

        return add

    def _ours(self, operation: str, **how: Any) -> Tensor:
        from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, grouped_weight_grad_into

        s, like = self.shape, self.rows_RD
        if operation == "forward":
            out = like.new_empty(s.rows, s.columns)
            grouped_mm_into(self.rows_RD, self.w_END, self.counts_E, out, **how)
        elif operation == "gradient of rows":
            out = like.new_empty(s.rows, s.inner)
            grouped_mm_into(self.grad_RN, self.w_END.transpose(1, 2), self.counts_E, out, **how)
        else:
            out = like.new_empty(s.experts, s.columns, s.inner)
            grouped_weight_grad_into(self.grad_RN, self.rows_RD, self.counts_E, out, **how)
        return out


def measure(shape: Shape, operation: str, who: str, timer: Timer) -> dict[str, Any]:
    """Return the row of one contestant in one operation."""
    kernel = {CUDA: "rows" if operation == "forward" else "rows_transposed", FP8_CUDA: "rows_fp8"}.get(who)
    if kernel is not None and timer.device == "cuda" and tensor_cores.launcher(0, kernel) is None:
        reason = tensor_cores.failure(0, kernel)
        if tensor_cores.FAILED in reason:
            raise RuntimeError(reason)
        return {"shape": shape.name, "what": operation, "who": who, "skipped": reason}
    problem = Problem(shape, timer.device)
    work = problem.contestants(operation)[who]
    reference, got = problem.expert_products(operation), work()
    error = float((got.float() - reference.float()).norm() / reference.float().norm())
    bound = FP8_ERROR_BOUND if who in (FP8, FP8_CUDA) else ERROR_BOUND
    if not error <= bound:
        raise AssertionError(f"{who}, {operation}: differs from torch.mm by {error:.3g} (allowed {bound})")
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
    timer = Timer(device, 3, 10) if device == "cuda" else Timer(device, 0, 2)  # interpreted: the times mean nothing
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    for shape in shapes:
        yield f"{shape.name}, dense", partial(measure_dense, shape, timer)
        for operation in ("forward", "gradient of rows", "gradient of weights"):
            for who in Problem(CPU_SHAPES[0], "cpu").contestants(operation):
                if who != FP8_CUDA:
                    yield f"{shape.name}, {operation}, {who}", partial(measure, shape, operation, who, timer)
    for shape in shapes:  # last: the kernel has never run on a GPU, and a hang ends the part
        yield f"{shape.name}, forward, {FP8_CUDA}", partial(measure, shape, "forward", FP8_CUDA, timer)


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "products", operations, limit_s=30.0))
