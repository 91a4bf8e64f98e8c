"""Gradients of weights in CUDA C++: launches through a driver that records them, and products on a GPU."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch
from torch import Tensor

from moe_comm.gpu import gemm, launch
from moe_comm.kernels import tensor_cores
from tests.gpu.fake_driver import launches

BF16 = torch.bfloat16


def test_a_launch_describes_its_matrices(fake_driver: tuple[launch.Driver, ctypes.CDLL]) -> None:
    driver_api, library = fake_driver
    kernels = gemm.GpuGemm(3, 132, code=b"code!", driver=driver_api)
    grad, rows = torch.zeros(50, 96, dtype=BF16), torch.zeros(50, 80, dtype=BF16)[:, :64]
    counts, out = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 96, 64, dtype=BF16)
    main = torch.zeros(3, 64, 96).transpose(1, 2)
    kernels.weights(grad, rows, counts, out, 7)
    kernels.weights(grad, rows, counts, main, 0)
    plain, added = launches(library)
    assert (plain.grid, plain.block, plain.stream) == (132, 384, 7)
    for each, matrices, dtype in ((plain, (grad, rows, out), 9), (added, (rows, grad, main.transpose(1, 2)), 7)):
        assert 200_000 < each.shared <= 227 << 10
        maps = [struct.unpack("16q", bytes(each.words[128 * i : 128 * i + 128])) for i in range(3)]
        for words, matrix in zip(maps[:2], matrices[:2], strict=True):
            stride = 2 * matrix.stride(0)
            assert words[0] == matrix.data_ptr()
            assert words[1:11] == (9, 3, matrix.shape[1], 50, 1, stride, 50 * stride, 64, 64, 1)
        size = matrices[2].element_size()
        columns, inner = matrices[2].shape[1:]
        assert maps[2][0] == matrices[2].data_ptr()
        assert maps[2][1:11] == (
            *(dtype, 3, inner, columns, 3, inner * size, columns * inner * size),
            *(128 // size, 64, 1),
        )
        assert struct.unpack("q4i", bytes(each.words[384:408])) == (counts.data_ptr(), 3, columns, inner, 8)


def test_matrices_that_tma_cannot_describe_are_left_to_triton() -> None:
    grad, rows, out = torch.zeros(20, 96, dtype=BF16), torch.zeros(20, 64, dtype=BF16), torch.zeros(3, 96, 64)
    assert gemm.takes_weights(grad, rows, out)
    assert gemm.takes_weights(grad, rows, out.to(BF16))
    assert gemm.takes_weights(grad[:0], rows[:0], out)
    assert gemm.takes_weights(grad, rows, torch.zeros(3, 64, 96).transpose(1, 2))
    assert gemm.takes_weights(grad[:, :88], rows, out[:, :88])
    assert not gemm.takes_weights(grad.half(), rows.half(), out)
    assert not gemm.takes_weights(grad[:, :92], rows, out[:, :92])
    assert not gemm.takes_weights(grad[:, 4:92], rows, out[:, :88]), "alignment"
    assert not gemm.takes_weights(grad, rows, torch.zeros(3, 96, 128)[:, :, ::2])
    assert not gemm.takes_weights(grad, rows, out[:1].expand(3, -1, -1))
    apart = torch.zeros(3 * 6160).as_strided((3, 96, 64), (6160, 64, 1))
    assert not gemm.takes_weights(grad, rows, apart), "experts that are no whole number of rows apart"
    assert not gemm.takes_weights(torch.zeros(20, 100, dtype=BF16)[:, :96], rows, out), "row stride"
    assert not tensor_cores.multiply_weights(grad, rows, torch.zeros(3, dtype=torch.int64), out, add=True), "on the CPU"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_on_a_gpu_agree_with_float64_and_do_not_depend_on_other_experts(add: bool, transposed: bool) -> None:
    reason = tensor_cores.failure(torch.cuda.current_device(), "weights_added" if add else "weights")
    assert tensor_cores.FAILED not in reason, reason
    if reason:
        pytest.skip(reason)
    counts = [0, 1, 63, 64, 65, 129, 0, 500, 17]
    counts_E, faulty = torch.tensor(counts, device="cuda"), 3
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def product(grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, before_END: Tensor) -> Tensor:
        out_END = before_END.transpose(1, 2).contiguous().transpose(1, 2) if transposed else before_END.clone()
        assert tensor_cores.multiply_weights(grad_RN, rows_RD, counts_E, out_END, add=add)
        return out_END

    for columns, inner in ((8, 40), (320, 328), (1000, 520)):
        grad_RN, rows_RD = random(sum(counts) + 9, columns).to(BF16), random(sum(counts) + 9, inner).to(BF16)
        ends = torch.tensor(counts).cumsum(0).tolist()
        beyond, fault = slice(ends[-1], None), slice(ends[faulty - 1], ends[faulty])
        grad_RN[beyond] = grad_RN[fault] = float("inf")
        rows_RD[beyond] = rows_RD[fault] = float("nan")
        before_END = random(len(counts), columns, inner).to(torch.float32 if add else BF16)
        out_END = product(grad_RN, rows_RD, counts_E, before_END)
        for e, (count, end) in enumerate(zip(counts, ends, strict=True)):
            grad, rows = grad_RN[end - count : end], rows_RD[end - count : end]
            if e == faulty:
                assert out_END[e].isnan().all()
                continue
            exact = grad.double().T @ rows.double() + (before_END[e].double() if add else 0)
            size = grad.double().abs().T @ rows.double().abs() * 2.0**-20
            error = (out_END[e].double() - exact).abs()
            assert (error <= exact.abs() * 2.0 ** (-22 if add else -8) + size).all(), (e, columns, inner)
            assert torch.equal(out_END[e], product(grad, rows, counts_E[e : e + 1], before_END[e : e + 1])[0])
