"""The device executor: fused Triton kernels that move the rows and multiply them (``triton/experts.py``).

``dispatch_matmul`` and ``matmul_combine`` run as kernels if requested, or if measured to be faster. A whole layer is
both, with the activation in between:

    x_TD ──dispatch_matmul, w13──▶ h_RG ──activation──▶ act_RF ──matmul_combine, w2──▶ y_TD

A dispatch and its combine use the same backend in all four passes, because combine reads the rows where dispatch wrote
them. So "auto" compares the sum of the measured times of ``dispatch_matmul`` forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.peer_to_peer.primitives import PeerToPeerPrimitives
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import ConfigError, MissingDependency, MoeCommError
from moe_comm.kernels.activations import SwiGLU
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.swiglu import swiglu
from moe_comm.overlap.executors.base import ExpertCall, check_device_experts
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.executors.device_rows import peer_fault
from moe_comm.overlap.options import CHUNKED, TRITON, Overlap
from moe_comm.overlap.tuning.choose import choose, on_gpus
from moe_comm.overlap.tuning.store import OverlapChoice


def fused_fault(dispatcher: Dispatcher, x_TD: Tensor, overlap: Overlap) -> MoeCommError | None:
    """Return the error if kernels are requested and cannot run over ``all_to_all``. Other dispatchers are
    checked elsewhere."""
    if overlap.backend != TRITON or not isinstance(dispatcher, AllToAllDispatcher):
        return None
    return _fault(dispatcher, x_TD.dtype, x_TD.device)


def _fault(dispatcher: Dispatcher, dtype: torch.dtype, device: torch.device) -> MoeCommError | None:
    try:
        fault: MoeCommError | None = _kernels().kernels_fault(dispatcher, dtype, device)
    except MissingDependency as error:
        return error
    return fault


def _kernels() -> ModuleType:
    from moe_comm.overlap.triton import experts  # needs Triton

    return experts


def fused_choice(dispatch: ChunkedDispatch, operator: str, width: int) -> OverlapChoice | None:
    """Return how ``operator`` runs as a kernel, or None if it does not; the same on every rank.

    With chunks "auto", the first call for a shape is collective.
    """
    overlap, handle, dispatcher = dispatch.overlap, dispatch.handle, dispatch.dispatcher
    requested = overlap.backend == TRITON
    if requested and (overlap.programs or not isinstance(overlap.chunks, str)):
        return OverlapChoice(TRITON, programs=overlap.programs or 0)
    if not requested and (
        overlap.backend != "auto" or not isinstance(overlap.chunks, str) or not on_gpus(handle.device)
    ):
        return None
    if not requested and _fault(dispatcher, handle.dtype, handle.device) is not None:
        return None
    backends = (TRITON,) if dispatch.fused is not None or requested else (CHUNKED, TRITON)
    choice = choose(dispatch.works(operator, width), dispatcher.channel, handle.device, backends)
    return choice if choice.backend == TRITON else None


def fused_dispatch(
    dispatch: ChunkedDispatch, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, choice: OverlapChoice
) -> tuple[Tensor, ChunkedDispatch]:
    """Run ``dispatch_matmul`` as a kernel. Returns its result, and the dispatch for ``fused_combine``."""
    kernels = _kernels()
    fused = kernels.open_dispatch(dispatch.dispatcher, dispatch.handle, ids_TK, choice.programs or None)
    return kernels.multiply_dispatched(fused, x_TD, w_EGD), replace(dispatch, fused=fused)


def fused_combine(dispatch: ChunkedDispatch, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor) -> Tensor:
    """Run ``matmul_combine`` as a kernel."""
    assert dispatch.fused is not None
    choice = fused_choice(dispatch, "matmul_combine", rows_RF.shape[1])
    programs = choice.programs or None if choice is not None else None
    y_TD: Tensor = _kernels().matmul_combine(rows_RF, w_EDF, weights_TK, dispatch.fused.with_programs(programs))
    return y_TD


def device_fault(dispatcher: Dispatcher, x_TD: Tensor) -> MoeCommError | None:
    """Return the error if the kernels cannot run a whole layer, else None."""
    if isinstance(dispatcher, PeerToPeerPrimitives):
        return peer_fault(dispatcher, x_TD)
    if type(dispatcher) is not AllToAllDispatcher:
        return ConfigError(
            f"the device executor needs the dispatcher peer_to_peer or all_to_all; got {dispatcher.name}"
        )
    return _fault(dispatcher, x_TD.dtype, x_TD.device)


class DeviceCall(ExpertCall):
    """One call of a whole layer of experts without biases. ``rows`` is [T, D], the tokens: the kernels dispatch
    them."""

    combine_multiplies = True

    def __init__(self, dispatch: ChunkedDispatch, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        programs = dispatch.overlap.programs
        self._dispatch, self._weights_TK, self.rows = dispatch, weights_TK, x_TD
        self._fused = _kernels().open_dispatch(dispatch.dispatcher, dispatch.handle, ids_TK, programs)
        self._w2_EDF: Tensor | None = None

    @property
    def handle(self) -> DispatchHandle:
        return self._dispatch.handle

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """Return [R, F], the activations. ``combine`` multiplies them by the last weights.

        Raises:
            ConfigError: the experts have biases, or fp8 GEMMs.
        """
        w13_EGD, self._w2_EDF, *_ = mlp.tensors
        assert w13_EGD is not None
        check_device_experts(mlp)
        mlp.check_weights(rows)
        h_RG: Tensor = _kernels().multiply_dispatched(self._fused, rows, w13_EGD)
        return swiglu(h_RG) if isinstance(mlp.activation, SwiGLU) else mlp.activation.fn(h_RG)

    def combine(self, rows: Tensor) -> Tensor:
        assert self._w2_EDF is not None
        y_TD: Tensor = _kernels().matmul_combine(rows, self._w2_EDF, self._weights_TK, self._fused)
        return y_TD

    def abort_on_error(self) -> AbstractContextManager[None]:
        return self._dispatch.dispatcher.abort_on_error(self.handle.label)
