"""A layer whose experts stand beside it: ScMoE's shortcut (arXiv 2404.05019), wired as in LongCat-Flash (2509.01322).

    x ─┬─ norm ─ attention ─ + ─┬─ norm ─┬─ dense ─ + ─┬─ norm ─ attention ─ + ─┬─ norm ─ dense ─ + ─ + ─▶
       ╰─────────────────────╯  ├────────│──────────╯  ╰─────────────────────╯  ╰─────────────────╯   │
                                         ╰─ experts ──────────────────────────────────────────────────╯

The experts' branch leaves after the first attention and comes back at the end. What stands beside it is of the same
layer, so its transfers hide behind work of the same micro-batch, forward and backward. With ``Shortcut()``:

    computes     norm │ dense │ experts │ attention, dense │ + ─▶
    under way         dispatch ═▶       combine ══════════▶

    backward     ◀─ + │ dense, attention │ experts │ dense │ norm
    under way          ◀══════ gradients of combine        ◀═ gradients of dispatch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.interleave import Steps, finish
from moe_comm.layers.parallel.recompute import again_inside
from moe_comm.layers.transformer.block import Tokens, TransformerBlock, attention_of, dense_of, norm_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model_plan import ModelPlan

Place = Literal["start", "dense", "second_attention", "second_dense"]
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class Shortcut:
    """After what of their layer the experts go on: "start" is when their tokens have left. No number depends on it.

    compute: experts compute, and their results leave. What was before hides dispatch.
    result: results are taken. What was since ``compute`` hides combine.

    Raises:
        ConfigError: an unknown place, or results would be taken before they are computed.
    """

    compute: Place = "dense"
    result: Place = "second_dense"

    def __post_init__(self) -> None:
        for name in (self.compute, self.result):
            if name not in PLACES:
                raise ConfigError(f"the experts' branch goes on after one of {', '.join(PLACES)}; got {name!r}")
        if PLACES.index(self.result) < PLACES.index(self.compute):
            raise ConfigError(f"results, after {self.result!r}, are taken before {self.compute!r}, which computes them")


class ShortcutBlock(TransformerBlock):
    """Layer ``layer`` of a model with ``config.shortcut`` on this rank. Weights are unset (NaN); see ``initialize``.

    With ``plan.overlap`` the experts' transfers are under way while the rest of the layer computes; without it they run
    one after the other, in the same places. Outputs and gradients have the same bits.

    Args:
        layer: global id of a layer with experts.
        schedule: where the experts' steps stand among the others.

    Attributes:
        attention_norm, attention, ffn_norm, moe, dense, second_attention_norm, second_attention, second_ffn_norm,
        second_dense: in the order of the picture above.

    Raises:
        ConfigError: something does not divide over the plan's ranks, or ``layer`` has no experts.
    """

    def __init__(
        self, config: TransformerConfig, layer: int, plan: ModelPlan, schedule: Shortcut | None = None
    ) -> None:
        if layer in config.dense_layers or not config.shortcut:
            raise ConfigError(f"layer {layer} of this configuration has no experts with a shortcut")
        super().__init__(config, layer, plan)
        self.schedule = schedule or Shortcut()

    def _add_parts(self, config: TransformerConfig, plan: ModelPlan) -> None:
        super()._add_parts(config, plan)
        self.dense = dense_of(config, plan)
        self.second_attention_norm = norm_of(config, plan)
        self.second_attention = attention_of(config, plan)
        self.second_ffn_norm = norm_of(config, plan)
        self.second_dense = dense_of(config, plan)

    def _run(self, x_BSD: Tensor, tokens: Tokens) -> Tensor:
        return finish(self._steps(x_BSD, tokens))

    def _steps(self, x_BSD: Tensor, tokens: Tokens) -> Steps[Tensor]:
        schedule = self.schedule
        x_BSD = x_BSD + self.attention(again_inside(self.attention_norm, x_BSD), tokens.rope, tokens.documents)
        y_BSD = again_inside(self.ffn_norm, x_BSD)
        call = self.moe.begin(y_BSD, token_index=tokens.index_BS)
        yield
        experts_BSD: Tensor | None = None
        for place in PLACES:
            if place == "dense":
                x_BSD = x_BSD + self.dense(y_BSD)
            elif place == "second_attention":
                y_BSD = again_inside(self.second_attention_norm, x_BSD)
                x_BSD = x_BSD + self.second_attention(y_BSD, tokens.rope, tokens.documents)
            elif place == "second_dense":
                x_BSD = x_BSD + self.second_dense(again_inside(self.second_ffn_norm, x_BSD))
            if place == schedule.compute:
                call.compute()
                yield
            if place == schedule.result:
                experts_BSD = call.result()
        assert experts_BSD is not None
        return x_BSD + experts_BSD
