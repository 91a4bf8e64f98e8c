"""Gradients of replicated and of expert parameters: summed, measured and clipped.

The loss of each rank is a sum over its tokens divided by the global number of tokens, so every gradient is a plain
sum over ranks and no parameter needs a scale of its own:

- replicated parameters: each rank has the part from its tokens; one all-reduce adds them up;
- experts: the backward pass brought the rows of all ranks to the expert's owner, whose gradient is complete already;
  with several replicas of the experts (edp), each replica has the part from its ranks, and they are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from moe_comm.errors import MoeCommError
from moe_comm.train.ranks import Ranks, all_sum


class GradientBucket:
    """Parameters whose gradients lie one after another in one buffer: one all-reduce, one norm, no copies."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.params = list(params)
        first = self.params[0] if self.params else torch.empty(0)
        self.flat = torch.zeros(sum(p.numel() for p in self.params), dtype=torch.float32, device=first.device)
        parts = torch.split(self.flat, [p.numel() for p in self.params])
        self._views = [part.view(p.shape) for p, part in zip(self.params, parts, strict=True)]
        self.zero()

    def zero(self) -> None:
        """Set every gradient to zero, and back into the buffer if someone replaced it."""
        self.flat.zero_()
        for param, view in zip(self.params, self._views, strict=True):
            param.grad = view

    def check(self) -> None:
        """Raise if a gradient was replaced since ``zero``: the sum over ranks would silently miss it."""
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is None or param.grad.data_ptr() != view.data_ptr():
                raise MoeCommError(
                    f"the gradient of a parameter {tuple(param.shape)} is no longer in its bucket; "
                    "call zero() of the bucket, not zero_grad(set_to_none=True)"
                )


class Gradients:
    """The gradients of a model whose experts are spread over ``ranks.ep_group``."""

    def __init__(self, replicated: Sequence[Parameter], experts: Sequence[Parameter], ranks: Ranks) -> None:
        self.replicated = GradientBucket(replicated)
        self.experts = GradientBucket(experts)
        self.ranks = ranks

    def zero(self) -> None:
        self.replicated.zero()
        self.experts.zero()

    def reduce(self) -> None:
        """Add up what each rank has of every gradient. Collective."""
        for bucket, group in ((self.replicated, self.ranks.world_group), (self.experts, self.ranks.edp_group)):
            bucket.check()
            if bucket.params:
                all_sum(bucket.flat, group)

    def norm(self) -> float:
        """The 2-norm of the whole model's gradient, the same on every rank. Collective, after ``reduce``.

        Replicated gradients count once; the squares of the experts' are summed over the ranks that hold them.
        """
        square = all_sum(self.experts.flat.double().square().sum().view(1), self.ranks.ep_group)
        return float((square + self.replicated.flat.double().square().sum()).sqrt())

    def scale(self, factor: float) -> None:
        self.replicated.flat.mul_(factor)
        self.experts.flat.mul_(factor)


def clip(gradients: Gradients, largest: float) -> float:
    """Scale all gradients down to norm ``largest`` (0: any) if it is larger; returns the norm before. Collective."""
    norm = gradients.norm()
    if 0 < largest < norm:
        gradients.scale(largest / norm)
    return norm
