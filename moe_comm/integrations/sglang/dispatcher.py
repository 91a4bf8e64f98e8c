"""A dispatcher of SGLang that sends each token once to each rank that has one of its experts.

SGLang's MoE runner of a rank computes the weighted sum of the rank's own experts for each received row. ``combine``
adds these partial sums:

    tokens [T, H] ─▶ dispatch ─▶ rows [R, H], local ids and weights [R, K] ─▶ MoE runner ─▶ [R, H] ─▶ combine ─▶ [T, H]
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.token_dispatcher import BaseDispatcher, DeepEPNormalDispatchOutput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutputChecker
from sglang.srt.runtime_context import get_exec, get_flags, get_parallel
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch.per_rank import RankExchange, RankRoutes, Rows, check_input, rank_layout, unpacked
from moe_comm.errors import ConfigError, InputError

logger = logging.getLogger(__name__)
DEEP_GEMM_ROWS = 128
"""DeepGEMM pads the rows of an expert to a multiple of this."""


class MoeCommDispatcher(BaseDispatcher, RankExchange):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Dispatch and combine over the tensor-parallel group, in place of SGLang's ``DeepEPDispatcher``.

    The MoE runner ``triton`` gets rows in the dtype of the tokens, as ``StandardDispatchOutput``; ``deep_gemm`` gets
    rows in bf16, or in fp8 with scales, as ``DeepEPNormalDispatchOutput``. Rows are ordered by (source rank, token).
    Slots of other ranks' experts have id -1 and weight 0. In the standard format, a rank without rows gets one row of
    zeros without experts. ``combine`` adds the rows of a token in fp32, in the order of the last slot of each rank, and
    rounds once. No autograd. ``dispatch`` and ``combine`` are collective and raise InputError, RankMismatch, PeerDied
    and PeerTimeout on every rank.

    Args:
        config: SGLang's ``MoeRunnerConfig`` of the layer.
        group: process group of the experts; by default SGLang's tensor-parallel group.
        backend: see ``make_dispatcher``. timeout_s: seconds to wait for a live peer.

    Raises:
        ConfigError: the MoE runner, or an option of SGLang, is not supported.
    """

    dispatch_mode = utils.DeepEPMode.NORMAL
    """Read by SGLang's ``get_deepep_output_dtype``."""
    _routes: RankRoutes | None = None

    def __init__(
        self, config: Any, group: ProcessGroup | None = None, *, backend: str = "auto", timeout_s: float = 300.0
    ) -> None:
        BaseDispatcher.__init__(self)
        RankExchange.__init__(self, group or get_parallel().tp_group.device_group)
        self.backend, self.timeout_s = backend, timeout_s
        self.num_experts: int = config.num_experts
        self.runner_backend = runner = config.runner_backend
        if runner is None or not (runner.is_triton() or runner.is_deep_gemm()):
            raise ConfigError(
                f"moe_comm supports the MoE runners triton and deep_gemm; layer {config.layer_id} has "
                f"{runner and runner.value}; pass --moe-runner-backend triton or deep_gemm"
            )
        if utils.is_tbo_enabled() or utils.is_sbo_enabled():
            raise ConfigError("moe_comm has no --enable-two-batch-overlap and no --enable-single-batch-overlap")
        self.is_standard: bool = runner.is_triton()
        asked = get_exec().moe.deepep_dispatcher_output_dtype
        if self.is_standard and asked not in ("auto", "bf16"):
            raise ConfigError(
                "rows for the MoE runner triton have the dtype of the tokens; "
                f"--deepep-dispatcher-output-dtype {asked} needs --moe-runner-backend deep_gemm"
            )
        self.set_quant_config({})

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """Store SGLang's options of quantization, and choose the dtype of rows for ``deep_gemm``."""
        super().set_quant_config(quant_config)
        dtype = "bf16" if self.is_standard else utils.get_deepep_output_dtype(self).value
        if dtype not in ("bf16", "fp8"):
            raise ConfigError(f"moe_comm sends rows in bf16 or fp8, not {dtype}; pass --deepep-dispatcher-output-dtype")
        self._sends_fp8 = dtype == "fp8"

    @torch.no_grad()
    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any:
        """Send tokens [T, H] to the ranks of their experts.

        Args:
            hidden_states: [T, H]; T may differ between ranks and may be 0.
            topk_output: SGLang's ids and weights [T, K]; -1 selects no expert.

        Returns:
            ``StandardDispatchOutput`` or ``DeepEPNormalDispatchOutput``, with R rows.

        Raises:
            ConfigError: ids and weights have another format.
        """
        if not TopKOutputChecker.format_is_standard(topk_output):
            raise ConfigError(f"moe_comm needs SGLang's StandardTopKOutput; got {type(topk_output).__name__}")
        ids_TK, weights_TK = topk_output.topk_ids, topk_output.topk_weights.float()
        if not self.is_standard:
            ids_TK = ids_TK.long()
        x = _fp8(hidden_states) if self._sends_fp8 else hidden_states
        with self._checks(x):
            check_input(x, ids_TK, weights_TK, self.num_experts)
        routes, rows, weights_RK = self._exchange(
            x, ids_TK, weights_TK, self.num_experts, least_rows=1 if self.is_standard else 0
        )
        rows, ids_RK, weights_RK = routes.padded(rows, weights_RK)
        assert ids_RK is not None
        self._routes = routes
        counts_L = routes.aligned(1 if self.is_standard else DEEP_GEMM_ROWS).tolist()
        recorder = get_global_expert_distribution_recorder()
        if recorder.recording:
            layout = rank_layout(ids_TK, self.num_experts, self.group_size)
            recorder.on_deepep_dispatch_normal(
                counts_L,
                num_tokens_per_rank=layout.per_rank_W,
                num_tokens_per_rdma_rank=None,
                num_tokens_per_expert=layout.per_expert_E,
            )
        if self.is_standard:
            topk_output = StandardTopKOutput(weights_RK, ids_RK, hidden_states.new_empty(len(ids_RK), 0))
            return StandardDispatchOutput(rows, None, topk_output)
        return DeepEPNormalDispatchOutput(*unpacked(rows), ids_RK, weights_RK, counts_L)

    @torch.no_grad()
    def combine(self, combine_input: Any) -> Tensor:
        """Return [T, H], the sum of the rows of each token that was dispatched last.

        Args:
            combine_input: the output of the MoE runner; ``hidden_states`` is [R, H].
        """
        rows_RD, routes = combine_input.hidden_states, self._routes
        with self._checks(rows_RD):
            if routes is None:
                raise InputError("combine needs a dispatch before it")
            routes.check_combine(rows_RD, None, None)
        self._routes = None
        return routes.combine(rows_RD, None, None)[0]


