"""A call of experts over ``local`` on a GPU for which the CPU never waits: the row counts stay on the device.

    ids ──places, counts──▶ copies of x_TD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD ──weighted sum──▶ y_TD

Buffers have a row for each of the T * K slots. The kernels read the counts on the device and do not touch the rows
beyond them. One autograd function does all of it. It saves x_TD, h_RG and the places; backward copies the rows again:

    grad_TD ──copies──▶ grad_RD ──w2──▶ grad_act ──activation, times weights──▶ grad_h, act, grad_TK
    grad_RD, act ──▶ grad_w2      grad_h ──w13──▶ grad_rows ──sum──▶ grad_x      grad_h, copies of x_TD ──▶ grad_w13

In fp16, backward multiplies by the routing weights first (``expert_call.sends_weights``), and out_RD is saved for their
gradients.

Invalid expert ids are reported in pinned memory (``InvalidIds``): results are NaN, and the next call raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.comm.header import check
from moe_comm.dispatch.backends.local import InvalidIds, LocalDispatcher
from moe_comm.dispatch.expert_call import ExpertCall, sends_weights
from moe_comm.dispatch.operation import dispatch_fault
from moe_comm.dispatch.types import DeviceCounts
from moe_comm.dispatch.wire_dtype import UNCHANGED
from moe_comm.gpu.gemm import TakenRows
from moe_comm.kernels import expert_mlp_gpu, tensor_cores
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.autograd import (
    needed_gradients,
    needs_autograd,
    once_differentiable,
    parameters_among,
    with_main_grads,
)
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.native import TRITON_DEVICES, for_triton
from moe_comm.kernels.row_weights import RowWeights
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

if TYPE_CHECKING:
    from moe_comm.kernels.triton.program import Program


def device_counts(counts: Tensor, invalid: InvalidIds) -> DeviceCounts:
    """Return the counts [E + 2] of ``place``: rows of each expert, dropped and invalid slots."""
    return DeviceCounts(counts[:-2], invalid.check, lambda: int(counts[-2]))


@dataclass(slots=True, eq=False)
class DeviceHandle:
    """What a layer reads of ``DispatchHandle``."""

    num_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    rows_per_expert: DeviceCounts
    label: str


@dataclass(frozen=True, eq=False)
class _Rows:
    """The places of a call's rows. place_TK: of each slot. counts: [E + 2] rows of each expert, dropped and invalid
    slots. order: [T * K] slot of each row, if a kernel reads it."""

    place_TK: Tensor
    counts: Tensor
    order: Tensor | None


@lru_cache(maxsize=1)
def _programs() -> tuple[Program, Program, Program, Program]:
    """Return the programs of the functions below."""
    from moe_comm.kernels.triton.program import Program  # needs Triton

    return Program(place), Program(forward_of_experts), Program(sum_of_slots), Program(backward_of_experts)


def place(ids_TK: Tensor, fault: Tensor, num_experts: int, ordered: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the place of each slot, the counts (``DeviceCounts``), and the slot of each row if ``ordered``.

    Invalid ids are reported in ``fault``.
    """
    from moe_comm.kernels.triton.slot_order import place_slots  # needs Triton

    return place_slots(ids_TK, num_experts, fault, ordered=ordered)


def _copies(x_TD: Tensor, place_TK: Tensor, out_RD: Tensor | None = None) -> Tensor:
    from moe_comm.kernels.triton.rows import copy_rows  # needs Triton

    return copy_rows(x_TD, place_TK, place_TK.numel(), out_RD)


