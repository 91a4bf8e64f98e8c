"""A call of experts over ``local`` on a GPU for which the CPU never waits: the row counts stay on the device.

    ids ──places, counts──▶ copies of x_TD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD ──weighted sum──▶ y_TD

Buffers have a row for each of the T * K slots. The kernels read the counts on the device and do not touch the rows
beyond them. One autograd function does all of it. It saves x_TD, h_RG, the places, and out_RD for the gradients of the
routing weights; backward copies the rows again.

Invalid expert ids are reported in pinned memory (``InvalidIds``): results are NaN, and the next call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from moe_comm.comm.header import check
from moe_comm.dispatch.backends.local import InvalidIds, LocalDispatcher
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.operation import dispatch_fault
from moe_comm.dispatch.wire_dtype import UNCHANGED
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.autograd import needed_gradients, needs_autograd, once_differentiable
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.native import TRITON_DEVICES, for_triton
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS


class DeviceCounts(Sequence[int]):
    """Row counts of experts, which are copied from the device when they are read."""

    def __init__(self, counts: Tensor, check: Callable[[], None]) -> None:
        self._counts, self._check = counts, check
        self._known: list[int] | None = None

    def __len__(self) -> int:
        return self._counts.shape[0] - 2

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._read()[:-2][index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read()[:-2])

    @property
    def dropped(self) -> int:
        """Number of dropped slots."""
        return self._read()[-2]

    def _read(self) -> list[int]:
        if self._known is None:
            self._known = self._counts.tolist()
            self._check()
        return self._known


@dataclass(slots=True, eq=False)
class DeviceHandle:
    """What a layer reads of ``DispatchHandle``. Reading ``num_rows`` or ``num_dropped`` waits for the device."""

    num_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    rows_per_expert: DeviceCounts
    label: str

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(self.rows_per_expert)

    @property
    def num_dropped(self) -> int:
        """Number of slots with id -1."""
        return self.rows_per_expert.dropped


@dataclass(frozen=True, eq=False)
class _Rows:
    """The places of a call's rows. place_TK: of each slot. counts_E: rows of each expert. slots: rows of a buffer."""

    place_TK: Tensor
    counts_E: Tensor
    slots: int

    def copies(self, x_TD: Tensor) -> Tensor:
        """Return the rows, from tokens with dense rows."""
        from moe_comm.kernels.triton.take_rows import copy_rows  # needs Triton

        return copy_rows(x_TD, self.place_TK, self.slots)

    def sum(self, rows_RD: Tensor, weights_TK: Tensor | None) -> Tensor:
        """Return the weighted sum of each token's rows."""
        from moe_comm.kernels.triton.weighted_sum import weighted_sum  # needs Triton

        return weighted_sum(rows_RD, self.place_TK, weights_TK)


@dataclass(frozen=True, eq=False)
class _Saved:
    """What backward needs besides tensors."""

    mlp: ExpertMLP
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
        call: _Saved,
        h_RG: Tensor | None,
        out_RD: Tensor,
    ) -> Tensor:
        rows = call.rows
        kept_RD = out_RD if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(x_TD, weights_TK, w13_EGD, w2_EDF, h_RG, kept_RD)
        ctx.call = call
        return rows.sum(out_RD, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        from moe_comm.kernels.triton.scale_rows import spread  # needs Triton

        call: _Saved = ctx.call
        rows = call.rows
        call.invalid.check()
        x_TD, weights_TK, w13_EGD, w2_EDF, h_RG, out_RD = ctx.saved_tensors
        needs_x, needs_weights, *needs = needed_gradients(ctx)[:4]
        partner_RD = out_RD if needs_weights else None
        with EVENTS.span(Kind.COMPUTE, "combine backward", layer=call.label):
            grad_RD, grad_TK = spread(_dense(grad_TD), rows.place_TK, weights_TK, rows.slots, partner_RD)
        del out_RD, partner_RD
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=call.label):
            # Without gradients of w13, backward reads only the size of the rows.
            rows_RD = rows.copies(_dense(x_TD)) if needs[0] or h_RG is None else grad_RD
            grad_rows_RD = torch.empty_like(rows_RD) if needs_x else None
            mlp = call.mlp.with_tensors((w13_EGD, w2_EDF, None, None))
            grads = expert_mlp_gpu.backward(mlp, rows_RD, h_RG, grad_RD, rows.counts_E, grad_rows_RD, needs)
        grad_x_TD = None
        if grad_rows_RD is not None:
            with EVENTS.span(Kind.COMPUTE, "dispatch backward", layer=call.label):
                grad_x_TD = rows.sum(grad_rows_RD, None)
        return grad_x_TD, grad_TK, *grads, None, None, None