def _fp8(hidden_states: Tensor) -> Rows:
    """Return e4m3 values and the scales of 128 channels each, in the layout that SGLang's DeepGEMM runner reads."""
    packed = deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0
    values, scales = sglang_per_token_group_quant_fp8(
        hidden_states, 128, column_major_scales=packed, scale_tma_aligned=packed, scale_ue8m0=packed
    )
    return values, scales


def create_dispatcher(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    """Return the dispatcher of a layer, in place of ``create_moe_dispatcher``.

    Raises:
        ConfigError: SGLang's options select another dispatcher than DeepEP's in normal mode.
    """
    a2a, mode = utils.get_moe_a2a_backend(), utils.get_deepep_mode()
    if get_flags().moe.in_speculative_scope and not a2a.is_deepep():
        logger.warning("moe_comm does not dispatch the draft model, which has the a2a backend %s", a2a.value)
        return original(moe_runner_config, quant_method)
    if not (a2a.is_deepep() and mode.is_normal()):
        raise ConfigError(
            f"MOE_COMM_SGLANG=1 needs --moe-a2a-backend deepep --deepep-mode normal; got {a2a.value} and {mode.value}"
        )
    dispatcher = MoeCommDispatcher(moe_runner_config)
    name = "standard" if dispatcher.is_standard else "deepep_normal"
    logger.info("moe_comm dispatches layer %s in the format %s", moe_runner_config.layer_id, name)
    return dispatcher


def use_runner(result: None, layer: Any, *args: Any, **settings: Any) -> None:
    """Make a layer with ``MoeCommDispatcher`` call its MoE runner, which SGLang does for DeepGEMM only."""
    if isinstance(layer.dispatcher, MoeCommDispatcher):
        layer.deprecate_flag = True
