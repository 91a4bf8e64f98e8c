"""How the tokens of a step were spread over experts, for all MoE layers of a model at once; and bias updates from it.

    after the last micro-batch of a step:
        loads = take_loads(model, stage_group)     one message, whatever the number of layers
        update_biases(model, loads, rate)          DeepSeek-V3's aux-loss-free balancing, once a step

Routers count in training only, and once where activation checkpointing runs them twice. A pipeline stage without MoE
layers has nothing to count and sends nothing; its ranks all know that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.parallel.collectives import gather_values
from moe_comm.layers.parallel.names import state_key


@dataclass(frozen=True)
class LayerLoad:
    """What one layer's router chose since it was last asked.

    load_E: [E] int64 slots per expert, zero-computation ones included, before any drop. dropped: by the capacity.
    """

    load_E: Tensor
    dropped: Tensor

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect balance, and the value for no tokens at all."""
        return self._spread.imbalance[0]

    @property
    def least(self) -> float:
        """Smallest load over mean load; 1 is perfect balance, and the value for no tokens at all."""
        return self._spread.least[0]

    @property
    def mean(self) -> float:
        """Slots of an average expert."""
        return self._spread.mean[0]

    @property
    def diversity(self) -> float:
        """exp(H)/E, H the entropy in nats of how slots are spread over experts: 1 for an even spread, 1/E where one
        expert gets everything; 1 for no tokens at all."""
        return self._spread.diversity[0]

    @property
    def dead(self) -> int:
        """Experts that no token chose."""
        return self._spread.dead[0]

    @property
    def drop_rate(self) -> float:
        """Share of the chosen slots that the capacity dropped."""
        return self._spread.drop_rate[0]

    @property
    def _spread(self) -> Spread:
        return spread(self.load_E[None], self.dropped.view(1))


@dataclass(frozen=True)
class Spread:
    """How the slots of L layers are spread over their experts; the numbers of ``LayerLoad``, for each layer."""

    imbalance: list[float]
    least: list[float]
    mean: list[float]
    diversity: list[float]
    dead: list[int]
    drop_rate: list[float]


def spread(load_LE: Tensor, dropped_L: Tensor) -> Spread:
    """The numbers of L layers at once: single ones would take a millisecond for every seven layers.

    Args:
        load_LE: [L, E] int64 slots per expert. dropped_L: [L] slots that the capacity dropped.
    """
    experts = load_LE.shape[1]
    total_L, dropped_L = load_LE.sum(1).double(), dropped_L.double()
    none_L = total_L == 0
    some_L = total_L.clamp(min=1)
    entropy_L = torch.special.entr(load_LE.double() / some_L[:, None]).sum(1)
    least_L, most_L = load_LE.aminmax(dim=1)
    rows = torch.stack(
        [
            (most_L * experts / some_L).masked_fill(none_L, 1.0),
            (least_L * experts / some_L).masked_fill(none_L, 1.0),
            total_L / experts,
            (entropy_L.exp() / experts).masked_fill(none_L, 1.0),
            (dropped_L / some_L).masked_fill(none_L, 0.0),
        ]
    )
    imbalance, least, mean, diversity, drop_rate = rows.tolist()
    return Spread(imbalance, least, mean, diversity, (load_LE == 0).sum(1).tolist(), drop_rate)


def moe_layers(module: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """Every MoE layer of ``module`` and its name, as in a state dict."""
    for name, child in module.named_modules():
        if isinstance(child, MoELayer):
            yield state_key(name), child


@torch.no_grad()
def take_loads(module: nn.Module, group: ProcessGroup | None = None) -> dict[str, LayerLoad]:
    """The load of every MoE layer since the last call, summed over ``group``; counters start again from zero.

    Args:
        group: the ranks of this pipeline stage, all of which must call; None: this rank's tokens alone.

    Returns:
        By the layer's name, the same on every rank of the group; tensors on the layers' device.

    Raises:
        PeerDied, PeerTimeout: a rank is gone, or did not call in time.
    """
    layers = list(moe_layers(module))
    if not layers:
        return {}
    counted = torch.cat([torch.cat([m.router.load_E, m.dropped_total.view(1)]) for _, m in layers])
    totals = gather_values(counted, group, "counting the load of experts").sum(0)
    found = {}
    for (name, layer), part in zip(layers, totals.split([m.router.load_E.numel() + 1 for _, m in layers]), strict=True):
        layer.router.load_E.zero_()
        layer.dropped_total.zero_()
        found[name] = LayerLoad(part[:-1], part[-1])
    return found


@torch.no_grad()
def update_biases(module: nn.Module, loads: Mapping[str, LayerLoad], rate: float, recenter: bool = False) -> None:
    """Move every router's correction bias towards balance (``Router.update_bias``); routers without one are left.

    Args:
        loads: of all tokens of the step, as ``take_loads`` returned them: the same on every rank.

    Raises:
        ConfigError: ``loads`` lacks a layer that has a correction bias.
    """
    for name, layer in moe_layers(module):
        if layer.router.correction_bias is None:
            continue
        if name not in loads:
            raise ConfigError(f"no load of layer {name!r} was given; there are {', '.join(loads) or 'none'}")
        layer.router.update_bias(loads[name].load_E, rate, recenter)