def forward_of_experts(
    x_TD: Tensor, place_TK: Tensor, counts: Tensor, order: Tensor | None, w13: Tensor, w2: Tensor, b13: Tensor | None,
    b2: Tensor | None, activation: Activation,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return h_RG and out_RD."""
    out_RD = x_TD.new_empty(place_TK.numel(), x_TD.shape[1])
    mlp = ExpertMLP((w13, w2, b13, b2), activation)
    if order is not None and b13 is None and b2 is None:
        taken = TakenRows(x_TD, order, place_TK.shape[1])
        h_RG = expert_mlp_gpu.forward_taken(mlp, taken, counts[:-2], out_RD)
        if h_RG is not None:
            return h_RG, out_RD
    rows_RD = _copies(x_TD, place_TK)
    return expert_mlp_gpu.forward(mlp, rows_RD, counts[:-2], out_RD), out_RD


def sum_of_slots(rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> tuple[Tensor]:
    """Return the weighted sum of the rows of each token, or the sum for None."""
    from moe_comm.kernels.triton.rows import weighted_sum  # needs Triton

    return (weighted_sum(rows_RD, place_TK, weights_TK),)


def backward_of_experts(
    grad_TD: Tensor, place_TK: Tensor, counts: Tensor, order: Tensor | None, weights_TK: Tensor, x_TD: Tensor,
    w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None, h_RG: Tensor | None, out_RD: Tensor | None,
    activation: Activation, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, the weights, w13, w2, b13 and b2. needs: whether these need theirs."""
    needs_x, needs_weights, *needs_experts = needs
    mlp, weights = ExpertMLP((w13, w2, b13, b2), activation), None
    if sends_weights(x_TD.dtype):
        grad_RD = _copies(grad_TD, place_TK)
        grad_TK = torch.empty_like(weights_TK) if needs_weights else None
        weights = RowWeights(weights_TK, place_TK, grad_TK, order)
    else:
        from moe_comm.kernels.triton.rows import spread  # needs Triton

        grad_RD, grad_TK = spread(grad_TD, place_TK, weights_TK, place_TK.numel(), out_RD)
    moves = partial(_copies, x_TD, place_TK), lambda grad_rows_RD: sum_of_slots(grad_rows_RD, place_TK, None)[0]
    grad_x_TD, grads = expert_mlp_gpu.backward_in_one_buffer(
        mlp, h_RG, grad_RD, counts[:-2], (needs_x, *needs_experts), moves, weights
    )
    return grad_x_TD, grad_TK, *grads


def launches_of_backward(late: bool, recomputes: bool, needs: tuple[bool, ...], biased: bool) -> int:
    """Return the number of operators of ``backward_of_experts``, which describes ``needs``. late: ``sends_weights``.
    biased: whether the experts have output biases."""
    needs_x, needs_weights, needs_w13, needs_w2, needs_b13, needs_b2 = needs
    weighted = 3 if late else 1  # the activation; the weight of each row, and their product
    activation = 2 if needs_x or needs_w13 or needs_b13 or (late and needs_weights) else weighted * needs_w2
    of_biases = needs_b13 + needs_b2 + late * (needs_b2 + (biased and needs_weights))  # b2: weights and dot products
    return 1 + 2 * recomputes + activation + 2 * needs_x + 2 * needs_w13 + needs_w2 + of_biases


@dataclass(frozen=True, eq=False)
class _Saved:
    """What backward needs besides tensors."""

    activation: Activation
    rows: _Rows
    invalid: InvalidIds
    label: str


class _DeviceExperts(torch.autograd.Function):
    """The weighted sum of the experts' outputs; backward is that of dispatch, experts and combine."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        w13_EGD: Tensor,
        w2_EDF: Tensor,
        b13_EG: Tensor | None,
        b2_ED: Tensor | None,
        call: _Saved,
        h_RG: Tensor | None,
        out_RD: Tensor,
    ) -> Tensor:
        rows = call.rows
        kept_RD = out_RD if ctx.needs_input_grad[1] and not sends_weights(x_TD.dtype) else None
        ctx.save_for_backward(x_TD, weights_TK, w13_EGD, w2_EDF, b13_EG, b2_ED, h_RG, kept_RD)
        ctx.call, ctx.parameters = call, parameters_among(w13_EGD, w2_EDF)
        (y_TD,) = _programs()[2](1, (out_RD, rows.place_TK, weights_TK.contiguous()))
        return y_TD  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        call: _Saved = ctx.call
        rows, activation = call.rows, call.activation
        call.invalid.check()
        x_TD, weights_TK, w13, w2, b13, b2, h_RG, out_RD = ctx.saved_tensors
        w13, w2 = with_main_grads((w13, w2), ctx.parameters)
        needs = _, needs_weights, needs_w13, needs_w2, _, _ = needed_gradients(ctx)[:6]
        out_RD = out_RD if needs_weights else None
        inputs = (
            dense(grad_TD), rows.place_TK, rows.counts, rows.order, weights_TK.contiguous(), dense(x_TD), w13, w2,
            b13, b2, h_RG, out_RD,
        )  # fmt: skip
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=call.label):
            if (needs_w13 and hasattr(w13, "main_grad")) or (needs_w2 and hasattr(w2, "main_grad")):
                return *backward_of_experts(*inputs, activation, needs), None, None, None
            number = launches_of_backward(sends_weights(x_TD.dtype), h_RG is None, needs, b2 is not None)
            return *_programs()[3](number, inputs, activation, needs), None, None, None


class DeviceCall(ExpertCall):
    """The call of ``device_call``. ``rows`` are the tokens, which hooks must not replace."""

    def __init__(
        self, dispatcher: LocalDispatcher, x_TD: Tensor, weights_TK: Tensor, rows: _Rows, handle: DeviceHandle
    ) -> None:
        self._dispatcher, self._invalid = dispatcher, dispatcher.invalid_ids(x_TD.device)
        self.rows, self._weights_TK, self._placed = x_TD, weights_TK, rows
        self.handle = handle  # type: ignore[assignment]
        self._mlp: ExpertMLP | None = None
        self._h_RG: Tensor | None = None

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        mlp.check_weights(rows)
        x_TD, placed = self.rows, self._placed
        recording = needs_autograd(x_TD, self._weights_TK, *mlp.tensors)
        with torch.no_grad():
            inputs = dense(x_TD), placed.place_TK, placed.counts, placed.order, *mlp.tensors
            h_RG, out_RD = _programs()[1](4, inputs, mlp.activation)
        self._h_RG = h_RG if recording and not mlp.recompute else None
        self._mlp = mlp if recording else None
        return out_RD  # type: ignore[no-any-return]

    def combine(self, rows: Tensor) -> Tensor:
        mlp, h_RG, placed, weights_TK = self._mlp, self._h_RG, self._placed, self._weights_TK
        self._mlp = self._h_RG = None
        if weights_TK.dtype is not torch.float32:
            weights_TK = weights_TK.to(torch.float32)
        with EVENTS.span(Kind.COMPUTE, "combine", layer=self.handle.label):
            if mlp is None:
                (y_TD,) = _programs()[2](1, (rows, placed.place_TK, weights_TK.contiguous()))
                return y_TD  # type: ignore[no-any-return]
            saved = _Saved(mlp.activation, placed, self._invalid, self.handle.label)
            of_outputs = needs_autograd(weights_TK) and not sends_weights(rows.dtype)
            self.saved_bytes = (0 if h_RG is None else h_RG.nbytes) + of_outputs * rows.nbytes
            return _DeviceExperts.apply(self.rows, weights_TK, *mlp.tensors, saved, h_RG, rows)  # type: ignore[no-any-return]


def device_call(
    dispatcher: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, label: str = ""
) -> DeviceCall | None:
    """Start a call of 16-bit experts, or return None if the dispatcher or the tokens need another one.

    Raises:
        InputError, RoutingError: invalid arguments, or invalid ids in an earlier call.
    """
    if not isinstance(dispatcher, LocalDispatcher) or x_TD.device.type not in TRITON_DEVICES:
        return None
    options = dispatcher.options
    if options.checksums or options.wire_dtypes != UNCHANGED or "_send_with" in vars(dispatcher):
        return None
    if x_TD.dtype not in expert_mlp_gpu.DTYPES or not for_triton(x_TD, ids_TK, weights_TK):
        return None
    if ids_TK.dim() != 2 or weights_TK.shape != ids_TK.shape or not weights_TK.is_floating_point():
        return None
    if dispatch_fault(x_TD, ids_TK, None) is not None or not ids_TK.numel():
        return None
    operation = dispatcher.dispatch_operation(x_TD, ids_TK, label)
    invalid = dispatcher.invalid_ids(x_TD.device)
    invalid.check()
    (tokens, hidden), experts = x_TD.shape, dispatcher.num_experts
    with operation:
        check([], 0, operation)
        inputs = ids_TK.contiguous(), invalid.report(ids_TK.shape[1], experts)
        place_TK, counts, order = _programs()[0](2, inputs, experts, tensor_cores.takes_slots(x_TD))
    rows = device_counts(counts, invalid)
    handle = DeviceHandle(tokens, ids_TK.shape[1], hidden, x_TD.dtype, x_TD.device, rows, operation.label)
    return DeviceCall(dispatcher, x_TD, weights_TK, _Rows(place_TK, counts, order), handle)


def dense(rows_TD: Tensor) -> Tensor:
    """Return rows with unit stride."""
    return rows_TD if rows_TD.stride(1) == 1 else rows_TD.contiguous()
