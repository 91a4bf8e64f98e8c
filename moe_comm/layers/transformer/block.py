"""One layer of a transformer: attention and a feed-forward block (MoE or dense), each after a norm.

    sequential             x ─┬─ norm ─ attention ─ + ─┬─ norm ─ MoE or dense ─ + ─▶
                              ╰─────────────────────╯  ╰──────────────────────╯

    parallel               x ─┬─ norm ─┬─ attention ────── + ─ + ─▶
                              │        ╰─ MoE or dense ────╯   │
                              ╰────────────────────────────────╯

Between these modules each rank has its own tokens, [B, S / (cp * tp), D].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn

from moe_comm.dispatch.selection.factory import connect
from moe_comm.errors import ConfigError
from moe_comm.layers.attention.layer import Attention
from moe_comm.layers.attention.rope import RopeTable
from moe_comm.layers.attention.sequence import Documents
from moe_comm.layers.data_parallel.expert_shard import is_dtensor
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.parallel.dense import DenseMLP, RMSNorm
from moe_comm.layers.parallel.interleave import Steps, TurnParameters, finish, take_turns
from moe_comm.layers.parallel.recompute import (
    SavedActivations,
    Saving,
    recomputed_block,
    run_layer,
    run_layer_in_steps,
)
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS


@dataclass(frozen=True, eq=False)
class TokenContext:
    """Information about the tokens of a micro-batch that all layers use.

    rope: sines and cosines of the context-parallel rank's tokens. documents: packed documents; None: each sequence is
    one document. index_BS: positions of this rank's tokens in the global micro-batch; None if no layer needs them.
    mask_BS: False for padding, which MoE layers skip; None: no padding.
    """

    rope: RopeTable
    documents: Documents | None = None
    index_BS: Tensor | None = None
    mask_BS: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TurnTokens:
    """``TokenContext`` of interleaved micro-batches, and the leaves of parameters that they use."""

    tokens: tuple[TokenContext, ...]
    parameters: TurnParameters


class TransformerBlock(nn.Module):
    """Layer ``layer`` of a model on this rank. Weights are NaN until ``initialize`` sets them.

    Args:
        layer: global id; ``config.dense_layers`` determines whether the feed-forward block has experts.

    Attributes:
        saved: stores activations between forward and backward; None: they stay in memory.
        attention_norm, attention: attention and its norm.
        ffn_norm: norm of the feed-forward block; does not exist in a parallel block.
        moe, dense: the feed-forward block; only one of them exists.

    Raises:
        ConfigError: a size is not divisible by the number of ranks.
    """

    def __init__(self, config: TransformerConfig, layer: int, plan: ModelPlan) -> None:
        super().__init__()
        self.layer, self.parallel, self.recompute = layer, config.parallel_block, plan.recompute
        self._label = f"layers.{layer}"
        self.saved: SavedActivations | None = None
        self.is_moe = layer not in config.dense_layers
        self._add_modules(config, plan)
        if not plan.is_meta:
            materialize(self, plan.weights_device or plan.device)
            if self.is_moe:
                self.moe.dispatcher = connect(self.moe.dispatcher, plan.device)

    def _add_modules(self, config: TransformerConfig, plan: ModelPlan) -> None:
        """Create the modules of this layer on the meta device."""
        self.attention_norm = norm_of(config, plan)
        self.attention = attention_of(config, plan)
        if not config.parallel_block:
            self.ffn_norm = norm_of(config, plan)
        if self.is_moe:
            self.moe = moe_of(config, self.layer, plan)
            self.moe.beside = (attention_width(config) if config.parallel_block else 0, 0)
        else:
            self.dense = dense_of(config, plan)

    @overload
    def forward(self, x_BSD: Tensor, tokens: TokenContext) -> Tensor: ...

    @overload
    def forward(self, x_BSD: tuple[Tensor, ...], tokens: TurnTokens) -> tuple[Tensor, ...]: ...

    def forward(
        self, x_BSD: Tensor | tuple[Tensor, ...], tokens: TokenContext | TurnTokens
    ) -> Tensor | tuple[Tensor, ...]:
        """Map [B, S / (cp * tp), D] to the same shape. Collective over all ranks of the pipeline stage.

        With a tuple of inputs, these micro-batches are interleaved. The layer begins and ends with all of them, and is
        recomputed in the same way.
        """
        if isinstance(tokens, TurnTokens):
            if self.recompute != "full":
                return self._run_in_turns(tokens, *x_BSD)
            # Checkpointing saves the tensors among its arguments, and not those in a tuple.
            return run_layer("full", self._run_in_turns, tokens, *x_BSD, saving=self._saving(*tokens.tokens))
        return run_layer(self.recompute, self._run, x_BSD, tokens, saving=self._saving(tokens))

    def steps(self, x_BSD: Tensor, tokens: TokenContext) -> Steps[Tensor]:
        """Run ``forward``, but yield while dispatch or combine is in flight; see ``interleave.py``.

        Hooks of this module and of ``moe`` do not run.

        Raises:
            ConfigError: ``recompute`` is "full".
        """
        return run_layer_in_steps(self.recompute, self._steps(x_BSD, tokens), self._saving(tokens))

    def _saving(self, *tokens: TokenContext) -> Saving | None:
        """Return where to save tensors; parameters and what all layers use are in memory anyway."""
        if self.saved is None or not torch.is_grad_enabled():
            return None

        def in_use() -> Iterator[Tensor]:
            yield from (one for one in self.parameters() if not is_dtensor(one))
            yield from self.buffers()
            yield from (tensor for one in tokens for tensor in one.rope)

        return Saving(self.saved, self._label, in_use)

    def _run_in_turns(self, tokens: TurnTokens, *xs_BSD: Tensor) -> tuple[Tensor, ...]:
        def steps(turn: int) -> Steps[Tensor]:
            context = tokens.tokens[turn]
            steps = self._steps(xs_BSD[turn], context)
            if self.recompute != "full":
                steps = run_layer_in_steps(self.recompute, steps, self._saving(context))
            return tokens.parameters.steps(turn, self, steps)

        return take_turns([steps(turn) for turn in range(len(xs_BSD))])

    def _run(self, x_BSD: Tensor, tokens: TokenContext) -> Tensor:
        if self.parallel and self.is_moe and self.moe.overlap is not None:
            return finish(self._steps(x_BSD, tokens))
        y_BSD = recomputed_block(self.attention_norm, x_BSD)
        if self.parallel:
            # Run before attention, as in ``_steps``, so that gradients of y are added in the same order.
            ffn_BSD = self._ffn(y_BSD, tokens)
            return x_BSD + self._attend(y_BSD, tokens) + ffn_BSD
        x_BSD = x_BSD + self._attend(y_BSD, tokens)
        return x_BSD + self._ffn(recomputed_block(self.ffn_norm, x_BSD), tokens)

    def _steps(self, x_BSD: Tensor, tokens: TokenContext) -> Steps[Tensor]:
        if not self.is_moe:
            return self._run(x_BSD, tokens)
        y_BSD = recomputed_block(self.attention_norm, x_BSD)
        if not self.parallel:
            x_BSD = x_BSD + self._attend(y_BSD, tokens)
            y_BSD = recomputed_block(self.ffn_norm, x_BSD)
        call = self.moe.begin(y_BSD, token_index=tokens.index_BS, mask=tokens.mask_BS)
        if self.parallel:
            x_BSD = x_BSD + self._attend(y_BSD, tokens)  # overlaps with dispatch
        yield
        call.compute()
        yield
        return x_BSD + call.result()

    def _attend(self, y_BSD: Tensor, tokens: TokenContext) -> Tensor:
        if self.is_moe:
            self.moe.prefetch()
        with EVENTS.span(Kind.COMPUTE, "attention", layer=self._label):
            attended_BSD: Tensor = self.attention(y_BSD, tokens.rope, tokens.documents)
            return attended_BSD

    def _ffn(self, y_BSD: Tensor, tokens: TokenContext) -> Tensor:
        if not self.is_moe:
            dense_BSD: Tensor = self.dense(y_BSD)
            return dense_BSD
        moe_BSD: Tensor = self.moe(y_BSD, token_index=tokens.index_BS, mask=tokens.mask_BS)
        return moe_BSD

    def extra_repr(self) -> str:
        return f"layer={self.layer}, parallel={self.parallel}, recompute={self.recompute}"


def norm_of(config: TransformerConfig, plan: ModelPlan) -> RMSNorm:
    """Build a norm of the model's layers."""
    return RMSNorm(config.hidden, config.norm_eps, dtype=plan.dtype, device="meta")


