"""One layer of a transformer: attention and a feed-forward block, experts or dense, each behind a norm.

    one after the other    x ─┬─ norm ─ attention ─ + ─┬─ norm ─ MoE or dense ─ + ─▶
                              ╰─────────────────────╯  ╰──────────────────────╯

    parallel               x ─┬─ norm ─┬─ attention ────── + ─ + ─▶
                              │        ╰─ MoE or dense ────╯   │
                              ╰────────────────────────────────╯

Between all of these a rank has its own tokens, [B, S / (cp * tp), D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moe_comm.dispatch.deferred import connect
from moe_comm.layers.attention.layer import Attention
from moe_comm.layers.attention.rope import RopeTable
from moe_comm.layers.attention.sequence import Documents
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.parallel.dense import DenseMLP
from moe_comm.layers.parallel.interleave import Steps, finish
from moe_comm.layers.parallel.norm import RMSNorm
from moe_comm.layers.parallel.recompute import again_inside, run_layer, run_layer_in_steps
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS


@dataclass(frozen=True, eq=False)
class Tokens:
    """What all layers need to know about a micro-batch's tokens, worked out once.

    rope: sines and cosines of the context-parallel rank's tokens. documents: which attend to each other; None: each
    row is one. index_BS: places of this rank's tokens in the global micro-batch; None: no layer asks.
    """

    rope: RopeTable
    documents: Documents | None = None
    index_BS: Tensor | None = None


class TransformerBlock(nn.Module):
    """Layer ``layer`` of the model ``config`` on this rank. Weights are unset (NaN); see ``initialize``.

    Args:
        layer: global id, which decides whether its feed-forward block has experts.

    Attributes:
        attention_norm, attention. ffn_norm: missing in a parallel block. moe or dense: the other is missing.

    Raises:
        ConfigError: something does not divide over the plan's ranks.
    """

    def __init__(self, config: TransformerConfig, layer: int, plan: ModelPlan) -> None:
        super().__init__()
        self.layer, self.parallel, self.recompute = layer, config.parallel_block, plan.recompute
        self._label = f"layers.{layer}"
        self.is_moe = layer not in config.dense_layers
        self._add_parts(config, plan)
        if not plan.is_meta:
            materialize(self, plan.device)
            if self.is_moe:
                self.moe.dispatcher = connect(self.moe.dispatcher, plan.device)

    def _add_parts(self, config: TransformerConfig, plan: ModelPlan) -> None:
        """The modules of this layer, on the meta device."""
        self.attention_norm = norm_of(config, plan)
        self.attention = attention_of(config, plan)
        if not config.parallel_block:
            self.ffn_norm = norm_of(config, plan)
        if self.is_moe:
            self.moe = moe_of(config, self.layer, plan)
        else:
            self.dense = dense_of(config, plan)

    def forward(self, x_BSD: Tensor, tokens: Tokens) -> Tensor:
        """[B, S / (cp * tp), D] to the same shape. Collective over all ranks of the pipeline stage."""
        return run_layer(self.recompute, self._run, x_BSD, tokens)

    def steps(self, x_BSD: Tensor, tokens: Tokens) -> Steps[Tensor]:
        """``forward`` that gives way while tokens, and while results, are under way: see ``interleave.py``.

        Hooks on this module, and on ``moe``, do not run.

        Raises:
            ConfigError: ``recompute`` is "full".
        """
        return run_layer_in_steps(self.recompute, self._steps(x_BSD, tokens))

    def _run(self, x_BSD: Tensor, tokens: Tokens) -> Tensor:
        if self.parallel and self.is_moe and self.moe.overlap is not None:
            return finish(self._steps(x_BSD, tokens))
        y_BSD = again_inside(self.attention_norm, x_BSD)
        if self.parallel:
            # Before attention, as in ``_steps``: gradients of y are added up in the same order.
            ffn_BSD = self._ffn(y_BSD, tokens)
            return x_BSD + self._attended(y_BSD, tokens) + ffn_BSD
        x_BSD = x_BSD + self._attended(y_BSD, tokens)
        return x_BSD + self._ffn(again_inside(self.ffn_norm, x_BSD), tokens)

    def _steps(self, x_BSD: Tensor, tokens: Tokens) -> Steps[Tensor]:
        if not self.is_moe:
            return self._run(x_BSD, tokens)
        y_BSD = again_inside(self.attention_norm, x_BSD)
        if not self.parallel:
            x_BSD = x_BSD + self._attended(y_BSD, tokens)
            y_BSD = again_inside(self.ffn_norm, x_BSD)
        call = self.moe.begin(y_BSD, token_index=tokens.index_BS)
        if self.parallel:
            x_BSD = x_BSD + self._attended(y_BSD, tokens)  # behind which tokens travel
        yield
        call.compute()
        yield
        return x_BSD + call.result()

    def _attended(self, y_BSD: Tensor, tokens: Tokens) -> Tensor:
        with EVENTS.span(Kind.COMPUTE, "attention", layer=self._label):
            attended_BSD: Tensor = self.attention(y_BSD, tokens.rope, tokens.documents)
            return attended_BSD

    def _ffn(self, y_BSD: Tensor, tokens: Tokens) -> Tensor:
        ffn_BSD: Tensor = self.moe(y_BSD, token_index=tokens.index_BS) if self.is_moe else self.dense(y_BSD)
        return ffn_BSD

    def extra_repr(self) -> str:
        return f"layer={self.layer}, parallel={self.parallel}, recompute={self.recompute}"


def norm_of(config: TransformerConfig, plan: ModelPlan) -> RMSNorm:
    """A norm of ``config``'s layers."""
    return RMSNorm(config.hidden, config.norm_eps, dtype=plan.dtype, device="meta")


def attention_of(config: TransformerConfig, plan: ModelPlan) -> Attention:
    """An attention of ``config``'s layers, this rank's heads."""
    return Attention(
        config.attention,
        plan.tp_group,
        plan.cp_group,
        context=plan.context,
        overlap=plan.overlap,
        dtype=plan.dtype,
        device="meta",
    )


def dense_of(config: TransformerConfig, plan: ModelPlan) -> DenseMLP:
    """A dense block of ``config``'s layers, this rank's part of its width."""
    return DenseMLP(
        config.hidden, config.dense_ffn, plan.tp_group, overlap=plan.overlap, dtype=plan.dtype, device="meta"
    )


def moe_of(config: TransformerConfig, layer: int, plan: ModelPlan) -> MoELayer:
    """The experts of layer ``layer``, those of this rank."""
    # A whole layer that is computed again has everything at hand that experts could compute again.
    again = config.moe.recompute and plan.recompute != "full"
    return MoELayer.build(
        replace(config.moe, recompute=again),
        plan.expert_group,
        plan.backend,
        etp=plan.sizes["etp"],
        tokens_group=plan.stage_group,
        sequence_group=plan.sequence_group,
        seed=0,
        options=plan.options,
        dtype=plan.dtype,
        device="meta",
        label=f"layers.{layer}.moe",
        overlap=plan.overlap,
    )


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Give a module built on the meta device memory on ``device``: parameters NaN until they are set, buffers zero.

    So a model whose weights were never set says so in its first loss.
    """
    module.to_empty(device=device)
    for parameter in module.parameters():
        parameter.fill_(torch.nan)
    for buffer in module.buffers():
        buffer.zero_()
