"""Expert load of all MoE layers of a model, and the update of router biases from it.

    after the last micro-batch of a step:
        loads = take_loads(model, stage_group)     one message for any number of layers
        update_biases(model, loads, rate)          DeepSeek-V3's aux-loss-free balancing, once per step

Routers count in training only, and once under activation checkpointing. A pipeline stage without MoE layers sends no
message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError
from moe_comm.layers.moe.expert_parallel import LENT_COUNTS
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.parallel.collectives import gather_values
from moe_comm.layers.parallel.module import state_key


@dataclass(frozen=True)
class LayerLoad:
    """Slots, (token, k) pairs, that the router of one layer assigned since the last ``take_loads``.

    Attributes:
        load_E: [E] int64 slots per expert before any drop, including zero-computation experts.
        dropped: slots that the capacity dropped, a scalar tensor.
        lent: ``LENT_COUNTS`` of the experts that were lent to other ranks.
    """

    load_E: Tensor
    dropped: Tensor
    lent: Tensor = field(default_factory=lambda: torch.zeros(len(LENT_COUNTS), dtype=torch.int64, device="cpu"))

    @property
    def imbalance(self) -> float:
        """Maximum load divided by mean load; 1 for perfect balance or no tokens."""
        return self._statistics.imbalance[0]

    @property
    def least(self) -> float:
        """Minimum load divided by mean load; 1 for perfect balance or no tokens."""
        return self._statistics.least[0]

    @property
    def mean(self) -> float:
        """Mean number of slots per expert."""
        return self._statistics.mean[0]

    @property
    def diversity(self) -> float:
        """exp(H)/E, where H is the entropy in nats of the distribution of slots over experts.

        1 for an even distribution or no tokens, 1/E if one expert has all slots.
        """
        return self._statistics.diversity[0]

    @property
    def dead(self) -> int:
        """Number of experts without a slot."""
        return self._statistics.dead[0]

    @property
    def drop_rate(self) -> float:
        """Fraction of the slots that the capacity dropped."""
        return self._statistics.drop_rate[0]

    @property
    def _statistics(self) -> LoadStatistics:
        return load_statistics(self.load_E[None], self.dropped.view(1))


@dataclass(frozen=True)
class LoadStatistics:
    """The properties of ``LayerLoad`` for each of L layers."""

    imbalance: list[float]
    least: list[float]
    mean: list[float]
    diversity: list[float]
    dead: list[int]
    drop_rate: list[float]


def load_statistics(load_LE: Tensor, dropped_L: Tensor) -> LoadStatistics:
    """Compute the statistics of L layers in one batch of operations, which is much faster than layer by layer.

    Args:
        load_LE: [L, E] int64 slots per expert.
    """
    experts = load_LE.shape[1]
    total_L, dropped_L = load_LE.sum(1).double(), dropped_L.double()
    empty_L = total_L == 0
    divisor_L = total_L.clamp(min=1)
    entropy_L = torch.special.entr(load_LE.double() / divisor_L[:, None]).sum(1)
    least_L, most_L = load_LE.aminmax(dim=1)
    rows = torch.stack(
        [
            (most_L * experts / divisor_L).masked_fill(empty_L, 1.0),
            (least_L * experts / divisor_L).masked_fill(empty_L, 1.0),
            total_L / experts,
            (entropy_L.exp() / experts).masked_fill(empty_L, 1.0),
            (dropped_L / divisor_L).masked_fill(empty_L, 0.0),
        ]
    )
    imbalance, least, mean, diversity, drop_rate = rows.tolist()
    return LoadStatistics(imbalance, least, mean, diversity, (load_LE == 0).sum(1).tolist(), drop_rate)


def moe_layers(module: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """Iterate over the MoE layers of ``module`` and their names in a state dict."""
    for name, child in module.named_modules():
        if isinstance(child, MoELayer):
            yield state_key(name), child


@torch.no_grad()
def take_loads(module: nn.Module, group: ProcessGroup | None = None) -> dict[str, LayerLoad]:
    """Return the load of each MoE layer since the last call, summed over ``group``, and reset the counters.

    Args:
        module: the model.
        group: the ranks of this pipeline stage, which must all call; None: this rank's tokens only.

    Returns:
        The load by layer name, equal on all ranks of the group; tensors are on the layers' device.

    Raises:
        PeerDied, PeerTimeout: a rank failed, or did not call in time.
    """
    layers = list(moe_layers(module))
    if not layers:
        return {}
    counts = [
        (layer.router.load_E, layer.dropped_total.view(1), layer.take_lent(layer.copies).to(layer.router.load_E.device))
        for _, layer in layers
    ]
    sizes = [part.numel() for parts in counts for part in parts]
    totals = gather_values(torch.cat([torch.cat(one) for one in counts]), group, "counting the load of experts").sum(0)
    parts, loads = iter(totals.split(sizes)), {}
    for name, layer in layers:
        layer.router.load_E.zero_()
        layer.dropped_total.zero_()
        loads[name] = LayerLoad(next(parts), next(parts)[0], next(parts))
    return loads


@torch.no_grad()
def update_biases(module: nn.Module, loads: Mapping[str, LayerLoad], rate: float, recenter: bool = False) -> None:
    """Update the correction bias of each router that has one (``Router.update_bias``).

    Args:
        module: the model.
        loads: the load of all tokens of the step, as ``take_loads`` returned it.
        recenter: subtract the mean from each bias afterwards.

    Raises:
        ConfigError: ``loads`` has no entry for a layer with a correction bias.
    """
    for name, layer in moe_layers(module):
        if layer.router.correction_bias is None:
            continue
        if name not in loads:
            raise ConfigError(f"loads has no entry for layer {name!r}; its layers are {', '.join(loads) or 'none'}")
        layer.router.update_bias(loads[name].load_E, rate, recenter)
