"""Base class and options of the optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.runtime.event_layout import Kind as SpanKind
from moe_comm.runtime.events import communication_span
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.parallel.transfer_thread import Transfer

Kind = Literal["adamw", "sgd", "lamb", "muon"]
MuonScale = Literal["match_adamw", "original"]


@dataclass(frozen=True)
class OptimizerOptions:
    """Kind and hyperparameters of an optimizer. The learning rate is passed to each step.

    Args:
        kind: "adamw", "sgd", "lamb" or "muon".
        betas, eps: parameters of AdamW and LAMB, also of the AdamW part of Muon.
        weight_decay: decoupled weight decay of matrices; SGD adds it to the gradient.
        momentum, nesterov: parameters of SGD and Muon.
        newton_schulz_steps: Newton-Schulz iterations of Muon.
        newton_schulz_dtype: dtype of the iterations; None: bf16 on CUDA, else fp32.
        muon_scale: "match_adamw": 0.2 sqrt(max(rows, columns)), for updates of the same magnitude as AdamW and the
            same learning rate (arXiv 2502.16982). "original": sqrt(max(1, rows / columns)).
        muon_excludes: name patterns (with ``*``) of matrices that Muon updates with AdamW, in addition to all
            parameters that are not matrices.
    """

    kind: Kind = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    newton_schulz_steps: int = 5
    newton_schulz_dtype: torch.dtype | None = None
    muon_scale: MuonScale = "match_adamw"
    muon_excludes: tuple[str, ...] = ("*embed*", "*head.*", "*norm*", "*router*")

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"kind must be one of {', '.join(get_args(Kind))}; got {self.kind!r}")
        if self.muon_scale not in get_args(MuonScale):
            raise ConfigError(f"muon_scale must be one of {', '.join(get_args(MuonScale))}; got {self.muon_scale!r}")
        if not all(0 <= beta < 1 for beta in self.betas) or not 0 <= self.momentum < 1:
            raise ConfigError(f"betas and momentum must be in [0, 1); got {self.betas} and {self.momentum}")
        if self.eps <= 0 or self.weight_decay < 0 or self.newton_schulz_steps < 1:
            raise ConfigError(
                f"eps must be positive, weight_decay at least 0, newton_schulz_steps at least 1; got {self.eps}, "
                f"{self.weight_decay}, {self.newton_schulz_steps}"
            )
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov requires a momentum above 0")


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
