"""Register ``"moe_comm"`` and ``"moe_comm_fp8"`` in the two registries of transformers.

``ExpertsInterface``, selected by ``from_pretrained(..., experts_implementation="moe_comm")``, computes the experts of
one module. On one rank these are all experts. Under transformers' expert parallelism they are the local experts: ids
are local, and an id of ``num_experts`` or more refers to another rank.

``EPImplementationInterface``, selected by ``DistributedConfig(ep_size=..., ep_implementation="moe_comm")``, dispatches
tokens to the ranks of their experts. Weights are loaded directly into their shards, so no rank holds all experts.

``"moe_comm_fp8"`` does the same with the forward GEMMs of the experts in fp8. A name selects it, because trainers of
other libraries pass on names only.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.selection.factory import new_dispatcher, shared_dispatcher
from moe_comm.dispatch.types import DROPPED
from moe_comm.errors import UnsupportedModel
from moe_comm.integrations.hugging_face.compute import expert_input, expert_mlp, start_call
from moe_comm.integrations.hugging_face.families import read_layout, require_transformers
from moe_comm.kernels.autograd import without_autocast
from moe_comm.kernels.fp8 import GemmDtype, check_gemm_dtype
from moe_comm.layers.moe.expert_parallel import ExpertParallel
from moe_comm.layers.moe.formula import ExpertsLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAMES: dict[str, GemmDtype] = {"moe_comm": "same", "moe_comm_fp8": "fp8"}
"""Names in the registries, and the operands of the experts' forward GEMMs (``Experts.gemm_dtype``)."""

# Kept by module here and not as an attribute of it, because modules must stay copyable and picklable.
_local: WeakKeyDictionary[nn.Module, tuple[ExpertsLayout, ExpertParallel]] = WeakKeyDictionary()


def register() -> None:
    """Add ``NAMES`` to the registries of transformers. Repeated calls have no effect.

    Versions below 5.23 have only the first registry.

    Raises:
        MissingDependency, ConfigError: transformers is not installed, or of an unsupported version.
    """
    require_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    if all(name in ALL_EXPERTS_FUNCTIONS for name in NAMES):
        return
    for name, gemm_dtype in NAMES.items():
        ExpertsInterface.register(name, partial(experts_forward, gemm_dtype=gemm_dtype))
    with suppress(ModuleNotFoundError):
        from transformers.distributed.expert_parallel import EPImplementationInterface

        for name, gemm_dtype in NAMES.items():
            EPImplementationInterface.register(name, _ep_implementation(gemm_dtype))


@torch._disable_dynamo
def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, gemm_dtype: GemmDtype = "same"
) -> Tensor:
    """Compute the local experts of a module: sort the rows, run the grouped MLP, sum in slot order.

    Args:
        self: the experts module of transformers.
        hidden_states: [T, D].
        top_k_index: [T, K] local expert ids. Under expert parallelism, slots with ids of ``self.num_experts`` or more
            belong to other ranks and are dropped.
        top_k_weights: [T, K].
        gemm_dtype: see ``Experts.gemm_dtype``.

    Returns:
        [T, D] in the dtype of ``hidden_states``.

    Raises:
        UnsupportedModel: this library cannot compute experts of this kind.
        ConfigError: fp8 does not support the hidden size.
        RoutingError: weights are NaN or infinite, or ids are out of range.
    """
    layout, parallel = _local_experts(self)
    if getattr(self, "_is_expert_parallel", True):  # 5.16 has no such flag
        top_k_index = top_k_index.masked_fill(top_k_index >= self.num_experts, DROPPED)
    check_gemm_dtype(gemm_dtype, layout.hidden)
    x_TD = expert_input(hidden_states, self.gate_up_proj)
    call = start_call(parallel, self, x_TD, top_k_index, top_k_weights, fp8=gemm_dtype == "fp8", layout=layout)
    with call.abort_on_error(), without_autocast(x_TD):
        mlp = expert_mlp(layout, self, call.rows.dtype, gemm_dtype)
        out_RD = call.compute(call.rows, call.handle.rows_per_expert, mlp)
    return call.combine(out_RD).to(hidden_states.dtype)


def _local_experts(module: nn.Module) -> tuple[ExpertsLayout, ExpertParallel]:
    if module not in _local:
        layout = read_layout(module)
        _local[module] = layout, ExpertParallel(new_dispatcher(layout.num_experts))
    return _local[module]


