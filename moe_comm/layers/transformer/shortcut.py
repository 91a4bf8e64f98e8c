"""A layer with a parallel expert branch: ScMoE's shortcut (arXiv 2404.05019), wired as in LongCat-Flash (2509.01322).

    x ─┬─ norm ─ attention ─ + ─┬─ norm ─┬─ dense ─ + ─┬─ norm ─ attention ─ + ─┬─ norm ─ dense ─ + ─ + ─▶
       ╰─────────────────────╯  ├────────│──────────╯  ╰─────────────────────╯  ╰─────────────────╯   │
                                         ╰─ experts ──────────────────────────────────────────────────╯

The expert branch starts after the first attention and is added at the end. Its transfers overlap with other modules of
the same layer and micro-batch, in forward and backward. With ``Shortcut()``:

    computes     norm │ dense │ experts │ attention, dense │ + ─▶
    in flight         dispatch ═▶       combine ══════════▶

    backward     ◀─ + │ dense, attention │ experts │ dense │ norm
    in flight          ◀══════ gradients of combine        ◀═ gradients of dispatch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.interleave import Steps, finish
from moe_comm.layers.parallel.recompute import recomputed_block
from moe_comm.layers.transformer.block import (
    TokenContext,
    TransformerBlock,
    attention_of,
    attention_width,
    dense_of,
    norm_of,
)
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model_plan import ModelPlan

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
