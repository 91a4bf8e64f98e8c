"""vLLM's steps before and after the experts of an MoE layer, with the dispatchers of this library, and their choice.

    router ─▶ ids, weights ─▶ prepare ─▶ experts of vLLM, which weigh and add the slots of a row ─▶ finalize ─▶ y

vLLM's GPU kernels take rows with ids of other ranks' experts and skip these. Its CPU kernels index their weights with
every id, so there each slot is a row, with the local id of its expert:

    token of experts 2, 0, 3    rank 0, experts 0 1    rank 1, experts 2 3
    one row per (token, rank)   ids [3, 0, 3]          ids [2, 0, 3]           other ranks' experts: one id of theirs
    one row per slot            ids [0]                ids [0], ids [1]        local ids
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm.config import CompilationMode, CUDAGraphMode, get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce
from vllm.platforms import current_platform

from moe_comm.dispatch import DROPPED
from moe_comm.dispatch.per_rank import RankExchange
from moe_comm.dispatch.types import routing_error
from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement

logger = init_logger("vllm.moe_comm")
Received = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows [R, D], ids [R, N], weights [R, N], and rows or slots of each local expert [L] int32."""


class MoeCommPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular, RankExchange):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Dispatch and combine of one MoE layer. Forward only. Experts are in contiguous ranges, as vLLM's ``linear``.

    ``prepare`` and ``finalize`` are collective and raise the errors of ``Dispatcher.dispatch`` and
    ``Dispatcher.combine``. The first ``prepare`` creates the dispatcher.

    Args:
        group: the expert-parallel group. Its ranks have different tokens, any number of them.
        per_rank: one row per (token, rank), with global ids; otherwise one row per slot, with local ids.
        backend: see ``make_dispatcher``. timeout_s: seconds to wait for a live peer.
    """

    def __init__(self, group: ProcessGroup, *, per_rank: bool, backend: str = "auto", timeout_s: float = 300.0) -> None:
        mk.FusedMoEPrepareAndFinalizeModular.__init__(self)
        RankExchange.__init__(self, group)
        self._per_rank, self.backend, self.timeout_s = per_rank, backend, timeout_s
        self._combine: Callable[[Tensor], Tensor] | None = None

    @property
    def activation_format(self) -> Any:
        """Rows [R, D]."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """Return int32, which vLLM's CPU kernels need."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> None:
        """Return None: any number."""

    def num_dispatchers(self) -> int:
        """Return the number of ranks."""
        return self.group_size

    def output_is_reduced(self) -> bool:
        """Return True: ``finalize`` adds the outputs of all ranks."""
        return True

    @torch.no_grad()
    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, None, Any, Tensor, Tensor]:
        """Send the tokens to the ranks of their experts.

        Args:
            a1: [T, D] fp32, bf16 or fp16.
            topk_weights, topk_ids: [T, K]; global ids, int32 or int64; -1 drops the slot.
            num_experts: of all ranks.
            apply_router_weight_on_input: multiply the tokens by their weights here. Needs K = 1.
            expert_map, quant_config, defer_input_quant: not used.

        Returns:
            Rows [R, D]; None, no scales; the number of slots of each local expert; ids, int32, and weights, fp32, both
            [R, K] with ``per_rank`` and else [R, 1]. Slots of other ranks' experts have an id of another rank and the
            weight 0.

        Raises:
            ConfigError: ``apply_router_weight_on_input`` with K > 1.
        """
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ConfigError(f"apply_router_weight_on_input needs top-k 1; got {topk_ids.shape[1]}")
            a1 = a1 * topk_weights.to(a1.dtype)
        receive = self._receive_tokens if self._per_rank else self._receive_slots
        rows_RD, ids_RN, weights_RN, counts_L = receive(a1, topk_ids, topk_weights.float(), num_experts)
        return rows_RD, None, mk.ExpertTokensMetadata(counts_L, counts_L.cpu()), ids_RN, weights_RN

    @torch.no_grad()
    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write the sums of the experts' outputs into ``output`` [T, D].

        Rows are added in fp32 in the order of slots, or of the ranks' last slots, and rounded once.

        Args:
            fused_expert_output: [R, D], or what ``weight_and_reduce_impl`` weighs and adds.
            topk_weights, topk_ids: those of the rows, from ``prepare``.

        Raises:
            ConfigError: without a ``prepare`` before.
        """
        if self._combine is None:
            raise ConfigError("finalize needs a call of prepare before it")
        if len(topk_ids):
            if isinstance(weight_and_reduce_impl, topk_weight_and_reduce.TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = topk_weight_and_reduce.TopKWeightAndReduceContiguous()
            fused_expert_output = weight_and_reduce_impl.apply(
                None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
            )
        combine, self._combine = self._combine, None
        output.copy_(combine(fused_expert_output))

    def _receive_slots(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Received:
        """Send one row per slot. Rows are ordered by local expert."""
        dispatcher = self._dispatcher(x_TD, num_experts)
        sent = dispatcher.dispatch(x_TD, ids_TK, extra_TKX=weights_TK.unsqueeze(2))
        assert sent.extra_RX is not None
        ones_TK = torch.ones_like(weights_TK)
        self._combine = lambda rows_RD: dispatcher.combine(rows_RD, ones_TK, sent.handle)
        counts_L = torch.tensor(sent.handle.rows_per_expert, dtype=torch.int32, device=x_TD.device)
        ids_L = torch.arange(len(counts_L), dtype=torch.int32, device=x_TD.device)
        return sent.rows_RD, ids_L.repeat_interleave(counts_L).unsqueeze(1), sent.extra_RX, counts_L

    def _receive_tokens(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Received:
        """Send one row per (token, rank). Rows are ordered by (source rank, token)."""
        with self._checks(x_TD):
            if ((ids_TK < DROPPED) | (ids_TK >= num_experts)).any():
                raise routing_error(ids_TK, num_experts)
        routes, rows_RD, weights_RK = self._exchange(x_TD, ids_TK.int(), weights_TK, num_experts)
        local_RK, first = routes.local_ids_RK, ExpertPlacement.of(num_experts, self.group_size).offsets[self.rank]
        assert isinstance(rows_RD, Tensor) and local_RK is not None and weights_RK is not None
        self._combine = routes.sum
        other = num_experts - 1 if first == 0 else 0  # as vLLM's class for DeepEP
        return rows_RD, torch.where(local_RK < 0, other, local_RK + first), weights_RK, routes.rows_per_expert.int()


def choose(original: Callable[..., Any], moe: Any, quant_config: Any, *args: Any, **settings: Any) -> Any:
    """Return the transport of a layer. Other layers get the result of ``original``, vLLM's function with the other
    arguments.

    Raises:
        ConfigError: the model is compiled, or runs as a CUDA graph.
    """
    config, layout, cpu = get_current_vllm_config(), moe.moe_parallel_config, current_platform.is_cpu()
    ranks_with_tokens = layout.dp_size * layout.pcp_size * layout.sp_size
    obstacles = {
        "they need enable_expert_parallel, and data_parallel_size above 1": not layout.use_all2all_kernels,
        f"all2all_backend is {layout.all2all_backend}": layout.all2all_backend != "allgather_reducescatter",
        "tensor-parallel ranks have the same tokens": layout.ep_size != ranks_with_tokens,
        f"the device is {current_platform.device_type}": not (cpu or current_platform.is_cuda()),
        "weights or activations are quantized": quant_config is not None
        and (quant_config.quant_dtype is not None or quant_config.weight_quant_dtype is not None),
        "the kernel of the experts routes the tokens": settings.get("use_monolithic", False)
        or not settings.get("allow_new_interface", False),
        "they have adapters (LoRA)": moe.is_lora_enabled,
        "experts change their ranks (enable_eplb, enable_elastic_ep)": layout.enable_eplb
        or config.parallel_config.enable_elastic_ep
        or settings.get("all2all_manager") is not None,
    }
    for reason, found in obstacles.items():
        if found:
            logger.warning_once("moe_comm leaves MoE layers to vLLM: %s", reason)
            return original(moe, quant_config, *args, **settings)
    graphs = config.compilation_config
    # A compiled model on the CPU is one graph; on GPUs an operator hides the layer from the compiler.
    if graphs.mode != CompilationMode.NONE if cpu else graphs.cudagraph_mode != CUDAGraphMode.NONE:
        raise ConfigError(
            "MOE_COMM_VLLM=1: moe_comm exchanges numbers of rows on the CPU, which "
            f"{'a compiled model' if cpu else 'a CUDA graph'} cannot contain; use enforce_eager=True"
        )
    return MoeCommPrepareAndFinalize(get_ep_group().device_group, per_rank=not cpu)