def attention_of(config: TransformerConfig, plan: ModelPlan) -> Attention:
    """Build an attention with this rank's heads."""
    return Attention(config.attention, plan.tp_group, plan.cp_group, context=plan.context, **_factory(plan))


def attention_width(config: TransformerConfig) -> int:
    """Return the width of a dense MLP with as much work as the projections of an attention."""
    attention = config.attention
    return 2 * (attention.heads + attention.kv_heads) * attention.head_dim // 3


def dense_of(config: TransformerConfig, plan: ModelPlan) -> DenseMLP:
    """Build a dense block with this rank's part of the width."""
    return DenseMLP(config.hidden, config.dense_ffn, plan.tp_group, **_factory(plan))


def moe_of(config: TransformerConfig, layer: int, plan: ModelPlan) -> MoELayer:
    """Build the MoE layer of layer ``layer`` with this rank's experts."""
    # If the full layer is recomputed, recomputation inside of the experts saves no memory.
    moe = replace(config.moe, recompute=config.moe.recompute and plan.recompute != "full")
    groups = MoEGroups(plan.expert_group, plan.sizes["etp"], plan.stage_group, plan.sequence_group)
    label = f"layers.{layer}.moe"
    factory = _factory(plan) | {"overlap": plan.expert_overlap or plan.overlap}
    return MoELayer.build(moe, groups, backend=plan.backend, seed=0, options=plan.options, label=label, **factory)


