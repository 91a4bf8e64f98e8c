"""The GEMMs in CUDA C++: machine code, launches through a driver that records them, and the choice between them and
Triton."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import cuda_resources
from moe_comm.errors import ConfigError, KernelError, MissingDependency
from moe_comm.gpu import gemm, launch, nvrtc
from moe_comm.gpu.record import ENCODE
from moe_comm.kernels import tensor_cores
from moe_comm.runtime.native_core import native
from tests.gpu.fake_driver import Launched, launches

CSRC = Path(__file__).parents[2] / "csrc"
BF16 = torch.bfloat16
MN_MAJOR = {
    "rows_transposed",
    "arrived_transposed",
    "published_transposed",
    "swiglu_gradient",
    "weights",
    "weights_added",
}
"""Kernels whose second operand is dense along the columns of the result."""
PRODUCT = (r"HGMMA\.64x256x16\.F32\.BF16", r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3")
COUNTS = {
    "rows": (12, 2), "rows_transposed": (12, 5), "rows_swiglu": (12, 3), "taken_swiglu": (12, 2),
    "arrived": (12, 2), "arrived_transposed": (12, 5), "arrived_swiglu": (12, 3), "published": (12, 2),
    "published_transposed": (12, 5), "swiglu_gradient": (12, 5), "rows_fp8": (8, 2), "weights": (13, 6),
    "weights_added": (13, 6),
}  # fmt: skip
"""Products in the code of each kernel, and loads of a stage. A stage has 4 products and is in the code 3 times: the
first product starts a sum. Gradients of weights have one more for ends of experts; e4m3 has two halves of rows."""
MAX_REGISTERS = 168
"""Registers per thread with which a block of 384 threads fits."""


def disassembled(code: bytes, folder: Path) -> dict[str, str]:
    """Return the instructions of each kernel."""
    knobs = pytest.importorskip("triton").knobs
    path = folder / "code.cubin"
    path.write_bytes(code)
    command = [knobs.nvidia.cuobjdump.path, "-sass", path]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return dict(re.findall(r"Function : gemm_(\w+)\n(.*?)(?=\n\s*\.{3,}|\Z)", text, re.DOTALL))


def test_nvrtc_compiles_tensor_core_and_tma_instructions(tmp_path: Path) -> None:
    code = nvrtc.kernels(gemm.ARCH, sources=cuda_resources.read_tree(CSRC), source=gemm.SOURCE, folder=tmp_path)
    kernels = disassembled(code, tmp_path)
    assert kernels.keys() == COUNTS.keys() == tensor_cores.KERNELS.keys()
    assert "LDGSTS.E.BYPASS.128" in kernels["taken_swiglu"], "copies of 16 bytes"
    assert "LDSM.16.M88.4" in kernels["swiglu_gradient"], "gate and up in the layout of the sums"
    for name, text in kernels.items():
        products = re.findall(rf"{PRODUCT[name in tensor_cores.SCALED]} .*", text)
        assert all(("tnspB" in line) == (name in MN_MAJOR) for line in products), name
        expected, loads = COUNTS[name]
        assert len(products) == expected, f"{name} has {len(products)} products"
        assert text.count("UTMALDG.3D") % loads == 0, f"{name} has {text.count('UTMALDG.3D')} loads, {loads} a stage"
        written = "STS.64" if name == "weights_added" else "STSM.16.M88.4"
        for instruction in ("UTMALDG.3D", "UTMASTG.3D", written, "USETMAXREG"):
            assert instruction in text, (name, instruction)
        assert not re.search(r"\b(LDL|STL)\b", text), f"{name} uses local memory"


@pytest.mark.slow
def test_nvcc_compiles_the_same_without_spills() -> None:
    try:
        rows = list(cuda_resources.resources(gemm.ARCH, cuda_resources.read_tree(CSRC), gemm.SOURCE))
    except MissingDependency as error:
        pytest.skip(str(error))
    assert len(rows) == len(COUNTS)
    for row in rows:
        assert row["spill_bytes"] == row["stack_bytes"] == 0, row
        assert row["registers"] <= MAX_REGISTERS, row


class Launch:
    """The arguments of a launch. Matrices are address, sizes and strides in bytes, and box, innermost first."""

    def __init__(self, words: bytes) -> None:
        self.maps = [struct.unpack("16q", words[128 * i : 128 * i + 128]) for i in range(4)]
        numbers = struct.unpack("5q4i3qI", words[512 : 512 + 84])
        self.counts_at, self.out_at, self.out_stride, self.act_at, self.act_stride = numbers[:5]
        self.experts, self.columns, self.inner, self.group = numbers[5:9]
        self.taken = numbers[9:]
        self.bias = struct.unpack("2q", words[600:616])
        self.glu = struct.unpack("2f", words[616:624])

    def matrix(self, index: int) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        words = self.maps[index]
        assert words[1:3] == (9, 3), "bf16, three dimensions"
        assert words[11:15] == (0, 3, 3, 0), "128-byte swizzle"
        return words[0], words[3:6], words[6:8], words[8:11]


def matrices(rows: int, inner: int, columns: int, experts: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.zeros(rows, inner, dtype=BF16),
        torch.zeros(experts, columns, inner, dtype=BF16),
        torch.zeros(experts, dtype=torch.int64),
        torch.zeros(rows, columns, dtype=BF16),
    )


def test_a_launch_describes_its_matrices(fake_driver: tuple[launch.Driver, ctypes.CDLL]) -> None:
    driver_api, library = fake_driver
    kernels = gemm.GpuGemm(3, 132, code=b"code!", driver=driver_api)
    rows, w, counts, out = matrices(50, 64, 96)
    act, bias = torch.zeros(50, 48, dtype=BF16), torch.zeros(3, 100, dtype=BF16)[:, 2:98]
    kernels.rows(rows, w, counts, out, None, 7)
    kernels.rows(rows, w, counts, out, act, 0, bias)
    narrow = torch.zeros(50, 200, dtype=BF16)[:, :96]
    kernels.rows(narrow, w.transpose(1, 2), counts, torch.zeros(50, 64, dtype=BF16), None, 0)
    plain, swiglu, transposed = launches(library)
    assert [chr(each.function) for each in (plain, swiglu, transposed)] == ["s", "u", "d"], "by the last letter"
    assert (plain.grid, plain.block, plain.stream, plain.context) == (132, 384, 7, 1003)
    assert 200_000 < plain.shared <= 227 << 10

    given = Launch(bytes(plain.words))
    assert given.matrix(0) == (rows.data_ptr(), (64, 50, 1), (128, 6400), (64, 128, 1))
    assert given.matrix(1) == (w.data_ptr(), (64, 96, 3), (128, 96 * 128), (64, 256, 1))
    assert given.matrix(2) == (out.data_ptr(), (96, 1, 50), (192, 192), (64, 1, 16))
    assert (given.counts_at, given.out_at, given.out_stride) == (counts.data_ptr(), out.data_ptr(), 96)
    assert (given.experts, given.columns, given.inner) == (3, 96, 64)

    given = Launch(bytes(swiglu.words))
    assert given.matrix(1)[3] == (64, 128, 1)
    assert given.matrix(2) == (out.data_ptr(), (48, 2, 50), (96, 192), (64, 1, 16))
    assert given.matrix(3) == (act.data_ptr(), (48, 1, 50), (96, 96), (64, 1, 16))
    assert (given.columns, given.act_at, given.act_stride) == (48, act.data_ptr(), 48)
    assert given.bias == (bias.data_ptr(), 100) and given.glu == (0, 0)

    given = Launch(bytes(transposed.words))
    assert given.matrix(0) == (narrow.data_ptr(), (96, 50, 1), (400, 20000), (64, 128, 1))
    assert given.matrix(1) == (w.data_ptr(), (64, 96, 3), (128, 96 * 128), (64, 64, 1))
    assert (given.columns, given.inner) == (64, 96)

    slots = torch.zeros(50, dtype=torch.int64)
    kernels.rows(gemm.TakenRows(narrow, slots, 4), torch.cat([w, w], 2)[:, :, :96], counts, out, act, 5)
    taken = launches(library)[3]
    given = Launch(bytes(taken.words))
    assert (taken.function, taken.stream, given.taken) == (ord("u"), 5, (narrow.data_ptr(), 400, slots.data_ptr(), 4))
    assert given.matrix(1)[1:] == ((96, 96, 3), (256, 96 * 256), (64, 128, 1))

    kernels.rows(rows, w, counts, out, act, 5, bias, glu=(1.5, 7.0))
    given = Launch(bytes(launches(library)[4].words))
    assert given.matrix(2) == (out.data_ptr(), (96, 1, 50), (192, 192), (64, 1, 16)), "gate and up alternate"
    assert (given.columns, given.glu, given.bias) == (48, (1.5, 7.0), (bias.data_ptr(), 100))

    library.fake_refuse_next()
    with pytest.raises(KernelError, match="cuLaunchKernel with error 700"):
        kernels.rows(rows, w, counts, out, None, 7)


def test_a_launch_of_the_gradient_describes_its_matrices(fake_driver: tuple[launch.Driver, ctypes.CDLL]) -> None:
    driver_api, library = fake_driver
    kernels = gemm.GpuGemm(3, 132, code=b"code!", driver=driver_api)
    grad, w2, counts, act = matrices(50, 96, 64)
    w2 = w2.transpose(1, 2).contiguous()
    h, grad_h = torch.zeros(50, 192, dtype=BF16)[:, :128], torch.zeros(50, 128, dtype=BF16)
    weights, slots, sections = torch.zeros(50), torch.zeros(50, dtype=torch.int64), torch.zeros(1, 50)
    kernels.swiglu_gradient(grad, w2, counts, gemm.SwigluGradient(h, grad_h, act, weights, slots, sections), 9)
    kernels.swiglu_gradient(grad, w2, counts, gemm.SwigluGradient(h, grad_h, act), 0)
    kernels.swiglu_gradient(grad, w2, counts, gemm.SwigluGradient(h, grad_h, act), 0, glu=(1.5, 7.0))
    weighted, plain, clamped = launches(library)
    assert (chr(weighted.function), weighted.grid, weighted.block, weighted.stream) == ("t", 132, 384, 9)
    assert 200_000 < weighted.shared <= 227 << 10
    words = bytes(weighted.words)
    maps = [struct.unpack("16q", words[128 * i : 128 * i + 128])[:11] for i in range(5)]
    assert maps[0] == (grad.data_ptr(), 9, 3, 96, 50, 1, 192, 9600, 64, 128, 1)
    assert maps[1] == (w2.data_ptr(), 9, 3, 64, 96, 3, 128, 96 * 128, 64, 64, 1)
    assert maps[2] == (h.data_ptr(), 9, 3, 64, 2, 50, 128, 384, 64, 1, 16)
    assert maps[3] == (grad_h.data_ptr(), 9, 3, 64, 2, 50, 128, 256, 64, 1, 16)
    assert maps[4] == (act.data_ptr(), 9, 3, 64, 1, 50, 128, 128, 64, 1, 16)
    numbers = struct.unpack("9q4i", words[640:728])
    assert numbers[:5] == (counts.data_ptr(), grad_h.data_ptr(), 128, act.data_ptr(), 64)
    assert numbers[5:] == (weights.data_ptr(), slots.data_ptr(), sections.data_ptr(), 50, 3, 64, 96, 8)
    assert struct.unpack("3q", bytes(plain.words)[680:704]) == (0, 0, 0)
    assert [struct.unpack("2f", bytes(one.words)[728:736]) for one in (plain, clamped)] == [(0, 0), (1.5, 7.0)]
    of_h = struct.unpack("16q", bytes(clamped.words)[256:384])[:11]
    assert of_h == (h.data_ptr(), 9, 3, 128, 1, 50, 384, 384, 64, 1, 16), "gate and up alternate"


def test_a_record_launches_the_same(fake_driver: tuple[launch.Driver, ctypes.CDLL]) -> None:
    driver_api, library = fake_driver
    kernels = gemm.GpuGemm(3, 132, code=b"code!", driver=driver_api)
    rows, w, counts, out = matrices(50, 64, 96)
    act, narrow = torch.zeros(50, 48, dtype=BF16), torch.zeros(50, 200, dtype=BF16)[:, :96]
    grad_w, added = torch.zeros(3, 96, 64, dtype=BF16), torch.zeros(3, 64, 96)
    back, transposed = torch.zeros(50, 64, dtype=BF16), w.transpose(1, 2)
    bias = torch.zeros(3, 96, dtype=BF16)
    kernels.rows(rows, w, counts, out, None, 7, bias)
    kernels.rows(rows, w, counts, out, act, 7, glu=(1.5, 7.0))
    kernels.rows(narrow, transposed, counts, back, None, 7)
    kernels.weights(out, rows, counts, grad_w, 7)
    kernels.weights(out, rows, counts, added.transpose(1, 2), 7)
    slots, w2, h, weights = torch.zeros(50, dtype=torch.int64), w[:, :64, :48], torch.zeros_like(out), torch.zeros(50)
    taken, sections = gemm.TakenRows(rows, slots, 4), torch.zeros(1, 50)
    gradients = gemm.SwigluGradient(h, out, act), gemm.SwigluGradient(h, out, act, weights, slots, sections)
    kernels.rows(taken, w, counts, out, act, 7)
    for of, glu in zip(gradients, (gemm.SWIGLU, (1.5, 7.0)), strict=True):
        kernels.swiglu_gradient(back, w2, counts, of, 7, glu=glu)
    tensors = [rows, w, counts, out, act, narrow, grad_w, added, back, slots, h, weights, sections, bias]
    buffers = [(0, t.data_ptr() - rows.data_ptr()) for t in tensors]
    record = native().GpuRecord(driver_api.addresses(ENCODE), 1003, buffers)
    for add_to, numbers in (
        (kernels.record_rows(rows, w, out, None, bias), [0, 1, 2, 3, None, None, 13]),
        (kernels.record_rows(rows, w, out, act, glu=(1.5, 7.0)), [0, 1, 2, 3, 4, None, None]),
        (kernels.record_rows(narrow, transposed, back, None), [5, 1, 2, 8, None, None, None]),
        (kernels.record_weights(out, rows, grad_w), [3, 0, 2, 6]),
        (kernels.record_weights(out, rows, added.transpose(1, 2)), [3, 0, 2, 7]),
        (kernels.record_rows(taken, w, out, act), [0, 1, 2, 3, 4, 9, None]),
        (kernels.record_gradient(back, w2, gradients[0]), [8, 1, 2, 10, 3, 4, None, None, None]),
        (kernels.record_gradient(back, w2, gradients[1], glu=(1.5, 7.0)), [8, 1, 2, 10, 3, 4, 11, 9, 12]),
    ):
        assert add_to(record, (), numbers)
    record.run([rows.data_ptr()], 7)
    sizes = [624] * 3 + [408] * 2 + [624] + [736] * 2  # of the arguments
    each = [(bytes(one)[: Launched.words.offset], bytes(one.words)) for one in launches(library)]
    assert len(record) == 8 and len(each) == 16
    for size, direct, repeated in zip(sizes, each[:8], each[8:], strict=True):
        assert direct[0] == repeated[0] and direct[1][:size] == repeated[1][:size]
    record.run([rows.data_ptr() + 1024], 9)
    moved = launches(library)[16]
    assert moved.stream == 9 and Launch(bytes(moved.words)).matrix(0)[0] == rows.data_ptr() + 1024
    with pytest.raises(ValueError, match="uses buffer 14 of 14"):
        record.kernel(1, (1, 1, 1), 32, 0, [14])


def test_matrices_that_tma_cannot_describe_are_left_to_triton() -> None:
    rows, w, _, out = matrices(20, 64, 96)
    act = torch.zeros(20, 48, dtype=BF16)
    assert gemm.takes_rows(rows, w, out)
    assert gemm.takes_rows(rows, w, out, act)
    assert gemm.takes_rows(rows[:0], w, out[:0])
    assert gemm.takes_rows(rows[3:], w, out[3:])
    assert gemm.takes_rows(out, w.transpose(1, 2), rows)
    assert gemm.takes_rows(rows, w[:1], out)
    assert gemm.takes_rows(torch.zeros(20, 80, dtype=BF16)[:, 8:72], w, torch.zeros(20, 104, dtype=BF16)[:, :96])
    assert not gemm.takes_rows(rows.half(), w.half(), out.half())
    assert not gemm.takes_rows(out, w.transpose(1, 2), rows, act), "SwiGLU with transposed weights"
    for inner, columns in ((60, 96), (64, 92), (0, 96)):
        rows, w, _, out = matrices(20, inner, columns)
        assert not gemm.takes_rows(rows, w, out)
    rows, w, _, out = matrices(20, 64, 96)
    assert not gemm.takes_rows(torch.zeros(20, 68, dtype=BF16)[:, :64], w, out), "row stride"
    assert not gemm.takes_rows(torch.zeros(20, 72, dtype=BF16)[:, 1:65], w, out), "alignment"
    assert not gemm.takes_rows(rows, w[:1].expand(3, -1, -1), out), "one matrix for all experts"
    assert not gemm.takes_rows(rows, torch.zeros(3, 96, 128, dtype=BF16)[:, :, ::2], out)
    assert not gemm.takes_rows(rows, w[:, :88], out[:, :88], act[:, :44]), "gate of 44 columns"


def test_matrices_of_fused_forms_that_the_kernels_cannot_read_are_left_to_triton() -> None:
    x, w, _, h = matrices(20, 64, 96)
    slots, act = torch.zeros(20, dtype=torch.int64), torch.zeros(20, 48, dtype=BF16)
    assert gemm.takes_rows(gemm.TakenRows(x[:7], slots, 3), w, h, act)
    assert not gemm.takes_rows(gemm.TakenRows(x[:7], slots, 3), w, h), "without an activation"
    assert not gemm.takes_rows(gemm.TakenRows(x[:7], slots.repeat(2)[::2], 3), w, h, act)
    assert not gemm.takes_rows(gemm.TakenRows(x.half(), slots, 3), w, h, act)
    grad, w2, grad_h = torch.zeros(20, 64, dtype=BF16), torch.zeros(3, 64, 48, dtype=BF16), torch.zeros_like(h)
    weights, of = torch.zeros(20), gemm.SwigluGradient(h, grad_h, act)
    assert gemm.takes_gradient(grad, w2, of)
    assert gemm.takes_gradient(grad[:0], w2, of)
    assert gemm.takes_gradient(grad, w2, of._replace(weights_N=weights))
    assert not gemm.takes_gradient(grad, w2, of._replace(weights_N=weights.repeat(2)[::2]))
    assert not gemm.takes_gradient(grad, w2.transpose(1, 2).contiguous().transpose(1, 2), of), "dense along D"
    assert not gemm.takes_gradient(grad, w2[:1].expand(3, -1, -1), of)
    assert not gemm.takes_gradient(grad.half(), w2, of)
    assert not gemm.takes_gradient(grad, w2, of._replace(h_RG=torch.zeros(20, 104, dtype=BF16)[:, :96])), "h's stride"


def test_operands_in_e4m3_that_tma_cannot_describe_are_left_to_triton() -> None:
    e4m3 = torch.float8_e4m3fn

    def taken(inner: int = 512, columns: int = 96, apart: int = 0, dtype: torch.dtype = BF16, first: int = 0) -> bool:
        values = torch.zeros(20, inner + apart + first, dtype=torch.uint8)[:, first : first + inner]
        weights = torch.zeros(3, columns, inner, dtype=e4m3), torch.zeros(3, 1, -(-inner // 128))
        scales = torch.zeros(20, -(-inner // 128))
        return gemm.takes_fp8((values, scales), weights, torch.zeros(20, columns, dtype=dtype))

    assert taken() and taken(apart=16) and taken(inner=272)
    assert not taken(apart=8), "row stride, as of packed rows of 256 channels"
    assert not taken(inner=200) and not taken(columns=100) and not taken(first=8, apart=8)
    assert not taken(dtype=torch.float32)


class Emulated(gemm.GpuGemm):
    """A device that computes in plain torch, with a fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, 0

    def rows(
        self, rows: Tensor | gemm.TakenRows, w_END: Tensor, counts_E: Tensor, out_RN: Tensor, act_RF: Tensor | None,
        stream: int, bias_EN: Tensor | None = None, *, glu: gemm.Glu = gemm.SWIGLU,
    ) -> None:  # fmt: skip
        self.calls += 1
        if isinstance(rows, gemm.TakenRows):
            rows = rows.x_TD[rows.slot_R // (1 if self.fault == "slots" else rows.top_k)]
        if self.fault == "raises":
            raise KernelError("cuLaunchKernel failed")
        sizes = counts_E.tolist()
        total = sum(sizes)
        parts = [rows.float() @ w.float().T for rows, w in zip(rows[:total].split(sizes), w_END, strict=True)]
        if bias_EN is not None and self.fault != "biases":
            parts = [part + bias_N.float() for part, bias_N in zip(parts, bias_EN, strict=True)]
        out_RN[:total] = torch.cat(parts).to(BF16)
        if self.fault == "transposed" and w_END.stride(2) != 1:
            out_RN[127, 5] += 1
        if self.fault == "outside":
            out_RN[total] = 0
        if act_RF is not None:
            act = self._activated(out_RN[:total].float(), glu)
            act_RF[:total] = (act * (1.1 if self.fault == "act" else 1)).to(BF16)

    def _activated(self, h_RG: Tensor, glu: gemm.Glu) -> Tensor:
        alpha, limit = glu
        if not limit or self.fault == "halves":
            gate, up = h_RG.chunk(2, dim=1)
            return gate * gate.sigmoid() * up
        gate, up = h_RG.unflatten(1, (-1, 2)).unbind(2)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (gate * alpha).sigmoid() * (up + 1)

    def listed(
        self, rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, act_RF: Tensor | None, tiles: gemm.ListedTiles,
        stream: int, bias_EN: Tensor | None = None, *, glu: gemm.Glu = gemm.SWIGLU,
    ) -> None:  # fmt: skip
        counts_E, flags = tiles.words[2], tiles.flags
        assert counts_E is not None
        if tiles.ranks is not None:
            self.linear(rows_RD.clone(), w_END, out_RN, tiles)
            return
        self.rows(rows_RD, w_END, counts_E, out_RN, act_RF, stream, bias_EN, glu=glu)
        if tiles.published and self.fault != "flags":
            ctypes.memmove(int(flags.peers_W[0]), (ctypes.c_int64 * 3)(*[flags.turn] * 3), 24)

    def linear(self, rows_RD: Tensor, w_END: Tensor, out_RN: Tensor, tiles: gemm.ListedTiles) -> None:
        ranks, flags = tiles.ranks, tiles.flags
        assert ranks is not None
        if ranks.own_SD is not None and self.fault != "own":
            rows_RD[ranks.own_row :][: len(ranks.own_SD)] = ranks.own_SD
        all_RN = torch.zeros(len(rows_RD) + 1, w_END.shape[1], dtype=BF16)
        self.rows(rows_RD, w_END, torch.tensor([len(rows_RD)]), all_RN, None, 0)
        if not tiles.published:
            out_RN.copy_(all_RN[:-1])
            return
        raised = torch.full((ranks.flags,), flags.turn)
        for to, part in enumerate(all_RN[:-1].chunk(flags.world)):
            block = int(flags.peers_W[flags.rank if self.fault == "rank" else to])
            ctypes.memmove(block + ranks.slot, part.data_ptr(), part.nbytes)
            ctypes.memmove(block + 8 * flags.rank * ranks.flags, raised.data_ptr(), raised.nbytes)

    def swiglu_gradient(
        self, grad_RD: Tensor, w2_EDF: Tensor, counts_E: Tensor, of: gemm.SwigluGradient, stream: int,
        *, glu: gemm.Glu = gemm.SWIGLU,
    ) -> None:  # fmt: skip
        grad_RF = torch.zeros_like(of.act_RF)
        self.rows(grad_RD, w2_EDF.transpose(1, 2), counts_E, grad_RF, None, stream)
        total = int(counts_E.sum())
        h_RG, grad = of.h_RG[:total].float().requires_grad_(), grad_RF[:total].float()
        act = self._activated(h_RG, glu)
        (grad_h,) = torch.autograd.grad(act, h_RG, grad)
        assert of.weights_N is not None and of.slot_R is not None and of.sections_SR is not None
        weight = of.weights_N[of.slot_R[:total]].unsqueeze(1)
        of.grad_h_RG[:total] = (grad_h * weight).to(BF16)
        of.act_RF[:total] = (act.detach() * (1 if self.fault == "unweighted" else weight)).to(BF16)
        of.sections_SR.zero_()
        of.sections_SR[0, :total] = (act.detach() * grad).sum(1) * (1.1 if self.fault == "dots" else 1)

    def rows_fp8(
        self, rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], counts: Tensor, out_RN: Tensor, stream: int
    ) -> None:
        (values_RK, scale_RB), (w_ENK, w_scale_ECB) = rows, weights
        inner, sizes = values_RK.shape[1], counts.tolist()
        scale = scale_RB.repeat_interleave(128, 1)[:, :inner]
        w_scale = (w_scale_ECB.roll(1, 2) if self.fault == "scale" else w_scale_ECB).repeat_interleave(128, 1)
        w_ENK = w_ENK.float() * w_scale.repeat_interleave(128, 2)[:, : w_ENK.shape[1], :inner]
        parts = (values_RK.float() * scale)[: sum(sizes)].split(sizes)
        out_RN[: sum(sizes)] = torch.cat([part @ w.T for part, w in zip(parts, w_ENK, strict=True)]).to(BF16)

    def weights(self, grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor, stream: int) -> None:
        start = 0
        for e, count in enumerate(counts_E.tolist()):
            part = slice(start, start + count + (self.fault == "beyond"))
            product = grad_RN[part].float().T @ rows_RD[part].float()
            out_END[e] = product + (out_END[e] if out_END.dtype == torch.float32 else 0)
            start += count


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("", []),
        ("transposed", ["rows_transposed", "swiglu_gradient", "arrived_transposed", "published_transposed"]),
        ("flags", ["published", "published_transposed"]),
        ("own", ["arrived", "arrived_transposed"]),
        ("rank", ["published", "published_transposed"]),
        ("act", ["rows_swiglu", "taken_swiglu", "arrived_swiglu"]),
        ("slots", ["taken_swiglu"]),
        ("biases", ["rows", "rows_transposed", "rows_swiglu", "taken_swiglu", *tensor_cores.LISTED]),
        ("halves", ["rows_swiglu", "taken_swiglu", "swiglu_gradient", "arrived_swiglu"]),
        ("outside", ["rows", "rows_transposed", "rows_swiglu", "taken_swiglu", *tensor_cores.LISTED]),
        ("unweighted", ["swiglu_gradient"]),
        ("dots", ["swiglu_gradient"]),
        ("scale", ["rows_fp8"]),
        ("beyond", ["weights", "weights_added"]),
    ],
)
def test_the_check_finds_kernels_with_wrong_results(fault: str, wrong: list[str]) -> None:
    names = [*tensor_cores.KERNELS]
    assert tensor_cores.wrong_kernels(Emulated(fault), torch.device("cpu"), names) == wrong
    assert tensor_cores.wrong_kernels(Emulated("raises"), torch.device("cpu"), tensor_cores.GRADIENTS) == []


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Emulate a GPU of compute capability 9.0, whose checks run on the CPU."""
    check = tensor_cores.wrong_kernels
    monkeypatch.setattr(
        tensor_cores, "wrong_kernels", lambda kernels, device, names: check(kernels, torch.device("cpu"), names)
    )
    monkeypatch.setattr(tensor_cores, "_known", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tensor_cores.failure.cache_clear()

    def use(device: Emulated) -> Emulated:
        monkeypatch.setattr(tensor_cores, "gpu_gemm", lambda index: device)
        return device

    yield use
    tensor_cores.failure.cache_clear()


def test_a_right_device_is_used_after_one_check(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = hopper(Emulated())
    monkeypatch.setenv(tensor_cores.GEMM, "cuda")
    for name in (*tensor_cores.PRODUCTS, *tensor_cores.GRADIENTS) * 2:
        assert tensor_cores.launcher(0, name) is device
    assert device.calls == 8, "two activations of three kernels"
    assert "checked on this GPU" in tensor_cores.choice(0)[1]
    assert not caplog.records


@pytest.mark.parametrize(
    ("fault", "reason", "chosen"),
    [
        ("act", "give wrong results: taken_swiglu", "give wrong results: rows_swiglu; those in"),
        ("slots", "give wrong results: taken_swiglu", ": those in CUDA C++ give wrong results: taken_swiglu"),
        ("raises", "do not run: cuLaunchKernel failed", ": those in CUDA C++ do not run: cuLaunchKernel failed"),
    ],
)
def test_a_wrong_kernel_is_left_to_triton_with_one_warning(
    fault: str, reason: str, chosen: str, hopper: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    device = hopper(Emulated(fault))
    monkeypatch.setenv(tensor_cores.GEMM, "cuda")
    assert tensor_cores.launcher(0, "taken_swiglu") is None
    assert tensor_cores.launcher(0, "taken_swiglu") is None
    assert tensor_cores.launcher(0, "weights") is device, "each kernel is checked alone"
    (record,) = caplog.records
    assert reason in record.getMessage() and "copied tokens with SwiGLU in Triton" in record.getMessage()
    assert chosen in tensor_cores.choice(0).reason and "weights" in tensor_cores.choice(0).kernels


def test_the_check_of_a_kernel_launches_no_other(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that stops the GPU would end the program that uses another one."""
    device = hopper(Emulated("raises"))
    monkeypatch.setenv(tensor_cores.GEMM, "cuda")
    assert tensor_cores.launcher(0, "rows_fp8") is tensor_cores.launcher(0, "weights_added") is device
    assert device.calls == 0


