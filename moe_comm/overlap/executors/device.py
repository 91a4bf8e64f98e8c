"""The device executor: Triton kernels that move the rows and multiply them (``triton/experts.py``).

``dispatch_matmul`` and ``matmul_combine`` run as kernels where that is asked for, or was measured to be faster. A whole
layer is the two with the activation between them:

    x_TD ──dispatch_matmul, w13──▶ h_RG ──activation──▶ act_RF ──matmul_combine, w2──▶ y_TD

One dispatch and its combine go the same way in all four passes, for the rows of one lie where the other finds them. So
"auto" compares the sum of what was measured of ``dispatch_matmul`` forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import ConfigError, MissingDependency, MoeCommError
from moe_comm.kernels.activations import SwiGLU
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.swiglu import swiglu
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.options import CHUNKED, TRITON, Overlap
from moe_comm.overlap.store import Choice
from moe_comm.overlap.tuning import choose, on_gpus


def fused_fault(dispatcher: Dispatcher, x_TD: Tensor, overlap: Overlap) -> MoeCommError | None:
    """Why the kernels cannot run though they are asked for. Other dispatchers are refused where they are told apart."""
    if overlap.backend != TRITON or not isinstance(dispatcher, AllToAllDispatcher):
        return None
    return _fault(dispatcher, x_TD.dtype, x_TD.device)


def _fault(dispatcher: Dispatcher, dtype: torch.dtype, device: torch.device) -> MoeCommError | None:
    try:
        from moe_comm.overlap.triton.experts import kernels_fault  # needs Triton
    except MissingDependency as error:
        return error
    return kernels_fault(dispatcher, dtype, device)


def fused_choice(dispatch: ChunkedDispatch, operator: str, width: int) -> Choice | None:
    """How ``operator`` runs as a kernel; None: it does not. Alike on every rank, and the first call for a shape is
    collective with chunks "auto"."""
    overlap, handle, dispatcher = dispatch.overlap, dispatch.handle, dispatch.dispatcher
    asked = overlap.backend == TRITON
    if asked and (overlap.programs or not isinstance(overlap.chunks, str)):
        return Choice(TRITON, programs=overlap.programs or 0)
    if not asked and (overlap.backend != "auto" or not isinstance(overlap.chunks, str) or not on_gpus(handle.device)):
        return None
    if not asked and _fault(dispatcher, handle.dtype, handle.device) is not None:
        return None
    backends = (TRITON,) if dispatch.fused is not None or asked else (CHUNKED, TRITON)
    choice = choose(dispatch.works(operator, width), dispatcher.channel, handle.device, backends)
    return choice if choice.backend == TRITON else None


def fused_dispatch(
    dispatch: ChunkedDispatch, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, choice: Choice
) -> tuple[Tensor, ChunkedDispatch]:
    """``dispatch_matmul`` by a kernel, of what was agreed on; and what ``fused_combine`` needs."""
    from moe_comm.overlap.triton.experts import dispatched, opened  # needs Triton

    fused = opened(dispatch.dispatcher, dispatch.handle, ids_TK, choice.programs or None)
    return dispatched(fused, x_TD, w_EGD), replace(dispatch, fused=fused)


def fused_combine(dispatch: ChunkedDispatch, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor) -> Tensor:
    """``matmul_combine`` by a kernel."""
    from moe_comm.overlap.triton.experts import matmul_combine  # needs Triton

    assert dispatch.fused is not None
    choice = fused_choice(dispatch, "matmul_combine", rows_RF.shape[1])
    programs = choice.programs or None if choice is not None else None
    return matmul_combine(rows_RF, w_EDF, weights_TK, dispatch.fused.with_programs(programs))


def device_fault(dispatcher: Dispatcher, x_TD: Tensor) -> MoeCommError | None:
    """Why a whole layer cannot run by the kernels."""
    if type(dispatcher) is not AllToAllDispatcher:
        return ConfigError(f"the device executor needs the dispatcher all_to_all; this is {dispatcher.name}")
    return _fault(dispatcher, x_TD.dtype, x_TD.device)


class DeviceCall(ExpertCall):
    """One call of a whole layer of experts without biases. ``rows`` is [T, D] the tokens: the kernels dispatch them."""

    def __init__(self, dispatch: ChunkedDispatch, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        from moe_comm.overlap.triton.experts import opened  # needs Triton

        programs = dispatch.overlap.programs
        self._dispatch, self._weights_TK, self.rows = dispatch, weights_TK, x_TD
        self._passage = opened(dispatch.dispatcher, dispatch.handle, ids_TK, programs)
        self._w2_EDF: Tensor | None = None

    @property
    def handle(self) -> DispatchHandle:
        return self._dispatch.handle

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """[R, F] the activations; ``combine`` multiplies them by the last weights.

        Raises:
            ConfigError: the experts have biases.
        """
        from moe_comm.overlap.triton.experts import dispatched  # needs Triton

        w13_EGD, self._w2_EDF, b13_EG, b2_ED = mlp.tensors
        assert w13_EGD is not None
        if b13_EG is not None or b2_ED is not None:
            raise ConfigError("the device executor runs experts without biases; use Overlap(executor='pipelined')")
        mlp.check_weights(rows)
        h_RG = dispatched(self._passage, rows, w13_EGD)
        return swiglu(h_RG) if isinstance(mlp.activation, SwiGLU) else mlp.activation.fn(h_RG)

    def combine(self, rows: Tensor) -> Tensor:
        from moe_comm.overlap.triton.experts import matmul_combine  # needs Triton

        assert self._w2_EDF is not None
        return matmul_combine(rows, self._w2_EDF, self._weights_TK, self._passage)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return self._dispatch.dispatcher.abort_on_error(self.handle.label)
