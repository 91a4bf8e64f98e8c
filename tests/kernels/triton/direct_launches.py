"""Launches kernels on a fake driver, through Triton, directly, and from records, and compares what the driver receives.

    python -m tests.kernels.triton.direct_launches FOLDER_WITH_LIBCUDA

Run in a process of its own: Triton must not interpret kernels. ``test_launch.py`` runs it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from moe_comm.gpu.record import BufferIndex, new_record
from moe_comm.kernels.triton import launch as launches
from moe_comm.kernels.triton.grouped_mm import grouped_mm_kernel, grouped_mm_tma_kernel
from moe_comm.kernels.triton.launch import DTYPES, Matrix, launch
from moe_comm.kernels.triton.router import _sizes, route_kernel
from moe_comm.kernels.triton.rows import weighted_sum_kernel
from moe_comm.layers.moe.router import RouterConfig

BYTES = {"i32": 4, "fp32": 4, "map": 16}


class Launched(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("function", "stream")),
        ("grid", ctypes.c_int64 * 3), ("block", ctypes.c_int64), ("shared", ctypes.c_int64),
        ("parameters", (ctypes.c_ubyte * 16) * 40),
    ]  # fmt: skip


class OfOneDevice(CudaDriver):
    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 70 + device
        self.get_device_capability = lambda device: (9, 0)


def received(library: ctypes.CDLL, kinds: Sequence[str]) -> list[Any]:
    """Return the last launch: its sizes, and the bytes of its parameters."""
    last = library.fake_last(0).contents
    sizes = [BYTES.get(kind, 8) for kind in kinds]
    parameters = [bytes(last.parameters[i])[:size] for i, size in enumerate(sizes)]
    return [last.function, last.stream, *last.grid, last.block, last.shared, *parameters]


def parameter_kinds(compiled: Any) -> list[str]:
    """Return the types of a kernel's parameters in the order of the driver's call."""
    kinds: list[str] = []
    for kind in compiled.src.signature.values():
        if kind.startswith("tensordesc"):
            kinds += ["map", "i32", "i32", "i64", "i64"]
        elif kind != "constexpr":
            kinds.append(kind)
    return kinds


def repeat(compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
    """Launch from a record, with half of the address of each tensor as its offset."""
    tensors = [arg.tensor if type(arg) is Matrix else arg for arg in args]
    buffers = [(i, t.data_ptr() // 2) for i, t in enumerate(tensors) if isinstance(t, torch.Tensor)]
    numbers = iter(range(len(buffers)))
    recorded: list[Any] = []
    for arg, t in zip(args, tensors, strict=True):
        if isinstance(t, torch.Tensor):
            number = BufferIndex(next(numbers))
            recorded.append(arg._replace(tensor=number) if type(arg) is Matrix else number)
        else:
            recorded.append(arg)
    record = new_record(0, buffers)
    assert compiled.add_to(record, grid, recorded) and len(record) == 1
    record.run([t.data_ptr() - t.data_ptr() // 2 if isinstance(t, torch.Tensor) else 0 for t in tensors], 70)


def main(folder: str) -> int:
    library = ctypes.CDLL(f"{folder}/libcuda.so.1")
    library.fake_last.restype = ctypes.POINTER(Launched)
    driver.set_active(OfOneDevice())
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 70 + device
    on: Any = SimpleNamespace(device=torch.device("cuda", 0))
    bf16 = torch.bfloat16

    def matrix(rows: int, width: int, block: tuple[int, int]) -> Matrix:
        return Matrix(torch.zeros(rows, width, dtype=bf16), (rows, width), (width, 1), block)

    x_TD, y_TD = torch.zeros(40, 64, dtype=bf16), torch.zeros(5, 64, dtype=bf16)
    place_TK, counts_E = torch.zeros(5, 8, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    weights_TK, logits_TE = torch.zeros(5, 8), torch.zeros(16, 8)
    rule = RouterConfig(8, 2, scale=2.5)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
    sums = {"ELEMENT": DTYPES[bf16], "WEIGHTED": True, "TOP_K": 8, "UNROLL": True, "TOKENS": 16, "COLUMNS": 64}
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (weighted_sum_kernel, (x_TD, 64, place_TK, weights_TK, y_TD, 5, 64), sums | {"enable_fp_fusion": False}),
        (weighted_sum_kernel, (x_TD, 64, place_TK, weights_TK, y_TD, 1, 64), sums),
        (weighted_sum_kernel, (x_TD[1:, 1:], 64, place_TK[:, 1:], weights_TK, y_TD, 2**33, 63), sums),
        (grouped_mm_tma_kernel, (matrix(40, 64, (64, 64)), matrix(256, 64, (64, 64)), counts_E, x_TD, 64, 4, 64, 64,
                                 y_TD, 64),
         {"ELEMENT": DTYPES[bf16], "TRANSPOSED": False, "BIASED": True, **blocks, "num_stages": 4}),
        (grouped_mm_kernel, (x_TD, 64, x_TD, 640, 64, 1, counts_E, y_TD, 64, 4, 10, 64, y_TD, 1),
         {"ELEMENT": DTYPES[bf16], "WHOLE": True, "BIASED": False, **blocks, "num_stages": 3}),
        (route_kernel, (logits_TE, 8, logits_TE, place_TK, weights_TK, weights_TK, place_TK, 16, 8, rule.scale),
         {"BLOCK_K": 2, "NUM_GROUPS": 1, "TOP_GROUPS": 1, "BLOCK_G": 1, "TOP_TWO": False, "BIASED": False,
          "SCORED": False, "COUNTED": True, **_sizes(rule)}),
    ]  # fmt: skip
    of_triton: list[Any] = []
    of = launches._Compiled.of

    def remembered(compiled: Any, *args: Any) -> Any:
        of_triton.append(compiled)
        return of(compiled, *args)

    launches._Compiled.of = remembered  # type: ignore[method-assign, assignment]
    for kernel, args, settings in cases:
        number = sum(5 if type(arg) is Matrix else not (type(arg) is int and arg == 1) for arg in args)
        library.fake_last(number)
        launch(kernel, (3, 2), on, args, **settings, num_warps=4)
        kinds = parameter_kinds(of_triton[-1])
        through_triton, known = received(library, kinds), len(of_triton)
        assert list(launches._compiled.values())[-1] is not None, kernel
        # The same class of arguments: other numbers and addresses.
        maps = library.fake_maps()
        for changed in (args, tuple(arg + 32 if type(arg) is int and arg > 1 else arg for arg in args)):
            grid = (3, 2) if changed is args else (7,)
            library.fake_last(number)
            before = library.fake_launches()
            launch(kernel, grid, on, changed, **settings, num_warps=4)
            direct = received(library, kinds)
            assert library.fake_launches() == before + 1 and len(of_triton) == known, kernel
            library.fake_last(number)
            repeat(list(launches._compiled.values())[-1], grid, changed)
            assert library.fake_launches() == before + 2 and received(library, kinds) == direct, kernel
            if changed is args:
                assert direct == through_triton, (kernel, direct, through_triton)
                continue
            with_triton = [arg.described() if type(arg) is Matrix else arg for arg in changed]
            library.fake_last(number)
            kernel[grid](*with_triton, **settings, num_warps=4)
            assert received(library, kinds) == direct, kernel
        assert direct[2:5] == [7, 1, 1] and direct[1] == 70
        assert kernel is not grouped_mm_tma_kernel or library.fake_maps() == maps + 8  # two direct, two by Triton
    print("equal", len(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
