"""An embedding that is also the head: held by the first and the last stage, and one parameter all the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_comm.errors import ConfigError
from moe_comm.layers.collectives import sum_values
from moe_comm.topology import FoldedMesh
from moe_comm.train.pipeline.stages import StagePlan


def sum_tied_gradients(
    plan: StagePlan, mesh: FoldedMesh, first: nn.Parameter | None, last: nn.Parameter | None
) -> None:
    """Give both copies of a tied parameter the sum of their gradients, the same bits. After a step's backward.

    Both copies start from the same weights and get the same gradient, so an optimizer keeps them equal. In norms
    and checkpoints the parameter counts once: see ``is_tied_copy``. Collective over ``mesh.tied_group`` where the
    two stages are on two ranks; where they are on one (without pipeline, and with a V) nothing is sent. Middle ranks
    may call it too.

    It commutes with the sum over a stage's ranks, as long as both copies have theirs before or both after: gradients
    may be whole or, alike on both, FSDP's shards.

    Args:
        first: the embedding's weight, on the rank that holds the first stage; else None.
        last: the head's weight, on the rank that holds the last stage; else None. It may be ``first`` itself.

    Raises:
        ConfigError: a parameter is missing that this rank must have, or has another shape than its copy.
        PeerDied, PeerTimeout: the other end of the pipeline is gone.
    """
    place = mesh.place["pp"]
    for name, parameter, rank in (("first", first, plan.first_rank), ("last", last, plan.last_rank)):
        if (parameter is not None) != (place == rank):
            holds = "holds" if place == rank else "does not hold"
            raise ConfigError(
                f"pipeline rank {place} {holds} the {name} stage, but its tied parameter is "
                f"{'missing' if parameter is None else 'given'}"
            )
    if first is last:  # one parameter, whose gradient autograd has summed; or none here
        return
    if first is not None and last is not None:
        if first.shape != last.shape:
            raise ConfigError(f"tied parameters differ in shape: {tuple(first.shape)} and {tuple(last.shape)}")
        total = _gradient(first).add_(_gradient(last))
        _gradient(last).copy_(total)
        return
    mine = first if first is not None else last
    assert mine is not None
    gradient = _gradient(mine)
    gradient.copy_(sum_values(gradient, mesh.tied_group))


def is_tied_copy(plan: StagePlan, stage: int) -> bool:
    """Whether a tied parameter on ``stage`` is the copy, which norms and checkpoints leave out."""
    return plan.num_stages > 1 and plan.is_last(stage)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The local part of the gradient, to be written in place; zeros where there was none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    local: Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
    return local
