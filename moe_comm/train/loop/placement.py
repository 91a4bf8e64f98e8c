"""Placement of experts during training: the window of loads, the decisions, and the switches.

step   loads of all layers ──▶ a window of the last steps for each layer
every ``every`` steps: each rank decides for each layer from the same integers (``topology.rebalance``)
         optimizer ─▶ move masters and state of experts ─▶ publish weights ─▶ next step
         (state: during the next step, where transfers overlap with the passes)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_comm.comm.agree import compare, digest
from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.load import LayerLoad, moe_layers
from moe_comm.layers.moe.relocation import moved_state
from moe_comm.layers.parallel.collectives import channel_of, gather_values, sum_values
from moe_comm.layers.transformer.model import Transformer
from moe_comm.observe.records import PlacementLine
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.topology import EXPERT_AXES, ParallelMesh, Placement
from moe_comm.topology.load_window import MOST_MEMORY, LoadWindow
from moe_comm.topology.rebalance import Decision, DecisionSettings
from moe_comm.train.checkpoint.exchange import gather_or_raise
from moe_comm.train.metrics import PlacementReport
from moe_comm.train.optim import Optimizer
from moe_comm.train.parallel import DataParallel
from moe_comm.train.parallel.relocation import declare_placement, expert_size, parameters_of, relocate_experts
from moe_comm.train.sections import PlacementSection

FORWARD_BACKWARD = 6
"""FLOPs of a row for each weight of its expert, in forward and backward."""
PROBE_BYTES = 1 << 20
"""Bytes that each rank sends to each other one in the measurement of the transfer rate."""
NUMBER_BYTES, LAYER_BYTES = 16, 1024
"""Upper limits of the JSON of a load or of the owner of an expert, and of the names and keys of a layer."""


@dataclass(frozen=True)
class SwitchTimes:
    """Seconds of one row on its rank, and of moving one expert; equal on all ranks."""

    per_row: float
    per_expert: float


@dataclass(frozen=True)
class _Saved:
    """The placements and windows of loads of all MoE layers in a checkpoint."""

    placements: dict[str, Placement]
    windows: dict[str, LoadWindow]


class ExpertPlacements:
    """The placements of all MoE layers of a run, and the loads of the last steps. Equal on all ranks.

    Args:
        stages: this rank's stages of the model.
        names: names of all MoE layers of the whole model.
        num_experts: real experts of each layer.

    Attributes:
        by_layer: the placement of each layer.
        windows: the loads from which the next decision of each layer is made.
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
        self._first = section.first(num_experts, self._mesh.size("ep"))
        self.by_layer = dict.fromkeys(names, self._first)
        self.windows = {name: LoadWindow(section.window) for name in names}
        self.times: SwitchTimes | None = None
        self._reserved = False

    @property
    def active(self) -> bool:
        """Whether placements can change."""
        return self.section.kind != "fixed" and self._mesh.size("ep") > 1 and bool(self.by_layer)

    def after_optimizer(self, step: int, loads: Mapping[str, LayerLoad]) -> PlacementReport | None:
        """Record the loads of ``step`` (from 1), and switch placements if a decision is due. Collective.

        Call it between the optimizer's step and ``DataParallel.publish``.

        Returns:
            The decisions and the resulting transfers; None if no decision is due.
        """
        if not self.active:
            return None
        if not self._reserved:
            self._reserved = True  # measured here, because the optimizer has its state after its first step
            for name, layer in list(self._layers.items())[:1]:
                _, num_bytes = expert_size(layer, name, self._data_parallel, self._optimizer.state_tensors())
                # For a switch in which half of the experts leave this rank: the first one would wait for new pages.
                group = self._mesh.group(*EXPERT_AXES[:-1])
                assert group is not None
                channel_of(group).reserve(max(layer.placement.homes_per_rank) // 2 * num_bytes)
        experts = next(iter(self.by_layer.values())).num_experts
        for name, window in self.windows.items():
            window.add(loads[name].load_E[:experts].tolist())
        if step % self.section.every or any(len(window.recent) < window.size for window in self.windows.values()):
            return None
        decisions = self._decide()
        lines = [PlacementLine.of(step, name, decision, self.by_layer[name]) for name, decision in decisions.items()]
        began = self._now()
        sent = self.switch(
            {name: decision.placement for name, decision in decisions.items() if decision.placement is not None}
        )
        moved = sum_values(torch.tensor([float(sent)], dtype=torch.float64, device="cpu"), self._mesh.world_group)
        return PlacementReport.of(lines, int(moved), self._now() - began)

    def state(self) -> dict[str, Any]:
        """Return the JSON state of placements and window."""
        windows = {name: window.state() for name, window in self.windows.items()}
        placements = {name: json.loads(placement.to_json()) for name, placement in self.by_layer.items()}
        return {"mapping": str(self._mesh.config), "layers": placements, "windows": windows}

    @property
    def most_state_bytes(self) -> int:
        """Upper limit of the size of ``state`` as JSON; 0 if placements cannot change."""
        if not self.active:
            return 0
        # Two placements with owners and order, and the loads.
        numbers = self._first.num_experts * (4 + (1 + MOST_MEMORY) * self.section.window)
        return len(self.by_layer) * (NUMBER_BYTES * numbers + LAYER_BYTES)

    def load(self, state: object, *, move: bool) -> None:
        """Restore a result of ``state``; that of another mapping is ignored. Collective with ``move``.

        Args:
            state: the state; None for a checkpoint without one.
            move: the loaded weights are those of the present placement and are moved. Otherwise they are those of the
                saved one. Call ``DataParallel.publish`` afterwards.
        """
        loaded: list[_Saved | None] = []

        def read() -> int:
            loaded.append(self._read(state))
            return digest(loaded[0])

        if len(set(gather_or_raise(self._mesh.world_group, read))) > 1:
            raise CheckpointError("the ranks have read different placements of experts from the checkpoint")
        saved = loaded[0]
        if saved is None:
            return
        self.windows = saved.windows
        changed = {name: placement for name, placement in saved.placements.items() if placement != self.by_layer[name]}
        if move:
            self._move(changed)
            return
        for name, placement in changed.items():
            if name in self._layers:
                declare_placement(self._layers[name], name, placement, self._data_parallel)
            self.by_layer[name] = placement

    def switch(self, placements: Mapping[str, Placement]) -> int:
        """Move the experts of some layers. Collective, between two steps; call ``DataParallel.publish`` afterwards.

        Args:
            placements: the new placement of each layer that switches.

        Returns:
            Bytes that this rank sent. It sends nothing for layers of other pipeline stages.

        Raises:
            ConfigError: a placement does not fit; on every rank, before experts move.
            RankMismatch: ranks pass different placements; on every rank, before experts move.
            PeerDied, PeerTimeout: a rank failed. Layers that have not been moved keep their placement.
        """
        fault: ConfigError | None = None
        try:
            self._check(placements)
        except ConfigError as error:
            fault = error
        if self._mesh.world_group is not None:
            same = {
                name: f"version {placement.version} ({placement.digest:x})"
                for name, placement in sorted(placements.items())
            }
            compare(channel_of(self._mesh.world_group), "a relocation", {"placement of experts": same}, fault=fault)
        elif fault is not None:
            raise fault
        return self._move(placements)

    def _check(self, placements: Mapping[str, Placement]) -> None:
        """Raise ConfigError if experts of a layer on this rank cannot move."""
        for name, placement in placements.items():
            if name not in self.by_layer:
                raise ConfigError(f"the model has no MoE layer {name!r}; it has {', '.join(self.by_layer)}")
            if name in self._layers:
                states = self._optimizer.state_tensors()
                self._layers[name].check_placement(placement)
                for item in parameters_of(self._layers[name], name, self._data_parallel).values():
                    moved_state(item.name, item.value, states.get(item.name, {}))  # raises ConfigError

    def _move(self, placements: Mapping[str, Placement]) -> int:
        """Move the experts to ``placements``, which the ranks have checked; return the bytes that this rank sent."""
        total, states = 0, self._optimizer.state_tensors()
        for name, placement in placements.items():
            if name in self._layers:
                sent, of_state = relocate_experts(self._layers[name], name, placement, self._data_parallel, states)
                total += sent
                if of_state is not None:
                    self._optimizer.in_flight.append(of_state)
            self.by_layer[name] = placement
        return total

    def _read(self, state: object) -> _Saved | None:
        """Return the placements and windows of ``state``; None if it is of another mapping."""
        if not isinstance(state, dict) or state.get("mapping") != str(self._mesh.config):
            return None
        try:
            saved = {
                name: self._without_copies(Placement.from_json(json.dumps(state["layers"][name])))
                for name in self.by_layer
            }
            self._check(saved)
            size, windows = self.section.window, state["windows"]
            return _Saved(
                saved, {name: LoadWindow.of(size, windows[name], placement) for name, placement in saved.items()}
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the placement of experts in the checkpoint is damaged: {error!r}") from error

    def _without_copies(self, saved: Placement) -> Placement:
        """Return a saved placement with the slots of this run, without the copies that older versions trained."""
        return replace(saved, owners=tuple((home,) for home in saved.homes), slots=self._first.slots)

    def _decide(self) -> dict[str, Decision]:
        section, times = self.section, self._measure()
        settings = DecisionSettings(
            every=section.every,
            threshold=section.threshold,
            seconds_per_row=times.per_row,
            seconds_to_move=times.per_expert,
            window=section.window,
        )
        return {name: self.windows[name].decide(placement, settings) for name, placement in self.by_layer.items()}

    def _measure(self) -> SwitchTimes:
        """Return the times, which the ranks measure together. The first call is collective."""
        if self.times is None:
            rates_2 = [0.0, 0.0]
            for name, layer in list(self._layers.items())[:1]:
                weights, num_bytes = expert_size(layer, name, self._data_parallel, self._optimizer.state_tensors())
                dtype = layer.experts.w13.dtype
                bytes_per_s = self._transfer_rate()
                rates_2 = [
                    gemm_flops(dtype, self._mesh.device) / (FORWARD_BACKWARD * weights),
                    bytes_per_s / max(num_bytes, 1),
                ]
            rates = torch.tensor(rates_2, dtype=torch.float64, device="cpu")
            rates_W2 = gather_values(rates, self._mesh.world_group, "agreeing on the time of a switch")
            slowest = rates_W2[(rates_W2 > 0).all(1)].amin(0)
            self.times = SwitchTimes(*(1 / float(rate) for rate in slowest))
        return self.times

    def _transfer_rate(self) -> float:
        """Return the bytes per second that this rank sends to the others of its expert grid. Collective."""
        group = self._mesh.group("etp", "ep")
        assert group is not None
        channel, size = channel_of(group), group.size()
        data = torch.zeros(size, PROBE_BYTES, dtype=torch.uint8, device=self._mesh.device)
        channel.swap(data, "measuring transfers")
        began = self._now()
        channel.swap(data, "measuring transfers")
        return (size - 1) * PROBE_BYTES / max(self._now() - began, 1e-9)

    def _now(self) -> float:
        """Return the time in seconds, after a GPU has completed its work."""
        if self._mesh.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
