"""Which GPUs use the grouped GEMMs in CUDA C++ (``gpu/gemm.py``) instead of those in Triton.

They are used on compute capability 9.0. The first use of a kernel on a device checks its results on a small problem. If
they are wrong, or it cannot be loaded, a warning says so once, and Triton is used in its place.

By default they compute gradients of weights. Products of rows, which have the same bits in both, stay in Triton: on an
H200 it took 3 to 16% less time where experts had different numbers of rows. The forms that are fused with the gather of
rows and with the gradient of SwiGLU have not run on a GPU yet. Kernels that are not used are not checked either.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.gpu.gemm import (
    CAPABILITY,
    SECTION,
    SWIGLU,
    Glu,
    GpuGemm,
    ListedTiles,
    RanksRows,
    SwigluGradient,
    TakenRows,
    gpu_gemm,
    takes_bias,
    takes_fp8,
    takes_gradient,
    takes_rows,
    takes_weights,
)
from moe_comm.gpu.protocol import TILE_FLAGS, TILE_ROWS, RowFlags, num_slices
from moe_comm.kernels.recording import Step, is_recording, record

log = logging.getLogger(__name__)

GEMM = "MOE_COMM_GEMM"
"""Environment variable: ``cuda`` uses those in CUDA C++ for products of rows as well, ``triton`` uses none of them; the
same on every rank."""
COUNTS = (0, 1, 200, 0, 64, 127)
"""Rows of the experts of the small problem."""
WIDTH, INNER = 768, 200
PRODUCTS = {
    "rows": "products of rows",
    "rows_transposed": "products of gradients of rows",
    "rows_swiglu": "products with SwiGLU",
    "taken_swiglu": "products of copied tokens with SwiGLU",
    "swiglu_gradient": "products with the gradient of SwiGLU",
}
LISTED = {
    "arrived": "products of rows in flight",
    "arrived_transposed": "products of gradients in flight",
    "arrived_swiglu": "products of rows in flight with SwiGLU",
    "published": "products that other ranks read",
    "published_transposed": "products of gradients that other ranks read",
}
SCALED = {"rows_fp8": "products of rows in e4m3"}
GRADIENTS = {"weights": "gradients of weights", "weights_added": "gradients of weights in fp32"}
KERNELS = {**PRODUCTS, **LISTED, **SCALED, **GRADIENTS}
"""What the kernels compute: those of the first three with ``MOE_COMM_GEMM=cuda``, gradients by default."""


def setting() -> str:
    """Return the value of ``MOE_COMM_GEMM``, or "". Raises ConfigError for an unknown one."""
    value = os.environ.get(GEMM, "")
    if value not in ("", "cuda", "triton"):
        raise ConfigError(f"{GEMM} must be cuda or triton, or not set; got {value!r}")
    return value


def multiply_rows(
    rows: Tensor | TakenRows, w_END: Tensor, counts_E: Tensor, out_RN: Tensor, act_RF: Tensor | None = None,
    bias_EN: Tensor | None = None, glu: Glu = SWIGLU,
) -> bool:  # fmt: skip
    """Launch ``GpuGemm.rows`` if it runs on this GPU and takes these matrices, whose shapes match, or return False."""
    taken = isinstance(rows, TakenRows)
    rows_RD, slot_R, _ = rows if isinstance(rows, TakenRows) else (rows, None, 1)
    name = "rows_transposed" if w_END.stride(2) != 1 else "rows" if act_RF is None else "rows_swiglu"
    gemm = launcher_for(rows_RD, "taken_swiglu" if taken else name)
    if gemm is None or not takes_rows(rows, w_END, out_RN, act_RF) or not takes_bias(bias_EN):
        return False
    gemm.rows(rows, w_END, counts_E, out_RN, act_RF, current_stream(rows_RD.device), bias_EN, glu=glu)
    if is_recording():
        add_to = gemm.record_rows(rows, w_END, out_RN, act_RF, bias_EN, glu=glu)
        operators = 3 if taken else 1 if act_RF is None else 2
        record(Step(add_to, (), (rows_RD, w_END, counts_E, out_RN, act_RF, slot_R, bias_EN), operators))
    return True


def multiply_listed(
    rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, tiles: ListedTiles, act_RF: Tensor | None = None,
    bias_EN: Tensor | None = None, glu: Glu = SWIGLU,
) -> bool:  # fmt: skip
    """Launch ``GpuGemm.listed``, as ``multiply_rows`` does."""
    gemm = listed_launcher(rows_RD, w_END, out_RN, tiles.published, act_RF)
    if gemm is None or not takes_bias(bias_EN):
        return False
    gemm.listed(rows_RD, w_END, out_RN, act_RF, tiles, current_stream(rows_RD.device), bias_EN, glu=glu)
    return True


def listed_launcher(
    rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, published: bool, act_RF: Tensor | None = None
) -> GpuGemm | None:
    """Return what launches ``GpuGemm.listed`` for these matrices, or None for Triton."""
    suffix = "_transposed" if w_END.stride(2) != 1 else "" if act_RF is None else "_swiglu"
    gemm = launcher_for(rows_RD, ("published" if published else "arrived") + suffix)
    return gemm if takes_rows(rows_RD, w_END, out_RN, act_RF) else None


def multiply_gradient(grad_RD: Tensor, w2_EDF: Tensor, counts_E: Tensor, of: SwigluGradient, glu: Glu = SWIGLU) -> bool:
    """Launch ``GpuGemm.swiglu_gradient``, as ``multiply_rows`` does. With sections, their sum is left to the caller."""
    gemm = launcher_for(grad_RD, "swiglu_gradient")
    if gemm is None or not takes_gradient(grad_RD, w2_EDF, of):
        return False
    gemm.swiglu_gradient(grad_RD, w2_EDF, counts_E, of, current_stream(grad_RD.device), glu=glu)
    if is_recording():
        add_to, operators = gemm.record_gradient(grad_RD, w2_EDF, of, glu=glu), 2 if of.sections_SR is None else 1
        record(Step(add_to, (), (grad_RD, w2_EDF, counts_E, *of), operators))
    return True


def takes_slots(x_TD: Tensor) -> bool:
    """Return whether kernels that take rows by slot are used for tokens of this dtype on this GPU."""
    # Without a call of ``setting``, which checks the value where a kernel is chosen: each layer asks.
    return os.environ.get(GEMM) == "cuda" and launcher_for(x_TD, "taken_swiglu") is not None


def multiply_weights(grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor, *, add: bool) -> bool:
    """Launch ``GpuGemm.weights``, as ``multiply_rows`` does. It adds only to fp32, and overwrites only bf16."""
    if add != (out_END.dtype == torch.float32):
        return False
    gemm = launcher_for(rows_RD, "weights_added" if add else "weights")
    if gemm is None or not takes_weights(grad_RN, rows_RD, out_END):
        return False
    if rows_RD.shape[0]:
        gemm.weights(grad_RN, rows_RD, counts_E, out_END, current_stream(rows_RD.device))
        if is_recording():
            add_to = gemm.record_weights(grad_RN, rows_RD, out_END)
            record(Step(add_to, (), (grad_RN, rows_RD, counts_E, out_END)))
    elif not add:
        out_END.zero_()
    return True


def multiply_fp8(rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], counts: Tensor, out_RN: Tensor) -> bool:
    """Launch ``GpuGemm.rows_fp8``, as ``multiply_rows`` does."""
    gemm = launcher_for(out_RN, "rows_fp8")
    if gemm is None or not takes_fp8(rows, weights, out_RN):
        return False
    gemm.rows_fp8(rows, weights, counts, out_RN, current_stream(out_RN.device))
    return True


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


class Choice(NamedTuple):
    """What a device uses. gemm: None for Triton. reason: why, as a sentence. kernels: names of those that are used."""

    gemm: GpuGemm | None
    reason: str
    kernels: frozenset[str] = frozenset()


_known: dict[tuple[int, str], GpuGemm | None] = {}
"""The launcher of each kernel on each device that was asked for; None for Triton."""


def launcher_for(rows_RD: Tensor, kernel: str) -> GpuGemm | None:
    """Return the launcher of a kernel for rows of this dtype on this device, or None for Triton."""
    if rows_RD.dtype != torch.bfloat16 or rows_RD.device.type != "cuda":
        return None
    return launcher(rows_RD.device.index, kernel)


def launcher(index: int, kernel: str) -> GpuGemm | None:
    """Return the launcher of a kernel on a device, or None for Triton. Log a warning the first time that it fails."""
    key = index, kernel
    if key not in _known:
        if torch.cuda.is_current_stream_capturing():
            return None  # the check waits for the device, so a later call makes it
        reason = "" if setting() != "triton" else f"{GEMM}=triton"
        reason = reason or failure(index, kernel)
        if FAILED in reason:
            log.warning("cuda:%d computes %s in Triton: %s", index, KERNELS[kernel], reason)
        _known[key] = None if reason else gpu_gemm(index)
    return _known[key]


FAILED = "those in CUDA C++ "


@cache
def failure(index: int, kernel: str) -> str:
    """Return why a kernel is not used on a device, as a sentence; "" if its results on a small problem are right.

    Each kernel is checked alone, so a fault of one that a program does not use cannot end this program.
    """
    try:
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) != CAPABILITY:
            return f"the kernels in CUDA C++ exist for sm_90, and this GPU is sm_{major}{minor}"
        wrong = wrong_kernels(gpu_gemm(index), torch.device("cuda", index), [kernel])
    except Exception as error:  # whatever it is, Triton works
        return f"{FAILED}do not run: {error}"
    return f"{FAILED}give wrong results: {kernel}" if wrong else ""


def choice(index: int) -> Choice:
    """Return the launcher of a device, or None for Triton, and why. Checks all kernels that the setting uses."""
    value = setting()
    if value == "triton":
        return Choice(None, f"{GEMM}=triton")
    names = KERNELS if value == "cuda" else GRADIENTS
    reasons = {name: failure(index, name) for name in names}
    right = [name for name, reason in reasons.items() if not reason]
    failed = "; ".join(dict.fromkeys(filter(None, reasons.values())))
    if not right:
        return Choice(None, failed)
    what = f"{', '.join(names[name] for name in right)} in CUDA C++, checked on this GPU; others in Triton"
    return Choice(gpu_gemm(index), f"{what}: {failed}" if failed else what, frozenset(right))


def sections_like(rows_RD: Tensor, columns: int) -> Tensor:
    """Return [sections, R] fp32 for ``SwigluGradient``."""
    return torch.empty(-(-columns // SECTION), rows_RD.shape[0], dtype=torch.float32, device=rows_RD.device)


def wrong_kernels(gemm: GpuGemm, device: torch.device, names: Collection[str]) -> list[str]:
    """Return those of the kernels ``names`` whose results differ from a product in fp64 by more than rounding."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device).to(torch.bfloat16)

    total, experts = sum(COUNTS), len(COUNTS)
    counts_E = torch.tensor(COUNTS, dtype=torch.int64, device=device)
    rows_RD, w_END, grad_RN = random(total + 1, INNER), random(experts, WIDTH, INNER), random(total + 1, WIDTH)
    wrong = _wrong_rows(gemm, rows_RD, w_END, counts_E, [name for name in names if name in PRODUCTS])
    if "swiglu_gradient" in names and not all(
        _gradient_is_right(gemm, rows_RD, w_END, grad_RN, counts_E, glu) for glu in GLUS
    ):
        wrong.append("swiglu_gradient")
    wrong += _wrong_listed(gemm, rows_RD, w_END, [name for name in names if name in LISTED])
    if "rows_fp8" in names and not _fp8_is_right(gemm, device, counts_E):
        wrong.append("rows_fp8")
    return wrong + _wrong_weights(gemm, rows_RD, grad_RN, counts_E, [name for name in names if name in GRADIENTS])


