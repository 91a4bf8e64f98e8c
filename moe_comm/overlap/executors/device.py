"""The device executor: over ``peer_to_peer``, GEMMs of the experts wait for rows, and publish results, on the device.

    forward    rows ──arrived_mm, w13──▶ h ──activation──▶ act ──publish_mm, w2──▶ results, sums
    backward   gradients of the results ──arrived_mm, w2──▶ grad act ──▶ grad h ──publish_mm, w13──▶ results, sums

So the first GEMM starts while its rows are received, and sums start while the last GEMM computes, in both directions
(``device_rows.py``). Weight gradients are computed while the gradients of the rows are summed. Autograd is that of the
pipelined executor, apart from the function that runs the experts. The other kernels are those of the serial executor on
a GPU, so 16-bit experts have its bits. ``dispatch_matmul`` and ``matmul_combine`` are the two halves of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.peer_to_peer.overlapped import OverlappedPrimitives
from moe_comm.errors import ConfigError, MissingDependency, MoeCommError
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.autograd import needed_gradients, once_differentiable
from moe_comm.kernels.expert_mlp import ExpertLinear, ExpertMLP, LocalExperts
from moe_comm.kernels.row_weights import RowWeights
from moe_comm.overlap.executors.pipelined import PipelinedCall, Run, pipelined_combine, pipelined_dispatch
from moe_comm.overlap.executors.shared_rows import SharedDispatch, can_pipeline
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS


def device_fault(dispatcher: Dispatcher, x_TD: Tensor) -> MoeCommError | None:
    """Return the error if the kernels do not support ``dispatcher`` or its rows, else None."""
    if not isinstance(dispatcher, OverlappedPrimitives):
        return ConfigError(
            f"the Triton kernels of experts need the dispatcher peer_to_peer; got {dispatcher.name}. Use "
            "Overlap(executor='pipelined') or Overlap(backend='chunked') with it"
        )
    if not can_pipeline(dispatcher):
        wire_dtypes = dispatcher.options.wire_dtypes
        return ConfigError(f"overlap needs wire dtypes with scales for each row; got {wire_dtypes}")
    try:
        from moe_comm.overlap.triton.arrived_mm import rows_fault  # needs Triton
    except MissingDependency as error:
        return error
    return rows_fault(x_TD.dtype, x_TD.device)


def fp8_fault() -> ConfigError:
    """Return the error for experts with fp8 GEMMs."""
    return ConfigError(
        "the kernels of the device executor multiply rows in their own dtype, not in fp8; use executor 'serial', "
        "'pipelined' or 'auto'"
    )


class _DeviceExperts(torch.autograd.Function):
    """Run the experts, or one GEMM. Arguments and results are those of ``pipelined._Experts``."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, input_RD: Tensor | None, run: Run, settings: LocalExperts, keep_h: bool, *tensors: Any
    ) -> Tensor:
        dispatch: Any = run.forward
        send, run.send = run.send, None
        experts = settings.with_tensors(tensors)
        rows_RD = input_RD if send is None else send.rows_RD
        assert rows_RD is not None
        h_RG = out_RD = None
        try:
            b13_EG = b2_ED = None
            if isinstance(experts, ExpertMLP):
                b13_EG, b2_ED = experts.tensors[2:]
            first = _grouped(dispatch) if send is None else dispatch.multiply_arrived(send, b13_EG)
            if isinstance(experts, ExpertMLP):
                keep_h, glu = keep_h and not experts.recompute, experts.activation.glu
                both = None if send is None or glu is None else dispatch.swiglu_arrived(send, b13_EG, glu)
                h_RG, last_RF, w_last = expert_mlp_gpu.hidden(experts, rows_RD, first, both)
            else:
                last_RF, w_last = rows_RD, tensors[0]
            if run.returns:
                run.back, out_RD = dispatch.multiply_and_sum(
                    "combine", last_RF, w_last, run.wide_TK, run.requires_grad, b2_ED
                )
            else:
                out_RD = rows_RD.new_empty(rows_RD.shape[0], w_last.shape[1])
                first(rows_RD, w_last, out_RD)
        except BaseException as error:
            if send is not None:
                send.abort(error)
            raise
        keep_out = run.returns and run.needs_weights and not run.unscaled
        ctx.save_for_backward(rows_RD, h_RG if keep_h else None, out_RD if keep_out else None, *tensors)
        ctx.run, ctx.settings, ctx.received = run, settings, None
        return token.new_empty(0) if run.returns else out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=run.backward.handle.label), run.guard():
            return _backward(ctx, run, grad_RD)


