"""Which GPUs use the grouped GEMMs in CUDA C++ (``gpu/gemm.py``) instead of those in Triton.

They are used on compute capability 9.0 after each kernel has given the right results on a small problem on that device.
If one does not, or cannot be loaded, a warning says so once, and Triton is used.

By default they compute gradients of weights. Products of rows, which have the same bits in both, stay in Triton: on an
H200 it took 3 to 16% less time where experts had different numbers of rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.gpu.gemm import CAPABILITY, GpuGemm, Repeated, gpu_gemm, takes_rows, takes_weights
from moe_comm.kernels.recording import Step, is_recording, record

log = logging.getLogger(__name__)

GEMM = "MOE_COMM_GEMM"
"""Environment variable: ``cuda`` uses those in CUDA C++ for products of rows as well, ``triton`` uses none of them; the
same on every rank."""
COUNTS = (0, 1, 200, 0, 64, 127)
"""Rows of the experts of the small problem."""
WIDTH, INNER = 384, 200


def setting() -> str:
    """Return the value of ``MOE_COMM_GEMM``, or "". Raises ConfigError for an unknown one."""
    value = os.environ.get(GEMM, "")
    if value not in ("", "cuda", "triton"):
        raise ConfigError(f"{GEMM} must be cuda or triton, or not set; got {value!r}")
    return value


def multiply_rows(
    rows_RD: Tensor, w_END: Tensor, counts_E: Tensor, out_RN: Tensor, act_RF: Tensor | None = None
) -> bool:
    """Launch ``GpuGemm.rows`` if it runs on this GPU and takes these matrices, whose shapes match, or return False."""
    if rows_RD.dtype != torch.bfloat16 or rows_RD.device.type != "cuda":
        return False
    gemm = launcher(rows_RD.device.index)
    if gemm is None or not takes_rows(rows_RD, w_END, out_RN, act_RF):
        return False
    gemm.rows(rows_RD, w_END, counts_E, out_RN, act_RF, current_stream(rows_RD.device))
    if is_recording():
        again = gemm.repeated_rows(rows_RD, w_END, out_RN, act_RF)
        _record(again, (rows_RD, w_END, counts_E, out_RN, act_RF), 1 if act_RF is None else 2)
    return True


def multiply_weights(grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor, *, add: bool) -> bool:
    """Launch ``GpuGemm.weights``, as ``multiply_rows`` does. It adds only to fp32, and overwrites only bf16."""
    if rows_RD.dtype != torch.bfloat16 or rows_RD.device.type != "cuda" or add != (out_END.dtype == torch.float32):
        return False
    gemm = launcher(rows_RD.device.index)
    if gemm is None or not takes_weights(grad_RN, rows_RD, out_END):
        return False
    if rows_RD.shape[0]:
        gemm.weights(grad_RN, rows_RD, counts_E, out_END, current_stream(rows_RD.device))
        if is_recording():
            again = gemm.repeated_weights(grad_RN, rows_RD, out_END)
            _record(again, (grad_RN, rows_RD, counts_E, out_END), 1)
    elif not add:
        out_END.zero_()
    return True


def _record(launch: Repeated, args: Sequence[Tensor | None], operators: int) -> None:
    def again(grid: Sequence[int], index: int, addresses: list[Any]) -> None:
        launch(addresses, torch._C._cuda_getCurrentRawStream(index))

    record(Step(again, (), args, operators))


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


_known: dict[int, GpuGemm | None] = {}
"""The launcher of each device that was asked for, or None for Triton."""


def launcher(index: int) -> GpuGemm | None:
    """Return the launcher of a device, or None for Triton. Log a warning the first time that its kernels fail."""
    if index in _known:
        return _known[index]
    if torch.cuda.is_current_stream_capturing():
        return None  # the check waits for the device, so a later call makes it
    gemm, reason = choice(index)
    _known[index] = gemm
    if reason.startswith(FAILED):
        log.warning("cuda:%d computes the grouped GEMMs of experts in Triton: %s", index, reason)
    return gemm


FAILED = "those in CUDA C++ "


@cache
def choice(index: int) -> tuple[GpuGemm | None, str]:
    """Return the launcher of a device, or None for Triton, and why."""
    value = setting()
    if value == "triton":
        return None, f"{GEMM}=triton"
    try:
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) != CAPABILITY:
            return None, f"the kernels in CUDA C++ exist for sm_90, and this GPU is sm_{major}{minor}"
        gemm = gpu_gemm(index)
        wrong = wrong_kernels(gemm, torch.device("cuda", index))
    except Exception as error:  # whatever it is, Triton works
        return None, f"{FAILED}do not run: {error}"
    if wrong:
        return None, f"{FAILED}give wrong results: {', '.join(wrong)}"
    what = "products of rows and gradients of weights" if value == "cuda" else "gradients of weights"
    return gemm, f"{what} in bf16 in CUDA C++, checked on this GPU; others in Triton"


def wrong_kernels(gemm: GpuGemm, device: torch.device) -> list[str]:
    """Return the names of kernels whose results differ from a product in fp64 by more than rounding."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device).to(torch.bfloat16)

    total, experts = sum(COUNTS), len(COUNTS)
    counts_E = torch.tensor(COUNTS, dtype=torch.int64, device=device)
    rows_RD, w_END = random(total + 1, INNER), random(experts, WIDTH, INNER)
    parts = zip(rows_RD[:total].double().split(COUNTS), w_END.double(), strict=True)
    exact_RN = torch.cat([rows @ w.T for rows, w in parts])
    stream = current_stream(device)
    wrong = []
    for name in ("rows", "rows_transposed", "rows_swiglu"):
        out_RN = torch.full((total + 1, WIDTH), 3.0, dtype=torch.bfloat16, device=device)
        act_RF = torch.full((total + 1, WIDTH // 2), 3.0, dtype=torch.bfloat16, device=device)
        w = w_END.transpose(1, 2).contiguous().transpose(1, 2) if name == "rows_transposed" else w_END
        gemm.rows(rows_RD, w, counts_E, out_RN, act_RF if name == "rows_swiglu" else None, stream)
        right = _close(out_RN[:total], exact_RN) and bool((out_RN[total:] == 3).all())
        if name == "rows_swiglu":
            gate, up = out_RN[:total].double().chunk(2, dim=1)
            right = right and _close(act_RF[:total], gate * gate.sigmoid() * up) and bool((act_RF[total:] == 3).all())
        if not right:
            wrong.append(name)
    return wrong + _wrong_weights(gemm, rows_RD, random(total + 1, WIDTH), counts_E)


def _wrong_weights(gemm: GpuGemm, rows_RD: Tensor, grad_RN: Tensor, counts_E: Tensor) -> list[str]:
    total = sum(COUNTS)
    rows_RD[total:], grad_RN[total:] = float("nan"), float("inf")  # no expert's
    parts = zip(grad_RN[:total].double().split(COUNTS), rows_RD[:total].double().split(COUNTS), strict=True)
    exact_END = torch.stack([grad.T @ rows for grad, rows in parts])
    wrong = []
    for name, dtype, before in (("weights", torch.bfloat16, 0.0), ("weights_added", torch.float32, 1.0)):
        out_END = torch.full_like(exact_END, before or 3.0, dtype=dtype)
        gemm.weights(grad_RN, rows_RD, counts_E, out_END, current_stream(rows_RD.device))
        if not _close(out_END, exact_END + before):
            wrong.append(name)
    return wrong


def _close(result: Tensor, exact: Tensor) -> bool:
    return bool(((result.double() - exact).abs() <= exact.abs() * 2.0**-7 + 2.0**-10).all())
