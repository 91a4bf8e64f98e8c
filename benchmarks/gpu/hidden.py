"""Measure how much of dispatch and combine the device executor hides behind the GEMMs, with one rank.

    python -m benchmarks.gpu.hidden --results results.jsonl

Rows stay in the memory of the GPU, and few thread blocks send them, so they move about as fast as over NVLink (8
blocks of an H100) or twice as fast (16). Forward passes of the experts of one of eight ranks of DeepSeek-V3:

    s   serial: dispatch, GEMMs, combine, on the same number of blocks
    d   the device executor
    g   the GEMMs that wait for tiles, after all rows are received, on the processors that they leave to other kernels
    hidden = 1 - (d - g) / (s - g)

By token, as a control, the first tile is complete when nearly all rows are sent; only the combine can be hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.dispatchers import Case, peer_to_peer
from benchmarks.gpu.record import Work, run_part
from benchmarks.gpu.timing import Timer, random
from moe_comm.kernels import expert_mlp_gpu, native
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.options import Overlap

BUDGETS = (8, 16)
SHAPES = {"cuda": (4096, 7168, 32, 8, 2048), "cpu": (24, 32, 4, 2, 16)}
"""Tokens, hidden, experts, top-k, F."""


def measure(case: Case, ffn: int, blocks: int, by_expert: bool) -> dict[str, Any]:
    """Return the three times and the hidden share, after a comparison of both executors' bits."""
    from moe_comm.overlap.executors.device_rows import DeviceDispatch  # needs Triton

    dispatcher = peer_to_peer(case, num_blocks=blocks)
    dispatcher.send_by_expert = by_expert
    x_TD, ids_TK, weights_TK = case.inputs()
    w13_EGD = random(case.device, case.experts, 2 * ffn * case.hidden, seed=1).view(case.experts, 2 * ffn, case.hidden)
    w2_EDF = random(case.device, case.experts, case.hidden * ffn, seed=2).view(case.experts, case.hidden, ffn)
    mlp = ExpertMLP((w13_EGD, w2_EDF, None, None), activation_of("swiglu"))
    device = Overlap(executor="device", programs=blocks)

    def layer(overlap: Overlap | None) -> Tensor:
        call = dispatch_rows(dispatcher, x_TD, ids_TK, weights_TK, overlap, width=ffn)
        return call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))

    if not torch.equal(layer(device), layer(None)):
        raise AssertionError("the device executor and serial execution differ in bits")
    serial, overlapped = (case.timer.measure(partial(layer, overlap), kernels=False) for overlap in (None, device))
    dispatch, send = DeviceDispatch.start(dispatcher, x_TD, ids_TK, device, "")
    rows_RD = send.rows_RD
    multiply = dispatch.multiply_arrived(send)
    out_RD = torch.empty_like(rows_RD)
    multiply(rows_RD, w13_EGD, rows_RD.new_empty(rows_RD.shape[0], 2 * ffn))

    def gemms() -> None:
        arrived: Callable[[Tensor, Tensor, Tensor], None] = partial(_arrived, dispatch)
        _, act_RF, _ = expert_mlp_gpu.hidden(mlp, rows_RD, arrived)
        arrived(act_RF, w2_EDF, out_RD)

    alone = case.timer.measure(gemms, kernels=False)
    s, d, g = (times["device_us"] for times in (serial, overlapped, alone))
    hidden = 1 - (d - g) / (s - g) if s > g else float("nan")
    order = "by expert" if by_expert else "by token"
    found = {"serial_us": s, "device_us": d, "gemms_us": g, "hidden": hidden}
    return {**case.describe(), "who": f"{blocks} blocks, {order}", "what": "forward", **found}


def _arrived(dispatch: Any, rows_RD: Tensor, w_END: Tensor, out_RN: Tensor) -> None:
    """Run the GEMM that waits, for rows whose flags are raised."""
    from moe_comm.overlap.triton.arrived_mm import arrived_mm_into  # needs Triton

    arrived_mm_into(rows_RD, w_END, dispatch.tiles, dispatch.flags, out_RN)


def operations(device: str) -> Iterator[tuple[str, Work]]:
    """Yield the measurements: each budget of blocks, by expert and by token."""
    tokens, hidden, experts, top_k, ffn = SHAPES[device]
    cuda = device == "cuda"
    case = Case(Timer(device, *((3, 20) if cuda else (1, 2))), tokens, hidden, experts, top_k)
    for blocks in BUDGETS if cuda else BUDGETS[:1]:
        for by_expert in (True, False):
            name = f"hidden, {blocks} blocks, {'by expert' if by_expert else 'by token'}"
            yield name, partial(_on_device, partial(measure, case, ffn, blocks, by_expert), cuda)


def _on_device(work: Callable[[], dict[str, Any]], cuda: bool) -> dict[str, Any]:
    """Run ``work`` without gradients; on a CPU with interpreted kernels."""
    if not cuda:
        native.TRITON_DEVICES.add("cpu")
    with torch.no_grad():
        return work()


def main() -> int:
    """Run the command. Return its exit code."""
    return run_part(__doc__, "hidden", operations, limit_s=45.0)


if __name__ == "__main__":
    raise SystemExit(main())