def _backward(ctx: Any, run: Run, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
    needs_token, needs_rows, _, _, _, *needs = needed_gradients(ctx)
    dispatch: Any = run.backward
    send: Any = run.gradients
    run.gradients = None
    rows_RD, h_RG, results_RD, *tensors = ctx.saved_tensors
    experts, counts_E = ctx.settings.with_tensors(tensors), dispatch.tiles.counts_E
    token_grad = grad_RD.new_empty(0) if ctx.needs_input_grad[0] else None
    first, grad_rows_RD = _grouped(dispatch), None
    weights: RowWeights | None = None
    try:
        if send is not None:
            send.start(results_RD)
            grad_RD, first = send.rows_RD, dispatch.multiply_arrived(send)
            if send.weights_R is not None:
                dots_R = torch.empty_like(send.weights_R) if run.needs_weights else None
                weights = RowWeights(send.weights_R, None, dots_R)
        elif run.returns:
            # A pipeline schedule requests the gradients of the weights in a second pass. The first one has received
            # the rows.
            (grad_RD, weights), ctx.received = ctx.received, None
        dots_R = None if weights is None else weights.dots_N
        grad_RD, sums = grad_RD.contiguous(), run.needs_x and needs_token

        def last(rows: Tensor, w: Tensor) -> None:
            run.returning, _ = dispatch.multiply_and_sum("dispatch backward", rows, w)

        if isinstance(experts, ExpertMLP):
            if send is not None and not (sums or needs[0] or needs[2] or dots_R is not None):
                send.wait()
            products = first, last if sums else None
            grads = expert_mlp_gpu.backward_by(experts, rows_RD, h_RG, grad_RD, counts_E, needs, products, weights)
        else:
            from moe_comm.kernels.triton.grouped_mm import weight_grad  # needs Triton

            if needs_rows:
                grad_rows_RD = torch.empty_like(rows_RD)
                first(grad_RD, tensors[0].transpose(1, 2), grad_rows_RD)
            elif sums:
                last(grad_RD, tensors[0].transpose(1, 2))
            elif send is not None:
                send.wait()
            grads = (weight_grad(tensors[0], grad_RD, rows_RD, counts_E) if needs[0] else None, None, None, None)
        if send is not None:
            run.weights_grad = send.start_weight_gradient(dots_R)
    except BaseException as error:
        if send is not None:
            send.abort(error)
        raise
    if send is not None and any(ctx.needs_input_grad[5:]) and not any(needs):
        ctx.received = grad_RD, None if weights is None else weights._replace(dots_N=None)
    of_tensors = grads[: len(tensors)]
    return token_grad, grad_rows_RD, None, None, None, *of_tensors


def _grouped(dispatch: Any) -> expert_mlp_gpu.FirstProduct:
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into  # needs Triton

    counts_E = dispatch.tiles.counts_E
    return lambda rows, w, out: grouped_mm_into(rows, w, counts_E, out)


class DeviceCall(PipelinedCall):
    """One call of a whole layer of experts. Collective."""

    skips_empty_slots = False
    stage = _DeviceExperts

    def __init__(
        self,
        dispatcher: OverlappedPrimitives,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        overlap: Overlap,
        label: str,
    ) -> None:
        from moe_comm.overlap.executors.device_rows import DeviceDispatch  # needs Triton

        dispatch, send = DeviceDispatch.start(dispatcher, x_TD, ids_TK, overlap, label)
        super().__init__(dispatch, lambda _: send, x_TD, weights_TK)

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """As the base class."""
        if type(mlp) is not ExpertMLP or mlp.apart:
            raise ConfigError(
                "the device executor runs experts without adapters, and not those that other ranks have lent; use "
                "Overlap(executor='pipelined')"
            )
        if mlp.gemm_dtype == "fp8":
            raise fp8_fault()
        biases = [b if b is None or b.stride(1) == 1 else b.contiguous() for b in mlp.tensors[2:]]
        return super().compute(rows, rows_per_expert, mlp.with_tensors((*mlp.tensors[:2], *biases)))


def device_dispatch_matmul(
    dispatcher: OverlappedPrimitives, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, overlap: Overlap, label: str
) -> tuple[Tensor, SharedDispatch]:
    """Run ``dispatch_matmul`` with the kernels, after its checks. Returns its results."""
    from moe_comm.overlap.executors.device_rows import DeviceDispatch  # needs Triton

    dispatch, send = DeviceDispatch.start(dispatcher, x_TD, ids_TK, overlap, label)
    return pipelined_dispatch(dispatch, lambda _: send, x_TD, ExpertLinear((w_EGD,)), _DeviceExperts), dispatch


def device_matmul_combine(dispatch: SharedDispatch, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor) -> Tensor:
    """Run ``matmul_combine`` with the kernels, after its checks, for a dispatch of ``device_dispatch_matmul``."""
    return pipelined_combine(dispatch, rows_RF, ExpertLinear((w_EDF,)), weights_TK, _DeviceExperts)
