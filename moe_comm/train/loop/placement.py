"""Placement of experts during training: the window of loads, the decisions, and the switches.

step   loads of all layers ──▶ a window of the last steps for each layer
every ``every`` steps: each rank decides for each layer from the same integers (``topology.rebalance``)
         optimizer ─▶ move masters and state of experts ─▶ publish weights ─▶ next step
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_comm.errors import CheckpointError
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.load import LayerLoad, moe_layers
from moe_comm.layers.parallel.collectives import channel_of, gather_values, sum_values
from moe_comm.layers.transformer.model import Transformer
from moe_comm.observe.records import PlacementLine
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.topology import ParallelMesh, Placement
from moe_comm.topology.placement_replay import LoadWindow
from moe_comm.topology.rebalance import Decision, DecisionSettings
from moe_comm.train.metrics import PlacementReport
from moe_comm.train.optim import Optimizer
from moe_comm.train.parallel import DataParallel
from moe_comm.train.parallel.relocation import declare_placement, parameters_of, relocate_experts
from moe_comm.train.sections import PlacementSection

FORWARD_BACKWARD = 6
"""FLOPs of a row for each weight of its expert, in forward and backward."""
PROBE_BYTES = 1 << 20
"""Bytes that each rank sends to each other one in the measurement of the transfer rate."""


@dataclass(frozen=True)
class SwitchTimes:
    """Seconds of one row on its rank, and of one expert between two ranks; equal on all ranks."""

    per_row: float
    per_expert: float


class ExpertPlacements:
    """The placements of all MoE layers of a run, and the loads of the last steps. Equal on all ranks.

    Args:
        section: settings.
        stages: this rank's stages of the model.
        names: names of all MoE layers of the whole model.
        num_experts: real experts of each layer.

    Attributes:
        by_layer: the placement of each layer.
        windows: the loads that the next decision of each layer sees.
        times: measured at the first decision; None before.
    """

    def __init__(
        self,
        section: PlacementSection,
        stages: Sequence[Transformer],
        names: Sequence[str],
        num_experts: int,
        data_parallel: DataParallel,
        optimizer: Optimizer,
    ) -> None:
        self.section, self._data_parallel, self._optimizer = section, data_parallel, optimizer
        self._mesh: ParallelMesh = data_parallel.mesh
        self._layers: dict[str, MoELayer] = {name: layer for stage in stages for name, layer in moe_layers(stage)}
        default = Placement.contiguous(num_experts, self._mesh.size("ep"))
        self.by_layer = dict.fromkeys(names, default)
        self.windows = {name: LoadWindow(section.window) for name in names}
        self.times: SwitchTimes | None = None

    @property
    def active(self) -> bool:
        """Whether placements can change."""
        return self.section.kind != "fixed" and self._mesh.size("ep") > 1 and bool(self.by_layer)

    def after_optimizer(self, step: int, loads: Mapping[str, LayerLoad]) -> PlacementReport | None:
        """Record the loads of ``step`` (from 1), and switch placements if it is time. Collective.

        Call it between the optimizer's step and ``DataParallel.publish``.

        Returns:
            The decisions and what they moved; None if it is not time for decisions.

        Raises:
            RankMismatch, PeerDied, PeerTimeout: a switch failed.
        """
        if not self.active:
            return None
        experts = next(iter(self.by_layer.values())).num_experts
        for name, window in self.windows.items():
            window.add(loads[name].load_E[:experts].tolist())
        if step % self.section.every or any(len(one.recent) < one.size for one in self.windows.values()):
            return None
        decisions = self._decide()
        lines = [PlacementLine.of(step, name, one, self.by_layer[name]) for name, one in decisions.items()]
        began, sent = time.perf_counter(), 0
        for name, decision in decisions.items():
            if decision.placement is not None:
                sent += self.switch(name, decision.placement)
        moved = sum_values(torch.tensor([float(sent)], dtype=torch.float64), self._mesh.world_group)
        return PlacementReport.of(lines, int(moved), time.perf_counter() - began)

    def state(self) -> dict[str, Any]:
        """Return the JSON state of placements and window."""
        windows = {name: window.state() for name, window in self.windows.items()}
        placements = {name: json.loads(placement.to_json()) for name, placement in self.by_layer.items()}
        return {"mapping": str(self._mesh.config), "layers": placements, "windows": windows}

    def load(self, state: object, *, move: bool) -> None:
        """Restore a result of ``state``; that of another mapping is ignored. Collective with ``move``.

        Args:
            state: the state; None for a checkpoint without one.
            move: the loaded weights are those of the present placement and are moved. Otherwise they are those of the
                saved one. Call ``DataParallel.publish`` afterwards.

        Raises:
            CheckpointError: the state is damaged.
        """
        if not isinstance(state, dict) or state.get("mapping") != str(self._mesh.config):
            return
        try:
            saved = {name: Placement.from_json(json.dumps(state["layers"][name])) for name in self.by_layer}
            windows = {name: LoadWindow.of(self.section.window, state["windows"][name]) for name in self.by_layer}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the placement of experts in the checkpoint is damaged: {error!r}") from error
        self.windows = windows
        for name, placement in saved.items():
            if placement == self.by_layer[name]:
                continue
            if move:
                self.switch(name, placement)
            else:
                self._declare(name, placement)

    def _declare(self, name: str, placement: Placement) -> None:
        if name in self._layers:
            declare_placement(self._layers[name], name, placement, self._data_parallel)
        self.by_layer[name] = placement

    def switch(self, name: str, placement: Placement) -> int:
        """Move the experts of one layer. Collective, between two steps; call ``DataParallel.publish`` afterwards.

        Returns:
            Bytes that this rank sent; 0 if its stage does not have the layer.

        Raises:
            ConfigError, RankMismatch, PeerDied, PeerTimeout: see ``relocate_experts``. The layer keeps its placement.
        """
        sent = 0
        if name in self._layers:
            layer = self._layers[name]
            sent = relocate_experts(layer, name, placement, self._data_parallel, self._optimizer.state_tensors)
        self.by_layer[name] = placement
        return sent

    def _decide(self) -> dict[str, Decision]:
        section, times = self.section, self._measure()
        settings = DecisionSettings(
            kind=section.kind,
            every=section.every,
            threshold=section.threshold,
            seconds_per_row=times.per_row,
            seconds_to_move=times.per_expert,
        )
        return {name: self.windows[name].decide(placement, settings) for name, placement in self.by_layer.items()}

    def _measure(self) -> SwitchTimes:
        """Return the times, which the ranks measure together at the first call. Collective then."""
        if self.times is None:
            weights, num_bytes = self._expert_size()
            rows_per_s, bytes_per_s = 0.0, 0.0
            if weights:
                dtype = next(iter(self._layers.values())).experts.w13.dtype
                rows_per_s = gemm_flops(dtype, self._mesh.device) / (FORWARD_BACKWARD * weights)
                bytes_per_s = self._transfer_rate() / num_bytes
            rates = torch.tensor([rows_per_s, bytes_per_s], dtype=torch.float64)
            rates_W2 = gather_values(rates, self._mesh.world_group, "agreeing on the time of a switch")
            slowest = rates_W2[(rates_W2 > 0).all(1)].amin(0)
            self.times = SwitchTimes(1 / float(slowest[0]), 1 / float(slowest[1]))
        return self.times

    def _expert_size(self) -> tuple[int, int]:
        """Return the weights of one expert on this rank, and the bytes that move with it; 0 without an MoE layer."""
        weights = num_bytes = 0
        states = self._optimizer.state_tensors()
        for name, layer in list(self._layers.items())[:1]:
            for item in parameters_of(layer, name, self._data_parallel).values():
                elements = max(item.value[:1].numel(), 1)
                weights += elements
                num_bytes += elements * item.value.element_size() * (1 + len(states.get(item.name, {})))
        return weights, num_bytes

    def _transfer_rate(self) -> float:
        """Return the bytes per second that this rank sends to the others of its expert grid. Collective."""
        group = self._mesh.group("etp", "ep")
        assert group is not None
        channel, size = channel_of(group), group.size()
        data = torch.zeros(size * PROBE_BYTES, dtype=torch.uint8, device=self._mesh.device)
        sizes = [PROBE_BYTES] * size
        channel.all_to_all(data, sizes, sizes, "measuring transfers")
        began = time.perf_counter()
        channel.all_to_all(data, sizes, sizes, "measuring transfers")
        if data.is_cuda:
            torch.cuda.synchronize()
        return (size - 1) * PROBE_BYTES / max(time.perf_counter() - began, 1e-9)
