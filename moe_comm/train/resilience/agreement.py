"""What all ranks of a run agree on in a step, before any of them changes its weights: one small all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_comm.layers.moe.load import LayerLoad, moe_layers, take_loads
from moe_comm.train.metrics import Load
from moe_comm.train.ranks import Ranks


@dataclass(frozen=True)
class Agreed:
    """The same on every rank.

    loss: of the whole step; a rank whose loss is not finite adds nothing to it. loads: by layer. balance: losses, by
    layer. bad: ranks whose loss or routers' logits are not finite. damaged: by rank, blocks of rows that arrived
    damaged; ranks without any are left out. stops: reasons to stop that some rank has.
    """

    loss: float
    loads: dict[str, LayerLoad]
    balance: tuple[float, ...]
    bad: tuple[int, ...]
    damaged: dict[int, int]
    stops: tuple[bool, ...]

    def load(self) -> Load:
        return Load.of(self.loads, self.balance)


class Agreement:
    """The counters of one rank's MoE layers, and how ranks agree on them. Every rank makes one alike.

    Args:
        stages: this rank's parts of the model. names: of all MoE layers of the whole model. num_experts: of each.
    """

    def __init__(self, stages: Sequence[nn.Module], names: Sequence[str], num_experts: int, ranks: Ranks) -> None:
        self._stages, self._names, self._num_experts, self._ranks = list(stages), list(names), num_experts, ranks
        self._layers = [layer for stage in stages for layer in moe_layers(stage)]
        for _, layer in self._layers:
            # Not errors inside of the step, which only some ranks would have: all decide together, after it.
            layer.router.drop_invalid = True
            layer.dispatcher.damage.count_only = True

    def agree(self, loss: float, stops: Sequence[bool]) -> Agreed:
        """Join what the ranks know of the step; their counters start again. Collective."""
        invalid = self.take_invalid()
        bad_W, damaged_W = torch.zeros(2, self._ranks.world, dtype=torch.float64)
        bad_W[self._ranks.rank] = not math.isfinite(loss) or invalid > 0
        damaged_W[self._ranks.rank] = self.take_damage()
        value = torch.tensor([loss if math.isfinite(loss) else 0.0], dtype=torch.float64)
        parts = [value, bad_W, damaged_W, torch.tensor(stops, dtype=torch.float64), self._own_loads().flatten()]
        sums = torch.split(self._ranks.sum(torch.cat(parts)), [part.numel() for part in parts])
        loads_LE = sums[4].view(-1, self._num_experts + 2)
        loads = {
            name: LayerLoad(row[:-2].long(), row[-2].long()) for name, row in zip(self._names, loads_LE, strict=True)
        }
        # ``loss`` is a Python float of the whole step: it was summed over micro-batches, here it is over ranks.
        return Agreed(
            loss=float(sums[0]),
            loads=loads,
            balance=tuple(loads_LE[:, -1].tolist()),
            bad=tuple(sums[1].nonzero().flatten().tolist()),
            damaged={rank: int(count) for rank, count in enumerate(sums[2].tolist()) if count},
            stops=tuple(flag > 0 for flag in sums[3].tolist()),
        )

    def take_invalid(self) -> int:
        """Tokens whose logits no router on this rank could use since it was last asked."""
        found = 0
        for _, layer in self._layers:
            found += int(layer.router.invalid)
            layer.router.invalid.zero_()
        return found

    def take_damage(self) -> int:
        """Blocks of rows that arrived damaged on this rank since it was last asked."""
        return sum(layer.dispatcher.damage.take() for _, layer in self._layers)

    def _own_loads(self) -> Tensor:
        """[MoE layers, E + 2]: slots to each expert, dropped slots, balance loss; zeros for layers held elsewhere."""
        own = torch.zeros(len(self._names), self._num_experts + 2, dtype=torch.float64)
        for stage in self._stages:
            for name, load in take_loads(stage).items():
                row = own[self._names.index(name)]
                row[:-2] = load.load_E
                row[-2] = load.dropped
        for name, layer in self._layers:  # of the last micro-batch
            own[self._names.index(name), -1] = float(layer.router.losses.get("balance", 0.0))
        return own
