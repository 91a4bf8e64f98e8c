"""Dispatch arrays of CuPy, compute the experts with a kernel of CuPy, and combine; no tensor of torch is needed.

    python examples/cupy_arrays.py

Without a GPU or CuPy the script does the same with NumPy, without the kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_comm import make_dispatcher

TOKENS, HIDDEN, EXPERTS, TOP_K = 6, 8, 4, 2

SQUARE = r"""
extern "C" __global__ void square(float* rows, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) rows[i] *= rows[i];
}
"""


def load_arrays() -> Any:
    """Return the module ``cupy``, or ``numpy`` if there is no GPU or no CuPy."""
    if torch.cuda.is_available():
        try:
            import cupy

            return cupy
        except ImportError:
            pass
    import numpy

    return numpy


def square(arrays: Any, rows_RD: Any) -> None:
    """Square the rows in place."""
    if arrays.__name__ == "cupy":
        kernel = arrays.RawModule(code=SQUARE).get_function("square")
        kernel((-(-rows_RD.size // 256),), (256,), (rows_RD, rows_RD.size))
    else:
        rows_RD *= rows_RD


def main() -> None:
    """Run the example."""
    arrays = load_arrays()
    x_TD = arrays.arange(TOKENS * HIDDEN, dtype=arrays.float32).reshape(TOKENS, HIDDEN)
    ids_TK = (arrays.arange(TOKENS)[:, None] + arrays.arange(TOP_K)[None, :]) % EXPERTS
    weights_TK = arrays.full((TOKENS, TOP_K), 1 / TOP_K, dtype=arrays.float32)

    dispatcher = make_dispatcher(EXPERTS, device="cuda" if arrays.__name__ == "cupy" else "cpu")
    dispatched = dispatcher.dispatch(x_TD, ids_TK)
    rows_RD = arrays.from_dlpack(dispatched.rows_RD)  # shares the memory
    square(arrays, rows_RD)
    y_TD = arrays.from_dlpack(dispatcher.combine(rows_RD, weights_TK, dispatched.handle))

    assert bool((y_TD == x_TD * x_TD).all())
    print(f"{arrays.__name__}: {rows_RD.shape[0]} rows for {EXPERTS} experts, output {tuple(y_TD.shape)} as expected")


if __name__ == "__main__":
    main()
