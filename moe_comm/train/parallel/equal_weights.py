"""Comparison of the weights that several ranks of a run hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_comm.errors import RankMismatch
from moe_comm.layers.data_parallel.equal_tensors import compare_tensors
from moe_comm.layers.data_parallel.replicas import replicated_tensors
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.ranks import Ranks

ADVICE = (
    "The ranks of this run started with other weights (model.pretrained with different files), or an update was wrong "
    "on a rank: check the memory of these ranks, and resume from a checkpoint"
)


def check_equal_weights(
    owned: Sequence[OwnedParameter], stages: Sequence[nn.Module], mesh: ParallelMesh, ranks: Ranks
) -> None:
    """Compare the master weights that several ranks own, and the persistent buffers of a stage. Collective.

    Each rank reads its master weights once. Weights that are sharded over all data-parallel ranks have no replicas.

    Raises:
        RankMismatch: they differ; on every rank. The message names the first ones and the ranks of the group.
    """
    by_axes: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for item in owned:
        if item.replicas == 1:
            by_axes.setdefault(item.replicated_axes, {})[item.name] = item.value
    for stage in stages:
        params = {id(param) for param in stage.parameters()}
        buffers = {name: value for name, value in replicated_tensors(stage) if id(value) not in params}
        by_axes.setdefault(("tp", "cp", "dp"), {}).update(buffers)
    fault: RankMismatch | None = None
    for axes, tensors in sorted(by_axes.items()):
        group = mesh.group(*axes) if tensors and axes else None
        if group is None:
            continue
        try:
            compare_tensors(tensors, channel_of(group), f"the weights over {' x '.join(axes)}", ADVICE)
        except RankMismatch as error:  # the other groups are compared, too, as their ranks do not know of it
            fault = fault or error
    failed = torch.zeros(ranks.world, dtype=torch.float32, device="cpu")
    failed[ranks.rank] = fault is not None
    failed = ranks.sum(failed)
    if fault is not None:
        raise fault
    if failed.any():
        raise RankMismatch(f"weights differ between the ranks {failed.nonzero().flatten().tolist()}. {ADVICE}")