def _ep_implementation(gemm_dtype: GemmDtype) -> type:
    """Define the class of a name. Its base class requires transformers, so it cannot be defined on import."""
    from transformers.distributed.expert_parallel import EPImplementation

    class MoeCommEP(EPImplementation):  # type: ignore[misc, no-any-unimported, unused-ignore]
        """Expert parallelism with a ``Dispatcher`` over the expert-parallel mesh.

        With tensor parallelism, the ranks of a TP group hold the same batch. Each rank computes a slice of the tokens,
        and the outputs are gathered, so that no token is computed twice:

            tp 0   t0 t1 t2 t3 ─▶ t0 t1 ─▶ dispatch ─▶ experts ─▶ combine ─▶ y0 y1 ─▶ y0 y1 y2 y3
            tp 1   t0 t1 t2 t3 ─▶ t2 t3 ─▶ dispatch ─▶ experts ─▶ combine ─▶ y2 y3 ─▶ y0 y1 y2 y3

        Supported experts run as a grouped MLP. Other kinds (quantized experts) run transformers' forward on the
        grouped rows, which is not possible in fp8.
        """

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts: Any = experts
            local: Any = self.num_local_experts
            self.num_experts: int = local * ep_mesh.size()
            self.layout: ExpertsLayout | None = None
            self.layout_supported = True
            self.parallel: ExpertParallel | None = None

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            num_tokens = hidden_states.shape[0]
            if self.tp_mesh.size() > 1:
                hidden_states, top_k_index, top_k_weights = (
                    DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
                    .redistribute(self.tp_mesh, [Shard(0)])
                    .to_local()
                    for t in (hidden_states, top_k_index, top_k_weights)
                )
            dispatcher = shared_dispatcher(self.num_experts, self.ep_mesh, hidden_states.device)
            if self.parallel is None or self.parallel.dispatcher is not dispatcher:
                self.parallel = ExpertParallel(dispatcher)
            x_TD, fp8 = self._input(hidden_states), gemm_dtype == "fp8"
            call = start_call(
                self.parallel, self.experts, x_TD, top_k_index, top_k_weights, fp8=fp8, layout=self.layout
            )
            with call.abort_on_error(), without_autocast(x_TD):
                out_RD = self._run(call)
            y_TD = call.combine(out_RD)
            if self.tp_mesh.size() == 1:
                return y_TD
            hidden = y_TD.shape[1]
            y_dtensor = DTensor.from_local(
                y_TD.contiguous(), self.tp_mesh, [Shard(0)], shape=torch.Size((num_tokens, hidden)), stride=(hidden, 1)
            )
            return y_dtensor.full_tensor()

        def _input(self, x_TD: Tensor) -> Tensor:
            # The parameters are local and loaded only in forward, not yet when transformers applies its plan.
            if self.layout is None and self.layout_supported:
                try:
                    self.layout = read_layout(self.experts)
                    check_gemm_dtype(gemm_dtype, self.layout.hidden)
                except UnsupportedModel:
                    if gemm_dtype == "fp8":
                        raise
                    self.layout_supported = False
            return x_TD if self.layout is None else expert_input(x_TD, self.experts.gate_up_proj)

        def _run(self, call: ExpertCall) -> Tensor:
            rows_RD, rows_per_expert = call.rows, call.handle.rows_per_expert
            if self.layout is not None:
                mlp = expert_mlp(self.layout, self.experts, rows_RD.dtype, gemm_dtype)
                return call.compute(rows_RD, rows_per_expert, mlp)
            if not rows_RD.shape[0]:
                # Some forwards do not accept zero rows. Pass one row of zeros, whose gradients are zeros.
                zero_row = rows_RD.sum(dim=0, keepdim=True)
                ids, weights = zero_row.new_zeros(1, 1, dtype=torch.int64), zero_row.new_zeros(1, 1)
                return self.experts_forward(zero_row, ids, weights)[:0]  # type: ignore[no-any-return]
            counts = torch.tensor(rows_per_expert, dtype=torch.int64, device=rows_RD.device)
            ids_R1 = torch.arange(len(rows_per_expert), device=rows_RD.device).repeat_interleave(counts).unsqueeze(1)
            ones_R1 = rows_RD.new_ones(ids_R1.shape)
            return self.experts_forward(rows_RD, ids_R1, ones_R1).to(rows_RD.dtype)  # type: ignore[no-any-return]

    return MoeCommEP
