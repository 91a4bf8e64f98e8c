"""Routers: select K experts per token and compute their weights.

    logits_TE ──score──▶ scores_TE ──(+ bias, groups)──▶ top-k ──▶ ids_TK ──(normalize, scale)──▶ weights_TK

Routers compute in fp32 (float64 for float64 tokens), also under autocast. The result for a token has the same bits in
every batch, see ``kernels/row_invariant.py``.

    model               score         normalize  other options
    Mixtral             softmax       True
    Qwen2/3-MoE, OLMoE  softmax       norm_topk_prob
    DeepSeek-V3         sigmoid       True       groups with top2_sum, correction_bias, scale
    gpt-oss             topk_softmax  -          linear_bias
    LongCat-Flash       softmax       False      correction_bias, scale, zero_experts
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.dispatch import DROPPED, INVALID_LOGITS
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.native import TRITON_DEVICES, for_triton
from moe_comm.kernels.pointwise import sigmoid
from moe_comm.kernels.row_invariant import row_invariant_linear, wide_linear
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.recompute import recomputed, recomputing
from moe_comm.runtime.memory import is_plain

Score = Literal["softmax", "sigmoid", "topk_softmax"]
GroupScore = Literal["max", "top2_sum"]
BalanceForm = Literal["batch", "sequence"]


@dataclass(frozen=True)
class ZeroExperts:
    """Zero-computation experts (LongCat-Flash, arXiv 2509.01322). Their ids come after the ids of the real experts.

    identity: number of experts that return the token itself. Their ids come before those of ``zero``.
    zero: number of experts that return 0.
    """

    identity: int = 0
    zero: int = 0

    def __post_init__(self) -> None:
        if self.identity < 0 or self.zero < 0:
            raise ConfigError(f"numbers of zero-computation experts cannot be negative; got {self}")

    @property
    def total(self) -> int:
        """Number of zero-computation experts."""
        return self.identity + self.zero


@dataclass(frozen=True)
class RouterConfig:
    """Configuration of a router.

    Args:
        num_experts: number of real experts.
        top_k: K, the number of experts per token.
        score: softmax over all experts, sigmoid of each logit, or softmax over the K selected logits.
        normalize: divide the K weights by their sum (the sum of ``topk_softmax`` is 1 already).
        scale: factor of the weights (DeepSeek's ``routed_scaling_factor``).
        num_groups: number of equal groups of experts (DeepSeek-V2/V3).
        top_groups: number of groups per token; only experts of the best groups can be selected.
        group_score: score by which groups are ranked.
        correction_bias: add a buffer to the scores for the selection, but not for the weights. ``Router.update_bias``
            updates it (DeepSeek-V3's aux-loss-free balancing, arXiv 2408.15664).
        linear_bias: learn a bias of the logits.
        balance_loss, z_loss: coefficients of the auxiliary losses; 0 disables them.
        balance_form: "batch" (Switch) or "sequence" (DeepSeek-V3).
        zero_experts: numbers of zero-computation experts.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"
    correction_bias: bool = False
    linear_bias: bool = False
    balance_loss: float = 0.0
    balance_form: BalanceForm = "batch"
    z_loss: float = 0.0
    zero_experts: ZeroExperts = ZeroExperts()

    def __post_init__(self) -> None:
        for name, kind in (("score", Score), ("group_score", GroupScore), ("balance_form", BalanceForm)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(kind))}; got {getattr(self, name)!r}")
        if self.num_experts < 1:
            raise ConfigError(f"num_experts, which counts the real experts, must be at least 1; got {self.num_experts}")
        choices = self.num_choices
        if not 1 <= self.top_k <= choices:
            raise ConfigError(f"top_k must be between 1 and the {choices} experts; got {self.top_k}")
        if self.num_groups < 1 or choices % self.num_groups:
            raise ConfigError(f"num_groups must divide the {choices} experts; got {self.num_groups}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(f"top_groups must be between 1 and num_groups {self.num_groups}; got {self.top_groups}")
        size = choices // self.num_groups
        if self.top_groups * size < self.top_k:
            raise ConfigError(
                f"{self.top_groups} groups of {size} experts are fewer than top_k {self.top_k}: raise top_groups"
            )
        if self.balance_loss < 0 or self.z_loss < 0:
            raise ConfigError(f"loss coefficients cannot be negative; got {self.balance_loss} and {self.z_loss}")

    @cached_property
    def num_choices(self) -> int:
        """Number of experts that the router chooses from: real and zero-computation ones."""
        return self.num_experts + self.zero_experts.total


class Routing(NamedTuple):
    """Result of a router.

    Attributes:
        ids_TK: [T, K] int64 expert ids, distinct per token. -1 (dropped) in the remaining slots if fewer than K experts
            have a logit above -Inf. -2 in all slots of a token with a NaN or +Inf logit, or with only -Inf logits:
            dispatch then raises RoutingError on every rank.
        weights_TK: [T, K] fp32; zero for negative ids.
        logits_TE: [T, E] fp32; None if the routing was not computed from logits.
        aux_loss: scalar, the weighted sum of the auxiliary losses; None without auxiliary losses.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor | None = None
    aux_loss: Tensor | None = None


def expert_counts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return the number of (token, k) slots that select each expert, [E] int64. Negative ids are not counted."""
    shifted = ids_TK.detach().reshape(-1).clamp(min=-1).long() + 1
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    counts.scatter_add_(0, shifted, torch.ones_like(shifted))
    return counts[1:]


class Router(ParallelModule):
    """Selects experts for tokens. See ``RouterConfig``.

    Args:
        hidden: D, the width of the tokens.
        group: ranks over which the load is summed for the balance loss. The loss is then that of the global batch, and
            its gradient is the sum of the gradients of the ranks. None: count this rank's tokens only.
        sequence_group: ranks of ``group`` that share each sequence (context and tensor parallelism), for the
            sequence-wise balance loss. None: each sequence is on one rank.

    Attributes:
        weight, bias, correction_bias: parameters [E, D] and [E], and persistent buffer [E] fp32.
        load_E: [E] int64, slots per expert since the last ``take_load``. Counted in training only; a recomputation by
            activation checkpointing is not counted again.
        drop_invalid: drop tokens whose logits are NaN or all -Inf, and count them in ``invalid``. False: dispatch
            raises ``RoutingError`` for them.
        losses: auxiliary losses of the last call by name, detached and without coefficients. The sum over the ranks of
            ``group`` is the loss of the global batch.
    """

    correction_bias: Tensor | None
    counters = ("load_E", "invalid")
    """Buffers that count this rank's tokens."""
    load_E: Tensor
    invalid: Tensor

    def __init__(
        self,
        hidden: int,
        config: RouterConfig,
        group: ProcessGroup | None = None,
        *,
        sequence_group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.config, self.group, self.sequence_group = hidden, config, group, sequence_group
        self._create_parameters(dtype, device)
        # Always fp32: an update is smaller than the precision of bf16, which is often the default dtype.
        correction = torch.zeros(config.num_choices, dtype=torch.float32, device=device)
        self.register_buffer("correction_bias", correction if config.correction_bias else None)
        load = torch.zeros(config.num_choices, dtype=torch.int64, device=device)
        self.register_buffer("load_E", load, persistent=False)
        invalid = torch.zeros((), dtype=torch.int64, device=device)
        self.register_buffer("invalid", invalid, persistent=False)
        self.drop_invalid = False
        self.losses: dict[str, Tensor] = {}
        self.reset_parameters()

    def _create_parameters(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        choices = self.config.num_choices
        self.weight = nn.Parameter(torch.empty(choices, self.hidden, dtype=dtype, device=device))
        bias = torch.zeros(choices, dtype=dtype, device=device) if self.config.linear_bias else None
        self.bias = None if bias is None else nn.Parameter(bias)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialize the weight from a normal distribution, biases and counters with zero."""
        self.load_E.zero_()
        self.invalid.zero_()
        nn.init.normal_(self.weight, std=std, generator=generator)
        for param in (self.bias, self.correction_bias):
            if param is not None:
                nn.init.zeros_(param)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, {self.config}"

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # model.bfloat16() must not round the correction bias: its updates are smaller than bf16 steps.
        correction = self.correction_bias
        super()._apply(fn, recurse)
        moved = self.correction_bias
        if correction is not None and moved is not None and moved.dtype in (torch.bfloat16, torch.float16):
            self.correction_bias = correction.to(moved.device)
        return self

    def forward(
        self, x_TD: Tensor, num_sequences: int = 1, ids_TK: Tensor | None = None, mask_N: Tensor | None = None
    ) -> Routing:
        """Route tokens.

        Args:
            x_TD: [T, D] fp32, bf16, fp16 or float64.
            num_sequences: number of sequences, or equal chunks of sequences, in the T tokens (for the sequence-wise
                balance loss).
            ids_TK: experts that were selected elsewhere (replayed routing); only their weights are computed.
            mask_N: [N] bool with T true values: the positions of the tokens among the N tokens of the sequences, which
                have padding elsewhere. None: there is no padding.

        Raises:
            InputError: ``x_TD`` has another width.
        """
        if x_TD.dim() != 2 or x_TD.shape[1] != self.hidden:
            raise InputError(f"router of hidden size {self.hidden} needs x [T, {self.hidden}]; got {tuple(x_TD.shape)}")
        device, wide = x_TD.device.type, torch.promote_types(x_TD.dtype, torch.float32)
        if device != "meta" and torch.is_autocast_enabled(device):  # logits are at least fp32
            with torch.autocast(device, enabled=False):
                return self.forward(x_TD, num_sequences, ids_TK, mask_N)
        if device in TRITON_DEVICES and self.bias is None and x_TD.dtype != wide and for_triton(x_TD, self.weight):
            logits_TE = wide_linear(x_TD, self.weight)
            return self._select(logits_TE, num_sequences, ids_TK, mask_N)
        bias = None if self.bias is None else self.bias.to(wide)
        wide_TD = x_TD if x_TD.dtype == wide else recomputed(lambda x: x.to(wide), x_TD)
        return self._select(row_invariant_linear(wide_TD, self.weight.to(wide), bias), num_sequences, ids_TK, mask_N)

    def _select(
        self, logits_TE: Tensor, num_sequences: int = 1, ids_TK: Tensor | None = None, mask_N: Tensor | None = None
    ) -> Routing:
        """Select experts by their logits, compute the weights and losses, and count the load."""
        on_device = logits_TE.device.type in TRITON_DEVICES and for_triton(logits_TE)
        load_E = self.load_E if self.training and not recomputing() else None
        routed = self._route_with_triton(logits_TE, load_E) if ids_TK is None and on_device else None
        if routed is not None:
            ids_TK, weights_TK, scores_TE = routed
        else:
            scores_TE = sigmoid(logits_TE) if self.config.score == "sigmoid" else torch.softmax(logits_TE, -1)
            regular = ids_TK is None and self._is_regular(logits_TE)
            if ids_TK is None:
                ids_TK = self._choose(logits_TE.detach(), scores_TE.detach(), regular)
            weights_TK = self._weights(logits_TE, scores_TE, ids_TK, regular)
        c = self.config
        losses = self.training and (c.balance_loss or c.z_loss)
        aux_loss = self._aux_loss(logits_TE, scores_TE, ids_TK, num_sequences, mask_N) if losses else None
        if load_E is not None and routed is None:
            load_E.add_(expert_counts(ids_TK, c.num_choices))
        return Routing(ids_TK, weights_TK, logits_TE, aux_loss)

    def _is_regular(self, logits_TE: Tensor) -> bool:
        """Return whether every token has K experts, which a plain top-k selects; False if that is not known.

        The general case takes 12 more operators, which take most of the time of a router with few tokens. Reading a
        value from a GPU would wait for it.
        """
        if not logits_TE.is_cpu or self.config.top_groups < self.config.num_groups:
            return False
        bias = self.correction_bias
        if torch.compiler.is_compiling() or not is_plain([logits_TE] if bias is None else [logits_TE, bias]):
            return False
        total = logits_TE.detach().sum()  # not finite if one logit is not
        return math.isfinite(total if bias is None else total + bias.sum())

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, regular: bool = False) -> Tensor:
        c = self.config
        choice_TE = logits_TE if c.score == "topk_softmax" else scores_TE
        if self.correction_bias is not None:
            choice_TE = choice_TE + self.correction_bias
        if regular:
            return choice_TE.topk(c.top_k, dim=-1).indices
        # An expert with logit -Inf must not be selected. Its score is 0, and a bias could raise it above other scores.
        forbidden_TE = logits_TE == float("-inf")
        choice_TE = choice_TE.masked_fill(forbidden_TE, float("-inf"))
        if c.top_groups < c.num_groups:
            grouped_TGS = choice_TE.unflatten(1, (c.num_groups, -1))
            per_group = min(2 if c.group_score == "top2_sum" else 1, grouped_TGS.shape[2])
            groups_TG = grouped_TGS.topk(per_group, dim=-1).values.sum(-1).topk(c.top_groups, dim=-1).indices
            allowed_TG = torch.zeros(grouped_TGS.shape[:2], dtype=torch.bool, device=logits_TE.device)
            allowed_TG.scatter_(1, groups_TG, True)
            choice_TE = grouped_TGS.masked_fill(~allowed_TG.unsqueeze(-1), float("-inf")).flatten(1)
        top = choice_TE.topk(c.top_k, dim=-1)
        ids_TK = top.indices.masked_fill(top.values == float("-inf"), DROPPED)
        invalid_T = (logits_TE.isnan() | (logits_TE == float("inf"))).any(-1) | forbidden_TE.all(-1)
        return self._mark_invalid(ids_TK, invalid_T)

    def _mark_invalid(self, ids_TK: Tensor, invalid_T: Tensor) -> Tensor:
        if self.drop_invalid:
            self.invalid += invalid_T.sum()
            return ids_TK.masked_fill(invalid_T.unsqueeze(-1), DROPPED)
        return ids_TK.masked_fill(invalid_T.unsqueeze(-1), INVALID_LOGITS)

    def _route_with_triton(self, logits_TE: Tensor, load_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute ids, weights and scores in one Triton kernel, which adds to the load unless it is None. Return None
        if the kernel does not support the input.

        If no loss needs the scores, the logits are returned in their place.
        """
        from moe_comm.kernels.triton.router import route, takes  # needs Triton

        if not takes(logits_TE, self.config):
            return None
        needs_scores = self.training and self.config.balance_loss > 0
        ids_TK, weights_TK, scores_TE = route(
            logits_TE, self.correction_bias, self.config, scores=needs_scores, load_E=load_E
        )
        if self.drop_invalid:
            ids_TK = self._mark_invalid(ids_TK, ids_TK[:, 0] == INVALID_LOGITS)
        return ids_TK, weights_TK, logits_TE if scores_TE is None else scores_TE

    def _weights(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, regular: bool = False) -> Tensor:
        c = self.config
        if regular:
            weights_TK = (logits_TE if c.score == "topk_softmax" else scores_TE).gather(1, ids_TK)
            weights_TK = torch.softmax(weights_TK, -1) if c.score == "topk_softmax" else weights_TK
        else:
            empty_TK = ids_TK < 0
            index_TK = ids_TK.clamp(min=0)
            if c.score == "topk_softmax":
                chosen_TK = logits_TE.gather(1, index_TK).masked_fill(empty_TK, float("-inf"))
                # The softmax of a token without experts is NaN; logits of 0 keep NaN out of the gradient.
                dropped_T1 = empty_TK.all(-1, keepdim=True)
                weights_TK = torch.softmax(chosen_TK.masked_fill(dropped_T1, 0.0), -1).masked_fill(empty_TK, 0.0)
            else:
                weights_TK = scores_TE.gather(1, index_TK).masked_fill(empty_TK, 0.0)
        if c.score != "topk_softmax" and c.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK if c.scale == 1.0 else weights_TK * c.scale

    def _aux_loss(
        self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, num_sequences: int, mask_N: Tensor | None
    ) -> Tensor:
        from moe_comm.layers.moe.losses import global_counts, load_balance_loss, sequence_balance_sums, z_loss

        c, tokens, sequences = self.config, ids_TK.shape[0], 0
        probs_TE, total, fault = scores_TE, None, None
        if c.balance_loss and c.score == "sigmoid":  # all scores of a token may underflow to 0
            probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        if c.balance_loss and c.balance_form == "sequence":
            total, sequences, fault = sequence_balance_sums(
                probs_TE, ids_TK, num_sequences, self.sequence_group, mask_N
            )
            # All ranks of a sequence group have the same sequences; only the first one counts them.
            if self.sequence_group is not None and dist.get_rank(self.sequence_group) > 0:
                sequences = 0
        local_E = expert_counts(ids_TK, c.num_choices)
        counts_E, all_tokens, all_sequences = global_counts(local_E, tokens, sequences, self.group)
        if fault is not None:
            raise fault
        aux = logits_TE.new_zeros(())
        if c.balance_loss:
            if total is None:
                balance = load_balance_loss(probs_TE, counts_E, all_tokens)
            else:
                balance = total / all_sequences.clamp(min=1)
            self.losses["balance"] = balance.detach()
            aux = aux + c.balance_loss * balance
        if c.z_loss:
            z = z_loss(logits_TE, all_tokens)
            self.losses["z"] = z.detach()
            aux = aux + c.z_loss * z
        return aux

    @torch.no_grad()
    def take_load(self, group: ProcessGroup | None = None) -> Tensor:
        """Return [E] int64 slots per expert since the last call, summed over ``group``, and reset the counter."""
        from moe_comm.layers.moe.losses import global_counts

        load_E, _, _ = global_counts(self.load_E, 0, 0, group)
        self.load_E.zero_()
        return load_E

    @torch.no_grad()
    def update_bias(self, load_E: Tensor, rate: float = 1e-3, recenter: bool = False) -> None:
        """Raise the correction bias of experts with less than the mean load by ``rate``, and lower that of the others.

        Args:
            load_E: [E] slots per expert of the last step, equal on all ranks (``take_load`` with a group).
            recenter: subtract the mean from the bias afterwards; this changes no selection and prevents drift.

        Raises:
            ConfigError: the router has no correction bias.
            InputError: ``load_E`` has the wrong shape.
        """
        if self.correction_bias is None:
            raise ConfigError("this router has no correction bias; set RouterConfig(correction_bias=True)")
        if tuple(load_E.shape) != (self.config.num_choices,):
            raise InputError(f"update_bias needs load [{self.config.num_choices}]; got {tuple(load_E.shape)}")
        load = load_E.to(self.correction_bias.device, torch.float64)
        self.correction_bias += rate * torch.sign(load.mean() - load).to(self.correction_bias.dtype)
        if recenter:
            self.correction_bias -= self.correction_bias.mean()
