"""Base class of the optimizers, and the learning rate.

lr        ┌──cosine──╮            ┌──wsd─────────────┐           ┌──constant───────
         ╱            ╲          ╱                    ╲         ╱
final   ╱              ╰──      ╱                      ╲──     ╱
        warmup     steps        warmup      steps - decay      warmup
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.runtime.event_layout import Kind as SpanKind
from moe_comm.runtime.events import communication_span
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.parallel.transfer_thread import Transfer
from moe_comm.train.sections import OptimizerOptions


class Optimizer(ABC):
    """Update the owned shards from their ``grad``, after ``DataParallel.reduce`` and ``clip_``.

    The state of a parameter is a dict of tensors with the shape and sharding of ``OwnedParameter.value``, allocated by
    the constructor. The only other state is ``steps``, the number of completed steps.

    Attributes:
        in_flight: transfers that write the state. ``step`` and ``state_tensors`` wait for them and raise their errors.
    """

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        self.owned, self.mesh, self.options = list(owned), mesh, options
        self.steps = 0
        self.in_flight: list[Transfer] = []
        self._state: dict[str, dict[str, Tensor]] = {item.name: {} for item in self.owned}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all values. Collective for LAMB and Muon: every rank of the stage calls it."""
        self.wait_state()
        self.steps += 1
        self._step(lr)

    @abstractmethod
    def _step(self, lr: float) -> None: ...

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """State by parameter name and state name: the live tensors, into which a checkpoint may load."""
        self.wait_state()
        return {name: dict(state) for name, state in self._state.items()}

    def wait_state(self) -> None:
        """Wait for the transfers in flight.

        Raises:
            PeerDied, PeerTimeout: a rank failed.
        """
        while self.in_flight:
            with communication_span(SpanKind.COLLECTIVE, "wait for the state of moved experts"):
                self.in_flight.pop(0).wait()

    def load_steps(self, steps: int) -> None:
        """Set the number of completed steps, after loading the state."""
        self.steps = steps

    def _make_state(self, owned: Sequence[OwnedParameter], *names: str) -> None:
        for item in owned:
            for name in names:
                self._state[item.name][name] = torch.zeros_like(item.value, requires_grad=False)

    def _decay(self, item: OwnedParameter) -> float:
        return self.options.weight_decay if is_matrix(item) else 0.0


def is_stack(item: OwnedParameter) -> bool:
    """Return whether the parameter is a stack over experts in its first dimension. All expert parameters are."""
    return item.sharding.expert and bool(item.sharding.shape)


def stacked(item: OwnedParameter, mesh: ParallelMesh) -> list[tuple[slice, slice]]:
    """Return pairs of row ranges of a stack's value and the corresponding global experts."""
    ranges = {box.local[0].start: (box.local[0], box.full[0]) for box in item.boxes(mesh)}
    return list(ranges.values())


def is_matrix(item: OwnedParameter) -> bool:
    """Return whether the parameter is a matrix, or a stack with one matrix per expert."""
    return len(item.sharding.shape) - is_stack(item) >= 2 and "norm" not in item.name


def gradient(item: OwnedParameter) -> Tensor:
    """Return the reduced gradient. Raises ``InputError`` if ``DataParallel.reduce`` was not called."""
    if item.value.grad is None:
        raise InputError(f"{item.name} has no gradient; call DataParallel.reduce before the optimizer's step")
    return item.value.grad


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0, in a run of ``steps`` steps. After the last it is constant.

    The first warm-up step has lr / warmup, the last one lr.
    """
    o = options
    if step < 0:
        raise ConfigError(f"steps count from 0; got {step}")
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    if o.schedule == "constant":
        return o.lr
    begin = o.warmup
    if o.schedule == "wsd":
        begin = max(begin, steps - o.decay) - 1  # the step before the first decay step
        if o.decay == 0:
            return o.lr
    progress = min(max(step - begin, 0) / max(steps - 1 - begin, 1), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if o.schedule == "cosine" else 1 - progress
    return o.lr * (o.final_lr + (1 - o.final_lr) * remaining)