def test_other_devices_and_the_setting_use_triton_without_a_warning(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = hopper(Emulated())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tensor_cores.launcher(0, "weights") is None, "the check cannot be captured; a later call makes it"
    assert device.calls == 0
    monkeypatch.setenv(tensor_cores.GEMM, "triton")
    assert tensor_cores.choice(1) == (None, "MOE_COMM_GEMM=triton", frozenset())
    monkeypatch.delenv(tensor_cores.GEMM)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (10, 0))
    assert tensor_cores.launcher(2, "weights") is None
    assert "this GPU is sm_100" in tensor_cores.choice(2)[1]
    assert not caplog.records


def test_products_of_rows_are_in_triton_unless_the_setting_says_otherwise(
    hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(Emulated("act"))  # products are not even checked
    assert tensor_cores.setting() == ""
    assert tensor_cores.choice(0).reason.startswith("gradients of weights, gradients of weights in fp32 in CUDA C++")
    assert tensor_cores.choice(0).kernels == {"weights", "weights_added"}
    hopper(Emulated())
    monkeypatch.setenv(tensor_cores.GEMM, "cuda")
    assert tensor_cores.choice(1).reason.startswith("products of rows, products of gradients of rows, products with")
    monkeypatch.setenv(tensor_cores.GEMM, "cudnn")
    with pytest.raises(ConfigError, match="MOE_COMM_GEMM must be cuda or triton, or not set; got 'cudnn'"):
        tensor_cores.setting()


def test_tensors_on_the_cpu_and_of_other_dtypes_are_not_asked_for() -> None:
    rows, w, counts, out = matrices(20, 64, 96)
    assert not tensor_cores.multiply_rows(rows, w, counts, out)


def checked(*names: str) -> None:
    """Check these kernels on the GPU, or skip the test on other GPUs. A fault of others must not fail it."""
    for name in names:
        reason = tensor_cores.failure(0, name)
        assert tensor_cores.FAILED not in reason, reason
        if reason:
            pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("inner", "width", "counts"),
    [(64, 128, [128]), (256, 256, [0, 1, 127, 129, 0, 300]), (200, 136, [5, 64, 65, 200]), (2048, 768, [130] * 40)],
)
def test_results_have_the_bits_of_triton(inner: int, width: int, counts: list[int]) -> None:
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into
    from moe_comm.kernels.triton.swiglu import swiglu_forward

    checked("rows", "rows_transposed", "rows_swiglu")
    generator, device = torch.Generator("cuda").manual_seed(0), torch.device("cuda", 0)
    total, counts_E = sum(counts), torch.tensor(counts, device=device)
    rows, w = (
        torch.randn(*shape, generator=generator, device=device).to(BF16)
        for shape in ((total + 3, inner), (len(counts), 2 * width, inner))
    )

    def results(native: bool) -> list[Tensor]:
        h, grad, act = (torch.zeros(total + 3, n, dtype=BF16, device=device) for n in (2 * width, inner, width))
        if native:
            assert tensor_cores.multiply_rows(rows, w, counts_E, h, act)
        else:
            grouped_mm_into(rows, w, counts_E, h, native=False)
            swiglu_forward(h, act)
        grouped_mm_into(h, w.transpose(1, 2), counts_E, grad, native=native)
        return [h, act, grad]

    for ours, triton in zip(results(True), results(False), strict=True):
        assert torch.equal(ours[:total], triton[:total])
        assert not ours[total:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("hidden", "width", "ids"),
    [
        (64, 128, [[0]]),
        (256, 256, [[0, 2]] * 130 + [[4, -1]] * 70),
        (200, 136, [[1, 3], [3, 0], [-1, 2], [2, 1]] * 60),
        (2048, 768, [[i % 32, (3 * i + 1) % 32] for i in range(2048)]),
    ],
)
@pytest.mark.parametrize("glu", [gemm.SWIGLU, (1.702, 7.0)], ids=["swiglu", "clamped"])
def test_fused_forms_have_the_bits_of_triton(
    hidden: int, width: int, ids: list[list[int]], glu: gemm.Glu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_comm.kernels.row_weights import RowWeights
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, taken_mm_swiglu_into
    from moe_comm.kernels.triton.rows import copy_rows
    from moe_comm.kernels.triton.slot_order import order_slots
    from moe_comm.kernels.triton.swiglu import swiglu_forward
    from moe_comm.kernels.triton.swiglu_gradient import swiglu_gradient_into

    monkeypatch.setenv(tensor_cores.GEMM, "cuda")
    checked("taken_swiglu", "swiglu_gradient")
    ids_TK = torch.tensor(ids, device="cuda")
    tokens, top_k = ids_TK.shape
    experts, rows = int(ids_TK.max()) + 1, ids_TK.numel()
    slot_R, place_TK, counts = order_slots(ids_TK, experts)
    counts_E, total = counts[:-2], int(counts[:-2].sum())
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    x_TD, grad_RD = random(tokens, hidden).to(BF16), random(rows, hidden).to(BF16)
    w13_EGD, w2_EDF = random(experts, 2 * width, hidden).to(BF16), random(experts, hidden, width).to(BF16)
    weights_N = torch.rand(tokens, top_k, generator=generator, device="cuda")

    def results(setting: str) -> list[Tensor]:
        monkeypatch.setenv(tensor_cores.GEMM, setting)
        h, grad_h = (torch.zeros(rows, 2 * width, dtype=BF16, device="cuda") for _ in range(2))
        act, weighted = (torch.zeros(rows, width, dtype=BF16, device="cuda") for _ in range(2))
        if setting == "cuda":
            assert taken_mm_swiglu_into(gemm.TakenRows(x_TD, slot_R, top_k), w13_EGD, counts_E, h, act, glu=glu)
        else:
            grouped_mm_into(copy_rows(x_TD, place_TK, rows), w13_EGD, counts_E, h)
            swiglu_forward(h, act, glu)
        dots = torch.full_like(weights_N, 7)
        weights = RowWeights(weights_N, place_TK, dots, slot_R)
        swiglu_gradient_into(grad_RD, w2_EDF, counts_E, h, grad_h, weighted, weights, glu=glu)
        return [h[:total], act[:total], grad_h[:total], weighted[:total], dots]

    *ours, dots = results("cuda")
    *triton, expected = results("triton")
    for a, b in zip(ours, triton, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(dots == 0, expected == 0)
    assert (dots - expected).norm() <= 1e-5 * expected.norm()
    if width <= gemm.SECTION:
        assert torch.equal(dots, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 64, 72), (200, 136, 264), (1024, 4096, 3584)])