def _by_expert(rows_RD: Tensor, w_END: Tensor) -> Tensor:
    parts = zip(rows_RD[: sum(COUNTS)].double().split(COUNTS), w_END.double(), strict=True)
    return torch.cat([rows @ w.T for rows, w in parts])


def _wrong_rows(gemm: GpuGemm, rows_RD: Tensor, w_END: Tensor, counts_E: Tensor, names: Collection[str]) -> list[str]:
    total, device, top_k = sum(COUNTS), rows_RD.device, 2
    slot_R = torch.arange(total + 1, dtype=torch.int64, device=device).flip(0)
    bias_EN = w_END[:, :, 0].contiguous() * 8
    wrong = []
    for name in names:
        if name == "swiglu_gradient":
            continue
        rows: Tensor | TakenRows = rows_RD
        taken_RD = rows_RD
        if name == "taken_swiglu":
            rows, taken_RD = TakenRows(rows_RD, slot_R, top_k), rows_RD[slot_R // top_k]
        out_RN = torch.full((total + 1, WIDTH), 3.0, dtype=torch.bfloat16, device=device)
        act_RF = torch.full((total + 1, WIDTH // 2), 3.0, dtype=torch.bfloat16, device=device)
        w = w_END.transpose(1, 2).contiguous().transpose(1, 2) if name == "rows_transposed" else w_END
        swiglu, right = name in ("rows_swiglu", "taken_swiglu"), True
        exact_RN = _by_expert(taken_RD, w_END) + bias_EN.double().repeat_interleave(counts_E, 0)
        for glu in GLUS if swiglu else (SWIGLU,):
            act = act_RF if swiglu else None
            gemm.rows(rows, w, counts_E, out_RN, act, current_stream(device), bias_EN, glu=glu)
            right = right and _close(out_RN[:total], exact_RN) and bool((out_RN[total:] == 3).all())
            if swiglu:
                exact_RF = _activated(out_RN[:total].double(), glu)
                right = right and _close(act_RF[:total], exact_RF) and bool((act_RF[total:] == 3).all())
        if not right:
            wrong.append(name)
    return wrong


def _wrong_listed(gemm: GpuGemm, rows_RD: Tensor, w_END: Tensor, names: Collection[str]) -> list[str]:
    """Check kernels with one rank, whose rows have been received: their flags are set. Then those of linear layers."""
    total, device, turn, wrong = sum(COUNTS), rows_RD.device, 3, []

    def words(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    starts = [sum(COUNTS[:e]) for e in range(len(COUNTS))]
    tiles = [
        (e, first + row, first + min(row + TILE_ROWS, count), 0, 0, first)
        for e, (first, count) in enumerate(zip(starts, COUNTS, strict=True))
        for row in range(0, count, TILE_ROWS)
    ]
    bias_EN = w_END[:, :, 0].contiguous() * 8
    exact_RN = _by_expert(rows_RD, w_END) + bias_EN.double().repeat_interleave(words(*COUNTS), 0)
    items, count, counts_E, state, host = words(*sum(tiles, ())), words(len(tiles)), words(*COUNTS), words(turn, 0), 16
    for name in names:
        published, swiglu = name.startswith("published"), name.endswith("_swiglu")
        raised = words(*[0 if published else turn] * len(COUNTS) * TILE_FLAGS)
        others = words(*[0] * host)
        flags = RowFlags(words(raised.data_ptr()), state, others[:10], others[10:11], 0, 1, 0, turn, 10**9)
        slices = num_slices(WIDTH)
        taken, aside = words(*[0] * (slices + 1)), words(*[0] * len(tiles) * WIDTH)
        list_of = ListedTiles((items, count, counts_E, count, taken, aside), flags, published, 2)
        out_RN = torch.full((total + 1, WIDTH), 3.0, dtype=torch.bfloat16, device=device)
        act_RF = torch.full((total + 1, WIDTH // 2), 3.0, dtype=torch.bfloat16, device=device)
        w = w_END.transpose(1, 2).contiguous().transpose(1, 2) if name.endswith("transposed") else w_END
        right = True
        for glu in GLUS if swiglu else (SWIGLU,):
            taken.zero_()
            act = act_RF if swiglu else None
            gemm.listed(rows_RD, w, out_RN, act, list_of, current_stream(device), bias_EN, glu=glu)
            right = right and _close(out_RN[:total], exact_RN) and bool((out_RN[total:] == 3).all())
            right = right and (not swiglu or _close(act_RF[:total], _activated(out_RN[:total].double(), glu)))
        if not swiglu:
            right = right and _linear_is_right(gemm, published, rows_RD, w[:1])
        if not right or (published and not bool((raised[:slices] == turn).all())) or bool(others.any()):
            wrong.append(name)
    return wrong


def _linear_is_right(gemm: GpuGemm, published: bool, rows_RD: Tensor, w_1ND: Tensor) -> bool:
    """Check a linear layer as the second of two ranks: the rows of the first have been received, or its memory receives
    the results of its rows."""
    rank, world, rows, turn, device = 1, 2, TILE_ROWS + 2, 3, rows_RD.device

    def words(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    tiles = [
        (0, start, min(start + TILE_ROWS, source * rows + rows), source, source, source * rows)
        for source in (0, 1)
        for start in (source * rows, source * rows + TILE_ROWS)
    ]
    flags, x_TD = 2 * (WIDTH // TILE_ROWS if published else 1), rows_RD[: world * rows]
    blocks = [words(*[0] * world * flags + [7] * (world * rows * WIDTH // 4)) for _ in range(world)]
    slots = [block[world * flags :].view(torch.bfloat16).view(world, rows, WIDTH) for block in blocks]
    state, others, numbers = words(turn, 0), words(*[0] * 11), (rank, world, 0, turn, 10**9)
    of_rows = RowFlags(words(*[block.data_ptr() for block in blocks]), state, others[:10], others[10:], *numbers)
    received_TD, out_TN = x_TD.clone(), torch.zeros(world * rows, WIDTH, dtype=torch.bfloat16, device=device)
    if published:
        ranks, out_RN = RanksRows(flags, slot=8 * world * flags + rank * slots[0][0].nbytes), slots[rank][rank]
    else:
        ranks, out_RN = RanksRows(flags, x_TD[rows:], rows), out_TN
        received_TD[rows:] = float("nan")
        blocks[rank][:flags] = turn
    taken, aside, rows_EW = words(*[0] * (world * flags + 1)), words(*[0] * len(tiles) * WIDTH), words(rows, rows)
    list_of = words(*sum(tiles, ())), words(len(tiles)), rows_EW, rows_EW, taken, aside
    listed = ListedTiles(list_of, of_rows, published, 2, ranks)
    gemm.listed(received_TD, w_1ND, out_RN, None, listed, current_stream(device))
    if published:
        out_TN = torch.cat([slot[rank] for slot in slots])
        untouched = [bool((block[:flags] == 0).all() and (slot[0].view(torch.int64) == 7).all())
                     for block, slot in zip(blocks, slots, strict=True)]  # fmt: skip
        if not all(untouched) or not all(bool((block[flags : 2 * flags] == turn).all()) for block in blocks):
            return False
    return _close(out_TN, x_TD.double() @ w_1ND[0].double().T) and not bool(others.any())


GLUS: tuple[Glu, ...] = (SWIGLU, (1.702, 1.5))
"""Activations of the small problem."""


def _pairs(h_RG: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    return h_RG.chunk(2, dim=1) if glu == SWIGLU else (h_RG[:, ::2], h_RG[:, 1::2])  # type: ignore[return-value]


def _activated(h_RG: Tensor, glu: Glu) -> Tensor:
    """Return the activation of ``h_RG``; differentiable."""
    (gate, up), (alpha, limit) = _pairs(h_RG, glu), glu
    if glu == SWIGLU:
        return gate * gate.sigmoid() * up
    gate = gate.clamp(max=limit)
    return gate * (gate * alpha).sigmoid() * (up.clamp(-limit, limit) + 1)


def _gradient_is_right(gemm: GpuGemm, rows_RD: Tensor, w_END: Tensor, h_RG: Tensor, counts_E: Tensor, glu: Glu) -> bool:
    """Check ``swiglu_gradient`` with ``w_END`` as [E, F, D] of an expert's gate, for gradients ``rows_RD``."""
    total, device, width = sum(COUNTS), rows_RD.device, WIDTH // 2
    w2_EDF = w_END[:, :width].transpose(1, 2).contiguous()
    slot_R = torch.arange(total + 1, dtype=torch.int64, device=device).flip(0)
    weights_N = torch.linspace(0.1, 1.0, total + 1, dtype=torch.float32, device=device)
    grad_h_RG, act_RF = torch.full_like(h_RG, 3.0), torch.full_like(h_RG[:, :width], 3.0).contiguous()
    of = SwigluGradient(h_RG, grad_h_RG, act_RF, weights_N, slot_R, sections_like(rows_RD, width))
    gemm.swiglu_gradient(rows_RD, w2_EDF, counts_E, of, current_stream(device), glu=glu)
    grad = _by_expert(rows_RD, w_END[:, :width]).to(torch.bfloat16).double()
    with torch.enable_grad():
        leaf = h_RG[:total].double().requires_grad_()
        act = _activated(leaf, glu)
        exact = torch.autograd.grad(act, leaf, grad)[0], act.detach()
    weight = weights_N[slot_R[:total]].double().unsqueeze(1)
    assert of.sections_SR is not None
    products = (exact[1] * grad).sum(1)
    bound = (exact[1] * grad).abs().sum(1) * 2.0**-7 + 2.0**-10
    return (
        # Two roundings, and one of the gradient of the activation.
        all(_close(t[:total], e * weight, 2.0**-5) for t, e in zip((grad_h_RG, act_RF), exact, strict=True))
        and all(bool((t[total:] == 3).all()) for t in (grad_h_RG, act_RF))
        and bool(((of.sections_SR[:, :total].double().sum(0) - products).abs() <= bound).all())
    )


def _fp8_is_right(gemm: GpuGemm, device: torch.device, counts_E: Tensor) -> bool:
    total, experts, inner, block = sum(COUNTS), len(COUNTS), 272, 128
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)

    blocks = -(-inner // block)
    values_RK, scale_RB = random(total + 1, inner).to(torch.float8_e4m3fn), random(total + 1, blocks).abs()
    w_ENK, w_scale_ECB = random(experts, WIDTH, inner).to(torch.float8_e4m3fn), random(experts, WIDTH // block, blocks)
    out_RN = torch.full((total + 1, WIDTH), 3.0, dtype=torch.bfloat16, device=device)
    gemm.rows_fp8((values_RK, scale_RB), (w_ENK, w_scale_ECB), counts_E, out_RN, current_stream(device))
    rows_RK = values_RK.double() * scale_RB.double().repeat_interleave(block, 1)[:, :inner]
    w_scale_ENK = w_scale_ECB.double().repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :, :inner]
    wide_ENK = w_ENK.double() * w_scale_ENK
    exact_RN, size_RN = _by_expert(rows_RK, wide_ENK), _by_expert(rows_RK.abs(), wide_ENK.abs())
    # The tensor cores' sums of e4m3 products have 13 bits behind the point of the largest one.
    error_RN = (out_RN[:total].double() - exact_RN).abs()
    return bool((error_RN <= exact_RN.abs() * 2.0**-8 + size_RN * 2.0**-10).all() and (out_RN[total:] == 3).all())


def _wrong_weights(
    gemm: GpuGemm, rows_RD: Tensor, grad_RN: Tensor, counts_E: Tensor, names: Collection[str]
) -> list[str]:
    if not names:
        return []
    total = sum(COUNTS)
    rows_RD[total:], grad_RN[total:] = float("nan"), float("inf")  # no expert's
    parts = zip(grad_RN[:total].double().split(COUNTS), rows_RD[:total].double().split(COUNTS), strict=True)
    exact_END = torch.stack([grad.T @ rows for grad, rows in parts])
    wrong = []
    for name in names:
        dtype, before = (torch.float32, 1.0) if name == "weights_added" else (torch.bfloat16, 0.0)
        out_END = torch.full_like(exact_END, before or 3.0, dtype=dtype)
        gemm.weights(grad_RN, rows_RD, counts_E, out_END, current_stream(rows_RD.device))
        if not _close(out_END, exact_END + before):
            wrong.append(name)
    return wrong


def _close(result: Tensor, exact: Tensor, error: float = 2.0**-7) -> bool:
    return bool(((result.double() - exact).abs() <= exact.abs() * error + error / 8).all())
