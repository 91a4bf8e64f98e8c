"""All-reduce of a step's summary, from which all ranks make the same decision before the weights change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_comm.layers.moe.load import LayerLoad, moe_layers, take_loads
from moe_comm.train.metrics import ExpertLoad
from moe_comm.train.ranks import Ranks


@dataclass(frozen=True)
class StepSummary:
    """The summary of a step over all ranks, equal on every rank."""

    loss: float  # loss of the step; ranks with a non-finite loss contribute zero
    loads: dict[str, LayerLoad]  # expert loads, by layer
    balance: tuple[float, ...]  # balance losses, by layer
    bad: tuple[int, ...]  # ranks with a non-finite loss or router logits
    damaged: dict[int, int]  # number of row blocks with a wrong checksum, by rank; only ranks that have any
    stops: tuple[bool, ...]  # for each reason to stop: whether any rank has it

    def load(self) -> ExpertLoad:
        return ExpertLoad.of(self.loads, self.balance)


class Agreement:
    """Reduces losses, stop requests and MoE counters over the ranks. All ranks must pass equal ``names``.

    Args:
        stages: this rank's stages of the model.
        names: names of all MoE layers of the whole model.
        num_experts: number of experts per layer.
    """

    def __init__(self, stages: Sequence[nn.Module], names: Sequence[str], num_experts: int, ranks: Ranks) -> None:
        self._stages, self._names, self._num_experts, self._ranks = list(stages), list(names), num_experts, ranks
        self._layers = [layer for stage in stages for layer in moe_layers(stage)]
        for _, layer in self._layers:
            # An error inside the step would be raised on some ranks only. Count, and decide together after the step.
            layer.router.drop_invalid = True
            layer.dispatcher.corruption.count_only = True

    def agree(self, loss: float, stops: Sequence[bool]) -> StepSummary:
        """Return the summary of the step over all ranks, and reset the counters. Collective.

        Args:
            loss: local loss of this rank.
            stops: whether this rank has each reason to stop.
        """
        invalid = self.take_invalid()
        bad_W, damaged_W = torch.zeros(2, self._ranks.world, dtype=torch.float64, device="cpu")
        bad_W[self._ranks.rank] = not math.isfinite(loss) or invalid > 0
        damaged_W[self._ranks.rank] = self.take_damage()
        value = torch.tensor([loss if math.isfinite(loss) else 0.0], dtype=torch.float64, device="cpu")
        parts = [
            value,
            bad_W,
            damaged_W,
            torch.tensor(stops, dtype=torch.float64, device="cpu"),
            self._local_loads().flatten(),
        ]
        sums = torch.split(self._ranks.sum(torch.cat(parts)), [part.numel() for part in parts])
        loads_LE = sums[4].view(-1, self._num_experts + 2)
        loads = {
            name: LayerLoad(row[:-2].long(), row[-2].long()) for name, row in zip(self._names, loads_LE, strict=True)
        }
        # ``loss`` was already summed over micro-batches; here it is summed over ranks.
        return StepSummary(
            loss=float(sums[0]),
            loads=loads,
            balance=tuple(loads_LE[:, -1].tolist()),
            bad=tuple(sums[1].nonzero().flatten().tolist()),
            damaged={rank: int(count) for rank, count in enumerate(sums[2].tolist()) if count},
            stops=tuple(flag > 0 for flag in sums[3].tolist()),
        )

    def take_invalid(self) -> int:
        """Return and reset the number of tokens with invalid router logits on this rank."""
        count = 0
        for _, layer in self._layers:
            count += int(layer.router.invalid)
            layer.router.invalid.zero_()
        return count

    def take_damage(self) -> int:
        """Return and reset the number of damaged blocks of rows on this rank."""
        return sum(layer.dispatcher.corruption.take() for _, layer in self._layers)

    def _local_loads(self) -> Tensor:
        """Return [MoE layers, E + 2]: slots per expert, dropped slots, balance loss; zeros for other stages."""
        loads = torch.zeros(len(self._names), self._num_experts + 2, dtype=torch.float64, device="cpu")
        for stage in self._stages:
            for name, load in take_loads(stage).items():
                row = loads[self._names.index(name)]
                row[:-2] = load.load_E
                row[-2] = load.dropped
        for name, layer in self._layers:  # the balance loss is that of the last micro-batch
            loads[self._names.index(name), -1] = float(layer.router.losses.get("balance", 0.0))
        return loads