def _factory(plan: ModelPlan) -> dict[str, Any]:
    return {"overlap": plan.overlap, "dtype": plan.dtype, "device": "meta"}


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Allocate a module that was built on the meta device: parameters NaN until they are set, buffers zero.

    A model whose weights were never set then has a NaN loss.
    """
    module.to_empty(device=device)
    for parameter in module.parameters():
        parameter.fill_(torch.nan)
    for buffer in module.buffers():
        buffer.zero_()


BranchPoint = Literal["start", "dense", "second_attention", "second_dense"]
BRANCH_POINTS: tuple[BranchPoint, ...] = get_args(BranchPoint)


@dataclass(frozen=True)
class Shortcut:
    """Schedule of the expert branch: the modules after which the experts run and their results are combined.

    "start" is right after dispatch starts. The schedule changes no result.

    Args:
        compute: the experts run after this module, and combine starts. The modules before it hide dispatch.
        result: the results are added after this module. The modules since ``compute`` hide combine.

    Raises:
        ConfigError: an unknown module, or ``result`` is before ``compute``.
    """

    compute: BranchPoint = "dense"
    result: BranchPoint = "second_dense"

    def __post_init__(self) -> None:
        for name in (self.compute, self.result):
            if name not in BRANCH_POINTS:
                raise ConfigError(f"compute and result must be one of {', '.join(BRANCH_POINTS)}; got {name!r}")
        if BRANCH_POINTS.index(self.result) < BRANCH_POINTS.index(self.compute):
            raise ConfigError(f"result {self.result!r} must not be before compute {self.compute!r}")


class ShortcutBlock(TransformerBlock):
    """Layer ``layer`` of a model with ``config.shortcut`` on this rank. Weights are NaN until ``initialize`` sets them.

    With ``plan.overlap``, transfers of the experts are in flight while the rest of the layer computes. Without it, the
    same steps run sequentially. Outputs and gradients have the same bits.

    Args:
        layer: global id of a layer with experts.
        schedule: schedule of the expert branch; None: ``Shortcut()``.

    Attributes:
        attention_norm, attention, ffn_norm, moe, dense, second_attention_norm, second_attention, second_ffn_norm,
            second_dense: the modules, in the order of the picture above.

    Raises:
        ConfigError: a size is not divisible by the number of ranks, or ``layer`` has no experts.
    """

    def __init__(
        self, config: TransformerConfig, layer: int, plan: ModelPlan, schedule: Shortcut | None = None
    ) -> None:
        if layer in config.dense_layers or not config.shortcut:
            raise ConfigError(f"layer {layer} of this configuration has no experts with a shortcut")
        super().__init__(config, layer, plan)
        self.schedule = schedule or Shortcut()
        widths = (0, config.dense_ffn, attention_width(config), config.dense_ffn)  # by ``BRANCH_POINTS``
        compute, result = (BRANCH_POINTS.index(point) + 1 for point in (self.schedule.compute, self.schedule.result))
        self.moe.beside = (sum(widths[:compute]), sum(widths[compute:result]))

    def _add_modules(self, config: TransformerConfig, plan: ModelPlan) -> None:
        super()._add_modules(config, plan)
        self.dense = dense_of(config, plan)
        self.second_attention_norm = norm_of(config, plan)
        self.second_attention = attention_of(config, plan)
        self.second_ffn_norm = norm_of(config, plan)
        self.second_dense = dense_of(config, plan)

    def _run(self, x_BSD: Tensor, tokens: TokenContext) -> Tensor:
        return finish(self._steps(x_BSD, tokens))

    def _steps(self, x_BSD: Tensor, tokens: TokenContext) -> Steps[Tensor]:
        schedule = self.schedule
        self.moe.prefetch()
        x_BSD = x_BSD + self.attention(recomputed_block(self.attention_norm, x_BSD), tokens.rope, tokens.documents)
        y_BSD = recomputed_block(self.ffn_norm, x_BSD)
        call = self.moe.begin(y_BSD, token_index=tokens.index_BS, mask=tokens.mask_BS)
        yield
        experts_BSD: Tensor | None = None
        for point in BRANCH_POINTS:
            if point == "dense":
                x_BSD = x_BSD + self.dense(y_BSD)
            elif point == "second_attention":
                y_BSD = recomputed_block(self.second_attention_norm, x_BSD)
                x_BSD = x_BSD + self.second_attention(y_BSD, tokens.rope, tokens.documents)
            elif point == "second_dense":
                x_BSD = x_BSD + self.second_dense(recomputed_block(self.second_ffn_norm, x_BSD))
            if point == schedule.compute:
                call.compute()
                yield
            if point == schedule.result:
                experts_BSD = call.result()
        assert experts_BSD is not None
        return x_BSD + experts_BSD
