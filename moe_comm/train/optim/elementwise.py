"""torch's AdamW (arXiv 1711.05101) and SGD on owned shards, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.topology import ParallelMesh
from moe_comm.train.optim.base import Optimizer, gradient
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.sections import OptimizerOptions


class _TorchOptimizer(Optimizer):
    """A torch optimizer with preallocated, named state."""

    _torch: torch.optim.Optimizer | None

    def _groups(self, owned: Sequence[OwnedParameter]) -> list[dict[str, Any]]:
        """Return the parameter groups with and without weight decay, without empty parameters."""
        nonempty = [item for item in owned if item.value.numel()]
        groups = [
            {"params": [item.value for item in nonempty if self._decay(item) == decay], "weight_decay": decay}
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


class AdamW(_TorchOptimizer):
    """AdamW, fused on CPU and CUDA. State: ``exp_avg``, ``exp_avg_sq``."""

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
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


class SGD(_TorchOptimizer):
    """SGD. With momentum, the state is ``momentum_buffer``."""

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        groups = self._groups(self.owned)
        self._torch = None
        if groups:
            self._torch = torch.optim.SGD(groups, lr=0.0, momentum=options.momentum_of_kind, foreach=True)
        if options.momentum_of_kind:
            self._make_state(self.owned, "momentum_buffer")
            for item in self.owned:
                if self._torch is not None and item.value.numel():
                    # With a zero buffer the first step sets it to the gradient, as torch does.
                    self._torch.state[item.value] = dict(self._state[item.name])
