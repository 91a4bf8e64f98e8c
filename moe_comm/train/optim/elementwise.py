"""AdamW (arXiv 1711.05101) and SGD: torch's own, on what each rank owns. No rank needs another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.topology import ParallelMesh
from moe_comm.train.optim.base import Optimizer, OptimizerOptions, gradient
from moe_comm.train.parallel.owned import Owned


class _Torch(Optimizer):
    """One of torch's optimizers, whose state is made beforehand and known by name."""

    _torch: torch.optim.Optimizer | None

    def _groups(self, owned: Sequence[Owned]) -> list[dict[str, Any]]:
        """Parameters with and without weight decay; empty ones have nothing to update."""
        kept = [item for item in owned if item.value.numel()]
        groups = [
            {"params": [item.value for item in kept if self._decay(item) == decay], "weight_decay": decay}
            for decay in dict.fromkeys((self.options.weight_decay, 0.0))
        ]
        return [group for group in groups if group["params"]]

    def _step(self, lr: float) -> None:
        for item in self.owned:
            gradient(item)
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._torch.step()


class AdamW(_Torch):
    """AdamW, one fused pass on CPU and CUDA. State: ``exp_avg``, ``exp_avg_sq``."""

    def __init__(self, owned: Sequence[Owned], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        self._make_state(self.owned, "exp_avg", "exp_avg_sq")
        self._counts: list[Tensor] = []
        self._torch = None
        groups = self._groups(self.owned)
        if not groups:
            return
        fused = all(item.value.device.type in ("cpu", "cuda") for item in self.owned)
        self._torch = torch.optim.AdamW(
            groups, lr=0.0, betas=options.betas, eps=options.eps, fused=fused, foreach=None if fused else True
        )
        for item in self.owned:
            if item.value.numel():
                count = torch.zeros((), dtype=torch.float32, device=item.value.device if fused else "cpu")
                self._counts.append(count)
                self._torch.state[item.value] = {"step": count, **self._state[item.name]}

    def load_steps(self, steps: int) -> None:
        super().load_steps(steps)
        for count in self._counts:
            count.fill_(steps)


class SGD(_Torch):
    """SGD, with momentum if that is not 0. State: ``momentum_buffer`` then."""

    def __init__(self, owned: Sequence[Owned], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        groups = self._groups(self.owned)
        self._torch = None
        if groups:
            self._torch = torch.optim.SGD(
                groups, lr=0.0, momentum=options.momentum, nesterov=options.nesterov, foreach=True
            )
        if options.momentum:
            self._make_state(self.owned, "momentum_buffer")
            for item in self.owned:
                if self._torch is not None and item.value.numel():
                    # From zero, the first step's buffer is its gradient, which is what torch starts from.
                    self._torch.state[item.value] = dict(self._state[item.name])
