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

from torch import Tensor

from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.peer_to_peer.overlapped import OverlappedPrimitives
from moe_comm.errors import ConfigError, MissingDependency, MoeCommError
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.executors.pipelined import PipelinedCall
from moe_comm.overlap.executors.transport import pipelined_fault
from moe_comm.overlap.options import Overlap


def device_fault(dispatcher: Dispatcher, x_TD: Tensor) -> MoeCommError | None:
    """Return the error if the kernels do not support ``dispatcher`` or its rows, else None."""
    if not isinstance(dispatcher, OverlappedPrimitives):
        return ConfigError(
            f"the Triton kernels of experts need the dispatcher peer_to_peer; got {dispatcher.name}. Use "
            "Overlap(executor='pipelined') or Overlap(backend='chunked') with it"
        )
    if (fault := pipelined_fault(dispatcher)) is not None:
        return fault
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


class DeviceCall(PipelinedCall):
    """One call of a whole layer of experts. Collective."""

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
        super().__init__(dispatch, send, x_TD, weights_TK)

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """As the base class."""
        if type(mlp) is not ExpertMLP:
            raise ConfigError("the device executor runs experts without adapters; use Overlap(executor='pipelined')")
        if mlp.gemm_dtype == "fp8":
            raise fp8_fault()
        biases = [b if b is None or b.stride(1) == 1 else b.contiguous() for b in mlp.tensors[2:]]
        return super().compute(rows, rows_per_expert, mlp.with_tensors((*mlp.tensors[:2], *biases)))