class DeviceCall(ExpertCall):
    """The call of ``device_call``. ``rows`` are the tokens, which hooks must not replace."""

    skips_empty_slots = False

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
        w13, w2, _, _ = mlp.tensors
        recording = needs_autograd(x_TD, self._weights_TK, w13, w2)
        with torch.no_grad():
            rows_RD = placed.copies(_dense(x_TD))
            out_RD = torch.empty_like(rows_RD)
            h_RG = expert_mlp_gpu.forward(mlp, rows_RD, placed.counts_E, out_RD)
        self._h_RG = h_RG if recording and not mlp.recompute else None
        self._mlp = mlp if recording else None
        return out_RD

    def combine(self, rows: Tensor) -> Tensor:
        mlp, h_RG, placed, weights_TK = self._mlp, self._h_RG, self._placed, self._weights_TK
        self._mlp = self._h_RG = None
        if weights_TK.dtype is not torch.float32:
            weights_TK = weights_TK.to(torch.float32)
        with EVENTS.span(Kind.COMPUTE, "combine", layer=self.handle.label):
            if mlp is None:
                return placed.sum(rows, weights_TK)
            w13, w2, _, _ = mlp.tensors
            saved = _Saved(mlp.with_tensors(), placed, self._invalid, self.handle.label)
            self.saved_bytes = (0 if h_RG is None else h_RG.nbytes) + needs_autograd(weights_TK) * rows.nbytes
            return _DeviceExperts.apply(self.rows, weights_TK, w13, w2, saved, h_RG, rows)  # type: ignore[no-any-return]


def device_call(
    dispatcher: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, label: str = ""
) -> DeviceCall | None:
    """Start a call of 16-bit experts without biases, or return None if the dispatcher or the tokens need another one.

    Raises:
        InputError, RoutingError: invalid arguments, or invalid ids in an earlier call.
    """
    if not isinstance(dispatcher, LocalDispatcher) or x_TD.device.type not in TRITON_DEVICES:
        return None
    options = dispatcher.options
    if options.checksums or options.wire_dtypes != UNCHANGED or "_send" in vars(dispatcher):
        return None
    if x_TD.dtype not in expert_mlp_gpu.DTYPES or not for_triton(x_TD, ids_TK, weights_TK):
        return None
    if ids_TK.dim() != 2 or weights_TK.shape != ids_TK.shape or not weights_TK.is_floating_point():
        return None
    if dispatch_fault(x_TD, ids_TK, None) is not None or not ids_TK.numel():
        return None
    operation = dispatcher.dispatch_operation(x_TD, ids_TK, label)
    from moe_comm.kernels.triton.slot_order import place_slots  # needs Triton

    invalid = dispatcher.invalid_ids(x_TD.device)
    invalid.check()
    (tokens, hidden), experts = x_TD.shape, dispatcher.num_experts
    with operation:
        check([], 0, operation)
        place_TK, counts = place_slots(ids_TK, experts, invalid.report(ids_TK.shape[1], experts))
    handle = DeviceHandle(
        tokens, ids_TK.shape[1], hidden, x_TD.dtype, x_TD.device, DeviceCounts(counts, invalid.check), operation.label
    )
    return DeviceCall(dispatcher, x_TD, weights_TK, _Rows(place_TK, counts[:experts], ids_TK.numel()), handle)


def _dense(rows_TD: Tensor) -> Tensor:
    return rows_TD if rows_TD.stride(1) == 1 else rows_TD.contiguous()