def test_products_of_linear_layers_have_the_bits_of_triton(
    rows: int, inner: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank; the checks of the kernels have two."""
    from moe_comm.overlap.triton.linear import LinearKernels

    monkeypatch.setenv(tensor_cores.GEMM, "cuda")
    checked("arrived", "arrived_transposed", "published", "published_transposed")
    generator = torch.Generator("cuda").manual_seed(0)
    x, w, grad = (
        torch.randn(*shape, generator=generator, device="cuda").to(BF16)
        for shape in ((rows, inner), (columns, inner), (rows, columns))
    )
    kernels = LinearKernels.of(None, x)

    def results(setting: str) -> list[Tensor]:
        monkeypatch.setenv(tensor_cores.GEMM, setting)
        found = []
        for name in ("gather_matmul", "matmul_scatter"):
            grad_x, grad_w = kernels.gradients(name, x, w, grad, True, True)
            assert grad_x is not None and grad_w is not None
            found += [kernels.forward(name, x, w), grad_x, grad_w]
        kernels.memory.check(wait=True)
        return found

    for ours, triton in zip(results("cuda"), results("triton"), strict=True):
        assert torch.equal(ours, triton)
    y, grad_x = results("cuda")[:2]
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, rtol=2.0**-7, atol=2.0**-5)
    torch.testing.assert_close(grad_x.double(), grad.double() @ w.double(), rtol=2.0**-7, atol=2.0**-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("inner", "columns", "counts", "blocked"),
    [
        (128, 128, [[128]], False),
        (512, 256, [[0], [1], [129], [300]], False),
        (512, 256, [[0], [1], [129], [300]], True),
        (272, 136, [[5, 0], [64, 65]], True),
        (2048, 768, [[130]] * 40, False),
    ],
)
def test_e4m3_products_are_near_triton_and_float64(
    inner: int, columns: int, counts: list[list[int]], blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_comm.kernels.triton.grouped_mm_fp8 import grouped_mm_fp8_into

    monkeypatch.setenv(tensor_cores.GEMM, "cuda")
    checked("rows_fp8")
    device, blocks, room = torch.device("cuda", 0), -(-inner // 128), max(map(max, counts))
    experts, sources = len(counts), len(counts[0])
    total = experts * sources * room if blocked else sum(map(sum, counts))
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    rows = random(total, inner).to(torch.float8_e4m3fn), random(total, blocks).abs()
    w = random(experts, columns, inner).to(torch.float8_e4m3fn), random(experts, -(-columns // 128), blocks).abs()
    counts_EW = torch.tensor(counts, device=device)
    given = counts_EW if blocked else counts_EW.flatten()
    ours, triton = (torch.full((total, columns), 3.0, dtype=BF16, device=device) for _ in range(2))
    assert tensor_cores.multiply_fp8(rows, w, given, ours)
    grouped_mm_fp8_into(rows, w, given, triton, native=False)
    wide_w = w[0].double() * w[1].double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :columns, :inner]
    wide = rows[0].double() * rows[1].double().repeat_interleave(128, 1)[:, :inner]
    start = 0
    for e, of_expert in enumerate(counts):
        for count in of_expert:
            part = slice(start, start + count)
            exact, size = wide[part] @ wide_w[e].T, wide[part].abs() @ wide_w[e].abs().T
            for result in (ours, triton):
                assert ((result[part].double() - exact).abs() <= exact.abs() * 2.0**-8 + size * 2.0**-10).all()
            start += room if blocked else count
            assert (ours[part.stop : start] == 3).all()
