"""What the optimizers have in common: state by parameter name, which parameters decay, and shared settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.owned import Owned

Kind = Literal["adamw", "sgd", "lamb", "muon"]
MuonScale = Literal["match_adamw", "original"]


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer, and its settings; the learning rate comes with each step.

    betas, eps: of AdamW and LAMB, and of what Muon leaves to AdamW. weight_decay: on matrices only, decoupled but
        for SGD, whose gradient it joins. momentum, nesterov: of SGD and Muon.
    newton_schulz_steps: of Muon. newton_schulz_dtype: it computes in; None: bf16 on CUDA, else fp32.
    muon_scale: "match_adamw": 0.2 sqrt(max(rows, columns)), so that an update is as large as AdamW's and the same
        learning rate serves (arXiv 2502.16982); "original": sqrt(max(1, rows / columns)).
    muon_excludes: parameters by name (* for any text) that Muon leaves to AdamW, beside all that are no matrices.
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
            raise ConfigError(f"betas and momentum must lie in [0, 1); got {self.betas} and {self.momentum}")
        if self.eps <= 0 or self.weight_decay < 0 or self.newton_schulz_steps < 1:
            raise ConfigError(
                f"eps must be positive, weight_decay at least 0, newton_schulz_steps at least 1; got {self.eps}, "
                f"{self.weight_decay}, {self.newton_schulz_steps}"
            )
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov needs a momentum above 0")


class Optimizer(ABC):
    """Updates what a rank owns, from ``grad`` as ``DataParallel.reduce`` and ``clip_`` leave it.

    State of each parameter is a dict of tensors of the shape of ``Owned.value`` (so it has the parameter's sharding and
    share), there from the start. ``steps``, the updates done, is all the other state there is.
    """

    def __init__(self, owned: Sequence[Owned], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        self.owned, self.mesh, self.options = list(owned), mesh, options
        self.steps = 0
        self._state: dict[str, dict[str, Tensor]] = {item.name: {} for item in self.owned}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all values. Collective for LAMB and Muon: every rank of the stage calls it."""
        self.steps += 1
        self._step(lr)

    @abstractmethod
    def _step(self, lr: float) -> None: ...

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """State by parameter name and state name: the live tensors, into which a checkpoint may load."""
        return {name: dict(state) for name, state in self._state.items()}

    def load_steps(self, steps: int) -> None:
        """Say how many updates the state has seen."""
        self.steps = steps

    def _make_state(self, owned: Sequence[Owned], *names: str) -> None:
        for item in owned:
            for name in names:
                self._state[item.name][name] = torch.zeros_like(item.value, requires_grad=False)

    def _decay(self, item: Owned) -> float:
        return self.options.weight_decay if is_matrix(item) else 0.0


def is_stack(item: Owned) -> bool:
    """Whether the first dimension counts experts, as that of every expert parameter does."""
    return item.sharding.expert and bool(item.sharding.shape)


def stacked(item: Owned, mesh: ParallelMesh) -> list[tuple[slice, slice]]:
    """Rows of the value of a stack, and which experts of the model they are."""
    found = {box.local[0].start: (box.local[0], box.whole[0]) for box in item.boxes(mesh)}
    return list(found.values())


def is_matrix(item: Owned) -> bool:
    """A matrix or a stack of one matrix per expert; no vectors, stacked vectors or norms."""
    return len(item.sharding.shape) - is_stack(item) >= 2 and "norm" not in item.name


def gradient(item: Owned) -> Tensor:
    """``grad`` of what is owned.

    Raises:
        InputError: there is none; ``DataParallel.reduce`` makes it.
    """
    if item.value.grad is None:
        raise InputError(f"{item.name} has no gradient; call DataParallel.reduce before the optimizer's step")
    return item.value.grad
